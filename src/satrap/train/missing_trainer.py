"""Names the trainers that have ended, for the errors of the others."""

import socket
import time
from collections.abc import Sequence

from torch.distributed import DistError

from satrap.errors import SatrapError, StreamError
from satrap.rpc.address import is_unix, split_address, unix_path

_SECONDS = 2.0  # an ending process closes its connections one after another
_PAUSE_SECONDS = 0.05


def missing_trainer(addresses: Sequence[str], error: Exception) -> Exception:
    """Return the error to raise in place of one of an exchange between trainers. addresses: of their servers."""
    if isinstance(error, SatrapError):
        return error
    until = time.monotonic() + _SECONDS
    while not (ended := ended_trainers(addresses)) and time.monotonic() < until:
        time.sleep(_PAUSE_SECONDS)
    if not ended:
        found = StreamError(f"an exchange with the other trainers failed: {error}")
    else:
        found = StreamError(
            f"{_named(ended)} has ended, and the others cannot continue without its rows: its own output says why. "
            "Start all trainers again: a script with satrap.Checkpoint resumes from the last checkpoint"
        )
    found.__cause__ = error
    return found


def note_missing_trainer(addresses: Sequence[str], error: BaseException) -> None:
    """Name the trainers that have ended in an error that torch.distributed raised, if they are its cause."""
    if isinstance(error, RuntimeError) and ("peer" in str(error) or isinstance(error, DistError)):
        found = missing_trainer(addresses, error)
        if found is not error:
            error.add_note(str(found))


def ended_trainers(addresses: Sequence[str]) -> list[int]:
    """Return the trainers whose servers accept no connection."""
    return [rank for rank, address in enumerate(addresses) if not _accepts(address)]


def _accepts(address: str) -> bool:
    family, at = (
        (socket.AF_UNIX, str(unix_path(address))) if is_unix(address) else (socket.AF_INET, split_address(address))
    )
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(_SECONDS)
        return probe.connect_ex(at) == 0


def _named(ranks: Sequence[int]) -> str:
    return f"trainer {ranks[0]}" if len(ranks) == 1 else f"each of trainers {', '.join(map(str, ranks))}"
