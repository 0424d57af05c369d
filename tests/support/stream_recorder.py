"""A device with streams that is the CPU: it checks that the order of what runs on them does not depend on luck.

Each operation of torch runs at once, and is recorded with the stream that it would run on. A vector clock of each
stream says which operations of the others come before its next one: those before the marks that it has waited for, and
those that the calling thread has waited for. An operation that uses memory which another stream changes without such an
order is a fault; so is memory that is released while a stream uses it that neither kept it nor is waited for.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from satrap.device import device_stream, initial_values, reference
from satrap.device.device_stream import DeviceStream
from satrap.train.prefetch_pipeline import PrefetchPipeline

Clock = Counter[str]
_WAITING = ("_local_scalar_dense", "nonzero", "_unique2", "equal", "masked_select")


@dataclass(eq=False)
class Memory:
    """What is known about one storage."""

    weak: StorageWeakRef
    home: str | None
    """The stream that allocated it; None: it was there before the recording, or is in CPU memory."""
    written: tuple[str, int] | None = None
    read: dict[str, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    """The last use by each stream."""
    kept: set[str] = field(default_factory=set)
    is_host: bool = False
    reads: list[str] = field(default_factory=list)
    last: str = ""
    rows: dict[int, Memory] = field(default_factory=dict)
    """Rows on the device or at home, one by one: the kernels of two streams may use different ones at a time."""


class Recorder:
    """Records the operations of all threads."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.waits: list[tuple[str, str]] = []
        """What this process waited for: the thread and the operation."""
        self.kernels: list[tuple[str, str]] = []
        """The kernels of rows with their streams."""
        self._clocks: dict[str, Clock] = {}
        self._memory: dict[int, Memory] = {}
        self._lock = threading.RLock()
        self._reached = Counter[str]()  # what any thread has waited for
        self._here = threading.local()
        self._num_streams = 0

    def new_name(self) -> str:
        with self._lock:
            self._num_streams += 1
            return f"stream {self._num_streams}"

    @property
    def stack(self) -> list[str]:
        """The current streams of the calling thread, the innermost last."""
        if not hasattr(self._here, "stack"):
            self._here.stack, self._here.host, self._here.kernel = ["default"], Counter(), None
        found: list[str] = self._here.stack
        return found

    def clock(self, name: str) -> Clock:
        return self._clocks.setdefault(name, Counter())

    def memory_of(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if key not in self._memory:
                self._memory[key] = Memory(StorageWeakRef(storage), None)
            return self._memory[key]

    def access(self, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor], made: Iterable[Tensor] = ()) -> None:
        """Record an operation on the current stream."""
        with self._lock:
            self.check_released()
            name = self.stack[-1]
            clock = self.clock(name)
            clock |= self._here.host
            self._clocks[name] = clock
            clock[name] += 1
            reads, writes, made = ([each for each in group if each.numel()] for group in (reads, writes, made))
            for tensor in reads:
                memory = self.memory_of(tensor)
                self._read(what, name, memory)
                memory.reads.append(what)
            for tensor in writes:
                self._write(what, name, self.memory_of(tensor))
                self.memory_of(tensor).reads.append(what)
            for tensor in made:
                memory = self.memory_of(tensor)
                memory.home, memory.written, memory.last = name, (name, clock[name]), what

    def access_rows(self, what: str, tensor: Tensor, rows: Iterable[int], *, writes: bool) -> None:
        """Record that a kernel on the current stream uses some rows of a tensor."""
        with self._lock:
            self.access(what, [], [])
            name, whole = self.stack[-1], self.memory_of(tensor)
            self._require(what, name, whole.written, whole)
            for row in rows:
                memory = whole.rows.setdefault(row, Memory(whole.weak, None))
                if not writes:
                    self._read(what, name, memory)
                    continue
                for other in whole.read.items():
                    self._require(what, name, other, whole)
                self._write(what, name, memory)
            whole.used[name] = self.clock(name)[name]

    def _read(self, what: str, name: str, memory: Memory) -> None:
        for each in (memory, *memory.rows.values()):
            self._require(what, name, each.written, each)
        memory.read[name] = memory.used[name] = self.clock(name)[name]

    def _write(self, what: str, name: str, memory: Memory) -> None:
        for each in (memory, *memory.rows.values()):
            self._require(what, name, each.written, each)
            for other in each.read.items():
                self._require(what, name, other, each)
        number = self.clock(name)[name]
        memory.written, memory.read, memory.last, memory.used[name] = (name, number), {}, what, number

    def _require(self, what: str, name: str, earlier: tuple[str, int] | None, memory: Memory) -> None:
        if earlier is not None and self.clock(name)[earlier[0]] < earlier[1]:
            self.faults.append(
                f"{what} on {name} ({threading.current_thread().name}) does not wait for {memory.last} on {earlier[0]}"
            )

    def check_released(self) -> None:
        """Check the memory that was released."""
        for key in [key for key, memory in self._memory.items() if memory.weak.expired()]:
            memory = self._memory.pop(key)
            if memory.home is None:
                continue
            known = self.clock(memory.home) | self._reached
            for name, number in memory.used.items():
                if name != memory.home and name not in memory.kept and known[name] < number:
                    self.faults.append(
                        f"memory of {memory.home}, last written by {memory.last}, is released while {name} uses it"
                    )

    def wait_here(self, what: str, clock: Clock) -> None:
        """Let the calling thread wait for the operations in a clock."""
        with self._lock:
            _ = self.stack
            if any(self._reached[name] < number for name, number in clock.items()):
                self.waits.append((threading.current_thread().name, what))
            self._here.host |= clock
            self._reached |= clock

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Put what the calling thread does on a stream, and record it."""
        self.stack.append(name)
        try:
            with self.recording():
                yield
        finally:
            self.stack.pop()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what the calling thread does."""
        _ = self.stack
        if getattr(self._here, "is_recording", False):
            yield
            return
        self._here.is_recording = True
        try:
            with _Operations(self):
                yield
        finally:
            self._here.is_recording = False

    @contextmanager
    def kernel(self, name: str, rows: list[tuple[Tensor, Iterable[int], bool]]) -> Iterator[None]:
        """A kernel of rows: what it waits for is no wait of this process. rows: tensors of rows, those that it uses,
        and whether it changes them."""
        self.kernels.append((name, self.stack[-1]))
        for tensor, used, writes in rows:
            self.access_rows(name, tensor, used, writes=writes)
        self._here.kernel, self._here.rows = name, {each.untyped_storage()._cdata for each, *_ in rows}
        try:
            yield
        finally:
            self._here.kernel, self._here.rows = None, set()

    def is_row(self, tensor: Tensor) -> bool:
        """Return whether a kernel that runs has recorded its use of this memory."""
        return self.current_kernel is not None and tensor.untyped_storage()._cdata in self._here.rows

    @property
    def current_kernel(self) -> str | None:
        _ = self.stack
        found: str | None = self._here.kernel
        return found


