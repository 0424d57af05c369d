"""Trainers in threads of one process, which exchange numbers as `ProcessGroup.exchange` does between processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from satrap.train.joint_batches import Exchange
from waiting import DEADLINE_SECONDS

Result = TypeVar("Result")


class TrainerThreads:
    """Some trainers, each with a thread."""

    def __init__(self, num: int) -> None:
        self._sent: list[list[Sequence[int]]] = [[] for _ in range(num)]
        self._changed = threading.Condition()
        self._errors: list[BaseException] = []

    def exchange_of(self, rank: int) -> Exchange:
        """Return what exchanges the numbers of a trainer."""

        def exchange(numbers: Sequence[int], *, patient: bool) -> Callable[[], list[Sequence[int]]]:
            with self._changed:
                at = len(self._sent[rank])
                self._sent[rank].append(numbers)
                self._changed.notify_all()
            return partial(self._receive, at)

        return exchange

    def _receive(self, at: int) -> list[Sequence[int]]:
        with self._changed:
            is_over = self._changed.wait_for(
                lambda: self._errors or all(len(sent) > at for sent in self._sent), DEADLINE_SECONDS
            )
            assert is_over and not self._errors, "another trainer failed, or made no such exchange"
            return [sent[at] for sent in self._sent]

    def run(self, work: Callable[[int], Result]) -> list[Result]:
        """Return the result of the work of each trainer, by rank; raise the first error."""
        results: dict[int, Result] = {}

        def run(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                with self._changed:
                    self._errors.append(error)
                    self._changed.notify_all()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self._sent))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return [results[rank] for rank in range(len(threads))]
