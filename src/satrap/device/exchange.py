"""One kind of exchange between all trainers: of headers and ids between their CPUs, of rows between their devices.

Every trainer calls the same methods in the same order. Lookups and updates each have an exchange, so a lookup never
waits for an update of another trainer, nor an update for a lookup. What both send between devices goes through one
communicator, in one order on all trainers (`LaunchOrder`), and so do the gradients that DistributedDataParallel
averages: a device that is given two collectives in another order than the next device waits forever.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from satrap.device.segments import TableGroups
from satrap.errors import StreamError
from satrap.interrupts import SLICE_SECONDS, Uninterrupted
from satrap.run_context import COLLECTIVE_TIMEOUT

_R = TypeVar("_R")


class RoundThread:
    """A thread that runs the rounds of one exchange in order. After one has failed, all later ones fail with its error.

    Other trainers wait for each round of this one, so a round that was submitted runs whatever happens to the caller:
    Ctrl-C, or an error of the training loop. A caller that gives up leaves its round to the thread."""

    def __init__(
        self,
        name: str,
        explain: Callable[[Exception], Exception],
        *,
        prepare: Callable[[], None] = lambda: None,
        failed: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        """explain: returns the error to raise in place of one that a function raised.
        prepare: called first, in the thread.
        failed: called with the error after the first failure."""
        self._explain, self._prepare, self._failed = explain, prepare, failed
        self._works: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self.error: Exception | None = None
        """Why no other function runs; None: none has failed."""
        self.released = threading.Event()
        """Set once callers give up instead of waiting; each stream has another one."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], _R]) -> "Future[_R]":
        """Run the function after all earlier ones."""
        future: Future[_R] = Future()
        self._works.put((work, future))
        return future

    def wait(self, future: "Future[_R]") -> _R:
        """Return the result of a submitted function; StreamError if callers give up."""
        released = self.released
        with Uninterrupted() as held:  # a signal must not come while this thread holds the future's own lock
            while not future.done():
                wait([future], SLICE_SECONDS)
                held.check()
                if released.is_set() and not future.done():
                    raise StreamError("this stream ended with an error while other trainers still had to join its step")
            return future.result()

    def close(self) -> None:
        """End the thread after what was submitted. Does not wait for it: another trainer may be missing."""
        self._works.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the end of the thread; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._prepare()
        while (each := self._works.get()) is not None:
            work, future = each
            try:
                if self.error is not None:
                    raise self.error
                result = work()
            except Exception as error:
                if self.error is None:
                    self.error = self._explain(error)
                    self._failed(self.error)
                future.set_exception(self.error)
            else:
                future.set_result(result)
            del work, future, each


_TEXT_BYTES = 2048
_SLICE = timedelta(seconds=SLICE_SECONDS)


class LaunchOrder:
    """The communicator between devices, and the order in which rounds use it: by the numbers that trainer 0 gives them.

    Trainer 0 sends the number of a round with its ids. It numbers a lookup when it has applied the updates that this
    lookup needs, so these have lower numbers, and no round waits for one with a higher number."""

    def __init__(self, device: torch.device) -> None:
        """All trainers call this together."""
        backend = "nccl" if device.type == "cuda" else "gloo"
        self.group = dist.new_group(backend=backend, timeout=COLLECTIVE_TIMEOUT)
        self._host = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self.error: Exception | None = None
        """Why no further round begins; None: none has failed."""
        self._num_numbered = self._next = 0
        self._changed = threading.Condition()

    def number(self) -> int:
        """Return the number of a round that trainer 0 begins."""
        with self._changed:
            self._num_numbered += 1
            return self._num_numbered - 1

    def agree(self) -> int:
        """Return the number of a round that has no ids, which trainer 0 sends to the others. All trainers call this in
        the same order."""
        return _from_first(self.number, self._host, lambda: self.error)

    @contextmanager
    def in_order(self, number: int) -> Iterator[None]:
        """Run the block once the blocks of all lower numbers have ended. If one of them has failed, raise its error:
        this block would wait forever."""
        with self._changed:
            self._changed.wait_for(lambda: self._next == number or self.error is not None)
            if self.error is not None:
                raise self.error
        yield
        with self._changed:
            self._next = number + 1
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Let all rounds that wait for an earlier one raise this error."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()


