"""The record of an accuracy case: AUCs of each seed, their mean, and what staleness costs.

A figure is {"mean", "low", "high", "values"}: one value per seed, and the interval in which their mean lies with 95 %
(Student's t). The cost of staleness is a difference of pairs: both runs of a pair have the same seed, so the same
samples in the same order, the same first parameters and the same first rows.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.case import Case
from benchmarks.harness.record import Figure, Rounds

# The 97.5 % quantile of Student's t, by degrees of freedom.
T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def interval(values: Sequence[float]) -> Figure:
    """Return the mean of one value per seed and its 95 % interval."""
    mean = statistics.fmean(values)
    reach = T95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    low, high = mean - reach, mean + reach
    numbers = {name: round(value, 6) for name, value in {"mean": mean, "low": low, "high": high}.items()}
    return {**numbers, "values": [round(value, 6) for value in values]}


def record(case: Case, rounds: Rounds) -> dict[str, Any]:
    """Return the record of one case, whose streams are its stalenesses and whose rounds are its seeds."""
    aucs, best, linear = (rounds.values(name) for name in ("auc", "best_auc", "linear_auc"))
    seen = {label: [Counter(counts) for counts in stream] for label, stream in rounds.values("staleness_seen").items()}
    figures: dict[str, Figure] = {}
    for label, auc in aucs.items():
        figures[f"auc_{label}"] = interval(auc)
        if label != "0":
            figures[f"difference_{label}"] = interval(
                [stale - fresh for stale, fresh in zip(auc, aucs["0"], strict=True)]
            )
        if None not in best[label]:
            shares = [(reached - 0.5) / (most - 0.5) for reached, most in zip(auc, best[label], strict=True)]
            figures |= {f"share_of_best_{label}": interval(shares), "best_auc": interval(best[label])}
        if None not in linear[label]:
            above = [reached - other for reached, other in zip(auc, linear[label], strict=True)]
            figures |= {f"above_linear_{label}": interval(above), "linear_auc": interval(linear[label])}
        figures[f"held_{label}"] = interval([counts[int(label)] / counts.total() for counts in seen[label]])
    num_rows = rounds.values("num_rows")["0"]
    figures["num_rows"] = interval([float(count) for count in num_rows])
    totals = {label: sum(counts, Counter()) for label, counts in seen.items()}
    return {
        "seeds": list(range(len(num_rows))),
        "figures": figures,
        "staleness_seen": {label: dict(sorted(counts.items())) for label, counts in totals.items()},
        "num_rows": num_rows,
        **{name: rounds.values(name)["0"][0] for name in ("num_steps", "num_test_samples")},
    }
