"""Finds the cheapest layout that reaches the requested rate, or the fastest that fits and what stands in its way. Pure.

For each way to place the roles, and each machine type for them, machines are added where the tightest bound is, from
the fewest that hold the rows; then those that turn out not to be needed are removed again. The cheapest result wins.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from satrap.errors import ConfigError
from satrap.planning.coefficients import Coefficients
from satrap.planning.estimate import SERVER_THREAD, Estimate, estimate
from satrap.planning.layout import Layout, Pool
from satrap.planning.machines import MachineType, PriceList
from satrap.planning.upkeep import Upkeep, upkeep_of
from satrap.planning.workload import Workload

_MAX_ROUNDS = 200
_MAX_PROCESSES = 16  # servers of one machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The machines for a job."""

    workload: Workload
    prices: PriceList
    costs: Coefficients
    estimate: Estimate
    upkeep: Upkeep
    alternatives: tuple[Estimate, ...]
    """The cheapest layout of each other way to place the roles, cheapest first."""

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


def make_plan(workload: Workload, prices: PriceList, costs: Coefficients) -> Plan:
    """Return the cheapest plan that reaches the requested rate; if none does, the fastest that fits; ConfigError if no
    machines hold the rows."""
    found: list[Estimate] = []
    reasons: list[str] = []
    for start in _starts(workload, prices, costs, reasons):
        fitted = _fit(workload, prices, costs, start)
        if fitted.misfits:
            reasons += fitted.misfits
        else:
            found.append(fitted)
    if not found:
        raise ConfigError(
            f"no machines fit this job: {'; '.join(dict.fromkeys(reasons))}. List machines with more memory or more of "
            "them (available), or make rows smaller: dtype float16, RowWiseAdagrad, less dim"
        )
    requested = workload.training.samples_per_second

    def rank(each: Estimate) -> tuple[float, float, float]:
        missing = max(0.0, 1.0 - each.samples_per_second / requested)
        return missing, each.layout.price_per_hour, each.layout.num_machines

    ranked = sorted(found, key=rank)
    best = ranked[0]
    others: dict[tuple[tuple[str, ...], ...], Estimate] = {}
    for each in ranked[1:]:
        others.setdefault(tuple(pool.roles for pool in each.layout.pools), each)
    others.pop(tuple(pool.roles for pool in best.layout.pools), None)
    return Plan(
        workload=workload,
        prices=prices,
        costs=costs,
        estimate=best,
        upkeep=upkeep_of(workload, best.layout, costs),
        alternatives=tuple(others.values()),
    )


def _starts(workload: Workload, prices: PriceList, costs: Coefficients, reasons: list[str]) -> Iterator[Layout]:
    """Yield the smallest layout of each kind that may hold the rows; add to `reasons` why there is none."""
    for trainers in prices.types("trainer"):
        alone = Pool(machine=trainers, num_machines=1, trainers=1)
        if trainers.gpus <= 1:
            yield Layout(pools=(alone,))
        each = max(1, trainers.gpus)
        for servers in prices.types("server"):
            bucket = _too_large_bucket(workload, servers, prices)
            if bucket is not None:
                reasons.append(bucket)
                continue
            least = _least_servers(workload, servers, costs, prices)
            if least is None:
                reasons.append(
                    f"{servers.name}: {servers.available} available machines cannot hold {workload.bytes / 1e12:,.2f} "
                    f"TB of rows within {prices.limits.memory:.0%} of their memory"
                )
                continue
            base = Pool(machine=servers, num_machines=least, servers=1)
            own = Pool(machine=trainers, num_machines=1, trainers=each)
            yield Layout(pools=(base, own))
            for workers in prices.types("worker"):
                yield Layout(pools=(base, Pool(machine=workers, num_machines=1, workers=1), own))
            if servers is trainers:
                yield Layout(pools=(replace(base, trainers=each),))


def _too_large_bucket(workload: Workload, machine: MachineType, prices: PriceList) -> str | None:
    table, size = workload.largest_bucket(1)
    usable = machine.memory_bytes * prices.limits.memory
    if size <= usable:
        return None
    return (
        f"{machine.name}: one bucket of table {table.table.name!r} takes {size / 2**30:,.1f} GiB "
        f"({table.bytes / 1e12:,.2f} TB in {table.num_buckets(1)} buckets), and {usable / 2**30:,.1f} GiB of a machine "
        "may be used: give the table more num_buckets, at most 65536"
    )


def _least_servers(workload: Workload, machine: MachineType, costs: Coefficients, prices: PriceList) -> int | None:
    """Return the fewest machines whose memory holds the rows, with one server on each; None if there are too few."""
    usable = machine.memory_bytes * prices.limits.memory - costs.server_bytes
    if usable <= 0:
        return None
    count = max(1, int(workload.bytes / usable))
    while count <= machine.available:
        if workload.server_bytes(count) <= usable:
            return count
        count = max(count + 1, int(count * workload.server_bytes(count) / usable * 0.999))
    return None


def _fit(workload: Workload, prices: PriceList, costs: Coefficients, start: Layout) -> Estimate:
    """Add machines where the tightest bound is until the rate is reached or no more can be added; then removes what is
    not needed."""
    requested = workload.training.samples_per_second

    def assess(layout: Layout) -> Estimate:
        return estimate(workload, layout, costs, prices.limits)

    best = assess(start)
    for _ in range(_MAX_ROUNDS):
        if not best.misfits and best.samples_per_second >= requested:
            break
        grown = _grown(best, requested)
        if grown is None:
            break
        best = assess(grown)
    if best.misfits:
        return best
    for role in ("worker", "trainer", "server"):
        while (smaller := _changed(best.layout, role, -1)) is not None:
            found = assess(smaller)
            if found.misfits or found.samples_per_second < min(requested, best.samples_per_second):
                break
            best = found
    return best


def _grown(found: Estimate, requested: float) -> Layout | None:
    """Return the layout with more of what is too little; None if there is no more."""
    layout = found.layout
    if found.misfits:
        role = next((each for each in ("server", "trainer") if layout.count(each)), "trainer")
        return _changed(layout, role, 1) if layout.count("server") else None
    tight = found.bounds[0]
    if not layout.count("server"):
        return None
    if tight.name == SERVER_THREAD:
        pool = layout.pool_of("server")
        servers = pool.servers + 1
        return _with(layout, pool, replace(pool, servers=servers)) if servers <= _MAX_PROCESSES else None
    have = layout.pool_of(tight.role).num_machines
    missing = min(requested / tight.samples_per_second, 2.0)
    return _changed(layout, tight.role, max(1, int(have * (missing - 1.0))))


def _changed(layout: Layout, role: str, by: int) -> Layout | None:
    """Return the layout with more or fewer machines for a role; None if that is impossible."""
    if not layout.count(role):
        return None
    pool = layout.pool_of(role)
    number = min(pool.num_machines + by, pool.machine.available)
    if number < 1 or number == pool.num_machines:
        return None
    changed = _with(layout, pool, replace(pool, num_machines=number))
    if changed.count("worker") > changed.count("trainer"):
        return _changed(changed, "trainer", 1) if by > 0 and role == "worker" else None
    return changed


def _with(layout: Layout, pool: Pool, changed: Pool) -> Layout:
    return Layout(pools=tuple(changed if each is pool else each for each in layout.pools))