class Exchange:
    """Process groups of all trainers."""

    def __init__(self, launches: LaunchOrder) -> None:
        """All trainers call this together, in the same order. launches: the order that all exchanges share."""
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._host = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self.is_abandoned = False
        """Whether a call that waits for another trainer fails."""
        self._launches = launches

    def headers(self, own: NDArray[np.int64]) -> NDArray[np.int64]:
        """Send line r to trainer r, and return each trainer's line for this one."""
        received = torch.empty(own.shape, dtype=torch.int64)
        self._all_to_all(received, torch.from_numpy(np.ascontiguousarray(own)), None, None, self._host)
        return received.numpy()

    def barrier(self) -> None:
        """Return once all trainers have called this."""
        self.headers(np.zeros((self.world_size, 1), np.int64))

    def ids(self, parts: Sequence[NDArray[np.uint64]], counts: Sequence[int]) -> tuple[NDArray[np.uint64], int]:
        """Send part r to trainer r. Return what all sent to this one, in the order of the ranks, and the number of the
        round for `in_order`. counts: how many ids each trainer sends to this one."""
        number = self._launches.number() if self.rank == 0 else 0
        head = np.array([number], np.uint64)
        sent = np.concatenate([array for part in parts for array in (head, part)])
        sizes = [count + 1 for count in counts]
        received = torch.empty(sum(sizes), dtype=torch.int64)
        to = [len(part) + 1 for part in parts]
        self._all_to_all(received, torch.from_numpy(sent.view(np.int64)), sizes, to, self._host)
        numbers = received.numpy().view(np.uint64)
        heads = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        return np.delete(numbers, heads), int(numbers[0])

    def number(self) -> int:
        """Return the number of a round for `in_order`, which trainer 0 sends to the others."""
        return _from_first(self._launches.number, self._host, self._why_abandoned)

    def texts(self, own: str) -> list[str]:
        """Send a text to all trainers; return each trainer's text. Only its first 2048 bytes are sent."""
        cut = own.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        received = self.headers(np.tile(np.frombuffer(cut, np.int64), (self.world_size, 1)))
        return [line.tobytes().rstrip(b"\0").decode(errors="ignore") for line in received]

    @contextmanager
    def in_order(self, number: int) -> Iterator[None]:
        """Run the block, which sends rows, once all rounds with lower numbers have sent theirs, those of other
        exchanges too."""
        with self._launches.in_order(number):
            yield

    def rows(self, sent: Tensor, sent_counts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Send the first lines to trainer 0, the next ones to trainer 1, and so on; return what all sent to this one.
        sent: [lines, dim]."""
        received = torch.empty((sum(counts), sent.shape[1]), dtype=sent.dtype, device=sent.device)
        self._all_to_all(_bytes_of(received), _bytes_of(sent), list(counts), list(sent_counts), self._launches.group)
        return received

    def _all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        counts: list[int] | None,
        sent_counts: list[int] | None,
        group: dist.ProcessGroup,
    ) -> None:
        work = dist.all_to_all_single(received, sent, counts, sent_counts, group=group, async_op=True)
        if received.is_cuda:
            work.wait()  # the device's queue waits, and this thread does not
        else:
            _wait_in_slices(work, self._why_abandoned)

    def _why_abandoned(self) -> Exception | None:
        closed = "the embeddings were closed before all trainers had joined a step"
        return StreamError(closed) if self.is_abandoned else None


def _from_first(number: Callable[[], int], group: dist.ProcessGroup, why_not: Callable[[], Exception | None]) -> int:
    """Return the number that trainer 0 computes, on all trainers. why_not: as in `_wait_in_slices`."""
    sent = torch.tensor([number() if dist.get_rank() == 0 else 0])
    _wait_in_slices(dist.broadcast(sent, 0, group=group, async_op=True), why_not)
    return int(sent)


def _wait_in_slices(work: dist.Work, why_not: Callable[[], Exception | None]) -> None:
    """Wait for an exchange between CPUs, until `why_not` returns an error. Waits in slices, because a thread that is
    inside torch when the process exits would abort it."""
    while True:
        try:
            work.wait(_SLICE)
            return
        except RuntimeError:
            if work.is_completed():  # with an error, which this raises; or since the slice ended
                work.wait()
                return
            if (error := why_not()) is not None:
                raise error from None


def _bytes_of(rows: Tensor) -> Tensor:
    """Return the rows in a form that every backend takes."""
    return rows if rows.dtype == torch.float32 else rows.view(torch.uint8)


class RowExchange:
    """How the rows and gradients of each group of tables travel between trainers.

    By rows, a row comes from its owner, and its gradient goes there. Replicated, a trainer has the rows that it needs,
    and its gradients go to all. By columns, each trainer sends its columns of the row and gets those of the gradient.
    """

    def __init__(self, exchange: Exchange, groups: TableGroups) -> None:
        self._exchange, self._groups, world_size = exchange, groups, exchange.world_size
        self._bounds = [[dim * rank // world_size for rank in range(world_size + 1)] for _, dim in groups.layouts]

    def rows(self, group: int, rows: Tensor, asked: Sequence[int], own: Sequence[int]) -> Tensor:
        """Return the rows of this trainer's ids. rows: the rows here that trainers have asked for. asked: how many ids
        each trainer has sent here. own: how many ids this trainer has sent to each."""
        kind = self._groups.kinds[group]
        if kind == "replicated":
            return rows
        if kind == "rows":
            return self._exchange.rows(rows, asked, own)
        widths = self._widths(group)
        sent = [lines * rows.shape[1] for lines in asked]
        received = [lines * width for lines, width in zip(own, widths, strict=True)]
        parts = self._exchange.rows(rows.view(-1, 1), sent, received).split(received)
        lines = own[self._exchange.rank]
        return torch.cat([part.view(lines, width) for part, width in zip(parts, widths, strict=True)], 1)

    def gradients(self, group: int, sums: Tensor, own: Sequence[int], received: Sequence[int]) -> Tensor:
        """Return the gradients that all trainers have for the rows here. sums: the gradients of this trainer's ids.
        own: how many ids this trainer has sent to each. received: how many each trainer has sent here."""
        kind = self._groups.kinds[group]
        if kind == "rows":
            return self._exchange.rows(sums, own, received)
        if kind == "replicated":
            return self._exchange.rows(sums.repeat(len(own), 1), own, received)
        widths, bounds = self._widths(group), self._bounds[group]
        parts = [sums[:, begin:end].reshape(-1, 1) for begin, end in pairwise(bounds)]
        width = widths[self._exchange.rank]
        sizes = [lines * width for lines in received]
        return self._exchange.rows(torch.cat(parts), [len(part) for part in parts], sizes).view(-1, width)

    def _widths(self, group: int) -> list[int]:
        """Return how many columns of a group's rows each trainer has."""
        bounds = self._bounds[group]
        return [end - begin for begin, end in pairwise(bounds)]
