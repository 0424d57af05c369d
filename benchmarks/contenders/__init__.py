"""The contenders of the store and training benchmarks, a file for each framework, which only its contenders import.

Each is built with every row present, values within RANGE, and one learning rate and eps; the initial accumulator is 0.
It converts batches to its form (`prepare` for ids, `prepare_samples` for training) before anything is timed, and
`probe` returns rows to compare. The store benchmark times its `train`, `lookup` and the like; a training benchmark's
contender has trainers (`trainer`), or rows for the peers' model (`look_up`, `update`). The peers can be built with a
share of the features, for one of several ranks.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.ranks import Ranks
from benchmarks.workload import Share

LR = 0.02
EPS = 1e-8
CAPACITY_SLACK = 1.05
RANGE = 0.01


def build(path: str, table: Mapping[str, Any], ranks: Ranks) -> Any:
    """Build the contender "module:class" with its table, or with its share of it if there are several ranks."""
    module, _, name = path.partition(":")
    share = {} if ranks.size == 1 else {"share": Share(rank=ranks.rank, size=ranks.size)}
    return getattr(importlib.import_module(f"benchmarks.{module}"), name)(**table, **share)
