"""A plan as text for a terminal, as JSON for scripts, as a command, and as a job file. Pure.

Name, script, images and storage of a run are in the user's job file, which `satrap deploy render` reads before that of
the plan.
"""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from satrap.planning.machines import ROLES, Layout, Pool, Request
from satrap.planning.planner import Plan, bought_for_memory, exhausted, larger_batch

_SHOWN_BOUNDS = 6
_SHOWN_TABLES = 12
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_SERVER_TAINT = "dedicated=satrap-servers:NoSchedule"  # docs/deploy.md gives it to the servers' machines
_MINUTE, _HOUR = 60.0, 3600.0


def lines_of(plan: Plan, script: Sequence[str]) -> Iterator[str]:
    """Yield the plan as text. script: its path and arguments, for the command that starts it."""
    workload, estimate = plan.workload, plan.estimate
    requested = workload.training.samples_per_second
    yield f"plan for {workload.name}: {amount(requested)} samples/s requested"
    yield f"costs    {plan.estimate.costs.source}"
    yield ""
    yield from _machines(plan)
    yield ""
    yield from _tables(plan)
    yield ""
    yield from _bounds(plan)
    yield ""
    yield from _rates(plan)
    yield from _price(plan)
    yield ""
    yield f"start    {run_line(estimate.layout, estimate.requests, script)}"
    for pool in estimate.layout.pools:
        for role in pool.roles:
            if pool.each(role) > 1 and not (role == "trainer" and pool.machine.gpus):
                yield f"         {pool.each(role)} {role}s on each {pool.machine.name}"
    for note in workload.assumptions:
        yield f"assumed  {note}"
    if len(estimate.layout.pools) > 1 or estimate.layout.num_machines > 1:
        yield "assumed  machines in one network zone, ids spread evenly over servers by their hash"
    yield from _advice(plan)


def _machines(plan: Plan) -> Iterator[str]:
    estimate, currency = plan.estimate, plan.prices.currency
    head = ["role", "processes", "machines", "cores in use", "memory each", "of its request", "of machine"]
    rows = [[*head, f"{currency}/h"]]
    for pool in estimate.layout.pools:
        used = estimate.cores_used(pool)
        for role in pool.roles:
            first = role == pool.roles[0]
            memory, requested = estimate.memory[role], estimate.requests[role].memory_gib * 2**30
            rows.append(
                [
                    f"{role}s" if pool.count(role) != 1 else role,
                    f"{pool.count(role):,}",
                    f"{pool.num_machines:,} x {pool.machine.name}" if first else "the same",
                    f"{used[role]:.1f} of {pool.machine.cores:,}",
                    size(memory),
                    f"{memory / requested:.0%} of {size(requested)}",
                    f"{pool.each(role) * requested / pool.machine.memory_bytes:.0%} of "
                    f"{size(pool.machine.memory_bytes)}",
                    f"{pool.price_per_hour:,.2f}" if first else "",
                ]
            )
    yield from columns(rows)


def _tables(plan: Plan) -> Iterator[str]:
    workload = plan.workload
    servers = plan.estimate.layout.count("server")
    batch = workload.training.batch_size
    rows = [["table", "rows", "bytes a row", "memory", "saved", "buckets", "one bucket", "unique ids a batch"]]
    ordered = sorted(workload.tables, key=lambda table: -table.bytes)
    for table in ordered[:_SHOWN_TABLES]:
        buckets = table.num_buckets(servers)
        draws = batch * table.ids_per_sample
        share = table.unique_ids(batch) / draws if draws else 0.0
        rows.append(
            [
                table.table.name,
                f"{table.rows:,}",
                f"{table.row_bytes:,}",
                size(table.bytes),
                size(table.rows * table.saved_row_bytes),
                f"{buckets:,}{'' if buckets == table.table.resolved_num_buckets else ' (set num_buckets)'}",
                size(table.bytes / buckets),
                f"{table.unique_ids(batch):,.0f} ({share:.0%})",
            ]
        )
    if len(ordered) > _SHOWN_TABLES:
        rows.append([f"{len(ordered) - _SHOWN_TABLES} more", *[""] * 7])
    yield from columns(rows)
    limit = plan.prices.limits.memory
    needed = size(workload.bytes / limit)
    yield f"sum      {size(workload.bytes)} of rows; {needed} of memory, {1 - limit:.0%} of it head room"


def _bounds(plan: Plan) -> Iterator[str]:
    requested = plan.workload.training.samples_per_second
    rates = [(bound.name, bound.samples_per_second) for bound in plan.estimate.bounds[:_SHOWN_BOUNDS]]
    rows = [[name, amount(rate), f"{requested / rate:.0%} of its limit"] for name, rate in rates]
    yield from columns([["resource", "permits samples/s", "in use at the requested rate"], *rows])
    limits = plan.prices.limits
    yield (
        f"limits   {limits.cores:.0%} of cores, {limits.network:.0%} of links, {limits.memory:.0%} of memory; "
        f"{limits.round_trip_ms:g} ms a round trip"
    )
    first = plan.estimate.bounds[0]
    ratio = first.samples_per_second / requested
    permits = (
        f"{ratio:.2f} times the requested rate" if ratio >= 1 else f"{_percent_below(ratio)} of the requested rate"
    )
    yield f"bound by {first.name}: it permits {permits}"
    for pool in bought_for_memory(plan.estimate):
        yield f"memory   decides the number of {pool.machine.name}: one machine less would not hold the rows"


