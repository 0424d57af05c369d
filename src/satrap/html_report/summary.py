"""What a report says beside its charts: the state of the run, its main numbers, what is missing, its events and its
settings. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from satrap.byte_sizes import format_bytes
from satrap.html_report.chart import Listing, number
from satrap.html_report.run_records import Loop, RunRecords, cuts
from satrap.monitor.report import short

_MAX_EVENTS = 200
_MAX_VALUE = 300  # characters of a setting


def title_of(run: RunRecords) -> str:
    """Return the title of the page."""
    recorded = max(run.loops, key=lambda loop: loop.began_at, default=Loop(rank=0))
    name = _script_of(recorded.start) or _script_of(run.starts[0].get("settings", {}))
    title = f"{name} in {run.name}" if name else f"Run {run.name}"
    settings = [loop.settings.get("script") for loop in run.loops]
    data = [given["data"] for given in settings if isinstance(given, Mapping) and given.get("data")]
    return f"{title}: {_shown(data[-1])}" if data else title


def _script_of(record: Mapping[str, Any]) -> str:
    """Return the file name of the script that a record names; empty if it names none."""
    return str(record.get("script") or "").rpartition("/")[2]


def state_of(run: RunRecords, now: float) -> tuple[str, str]:
    """Return the kind of the run's state, which chooses its colour, and the sentence. now: Unix time."""
    last = max((line["at"] for line in run.intervals), default=None)
    age = "" if last is None else f" The last record was {duration(max(0.0, now - last))} old."
    if run.is_live:
        return "live", f"The run was in progress.{age}"
    if run.events:
        end = next((event for event in reversed(run.events) if event["kind"] in ("run", "exit")), {"kind": "run"})
        if end["kind"] == "run":
            return "failed", f"No end was recorded: satrap run was killed.{age}"
        return "done" if end.get("status") == 0 else "failed", _event_text(end)
    loops = [loop for loop in run.loops if loop.launch == max(other.launch for other in run.loops)]
    if not any(loop.end for loop in loops):
        return "failed" if loops else "", f"No end was recorded: training was killed, or still ran.{age}"
    errors = [loop.end["error"] for loop in loops if loop.end.get("error")]
    return ("failed", f"Training ended with {errors[-1]}") if errors else ("done", "Training ended.")


def tiles(run: RunRecords) -> list[tuple[str, str, str]]:
    """Return the main numbers of the run, as far as they were recorded: the name, the value, and a remark."""
    if not run.intervals:
        return []
    begun = [loop for loop in run.loops if loop.intervals]
    samples = sum(loop.intervals[-1]["samples"] for loop in begun)
    trained = sum(line["trained"] for line in run.intervals) / len(run.by_rank)
    seconds = max(line["at"] for line in run.intervals) - min(loop.began_at for loop in begun)
    entries = [
        ("Last step", f"{last_step(run.first_loops[-1]):,}", ""),
        ("Samples trained on", short(samples), f"{samples:,}"),
        ("Time", duration(seconds), "from the first record to the last"),
    ]
    if trained > 0:
        entries.append(("Samples per second", short(samples / trained), "mean, without evaluations"))
    for key, name, remark in (
        ("loss", "Loss", "last interval of trainer 0"),
        ("auc", "AUC in training", "last window"),
        ("ne", "Normalised entropy", "last window"),
    ):
        for curve in run.curves.get(key, ())[:1]:
            entries += [(name, number(value), remark) for _, value in curve.points[-1:]]
    evaluations = [line for loop in run.loops for line in loop.evaluations]
    for line in [run.best] if run.best else evaluations[-1:]:
        names = (line.get("best_by"), *line["metrics"])  # the metric that decides which is the best, or the first
        name = next((name for name in names if name in line["metrics"]), "")
        same = [other for other in evaluations if name in other["metrics"]]
        shown = [("best", line)] if run.best else []
        shown += [("last", other) for other in same[-1:] if not run.best or other["step"] != line["step"]]
        for which, one in shown:
            entries.append((f"Validation {name}", number(one["metrics"].get(name)), f"{which}, step {one['step']:,}"))
    rows, memory = ([curve.last for curve in run.curves.get(key, ())] for key in ("rows", "bytes"))
    if any(rows):
        entries.append(("Rows", short(sum(rows)), f"in {len(rows)} tables"))
    if any(memory):
        entries.append(("Memory of tables", format_bytes(sum(memory)), ""))
    if run.events:
        entries.append(("Faults", str(sum(event["kind"] == "fault" for event in run.events)), ""))
    launches = {event.get("launch") for event in run.events if event["kind"] == "launch"}
    launches = launches or {loop.launch for loop in run.loops if loop.intervals or loop.evaluations}
    last = max(filter(None, launches), default=0)
    return [*entries, ("Launches", str(len(launches)), f"the last is launch {last}" if last > len(launches) else "")]


