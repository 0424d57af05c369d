"""Finds the cheapest layout that reaches the requested rate, or the fastest that fits and what stands in its way. Pure.

A layout places the roles on machines in one of four ways (`_shapes`). For each way, each choice of machine types and
each number of trainers on a machine there is one candidate: starting with one machine of each type, machines are added
where the tightest bound is until the rate is reached, and then those that are not needed are removed again. Prices and
available machines do not decide which candidates there are, only which one is the cheapest that can be had. So lower
prices, more machines or another machine type never make a plan dearer.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from satrap.errors import ConfigError
from satrap.planning.coefficients import Coefficients
from satrap.planning.estimate import Estimate
from satrap.planning.machines import MAX_MACHINES, Layout, MachineType, Pool, PriceList
from satrap.planning.workload import Workload

_MAX_ROUNDS = 200
_MAX_PROCESSES = 16  # one machine has at most so many of a role
_TRAINERS = (1, 2, 4, 8, 16)  # on a machine without GPUs
_MAX_FACTOR = 8.0  # by which machines are added at once
_LEAST_RATE = 1e-6  # a fraction of the requested rate
_BATCH_FACTORS = (2, 4, 8, 16)  # by which a larger batch is tried
_LEAST_GAIN = 1.05  # in rate, for which a larger batch is worth a line
_RATE_STEP = 1.01  # how exactly the fastest layout is found


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The machines for a job."""

    prices: PriceList
    estimate: Estimate
    alternatives: tuple[Estimate, ...]
    """The cheapest layout of each other way to place the roles, cheapest first."""

    @property
    def workload(self) -> Workload:
        """The job."""
        return self.estimate.workload

    @property
    def meets(self) -> bool:
        """Whether the layout reaches the requested rate."""
        return self.estimate.samples_per_second >= self.workload.training.samples_per_second

    @property
    def price_per_hour(self) -> float:
        return self.estimate.layout.price_per_hour

    @property
    def price_per_billion(self) -> float:
        """Price of a billion samples at the requested rate, or at the rate of the plan if that is lower."""
        rate = min(self.estimate.samples_per_second, self.workload.training.samples_per_second)
        return self.price_per_hour / 3600 / rate * 1e9


def make_plan(workload: Workload, prices: PriceList, costs: Coefficients, *, needs_servers: bool = False) -> Plan:
    """Return the cheapest plan that reaches the requested rate; if none does, the fastest that fits; ConfigError if no
    machines hold the rows. needs_servers: for Kubernetes, where a trainer's own rows would be lost with its pod."""
    search = _Search(workload, prices, costs, needs_servers)
    rate = workload.training.samples_per_second
    estimates = search.candidates(rate)
    if not estimates:
        rate = search.fastest_rate()
        estimates = search.candidates(rate)
    ranked = sorted(estimates, key=lambda candidate: (candidate.layout.price_per_hour, candidate.layout.num_machines))
    ways: dict[tuple[tuple[str, ...], ...], Estimate] = {}
    for candidate in ranked:
        ways.setdefault(tuple(pool.roles for pool in candidate.layout.pools), candidate)
    best, *others = ways.values()
    return Plan(prices=prices, estimate=best, alternatives=tuple(others))


def exhausted(layout: Layout) -> list[MachineType]:
    """Return the machine types of which the layout has all that are available, or more."""
    used = layout.machines_by_type
    types = {pool.machine.name: pool.machine for pool in layout.pools}
    return [machine for name, machine in types.items() if used[name] >= machine.available]


def bought_for_memory(estimate: Estimate) -> list[Pool]:
    """Return the pools with servers whose number of machines memory decides: with one less, the rows would not fit."""
    layout = estimate.layout
    pools = [pool for pool in layout.pools if pool.servers and pool.num_machines > 1]
    return [
        pool
        for pool in pools
        if replace(estimate, layout=_with(layout, pool, num_machines=pool.num_machines - 1)).misfits
    ]


