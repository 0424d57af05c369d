"""What a report says beside its charts: the state of the run, its main numbers, what is missing, its events and its
settings. Pure."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from satrap.byte_sizes import format_bytes
from satrap.html_report.chart import number
from satrap.html_report.run_records import Loop, RunRecords, cuts
from satrap.monitor.report import short

_MAX_EVENTS = 200
_MAX_TABLES = 200
_MAX_VALUE = 300  # characters of a setting


@dataclass(frozen=True, slots=True)
class Tile:
    """A number of the run."""

    name: str
    value: str
    more: str = ""


@dataclass(slots=True)
class Listing:
    """A table of the page, or the sentence that stands for it."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[object, ...]] = field(default_factory=list)
    note: str = ""
    style: str | None = None
    """Class of the table."""


def title_of(run: RunRecords) -> str:
    """Return the title of the page."""
    scripts = [loop.start.get("script") for loop in run.loops]
    scripts += [settings.get("script") for event in run.events if isinstance(settings := event.get("settings"), dict)]
    names = [str(script).rpartition("/")[2] for script in scripts if script]
    return f"{names[-1]} in {run.name}" if names and names[-1] else f"Run {run.name}"


def state_of(run: RunRecords, now: float) -> tuple[str, str]:
    """Return the kind of the run's state, which chooses its colour, and the sentence. now: Unix time."""
    last = max((interval.at for loop in run.loops for interval in loop.intervals), default=None)
    age = "" if last is None else f" The last record was {duration(max(0.0, now - last))} old."
    if run.is_live:
        return "live", f"The run was in progress.{age}"
    runs = [index for index, event in enumerate(run.events) if event["kind"] == "run"]
    if run.events:
        ends = [event for event in run.events[runs[-1] if runs else 0 :] if event["kind"] == "exit"]
        if not ends:
            return "failed", f"No end was recorded: satrap run was killed.{age}"
        status = ends[-1].get("status")
        if status == 0:
            return "done", "The run ended with exit status 0."
        return "failed", "satrap run ended with an error." if status is None else f"The run ended with status {status}."
    loops = [loop for loop in run.loops if loop.launch == max(other.launch for other in run.loops)]
    if all(loop.end is None for loop in loops):
        return "failed" if loops else "", f"No end was recorded: training was killed, or still ran.{age}"
    errors = [str(loop.end["error"]) for loop in loops if loop.end is not None and loop.end.get("error")]
    return ("failed", f"Training ended with {errors[-1]}") if errors else ("done", "Training ended.")


def tiles(run: RunRecords) -> list[Tile]:
    """Return the main numbers of the run, as far as they were recorded."""
    if not run.intervals:
        return []
    curves, num_trainers = run.curves, len(run.by_rank)
    samples = sum(loop.intervals[-1].samples for loop in run.loops if loop.intervals)
    trained = sum(interval.trained for interval in run.intervals) / num_trainers
    begin = min(at for loop in run.loops if loop.intervals and (at := loop.began_at) is not None)
    elapsed = duration(max(interval.at for interval in run.intervals) - begin)
    entries = [
        Tile("Last step", f"{last_step(run.first_loops[-1]):,}"),
        Tile("Samples trained on", short(samples), f"{samples:,}"),
        Tile("Time", elapsed, "from the first record to the last"),
    ]
    if trained > 0:
        entries.append(Tile("Samples per second", short(samples / trained), "mean, without evaluations"))
    for key, name, more in (
        ("loss", "Loss", "last interval of trainer 0"),
        ("auc", "AUC in training", "last window"),
        ("ne", "Normalised entropy", "last window"),
    ):
        for curve in curves.get(key, ())[:1]:
            entries += [Tile(name, number(value), more) for _, value in curve.points[-1:]]
    every = [evaluation for loop in run.loops for evaluation in loop.evaluations]
    best = [evaluation for evaluation in every if evaluation.get("is_best")]
    for evaluation in (best or every)[-1:]:
        name, value = next(iter(evaluation["metrics"].items()), ("", None))
        which = "best" if best else "last"
        entries.append(Tile(f"Validation {name}", number(value), f"{which}, step {evaluation['step']:,}"))
    rows, memory = (sum(curve.last for curve in curves.get(key, ())) for key in ("rows", "bytes"))
    if rows:
        entries.append(Tile("Rows", short(rows), f"in {len(curves['rows'])} tables"))
    if memory:
        entries.append(Tile("Memory of tables", format_bytes(memory)))
    if run.events:
        entries.append(Tile("Faults", str(sum(event["kind"] == "fault" for event in run.events))))
    launches = {event.get("launch") for event in run.events if event["kind"] == "launch"}
    begun = {loop.launch_number for loop in run.loops if loop.intervals or loop.evaluations}
    return [*entries, Tile("Launches", str(len(launches or begun)))]


