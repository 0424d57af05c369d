"""The values and optimizer states of rows on a device: two tensors, with a line for each frame; and those that are at
home, if only some fit on the device.

Tables whose rows have the same layout share a memory, so that one kernel serves them all. A place is what the core
returns for a row: a frame, -1 if there is no row, or below that a slot at home.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.config.tables import Table
from satrap.device.device_memory import DeviceMemory, rows_of, shares_of
from satrap.device.device_stream import to_device, to_host
from satrap.device.home_memory import IN, OUT, HomeMemory, RowLayout
from satrap.device.initial_values import InitialValues
from satrap.device.table_shards import kind_of
from satrap.device.torch_device import initialise_of, kernels_of
from satrap.errors import CapacityError

_GROWTH = 1.5
_MOST_FRAMES = 2**31 - 1  # the core numbers them in 31 bits


def memories_of(
    tables: Sequence[Table],
    layouts: Sequence[RowLayout],
    device: torch.device,
    device_memory: DeviceMemory = None,
    capacities: Sequence[int | None] | None = None,
) -> list["RowMemory"]:
    """Return a memory for each layout and each part of the device's memory, with the numbers of its tables. layouts: of
    each table's rows. capacities: how many rows each can have here, None: any number; without them, its capacity."""
    capacities = capacities or [rows_of(table) for table in tables]
    shares = shares_of(tables, [layout.row_bytes for layout in layouts], device_memory, capacities)
    groups: dict[tuple[RowLayout, str, str], list[int]] = {}
    for number, (table, layout, share) in enumerate(zip(tables, layouts, shares, strict=True)):
        groups.setdefault((layout, share.group, kind_of(table)), []).append(number)
    return [
        _memory_of(layout, device, numbers, [capacities[i] for i in numbers], [shares[i].size for i in numbers])
        for (layout, *_), numbers in groups.items()
    ]


