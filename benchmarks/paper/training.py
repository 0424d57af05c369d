"""One run of training: a network of plain torch over Satrap's tables, or over torch's own as the control.

A mode says what is late. `sync`: nothing. `hybrid k`: a batch misses the last k updates of the rows. `async k`: each
trainer steps by itself, with a batch as small as its part, and misses all that the others do meanwhile, rows and dense
weights alike: trainers * (k + 1) - 1 small steps. The delays are exact and repeatable in one process: Satrap's tables
have `staleness`, and what torch holds is late because its gradients wait in a queue. A test compares both with
`dense="async"` on a server.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

import satrap
from benchmarks.paper.samples import Samples, Split, feature_names
from satrap.monitor.metrics import auc


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a run depends on, besides its data and its seed."""

    mode: str
    """ "sync", "hybrid 4", "async 4"."""
    dense_lr: float = 2e-3
    row_lr: float = 0.05
    trainers: int = 4
    batch: int = 64
    """Samples of one trainer in a step."""
    hidden: tuple[int, ...] = (64, 32)
    dim: int = 8
    contender: str = "satrap"
    capacity: int | None = None
    """The most rows that Satrap's table holds; the least recently used are evicted."""

    @property
    def is_async(self) -> bool:
        return self.mode.startswith("async")

    @property
    def delay(self) -> int:
        """Steps whose updates a lookup misses."""
        late = int(self.mode.split()[1]) if " " in self.mode else 0
        return self.trainers * (late + 1) - 1 if self.is_async else late

    @property
    def step_samples(self) -> int:
        """Samples of a step."""
        return self.batch if self.is_async else self.batch * self.trainers


class Delayed:
    """A torch optimizer whose gradients wait for a number of steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, delay: int) -> None:
        self._optimizer, self._delay = optimizer, delay
        self._parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._waiting = deque[list[torch.Tensor | None]]()

    def push(self) -> None:
        """Take the gradients of a step, and apply those that are due."""
        self._waiting.append([each.grad for each in self._parameters])
        for each in self._parameters:
            each.grad = None
        self.apply(self._delay)

    def apply(self, keep: int = 0) -> None:
        """Apply all gradients but the last few."""
        while len(self._waiting) > keep:
            for parameter, gradient in zip(self._parameters, self._waiting.popleft(), strict=True):
                parameter.grad = gradient
            self._optimizer.step()
        for each in self._parameters:
            each.grad = None


def network(setting: Setting, samples: Samples) -> torch.nn.Sequential:
    """Return the dense network."""
    sizes = [samples.dense.shape[1] + setting.dim * samples.ids.shape[1], *setting.hidden]
    layers: list[torch.nn.Module] = []
    for begin, end in pairwise(sizes):
        layers += [torch.nn.Linear(begin, end), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(sizes[-1], 1))


@dataclass(slots=True)
class Model:
    """A network and its rows."""

    net: torch.nn.Sequential
    dense: Delayed
    table: torch.nn.Embedding | None = None
    rows: Delayed | None = None
    embeddings: satrap.Embeddings | None = None

    def logits(self, dense: Any, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        result: torch.Tensor = self.net(torch.cat([dense, rows], 1)).squeeze(1)
        return result


def build(setting: Setting, split: Split, seed: int) -> Model:
    """Return a new model."""
    torch.manual_seed(seed)
    net = network(setting, split.train)
    late = setting.delay if setting.is_async else 0
    model = Model(net, Delayed(torch.optim.Adam(net.parameters(), lr=setting.dense_lr), late))
    optimizer: dict[str, Any] = {"lr": setting.row_lr, "initial_accumulator_value": 1e-4, "eps": 1e-10}
    if setting.contender == "torch":
        model.table = torch.nn.Embedding(split.num_ids, setting.dim, sparse=True)
        torch.nn.init.uniform_(model.table.weight, -0.01, 0.01)
        model.rows = Delayed(torch.optim.Adagrad(model.table.parameters(), **optimizer), setting.delay)
    else:
        evict: dict[str, Any] = {"capacity": setting.capacity, "on_full": "evict"} if setting.capacity else {}
        initial = satrap.Uniform(low=-0.01, high=0.01)
        table = satrap.Table("ids", dim=setting.dim, optimizer=satrap.Adagrad(**optimizer), initial=initial, **evict)
        model.embeddings = satrap.Embeddings(
            dict.fromkeys(feature_names(split.train), table), staleness=setting.delay, deterministic=True, seed=seed
        )
    return model


def train(
    setting: Setting, split: Split, seed: int, *, epochs: int = 1, checks: int = 1, test: Samples | None = None
) -> dict[str, Any]:
    """Train, and return the AUC on the test part after each of `checks` equal parts of the samples."""
    size, random = setting.step_samples, np.random.default_rng(seed)
    model, target = build(setting, split, seed), split.test if test is None else test
    aucs, places = [], []
    whole = setting.batch * setting.trainers
    used = len(split.train) - len(split.train) % whole  # every mode sees the same samples
    order = np.concatenate([random.permutation(len(split.train))[:used] for _ in range(epochs)])
    with one_thread():
        ends = [round(len(order) // whole * (number + 1) / checks) * whole for number in range(checks)]
        for begin, end in zip([0, *ends], ends, strict=False):
            part = split.train.part(order[begin:end])
            (_train_torch if model.table is not None else _train_satrap)(model, part, size)
            aucs.append(evaluate(model, target))
            places.append(end)
    return {"auc": aucs[-1], "aucs": aucs, "samples": places}


@contextmanager
def one_thread() -> Iterator[None]:
    """Make torch compute in this thread alone, since the order of its sums depends on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _loss(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, label)


def _train_satrap(model: Model, samples: Samples, size: int) -> None:
    assert model.embeddings is not None
    model.embeddings.train()
    # The tables step here; the dense optimizer has its queue, so this one has nothing to step.
    optimizer = model.embeddings.optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0))
    for batch in model.embeddings.stream(samples.batches(size), overlap=False):
        _loss(model.logits(batch.dense, batch.embeddings), batch.label).backward()
        optimizer.step()
        model.dense.push()
    model.embeddings.drain()
    model.dense.apply()


def _train_torch(model: Model, samples: Samples, size: int) -> None:
    assert model.table is not None and model.rows is not None
    dense, ids, label = (
        torch.from_numpy(each) for each in (samples.dense, samples.ids.astype(np.int64), samples.label)
    )
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # torch warns unless this is chosen
        for begin in range(0, len(samples), size):
            at = slice(begin, begin + size)
            logits = model.logits(dense[at], model.table(ids[at]).flatten(1))
            _loss(logits, label[at]).backward()
            model.rows.push()
            model.dense.push()
        model.rows.apply()
    model.dense.apply()


def evaluate(model: Model, samples: Samples) -> float:
    """Return the AUC on some samples."""
    scores = []
    with torch.no_grad():
        if model.embeddings is not None:
            model.embeddings.eval()
            for batch in model.embeddings.stream(samples.batches(4096, whole=False), overlap=False):
                scores.append(model.logits(batch.dense, batch.embeddings))
        else:
            assert model.table is not None
            for begin in range(0, len(samples), 4096):
                part = samples.part(slice(begin, begin + 4096))
                rows = model.table(torch.from_numpy(part.ids.astype(np.int64))).flatten(1)
                scores.append(model.logits(torch.from_numpy(part.dense), rows))
    return float(auc(samples.label, np.nan_to_num(torch.cat(scores).numpy())))  # a diverged network ranks nothing: 0.5
