"""Trains forever, with table work in threads, and prints a line once it trains; for the test of Ctrl-C."""

import itertools

import numpy as np
import torch

from lean_torch import skip_compiler
from satrap import Embeddings, Inputs, Table

if __name__ == "__main__":
    skip_compiler()
    embeddings = Embeddings({"item": Table("item", dim=4)}, staleness=2, num_threads=1)
    model = torch.nn.Linear(4, 1)
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = Inputs(names=("item",), values=np.arange(64, dtype=np.uint64), batch_size=64)
    for batch in embeddings.stream(itertools.repeat(inputs), overlap=True):
        optimizer.zero_grad()
        model(batch.embeddings).square().mean().backward()
        optimizer.step()
        if batch.step == 3:
            print("training", flush=True)