def _memory_of(
    layout: RowLayout,
    device: torch.device,
    numbers: list[int],
    capacities: Sequence[int | None],
    sizes: Sequence[int | None],
) -> "RowMemory":
    bounded = [rows for rows in capacities if rows is not None]
    most = sum(bounded) if len(bounded) == len(capacities) else None
    shares = [size for size in sizes if size is not None]
    if not shares:
        return RowMemory(layout, device, numbers, most)
    frames = min(sum(shares) // layout.row_bytes, _MOST_FRAMES)
    if most is not None and frames >= most:
        return RowMemory(layout, device, numbers, most)
    return RowMemory(layout, device, numbers, frames, HomeMemory(layout, device))


@dataclass(slots=True, eq=False)
class RowMemory:
    """The rows of some tables, by frame."""

    layout: RowLayout
    device: torch.device
    tables: list[int] = field(default_factory=list)
    """The numbers of the tables whose rows are here."""
    most: int | None = None
    """How many frames there can be: the rows that the tables can have, or those that fit; None: there is no bound."""
    home: HomeMemory | None = None
    """Where the other rows are; None: all rows are in frames."""
    values: Tensor = field(init=False)
    """[frames, dim]"""
    state: Tensor = field(init=False)
    """float32 [frames, state_dim]"""

    def __post_init__(self) -> None:
        self.values, self.state = self._empty(0)

    def reserve(self, frames: int, names: Sequence[str], advice: str = "") -> None:
        """Make room for so many frames: at once for all that the tables can have, if that is bounded. Raise
        CapacityError if the device has no memory for them. names: of the tables, for the error. advice: its end."""
        if self.most is not None:
            frames = min(frames, self.most)
        if frames <= len(self.values):
            return
        sizes = [frames, max(frames, min(int(len(self.values) * _GROWTH), _MOST_FRAMES))]
        if self.most is not None:
            sizes = [self.most]
        error: RuntimeError | None = None
        while sizes:
            try:
                larger = self._empty(size := sizes.pop())
                break
            except RuntimeError as failure:  # torch.OutOfMemoryError is one, and so is what the CPU's allocator raises
                error = failure
        else:
            raise self._no_memory(size, names, advice) from error
        for old, new in zip((self.values, self.state), larger, strict=True):
            new[: len(old)] = old
        self.values, self.state = larger

    def _no_memory(self, frames: int, names: Sequence[str], advice: str) -> CapacityError:
        held = f" beside the {len(self.values)} that it holds now, which are copied" if len(self.values) else ""
        bound = ""
        if self.most is not None and not advice:
            bound = ", all that their capacity permits" if self.home is None else ", their device_memory"
        smaller = f"{'smaller ' if bound else ''}{'capacity' if self.home is None else 'device_memory'}"
        advice = advice or f"Give the tables a {smaller}, or use a smaller dtype or dim"
        return CapacityError(
            f"tables {', '.join(map(repr, names))}: {self.device} has no memory for {frames} rows{bound}: expected "
            f"{frames * self.layout.row_bytes:,} bytes{held}{what_is_free(self.device)}. {advice}"
        )

    @torch.inference_mode(False)  # a tensor of inference could never be updated
    def _empty(self, frames: int) -> tuple[Tensor, Tensor]:
        """Return memory for so many frames."""
        values = torch.empty((frames, self.layout.dim), dtype=self.layout.torch_dtype, device=self.device)
        return values, torch.empty((frames, self.layout.state_dim), dtype=torch.float32, device=self.device)

    def write(self, places: NDArray[np.int32], values: NDArray[Any], state: NDArray[np.float32]) -> None:
        """Replace rows. values: of 16 bits as uint16."""
        if len(at_home := np.flatnonzero(places < 0)):
            staged = self.staging(len(at_home))
            staged.write(np.arange(len(at_home), dtype=np.int32), values[at_home], state[at_home])
            self.send_home(staged, places[at_home])
            in_frames = places >= 0
            places, values, state = places[in_frames], values[in_frames], state[in_frames]
        at = to_device(places, self.device)
        self.values[at] = to_device(_bits_of(values), self.device).view(self.values.dtype)
        self.state[at] = to_device(np.require(state, requirements="W"), self.device)

    def initialise(self, places: NDArray[np.int32], ids: NDArray[np.uint64], initial: InitialValues) -> None:
        """Write the initial values and states of the ids' rows. The calling thread does not wait for the device."""
        if len(at_home := np.flatnonzero(places < 0)):
            staged = self.staging(len(at_home))
            staged.initialise(np.arange(len(at_home), dtype=np.int32), ids[at_home], initial)
            self.send_home(staged, places[at_home])
            places, ids = places[places >= 0], ids[places >= 0]
        at, drawn = to_device(places, self.device), to_device(ids.view(np.int64), self.device)
        initialise_of(self.device)(self.values, self.state, at, drawn, initial, self.layout)

    def read(self, places: NDArray[np.int32]) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """Return the values and states of rows as they are stored; of 16 bits as uint16."""
        rows = self.staged(places)
        values, state = to_host(rows.values), to_host(rows.state).numpy()
        is_wide = values.dtype == torch.float32
        return values.numpy() if is_wide else values.view(torch.int16).numpy().view(np.uint16), state

    # -- rows at home --------------------------------------------------------------------------------------------------

    def exchange(self, frames: NDArray[np.int32], slots: NDArray[np.int32], directions: NDArray[np.int32]) -> None:
        """Copy rows between frames and slots at home, each in the directions IN, OUT or both."""
        assert self.home is not None
        at = [to_device(array, self.device) for array in (frames, slots, directions)]
        kernels_of(self.device).exchange(self.values, self.state, self.home, *at)

    def staging(self, rows: int) -> "RowMemory":
        """Return memory on the device for copies of some rows."""
        memory = RowMemory(self.layout, self.device, self.tables, rows, self.home)
        if rows:
            memory.values, memory.state = memory._empty(rows)
        return memory

    def staged(self, places: NDArray[np.int32]) -> "RowMemory":
        """Return copies of rows on the device, in the order of their places."""
        memory = self.staging(len(places))
        at_home, lines = places < 0, np.arange(len(places), dtype=np.int32)
        if at_home.any():
            memory.fetch(lines[at_home], places[at_home])
            lines, places = lines[~at_home], places[~at_home]
        into, at = to_device(lines, self.device), to_device(places, self.device)
        memory.values[into] = self.values[at]
        memory.state[into] = self.state[at]
        return memory

    def fetch(self, frames: NDArray[np.int32], places: NDArray[np.int32]) -> None:
        """Copy rows at home into frames."""
        self.exchange(frames, slots_of(places), np.full(len(places), IN, np.int32))

    def send_home(self, staged: "RowMemory", places: NDArray[np.int32]) -> None:
        """Copy the rows of `staged`, in order, to these places at home."""
        lines = np.arange(len(places), dtype=np.int32)
        staged.exchange(lines, slots_of(places), np.full(len(places), OUT, np.int32))

    def as_floats(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Return stored values as float32."""
        return torch.from_numpy(_bits_of(values)).view(self.values.dtype).float().numpy()


def what_is_free(device: torch.device) -> str:
    """Return what an error about a device's memory says of it."""
    return f" and has {torch.cuda.mem_get_info(device)[0]:,} bytes free" if device.type == "cuda" else ""


def _bits_of(values: NDArray[Any]) -> NDArray[Any]:
    """Return stored values as torch takes them."""
    values = np.require(values, requirements="W")  # a file's columns are views that torch warns of
    return values if values.dtype == np.float32 else values.view(np.int16)


def slots_of(places: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the slots of rows at home."""
    return places & np.int32(0x7FFFFFFF)
