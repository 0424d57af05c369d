"""Ratios as ranges over the processors that they were measured on: the tables of README and docs/comparison.md.

`python -m benchmarks.ranges` prints them from the records in results/: of each case and processor all those of the
newest day count together, so that a run cannot be repeated until it pleases.
A figure of one processor says little about another, so the worst is named first.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results"
PROCESSORS = {
    "AMD EPYC (family 25, model 17": "EPYC, Zen 4",
    "AMD EPYC (family 26, model 2": "EPYC, Zen 5",
    "Intel(R) Xeon(R) Processor": "Xeon",
}
"""The name of a processor in the tables, by how `describe_machine` begins its name."""
Ratio = tuple[float, float, float]
"""The median of some rounds, and the lowest and the highest."""
STORE = {
    f"{rows}M x {dim}, {name}{suffix}": f"train/{rows}Mx{dim}/{optimizer}/{ids}/2t"
    for optimizer, name in (("adagrad", "Adagrad"), ("rowwise", "row-wise Adagrad"))
    for ids, suffix, sizes in (("zipf", "", (1, 20)), ("uniform", ", uniform ids", (20,)))
    for rows in sizes
    for dim in (16, 64)
}
TRAIN = {
    f"{top}, {dim}, {precision}": f"train/20Mx{dim}/{top}/{precision}/adagrad/2t"
    for dim in (16, 64)
    for top in ("light", "heavy")
    for precision in ("fp32", "bf16")
}
"""The cases of each table by the name of their line."""
FIGURES = {
    "ratio": "",
    "ratio_1t": " one thread",
    "ratio_direct": " num_rows",
    "ratio_direct_1t": " num_rows one thread",
}
"""The figures of a record, and what follows the case in the name under which `ratios` returns each."""


def ratios(records: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Ratio]:
    """Return the ratios of each case and processor from the records of its newest day that have all peers, by the names
    in FIGURES."""
    newest: dict[tuple[str, str], tuple[str, list[Ratio]]] = {}
    for record in sorted(records, key=lambda record: record["date"]):
        case, figures = record["case"], record["figures"]
        if not (figures.get("ratio") or {}).get("all_peers_present", True):
            continue
        by_case = {f"{case}{suffix}": figures.get(name) for name, suffix in FIGURES.items()}
        if case.endswith("/1t"):  # in older records, one thread is a case
            by_case = {f"{case.removesuffix('1t')}2t one thread": figures.get("ratio")}
        for start, name in PROCESSORS.items():
            for at, figure in by_case.items() if record["machine"]["cpu"].startswith(start) else ():
                if figure and figure["median"]:
                    day, of_day = newest.get((at, name), ("", []))
                    of_day = of_day if day == record["date"][:10] else []
                    ratio = (figure["median"], figure["low"], figure["high"])
                    newest[at, name] = record["date"][:10], [*of_day, ratio]
    return {
        key: (median(middle for middle, *_ in of_day), min(low for _, low, _ in of_day), max(r[2] for r in of_day))
        for key, (_, of_day) in newest.items()
    }


def table(cases: Mapping[str, str], head: str, measured: Mapping[tuple[str, str], Ratio]) -> list[str]:
    """Return the lines of a table: for each case the range of its medians, and the ratio on each processor."""
    names = list(PROCESSORS.values())
    lines = [[head, "worst to best", *names, "one thread"], ["---", *["---:"] * (len(names) + 2)]]
    for label, case in cases.items():
        threads, one_thread = (
            {name: measured[at, name] for name in names if (at, name) in measured}
            for at in (case, f"{case} one thread")
        )
        cells = [_spread(threads[name]) if name in threads else "" for name in names]
        lines.append([label, _range(threads.values()), *cells, _range(one_thread.values())])
    return [f"| {' | '.join(line)} |" for line in lines]


def table_of_direct(measured: Mapping[tuple[str, str], Ratio]) -> list[str]:
    """Return the lines of a table: the cases that were measured with `num_rows`, beside hashed tables."""
    suffixes = ("num_rows", "", "num_rows one thread", "one thread")
    heads = ("with `num_rows`", "hashed", "one thread, with `num_rows`", "one thread, hashed")
    lines = [["case", "processor", *heads], ["---", "---", *["---:"] * len(heads)]]
    for label, case in (STORE | TRAIN).items():
        for name in PROCESSORS.values():
            if (f"{case} num_rows", name) in measured:
                ratios = [measured.get((f"{case} {suffix}".strip(), name)) for suffix in suffixes]
                lines.append([label, name, *("" if ratio is None else _spread(ratio) for ratio in ratios)])
    return [f"| {' | '.join(line)} |" for line in lines]


def _spread(ratio: Ratio) -> str:
    median, low, high = ratio
    return f"{median:.2f}" if low == high else f"{median:.2f} ({low:.2f}-{high:.2f})"


def _range(ratios: Iterable[Ratio]) -> str:
    medians = [f"{median:.1f}" for median in sorted(median for median, *_ in ratios)]
    return " to ".join(dict.fromkeys([medians[0], medians[-1]])) if medians else ""


def _measured() -> dict[tuple[str, str], Ratio]:
    lines = [line for path in sorted(RESULTS.glob("*.jsonl")) for line in path.read_text().splitlines()]
    records = [json.loads(line) for line in lines]
    return ratios(record for record in records if "case" in record)


def medians(case: str) -> list[float]:
    """Return the median ratio of a case on each processor on which it was measured."""
    return [ratio[0] for (at, _), ratio in _measured().items() if at == case]


def tables() -> list[list[str]]:
    """Return the table of the store, that of training steps, and that of tables with `num_rows`."""
    measured = _measured()
    return [
        table(STORE, "table, optimizer", measured),
        table(TRAIN, "top network, dim, precision of the dense network", measured),
        table_of_direct(measured),
    ]


if __name__ == "__main__":
    print("\n\n".join("\n".join(lines) for lines in tables()))
