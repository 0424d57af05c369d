"""How good a model is after synchronous, hybrid and asynchronous training on the same samples.

`tune` chooses learning rates for each mode on the validation part, `curve` trains every mode with them from paired
seeds and tests, `control` does the same with plain torch, and `map` varies the setting without tuning, to show where
delays do harm.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product

from benchmarks.harness.record import interval
from benchmarks.paper.cell import Cell, Done, Figures
from benchmarks.paper.samples import Split, load
from benchmarks.paper.training import Setting, train

MODES = ("sync", "hybrid 1", "hybrid 4", "hybrid 16", "hybrid 64", "async 4")
DENSE_LRS = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
ROW_LRS = (0.025, 0.05, 0.1)
CHECKS = 6
MAP_DELAYS = (1, 4, 16)
MAP_LRS = (1e-3, 4e-3, 1.6e-2)
MAP_NETWORKS = {"small": (32,), "large": (128, 64)}
MAP_TRAINERS = (2, 8)
SAMPLES, FULL_SAMPLES, MAP_SAMPLES = 60_000, 2_000_000, 20_000


@dataclass(frozen=True, slots=True)
class Data:
    """A data set by name."""

    name: str
    path: str | None
    full: bool

    def split(self, most: int | None = None) -> Split:
        """Read it; most: the largest number of samples to train on."""
        split = load(self.name, self.path, FULL_SAMPLES if self.full else SAMPLES)
        return replace(split, train=split.train.part(slice(most)))


def cells(paths: Mapping[str, str | None], *, full: bool) -> list[Cell]:
    """Return the cells of every data set, given the paths of their files."""
    found, num_seeds = [], 9 if full else 5
    for name, path in paths.items():
        data = Data(name, path, full)
        speed = 0.3 if name == "adult" else 1.5
        costs = {mode: speed * (3 if mode.startswith("async") else 1) for mode in MODES}
        for mode, cost in costs.items():
            found.append(Cell(f"convergence/tune/{name}/{mode}", cost * 15, "measured", partial(tune, data, mode)))
        for contender, kind in (("satrap", "curve"), ("torch", "control")):
            for mode, cost in costs.items():
                run = partial(curve, data, mode, contender, num_seeds)
                found.append(Cell(f"convergence/{kind}/{name}/{mode}", cost * num_seeds, "measured", run))
        for size, trainers, lr in product(MAP_NETWORKS, MAP_TRAINERS, MAP_LRS):
            setting = Setting(mode="sync", hidden=MAP_NETWORKS[size], trainers=trainers, dense_lr=lr)
            run = partial(around, data, setting, 5 if full else 2)
            label = f"convergence/map/{name}/{size},trainers={trainers},lr={lr:g}"
            found.append(Cell(label, 5 if size == "small" else 8, "measured", run))
    return found


def tune(data: Data, mode: str, done: Done) -> Figures:
    """Return the learning rates with the best AUC on the validation part."""
    split = data.split()
    tried = []
    for dense_lr, row_lr in product(DENSE_LRS, ROW_LRS):
        setting = Setting(mode=mode, dense_lr=dense_lr, row_lr=row_lr)
        tried.append([dense_lr, row_lr, train(setting, split, 100, test=split.validation)["auc"]])
    dense_lr, row_lr, best = max(tried, key=lambda each: each[2])
    return {"dense_lr": dense_lr, "row_lr": row_lr, "validation_auc": best, "tried": tried}


def tuned(done: Done, name: str, mode: str) -> Setting:
    """Return the setting that was chosen for a mode."""
    figures = done[f"convergence/tune/{name}/{mode}"]
    return Setting(mode=mode, dense_lr=figures["dense_lr"], row_lr=figures["row_lr"])


def curve(data: Data, mode: str, contender: str, num_seeds: int, done: Done) -> Figures:
    """Train from each seed with the rates that were chosen, and return the AUCs on the test part.

    `difference` is the AUC minus that of the synchronous mode with the same seed: the same samples in the same order,
    and the same first parameters and rows.
    """
    split, setting = data.split(), replace(tuned(done, data.name, mode), contender=contender)
    runs = [train(setting, split, seed, checks=CHECKS) for seed in range(num_seeds)]
    figures: Figures = {
        "setting": asdict(setting), "delay": setting.delay, "num_samples": len(split.train),
        "num_test_samples": len(split.test), "samples": runs[0]["samples"],
        "aucs": [interval([run["aucs"][at] for run in runs]) for at in range(CHECKS)],
        "auc": interval([run["auc"] for run in runs]),
    }  # fmt: skip
    if mode != "sync":
        kind = "curve" if contender == "satrap" else "control"
        sync = done[f"convergence/{kind}/{data.name}/sync"]["auc"]["values"]
        figures["difference"] = interval([run["auc"] - fresh for run, fresh in zip(runs, sync, strict=True)])
    return figures


def around(data: Data, setting: Setting, num_seeds: int, done: Done) -> Figures:
    """Return the difference that each delay makes to one setting, all else equal."""
    split, differences = data.split(MAP_SAMPLES), {}
    fresh = [train(setting, split, seed)["auc"] for seed in range(num_seeds)]
    for mode in (f"{kind} {delay}" for kind in ("hybrid", "async") for delay in MAP_DELAYS):
        late = replace(setting, mode=mode)
        pairs = [train(late, split, seed)["auc"] - sync for seed, sync in enumerate(fresh)]
        differences[mode] = sum(pairs) / len(pairs)
    return {"sync_auc": sum(fresh) / len(fresh), "differences": differences}
