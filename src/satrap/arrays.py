"""What a caller's arrays and numbers must be: turns them into what the core takes, or refuses with a clear error.

NumPy arrays are taken as they are. So is anything on the CPU that NumPy can read without interpreting it: a torch
tensor, an object with `__array__`, a buffer, DLPack; torch itself is never imported. Lists are refused: they have no
dtype, and a guessed one turns large ids into floats. Arrays that are not C-contiguous are copied, `out` excepted.
`where` names the table in what a function raises. No values are read here; the core looks for NaN in gradients.
"""

import numbers
from typing import Any

import numpy as np
from numpy.typing import NDArray

from satrap.config import Ftrl, Optimizer
from satrap.errors import InputError

LAST_STEP = 2**32 - 2
"""The largest batch number; steps are stored in 32 bits."""
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def as_ids(where: str, ids: object) -> NDArray[np.uint64]:
    """Ids as uint64 [n]; int64 is taken as its bit pattern."""
    array = _as_array(where, "ids", ids, "a uint64 or int64 array")
    if array.dtype not in (np.uint64, np.int64):
        raise InputError(
            f"{where}: ids are {array.dtype}; wanted uint64 (or int64, taken as its bit pattern): convert them, "
            "e.g. ids.astype(numpy.uint64)"
        )
    if array.ndim != 1:
        raise InputError(f"{where}: ids have the shape {array.shape}; wanted one dimension, e.g. ids.reshape(-1)")
    return np.require(array, requirements=("C", "A")).view(np.uint64)


def as_offsets(where: str, offsets: object, num_tables: int, num_ids: int) -> NDArray[np.int64]:
    """Where each table's ids begin: int64 [tables + 1], from 0 to the number of ids, never falling."""
    array = _as_array(where, "offsets", offsets, "an int64 array")
    if array.dtype != np.int64 or array.shape != (num_tables + 1,):
        raise InputError(
            f"{where}: offsets are {array.dtype} of shape {array.shape}; wanted int64 of shape ({num_tables + 1},): "
            "one more than there are tables"
        )
    array = np.require(array, requirements=("C", "A"))
    if array[0] != 0 or array[-1] != num_ids or np.any(array[1:] < array[:-1]):
        raise InputError(f"{where}: offsets must rise from 0 to the number of ids, {num_ids}; found {array}")
    return array


def as_gradients(where: str, gradients: object, shape: tuple[int, ...] | None) -> NDArray[np.float32]:
    """Gradients as float32 of exactly this shape; None: in one dimension, whose size the core knows."""
    array = _as_array(where, "gradients", gradients, "a float32 array")
    if array.dtype != np.float32:
        raise InputError(f"{where}: gradients are {array.dtype}; wanted float32: convert them")
    if shape is None and array.ndim != 1:
        raise InputError(
            f"{where}: gradients have the shape {array.shape}; wanted one dimension, as lookup gave the rows"
        )
    if shape is not None and array.shape != shape:
        raise InputError(f"{where}: gradients have the shape {array.shape}; wanted {shape}, one row for each id")
    return np.require(array, requirements=("C", "A"))


def as_out(where: str, out: object, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The caller's own memory to write rows into."""
    wanted = f"a float32 array of shape {shape}, C-contiguous and writable"
    array = _as_array(where, "out", out, wanted)
    if array.dtype != np.float32 or array.shape != shape:
        raise InputError(f"{where}: out is {array.dtype} of shape {array.shape}; wanted {wanted}")
    if not (array.flags.c_contiguous and array.flags.aligned and array.flags.writeable):
        raise InputError(f"{where}: out is not contiguous, not aligned or read-only; wanted {wanted}")
    # Memory that NumPy had to copy lies elsewhere each time, and writing into a copy would be lost.
    again = array if array is out else _as_array(where, "out", out, wanted)
    if array.ctypes.data != again.ctypes.data:
        raise InputError(f"{where}: out is a {type(out).__name__} that NumPy can only copy; wanted {wanted}")
    return array


def as_step(where: str, name: str, step: object, low: int = 1, high: int = LAST_STEP) -> int:
    """A batch number."""
    if isinstance(step, bool) or not isinstance(step, numbers.Integral):
        raise InputError(f"{where}: {name} is {step!r} ({type(step).__name__}); wanted an integer from {low} to {high}")
    if not low <= int(step) <= high:
        raise InputError(f"{where}: {name} is {int(step)}; wanted an integer from {low} to {high}")
    return int(step)


def as_lr(where: str, lr: object, optimizer: Optimizer) -> float:
    """A learning rate that this optimizer can take."""
    above = isinstance(optimizer, Ftrl)  # its formula divides by lr
    wanted = f"a number {'above' if above else 'of at least'} 0 that float32 can hold"
    if isinstance(lr, bool) or not isinstance(lr, numbers.Real):
        raise InputError(f"{where}: lr is {lr!r} ({type(lr).__name__}); wanted {wanted}")
    number: Any = lr
    if not 0 <= number <= _LARGEST_FLOAT32 or (above and number == 0):
        raise InputError(f"{where}: lr is {number}; wanted {wanted}")
    return float(number)


def _as_array(where: str, name: str, value: object, wanted: str) -> NDArray[Any]:
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(f"{where}: {name} is a masked array, whose mask would be lost; wanted {wanted}")
    if isinstance(value, np.ndarray):
        return np.asarray(value)  # a plain view of a subclass
    try:
        if hasattr(value, "__array__") or _is_buffer(value):
            return np.asarray(value)
        if hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
    except Exception as error:  # whatever a foreign type raises when it cannot be read from here
        raise InputError(
            f"{where}: {name} is a {type(value).__name__} that cannot be read as an array ({error}); wanted {wanted} "
            "on the CPU; of a tensor give .detach().cpu()"
        ) from error
    raise InputError(f"{where}: {name} is a {type(value).__name__}; wanted {wanted}: make it one with numpy.asarray")


def _is_buffer(value: object) -> bool:
    try:
        memoryview(value).release()  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
