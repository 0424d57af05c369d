"""From the rounds of a group of cases to one record per case: rates, ratios within a round, spread, noise, targets.

A figure is {"median", "low", "high", "rounds"}: one value per round, and their spread. A ratio is taken inside a round,
against the best form of the best peer in that round, before anything is averaged: what drifts between rounds drifts for
both.
Rounds that something else on the machine disturbed stay in "rounds", but the median and the spread are those of the
clean rounds wherever there is one.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.cases import AnyCase, Case
from benchmarks.forms import ONE_THREAD, labels_of
from benchmarks.runs import Results, Round

SAME_WORK = 1e-3
# For each kind, its ratios: what is divided, and the peers of whom the best form counts.
RATIOS: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "train": {
        "ratio": ("satrap", ("torch", "fbgemm")),
        "ratio_plain": ("satrap_plain", ("torch", "fbgemm")),
        "ratio_apart": ("satrap", ("torch_apart", "fbgemm_apart")),
    },
    "lookup": {"ratio": ("satrap", ("index_select",)), "ratio_eval": ("satrap_eval", ("index_select",))},
    "shared": {"ratio": ("satrap_shared", ("satrap",))},
}
NOT_FIGURES = ("other_cpu", "steal", "noisy", "peak_resident_bytes", "versions")

Figure = dict[str, Any]
Values = Sequence[float | None]


def spread(values: Sequence[float | None], clean: Sequence[bool]) -> Figure:
    """The median and the range of a figure over its clean rounds, or over all if none was clean."""
    known = [value for value in values if value is not None]
    used = [value for value, good in zip(values, clean, strict=True) if value is not None and good] or known
    median = round(statistics.median(used), 3) if used else None
    return {
        "median": median,
        "low": min(used, default=None),
        "high": max(used, default=None),
        "rounds": list(values),
    }


def make_record(case: Case, results: Results) -> dict[str, Any]:
    """The record of one case, from the results of all the runs of its group."""
    record: dict[str, Any] = {"case": case.name, "kind": case.kind, "rows": case.rows, "dim": case.dim}
    record |= {"optimizer": case.optimizer, "ids": case.ids, "num_threads": case.num_threads}
    timed = results if case.ids is None else streams_of(f"{case.ids}:", results)
    clean = clean_rounds(timed)
    if case.ids is None:
        record["figures"] = own_figures(results["satrap"], clean)
    else:
        rates = {name: each(rounds, "rows_per_s") for name, rounds in timed.items()}
        record["rows_per_s"] = {name: spread(values, clean) for name, values in rates.items()}
        record["step_ms"] = {name: spread(each(rounds, "median_step_ms"), clean) for name, rounds in timed.items()}
        record["figures"] = ratios(RATIOS.get(case.kind, {}), rates, clean)
    record["targets"] = judge(case, record)
    record["clean_rounds"] = clean
    record["noise"] = worst_noise(timed)
    if case.kind == "train":
        record["change"] = {name: each(rounds, "change") for name, rounds in results.items()}
        record["same_work"] = all(agree(changes) for changes in zip(*record["change"].values(), strict=True))
    record |= processes(results)
    return record


def processes(results: Results) -> dict[str, Any]:
    """What the processes say of themselves: the most memory each had, and what was measured."""
    done = [result for rounds in results.values() for result in rounds if result is not None]
    sizes = {name: [size for size in each(rounds, "peak_resident_bytes") if size] for name, rounds in results.items()}
    return {
        "peak_resident_bytes": {name: max(known, default=None) for name, known in sizes.items()},
        "versions": {key: value for result in done for key, value in result["versions"].items()},
    }


def judge(case: AnyCase, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each target of the case with the value reached; `met` is None where the measurement is missing or incomplete."""
    judged = []
    for target in case.targets:
        figure = record["figures"].get(target.figure, {})
        value = figure.get("median")
        complete = figure.get("all_peers_present", True)
        usable = value is not None and complete
        met = target.met_by(value) if usable else None
        judged.append({"figure": target.figure, "wanted": target.wanted(), "value": value, "met": met})
    return judged


