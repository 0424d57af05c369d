"""A machine of hypothesis that makes random calls of a store and of the dictionary model of oracle.py, every option
mixed with every other.

Each example draws a table (optimizer, dtype, admission, capacity, buckets, expiry, ...), then calls. After every call
the whole universe of ids is read and compared: membership, values, state, counters. Small capacities and few ids make
eviction, refusal and expiry the normal case. A replica follows by changes-only saves, and may take the primary's
place at any moment, which shows that stamps and sightings travel too.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import event
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from oracle import Full, NonFinite, Oracle, as_ids
from satrap.config.id_set import IdSet
from satrap.config.optimizers import SGD, Adagrad, Adam, AdamW, Ftrl, RowWiseAdagrad
from satrap.config.tables import Always, Constant, MinCount, Normal, Probability, ScaledUniform, Table, Uniform, Zeros
from satrap.errors import CapacityError, NonFiniteError, TicketError
from satrap.table.group_cut import GroupCut
from satrap.table.store import Store
from satrap.table.table_group import TableGroup

UNIVERSE = [*range(16), 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1, *(0x9E3779B97F4A7C15 * k % 2**64 for k in range(1, 9))]

lrs = st.sampled_from([0.0625, 0.1, 0.3, 1.0])
decays = st.sampled_from([0.0, 0.0, 0.01, 0.1])
betas = st.tuples(st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.5, 0.99, 0.999]))
epsilons = st.sampled_from([1e-8, 1e-4])
sums = st.sampled_from([0.0, 0.1])
optimizers: st.SearchStrategy[Any] = st.one_of(
    st.builds(SGD, lr=lrs),
    st.builds(SGD, lr=lrs, momentum=st.sampled_from([0.5, 0.9]), nesterov=st.booleans(), weight_decay=decays),
    st.builds(Adagrad, lr=lrs, weight_decay=decays, initial_accumulator_value=sums, eps=epsilons),
    st.builds(RowWiseAdagrad, lr=lrs, weight_decay=decays, initial_accumulator_value=sums, eps=epsilons),
    st.builds(Adam, lr=lrs, betas=betas, eps=epsilons, weight_decay=decays),
    st.builds(AdamW, lr=lrs, betas=betas, eps=epsilons, weight_decay=decays),
    st.builds(Ftrl, lr=lrs, beta=st.sampled_from([0.1, 1.0]), l1=st.sampled_from([0.0, 0.05]), l2=decays),
)
initials: st.SearchStrategy[Any] = st.one_of(
    st.just(Uniform()), st.just(Normal(std=0.5)), st.just(Zeros()), st.just(Constant(0.75)), st.just(ScaledUniform())
)
admissions: st.SearchStrategy[Any] = st.one_of(
    st.just(Always()),
    st.builds(Probability, st.sampled_from([0.3, 0.7, 1.0])),
    st.builds(MinCount, st.sampled_from([2, 3, 2, 1, 4]), window=st.sampled_from([3, 5, 8, 1, 1 << 20])),
)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    capacity = draw(st.one_of(st.none(), st.integers(1, 24), st.integers(1, 8)))
    frozen: st.SearchStrategy[Any] = st.sampled_from([False, False, False, True, range(4), range(7, 2**64 - 1)])
    frozen |= st.sets(st.sampled_from(UNIVERSE))
    buckets = [b for b in (1, 2, 4, 8) if capacity is None or b <= capacity]
    return Table(
        draw(st.sampled_from(["item", "user", "ä b/c"])),
        dim=draw(st.sampled_from([1, 2, 3, 8, 17])),
        optimizer=draw(optimizers),
        initial=draw(initials),
        dtype=draw(st.sampled_from(["float32", "float32", "float16", "bfloat16"])),
        admission=draw(admissions),
        capacity=capacity,
        on_full=draw(st.sampled_from(["evict", "evict", "evict", "grow", *(["raise"] if capacity else [])])),
        expire_after=draw(st.one_of(st.none(), st.integers(1, 6))),
        absent=draw(st.sampled_from(["initial", "zeros"])),
        on_nonfinite=draw(st.sampled_from(["raise", "skip"])),
        frozen=draw(frozen),
        num_buckets=draw(st.sampled_from(buckets)),
    )


ids_lists = st.lists(st.sampled_from(UNIVERSE), max_size=9)
# What a step argument may be: the store's own, or the latest plus this (repeat, jump, go back).
step_moves = st.one_of(st.none(), st.sampled_from([1, 1, 1, 0, 0, 2, 5, -1, -2, -9]))
open_moves = st.one_of(st.none(), st.none(), st.integers(0, 4))
maybe_lr = st.one_of(st.none(), lrs)
batches = st.lists(st.tuples(ids_lists, step_moves, open_moves), min_size=1, max_size=5)


class StoreMachine(RuleBasedStateMachine):
    tickets: Bundle[Any] = Bundle("tickets")

    updates_ids = True
    """Whether the store updates ids without a ticket."""
    has_cuts = True
    """Whether a cut stays as it was while the store is used."""
    position = "position"
    """What an error calls the place of a gradient."""

    def create(self, table: Table, seed: int, num_threads: int) -> Any:
        return Store(table, seed=seed, num_threads=num_threads)

    def load(self, path: Path, num_threads: int) -> Any:
        loaded, table = Store.load(path, num_threads=num_threads), self.oracle.table
        if not isinstance(table.frozen, IdSet):
            return loaded
        group = TableGroup([table], seed=loaded.seed, num_threads=num_threads)  # with the ids, which no snapshot has
        group.restore({table.name: [path]})
        return group[table.name]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="satrap-property-"))
        self.num_files = 0
        self.replica: Any = None
        self.cut: tuple[GroupCut, Oracle, int] | None = None

    @initialize(table=tables(), seed=st.sampled_from([0, 1, 2**64 - 1]), num_threads=st.sampled_from([1, 2, 3]))
    def start(self, table: Table, seed: int, num_threads: int) -> None:
        self.oracle = Oracle(table, seed)
        self.num_threads = num_threads
        self.store = self.create(table, seed, num_threads)
        event(f"{type(table.optimizer).__name__} {table.dtype}")

    def teardown(self) -> None:
        if self.cut is not None:
            self.cut[0].release()
        shutil.rmtree(self.folder)

    @invariant()
    def same_as_the_model(self) -> None:
        if hasattr(self, "store"):
            self.oracle.compare(self.store, UNIVERSE)

    # -- lookups -----------------------------------------------------------------------------------------------------

    def _step(self, move: int | None) -> int | None:
        return None if move is None else max(1, self.oracle.latest_step + move)

    @rule(several=batches)
    def lookups(self, several: list[Any]) -> None:
        for ids, move, open_move in several:
            self._lookup(ids, move, open_move)

    @rule(several=batches, data=st.data())
    def train(self, several: list[Any], data: st.DataObject) -> None:
        """Batches looked up and updated at the same step."""
        for ids, move, open_move in several:
            looked_up = self._lookup(ids, move, open_move)
            if looked_up is not None:
                self.oracle.see(self.store)
                self._update(looked_up[1], ids, data, None, None)

    @rule(target=tickets, ids=ids_lists, move=step_moves, open_move=open_moves)
    def lookup(self, ids: list[int], move: int | None, open_move: int | None) -> Any:
        return self._lookup(ids, move, open_move)

    def _lookup(self, ids: list[int], move: int | None, open_move: int | None) -> Any:
        step = self._step(move)
        actual = self.oracle.latest_step + 1 if step is None else step
        oldest_open = None if open_move is None else max(1, actual - open_move)
        options: dict[str, Any] = {"step": step, "oldest_open": oldest_open}
        try:
            wanted = self.oracle.lookup(ids, **options)
        except Full:
            with pytest.raises(CapacityError, match=r"capacity|device_memory") as refused:
                self.store.lookup(as_ids(ids), **options)
            event("CapacityError")
            self._adopt(refused.value)
            self.oracle.compare(self.store, UNIVERSE)
            return None
        rows, ticket = self.store.lookup_for_update(as_ids(ids), **options)
        np.testing.assert_array_equal(rows, wanted)
        return ids, ticket, self.store

    def _adopt(self, refused: CapacityError) -> None:
        """Continue the model after a lookup that failed with this error."""
        self.oracle.adopt(self.store)

    @rule(ids=ids_lists)
    def lookup_without_training(self, ids: list[int]) -> None:
        out = np.full((len(ids), self.oracle.table.dim), np.nan, np.float32)
        rows = self.store.lookup(as_ids(ids), train=False, out=out)
        assert rows is out
        np.testing.assert_array_equal(rows, self.oracle.peek(ids))

    # -- updates -----------------------------------------------------------------------------------------------------

    def _gradients(self, data: st.DataObject, num: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="gradients"))
        shape = (num, self.oracle.table.dim)
        gradients = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 2, size=shape)
        gradients[rng.random(shape) < 0.1] = 0.0
        bad = data.draw(st.sampled_from([None] * 7 + [np.nan, np.inf, -np.inf]), label="not finite")
        if bad is not None and num:
            gradients[rng.integers(num), rng.integers(shape[1])] = bad
        return gradients.astype(np.float32)

    def _update(self, whom: Any, ids: list[int], data: st.DataObject, move: int | None, lr: float | None) -> None:
        gradients = self._gradients(data, len(ids))
        step = self._step(move)
        try:
            applied = self.oracle.update(ids, gradients, step=step)
        except NonFinite as bad:
            with pytest.raises(NonFiniteError, match=rf"{self.position} {bad.position}\b"):
                self.store.update(whom, gradients, step=step, lr=lr)
            event("NonFiniteError")
            return
        self.store.update(whom, gradients, step=step, lr=lr)
        self.oracle.settle(self.store, applied, lr)

    @precondition(lambda self: self.updates_ids)
    @rule(ids=ids_lists, data=st.data(), move=step_moves, lr=maybe_lr)
    def update(self, ids: list[int], data: st.DataObject, move: int | None, lr: float | None) -> None:
        self._update(as_ids(ids), ids, data, move, lr)

    @rule(looked_up=consumes(tickets), data=st.data(), move=step_moves, lr=maybe_lr)
    def update_by_ticket(self, looked_up: Any, data: st.DataObject, move: int | None, lr: float | None) -> None:
        if looked_up is None:
            return
        ids, ticket, store = looked_up
        if store is self.store:
            self._update(ticket, ids, data, move, lr)
        else:
            with pytest.raises(TicketError):
                self.store.update(ticket, np.zeros((len(ids), self.oracle.table.dim), np.float32))

    @rule(lr=lrs)
    def set_lr(self, lr: float) -> None:
        self.store.set_lr(lr)
        self.oracle.lr = lr

    # -- saving ------------------------------------------------------------------------------------------------------

    def _path(self) -> Path:
        self.num_files += 1
        return self.folder / str(self.num_files)

    def _reset_counters(self) -> None:
        for name in self.oracle.counters:
            self.oracle.counters[name] = 0

    @precondition(lambda self: self.cut is None)
    @rule(num_threads=st.sampled_from([1, 2, 3]))
    def save_and_load(self, num_threads: int) -> None:
        """The loaded store replaces the saved one."""
        path = self._path()
        version = self.store.save(path)
        loaded = self.load(path, num_threads)
        assert loaded.version == version == self.store.version
        assert loaded.table == self.oracle.table
        assert loaded.seed == self.oracle.seed
        self.store, self.replica = loaded, None  # it knows no version before its own
        self._reset_counters()

    @precondition(lambda self: self.replica is None and self.cut is None)
    @rule()
    def start_replica(self) -> None:
        path = self._path()
        self.store.save(path)
        self.replica = self.load(path, 1)

    @precondition(lambda self: self.replica is not None and self.cut is None)
    @rule()
    def ship_changes(self) -> None:
        """The replica catches up by the changes since its version."""
        path = self._path()
        version = self.store.save_changes(path, since=self.replica.version)
        self.replica.apply_changes(path)
        assert self.replica.version == version
        self.oracle.compare(self.replica, UNIVERSE, counters=False)

    @precondition(lambda self: self.replica is not None and self.cut is None)
    @rule()
    def fail_over(self) -> None:
        """Ships the changes, then continues with the replica: its stamps and sightings must be the primary's."""
        self.ship_changes()
        self.store, self.replica = self.replica, None
        self._reset_counters()

    # -- saving beside training --------------------------------------------------------------------------------------

    @precondition(lambda self: self.has_cuts and self.cut is None)
    @rule()
    def take_cut(self) -> None:
        """From here on, calls change the store and not what the cut holds."""
        name = self.store.table.name
        since = None if self.replica is None else {name: self.replica.version}
        before = 0 if self.replica is None else self.replica.version
        cut = GroupCut("a table", {name: self.store}, [self.store._slot], since, None, 1 << 30)
        self.cut = cut, copy.deepcopy(self.oracle), before

    @precondition(lambda self: self.cut is not None)
    @rule(is_written=st.sampled_from([True, True, True, False]), is_beside=st.booleans())
    def write_cut(self, is_written: bool, is_beside: bool) -> None:
        """What is written is the store at the cut, bit for bit: as changes, if a replica follows, or in full."""
        assert self.cut is not None
        (cut, oracle, since), self.cut = self.cut, None
        if not is_written:
            cut.release()
            return
        name, path = self.store.table.name, self._path()
        kept = cut.figures()["kept"]
        if self.replica is not None and since == self.replica.version and cut.changes_known:
            rows = cut.write({name: path}, is_full=False, is_beside=is_beside)
            self.replica.apply_changes(path)
            loaded = self.replica
        else:
            rows = cut.write({name: path}, is_full=True, is_beside=is_beside)
            loaded = self.load(path, 1)
            if self.replica is not None:
                self.replica = loaded
        event(f"cut with {'changes' if kept else 'no change'} since")
        assert rows == {name: len(oracle.rows)}
        assert loaded.version == cut.versions[name]
        oracle.compare(loaded, UNIVERSE, counters=False)
        assert cut.figures()["bytes"] == 0
