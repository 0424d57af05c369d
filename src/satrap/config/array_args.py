"""Checks of a caller's arrays and numbers: converts them to what the core takes, or raises InputError.

NumPy arrays are used without a copy. So is any CPU object that NumPy can read without interpreting it: a torch tensor,
an object with `__array__`, a buffer, DLPack; torch itself is never imported. A list of integers is taken as ids; other
lists are refused: they have no dtype, and a guessed one turns large ids into floats. Arrays that are not C-contiguous
are copied, except `out`. `where` names the table in the errors. The core checks the values of arrays: that offsets
rise, that gradients and weights are finite.
"""

import numbers
from typing import Any

import numpy as np
from numpy.typing import NDArray

from satrap.config.optimizers import SMALLEST_FTRL_LR, Ftrl, Optimizer
from satrap.config.validation import LARGEST_FLOAT32, LAST_STEP, check_integer, describe, kind_of
from satrap.errors import InputError

_HASH_STRINGS = "satrap.data.hashing.hash_strings(ids)"
_ROUNDS_TO_0 = 2.0**-150  # half the smallest float32 above 0


def as_ids(where: str, ids: object) -> NDArray[np.uint64]:
    """Return the ids as uint64 [n]; int64, or a list of integers, is taken as its bit pattern."""
    if isinstance(ids, list | tuple | range):
        return np.array([_as_id(f"{where}: ids[{place}]", number) for place, number in enumerate(ids)], np.uint64)
    array = _as_array(where, "ids", ids, "a uint64 or int64 array")
    if array.dtype not in (np.uint64, np.int64):
        advice = f"{array.dtype} cannot hold all ids: read them as integers"
        if _holds_strings(array):
            advice = f"make ids of strings with {_HASH_STRINGS}"
        elif array.dtype.kind not in "fc":
            advice = f"convert them, e.g. ids{'.to(torch.int64)' if _is_tensor(ids) else '.astype(numpy.uint64)'}"
        raise InputError(
            f"{where}: ids are {array.dtype}; expected uint64 (or int64, taken as its bit pattern): {advice}"
        )
    if array.ndim != 1:
        raise InputError(f"{where}: ids have the shape {array.shape}; expected one dimension, e.g. ids.reshape(-1)")
    return _contiguous(array).view(np.uint64)


