"""What `satrap status` shows: two readings of a run become one summary, which is JSON, and the summary becomes text.

Pure: `satrap.cli.status` reads the run and prints.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from satrap.byte_sizes import format_bytes
from satrap.monitor.report import short
from satrap.transfer import format_progress

_HEADER = ("PROCESS", "PLACE", "STATE", "ROWS", "MEMORY", "ROWS/S", "STALENESS", "RESTARTS")


def summarize(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the summary of a reading. before: an earlier one, for the numbers per second; without it they are None.

    A reading has `at` (Unix time), `clock` (monotonic seconds), `run` (status.json, or None without a run's folder),
    and `answers`: for each address of a server or worker what it answered to `status`, or {"error": why there is none}.
    """
    run, answers = now["run"], now["answers"]
    processes = [_row(process, answers.get(process["address"], {}), now, before) for process in _processes(now)]
    servers = {address: answer for address, answer in answers.items() if "tables" in answer}
    rates = [process["rows_per_second"] for process in processes if process["role"] == "server"]
    staleness: dict[str, int] = {}
    for answer in servers.values():
        for trainer, steps in answer["staleness"].items():
            staleness[trainer] = max(steps, staleness.get(trainer, 0))
    for process in processes:
        if process["role"] == "trainer":
            process["staleness"] = staleness.get(str(process["number"]))
    step = max((answer["step"] for answer in servers.values()), default=None)
    return {
        "at": now["at"],
        **{key: None if run is None else run[key] for key in ("phase", "launch", "started_at")},
        "step": step,
        "steps_per_second": _steps_per_second(step, now, before),
        "rows": sum(_sum_of(answer, "rows") for answer in servers.values()),
        "table_bytes": sum(_sum_of(answer, "bytes") for answer in servers.values()),
        "rows_per_second": None if None in rates or not rates else sum(rates),
        "staleness": staleness,
        "tables": _tables(servers.values()),
        "last_checkpoint": now["checkpoint"],
        "restored_from": now["restored"],
        "snapshots": _snapshots(servers.values()),
        "migration": _migration(run, servers.values()),
        "faults": {"count": 0, "last": []} if run is None else run["faults"],
        "processes": processes,
    }


