"""Criteo's click logs as a source: tab-separated text without a header; each line is an impression.

The columns are named label, I1 to I13 (counts) and C1 to C26 (eight hexadecimal digits each, hashed as strings). The
files are those that Criteo publishes, plain or .gz. A test file has no label: give label=None.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from satrap.config.columns import Columns, DenseColumn, LabelColumn
from satrap.config.features import Features
from satrap.config.validation import check_flag, describe, set_field
from satrap.data.delimited import CSV
from satrap.errors import ConfigError

_COUNTS = tuple(f"I{i}" for i in range(1, 14))
_FIELDS = (*_COUNTS, *(f"C{i}" for i in range(1, 27)))
_HASH_OF_EMPTY = 0xEF46DB3751D8E999


@dataclass(frozen=True, kw_only=True, repr=False)
class Criteo(CSV):
    """Files in the format of Criteo's click logs. The features are C1 to C26, or those in `ids`.

    log1p: whether to read every count x as ln(1 + max(x, 0)). Unchanged, their range of 0 to millions trains badly.
    dense: the counts; a missing count reads as 0.
    label: the label; None: lines have no label and begin with I1, as in Criteo's test file.
    missing_id: the id that replaces a missing category: the hash of the empty string, which is a separate category, so
        that every sample has one id of each feature. None: an empty bag.
    columns: fixed by the format; do not set it.
    """

    log1p: bool = True
    dense: str | DenseColumn | Sequence[str | DenseColumn] = _COUNTS
    label: str | LabelColumn | Sequence[str | LabelColumn] | None = "label"
    missing_id: int | None = _HASH_OF_EMPTY
    columns: Sequence[str] | None = None
    delimiter: str = "\t"
    quote: str | None = None
    _format: ClassVar[str] = "Criteo's logs"

    def __post_init__(self) -> None:
        known = (_FIELDS, ("label", *_FIELDS))
        if self.columns is not None and tuple(self.columns) not in known:
            raise ConfigError(f"Criteo: columns is {describe(self.columns)}; the format fixes them: use CSV for others")
        set_field(self, "columns", known[self.label is not None])
        check_flag("Criteo", "log1p", self.log1p)
        super().__post_init__()

    def _columns(self, features: Features | Sequence[str]) -> Columns:
        columns = super()._columns(features)
        return replace(columns, dense=tuple(replace(c, log1p=c.log1p or self.log1p) for c in columns.dense))
