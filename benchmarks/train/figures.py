"""From the rounds of a group of training cases to one record per case: rates, what embeddings cost, ratios, targets.

Every ratio is taken inside a round, as in benchmarks.records. What embeddings cost is compared in milliseconds, each
contender's against a dense step in its own framework; a peer that seems to pay nothing makes no ratio. A figure that
peers enter says in "all_peers_present" whether all of them were there in every round.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.records import (
    Figure,
    agree,
    clean_rounds,
    each,
    judge,
    own_figures,
    processes,
    spread,
    streams_of,
    worst_noise,
)
from benchmarks.runs import Results, Round
from benchmarks.train.cases import TrainCase
from benchmarks.train.plan import TORCHREC, peers_of

# Frameworks draw other first weights and rows, and a step of Adagrad depends on the gradients before it.
SAME_WORK = 0.2
Values = Sequence[float | None]


def make_record(case: TrainCase, results: Results) -> dict[str, Any]:
    """The record of one case, from the results of all the runs of its group."""
    record: dict[str, Any] = {"case": case.name, "kind": case.kind, "rows": case.rows, "dim": case.dim}
    record |= {"top": case.top, "precision": case.precision, "optimizer": case.optimizer}
    record["num_threads"] = case.num_threads
    streams = streams_of(f"{case.model}:", results)
    clean = clean_rounds(streams)
    if case.kind == "read":
        record["figures"] = own_figures(streams["satrap"], clean)
    else:
        for name in ("samples_per_s", "step_ms", "dense_ms", "cost_ms"):
            record[name] = {label: spread(each(rounds, name), clean) for label, rounds in streams.items()}
        for label, rounds in streams.items():
            record["cost_ms"][label]["intervals"] = each(rounds, "cost_interval_ms")
        record["figures"] = _figures(peers_of(case), streams, clean)
        record["loss"] = {
            label: [None if result is None else [result["loss_first"], result["loss_last"]] for result in rounds]
            for label, rounds in streams.items()
        }
        record["change"] = {label: each(rounds, "change") for label, rounds in results.items()}
        changes = zip(*record["change"].values(), strict=True)
        record["same_work"] = all(agree(of_round, SAME_WORK) for of_round in changes)
    record["targets"] = judge(case, record)
    record["clean_rounds"] = clean
    record["noise"] = worst_noise(streams)
    record |= processes(results)
    # By contender: their environments differ.
    record["versions"] = {label: _versions(rounds) for label, rounds in results.items()}
    return record


def _figures(peers: Sequence[str], streams: Mapping[str, Sequence[Round]], clean: Sequence[bool]) -> dict[str, Figure]:
    rates = {label: each(rounds, "samples_per_s") for label, rounds in streams.items()}
    costs = {label: each(rounds, "cost_ms") for label, rounds in streams.items()}
    steps = {label: each(rounds, "step_ms") for label, rounds in streams.items()}
    figures = {
        "ratio": against("satrap", TORCHREC, rates, max, clean),
        "ratio_stale": against("satrap_stale", TORCHREC, rates, max, clean),
        "ratio_plain": against("satrap_plain", TORCHREC, rates, max, clean),
        "ratio_torch": against("satrap", ("torch",), rates, max, clean),
        "cost_ratio": against("satrap", peers, costs, min, clean),
        "cost_ratio_stale": against("satrap_stale", peers, costs, min, clean),
        # The step times are medians, taken in turn in one process; a hiccup of either moves neither.
        "stale_ratio": against("satrap", ("satrap_stale",), steps, max, clean),
    }
    if "paddle" in peers:
        figures["ratio_paddle"] = against("satrap", ("paddle",), rates, max, clean)
    return {name: figure for name, figure in figures.items() if figure is not None}


def _versions(rounds: Sequence[Round]) -> dict[str, str]:
    return {name: version for result in rounds if result is not None for name, version in result["versions"].items()}


def against(
    ours: str,
    peers: Sequence[str],
    values: Mapping[str, Values],
    best: Callable[[Sequence[float]], float],
    clean: Sequence[bool],
) -> Figure | None:
    """Ours divided by the best of the peers, round by round; None if it or all of them were not measured."""
    present = [peer for peer in peers if peer in values]
    if ours not in values or not present:
        return None
    quotients: list[float | None] = []
    better: list[str | None] = []
    for number, value in enumerate(values[ours]):
        beside = {peer: known for peer in present if (known := values[peer][number]) is not None}
        chosen = best(list(beside.values())) if beside else None
        usable = value is not None and chosen is not None and chosen > 0
        quotients.append(round(value / chosen, 3) if usable and value is not None and chosen is not None else None)
        better.append(next((peer for peer, known in beside.items() if known == chosen), None))
    complete = all(peer in values and None not in values[peer] for peer in peers)
    return {**spread(quotients, clean), "against": better, "all_peers_present": complete}
