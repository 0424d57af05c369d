"""Drop-ins for nn.Embedding and nn.EmbeddingBag, which look their ids up in a table of an `Embeddings` inside forward.

In train() with gradients a lookup belongs to the open step, which ends with `step()` of the optimizer that
`embeddings.optimizer(...)` returned. In eval(), or under no_grad, a lookup reads and changes nothing. The modules
own no Parameter: the rows are no part of a state_dict, which only has the step that they must be at. `weight` is a
lookup of all ids, for models that read the weight of nn.Embedding.

EmbeddingBag looks up one row for each id, and torch pools them: so modes, weights, their gradients and errors are
torch's, at the cost of the memory of the rows before they are pooled.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Never, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag

from satrap.config.tables import Table
from satrap.config.validation import check_choice, check_integer, kind_of, known_arguments, suggest
from satrap.errors import ConfigError, InputError, StreamError
from satrap.monitor.memory import memory
from satrap.train.embeddings import Embeddings, session_of

_NO_WEIGHT = (
    "weight is all rows of table {!r}, and {}. Call the module with the ids that the loss needs, such as targets and "
    "the negatives of satrap.negatives; for evaluation satrap.full_softmax and satrap.topk read the rows in parts"
)
_IN_EVAL = (
    "optimizer.step() found no gradient of rows, since a module over table {!r} was in eval(), which reads rows only: "
    "call model.train() before forward, or requires_grad_(False) of the module to train the other parameters alone"
)
_NO_EXPORT = (
    "an export cannot include the rows of {}, which are outside the model: put "
    "torch.nn.{}.from_pretrained(module.weight.detach()) in place of the module before the export, or export the part "
    "of the model that takes rows as an input"
)
_COPIES_OF_WEIGHT = 4  # rows, gradients, gradients of the update, and what the model computes of them
_CPU = torch.device("cpu")


class _TableModule(torch.nn.Module):
    """What both modules share: the table, and the lookup of a tensor of ids."""

    def __init__(self, embeddings: Embeddings, table: Table | str, padding_idx: int | None) -> None:
        super().__init__()
        if not isinstance(embeddings, Embeddings):
            raise ConfigError(f"embeddings is {kind_of(embeddings)}; expected the satrap.Embeddings that has the table")
        tables = {table.name: table for table in embeddings.features.tables}
        name = table.name if isinstance(table, Table) else table
        if not isinstance(name, str) or name not in tables:
            raise ConfigError(
                f"table is {name!r}, which the embeddings do not have; {suggest(str(name), list(tables))}"
            )
        if isinstance(table, Table) and table != tables[name]:
            raise ConfigError(f"table {name!r} is configured differently from that of the embeddings: pass its name")
        self.table: Table = tables[name]
        """The table that has the rows."""
        self.num_embeddings: int | None = self.table.num_rows
        """The table's num_rows; None: any 64-bit number is an id."""
        self.embedding_dim: int = self.table.dim
        """The table's dim."""
        self.padding_idx: int | None = self._resolve_padding(padding_idx)
        """The id that stands for no id: it has no row and reads as zeros."""
        self._session = session_of(embeddings)
        self._session.note_padding(self.table.name, self.padding_idx)
        self._is_frozen = False
        self._expected_step: int | None = None
        self._moved = torch.empty(0, dtype=torch.float32)
        """Has the device and the dtype of the model. No buffer, which DDP would send in each forward pass."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._moved = fn(self._moved)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _resolve_padding(self, padding_idx: int | None) -> int | None:
        if padding_idx is None:
            return None
        count, where = self.num_embeddings, f"table {self.table.name!r}"
        low, high = (0, 2**63 - 1) if count is None else (-count, count - 1)
        number = check_integer(where, "padding_idx", padding_idx, low, high)
        return number if number >= 0 or count is None else count + number

    def __getattr__(self, name: str) -> Any:
        # No property: AttributeError of a property ends here, without its message.
        return self._all_rows() if name == "weight" else super().__getattr__(name)

    def _all_rows(self) -> Tensor:
        """Look up all ids, [num_embeddings, dim]. A copy: what is written to it does not reach the table."""
        count = self.num_embeddings
        if count is None:
            raise AttributeError(
                _NO_WEIGHT.format(self.table.name, "the table has no num_rows, so any number is an id")
            )
        needed, (used, allowed) = _COPIES_OF_WEIGHT * 4 * count * self.embedding_dim, memory()["machine"]
        if needed > allowed - used:
            why = f"a step with {count} rows takes {needed} bytes, of which {allowed - used} are free"
            raise AttributeError(_NO_WEIGHT.format(self.table.name, why))
        rows: Tensor = self._rows(torch.arange(count, device=self._moved.device))
        return rows

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze the module, or train it again: the lookups of a frozen one read and change nothing, as in eval().
        ConfigError if the table is frozen, whose rows no module trains."""
        if requires_grad and self.table.frozen is True:
            raise ConfigError(
                f"table {self.table.name!r} is frozen, and requires_grad is True: leave frozen=True out of the table"
            )
        self._is_frozen = not requires_grad
        return self

    def __reduce_ex__(self, _: object) -> Never:
        raise TypeError(
            f"a module over table {self.table.name!r} can be neither copied nor pickled, because its rows live in the "
            "table: create another module over the same table, or save the rows with satrap.Checkpoint"
        )

    def get_extra_state(self) -> Tensor:
        """Return the step that the rows are at, for state_dict."""
        return torch.tensor([self._session.step])

    def set_extra_state(self, state: Any) -> None:
        """Record, for load_state_dict, which step the rows must be at when they are looked up."""
        self._expected_step = int(state[0])

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        if f"{prefix}weight" in state_dict:
            error_messages: list[str] = arguments[-1]
            error_messages.append(
                f"the state has {prefix}weight, of a model with torch's embeddings, and the rows are in table "
                f"{self.table.name!r}: load the state before satrap.convert(..., weights=True), or write the rows with "
                f"embeddings.tables[{self.table.name!r}].write(ids, rows)"
            )
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.table.name!r}, {self.embedding_dim}{padding}{', frozen' * self._is_frozen}"

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled model has a graph break here
    def _rows(self, ids: Tensor) -> Tensor:
        """Return the row of each id, [ids, dim], with zeros for padding."""
        self._require_lookup(ids)
        kept, positions = self._kept(ids)
        look_up = self._session.look_up if self._trains() else self._reader()
        rows = look_up({self.table.name: kept}, ids.device)[self.table.name]
        return self._finished(rows, ids, positions)

    def _require_lookup(self, ids: Tensor) -> None:
        """Raise an error if the ids cannot be looked up."""
        self._require_no_export()
        self._require_ids(ids)
        self._require_expected_step()

    def _require_no_export(self) -> None:
        """Raise ConfigError while torch exports the model. Called before ids are used, which have no values then."""
        is_traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if is_traced or torch.compiler.is_exporting():
            self._refuse_export()

    @torch.compiler.disable(reason=_NO_EXPORT.format("a table", "Embedding"))  # type: ignore[untyped-decorator]
    def _refuse_export(self) -> Never:
        # With strict=True torch does not call this, and quotes the reason.
        raise ConfigError(_NO_EXPORT.format(f"table {self.table.name!r}", type(self).__name__))

    def _kept(self, ids: Tensor) -> tuple[NDArray[np.uint64], Tensor | None]:
        """Return the ids in CPU memory, without padding, and their positions; None: there is no padding."""
        flat, positions = ids.reshape(-1).to(_CPU, torch.int64), None
        if self.padding_idx is not None:
            positions = (flat != self.padding_idx).nonzero().reshape(-1)
            flat, positions = (flat, None) if len(positions) == len(flat) else (flat[positions], positions)
        try:
            return flat.numpy().view(np.uint64), positions
        except RuntimeError as error:
            raise ConfigError(
                f"table {self.table.name!r}: the ids have no values that can be read, as inside torch.func.grad and "
                "vmap: call the module before, and give the function its rows"
            ) from error

    def _finished(self, rows: Tensor, ids: Tensor, positions: Tensor | None) -> Tensor:
        """Return the rows of `_kept` ids as the model gets them, with zeros for padding."""
        rows = (rows.detach() if self.table.frozen is True else rows).to(self._moved.dtype)
        if positions is None:
            return rows
        return rows.new_zeros(ids.numel(), self.embedding_dim).index_copy(0, positions.to(rows.device), rows)

    def _require_ids(self, ids: Any) -> None:
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            kind = str(ids.dtype) if isinstance(ids, Tensor) else kind_of(ids)
            hint = ": pass ids.view(torch.int64)" if kind == "torch.uint64" else ""
            raise InputError(f"table {self.table.name!r}: ids are {kind}; expected a tensor of int64 or int32{hint}")

    def _trains(self) -> bool:
        """Return whether lookups are for training; others read and change nothing."""
        return self.training and torch.is_grad_enabled() and not self._is_frozen

    def _reader(self) -> Callable[[Mapping[str, NDArray[np.uint64]], torch.device], dict[str, Tensor]]:
        """Prepare for a lookup without training; return the function that reads rows as they are."""
        if not self._is_frozen or self._session.deterministic:  # another module may train the rows
            self._session.apply_submitted()
        if not self._is_frozen and torch.is_grad_enabled() and self.table.frozen is not True:
            self._session.why_untrained = _IN_EVAL.format(self.table.name)
        return self._session.read

    def _require_expected_step(self) -> None:
        """Raise StreamError unless the rows are at the step that a loaded state_dict expects."""
        if self._expected_step is not None and self._expected_step != (step := self._session.step):
            raise StreamError(
                f"load_state_dict was given a state of step {self._expected_step}, but table {self.table.name!r} is at "
                f"step {step}: a state_dict has no rows of tables; save and resume both with satrap.Checkpoint"
            )
        self._expected_step = None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled model has a graph break here
