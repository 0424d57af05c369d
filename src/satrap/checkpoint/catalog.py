"""Which checkpoints the folder of a run holds, as its names and their checkpoint.json say: which count, which go. Pure.

A version is called `<number>-step-<step>`, and where folders are not published by one rename `-<writer>` follows, 8 hex
digits of the process that wrote it: so no two attempts ever write under one name. A version counts once its
checkpoint.json is whole, which is written last. A torn version was cut short, is being written or removed, or is a copy
that is not complete yet: it is passed over, its number is not used again, and it is swept only if its name has a writer
and a newer version counts.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

_NAME = re.compile(r"(\d{6,})-step-(\d+)(?:-([0-9a-f]{8}))?")


class Version(NamedTuple):
    """A name that a checkpoint can have; in order of their numbers."""

    number: int
    step: int
    writer: str
    """"" where a rename publishes."""

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Reads a name; None: it is no version's."""
        match = _NAME.fullmatch(name)
        return None if match is None else cls(int(match[1]), int(match[2]), match[3] or "")

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.number:06d}-step-{self.step}" + (f"-{self.writer}" if self.writer else "")


class Catalog:
    """What one look at the folder has found."""

    def __init__(self, parents: Mapping[str, str | None], torn: Iterable[str], used: Iterable[str] = ()) -> None:
        """parents: of every version that counts, its parent. torn: versions without a whole checkpoint.json. used:
        names that were given to versions, whatever became of these."""
        self.parents = parents
        self._whole, self._torn, self._used = _in_order(parents), _in_order(torn), _in_order(used)

    @property
    def newest(self) -> str | None:
        """Returns the newest version that counts."""
        return self._whole[-1].name if self._whole else None

    @property
    def passed_over(self) -> list[str]:
        """Returns the torn versions that are newer than the newest that counts."""
        last = self._whole[-1].number if self._whole else 0
        return [each.name for each in self._torn if each.number > last]

    @property
    def swept_later(self) -> set[str]:
        """Returns the torn versions that become garbage once a newer version counts."""
        return {each.name for each in self._torn if each.writer}

    def next(self, step: int, writer: str) -> Version:
        """Returns the version to write now: no number is used twice, whatever became of the first."""
        numbers = [each.number for each in (*self._whole, *self._torn, *self._used)]
        return Version(1 + max(numbers, default=0), step, writer)

    def is_newer(self, name: str, than: str | None) -> bool:
        """Whether a version is newer than, or another one of the same number as, one that may be gone."""
        one, other = Version.parse(name), Version.parse(than or "")
        return one is not None and name != than and (other is None or one.number >= other.number)

    def removable(self, keep: int) -> list[str]:
        """Returns the versions beyond the newest `keep`, except the parents of those."""
        needed: set[str] = set()
        for each in self._whole[-keep:]:
            at: str | None = each.name
            while at is not None and at not in needed:
                needed.add(at)
                at = self.parents.get(at)
        return [each.name for each in self._whole if each.name not in needed]

    def garbage(self) -> list[str]:
        """Returns what uploads and removals that were cut short have left."""
        last = self._whole[-1].number if self._whole else 0
        return [each.name for each in self._torn if each.writer and each.number < last]


def _in_order(names: Iterable[str]) -> list[Version]:
    return sorted(each for name in names if (each := Version.parse(name)) is not None)
