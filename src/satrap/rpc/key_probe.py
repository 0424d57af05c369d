"""Finds out whether a ZeroMQ server requires keys, from its greeting (ZMTP 3.1), read over a plain socket.

A server whose secret key does not belong to the public key that a client has for it closes the connection without a
word, and ZeroMQ reconnects forever. The greeting, which precedes all keys, tells such a server from a port at which
nothing answers yet.
"""

import socket
from contextlib import suppress

from satrap.rpc.address import is_unix, split_address, unix_path

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_VERSION = bytes([3, 1])
_MECHANISM = b"CURVE".ljust(20, b"\0")
_BYTES = 64


def expects_keys(address: str, seconds: float) -> bool:
    """Return whether a ZeroMQ server that requires keys answers at the address within so many seconds."""
    sent = (_SIGNATURE + _VERSION + _MECHANISM).ljust(_BYTES, b"\0")
    received = b""
    with suppress(OSError), _connect(address, seconds) as connection:
        connection.sendall(sent)
        while len(received) < _BYTES and (data := connection.recv(_BYTES - len(received))):
            received += data
    start = len(_SIGNATURE) + len(_VERSION)
    is_zeromq = len(received) == _BYTES and received[0] == _SIGNATURE[0] and received[9] == _SIGNATURE[9]
    return is_zeromq and received[start:].startswith(_MECHANISM)


def _connect(address: str, seconds: float) -> socket.socket:
    if not is_unix(address):
        return socket.create_connection(split_address(address), seconds)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        connection.connect(str(unix_path(address)))
    except BaseException:
        connection.close()
        raise
    return connection
