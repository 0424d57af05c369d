"""Lookups and steps of the peers' tables on a device, with ids that are there: a run of the GPU benchmark.

torch    one `EmbeddingBag` with sparse gradients and SGD, with the rows of all features
fbgemm   26 tables in one `SplitTableBatchedEmbeddingBagsCodegen`, whose backward pass steps
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.gpu.devices import seconds_of
from benchmarks.workload import NUM_FEATURES, row_numbers, rows_per_feature, total_rows

LR = 0.1


class Tables(Protocol):
    """A peer's tables, with the ids of one batch."""

    def look_up(self) -> Tensor:
        """Return the block of the batch, [samples, 26 * dim]."""

    def step(self, gradient: Tensor) -> None:
        """Look up the batch, and train its rows with this gradient of the block."""


class TorchTables:
    """One `EmbeddingBag`."""

    def __init__(self, job: dict[str, Any], device: torch.device, numbers: Tensor) -> None:
        self.bag = nn.EmbeddingBag(total_rows(job["rows"]), job["dim"], mode="sum", sparse=True, device=device)
        nn.init.zeros_(self.bag.weight)
        self.optimizer = torch.optim.SGD(self.bag.parameters(), lr=LR)
        self.ids = numbers.view(NUM_FEATURES, -1).t().reshape(-1, 1).to(device)

    def look_up(self) -> Tensor:
        found: Tensor = self.bag(self.ids)
        return found.view(len(self.ids) // NUM_FEATURES, -1)

    def step(self, gradient: Tensor) -> None:
        self.optimizer.zero_grad()
        self.look_up().backward(gradient)
        self.optimizer.step()


class FbgemmTables:
    """One operator over all tables."""

    def __init__(self, job: dict[str, Any], device: torch.device, numbers: Tensor) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            BoundsCheckMode,
            ComputeDevice,
            EmbeddingLocation,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        count = rows_per_feature(job["rows"])
        place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
        if device.type == "cuda":
            place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        self.tables: Any = SplitTableBatchedEmbeddingBagsCodegen(
            embedding_specs=[(count, job["dim"], *place)] * NUM_FEATURES,
            optimizer=EmbOptimType.EXACT_SGD,
            learning_rate=LR,
            bounds_check_mode=BoundsCheckMode.NONE,
            device=device,
        )
        for weights in self.tables.split_embedding_weights():
            weights.zero_()
        self.ids = (numbers % count).to(device)  # feature after feature
        self.offsets = torch.arange(len(numbers) + 1, device=device)

    def look_up(self) -> Tensor:
        found: Tensor = self.tables(self.ids, self.offsets)
        return found

    def step(self, gradient: Tensor) -> None:
        self.look_up().backward(gradient)


PEERS: dict[str, type[TorchTables] | type[FbgemmTables]] = {"torch": TorchTables, "fbgemm": FbgemmTables}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Time lookups, and lookups with their step."""
    device = torch.device(job["device"])
    numbers = torch.from_numpy(row_numbers(job["rows"], job["ids"], 1, job["part"], job["samples"])[0])
    tables: Tables = PEERS[job["contender"]](job, device, numbers)
    gradient = torch.zeros(job["samples"], NUM_FEATURES * job["dim"], device=device)
    with torch.no_grad():
        pool = seconds_of(tables.look_up, device, job["num_warmup"], job["num_steps"])
    step = seconds_of(lambda: tables.step(gradient), device, job["num_warmup"], job["num_steps"])
    rates = {"pool_rows_per_s": len(numbers) / pool, "step_rows_per_s": len(numbers) / step}
    return {"streams": {f"{job['ids']}:{job['contender']}": {name: round(rate) for name, rate in rates.items()}}}