def _processes(now: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the processes of a run as its supervisor knows them, or those that answered and the trainer that holds
    the lease."""
    if now["run"] is not None:
        processes = now["run"]["processes"]
        return sorted(
            processes, key=lambda process: ("server worker trainer".index(process["role"]), process["number"])
        )
    unknown = {"state": None, "restarts": None, "metrics": None}
    answers = sorted(now["answers"].items(), key=lambda item: item[1].get("number") or 0)
    servers = [
        {"role": "server", "number": answer.get("number"), "address": address, "where": answer.get("where"), **unknown}
        for address, answer in answers
    ]
    leases = {where for answer in now["answers"].values() for where, _ in answer.get("leases", {}).values()}
    return servers + [
        {"role": "trainer", "number": 0, "address": None, "where": where, **unknown, "state": "ready"}
        for where in sorted(leases)
    ]


def _row(
    process: Mapping[str, Any], answer: Mapping[str, Any], now: Mapping[str, Any], before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return what is shown of one process."""
    state = process["state"]
    if "error" in answer:
        state = "no answer"
    elif "not_ready" in answer:
        state = "not ready" if answer["not_ready"] else "ready"
    has_tables = "tables" in answer
    earlier = {} if before is None else before["answers"].get(process["address"], {})
    rate = None
    if has_tables and before is not None and "tables" in earlier and now["clock"] > before["clock"]:
        looked_up = _sum_of(answer, "lookups") - _sum_of(earlier, "lookups")
        rate = max(0, looked_up) / (now["clock"] - before["clock"])
    return {
        "role": process["role"],
        "number": process["number"],
        "address": process["address"],
        "where": process["where"] or answer.get("where"),
        "state": state,
        "reason": answer.get("error") or answer.get("not_ready") or None,
        "metrics": process["metrics"],
        "restarts": process["restarts"],
        "rows": _sum_of(answer, "rows") if has_tables else None,
        "table_bytes": _sum_of(answer, "bytes") if has_tables else None,
        "memory": answer.get("memory"),
        "rows_per_second": rate,
        "staleness": None,
    }


def _sum_of(answer: Mapping[str, Any], key: str) -> int:
    return sum(stats[key] for stats in answer["tables"].values())


def _steps_per_second(step: int | None, now: Mapping[str, Any], before: Mapping[str, Any] | None) -> float | None:
    steps = [] if before is None else [answer["step"] for answer in before["answers"].values() if "step" in answer]
    if step is None or before is None or not steps or now["clock"] <= before["clock"]:
        return None
    if now["run"] is not None and before["run"] is not None and now["run"]["launch"] != before["run"]["launch"]:
        return None  # rows of a checkpoint came with its step
    return float(max(0, step - max(steps)) / (now["clock"] - before["clock"]))


def _tables(answers: Any) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for answer in answers:
        for name, stats in answer["tables"].items():
            sums = counts.setdefault(name, dict.fromkeys(stats, 0))
            for key, count in stats.items():
                sums[key] += count
    return counts


def _snapshots(answers: Any) -> dict[str, dict[str, Any]]:
    """Return the progress of the saves, verifications and restores that are running."""
    rows: dict[str, dict[str, Any]] = {}
    for answer in answers:
        for work, figures in answer["snapshots"].items():
            if figures["running"]:
                sums = rows.setdefault(work, {"bytes": 0, "total": 0, "seconds_left": 0})
                known = None not in (sums["seconds_left"], figures["seconds_left"])
                sums["seconds_left"] = max(sums["seconds_left"], figures["seconds_left"]) if known else None
                sums["bytes"] += figures["bytes"]
                sums["total"] += figures["total"]
    return rows


def _migration(run: Mapping[str, Any] | None, answers: Any) -> dict[str, Any]:
    return {
        "progress": None if run is None else run["migration"],
        "rows_received": sum(answer["moved_rows"]["in"] for answer in answers),
        "frozen_buckets": sum(answer["buckets"]["frozen"] for answer in answers),
    }


def as_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return the summary as lines for a terminal."""
    lines = [_headline(summary)]
    rates = [f"step {summary['step']:,}"] if summary["step"] is not None else ["no step yet"]
    if summary["steps_per_second"] is not None:
        rates.append(f"{summary['steps_per_second']:.1f} steps/s")
    rates += [f"{short(summary['rows'])} rows", format_bytes(summary["table_bytes"])]
    if summary["rows_per_second"] is not None:
        rates.append(f"{short(summary['rows_per_second'])} rows/s looked up")
    lines += [" | ".join(rates), _checkpoint_line(summary), _migration_line(summary), *_fault_lines(summary), ""]
    rows = [_HEADER, *(_cells(process) for process in summary["processes"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [
        f"{process['role']} {process['number']}: {process['reason']}"
        for process in summary["processes"]
        if process["reason"]
    ]
    # A message, such as that of a fault, may have line breaks, or characters that control a terminal.
    return ["".join(character if character.isprintable() else " " for character in line) for line in lines]


def _headline(summary: Mapping[str, Any]) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary["at"]))
    if summary["phase"] is None:
        return f"{at} | servers started by hand"
    running = _clock(summary["at"] - summary["started_at"])
    return f"{at} | {summary['phase']} | launch {summary['launch']} | running for {running}"


def _checkpoint_line(summary: Mapping[str, Any]) -> str:
    last = summary["last_checkpoint"]
    restored = summary["restored_from"]
    since = "the servers started" if restored is None else f"{restored} was restored"
    text = f"last checkpoint: none since {since}"
    if last is not None:
        ago = _clock(summary["at"] - last["at"])
        text = f"last checkpoint: {last['name']}, {ago} ago, rows in {last['seconds']:.1f} s"
        text += "" if last["is_published"] is not False else " (not complete)"
    for work, figures in summary["snapshots"].items():
        text += f" | {work} in progress: {format_progress(done=figures['bytes'], **figures)}"
    return text


def _migration_line(summary: Mapping[str, Any]) -> str:
    migration = summary["migration"]
    text = "migration: none in progress"
    if migration["progress"] is not None:
        text = f"migration: {migration['progress']['moved']} of {migration['progress']['all']} buckets"
    elif migration["frozen_buckets"]:
        text = f"migration: {migration['frozen_buckets']} buckets are frozen"
    return text + (f" | {short(migration['rows_received'])} rows moved so far" if migration["rows_received"] else "")


def _fault_lines(summary: Mapping[str, Any]) -> list[str]:
    faults = summary["faults"]
    if not faults["count"]:
        return ["faults: none"]
    return [
        f"faults: {faults['count']}",
        *(f"  {_clock(summary['at'] - fault['at'])} ago: {fault['what']}" for fault in faults["last"][-3:]),
    ]


def _cells(process: Mapping[str, Any]) -> tuple[str, ...]:
    def shown(value: Any, form: Any = str) -> str:
        return "" if value is None else form(value)

    memory = shown(process["table_bytes"], format_bytes)
    if process["memory"] is not None:
        of = min(process["memory"].values(), key=lambda numbers: numbers[1] - numbers[0])  # where least is left
        memory = f"{memory or '-'} ({of[0] / max(1, of[1]):.0%} of {format_bytes(of[1])} in use)"
    return (
        f"{process['role']} {shown(process['number'])}",
        shown(process["where"]) or shown(process["address"]),
        shown(process["state"]),
        shown(process["rows"], short),
        memory,
        shown(process["rows_per_second"], short),
        shown(process["staleness"]),
        shown(process["restarts"]),
    )


def _clock(seconds: float) -> str:
    whole = max(0, int(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def fit(lines: Sequence[str], columns: int, rows: int) -> list[str]:
    """Return the lines cut to a terminal's size, with a line that counts those left out."""
    cut = [line[:columns] for line in lines]
    if len(cut) <= rows:
        return cut
    return [*cut[: rows - 1], f"... {len(cut) - rows + 1} more lines"[:columns]]