def rows_together(modules: Sequence[_TableModule], given: Sequence[Tensor]) -> list[Tensor]:
    """Return the row of each id of each module, [ids, dim], with zeros for padding. Modules of one `Embeddings` share a
    call: one for the modules that train, and one for the modules that only read."""
    for module, ids in zip(modules, given, strict=True):
        module._require_lookup(ids)
    kept = [module._kept(ids) for module, ids in zip(modules, given, strict=True)]
    rows = _look_up([ids for ids, _ in kept], modules, [ids.device for ids in given])
    return [
        module._finished(part, ids, positions)
        for module, part, ids, (_, positions) in zip(modules, rows, given, kept, strict=True)
    ]


def _look_up(
    ids: Sequence[NDArray[np.uint64]], modules: Sequence[_TableModule], devices: Sequence[torch.device]
) -> list[Tensor]:
    """Return the rows of the ids of each module, on its device."""
    rows: dict[int, Tensor] = {}
    together: dict[tuple[bool, Any, torch.device], list[int]] = {}
    for number, (module, device) in enumerate(zip(modules, devices, strict=True)):
        trains = module._trains()
        look_up = module._session.look_up if trains else module._reader()
        together.setdefault((trains, look_up, device), []).append(number)
    for (_, look_up, device), numbers in sorted(together.items(), key=lambda item: item[0][0]):  # reads first
        by_table: dict[str, list[int]] = {}
        for number in numbers:
            by_table.setdefault(modules[number].table.name, []).append(number)
        joined = {
            table: ids[same[0]] if len(same) == 1 else np.concatenate([ids[number] for number in same])
            for table, same in by_table.items()
        }
        answer = look_up(joined, device)
        for table, same in by_table.items():
            parts = answer[table].split([len(ids[number]) for number in same]) if len(same) > 1 else [answer[table]]
            rows |= zip(same, parts, strict=True)
    return [rows[number] for number in range(len(modules))]


