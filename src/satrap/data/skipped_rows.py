"""Counts of the samples that a source leaves out, by the setting that allows it."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from satrap.config.validation import check_integer
from satrap.errors import InputError


@dataclass(slots=True)
class SkippedRows:
    """The numbers of samples that were left out so far."""

    malformed: int = 0
    """Malformed rows; `max_bad_rows` allows them."""
    no_label: int = 0
    """Rows whose label is missing; `LabelColumn(missing="drop")` allows them."""
    short: int = 0
    """Samples of short last batches; `drop_last` leaves them out."""

    def __add__(self, other: "SkippedRows") -> "SkippedRows":
        return SkippedRows(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "SkippedRows") -> "SkippedRows":
        return SkippedRows(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        samples = "1 sample of the source was" if self.total == 1 else f"{self.total:,} samples of the source were"
        reasons = [
            f"{self.malformed:,} malformed (max_bad_rows)",
            f"{self.no_label:,} without a label",
            f"{self.short:,} in short last batches (drop_last)",
        ]
        counts = ", ".join(reason for reason, count in zip(reasons, astuple(self), strict=True) if count)
        return f"{samples} not trained on: {counts}; in all passes together"

    @property
    def total(self) -> int:
        """The sum of all counts."""
        return sum(astuple(self))

    def to_list(self) -> list[int]:
        """Return these counts as plain JSON types."""
        return list(astuple(self))

    @classmethod
    def from_list(cls, counts: Sequence[int]) -> "SkippedRows":
        """Return the counts that `to_list` wrote."""
        if len(counts) != 3:
            raise InputError(f"SkippedRows: found {len(counts)} counts; expected 3")
        return cls(*(check_integer("SkippedRows", "count", count, 0, 2**63 - 1) for count in counts))
