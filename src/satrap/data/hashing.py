"""Hashes values to ids: one documented 64-bit hash, computed by the core over whole columns.

The hash is XXH64 with seed 0, as specified: of the UTF-8 bytes of a string, of binary data unchanged, and of the 8
little-endian bytes of an integer. A model that was trained on hashed ids depends on the hash, so it never changes.
`columns` decides what a missing value becomes; here it is hashed as the empty string. Two different strings share an id
with probability 2**-64; different integers never do.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from satrap import _core
from satrap.config.array_args import as_ids
from satrap.config.optional_deps import pyarrow_for
from satrap.config.validation import describe
from satrap.errors import InputError


def hash_integers(integers: ArrayLike) -> NDArray[np.uint64]:
    """Return an id for each integer: uint64 or int64 [n]; int64 is hashed by its bit pattern."""
    return np.asarray(_core.hash_integers(as_ids("hash_integers", integers)))


def hash_strings(strings: Any) -> NDArray[np.uint64]:
    """Return an id for each text of a column: an Arrow column (also dictionary-encoded), a NumPy array or a list. None
    is hashed as the empty string."""
    if isinstance(strings, str | bytes):
        raise InputError(f"hash_strings: found {describe(strings)}; expected a column of strings, such as a list")
    arrow = pyarrow_for("hashing strings")
    column = strings
    if not isinstance(column, arrow.Array | arrow.ChunkedArray):
        try:
            column = arrow.array(strings)
        except (arrow.ArrowException, TypeError, ValueError) as error:
            raise InputError(
                f"hash_strings: found {type(strings).__name__} ({error}); expected a column of strings"
            ) from None
    if isinstance(column, arrow.ChunkedArray):
        column = arrow.concat_arrays(column.chunks) if column.num_chunks else arrow.array([], column.type)
    if arrow.types.is_dictionary(column.type):
        unique = hash_strings(column.dictionary)
        index = column.indices.cast(arrow.int64()).fill_null(len(unique)).to_numpy()
        return np.asarray(np.append(unique, _core.hash_texts(np.zeros(2, np.int32), np.empty(0, np.uint8)))[index])
    return np.asarray(_core.hash_texts(*text_buffers(arrow, column)))


def is_text(arrow: Any, kind: Any) -> bool:
    """Return whether `hash_strings` accepts a column of this Arrow type."""
    types = arrow.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_string_view(kind)
        or types.is_binary_view(kind)
        or (types.is_dictionary(kind) and is_text(arrow, kind.value_type))
    )


def text_buffers(arrow: Any, column: Any) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Return (offsets, bytes) of a column of strings that is not dictionary-encoded; a missing string is empty."""
    types = arrow.types
    if types.is_null(column.type):
        column = column.cast(arrow.string())
    if not is_text(arrow, column.type):
        raise InputError(f"hash_strings: found a column of {column.type}; expected strings or bytes")
    if (
        types.is_string_view(column.type)
        or types.is_binary_view(column.type)
        or types.is_fixed_size_binary(column.type)
    ):
        column = column.cast(arrow.large_binary())
    if len(column) == 0:
        return np.zeros(1, np.int32), np.empty(0, np.uint8)
    if column.null_count:
        column = column.fill_null("" if types.is_string(column.type) or types.is_large_string(column.type) else b"")
    wide = types.is_large_string(column.type) or types.is_large_binary(column.type)
    _, offsets, data = column.buffers()
    first = column.offset
    ends: Any = np.frombuffer(offsets, np.int64 if wide else np.int32)[first : first + len(column) + 1]
    return ends, np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