class _Operations(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {} if kwargs is None else kwargs
        schema = func._schema
        out = func(*args, **given)
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if is_view:
            return out
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for number, argument in enumerate(schema.arguments):
            value = args[number] if number < len(args) else given.get(argument.name)
            tensors = [each for each in tree_leaves(value) if isinstance(each, Tensor)]
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_written else reads).extend(tensors)
        reads, writes = ([each for each in group if not self._recorder.is_row(each)] for group in (reads, writes))
        name = self._recorder.current_kernel or func.__name__.split(".")[0]
        inputs = {each.untyped_storage()._cdata for each in tree_leaves((args, given)) if isinstance(each, Tensor)}
        made = [
            each
            for each in tree_leaves(out)
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in inputs
        ]
        waits = func.__name__.split(".")[0] in _WAITING or (
            "index" in func.__name__ and any(each.dtype == torch.bool for each in reads[1:])
        )
        on_device = any(not self._recorder.memory_of(each).is_host for each in reads)
        self._recorder.access(name, reads, writes, made)
        if waits and on_device and self._recorder.current_kernel is None:
            self._recorder.wait_here(name, Counter(self._recorder.clock(self._recorder.stack[-1])))
        return out


@dataclass(frozen=True)
class RecordedMark:
    recorder: Recorder
    clock: Clock
    what: str

    def synchronize(self) -> None:
        self.recorder.wait_here(self.what, self.clock)


