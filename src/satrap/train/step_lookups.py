"""The lookups that modules make inside forward during one step: their leaves, and the gradients that come to them.

A batch of a stream has the lookups of its step; between streams, `ModuleLookups` has them. A lookup that no backward
pass reaches leaves nothing to do. A backward pass that comes after the end of the step raises an error, since its
gradient would be lost.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from satrap.device.device_stream import to_device
from satrap.errors import StreamError
from satrap.worker.rows import Ids
from satrap.worker.worker import IdGradients, Worker


class StepLookups:
    """The lookups of one step."""

    def __init__(self, step: int, on_reach: Callable[[], None] = lambda: None) -> None:
        """on_reach: called whenever a backward pass has reached another lookup; must not refer to a batch."""
        self.step = step
        self.leaves: list[Tensor] = []
        """The leaves that have a gradient."""
        self.num_lookups = 0
        self.tables: set[str] = set()
        """The tables that were looked up."""
        self._on_reach = on_reach
        self._reached: dict[int, Lookup] = {}  # by number
        self._ended_because = ""

    @property
    def has_gradient(self) -> bool:
        """Whether a backward pass has reached any lookup."""
        return bool(self._reached)

    def add(self, table: str, ids: Ids, rows: Tensor) -> Tensor:
        """Return the rows that were looked up for the ids, for a model. The caller may reuse the memory of the ids."""
        return self.add_chunks(table, [ids.copy()], rows)[0]

    def add_chunks(self, table: str, chunks: list[Ids], rows: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of each of several arrays of ids, which were looked up together, for a model."""
        self.num_lookups += 1
        self.tables.add(table)
        lookup = Lookup(self, self.num_lookups, table, chunks)
        leaf = (rows.view(-1, len(chunks), rows.shape[1]) if lookup.is_interleaved else rows).requires_grad_()
        leaf.register_post_accumulate_grad_hook(lookup)
        of_chunks: tuple[Tensor, ...] = _Recorded.apply(leaf, lookup)  # type: ignore[no-untyped-call]
        return of_chunks

    def reach(self, lookup: "Lookup", leaf: Tensor) -> None:
        """Note that a backward pass has reached the lookup."""
        if self._ended_because:
            leaf.grad = None
            raise StreamError(
                f"step {self.step}: a loss reached a lookup of table {lookup.table!r} after {self._ended_because}, so "
                "its gradient would be lost: call backward() of all losses before the step, or forward again after it"
            )
        if lookup.number not in self._reached:
            lookup.leaf = leaf
            self._reached[lookup.number] = lookup
            self.leaves.append(leaf)
            self._on_reach()

    def reached(self) -> list["Lookup"]:
        """Return the lookups that have a gradient, in their order."""
        return [lookup for _, lookup in sorted(self._reached.items())]

    def forget(self) -> None:
        """Clear the gradients."""
        for lookup in self._reached.values():
            lookup.forget()
        self._reached.clear()
        self.leaves.clear()

    def end(self, why: str) -> None:
        """Clear the gradients, and refuse others: they would come after `why`."""
        self._ended_because = why
        self.forget()


class Lookup:
    """One lookup: the hook of its leaf. Must not refer to the leaf before it has a gradient, so that it is collected
    with the user's last reference."""

    __slots__ = ("__weakref__", "_step", "chunks", "is_interleaved", "leaf", "number", "reached_chunks", "table")

    def __init__(self, step: StepLookups, number: int, table: str, chunks: list[Ids]) -> None:
        """chunks: arrays of ids, whose rows follow one another."""
        self._step, self.number, self.table, self.chunks = step, number, table, chunks
        self.is_interleaved = len(chunks) > 1 and len({len(ids) for ids in chunks}) == 1
        """Whether leaf and gradient are [ids, chunks, dim]: so is the gradient where a model joins the chunks side by
        side."""
        self.leaf: Tensor | None = None
        self.reached_chunks: set[int] = set()
        """The numbers of the chunks that a backward pass has reached: only they have a gradient."""

    def __call__(self, leaf: Tensor) -> None:
        if leaf.grad is not None:  # a Function of the model may stop all gradients
            self._step.reach(self, leaf)

    def forget(self) -> None:
        """Clear the gradient."""
        assert self.leaf is not None
        self.leaf.grad = None
        self.leaf = None
        self.reached_chunks.clear()

    @property
    def is_whole(self) -> bool:
        """Whether all chunks have a gradient."""
        return len(self.reached_chunks) == len(self.chunks)

    def gradient(self) -> Tensor:
        """Return the gradient of all chunks, with zeros for those that have none."""
        assert self.leaf is not None and self.leaf.grad is not None
        return self.leaf.grad

    def gradients(self) -> list[tuple[Ids, Tensor]]:
        """Return the ids and the gradient of each chunk that has one."""
        whole = self.gradient()
        parts = whole.unbind(1) if self.is_interleaved else whole.split([len(ids) for ids in self.chunks])
        given = enumerate(zip(self.chunks, parts, strict=True))
        return [part for number, part in given if number in self.reached_chunks]


