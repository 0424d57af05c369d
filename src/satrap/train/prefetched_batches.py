"""A loop over a user's own loader around which a stream looks up the ids of the next batches ahead.

    loader ──> ids(item) ──> `NamedInputs` ──stream: looked up──> item, whose rows modules find by id

The stream is as any other: a ledger bounds the staleness, and optimizer.step() ends a batch's step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, cast

from satrap.data.inputs import Inputs
from satrap.train.ahead_rows import NamedInputs
from satrap.train.stream import Stream

IdsOf = Callable[[Any], Mapping[str, Any]]


class PrefetchedBatches:
    """The batches of a loader, with the rows of their ids looked up ahead; created by `Embeddings.prefetch`. Each
    iteration is one pass over the loader."""

    def __init__(
        self,
        loader: Iterable[Any],
        ids: IdsOf,
        tables: Callable[[], Mapping[str, int | None]],
        start: Callable[[Iterator[Inputs]], Stream],
    ) -> None:
        """tables: returns their names with the ids that stand for none. start: starts a stream of such batches."""
        self._loader, self._ids, self._tables, self._start = loader, ids, tables, start

    def __len__(self) -> int:
        """Return the number of batches, if the loader knows it."""
        return len(cast(Sized, self._loader))

    def __iter__(self) -> Iterator[Any]:
        with self._start(self._read()) as stream:
            for batch in stream:
                _ = batch.dense  # dense parameters from servers must be there before the model runs
                yield cast(NamedInputs, batch.inputs).item
                del batch  # so that the stream may drop it, if the loop did not use it

    def _read(self) -> Iterator[Inputs]:
        tables = self._tables()
        for item in self._loader:
            yield NamedInputs.of(item, self._ids(item), tables)
