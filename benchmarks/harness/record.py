"""The record of a case, made from the rounds of its group: rates, ratios within a round, spread, noise, targets.

A figure is {"median", "low", "high", "rounds"}: one value per round, and their spread. A ratio is taken inside a round,
against the best form of the best peer in that round, before anything is averaged, so that what drifts between rounds
drifts for both sides. Rounds that something else on the machine disturbed stay in "rounds", but the median and the
spread are those of the clean rounds if there are any.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.harness.case import Case, Target
from benchmarks.harness.forms import ONE_THREAD, labels_of
from benchmarks.harness.rounds import Results, Round

SAME_WORK = 1e-3
# The 97.5 % quantile of Student's t, by degrees of freedom.
T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
NOT_FIGURES = ("other_cpu", "steal", "noisy")

Figure = dict[str, Any]
Values = Sequence[float | None]
Ratio = tuple[str, Sequence[str]]
"""The label that is divided, and the peers whose best form divides it."""


class Rounds:
    """The measurements of one case: its streams by label, each with one result per round."""

    def __init__(self, case: Case, results: Results) -> None:
        self.results = results
        self.streams: dict[str, list[Round]] = {}
        for rounds in results.values():
            labels = {label for result in rounds if result for label in result["streams"]}
            for label in sorted(label for label in labels if label.startswith(case.stream)):
                stream = [result["streams"][label] if result else None for result in rounds]
                self.streams[label.removeprefix(case.stream)] = stream
        # Unknown noise counts as none.
        self.clean = [
            not any(result.get("noisy") for result in of_round if result is not None)
            for of_round in zip(*self.streams.values(), strict=True)
        ]

    def values(self, name: str) -> dict[str, list[Any]]:
        """Return one number of every stream that has it, round by round."""
        return {
            label: each(rounds, name)
            for label, rounds in self.streams.items()
            if any(name in result for result in rounds if result is not None)
        }

    def spread(self, values: Values) -> Figure:
        """Return the median and the range of a figure over its clean rounds, or over all if none was clean."""
        known = [value for value in values if value is not None]
        used = [value for value, good in zip(values, self.clean, strict=True) if value is not None and good] or known
        median = round(statistics.median(used), 3) if used else None
        return {"median": median, "low": min(used, default=None), "high": max(used, default=None), "rounds": [*values]}

    def spreads(self, name: str) -> dict[str, Figure]:
        """Return one number of every stream that has it, as a figure."""
        return {label: self.spread(values) for label, values in self.values(name).items()}

    def figures_of(self, label: str) -> dict[str, Figure]:
        """Return everything that one stream measured, as figures."""
        names = dict.fromkeys(name for result in self.streams[label] if result for name in result)
        return {name: self.spread(self.values(name)[label]) for name in names if name not in NOT_FIGURES}

    def ratios(self, ratios: Mapping[str, Ratio], rate: str) -> dict[str, Figure]:
        """Return ratios of rates by name and, named with _1t, those of one thread against one thread."""
        rates = self.values(rate)
        alone = {label: values for label, values in rates.items() if ONE_THREAD in label.split("/")}
        figures = {name: self.against(ours, peers, rates) for name, (ours, peers) in ratios.items()}
        for name, (ours, peers) in ratios.items():
            figures[f"{name}_{ONE_THREAD}"] = self.against(f"{ours}/{ONE_THREAD}", peers, alone)
        return {name: figure for name, figure in figures.items() if figure is not None}

    def against(
        self,
        ours: str,
        peers: Sequence[str],
        values: Mapping[str, Values],
        best: Callable[[Sequence[float]], float] = max,
    ) -> Figure | None:
        """Return ours divided by the best form of the peers, round by round; None if either was not measured."""
        present = [label for label in labels_of(peers, values) if label != ours]
        if ours not in values or not present:
            return None
        quotients: list[float | None] = []
        better: list[str | None] = []
        for number, value in enumerate(values[ours]):
            rivals = {label: rival for label in present if (rival := values[label][number]) is not None}
            winner = best(list(rivals.values())) if rivals else 0.0
            quotients.append(round(value / winner, 3) if value is not None and winner > 0 else None)
            better.append(next((label for label, rival in rivals.items() if rival == winner), None))
        complete = all(labels_of([peer], present) for peer in peers)
        complete = complete and all(None not in values[label] for label in present)
        return {**self.spread(quotients), "against": better, "all_peers_present": complete}

    def unmeasured(self) -> Figure:
        """Return a figure without a value, so that a record shows what is missing."""
        return {**self.spread([None] * len(self.clean)), "all_peers_present": False}

    def work(self, tolerance: float = SAME_WORK) -> dict[str, Any]:
        """Return how much the contenders that say so changed their rows, and whether those of a round agree on it."""
        change = {
            label: [None if result is None else result["change"] for result in rounds]
            for label, rounds in self.results.items()
            if any(result is not None and "change" in result for result in rounds)
        }
        return {
            "change": change,
            "same_work": all(agree(changes, tolerance) for changes in zip(*change.values(), strict=True)),
        }

    def losses(self) -> dict[str, Any]:
        """Return the first and the last loss of every stream, round by round."""
        ends = ("loss_first", "loss_last")
        return {
            label: [None if result is None else [result[end] for end in ends] for result in rounds]
            for label, rounds in self.streams.items()
        }

    def processes(self) -> dict[str, Any]:
        """Return the noise of the streams, the most memory of each process, and the versions of what was measured."""
        streams = [result for rounds in self.streams.values() for result in rounds if result is not None]
        noise = {name: [r[name] for r in streams if r.get(name) is not None] for name in ("other_cpu", "steal")}
        done = [result for rounds in self.results.values() for result in rounds if result is not None]
        sizes = {
            label: [size for result in rounds if result and (size := result.get("peak_resident_bytes"))]
            for label, rounds in self.results.items()
        }
        return {
            "clean_rounds": self.clean,
            "noise": {name: max(values, default=None) for name, values in noise.items()},
            "peak_resident_bytes": {label: max(known, default=None) for label, known in sizes.items()},
            "versions": {key: value for result in done for key, value in result["versions"].items()},
        }


def make_record(case: Case, results: Results, describe: Callable[[Case, Rounds], dict[str, Any]]) -> dict[str, Any]:
    """Return the record of one case; `describe` returns its figures and whatever else its kind records."""
    rounds = Rounds(case, results)
    record = {**case.describe(), **rounds.processes(), **describe(case, rounds)}
    return record | {"targets": [judge(target, record["figures"]) for target in case.targets]}


def judge(target: Target, figures: Mapping[str, Figure]) -> dict[str, Any]:
    """Return the target with the value reached; `met` is None where the measurement is missing or incomplete."""
    figure = figures.get(target.figure, {})
    value = figure.get("median", figure.get("mean"))
    met = None if value is None or not figure.get("all_peers_present", True) else target.met_by(value)
    return {"figure": target.figure, "wanted": target.limits(), "value": value, "met": met}


def complaints(record: Mapping[str, Any]) -> list[str]:
    """Return the targets that were missed or not measured, and whether contenders did different work."""
    lines = []
    for target in record["targets"]:
        if target["met"] is None:
            lines.append(f"{record['case']}: {target['figure']} was not measured, or not against every peer")
        elif not target["met"]:
            lines.append(f"{record['case']}: {target['figure']} is {target['value']:g}, expected {target['wanted']}")
    if record.get("same_work") is False:
        lines.append(f"{record['case']}: the contenders changed their rows differently: {record['change']}")
    return lines


def interval(values: Sequence[float]) -> Figure:
    """Return the mean of one value per seed and its 95 % interval, which one or more than ten values do not have."""
    mean, count = statistics.fmean(values), len(values)
    reach = T95[count - 1] * statistics.stdev(values) / math.sqrt(count) if 1 < count <= len(T95) else math.inf
    numbers = {"mean": mean, "low": mean - reach, "high": mean + reach}
    known = {name: round(value, 6) if math.isfinite(value) else None for name, value in numbers.items()}
    return {**known, "values": [round(value, 6) for value in values]}


def each(rounds: Sequence[Round], name: str) -> list[Any]:
    """Return one number of every round, None where the run failed."""
    return [None if result is None else result[name] for result in rounds]


def agree(changes: Values, tolerance: float) -> bool:
    """Return whether the contenders of one round changed their rows by the same amount."""
    known = [change for change in changes if change is not None]
    return not known or max(known) - min(known) <= tolerance * max(known)
