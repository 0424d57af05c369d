"""A warning about a table that is looked up for training and gets no gradient, because the model detaches its rows.

A table is watched until its first gradient, over all streams of a session, so a run that trains pays one wait for the
device: whether the gradients of a stream's block are zeros is read after some steps.
"""

import logging
from collections.abc import Iterable, Iterator

from satrap.config.features import Features
from satrap.train.batch import InFlightBatch

_LOG = logging.getLogger("satrap.train")
_UNREAD, _LOOKUPS = 10, 20
_UNTRAINED = (
    "the last %d lookups for training brought no gradient, so these are not trained: %s. Usual causes are detach(), "
    ".data, numpy() or torch.no_grad() between the batch and the loss, or a model that does not use the rows. If they "
    "are to stay as they are, declare Table(..., frozen=True)"
)


class GradientWatch:
    """Logs a warning, once per table, if the first lookups for training bring no gradient."""

    def __init__(self, features: Features) -> None:
        self._features = features
        self._missed = {table.name: 0 for table in features.tables if table.frozen is not True}
        """Number of lookups of each trainable table of which no gradient is known yet."""

    def note(self, looked_up: Iterable[str], reached: Iterable[str]) -> None:
        """Note which tables were looked up for a step, and which of them have a gradient."""
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

    def note_batches(self, batches: Iterable[InFlightBatch]) -> None:
        """Note the tables of batches that a loop has used, and that are about to be updated or dropped."""
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
