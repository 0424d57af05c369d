"""A set of ids in the declaration of a table: those of its frozen rows. It may hold millions.

So sets are compared, hashed and printed by their number of ids and a checksum, and the form in JSON has these alone:
what keeps or sends the declaration of a table does not carry the ids. A set that was read from JSON does not know its
ids; processes that need them receive them beside the declaration.
"""

import hashlib
import re
from collections.abc import Collection, Set
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from satrap.config.array_args import as_ids
from satrap.config.validation import InText, describe
from satrap.errors import ConfigError, InputError

_FORM = re.compile("([0-9]+) ids, sha256 ([0-9a-f]{16})")
_EXPECTED = (
    "expected True, False, a range of ids with step 1 from 0 to 2**64, such as range(1000), or the ids themselves: a "
    "list, a set, or an array or tensor of int64 or uint64"
)


class IdSet(InText):
    """Ids as a value that does not change."""

    __slots__ = ("_checksum", "_ids", "_num")

    def __init__(self, num: int, checksum: str, ids: NDArray[np.uint64] | None) -> None:
        """checksum: as `of` computes it. ids: in rising order; None: not known."""
        self._num, self._checksum, self._ids = num, checksum, ids
        if ids is not None:
            ids.flags.writeable = False

    @classmethod
    def of(cls, ids: NDArray[np.uint64]) -> Self:
        """ids: in rising order, each once. The set keeps the array."""
        return cls(len(ids), hashlib.sha256(ids.astype("<u8", copy=False).data).hexdigest()[:16], ids)

    @classmethod
    def from_json(cls, form: str) -> Self | None:
        """Return the set that `to_json` described, without its ids; None if this is no such form."""
        match = _FORM.fullmatch(form)
        return None if match is None else cls(int(match[1]), match[2], None)

    def to_json(self) -> str:
        """Return the number of ids and their checksum."""
        return f"{self._num} ids, sha256 {self._checksum}"

    @property
    def has_ids(self) -> bool:
        """Whether the ids are known."""
        return self._ids is not None

    @property
    def ids(self) -> NDArray[np.uint64]:
        """The ids in rising order, read-only. ConfigError if only their number and checksum are known."""
        if self._ids is None:
            raise ConfigError(f"found no ids in {self!r}, which was read from JSON; expected the array of these ids")
        return self._ids

    def __len__(self) -> int:
        return self._num

    def __contains__(self, id_: int) -> bool:
        if not 0 <= id_ < 2**64:
            return False
        at = int(np.searchsorted(self.ids, np.uint64(id_)))
        return at < self._num and int(self.ids[at]) == id_

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IdSet):
            return NotImplemented
        return (self._num, self._checksum) == (other._num, other._checksum)

    def __hash__(self) -> int:
        return hash((self._num, self._checksum))

    def __reduce__(self) -> tuple[type, tuple[int, str, NDArray[np.uint64] | None]]:
        return type(self), (self._num, self._checksum, self._ids)

    def __repr__(self) -> str:
        return f"<{self.to_json()}>"


Ids = range | IdSet | Collection[int] | ArrayLike
"""What names ids, as in `Table.frozen`."""


def checked_frozen(where: str, frozen: object, num_rows: int | None) -> bool | range | IdSet:
    """Return the value; ids without a gap become a range, and no ids False."""
    if isinstance(frozen, IdSet) and frozen.has_ids:
        _require_below(where, int(frozen.ids[-1]), num_rows)
    if isinstance(frozen, bool | IdSet):
        return frozen
    if isinstance(frozen, range):
        if frozen.step == 1 and 0 <= frozen.start <= frozen.stop <= 2**64:
            return frozen
    elif isinstance(frozen, list | tuple | Set) or hasattr(frozen, "__array__") or hasattr(frozen, "__dlpack__"):
        try:
            ids = np.unique(as_ids(f"{where}, frozen", list(frozen) if isinstance(frozen, Set) else frozen))
        except InputError as error:
            raise ConfigError(str(error)) from None
        return _compact(where, ids, num_rows)
    raise ConfigError(f"{where}: frozen is {describe(frozen)}; {_EXPECTED}")


def frozen_from_json(where: str, form: object) -> object:
    """Return the value that a form in JSON stands for."""
    if isinstance(form, list | tuple):
        if list(map(type, form)) == [int, int]:
            return range(*form)
        raise ConfigError(f"{where}: frozen is {describe(form)}; expected [first, end] of a range of ids")
    described = IdSet.from_json(form) if isinstance(form, str) else None
    return form if described is None else described


def _compact(where: str, ids: NDArray[np.uint64], num_rows: int | None) -> bool | range | IdSet:
    if not len(ids):
        return False
    first, last = int(ids[0]), int(ids[-1])
    _require_below(where, last, num_rows)
    return range(first, last + 1) if last - first == len(ids) - 1 else IdSet.of(ids)


def _require_below(where: str, last: int, num_rows: int | None) -> None:
    if num_rows is not None and last >= num_rows:
        raise ConfigError(
            f"{where}: frozen has the id {last}; expected ids from 0 to {num_rows - 1}, because num_rows is {num_rows}"
        )
