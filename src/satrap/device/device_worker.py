"""A worker whose rows are on a device. Its blocks and gradients are tensors there."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from satrap.config.features import Features
from satrap.config.tables import Always
from satrap.data.inputs import Inputs, Position
from satrap.data.iterable import IterableSource, keeping
from satrap.device.device_blocks import DeviceBlocks
from satrap.device.device_engine import DeviceEngine
from satrap.device.device_ids import DeviceIds, ids_of, inputs_of, lie_on, sorts_ids
from satrap.device.device_memory import DeviceMemory
from satrap.device.device_rows import DeviceRows
from satrap.device.device_stream import new_stream
from satrap.device.torch_device import require_possible, resolve_device
from satrap.errors import ConfigError
from satrap.table.engine import Slot
from satrap.table.table_group import TableGroup
from satrap.worker.worker import BagRequest


class DeviceWorker(DeviceBlocks):
    """A worker that owns the tables of its features."""

    servers: None = None

    def __init__(
        self,
        features: Features,
        device: torch.device | str,
        *,
        seed: int = 0,
        num_threads: int | None = None,
        device_memory: DeviceMemory = None,
    ) -> None:
        """Create empty tables. seed and num_threads are those of `Store`, device_memory is that of `Embeddings`."""
        if not isinstance(features, Features):
            raise ConfigError(
                f"features is a {type(features).__name__}; expected a satrap.config.features.Features of it"
            )
        resolved = resolve_device(device)
        require_possible(features.tables, resolved)
        self.device_stream = stream = new_stream(resolved)

        def create() -> DeviceEngine:
            return DeviceEngine(
                features.tables,
                resolved,
                seed=seed,
                num_threads=num_threads,
                device_memory=device_memory,
                stream=stream,
            )

        engine = create()
        self._device_rows = rows = DeviceRows(features, engine)

        def renew() -> list[Slot]:  # must not refer to the worker or the tables: they would keep each other alive
            engine = create()
            rows.use(engine)
            return engine.slots(seed)

        self.device = resolved
        self.tables = TableGroup.in_engine(engine.slots(seed), renew)
        super().__init__(features, rows)

    def resolve(self, inputs: Inputs, *, step: int, oldest_open: int) -> BagRequest | None:
        """Find the frames of a training batch's rows, and insert those that are new. Return None if a row depends on
        the order of this and the updates of earlier steps: if not every id is admitted, or rows expire."""
        tables = self.features.tables
        if not all(isinstance(table.admission, Always) and table.expire_after is None for table in tables):
            return None
        request = self._request(inputs, step, oldest_open, train=True)
        return replace(request, resolved=self._device_rows.resolve(request))

    def inputs_of(self, ids: Any) -> Inputs:
        return inputs_of(self.features, ids, self.device)

    def batches(self, source: Any, position: Position | None = None, **share: int) -> Iterator[Inputs]:
        declared = source if hasattr(source, "batches") else IterableSource(source)
        if isinstance(declared, IterableSource) and sorts_ids(self.device):
            declared = keeping(declared, partial(lie_on, device=self.device))
        return super().batches(declared, position, **share)

    def _arrays(self, inputs: Inputs, batch_size: int) -> tuple[Any, Any, Any]:
        found = ids_of(inputs, self._device_rows.id_layout, self.device)
        return super()._arrays(found, batch_size) if isinstance(found, Inputs) else (found, None, None)

    def _masks(self, request: BagRequest) -> tuple[dict[str, Any], list[int]]:
        ids = request.values
        if not isinstance(ids, DeviceIds):
            return super()._masks(request)
        masks = {
            name: ids.mask(number, feature.max_length)
            for number, (name, feature) in enumerate(self.features.items())
            if feature.max_length is not None
        }
        return masks, ids.num_cut

    def close(self) -> None:
        """Do nothing: the rows are freed with the last reference to them."""