def larger_batch(estimate: Estimate) -> Estimate | None:
    """Return the layout with the least of some larger batches that reaches the requested rate; if none does, with the
    fastest one; None if they help little."""
    workload, best = estimate.workload, None
    least = _LEAST_GAIN * estimate.samples_per_second
    for factor in _BATCH_FACTORS:
        training = replace(workload.training, batch_size=factor * workload.training.batch_size)
        larger = replace(estimate, workload=replace(workload, training=training))
        if larger.reaches(least):
            best, least = larger, larger.samples_per_second
            if least >= training.samples_per_second:
                break
    return best


class _Search:
    """The candidates for a job and a price list."""

    def __init__(self, workload: Workload, prices: PriceList, costs: Coefficients, needs_servers: bool) -> None:
        self._workload, self._prices, self._costs = workload, prices, costs
        self._reasons: list[str] = []
        """Why candidates do not fit."""
        self._shapes = [shape for shape in _shapes(prices) if shape.count("server") or not needs_servers]

    def candidates(self, rate: float) -> list[Estimate]:
        """Return the candidates that reach the rate with the available machines."""
        estimates = (self._candidate(shape, rate) for shape in self._shapes)
        return [layout for layout in estimates if layout is not None]

    def fastest_rate(self) -> float:
        """Return the rate that the fastest candidates reach, to one per cent; ConfigError if none fits."""
        requested = self._workload.training.samples_per_second
        self._reasons.clear()
        best = 0.0
        for shape in self._shapes:
            low, high = best * _RATE_STEP or _LEAST_RATE * requested, requested
            if self._candidate(shape, low) is None:
                continue
            while (middle := math.sqrt(low * high)) > low * _RATE_STEP:
                if self._candidate(shape, middle) is None:
                    high = middle
                else:
                    low = middle
            best = low
        if not best:
            raise ConfigError(
                f"no machines fit this job: {'; '.join(dict.fromkeys(self._reasons))}. List machines with more memory "
                "or more of them (available), or make rows smaller: dtype float16, RowWiseAdagrad, less dim"
            )
        return best

    def _candidate(self, shape: Layout, rate: float) -> Estimate | None:
        """Return the layout of this shape that reaches the rate; None if there is none, or too few machines for it."""
        if (reason := self._too_large_bucket(shape)) is not None:
            self._reasons.append(reason)
            return None
        grown = self._grow(shape, rate)
        if grown is None:
            return None
        candidate = self._shrink(grown, rate)
        used = candidate.layout.machines_by_type
        for machine in (pool.machine for pool in candidate.layout.pools):
            if used[machine.name] > machine.available:
                self._reasons.append(
                    f"{machine.name}: {used[machine.name]:,} machines are needed for "
                    f"{self._workload.bytes / 1e12:,.2f} TB of rows, and {machine.available:,} are available"
                )
                return None
        return candidate

    def _assess(self, layout: Layout) -> Estimate:
        return Estimate(workload=self._workload, layout=layout, costs=self._costs, limits=self._prices.limits)

    def _grow(self, layout: Layout, rate: float) -> Estimate | None:
        """Add machines and processes until the layout reaches the rate; None if no number of them does."""
        for _ in range(_MAX_ROUNDS):
            candidate = self._assess(layout)
            if candidate.reaches(rate):
                return candidate
            grown = self._grown(candidate, rate)
            if grown is None:
                self._reasons += [misfit.reason for misfit in candidate.misfits]
                return None
            layout = grown
        return None

    def _grown(self, candidate: Estimate, rate: float) -> Layout | None:
        """Return the layout with more of what is too little; None if more would not help."""
        layout = candidate.layout
        if not layout.count("server"):
            return None
        if candidate.misfits:
            pool = layout.pool_of(candidate.misfits[0].role)
            shrinks = pool.servers or (pool.workers and layout.count("worker") < layout.count("trainer"))
            if not (shrinks or layout.count("worker") > layout.count("trainer")):
                return None
            return _with_machines(layout, pool, int(_MAX_FACTOR) * pool.num_machines)
        tight = candidate.bounds[0]
        pool = layout.pool_of(tight.role)
        more = self._with_process(candidate)
        if more is not None and not self._assess(more).misfits:
            return more
        factor = min(rate / tight.samples_per_second, _MAX_FACTOR)
        return _with_machines(layout, pool, pool.num_machines + max(1, int(pool.num_machines * (factor - 1.0))))

    def _with_process(self, candidate: Estimate) -> Layout | None:
        """Return the layout with one more server or worker on each of their machines if one thread of each bounds it;
        None if that would not help. How many trainers a machine has is the shape's."""
        tight = candidate.bounds[0]
        pool = candidate.layout.pool_of(tight.role)
        more = pool.each(tight.role) + 1
        if not tight.by_process or tight.role == "trainer" or more > min(_MAX_PROCESSES, pool.machine.pod_cores):
            return None
        return _with(candidate.layout, pool, **{f"{tight.role}s": more})

    def _shrink(self, candidate: Estimate, rate: float) -> Estimate:
        """Remove machines and processes as long as the layout reaches the rate."""
        before = None
        while before is not candidate.layout:
            before = candidate.layout
            for role in ("trainer", "worker", "server"):
                if candidate.layout.count(role):
                    candidate = self._least(candidate, rate, role, "num_machines")
                    candidate = self._least(candidate, rate, role, f"{role}s") if role != "trainer" else candidate
        return candidate

    def _least(self, candidate: Estimate, rate: float, role: str, field: str) -> Estimate:
        """Return the layout with the least number in a field of a role's pool that still reaches the rate, if need be
        with more servers or workers on each of fewer machines."""
        pool, low = candidate.layout.pool_of(role), 1
        high: int = getattr(pool, field)
        layout = candidate.layout
        while low < high:
            middle = (low + high) // 2
            fewer = self._assess(_with(layout, pool, **{field: middle}))
            while field == "num_machines" and not fewer.misfits and not fewer.reaches(rate):
                more = self._with_process(fewer)
                if more is None:
                    break
                fewer = self._assess(more)
            if fewer.reaches(rate):
                candidate, high = fewer, middle
            else:
                low = middle + 1
        return candidate

    def _too_large_bucket(self, shape: Layout) -> str | None:
        if not shape.count("server"):
            return None
        machine, limit = shape.pool_of("server").machine, self._prices.limits.memory
        load, size = self._workload.largest_bucket(1)
        usable = machine.pod_bytes * limit
        if size <= usable:
            return None
        return (
            f"{machine.name}: one bucket of table {load.table.name!r} takes {size / 2**30:,.1f} GiB "
            f"({load.bytes / 1e12:,.2f} TB in {load.num_buckets(1)} buckets), and {usable / 2**30:,.1f} GiB of a "
            "machine may be used: give the table more num_buckets, at most 65536"
        )


