"""The Adult example of the original PERSIA, setting by setting: its continuous integration asserts an AUC of 0.8929.

The figure requires every detail of the example, odd ones included: the test file has its own codes of the categories,
numbers are not normalised, no layer has an activation. Two details differ: the original's Adagrad divides by the
accumulator before it adds the gradient and has eps under the root, and its rows travel as float16.
"""

import csv
import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import satrap
from benchmarks.accuracy.loop import Outcome, evaluate, fit
from benchmarks.harness.machine import ROOT

FOLDER = ROOT / "examples" / "data" / "adult"
CATEGORIES = ["workclass", "education", "marital_status", "occupation", "relationship", "race", "gender"]
CATEGORIES += ["native_country"]
NUMBERS = ["age", "education_num", "capital_gain", "capital_loss", "hours_per_week"]
COLUMNS = ["age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship"]
COLUMNS += ["race", "gender", "capital_gain", "capital_loss", "hours_per_week", "native_country", "income"]
BATCH_SIZE = 128
DIM = 8

Columns = dict[str, NDArray[np.generic]]


class Original(torch.nn.Module):
    """The example's network: linear except for the normalisations."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Sequential(torch.nn.Linear(len(NUMBERS), 16), torch.nn.BatchNorm1d(16))
        self.sparse = torch.nn.Sequential(torch.nn.Linear(DIM * len(CATEGORIES), 128), torch.nn.BatchNorm1d(128))
        self.top = torch.nn.Sequential(torch.nn.Linear(144, 256), torch.nn.Linear(256, 128), torch.nn.Linear(128, 1))

    def forward(self, dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Logits [batch]."""
        joined = torch.cat([self.sparse(embeddings), self.dense(dense)], dim=1)
        logits: torch.Tensor = self.top(joined)
        return logits.squeeze(1)


def read(path: Path) -> Columns:
    """Read one file. A category's code is its alphabetical position among those of the file, "?" included."""
    with gzip.open(path, "rt", newline="") as file:
        rows = [row for row in csv.reader(file, skipinitialspace=True) if row]
    return encode(rows)


def encode(rows: Sequence[Sequence[str]]) -> Columns:
    """Return the columns for training, given rows of text."""
    texts = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
    columns: Columns = {name: np.array(texts[name], np.float32) for name in NUMBERS}
    for name in CATEGORIES:
        columns[name] = np.unique(np.array(texts[name]), return_inverse=True)[1].astype(np.uint64)
    columns["label"] = np.array([">50K" in text for text in texts["income"]], np.float32)
    return columns


def run(staleness: int, seed: int) -> Outcome:
    """Train one pass over 254 whole batches in the file's order; the seed is that of the network and the rows."""
    torch.manual_seed(seed)
    data = satrap.Frame(
        read(FOLDER / "adult.data.gz"), dense=NUMBERS, label="label", batch_size=BATCH_SIZE, drop_last=True
    )
    adagrad = satrap.Adagrad(lr=1e-2, initial_accumulator_value=1e-2, eps=1e-10)
    initial = satrap.Uniform(low=-0.01, high=0.01)
    tables = {name: satrap.Table(name, dim=DIM, optimizer=adagrad, initial=initial) for name in CATEGORIES}
    embeddings = satrap.Embeddings(tables, staleness=staleness, deterministic=True, seed=seed)
    model = Original()
    fit(model, embeddings, torch.optim.SGD(model.parameters(), lr=0.1), data)
    test = data.replace(data=read(FOLDER / "adult.test.gz"), drop_last=False)
    return evaluate(model, embeddings, test)
