"""Reads a small file and then a large one, and prints by how many bytes the large one made the process grow.

It is a separate process, because memory that other tests have freed would hide what reading takes. It prints nothing
where the kernel does not report memory.
"""

import sys
from pathlib import Path
from typing import Any

from clicks import FEATURES, OPTIONS, TEXT_OPTIONS
from satrap.data.arrow import Arrow
from satrap.data.delimited import CSV
from satrap.data.parquet import Parquet
from satrap.data.source import Source

STATUS = Path("/proc/self/status")


def declared(kind: str, path: str) -> Source:
    shuffled: dict[str, Any] = {"shuffle": True, "shuffle_blocks": 4, "num_threads": 2}
    if kind.startswith("csv"):
        return CSV(path, block_bytes=1 << 18, **shuffled, **TEXT_OPTIONS)
    return (Parquet if kind == "parquet" else Arrow)(path, block_rows=2000, **shuffled, **OPTIONS)


def kilobytes(name: str) -> int:
    return int(next(line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith(name)))


def main(kind: str, small: str, large: str) -> None:
    for _ in declared(kind, small).batches(FEATURES):
        pass
    if not STATUS.exists():
        return
    anonymous = kilobytes("RssAnon")
    most = 0
    for i, _ in enumerate(declared(kind, large).batches(FEATURES)):
        if i % 8 == 0:
            most = max(most, kilobytes("RssAnon") - anonymous)
    print(1024 * most)


if __name__ == "__main__":
    main(*sys.argv[1:])