class RecordedStream(DeviceStream):
    """A stream of the CPU."""

    recorder: Recorder

    def __init__(self, device: torch.device, name: str | None = None) -> None:
        super().__init__(device)
        self.name = self.recorder.new_name() if name is None else name

    @classmethod
    def current(cls, device: torch.device) -> Self:
        return cls(device, cls.recorder.stack[-1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecordedStream) and self.name == other.name

    __hash__ = None

    def running(self) -> Any:
        return self.recorder.on(self.name)

    def mark(self) -> RecordedMark:
        with self.recorder._lock:
            return RecordedMark(self.recorder, Counter(self.recorder.clock(self.name)), f"a mark of {self.name}")

    def wait(self, *marks: Any) -> None:
        with self.recorder._lock:
            for mark in marks:
                if mark is not None:
                    self.recorder._clocks[self.name] = self.recorder.clock(self.name) | mark.clock

    def keep(self, tensors: Iterable[Tensor]) -> None:
        with self.recorder._lock:
            for tensor in tensors:
                self.recorder.memory_of(tensor).kept.add(self.name)

    def upload(self, array: np.ndarray[Any, Any]) -> Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            copy = torch.from_numpy(np.array(array))
        self.recorder.access("upload", [], [], [copy])
        return copy

    def download(self, tensor: Tensor) -> tuple[Tensor, Any]:
        self.recorder.access("download", [tensor], [])
        with torch.utils._python_dispatch._disable_current_modes():
            copy = tensor.detach().clone()
        self.recorder.memory_of(copy).is_host = True
        return copy, self.current(self.device).mark()

    def fetch(self, tensor: Tensor) -> Tensor:
        copy, copied = self.download(tensor)
        copied.synchronize()
        return copy


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Give the CPU streams, and check at the end that the order of all that ran on them was certain."""
    recorder = Recorder()
    kind = type("Recorded", (RecordedStream,), {"recorder": recorder})
    with monkeypatch.context() as patched:
        patched.setitem(device_stream.STREAMS, "cpu", kind)
        for module, names in (
            (reference, ("pool", "copy_sequence", "update", "exchange")),
            (initial_values, ("initialise",)),
        ):
            for name in names:
                patched.setattr(module, name, _noted(recorder, name, getattr(module, name)))
        run = PrefetchPipeline._run_thread

        def run_thread(pipeline: Any, stages: Any) -> None:
            with recorder.recording():
                run(pipeline, stages)

        patched.setattr(PrefetchPipeline, "_run_thread", run_thread)
        yield recorder
    recorder.check_released()


def _noted(recorder: Recorder, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def launch(*args: Any, **how: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            rows = _rows_of(name, args)
        with recorder.kernel(name, rows):
            return kernel(*args, **how)

    return launch


def _rows_of(name: str, args: Any) -> list[tuple[Tensor, Iterable[int], bool]]:
    """Return which rows a kernel reads, and which it changes."""
    values = args[0]
    if name in ("pool", "copy_sequence"):
        frames, offsets = args[2], args[3]
        features = args[5].numbers.tolist() if name == "pool" else [args[4]]
        samples = args[6] if name == "pool" else len(args[5])
        bounds = [(number * samples, (number + 1) * samples) for number in features]
        if offsets is not None:
            bounds = [(int(offsets[begin]), int(offsets[end])) for begin, end in bounds]
        read = {frame for begin, end in bounds for frame in frames[begin:end].tolist() if frame >= 0}
        return [(values, read, False)]
    frames = (args[2].frames if name == "update" else args[3] if name == "exchange" else args[2]).tolist()
    used = [frame for frame in frames if frame >= 0]
    found: list[tuple[Tensor, Iterable[int], bool]] = [(each, used, True) for each in args[:2] if each.numel()]
    if name == "exchange":
        home, slots = args[2], args[4].tolist()
        found += [
            (segment, [slot for slot in slots if slot // home.rows == number], True)
            for number, segment in enumerate(home.segments)
            if any(slot // home.rows == number for slot in slots)
        ]
    return found