def _rates(plan: Plan) -> Iterator[str]:
    for link in plan.estimate.links:
        if link.out_bytes or link.in_bytes:
            rate = link.pool.machine.link_bytes
            yield (
                f"link     {link.pool.machine.name} ({'/'.join(link.pool.roles)}): {size(link.out_bytes)}/s out, "
                f"{size(link.in_bytes)}/s in, of {size(rate)}/s each"
            )
    files = plan.estimate.files
    text, most = ", ".join(f"{role} {count:,}" for role, count in files.items()), max(files.values())
    if most > 1024:
        text += f"; their hard limit (ulimit -Hn) must be {1 << math.ceil(math.log2(2 * most))} or more"
    yield f"files    descriptors of each process: {text}"
    upkeep = plan.estimate.upkeep
    yield (
        f"saves    {size(upkeep.checkpoint_bytes)} in {seconds(upkeep.save_seconds)} ({upkeep.bound}), while training "
        f"continues; training waits {seconds(upkeep.pause_seconds)}"
    )
    yield f"resume   {seconds(upkeep.resume_seconds)} after the processes are started"


def _price(plan: Plan) -> Iterator[str]:
    currency = plan.prices.currency
    rate = min(plan.estimate.samples_per_second, plan.workload.training.samples_per_second)
    yield (
        f"price    {plan.price_per_hour:,.2f} {currency}/h, {plan.price_per_billion:,.2f} {currency} for a billion "
        f"samples at {amount(rate)} samples/s"
    )
    yield f"prices   {plan.prices.source}"
    for alternative in plan.alternatives[:3]:
        text = " + ".join(
            f"{pool.num_machines} x {pool.machine.name} ({'/'.join(pool.roles)})" for pool in alternative.layout.pools
        )
        reach = amount(alternative.samples_per_second)
        yield f"else     {alternative.layout.price_per_hour:,.2f} {currency}/h: {text}, up to {reach} samples/s"


def _advice(plan: Plan) -> Iterator[str]:
    """Yield what to change if no plan reaches the requested rate."""
    if plan.meets:
        return
    estimate, training = plan.estimate, plan.workload.training
    requested, reached, tight = training.samples_per_second, estimate.samples_per_second, estimate.bounds[0]
    yield ""
    yield (
        f"NOT MET  no plan reaches {amount(requested)} samples/s; this one reaches {amount(reached)} "
        f"({_percent_below(reached / requested)})"
    )
    for machine in exhausted(estimate.layout):
        yield f"change   make more than {machine.available} {machine.name} available"
    yield f"change   add a machine type for {tight.role}s with more of what bounds it ({tight.name})"
    if (larger := larger_batch(estimate)) is not None:
        batch, rate = larger.workload.training.batch_size, larger.samples_per_second
        yield f"change   use batches of {batch:,} samples: these machines then reach {amount(rate)} samples/s"
    if training.staleness == 0:
        yield "change   train with staleness 1 or more, which overlaps lookups, updates and the dense network"
    if training.wire == "float32" and estimate.layout.count("server"):
        yield 'change   send rows in half the bytes: wire="float16"'


def _percent_below(ratio: float) -> str:
    """Return a ratio below 1 as a percentage that is not rounded up to 100."""
    return f"{math.floor(100 * ratio)}%"


