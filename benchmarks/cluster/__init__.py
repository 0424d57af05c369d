"""`python -m benchmarks.cluster`: what rows on servers cost.

A kind has a file, which measures it in a worker process and makes its record: `echo`, `rows`, `train` (also the kind
`modules`), `wire` (the kind `bytes`), `restart`. The worker is the client and starts the servers (`processes`);
`tables` has the table. Below are the batches, which Paddle's parameter server (`paddle`) gets as well as Satrap, so
nothing here imports either.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import Batches, RowNumbers, ids_file, load_batches, samples_file

GRADIENT = 1e-3
"""Each number of a gradient of the kinds that train no model."""
TOP = "light"
MODES = {"train": ("satrap", "satrap_stale"), "modules": ("satrap", "satrap_modules")}
"""The modes of the kinds that train a model."""


def ids_of(job: Mapping[str, Any]) -> RowNumbers:
    """Return the row numbers of each batch of a round."""
    count = job["num_warmup"] + job["num_steps"]
    path = ids_file(Path(job["batches"]), job["rows"], "zipf", count, job["part"])
    return np.asarray(np.load(path, mmap_mode="r"))


def samples_of(job: Mapping[str, Any], label: str) -> Batches:
    """Return the batches of one mode in a round; Paddle gets those of the first."""
    count = job["num_warmup"] + job["num_steps"]
    modes = MODES[job["kind"]]
    part = len(modes) * job["part"] + modes.index(label)
    return load_batches(samples_file(Path(job["batches"]), job["rows"], count, part))
