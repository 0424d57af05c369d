"""Imports of packages that only some uses need."""

from typing import Any

from satrap.errors import InputError


def pyarrow_for(purpose: str) -> Any:
    """Returns the module pyarrow; imports it only where data is read."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.fs
    except ImportError as error:
        raise InputError(f"{purpose} needs pyarrow ({error}): pip install pyarrow") from error
    return pyarrow