def last_step(loop: Loop) -> int:
    """Return the last step of which the loop recorded anything."""
    end = loop.end.get("step") if loop.end is not None else None
    steps = [record.step for record in loop.intervals[-1:]] + [int(record["step"]) for record in loop.evaluations[-1:]]
    return max([*steps, end if isinstance(end, int) else 0])


def warnings(run: RunRecords) -> list[str]:
    """Return what a reader must know before reading the charts."""
    notes = list(run.unreadable)
    for file, count in run.damaged.items():
        are = "is" if count == 1 else "are"
        notes.append(
            f"{_count(count, 'line')} of {file} {are} damaged and left out; a process that is killed may leave one."
        )
    if run.missing:
        notes.append(f"{_count(run.missing, 'record')} could not be written, for example because a disk was full.")
    for key, what in (
        ("loss", "The loss was not finite in"),
        ("auc", "The AUC was not defined, or scores were not finite, in"),
    ):
        steps = [step for loop in run.loops for step, value in loop.columns.get((key, ""), ()) if value is None]
        if steps:
            notes.append(f"{what} {_count(len(steps), 'interval')}, first at step {min(steps):,.0f}.")
    if run.num_earlier:
        notes.append(
            f"This folder has {_count(run.num_earlier, 'earlier run')}, which this one did not continue and the page "
            "leaves out: give each run its own --folder."
        )
    superseded = zip(run.first_loops, cuts(run.first_loops), strict=True)
    intervals = [(interval, cut) for loop, cut in superseded for interval in loop.intervals if interval.step >= cut]
    if again := sum(interval.step + 1 - max(interval.first_step, int(cut)) for interval, cut in intervals):
        notes.append(
            f"Later launches trained {_count(again, 'step')} again, as far as they were recorded. The charts show the "
            "earlier attempts paler; totals include them."
        )
    return notes


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def duration(seconds: float) -> str:
    """Return a duration as text."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    days, rest = divmod(round(seconds), 86_400)
    text = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days} d {text}" if days else text


def events(run: RunRecords) -> Listing:
    """Return the launches, faults and ends of the run, in the order of time."""
    entries = [(event["at"], text) for event in run.events if (text := _event_text(event))]
    resumed: set[tuple[int, int]] = set()
    for loop in sorted(run.loops, key=lambda loop: loop.began_at or 0.0):
        if loop.began_at is None:
            continue
        if loop.launch not in resumed and loop.intervals:
            where = loop.start.get("where", "a trainer")
            entries.append((loop.began_at, f"Training started at step {loop.intervals[0].first_step:,} ({where})."))
            resumed.add(loop.launch)
        if loop.end is not None and (loop.end.get("error") or (not run.events and loop.rank == 0)):
            cause = f" with {error}" if (error := loop.end.get("error")) else ""
            entries.append((loop.end["at"], f"Trainer {loop.rank} ended after step {last_step(loop):,}{cause}."))
    entries.sort(key=lambda entry: entry[0])
    listing = Listing("Faults and launches", ("time (UTC)", "after", "event"), style="events")
    if not entries:
        listing.note = "No launch was recorded."
    elif not any(event["kind"] == "fault" for event in run.events):
        listing.note = "No fault was recorded." if run.events else "Faults are recorded by satrap run only."
    if len(entries) > _MAX_EVENTS:
        listing.note += f" These are the last {_MAX_EVENTS} of {len(entries):,} events."
    listing.rows = [(time_text(at), duration(at - entries[0][0]), text) for at, text in entries[-_MAX_EVENTS:]]
    return listing


def _event_text(event: Mapping[str, Any]) -> str:
    status = event.get("status")
    texts = {
        "run": f"satrap run started ({event.get('where', 'unknown place')}).",
        "launch": f"Launch {event.get('launch')} of the trainers, on {event.get('servers')} server(s).",
        "servers": f"The run has {event.get('servers')} server(s) now.",
        "restart": f"Restart of {event.get('process')}.",
        "fault": f"Fault: {event.get('what')}",
        "exit": "satrap run ended with an error." if status is None else f"The run ended with status {status}.",
    }
    return texts.get(event["kind"], "")


def time_text(at: float) -> str:
    """Return a Unix time as text."""
    try:
        return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, OSError, ValueError):
        return "unknown"


def listings(run: RunRecords) -> list[Listing]:
    """Return the tables of settings, of tables and of what was not trained on."""
    loops = _in_order(run)
    latest = next((loop for loop in reversed(loops) if loop.settings), None)
    begun = {} if latest is None else latest.start
    settings = {} if latest is None else latest.settings | {"satrap": begun.get("version")}
    script, tables, features = (settings.pop(name, None) for name in ("script", "tables", "features"))
    settings.pop("rank", None)
    started = [event.get("settings") for event in run.events if event["kind"] == "run"]
    code = {name: begun[name] for name in ("command", "commit") if begun.get(name)}
    entries = [_pairs("Code", code, "")] if code else []
    entries += [_pairs("Settings of the script", script, "The script gave none: Progress(settings=...).")]
    if started and started[-1]:
        entries.append(_pairs("Settings of satrap run", started[-1], ""))
    entries.append(_pairs("Settings of the embeddings", settings, "None were recorded."))
    if changes := _changes(loops):
        entries.append(Listing("Settings that changed between launches", ("setting", "before", "now"), changes))
    entries.append(_table_listing(run, tables))
    if isinstance(features, Mapping) and features:
        entries.append(_pairs("Features", features, ""))
    return [*entries, _lost_listing(run)]


def _in_order(run: RunRecords) -> list[Loop]:
    return sorted(run.loops, key=lambda loop: (loop.launch, -loop.rank))


def differences(one: RunRecords, other: RunRecords) -> Listing:
    """Return the settings that differ between two runs, of their latest launches."""
    loops = [loop for run in (one, other) for loop in [loop for loop in _in_order(run) if loop.rank == 0][-1:]]
    listing = Listing("Settings that differ", ("setting", one.name, other.name), _changes(loops))
    listing.note = "" if listing.rows else "None of those that both recorded."
    return listing


def _pairs(title: str, values: object, absent: str) -> Listing:
    if not isinstance(values, Mapping) or not values:
        return Listing(title, (), note=absent)
    rows: list[tuple[object, ...]] = [(name, _shown(value)) for name, value in list(values.items())[:_MAX_TABLES]]
    note = f"These are the first {len(rows)} of {len(values):,}." if len(rows) < len(values) else ""
    return Listing(title, ("name", "value"), rows, note)


def _changes(loops: list[Loop]) -> list[tuple[object, ...]]:
    changes: list[tuple[object, ...]] = []
    known: dict[str, object] = {}
    for loop in (loop for loop in loops if loop.rank == 0):
        now = _flat("", {name: setting for name, setting in loop.settings.items() if name != "rank"})
        pairs = [(name, _shown(known[name]), _shown(now[name])) for name in now if name in known]
        changes += [(name, before, after) for name, before, after in pairs if before != after]
        known |= now
    return changes[-50:]


def _flat(where: str, value: object) -> dict[str, object]:
    """Return the leaves of settings by their path."""
    if isinstance(value, Mapping):
        pairs = [(f"{where}.{key}" if where else str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and all(isinstance(item, Mapping) and "name" in item for item in value) and value:
        pairs = [(f"{where} {item['name']}", {k: v for k, v in item.items() if k != "name"}) for item in value]
    else:
        return {where: value}
    return {name: leaf for path, item in pairs for name, leaf in _flat(path, item).items()}


def _table_listing(run: RunRecords, tables: object) -> Listing:
    rows, memory = ({curve.name: curve.last for curve in run.curves.get(key, ())} for key in ("rows", "bytes"))
    given = [table for table in (tables if isinstance(tables, list) else []) if isinstance(table, Mapping)]
    declared = {str(table["name"]): table for table in given if "name" in table}
    names = sorted(declared.keys() | rows.keys(), key=lambda name: (-rows.get(name, 0.0), name))
    header = ("table", "rows", "memory", "bytes per row", "dim", "optimizer", "other settings")
    listing = Listing("Tables", header, style="tables")
    if not names:
        listing.note = "No tables were recorded: Progress was created without embeddings."
    if len(names) > _MAX_TABLES:
        listing.note = f"These are the {_MAX_TABLES} largest of {len(names):,} tables."
    for name in names[:_MAX_TABLES]:
        table = {key: value for key, value in declared.get(name, {}).items() if key != "name" and value is not None}
        held, used = rows.get(name), memory.get(name)
        numbers = (
            "" if held is None else number(held),
            "" if used is None else format_bytes(used),
            number(round(used / held)) if held and used else "",
        )
        dim, optimizer = table.pop("dim", ""), _shown(table.pop("optimizer", ""))
        others = ", ".join(f"{key}: {_shown(value)}" for key, value in table.items())
        listing.rows.append((name, *numbers, dim, optimizer, others))
    return listing


def _lost_listing(run: RunRecords) -> Listing:
    """Return what was not trained on, of the last record of each process: its counters never start again."""
    last = {(loop.rank, loop.launch): loop.lost for loop in run.loops if loop.lost}
    totals = sum((Counter(counts) for counts in last.values()), Counter[str]())
    rows: list[tuple[object, ...]] = [(what, number(count)) for what, count in totals.items() if count]
    note = "" if rows else "Nothing was recorded as lost, dropped or cut."
    return Listing("Not trained on", ("what/why", "count"), rows, note, style="numbers")


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        kind = value.get("type", "")
        rest = ", ".join(f"{key}={_shown(item)}" for key, item in value.items() if key != "type" and item is not None)
        text = f"{kind}({rest})" if kind and rest else str(kind) or rest
    elif isinstance(value, list):
        text = ", ".join(map(_shown, value))
    else:
        text = "none" if value is None else str(value)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."