def last_step(loop: Loop) -> int:
    """Return the last step of which the loop recorded anything."""
    records = (*loop.intervals[-1:], *loop.evaluations[-1:], loop.end)
    return max(int(record.get("step", 0)) for record in records)


def warnings(run: RunRecords) -> list[str]:
    """Return what a reader must know before reading the charts."""
    notes = list(run.unreadable)
    for file, count in run.damaged.items():
        notes.append(f"{_count(count, 'damaged line')} of {file} left out; a process that is killed may leave one.")
    if run.missing:
        notes.append(f"{_count(run.missing, 'record')} could not be written, for example because a disk was full.")
    for key, what in (
        ("loss", "The loss was not finite in"),
        ("auc", "The AUC was not defined, or scores were not finite, in"),
    ):
        steps = [line["step"] for line in run.intervals if key in line and line[key] is None]
        if steps:
            notes.append(f"{what} {_count(len(steps), 'interval')}, first at step {min(steps):,}.")
    if run.num_earlier:
        notes.append(
            f"This folder has {_count(run.num_earlier, 'earlier run')}, which this one did not continue and the page "
            "leaves out: give each run its own --folder."
        )
    shown, last = run.starts
    if last != shown:
        script = _script_of(last.get("settings", {})) or "of an unknown script"
        notes.append(
            f"The last run in this folder ({script}) recorded no step, so the charts and settings are those of an "
            "earlier one. Scripts record steps with satrap.Progress."
        )
    superseded = zip(run.first_loops, cuts(run.first_loops), strict=True)
    lines = [(line, cut) for loop, cut in superseded for line in loop.intervals if line["step"] >= cut]
    if again := sum(line["step"] + 1 - max(line["first_step"], int(cut)) for line, cut in lines):
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
    return str(timedelta(seconds=round(seconds)))


