"""Is the model any good? The same split for a logistic regression, LightGBM, plain torch and Satrap.

Each is tuned on the validation part only. LightGBM comes with the extra `paper`; without it its line is left out. It
sees ids as categories.
"""

from collections.abc import Mapping
from functools import partial
from itertools import product

import numpy as np

from benchmarks.harness.record import interval
from benchmarks.paper.cell import CannotRunError, Cell, Done, Figures
from benchmarks.paper.convergence import Data
from benchmarks.paper.training import Setting, train
from satrap.monitor.metrics import auc

LRS = tuple(product((1e-3, 4e-3, 1.6e-2), (0.02, 0.1, 0.5)))


def cells(paths: Mapping[str, str | None], *, full: bool) -> list[Cell]:
    """Return the baselines of each data set; plain torch and Satrap are those of the convergence."""
    baselines = []
    for name, path in paths.items():
        data = Data(name, path, full)
        baselines.append(Cell(f"baselines/{name}/logistic regression", 12, "measured", partial(logistic, data)))
        baselines.append(Cell(f"baselines/{name}/LightGBM", 60, "measured", partial(boosted_trees, data)))
    return baselines


def logistic(data: Data, done: Done) -> Figures:
    """A weight for each number and for each id, trained on one pass."""
    split, tried = data.split(), []
    for dense_lr, row_lr in LRS:
        setting = Setting(mode="sync", hidden=(), dim=1, dense_lr=dense_lr, row_lr=row_lr, contender="torch")
        tried.append((train(setting, split, 100, test=split.validation)["auc"], setting))
    best = max(tried, key=lambda each: each[0])[1]
    return {"auc": interval([train(best, split, seed)["auc"] for seed in range(3)])}


def boosted_trees(data: Data, done: Done) -> Figures:
    """LightGBM with the number of leaves that is the best on the validation part."""
    try:
        import lightgbm  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise CannotRunError("LightGBM is not installed: pip install '.[paper]'") from None
    split = data.split()
    parts = {}
    for name in ("train", "validation", "test"):
        samples = getattr(split, name)
        firsts = split.train.ids.min(0)
        parts[name] = np.concatenate(
            [samples.dense, (samples.ids - np.minimum(firsts, samples.ids)).astype(np.float32)], 1
        )
    categories = list(range(split.train.dense.shape[1], parts["train"].shape[1]))
    made = lightgbm.Dataset(parts["train"], split.train.label, categorical_feature=categories, free_raw_data=False)
    held_out = lightgbm.Dataset(parts["validation"], split.validation.label, reference=made, free_raw_data=False)
    tried = []
    for leaves in (15, 63):
        options = {"objective": "binary", "metric": "auc", "num_leaves": leaves, "learning_rate": 0.05, "verbosity": -1,
                   "num_threads": 2}  # fmt: skip
        stop = lightgbm.early_stopping(20, verbose=False)
        model = lightgbm.train(options, made, 400, valid_sets=[held_out], callbacks=[stop])
        score = auc(split.validation.label, model.predict(parts["validation"]))
        tried.append((score, leaves, auc(split.test.label, model.predict(parts["test"]))))
    best = max(tried)
    return {"auc": {"mean": best[2], "low": best[2], "high": best[2]}, "num_leaves": best[1]}
