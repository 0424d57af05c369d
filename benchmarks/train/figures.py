"""From the rounds of a group of training cases to one record per case: rates, what embeddings cost, ratios, targets.

Every ratio is taken inside a round, as in benchmarks.records. What embeddings cost is compared in milliseconds, each
contender's against a dense step in its own framework; a peer that seems to pay nothing makes no ratio. A figure that
peers enter says in "all_peers_present" whether all of them were there in every round.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.records import (
    Figure,
    against,
    agree,
    clean_rounds,
    each,
    judge,
    own_figures,
    processes,
    ratios,
    spread,
    streams_of,
    worst_noise,
)
from benchmarks.runs import Results, Round
from benchmarks.train.cases import TrainCase
from benchmarks.train.plan import TORCHREC, peers_of

# Frameworks draw other first weights and rows, and a step of Adagrad depends on the gradients before it.
SAME_WORK = 0.2


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
    wanted = {
        "ratio": ("satrap", TORCHREC),
        "ratio_stale": ("satrap_stale", TORCHREC),
        "ratio_plain": ("satrap_plain", TORCHREC),
        "ratio_torch": ("satrap", ("torch",)),
    }
    if "paddle" in peers:
        wanted["ratio_paddle"] = ("satrap", ("paddle",))
    others = {
        "cost_ratio": against("satrap", peers, costs, min, clean),
        "cost_ratio_stale": against("satrap_stale", peers, costs, min, clean),
        # The step times are medians, taken in turn in one process; a hiccup of either moves neither.
        "stale_ratio": against("satrap", ("satrap_stale",), steps, max, clean),
    }
    return ratios(wanted, rates, clean) | {name: figure for name, figure in others.items() if figure is not None}


def _versions(rounds: Sequence[Round]) -> dict[str, str]:
    return {name: version for result in rounds if result is not None for name, version in result["versions"].items()}
