"""How often ids repeat from batch to batch in each data set, as `satrap doctor FILES` counts it for a user's own."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from itertools import islice

from benchmarks.paper.cell import Cell, Done, Figures
from benchmarks.paper.convergence import Data
from satrap.data.reuse import measure_reuse

BATCH, NUM_BATCHES = 256, 100


def cells(paths: Mapping[str, str | None], *, full: bool) -> list[Cell]:
    """Return a cell for each data set."""
    return [
        Cell(f"reuse/{name}", 3, "measured", partial(measure, Data(name, path, full))) for name, path in paths.items()
    ]


def measure(data: Data, done: Done) -> Figures:
    """Return the reuse of each feature, None where no id is hot or cold."""
    found = measure_reuse(islice(data.split().train.batches(BATCH), NUM_BATCHES))
    return {
        each.feature: {
            name: [None if share != share else share for share in value] if isinstance(value, tuple) else value
            for name, value in asdict(each).items()
            if name != "feature"
        }
        for each in found
    }