def complaints(record: Mapping[str, Any]) -> list[str]:
    """What stands against a record: targets missed or not measured, contenders that did different work."""
    lines = []
    for target in record["targets"]:
        if target["met"] is None:
            lines.append(f"{record['case']}: {target['figure']} was not measured, or not against every peer")
        elif not target["met"]:
            lines.append(f"{record['case']}: {target['figure']} is {target['value']:g}, wanted {target['wanted']}")
    if record.get("same_work") is False:
        lines.append(f"{record['case']}: the contenders changed their rows differently: {record['change']}")
    return lines


def streams_of(prefix: str, results: Results) -> dict[str, list[Round]]:
    """By the rest of its label, each timed stream whose label begins with the prefix, one per round."""
    streams: dict[str, list[Round]] = {}
    for rounds in results.values():
        labels = {label for result in rounds if result for label in result["streams"] if label.startswith(prefix)}
        for label in sorted(labels):
            streams[label.removeprefix(prefix)] = [result["streams"][label] if result else None for result in rounds]
    return streams


def own_figures(rounds: Sequence[Round], clean: Sequence[bool]) -> dict[str, Figure]:
    """Whatever the rounds of a run without peers measured."""
    names = dict.fromkeys(name for result in rounds if result for name in result if name not in NOT_FIGURES)
    return {name: spread(each(rounds, name), clean) for name in names}


def ratios(
    wanted: Mapping[str, tuple[str, Sequence[str]]], rates: Mapping[str, Values], clean: Sequence[bool]
) -> dict[str, Figure]:
    """Ratios of rates by name, of (ours, peers); and, named with _1t, those of one thread against one thread."""
    figures = {name: against(ours, peers, rates, max, clean) for name, (ours, peers) in wanted.items()}
    for name, (ours, peers) in wanted.items():
        alone = {label: values for label, values in rates.items() if ONE_THREAD in label.split("/")}
        figures[f"{name}_{ONE_THREAD}"] = against(f"{ours}/{ONE_THREAD}", peers, alone, max, clean)
    return {name: figure for name, figure in figures.items() if figure is not None}


def against(
    ours: str,
    peers: Sequence[str],
    values: Mapping[str, Values],
    best: Callable[[Sequence[float]], float],
    clean: Sequence[bool],
) -> Figure | None:
    """Ours divided by the best form of the peers, round by round; None if it or all of them were not measured."""
    present = [label for label in labels_of(peers, values) if label != ours]
    if ours not in values or not present:
        return None
    quotients: list[float | None] = []
    better: list[str | None] = []
    for number, value in enumerate(values[ours]):
        beside = {label: known for label in present if (known := values[label][number]) is not None}
        chosen = best(list(beside.values())) if beside else None
        usable = value is not None and chosen is not None and chosen > 0
        quotients.append(round(value / chosen, 3) if usable and value is not None and chosen is not None else None)
        better.append(next((label for label, known in beside.items() if known == chosen), None))
    measured = all(labels_of([peer], present) for peer in peers)
    complete = measured and all(None not in values[label] for label in present)
    return {**spread(quotients, clean), "against": better, "all_peers_present": complete}


def clean_rounds(timed: Mapping[str, Sequence[Round]]) -> list[bool]:
    """For each round, whether nothing disturbed any contender; unknown noise counts as none."""
    return [
        not any(result.get("noisy") for result in results if result is not None)
        for results in zip(*timed.values(), strict=True)
    ]


def worst_noise(timed: Mapping[str, Sequence[Round]]) -> dict[str, float | None]:
    """The largest shares that others and the host took in any run."""
    done = [result for rounds in timed.values() for result in rounds if result is not None]
    seen = {name: [r[name] for r in done if r.get(name) is not None] for name in ("other_cpu", "steal")}
    return {name: max(values, default=None) for name, values in seen.items()}


def each(rounds: Sequence[Round], name: str) -> list[Any]:
    """One number of every round, None where it failed."""
    return [None if result is None else result[name] for result in rounds]


def agree(changes: Sequence[float | None], tolerance: float = SAME_WORK) -> bool:
    """Whether the contenders of one round changed their rows by the same amount."""
    known = [change for change in changes if change is not None]
    return not known or max(known) - min(known) <= tolerance * max(known)