def _shapes(prices: PriceList) -> Iterator[Layout]:
    """Yield the ways to place the roles, with one machine of each type: a trainer that holds the rows; servers and
    trainers on machines of their own; these and workers; servers and trainers on the same machines."""
    for trainers in prices.types("trainer"):
        alone = Pool(machine=trainers, num_machines=1, trainers=1)
        if trainers.gpus <= 1:
            yield Layout(pools=(alone,))
        for num_trainers in (trainers.gpus,) if trainers.gpus else _TRAINERS:
            if num_trainers > trainers.pod_cores:
                continue
            own = replace(alone, trainers=num_trainers)
            for servers in prices.types("server"):
                base = Pool(machine=servers, num_machines=1, servers=1)
                yield Layout(pools=(base, own))
                for workers in prices.types("worker"):
                    yield Layout(pools=(base, Pool(machine=workers, num_machines=1, workers=1), own))
                if servers is trainers:
                    yield Layout(pools=(replace(base, trainers=num_trainers),))


def _with_machines(layout: Layout, pool: Pool, number: int) -> Layout | None:
    if number == pool.num_machines or pool.num_machines == MAX_MACHINES:
        return None
    changed = _with(layout, pool, num_machines=min(number, MAX_MACHINES))
    return changed if changed.count("server") <= MAX_MACHINES else None


def _with(layout: Layout, pool: Pool, **numbers: Any) -> Layout:
    """Return the layout with other numbers of machines, or of processes on each, in one of its pools."""
    changed = replace(pool, **numbers)
    return Layout(pools=tuple(changed if other is pool else other for other in layout.pools))
