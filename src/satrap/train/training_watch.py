"""Warnings about a loop that trains less than it seems to: tables that are looked up and get no gradient, because the
model detaches their rows; gradients that no step takes; a stream without samples.

A table is watched until its first gradient, over all streams of a session, so a run that trains pays one wait for the
device: whether the gradients of a stream's block are zeros is read after some steps.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from satrap.config.features import Features
from satrap.data.skipped_rows import SkippedRows
from satrap.train.batch import InFlightBatch

_LOG = logging.getLogger("satrap.train")
_UNREAD, _LOOKUPS, _STEPS = 10, 20, 20
_SELECTIONS = ("share", "before", "since")
_UNTRAINED = (
    "the last %d lookups for training brought no gradient, or only zeros, so these are not trained: %s. Usual causes "
    "are detach(), .data, numpy() or torch.no_grad() between the batch and the loss, a model that does not use the "
    "rows, or one whose ReLUs are all 0. If they are to stay as they are, declare Table(..., frozen=True)"
)
_UNTAKEN = (
    "no optimizer.step() has taken the gradients of the last %d steps, so the rows are not trained. Usual causes are "
    "optimizer.zero_grad() between backward() and optimizer.step(), or the step() of another optimizer in its place: "
    "optimizer.dense.step(), or that of the torch optimizer that embeddings.optimizer(...) was given"
)
_UNUSED = (
    "no loss has used the rows of the stream's last %d batches (batch.embeddings, or batch[name] of a feature), so no "
    "table is trained"
)
_NO_SAMPLES = "nothing was trained on: there are no samples%s; expected at least one: train on more or other data"


class TrainingWatch:
    """Logs these warnings, each once, or once per table; that of a stream without samples at its end."""

    def __init__(self, features: Features) -> None:
        self._features = features
        self._missed = {table.name: 0 for table in features.tables if table.frozen is not True}
        """Number of lookups of each trainable table of which no gradient is known yet."""
        self._num_dropped = self._num_alone = self._num_idle = 0
        self._has_warned = False  # that no step takes gradients
        self._selection = ""
        self._is_resumed = False

    # -- tables without a gradient -------------------------------------------------------------------------------------

    def note(self, looked_up: Iterable[str], reached: Collection[str]) -> None:
        """Note which tables were looked up for a step, and which of them have a gradient that is not dropped."""
        if reached:
            self._num_dropped = 0
        for table in reached:
            self._missed.pop(table, None)
        for table in self._missed.keys() & looked_up:
            self._missed[table] += 1
        untrained = [table for table, count in self._missed.items() if count == _UNREAD + _LOOKUPS]
        if untrained:
            _LOG.warning(_UNTRAINED, _LOOKUPS, ", ".join(map(self._described, untrained)))
            for table in untrained:
                del self._missed[table]

    def _described(self, table: str) -> str:
        names = [repr(name) for name, feature in self._features.items() if feature.table.name == table]
        return f"table {table!r} (feature{'s' * (len(names) > 1)} {', '.join(names)})"

    def note_step(self, *, has_rows: bool) -> None:
        """Note a step while a stream is open. has_rows: whether it updated rows."""
        self._num_idle = 0 if has_rows else self._num_idle + 1
        if self._num_idle == _STEPS:
            _LOG.warning(_UNUSED, _STEPS)

    def note_update(self, batches: Collection[InFlightBatch]) -> None:
        """Note the batches that a step takes."""
        if batches:
            self._num_dropped = 0
            self._note_batches(batches)

    def _note_batches(self, batches: Iterable[InFlightBatch]) -> None:
        for batch in batches:
            if self._missed and batch.is_used and batch.has_rows:
                tables = set() if batch.ahead is not None else {table.name for table in batch.features.tables}
                reached = {lookup.table for lookup in batch.lookups.reached()}
                self.note(tables | batch.lookups.tables, reached.union(self._reached(batch)))

    def _reached(self, batch: InFlightBatch) -> Iterator[str]:
        """Yield the watched tables whose rows in the batch have a gradient."""
        features, gradient = batch.features, batch.embeddings.grad
        for name, sequence in batch.sequences.items():
            if sequence.values.grad is not None:
                yield features[name].table.name
        if gradient is not None and features.pooled:
            # Autograd fills the columns of a feature that no loss depends on with zeros.
            for name, columns in zip(features.pooled, gradient.split(list(features.pooled.values()), 1), strict=True):
                table = features[name].table.name
                if self._missed.get(table, 0) >= _UNREAD and columns.any():
                    yield table

    # -- gradients that no step takes ----------------------------------------------------------------------------------

    def note_dropped(self, cause: str, batches: Collection[InFlightBatch] = ()) -> None:
        """Note batches, or gradients of modules, that were dropped together."""
        if cause != "unused" or any(batch.is_used for batch in batches):
            self._num_idle = 0
        if cause == "unused":
            self._note_batches(batches)
        elif cause == "zero_grad":
            self._num_dropped += 1
            if self._num_dropped >= _STEPS:
                self._warn_of_untaken()

    def note_dense_step(self, rows_wait: Callable[[], bool]) -> None:
        """Note a step of the dense parameters. rows_wait: returns whether rows have gradients that wait for a step."""
        self._num_alone += 1
        if self._num_alone % _STEPS == 0 and rows_wait():
            self._warn_of_untaken()

    def note_joint_step(self) -> None:
        """Note that the last steps of dense parameters were parts of steps of both halves."""
        self._num_alone = 0

    def _warn_of_untaken(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning(_UNTAKEN, _STEPS)

    # -- a stream ------------------------------------------------------------------------------------------------------

    def begin(self, data: Any, *, is_resumed: bool) -> None:
        """Note that a stream over this data starts. is_resumed: in the middle."""
        bounds = [f"{name}={value!r}" for name in _SELECTIONS if (value := getattr(data, name, None)) is not None]
        self._selection, self._is_resumed = f" with {' and '.join(bounds)}" if bounds else "", is_resumed

    def note_end(self, skipped: SkippedRows, *, is_empty: bool) -> None:
        """Note the end of a stream. skipped: by its source. is_empty: whether it had no batch from its start on."""
        is_empty &= not self._is_resumed
        if is_empty:
            _LOG.warning(_NO_SAMPLES, self._selection)
        if skipped.total > (0 if is_empty else skipped.short):  # short batches are left out by request
            _LOG.warning("%s", skipped)
