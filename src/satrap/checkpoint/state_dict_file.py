"""A state_dict as one safetensors file: tensors unchanged, everything else as JSON in the file's metadata.

There is no pickle: reading a file runs no code. A value that is neither a tensor nor JSON is refused when it is saved,
with its path in the state.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from satrap.config.durable import checksum, put_on_disk
from satrap.errors import CheckpointError
from satrap.storage.folder import Folder
from satrap.storage.local_folder import LocalFolder

_TENSOR, _TUPLE, _PAIRS, _FLOAT = "__tensor__", "__tuple__", "__pairs__", "__float__"


@dataclass(frozen=True, slots=True)
class FrozenState:
    """A copy of a state, which later changes of its tensors do not reach."""

    tree: Any
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, state: Any) -> Self:
        """Copy the state; raise CheckpointError if a value is neither a tensor nor plain data."""
        tensors: dict[str, Tensor] = {}
        return cls(_flatten(state, "state", tensors), tensors)

    def to_bytes(self) -> bytes:
        """Return the bytes of the file that `save` writes."""
        from safetensors.torch import save

        return bytes(save(self.tensors, metadata=self._metadata()))

    def save(self, folder: Folder, name: str) -> int:
        """Write the state to an object; return its checksum."""
        if not isinstance(folder, LocalFolder):
            data = self.to_bytes()
            folder.write(name, data)
            return checksum(data)
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = folder.path / name
        try:
            save_file(self.tensors, path, metadata=self._metadata())
        except SafetensorError as error:
            raise CheckpointError(f"{path} cannot be written: {error}") from error
        put_on_disk(path)
        return checksum(path.read_bytes())

    def _metadata(self) -> dict[str, str]:
        return {"tree": json.dumps(self.tree)}


def read_state(folder: Folder, name: str, crc32c: int) -> Any:
    """Return what `FrozenState.save` wrote, with its tensors on the CPU, if its checksum matches; else raise
    CheckpointError with the checkpoint to remove, which is the folder."""
    from safetensors import SafetensorError

    path = f"{folder}/{name}"
    try:
        data = folder.read(name)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; remove {folder} to use an older one"
        ) from error
    if checksum(data) != crc32c:
        raise CheckpointError(f"{path} is damaged: its checksum does not match; remove {folder} to use an older one")
    try:
        return state_of(data)
    except (SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; remove {folder} to use an older one") from error


def require_model(path: str, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the saved state is of another model."""
    if lines := differences(saved, expected):
        more = [f"and {len(lines) - 3} more"] if len(lines) > 3 else []
        raise CheckpointError(
            f"{path} is of another model: {'; '.join([*lines[:3], *more])}: build the same model, or use another folder"
        )


def state_bytes(state: Any) -> bytes:
    """Return the bytes of the file that `FrozenState.save` would write."""
    return FrozenState.of(state).to_bytes()


def state_of(data: bytes) -> Any:
    """Return the state that `state_bytes` encoded."""
    from safetensors.torch import load

    end = 8 + int.from_bytes(data[:8], "little")  # the end of the header, which `load` does not return
    return _build(json.loads(json.loads(data[8:end])["__metadata__"]["tree"]), load(data))


def _flatten(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    match value:
        case Tensor():
            name = f"{len(tensors)}:{where}"  # the number tells equal paths apart: {"a.b": x, "a": {"b": y}}
            tensors[name] = value.detach().to("cpu", copy=True).contiguous()
            return {_TENSOR: name}
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {_FLOAT: repr(value)}
        case tuple():
            return {_TUPLE: [_flatten(element, f"{where}.{i}", tensors) for i, element in enumerate(value)]}
        case list():
            return [_flatten(element, f"{where}.{i}", tensors) for i, element in enumerate(value)]
        case Mapping():
            pairs = [[key, _flatten(element, f"{where}.{key}", tensors)] for key, element in value.items()]
            if all(isinstance(key, str) for key, _ in pairs) and not any(key.startswith("__") for key, _ in pairs):
                return dict(pairs)
            if all(isinstance(key, str | int) for key, _ in pairs):
                return {_PAIRS: pairs}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}; expected tensors, numbers, strings, lists, tuples or dicts"
    )


def _build(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    match tree:
        case {"__tensor__": name}:
            return tensors[name]
        case {"__tuple__": items}:
            return tuple(_build(item, tensors) for item in items)
        case {"__pairs__": pairs}:
            return {key: _build(subtree, tensors) for key, subtree in pairs}
        case {"__float__": text}:
            return float(text)
        case dict():
            return {key: _build(subtree, tensors) for key, subtree in tree.items()}
        case list():
            return [_build(subtree, tensors) for subtree in tree]
    return tree


def differences(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Describe how two flat state_dicts differ in names, shapes and dtypes."""
    lines = [f"{name}: not in the checkpoint" for name in expected if name not in saved]
    lines += [f"{name}: only in the checkpoint" for name in saved if name not in expected]
    for name in expected:
        one, other = saved.get(name), expected[name]
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            lines.append(
                f"{name}: {tuple(one.shape)} {one.dtype} in the checkpoint, {tuple(other.shape)} {other.dtype} here"
            )
    return lines
