"""A loop over a user's own loader around which a stream looks up the ids of the next batches ahead.

    loader ──> ids(item) ──> `NamedInputs` ──stream: looked up──> item, whose rows modules find by id

The stream is as any other: a ledger bounds the staleness, and optimizer.step() ends a batch's step. A trainer whose
loader ends before another's repeats its last item, without weight, until all loaders have ended.

If a checkpoint saves the position, it is the state that the loader had before the last item that was trained on. Items
are read ahead, so the loader itself is further on. A loop that resumes reads that item again, which the trainer may
have to repeat.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import numpy as np
import torch

from satrap.config.validation import kind_of
from satrap.data.inputs import Inputs, Position
from satrap.errors import StreamError
from satrap.train.ahead_rows import NamedInputs
from satrap.train.joint_calls import NoBatch, Padding
from satrap.train.stream import Stream

IdsOf = Callable[[Any], Mapping[str, Any]]
_NO_STATE = (
    "prefetch: the loader was passed to Checkpoint(...), and {} has no state_dict() and load_state_dict(), so its "
    "position cannot be saved: use torchdata's StatefulDataLoader, or leave the loader out of Checkpoint(...); then a "
    "loop that resumes starts at the loader's beginning"
)


@dataclass(frozen=True, slots=True, eq=False)
class LoaderState:
    """The offset of a `Position` in a loader: what its state_dict() returned."""

    state: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RepeatedItem(Padding):
    """Padding for a trainer whose loader has ended before another's."""

    item: Any


class LoaderPass(Iterator[Inputs]):
    """One pass over a loader, from its beginning or from where it is resumed."""

    def __init__(self, loader: Iterable[Any], ids: IdsOf, tables: Mapping[str, int | None]) -> None:
        """tables: their names with the ids that stand for none."""
        self.loader, self._ids, self._tables = loader, ids, tables
        self._has_position = False
        self._number = self._num_read = 0
        self._last: list[Any] = []  # the last item

    def begin(self, position: Position | None, *, is_resumed: bool, is_tracked: bool) -> Position | None:
        """Start to read; return the position, if it is known. Runs in the thread of the loop, because a loader may draw
        random numbers.

        position: after what was trained on before, if it is known. is_resumed: whether to continue there.
        is_tracked: whether the position is to be known."""
        loader: Any = self.loader
        if is_tracked and not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
            raise StreamError(_NO_STATE.format(kind_of(loader)))
        self._has_position = is_tracked
        if position is not None:
            self._number = position.epoch + (position.batch > 0 and not is_resumed)
        if position is None or not is_resumed:
            self._items = iter(loader)
            return None if position is None or position.batch else position
        if not isinstance(position.offset, LoaderState):
            raise StreamError(
                "prefetch: the checkpoint that was resumed has the position of other data than this loader: pass "
                "Checkpoint(...) the same data as when it was saved"
            )
        # In the middle of a pass the random state is that after the item which is read again here.
        with torch.random.fork_rng(devices=[]) if position.batch else nullcontext():
            loader.load_state_dict(position.offset.state)
            self._items = iter(loader)
            self._last = list(islice(self._items, int(position.batch > 0)))
        if position.batch and not self._last:
            raise StreamError(
                f"prefetch: the loader has no batch {position.batch}, after which the checkpoint was saved: it must "
                "yield the same batches as before after load_state_dict()"
            )
        self._num_read = position.batch
        return position

    def __next__(self) -> Inputs:
        loader: Any = self.loader
        state = LoaderState(deepcopy(loader.state_dict())) if self._has_position else None
        item = next(self._items)
        self._last, self._num_read = [item], self._num_read + 1
        position = None if state is None else Position(self._number, 0, self._num_read, offset=state)
        return NamedInputs.of(item, self._ids(item), self._tables, position)

    def padding(self) -> Padding:
        """Return a batch for a trainer whose loader has ended."""
        nothing: dict[str, Any] = {"names": tuple(self._tables), "values": np.empty(0, np.uint64), "batch_size": 0}
        return RepeatedItem(item=self._last[0], **nothing) if self._last else NoBatch(**nothing)

    def close(self) -> None:
        """Release the loader's iterator, which may have processes."""
        self._items = iter(())

    def end(self) -> Position | None:
        """Return the position after the whole pass."""
        loader: Any = self.loader
        if not self._has_position:
            return None
        return Position(self._number + 1, 0, 0, offset=LoaderState(deepcopy(loader.state_dict())))


class PrefetchedBatches:
    """The batches of a loader, with the rows of their ids looked up ahead; created by `Embeddings.prefetch`. Each
    iteration is one pass over the loader, or over what is left of the pass that a checkpoint has saved."""

    def __init__(
        self,
        loader: Iterable[Any],
        ids: IdsOf,
        tables: Callable[[], Mapping[str, int | None]],
        start: Callable[[LoaderPass], Stream],
    ) -> None:
        """tables: returns their names with the ids that stand for none. start: starts a stream of such batches."""
        self.loader = loader
        """What yields the batches."""
        self._ids, self._tables, self._start = ids, tables, start

    def __len__(self) -> int:
        """Return the number of batches, if the loader knows it."""
        return len(cast(Sized, self.loader))

    def __iter__(self) -> Iterator[Any]:
        items = LoaderPass(self.loader, self._ids, self._tables())
        with ExitStack() as stack:
            stream = stack.enter_context(self._start(items))
            try:
                for batch in stream:
                    _ = batch.dense  # dense parameters from servers must be there before the model runs
                    yield cast(NamedInputs | RepeatedItem, batch.inputs).item
                    del batch  # so that the stream may drop it, if the loop did not use it
            except GeneratorExit:
                stack.pop_all()
                stream._leave()
                return
            stream._end_at(items.end())