def _as_id(where: str, number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or not -(2**63) <= number < 2**64:
        advice = f": make ids of strings with {_HASH_STRINGS}" if isinstance(number, str | bytes) else ""
        raise InputError(f"{where} is {describe(number)}; expected an integer from -2**63 to 2**64 - 1{advice}")
    return int(number) % 2**64


def as_offsets(where: str, offsets: object, size: int, meaning: str) -> NDArray[np.int64]:
    """Return the offsets, int64 [size], where tables or bags begin. There may be many, so the core checks their
    values."""
    array = _as_array(where, "offsets", offsets, "an int64 array")
    if array.dtype != np.int64 or array.shape != (size,):
        raise InputError(
            f"{where}: offsets are {array.dtype} of shape {array.shape}; expected int64 of shape ({size},): {meaning}"
        )
    return _contiguous(array)


def as_weights(where: str, weights: object) -> NDArray[np.float32]:
    """Return the weights of ids: float32 [n]."""
    array = _as_array(where, "weights", weights, "a float32 array")
    if array.dtype != np.float32 or array.ndim != 1:
        raise InputError(
            f"{where}: weights are {array.dtype} of shape {array.shape}; expected float32 of one dimension"
        )
    return _contiguous(array)


def as_gradients(where: str, gradients: object, shape: tuple[int, ...] | None) -> NDArray[np.float32]:
    """Return the gradients as float32 of exactly this shape; None: of one dimension, whose size the core knows."""
    if gradients is None:
        raise InputError(
            f"{where}: gradients is None; expected a float32 array: was requires_grad_() called on the rows, and did "
            "backward() reach them?"
        )
    array = _as_array(where, "gradients", gradients, "a float32 array")
    if array.dtype != np.float32:
        cast = ".float()" if _is_tensor(gradients) else ".astype(numpy.float32)"
        raise InputError(f"{where}: gradients are {array.dtype}; expected float32: pass gradients{cast}")
    if shape is None and array.ndim != 1:
        raise InputError(f"{where}: gradients have the shape {array.shape}; expected one dimension, as lookup returned")
    if shape is not None and array.shape != shape:
        raise InputError(f"{where}: gradients have the shape {array.shape}; expected {shape}, as lookup returned")
    return _contiguous(array)


def as_values(where: str, name: str, values: object, ids: NDArray[np.uint64], num_columns: int) -> NDArray[np.float32]:
    """Return the values that a caller writes into the rows of ids, as finite float32 with a line for each. Floats of 16
    bits are widened."""
    shape = len(ids), num_columns
    array = _as_array(where, name, values, "a float32 array")
    if array.dtype == np.float16:
        array = array.astype(np.float32)
    if array.dtype != np.float32 or array.shape != shape:
        raise InputError(f"{where}: {name} are {array.dtype} of shape {array.shape}; expected float32 of shape {shape}")
    if not (finite := np.isfinite(array)).all():
        line = int(np.argwhere(~finite)[0][0])
        number = array[line][~finite[line]][0]
        raise InputError(f"{where}: {name}[{line}] holds {number}, for id {ids[line]}; expected finite numbers")
    return _contiguous(array)


def as_out(where: str, out: object, shape: tuple[int, ...], name: str = "out") -> NDArray[np.float32]:
    """Return the array that the caller passed to receive rows; raise InputError if it does not fit."""
    expected = f"a float32 array of shape {shape}, C-contiguous and writable"
    array = _as_array(where, name, out, expected)
    if array.dtype != np.float32 or array.shape != shape:
        raise InputError(f"{where}: {name} is {array.dtype} of shape {array.shape}; expected {expected}")
    if not (array.flags.c_contiguous and array.flags.aligned and array.flags.writeable):
        raise InputError(f"{where}: {name} is not contiguous, not aligned or read-only; expected {expected}")
    # NumPy converts memory that it had to copy to another address each time, and writing into a copy would be lost.
    if array is not out and array.ctypes.data != _as_array(where, name, out, expected).ctypes.data:
        raise InputError(f"{where}: {name} is {kind_of(out)} that NumPy can only copy; expected {expected}")
    return array


def as_step(where: str, name: str, step: object, low: int = 1, high: int = LAST_STEP) -> int:
    """Return a batch number."""
    return check_integer(where, name, step, low, high, InputError)


def as_scale(where: str, scale: object) -> float:
    """Return the factor that all gradients of an update are multiplied by."""
    expected = "a number above 0 that float32 can hold"
    number = _as_real(where, "scale", scale, expected)
    if not _ROUNDS_TO_0 < number <= LARGEST_FLOAT32:
        raise InputError(f"{where}: scale is {number}; expected {expected}")
    return float(number)


def as_lr(where: str, lr: object, optimizer: Optimizer) -> float:
    """Return a learning rate that this optimizer can take."""
    above = isinstance(optimizer, Ftrl)
    expected = f"a number {'above' if above else 'of at least'} 0 that float32 can hold"
    if above:
        expected += f", at least {SMALLEST_FTRL_LR:.3g}, because Ftrl divides by it"
    number = _as_real(where, "lr", lr, expected)
    if not 0 <= number <= LARGEST_FLOAT32 or (above and number < SMALLEST_FTRL_LR):
        raise InputError(f"{where}: lr is {number}; expected {expected}")
    return float(number)


def _as_real(where: str, name: str, value: object, expected: str) -> Any:
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise InputError(f"{where}: {name} is {value!r} ({type(value).__name__}); expected {expected}")
    return value


def _as_array(where: str, name: str, value: object, expected: str) -> NDArray[Any]:
    dtype = {"ids": "uint64", "offsets": "int64"}.get(name, "float32")
    written = "writable" in expected  # the caller would not see what is written into a converted copy
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(f"{where}: {name} is a masked array, whose mask would be lost; expected {expected}")
    if isinstance(value, np.ndarray):
        return np.asarray(value)  # a subclass becomes a plain view
    try:
        if hasattr(value, "__array__") or _is_buffer(value):
            return np.asarray(value)
        if hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
    except Exception as error:  # a foreign type may raise anything when it cannot be read from here
        cast = ".float()" if dtype == "float32" and not written else ""
        raise InputError(
            f"{where}: {name} is {kind_of(value)} that cannot be read as an array ({error}); expected {expected} "
            f"on the CPU: pass a tensor as .detach(){cast}.cpu()"
        ) from error
    make = "" if written else f": convert it, e.g. with numpy.asarray({name}, dtype=numpy.{dtype})"
    if name == "ids" and isinstance(value, str):
        make = f": make ids of strings with {_HASH_STRINGS}"
    raise InputError(f"{where}: {name} is {kind_of(value)}; expected {expected}{make}")


def _contiguous(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array as the core reads it, copied only if it must be."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else np.require(array, requirements=("C", "A"))


def _is_tensor(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def _holds_strings(ids: NDArray[Any]) -> bool:
    """Return whether the first of the ids is a string or bytes."""
    if ids.dtype.kind == "O":
        return isinstance(next(iter(np.ravel(ids)), None), str | bytes)
    return ids.dtype.kind in "UST"


def _is_buffer(value: object) -> bool:
    try:
        memoryview(value).release()  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
