"""Exceptions as frames: an exception of the served object is raised again at the caller. Uses no socket.

An error reply has one JSON frame, [class name, text]. A subclass of SatrapError is raised as the same class, which is
looked up by name in satrap.errors; any other exception becomes an RpcError with its type and text. Only names are sent:
the caller neither runs nor imports code that the server names.
"""

import json

from satrap import errors
from satrap.errors import RpcError, SatrapError
from satrap.rpc.header import frames_in
from satrap.rpc.values import Frames, parse_json

_MAX_TEXT = 8192
_CLASSES = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, SatrapError)
}


def encode_error(error: BaseException) -> list[memoryview]:
    """Return the frame of an error reply."""
    text = str(error)
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]}... ({len(text)} characters)"
    return [memoryview(json.dumps([type(error).__name__, text]).encode())]


def decode_error(frames: Frames, method: str, address: str) -> SatrapError:
    """Return the exception to raise at the caller."""
    if isinstance(frames, bytes):
        frames = frames_in(frames)
    try:
        content = parse_json(frames[0]) if len(frames) == 1 else None
    except RpcError:
        content = None
    if not (isinstance(content, list) and len(content) == 2 and all(isinstance(part, str) for part in content)):
        return RpcError(f"{method} at {address} failed, and its error is not readable")
    name, text = content
    if name in _CLASSES:
        error = _CLASSES[name](text)
        error.add_note(f"raised by {method} at {address}")
        return error
    return RpcError(f"{method} at {address} failed with {name}: {text}")
