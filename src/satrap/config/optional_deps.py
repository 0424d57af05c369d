"""Imports of packages that only some uses need."""

from typing import Any

from satrap.errors import InputError, SatrapError


def pyarrow_for(purpose: str, missing: type[SatrapError] = InputError) -> Any:
    """Return the module pyarrow, which is imported only where it is used; raise `missing` if it is not installed."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.fs
        import pyarrow.ipc
    except ImportError as error:
        raise missing(f"{purpose} needs pyarrow ({error}): pip install 'satrap[arrow]'") from error
    return pyarrow
