"""Ids in columns of another type than integers: floats, as pandas stores integers where some are missing, and decimals
without a fraction, as databases export integers that may be large."""

from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from satrap.config.optional_deps import pyarrow_for

LARGEST_EXACT = 2.0**53
"""Floats beyond it skip integers."""
_DECIMAL_DIGITS = 20  # 2**64 has so many
Wrong = tuple[NDArray[np.bool_], str]
"""Which values cannot be ids, and what was expected there."""
Whole = tuple[Any, NDArray[np.bool_], Wrong]
"""Integers, which of them are present, and which values were none."""


def is_whole_decimal(arrow: Any, kind: Any) -> bool:
    """Return whether an Arrow type is one of decimals without a fraction."""
    return bool(arrow.types.is_decimal(kind) and kind.scale == 0)


def whole_floats(array: Any) -> Whole:
    """Convert floats; NaN is missing."""
    arrow = pyarrow_for("reading data")
    numbers = array.cast(arrow.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False)
    present = ~np.isnan(numbers)
    is_whole = present & (np.abs(numbers) <= LARGEST_EXACT) & (np.floor(numbers) == numbers)
    integers = arrow.array(np.where(is_whole, numbers, 0.0).astype(np.int64))
    return integers, present, (present & ~is_whole, "a whole number of at most 2**53")


def whole_decimals(array: Any) -> Whole:
    """Convert decimals to int64; those from 2**63 to their bits, as uint64 has them."""
    arrow = pyarrow_for("reading data")
    compute = arrow.compute
    least, bound = (arrow.scalar(Decimal(edge), arrow.decimal128(_DECIMAL_DIGITS)) for edge in (-(2**63), 2**64))
    fits = compute.and_(compute.greater_equal(array, least), compute.less(array, bound)).fill_null(True)
    integers = compute.if_else(fits, array.cast(arrow.int64(), safe=False), 0)
    present, has_fit = (flags.to_numpy(zero_copy_only=False) for flags in (array.is_valid(), fits))
    return integers, present, (~has_fit, "a whole number from -2**63 to 2**64 - 1")