class _Recorded(torch.autograd.Function):
    """The rows of a lookup as a model uses them. They are neither a leaf nor views of one, and each chunk has a version
    counter: so a model may change them in place, as it may change what nn.Embedding returns."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, lookup: Lookup) -> tuple[Tensor, ...]:
        ctx.lookup = lookup
        ctx.set_materialize_grads(False)
        rows = leaf.data.view(-1, leaf.shape[-1])
        return tuple(part.data for part in rows.split([len(ids) for ids in lookup.chunks]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        lookup: Lookup = ctx.lookup
        lookup.reached_chunks |= {number for number, gradient in enumerate(gradients) if gradient is not None}
        first = next((gradient for gradient in gradients if gradient is not None), None)
        if first is None:
            return None, None
        if len(gradients) == 1:
            # Two gradients may be views of one: clipping and GradScaler, which change both in place, must do so once.
            return first.clone() if first._is_view() else first, None
        if lookup.is_interleaved and _are_side_by_side(gradients):
            num_ids, dim = first.shape
            block = first.as_strided((num_ids, len(gradients), dim), (first.stride(0), dim, 1))
            return block.clone(memory_format=torch.contiguous_format), None
        parts = [
            first.new_zeros(len(ids), first.shape[1]) if gradient is None else gradient
            for ids, gradient in zip(lookup.chunks, gradients, strict=True)
        ]
        return torch.stack(parts, 1) if lookup.is_interleaved else torch.cat(parts), None


def _are_side_by_side(gradients: Sequence[Tensor | None]) -> bool:
    """Return whether the gradients are neighbouring columns of one matrix, as they are where torch.cat joined the rows.
    Then one copy of them all is faster."""
    first = gradients[0]
    if first is None or type(first) is not Tensor or first.stride(1) != 1:
        return False
    stride, begin, base, dim = first.stride(), first.storage_offset(), first._base, first.shape[1]
    return base is not None and all(
        gradient is not None
        and gradient._base is base
        and gradient.stride() == stride
        and gradient.storage_offset() == begin + number * dim
        for number, gradient in enumerate(gradients)
    )


def read_rows(
    worker: Worker, ids: Mapping[str, Ids], step: int, oldest_open: int, device: torch.device
) -> dict[str, Tensor]:
    """Return the rows of ids by table for training in this step, [ids, dim], as tensors on the model's device."""
    with worker.on_device():
        by_table = worker.look_up_ids(ids, step, oldest_open)
    return {
        table: rows.to(device) if isinstance(rows, Tensor) else to_device(rows, device)
        for table, rows in by_table.items()
    }


def read_without_training(worker: Worker, ids: Mapping[str, Ids], device: torch.device) -> dict[str, Tensor]:
    """Return the rows of ids by table as they are, [ids, dim], in one call that changes no table."""
    return {table: torch.from_numpy(rows).to(device) for table, rows in worker.tables.lookup_by_table(ids).items()}


@dataclass(slots=True, eq=False)
class TakenGradients:
    """The gradients of lookups that one update applies, by table, in the order of the lookups."""

    ticket: Any
    """The ticket of all their ids."""
    parts: dict[str, list[tuple[Tensor, float]]]
    """Each gradient with the factor by which it is still to be multiplied."""

    @classmethod
    def of(cls, worker: Worker, lookups: Sequence[tuple[Lookup, float]]) -> "TakenGradients | None":
        """Take the gradients as they are now, times a factor for each lookup; None if there is none."""
        if not lookups:
            return None
        ids: dict[str, list[Ids]] = {}
        parts: dict[str, list[tuple[Tensor, float]]] = {}
        for lookup, weight in lookups:
            for of_chunk, gradient in lookup.gradients():
                ids.setdefault(lookup.table, []).append(of_chunk)
                parts.setdefault(lookup.table, []).append((gradient, weight))
        return cls(worker.id_ticket({name: np.concatenate(given) for name, given in ids.items()}), parts)

    def for_update(self, worker: Worker) -> IdGradients:
        """Return the gradients where the rows are: in CPU memory, or on their device."""
        return IdGradients(self.ticket, {name: joined(worker, parts) for name, parts in self.parts.items()})


def joined(worker: Worker, parts: Sequence[tuple[Tensor, float]]) -> Any:
    """Return gradients times their factors as one array, or as one tensor if the rows are on a device."""
    given = [scaled(gradient, weight) for gradient, weight in parts]
    whole = given[0] if len(given) == 1 else torch.cat(given)
    if whole.dim() == 3 and not worker.rows.takes_interleaved:
        whole = whole.transpose(0, 1).flatten(0, 1)
    if worker.device is not None:
        return whole.to(worker.device).contiguous()
    return whole.cpu().float().contiguous().numpy()


def scaled(gradient: Tensor, weight: float) -> Tensor:
    """Return a gradient times a weight; a product is float32."""
    return gradient.detach() if weight == 1.0 else gradient.detach().float() * weight
