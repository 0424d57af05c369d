"""Records as a table: Satrap, the best form of each peer, ratios with their spread, targets met and missed.

`python -m benchmarks.summary FILE ...` prints it for the lines of these files; a benchmark prints its own at the end.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.forms import ONE_THREAD, labels_of

RATES = (("rows_per_s", "M rows/s", 1e6), ("samples_per_s", "thousand samples/s", 1e3))
RATIOS = {
    "ratio": "ratio",
    "ratio_plain": "plain",
    f"ratio_{ONE_THREAD}": "one thread",
    "cost_ratio": "cost",
}
Record = dict[str, Any]


def summary(records: Sequence[Record]) -> list[str]:
    """Return lines of Markdown: for each machine and date a table of rates, then one line for each target."""
    lines: list[str] = []
    runs: dict[str, list[Record]] = {}
    for record in records:
        runs.setdefault(_run(record), []).append(record)
    for run, run_records in runs.items():
        lines += [run, ""]
        for name, unit, scale in RATES:
            timed = [record for record in run_records if name in record]
            peers = list(dict.fromkeys(peer for record in timed for peer in _peers(record[name])))
            if timed:
                heads = [unit, "Satrap", *peers, *RATIOS.values(), "clean rounds"]
                lines += [_row(heads), _row(["---"] * len(heads))]
                lines += [_row(_cells(record, name, scale, peers)) for record in timed]
                lines.append("")
        lines += [_verdict(record, target) for record in run_records for target in record["targets"]]
    return lines


def _run(record: Record) -> str:
    machine = record["machine"]
    what = f"{machine['cpu']}, L3 {machine.get('l3', 'unknown')}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    rounds = record.get("num_rounds", len(record.get("seeds", ())))
    return f"{record['date']}, {what}; {rounds} rounds; `{record['command']}`; {record['commit'][:12]}"


def _peers(rates: Record) -> list[str]:
    names = dict.fromkeys(label.split("/")[0] for label in rates)
    return [name for name in names if not name.startswith("satrap")]


def _cells(record: Record, name: str, scale: float, peers: Sequence[str]) -> list[str]:
    rates = {label: figure["median"] for label, figure in record[name].items() if figure["median"] is not None}

    def best(peer: str) -> str:
        label = max(labels_of([peer], rates), key=lambda each: rates[each], default=None)
        return "" if label is None else f"{rates[label] / scale:.1f}{label.removeprefix(peer).replace('/', ' ')}"

    ratios = [_spread(record["figures"].get(figure)) for figure in RATIOS]
    clean = f"{sum(record['clean_rounds'])} of {len(record['clean_rounds'])}"
    ours = f"{rates['satrap'] / scale:.1f}" if "satrap" in rates else ""
    return [record["case"], ours, *(best(peer) for peer in peers), *ratios, clean]


def _spread(figure: Record | None) -> str:
    if not figure:
        return ""
    if "mean" in figure:
        return f"{figure['mean']:.4f} ({figure['low']:.4f} to {figure['high']:.4f})"
    return "" if figure["median"] is None else f"{figure['median']:.2f} ({figure['low']:.2f}-{figure['high']:.2f})"


def _verdict(record: Record, target: Record) -> str:
    met = {True: "met", False: "missed", None: "not measured"}[target["met"]]
    figure = record["figures"].get(target["figure"])
    return f"{met}: {record['case']} {target['figure']} {_spread(figure)}, expected {target['wanted']}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(paths: Sequence[str]) -> None:
    records = [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]
    print("\n".join(summary(records)))


if __name__ == "__main__":
    main(sys.argv[1:])