def time_text(at: float) -> str:
    """Return a Unix time as text."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"


def events(run: RunRecords) -> Listing:
    """Return the launches, faults and ends of the run, in the order of time."""
    entries = [(event["at"], text) for event in run.events if (text := _event_text(event))]
    resumed: set[int] = set()
    for loop in sorted(run.loops, key=lambda loop: loop.began_at):
        if loop.launch not in resumed and loop.intervals:
            where, step = loop.start.get("where", "a trainer"), loop.intervals[0]["first_step"]
            entries.append((loop.began_at, f"Training started at step {step:,} ({where})."))
            resumed.add(loop.launch)
        error = loop.end.get("error")
        if error or (loop.end and not run.events and loop.rank == 0):
            cause = f" with {error}" if error else ""
            entries.append((loop.end["at"], f"Trainer {loop.rank} ended after step {last_step(loop):,}{cause}."))
    entries.sort(key=lambda entry: entry[0])
    note = ""
    if not entries:
        note = "No launch was recorded."
    elif not any(event["kind"] == "fault" for event in run.events):
        note = "No fault was recorded." if run.events else "Faults are recorded by satrap run only."
    if len(entries) > _MAX_EVENTS:
        note += f" These are the last {_MAX_EVENTS} of {len(entries):,} events."
    rows = [(time_text(at), duration(at - entries[0][0]), text) for at, text in entries[-_MAX_EVENTS:]]
    return Listing("Faults and launches", ("time (UTC)", "after", "event"), rows, note, "events")


def _event_text(event: Mapping[str, Any]) -> str:
    status = event.get("status")
    texts = {
        "run": f"satrap run started ({event.get('where', 'unknown place')}).",
        "launch": f"Launch {event.get('launch')} of the trainers, on {event.get('servers')} server(s).",
        "servers": f"The run has {event.get('servers')} server(s) now.",
        "restart": f"Restart of {event.get('process')}.",
        "fault": f"Fault: {event.get('what')}",
        "exit": "satrap run ended with an error." if status is None else f"The run ended with exit status {status}.",
    }
    return texts.get(event["kind"], "")


def listings(run: RunRecords) -> list[Listing]:
    """Return the tables of settings, of tables and of what was not trained on."""
    loops = _with_settings(run)
    latest = loops[-1] if loops else Loop(rank=0)
    settings = {name: value for name, value in latest.settings.items() if name != "rank"}
    script, tables, features = (settings.pop(name, None) for name in ("script", "tables", "features"))
    names = {"command": "command", "commit": "commit", "version": "satrap"}
    code = {name: latest.start[key] for key, name in names.items() if latest.start.get(key)}
    changes = Listing("Settings that changed between launches", ("setting", "before", "now"), _changes(loops))
    shown = [
        _pairs("Code", code),
        _pairs("Settings of the script", script, "The script gave none: Progress(settings=...)."),
        _pairs("Settings of satrap run", run.starts[0].get("settings")),
        _pairs("Settings of the embeddings", settings, "None were recorded."),
        changes,
        _table_listing(run, tables),
        _pairs("Features", features),
        _lost_listing(run),
    ]
    return [listing for listing in shown if listing.rows or listing.note]


def _with_settings(run: RunRecords) -> list[Loop]:
    """Return the loops of the first trainer that recorded their settings, in the order of time."""
    return [loop for loop in run.loops if loop.settings and loop.rank == run.loops[0].rank]


def differences(one: RunRecords, other: RunRecords) -> Listing:
    """Return the settings that differ between two runs, of their latest launches."""
    rows = _changes([*_with_settings(one)[-1:], *_with_settings(other)[-1:]])
    note = "" if rows else "None of those that both recorded."
    return Listing("Settings that differ", ("setting", one.name, other.name), rows, note)


def _pairs(title: str, values: object, absent: str = "") -> Listing:
    pairs = values.items() if isinstance(values, Mapping) else ()
    rows = [(name, _shown(value)) for name, value in pairs]
    return Listing(title, ("name", "value"), rows, "" if rows else absent)


def _changes(loops: Sequence[Loop]) -> list[tuple[str, str, str]]:
    """Return the settings that differ from those of the loop before, with both values."""
    changes: list[tuple[str, str, str]] = []
    known: dict[str, str] = {}
    for loop in loops:
        now = {name: _shown(setting) for name, setting in _flat("", loop.settings).items() if name != "rank"}
        changes += [(name, known[name], now[name]) for name in now if known.get(name, now[name]) != now[name]]
        known |= now
    return changes


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
    """Return the tables, the largest first: their sizes and how they were declared."""
    rows, memory = ({curve.name: curve.last for curve in run.curves.get(key, ())} for key in ("rows", "bytes"))
    given = [table for table in (tables if isinstance(tables, list) else []) if isinstance(table, Mapping)]
    declared = {str(table["name"]): table for table in given if "name" in table}
    entries = []
    for name in sorted(declared.keys() | rows.keys(), key=lambda name: (-rows.get(name, 0.0), name)):
        held, used = rows.get(name), memory.get(name)
        sizes = ("" if held is None else number(held), "" if used is None else format_bytes(used),
                 number(round(used / held)) if held and used else "")  # fmt: skip
        table = {key: value for key, value in declared.get(name, {}).items() if key != "name" and value is not None}
        dim, optimizer = table.pop("dim", ""), _shown(table.pop("optimizer", ""))
        entries.append((name, *sizes, dim, optimizer, ", ".join(f"{key}: {_shown(v)}" for key, v in table.items())))
    header = ("table", "rows", "memory", "bytes per row", "dim", "optimizer", "other settings")
    note = "" if entries else "No tables were recorded: the script has no Progress, or one without the embeddings."
    return Listing("Tables", header, entries, note, "tables")


def _lost_listing(run: RunRecords) -> Listing:
    """Return what was not trained on, of the last record of each process: its counters never start again."""
    last = {(loop.rank, loop.launch): line["lost"] for loop in run.loops for line in loop.intervals if line.get("lost")}
    totals = sum((Counter(counts) for counts in last.values()), Counter[str]())
    rows = [(what, number(count)) for what, count in totals.items() if count]
    note = "" if rows else "Nothing was recorded as lost, dropped or cut."
    return Listing("Not trained on", ("what/why", "count"), rows, note, "numbers")


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
