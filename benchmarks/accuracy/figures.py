"""From the runs of a case to its record: AUCs of each seed, their mean, what staleness costs, the targets.

A figure is {"mean", "low", "high", "values"}: one value per seed, and the interval in which their mean lies with 95 %
(Student's t). What staleness costs is a difference of pairs: both runs of a pair have the same seed, so the same
samples in the same order, the same first parameters and the same first rows.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.accuracy.cases import AccuracyCase
from benchmarks.accuracy.training import Outcome
from benchmarks.cases import Target

# Student's t: what 97.5 % lie below, by degrees of freedom.
T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

Figure = dict[str, Any]
Outcomes = Mapping[tuple[int, int], Outcome]
"""By staleness and seed."""


def interval(values: Sequence[float]) -> Figure:
    """The mean of one value per seed and its 95 % interval."""
    mean = statistics.fmean(values)
    reach = T95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return {
        "mean": round(mean, 6),
        "low": round(mean - reach, 6),
        "high": round(mean + reach, 6),
        "values": [round(value, 6) for value in values],
    }


def make_record(case: AccuracyCase, outcomes: Outcomes) -> dict[str, Any]:
    """The record of one case."""
    stalenesses = sorted({staleness for staleness, _ in outcomes})
    seeds = sorted({seed for _, seed in outcomes})
    runs = {staleness: [outcomes[staleness, seed] for seed in seeds] for staleness in stalenesses}
    seen = {
        staleness: sum((Counter(run.staleness_seen) for run in each), Counter()) for staleness, each in runs.items()
    }
    figures = _figures(runs)
    return {
        "case": case.name,
        "seeds": seeds,
        "figures": figures,
        "staleness_seen": {str(staleness): dict(sorted(counts.items())) for staleness, counts in seen.items()},
        "num_steps": outcomes[0, seeds[0]].num_steps,
        "num_rows": [run.num_rows for run in runs[0]],
        "num_test_samples": outcomes[0, seeds[0]].num_test_samples,
        "targets": [judge(target, figures) for target in case.targets],
    }


def _figures(runs: Mapping[int, Sequence[Outcome]]) -> dict[str, Figure]:
    figures = {}
    for staleness, each in runs.items():
        aucs = [run.auc for run in each]
        figures[f"auc_{staleness}"] = interval(aucs)
        if staleness > 0:
            pairs = zip(aucs, (run.auc for run in runs[0]), strict=True)
            figures[f"difference_{staleness}"] = interval([stale - fresh for stale, fresh in pairs])
        best = [run.best_auc for run in each if run.best_auc is not None]
        if best:
            shares = [(auc - 0.5) / (most - 0.5) for auc, most in zip(aucs, best, strict=True)]
            figures[f"share_of_best_{staleness}"] = interval(shares)
            figures["best_auc"] = interval(best)
        linear = [run.linear_auc for run in each if run.linear_auc is not None]
        if linear:
            figures["linear_auc"] = interval(linear)
            figures[f"above_linear_{staleness}"] = interval([a - b for a, b in zip(aucs, linear, strict=True)])
        kept = [run.staleness_seen.get(staleness, 0) / sum(run.staleness_seen.values()) for run in each]
        figures[f"held_{staleness}"] = interval(kept)
    figures["num_rows"] = interval([float(run.num_rows) for run in runs[0]])
    return figures


def judge(target: Target, figures: Mapping[str, Figure]) -> dict[str, Any]:
    """The target with the mean reached; `met` is None where it was not measured."""
    figure = figures.get(target.figure)
    value = None if figure is None else figure["mean"]
    met = None if value is None else target.met_by(value)
    wanted = target.wanted()
    if target.at_least is not None and target.at_most is not None:
        wanted = f"{target.at_least:g} to {target.at_most:g}"
    return {"figure": target.figure, "wanted": wanted, "value": value, "met": met}