class Embedding(_TableModule):
    """A drop-in for nn.Embedding over a table of an `Embeddings`. It has no weight: the rows are in the table."""

    @known_arguments()
    def __init__(self, embeddings: Embeddings, table: Table | str, *, padding_idx: int | None = None) -> None:
        """embeddings: the `Embeddings` that has the table and trains it.

        table: the table, or its name. Several modules may share one.
        padding_idx: an id that stands for no id: it has no row, reads as zeros and is not trained.
        """
        super().__init__(embeddings, table, padding_idx)

    def forward(self, input: Tensor) -> Tensor:
        """Return the row of each id, [*input.shape, embedding_dim]."""
        self._require_no_export()
        return self._finish(self._rows(input), input)

    def _require_arguments(self, input: Tensor) -> None:
        """Raise InputError if this is no tensor of ids."""
        self._require_no_export()
        self._require_ids(input)

    def _finish(self, rows: Tensor, input: Tensor) -> Tensor:
        """Return the result of forward. rows: the rows of its ids."""
        return rows.view(*input.shape, self.embedding_dim)

    __call__: Callable[..., Tensor]


class EmbeddingBag(_TableModule):
    """A drop-in for nn.EmbeddingBag over a table of an `Embeddings`. It has no weight: the rows are in the table."""

    @known_arguments()
    def __init__(
        self,
        embeddings: Embeddings,
        table: Table | str,
        *,
        mode: Literal["sum", "mean", "max"] = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> None:
        """embeddings: the `Embeddings` that has the table and trains it.

        table: the table, or its name. Several modules may share one.
        mode: how the rows of a bag are pooled.
        include_last_offset: whether the last offset is where the last bag ends.
        padding_idx: an id that stands for no id: it has no row and is left out of its bag.
        """
        super().__init__(embeddings, table, padding_idx)
        check_choice(f"table {self.table.name!r}", "mode", mode, ("sum", "mean", "max"))
        self.mode, self.include_last_offset = mode, include_last_offset

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        return f"{super().extra_repr()}, mode={self.mode!r}"

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Return the pooled rows of each bag, [bags, embedding_dim], as nn.EmbeddingBag does."""
        self._require_arguments(input, offsets, per_sample_weights)
        return self._finish(self._rows(input), input, offsets, per_sample_weights)

    def _require_arguments(self, input: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Let torch refuse bad arguments before a lookup inserts rows."""
        self._require_no_export()
        self._require_ids(input)
        if not self._has_single_ids(input, offsets, weights):
            with torch.no_grad():
                row = torch.zeros(1, 1, dtype=self._moved.dtype, device=input.device)
                self._pool(input.new_zeros(input.shape), row, offsets, weights, None)

    def _finish(
        self, rows: Tensor, input: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """Return the result of forward. rows: the rows of its ids."""
        if self._has_single_ids(input, offsets, weights):
            return rows  # zeros for padding, as the sum, mean and maximum of no row are
        lines = torch.arange(len(rows), device=input.device)
        padding = None
        if self.padding_idx is not None and len(rows):
            is_padding = input.reshape(-1) == self.padding_idx
            padding = int(is_padding.int().argmax())  # the line that stands for all padding
            if not is_padding[padding]:
                padding = None
            else:
                lines = torch.where(is_padding, padding, lines)
        if not len(rows):  # torch takes no weight without lines
            rows = torch.cat([rows, rows.new_zeros(1, self.embedding_dim)])
        return self._pool(lines.view(input.shape), rows, offsets, weights, padding)

    def _has_single_ids(self, input: Tensor, offsets: Tensor | None, weights: Tensor | None) -> bool:
        """Return whether each bag has exactly one id, so that nothing is pooled."""
        if weights is not None or offsets is None:
            return weights is None and input.dim() == 2 and input.shape[1] == 1
        end = len(input) + self.include_last_offset if input.dim() == 1 else -1
        if offsets.dim() != 1 or len(offsets) != end or offsets.dtype not in (torch.int64, torch.int32):
            return False
        return torch.equal(offsets, torch.arange(end, dtype=offsets.dtype, device=offsets.device))

    def _pool(
        self, lines: Tensor, rows: Tensor, offsets: Tensor | None, weights: Tensor | None, padding: int | None
    ) -> Tensor:
        return embedding_bag(
            lines,
            rows,
            None if offsets is None else offsets.to(lines.dtype),
            mode=self.mode,
            per_sample_weights=weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

    __call__: Callable[..., Tensor]


def require_no_export(modules: Iterable[torch.nn.Module]) -> None:
    """Raise ConfigError while torch exports a model that calls these modules, if one is over a table."""
    for module in modules:
        if isinstance(module, _TableModule):
            module._require_no_export()


def call_together(modules: Sequence[torch.nn.Module], arguments: Sequence[tuple[Any, ...]]) -> list[Tensor]:
    """Call each module with its arguments; return what they return. Modules over tables look their rows up in one call;
    a module that has hooks is called by itself, so that they run."""
    ours: dict[int, Any] = {
        number: module
        for number, module in enumerate(modules)
        if isinstance(module, Embedding | EmbeddingBag) and not (module._forward_hooks or module._forward_pre_hooks)
    }
    for number, module in ours.items():
        module._require_arguments(*arguments[number])
    rows = rows_together(list(ours.values()), [arguments[number][0] for number in ours])
    results = {number: ours[number]._finish(part, *arguments[number]) for number, part in zip(ours, rows, strict=True)}
    return [results[n] if n in results else modules[n](*given) for n, given in enumerate(arguments)]
