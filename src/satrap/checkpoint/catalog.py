"""The versions in the folder of a run, from their names and checkpoint.json files: which count, and which are removed.

A version is called `<number>-step-<step>`, plus `-<writer>` where one rename cannot publish a folder: 8 hex digits of
the process that wrote it, so that no two attempts ever write under one name. A version counts once its checkpoint.json
is complete, which is written last. A torn version was cut short, is being written or removed, or is an incomplete copy:
it is skipped, its number is not reused, and it is removed only if its name has a writer and a newer version counts.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

_NAME = re.compile(r"(\d{6,})-step-(\d+)(?:-([0-9a-f]{8}))?")


class Version(NamedTuple):
    """The name of a checkpoint; versions sort by number."""

    number: int
    step: int
    writer: str
    """The writer's hex digits; "" where a rename publishes."""

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Parse a name; return None if it is not the name of a version."""
        match = _NAME.fullmatch(name)
        return None if match is None else cls(int(match[1]), int(match[2]), match[3] or "")

    @property
    def name(self) -> str:
        """The name of the version's folder."""
        return f"{self.number:06d}-step-{self.step}" + (f"-{self.writer}" if self.writer else "")


class Catalog:
    """The versions found by one scan of the folder."""

    def __init__(
        self, parents: Mapping[str, str | None], torn: Iterable[str], used: Iterable[str] = (), best: Iterable[str] = ()
    ) -> None:
        """parents: the parent of each version that counts.

        torn: names of versions without a complete checkpoint.json.
        used: names that versions were given, whether these still exist or not.
        best: names of versions that were the best of the run when they were saved.
        """
        self.parents = parents
        self._best = [version for version in _sorted_versions(best) if version.name in parents]
        self._complete, self._torn = _sorted_versions(parents), _sorted_versions(torn)
        self._used = _sorted_versions(used)

    @property
    def newest(self) -> str | None:
        """The newest complete version, or None."""
        return self._complete[-1].name if self._complete else None

    @property
    def best(self) -> str | None:
        """The newest version that counts and was the best when it was saved."""
        return self._best[-1].name if self._best else None

    @property
    def skipped(self) -> list[str]:
        """The torn versions that are newer than the newest complete one. A resume skips them."""
        last = self._complete[-1].number if self._complete else 0
        return [torn.name for torn in self._torn if torn.number > last]

    @property
    def removed_later(self) -> set[str]:
        """The torn versions that `garbage` may remove once a newer version is complete."""
        return {torn.name for torn in self._torn if torn.writer}

    def next(self, step: int, writer: str) -> Version:
        """Return the version to write now; its number was never used before."""
        numbers = [entry.number for entry in (*self._complete, *self._torn, *self._used)]
        return Version(1 + max(numbers, default=0), step, writer)

    def is_newer(self, name: str, than: str | None) -> bool:
        """Return whether `name` is a newer version than `than`, or another one of the same number. `than` may have been
        removed meanwhile."""
        one, other = Version.parse(name), Version.parse(than or "")
        return one is not None and name != than and (other is None or one.number >= other.number)

    @staticmethod
    def is_older(name: object, than: str) -> bool:
        """Return whether both name a version, and the first has the lower number, as a parent has."""
        one, other = Version.parse(name) if isinstance(name, str) else None, Version.parse(than)
        return one is not None and other is not None and one.number < other.number

    def removable(self, keep: int) -> list[str]:
        """Return the versions beyond the newest `keep` and the best, except the parents of those."""
        needed: set[str] = set()
        for entry in [*self._complete[-keep:], *self._best[-1:]]:
            ancestor: str | None = entry.name
            while ancestor is not None and ancestor not in needed:
                needed.add(ancestor)
                ancestor = self.parents.get(ancestor)
        return [entry.name for entry in self._complete if entry.name not in needed]

    def garbage(self) -> list[str]:
        """Return what interrupted uploads and removals have left."""
        last = self._complete[-1].number if self._complete else 0
        return [torn.name for torn in self._torn if torn.writer and torn.number < last]


def _sorted_versions(names: Iterable[str]) -> list[Version]:
    return sorted(version for name in names if (version := Version.parse(name)) is not None)