def _processes(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return the count and the requests of each role's processes."""
    estimate = plan.estimate
    return {
        f"{role}s": {
            "count": pool.count(role),
            "machine": pool.machine.name,
            "cores_in_use": used / pool.each(role),
            **asdict(estimate.requests[role]),
        }
        for pool in estimate.layout.pools
        for role, used in estimate.cores_used(pool).items()
    }


def json_of(plan: Plan, script: Sequence[str]) -> dict[str, Any]:
    """Return the plan as plain JSON types. Bytes, seconds, samples a second; prices in the list's currency."""
    workload, estimate, upkeep = plan.workload, plan.estimate, plan.estimate.upkeep
    servers, batch = estimate.layout.count("server"), workload.training.batch_size
    return {
        "workload": workload.name,
        "meets": plan.meets,
        "requested_samples_per_second": workload.training.samples_per_second,
        "samples_per_second": estimate.samples_per_second,
        "price_per_hour": plan.price_per_hour,
        "price_per_billion_samples": plan.price_per_billion,
        "currency": plan.prices.currency,
        "price_source": plan.prices.source,
        "costs": plan.estimate.costs.source,
        "pools": [_pool(pool) for pool in estimate.layout.pools],
        "processes": _processes(plan),
        "memory_bytes": estimate.memory,
        "file_descriptors": estimate.files,
        "tables": {
            table.table.name: {
                "rows": table.rows,
                "row_bytes": table.row_bytes,
                "bytes": table.bytes,
                "saved_bytes": table.rows * table.saved_row_bytes,
                "num_buckets": table.num_buckets(servers),
                "unique_ids": table.unique_ids(batch),
            }
            for table in workload.tables
        },
        "row_bytes": workload.bytes,
        "bounds": [
            {"resource": bound.name, "role": bound.role, "samples_per_second": bound.samples_per_second}
            for bound in estimate.bounds
        ],
        "links": [
            {
                "machine": link.pool.machine.name,
                "out_bytes_per_second": link.out_bytes,
                "in_bytes_per_second": link.in_bytes,
            }
            for link in estimate.links
        ],
        "checkpoint": {
            "bytes": upkeep.checkpoint_bytes,
            "save_seconds": upkeep.save_seconds,
            "pause_seconds": upkeep.pause_seconds,
            "resume_seconds": upkeep.resume_seconds,
        },
        "alternatives": [
            {
                "pools": [_pool(pool) for pool in alternative.layout.pools],
                "samples_per_second": alternative.samples_per_second,
                "price_per_hour": alternative.layout.price_per_hour,
            }
            for alternative in plan.alternatives
        ],
        "assumptions": list(workload.assumptions),
        "command": run_line(estimate.layout, estimate.requests, script),
    }


def _pool(pool: Pool) -> dict[str, Any]:
    counts = {f"{role}s": pool.each(role) for role in pool.roles}
    machines = {"machine": pool.machine.name, "machines": pool.num_machines}
    return machines | counts | {"price_per_hour": pool.price_per_hour}


def run_line(layout: Layout, requests: Mapping[str, Request], script: Sequence[str]) -> str:
    """Return the command that starts a run of the script, its path and arguments, on these machines."""
    if not layout.count("server"):
        return shlex.join(["python", *script])
    path, *arguments = script
    words = ["satrap", "run", path]
    cluster = layout.num_machines > 1
    if cluster:
        words += ["--cluster", "ray", "--address", "auto"]
    for role in ROLES:
        if not layout.count(role):
            continue
        words += [f"--{role}s", str(layout.count(role))]
        if cluster:
            request = requests[role]
            words += [f"--{role}-cpus", str(request.cpus), f"--{role}-memory", f"{request.memory_gib}GiB"]
            words += [f"--{role}-gpus", str(request.gpus)] if request.gpus else []
    return shlex.join([*words, *(["--", *arguments] if arguments else [])])


def deploy_toml(name: str, layout: Layout, requests: Mapping[str, Request]) -> str:
    """Return the roles of a job file. Every key is there, since this file replaces values of another one.

    The layout has a server: on Kubernetes rows survive a restart there and nowhere else. Labels and tolerations of the
    other file belong to the machines that this one replaces.
    """
    lines = [f"# Written by satrap plan for {' '.join(name.split())}: satrap deploy render JOB THIS_FILE"]
    for role in ROLES:
        lines += ["", f"[{role}s]", f"count = {layout.count(role)}"]
        if not layout.count(role):
            continue
        pool, request = layout.pool_of(role), requests[role]
        lines += [
            f"per_pod = {pool.trainers if role == 'trainer' and not pool.servers else 1}",
            f"cpus = {request.cpus}",
            f'memory = "{request.memory_gib}GiB"',
            *([f'rows = "{request.rows_mib}MiB"'] if role == "server" else []),
            f"gpus = {request.gpus}",
            f"machine = {json.dumps(pool.machine.name)}",
            "node_labels = {}",
            f"tolerations = {json.dumps([_SERVER_TAINT] if pool.servers and role != 'server' else [])}",
        ]
    return "\n".join(lines) + "\n"


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows of cells as aligned lines: the first column to the left, all others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for first, *others in rows:
        aligned = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *aligned]).rstrip()


def size(count: float) -> str:
    """Return bytes in the unit that leaves one to three digits: "9.3 TB"."""
    for unit, name in _BYTES:
        if count >= unit:
            return f"{count / unit:,.{1 if count < 100 * unit else 0}f} {name}"
    return f"{count:.0f} B"


def seconds(count: float) -> str:
    """Return a time: "3.2 h", "12 min", "40 s", "98 ms"."""
    if count >= _HOUR:
        return f"{count / _HOUR:,.1f} h"
    if count >= 2 * _MINUTE:
        return f"{count / _MINUTE:.0f} min"
    return f"{count:.1f} s" if count >= 1 else f"{1e3 * count:.0f} ms"


def amount(count: float) -> str:
    """Return a number with separators and at most three significant digits behind a point."""
    return f"{count:,.0f}" if abs(count) >= 100 else f"{count:,.3g}"
