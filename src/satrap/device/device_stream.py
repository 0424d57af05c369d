"""The streams of a device: what runs in which order, and what this process waits for. The only file that uses
torch.cuda for that.

A CUDA device does the work of one stream in order, and that of two streams in any order, unless one waits for a mark of
the other. The memory of a released tensor returns to the stream that allocated it, so any other stream that uses the
tensor has to keep it. Every other device has done its work when a call returns.

Satrap reads and changes rows on one stream, moves them on a second one if some are at home, and copies batches on a
third. The user's loop may run on any stream: it waits for marks of these, and they for marks of it.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, Self

import torch
from numpy.typing import NDArray
from torch import Tensor


class Mark(Protocol):
    """A point on a stream."""

    def synchronize(self) -> None:
        """Wait, in this process, until the device has reached the point."""


class _Reached:
    def synchronize(self) -> None:
        """Return at once."""


class DeviceStream:
    """The one stream of a device without streams, such as a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    def current(cls, device: torch.device) -> Self:
        """Return the stream on which the calling thread's work runs."""
        return cls(device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceStream) and self.device == other.device

    __hash__ = None  # type: ignore[assignment]

    def running(self) -> AbstractContextManager[Any]:
        """Put what the calling thread does inside the block on this stream."""
        return nullcontext()

    def mark(self) -> Mark:
        """Return a mark after everything that is on the stream by now."""
        return _Reached()

    def wait(self, *marks: Mark | None) -> None:
        """Let later work of this stream come after the marks."""

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of tensors from other streams until this one has used them."""

    def upload(self, array: NDArray[Any]) -> Tensor:
        """Return a copy of the array on the device, made by the current stream."""
        return torch.from_numpy(array)

    def download(self, tensor: Tensor) -> tuple[Tensor, Mark]:
        """Start to copy a tensor to this process, on the current stream; return the copy, valid at the mark."""
        return tensor, self.mark()

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return the tensor in this process. Waits for what the current stream has."""
        return tensor.cpu()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Put what is inside the block on this stream, between the calling thread's earlier and later work. A thread
        whose work is on this stream already is not held up by any other."""
        caller = self.current(self.device)
        if caller == self:
            yield
            return
        self.wait(caller.mark())
        try:
            with self.running():
                yield
        finally:
            caller.wait(self.mark())


class CudaStream(DeviceStream):
    """A stream of a CUDA device."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """stream: None: another one than all before."""
        super().__init__(device)
        self._stream = torch.cuda.Stream(device) if stream is None else stream

    @classmethod
    def current(cls, device: torch.device) -> Self:
        return cls(device, torch.cuda.current_stream(device))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and self._stream == other._stream

    __hash__ = None

    def running(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        mark: Mark = self._stream.record_event()
        return mark

    def wait(self, *marks: Any) -> None:
        for mark in marks:
            if mark is not None:
                self._stream.wait_event(mark)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)

    def upload(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)

    def download(self, tensor: Tensor) -> tuple[Tensor, Mark]:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        return pinned, torch.cuda.current_stream(self.device).record_event()


STREAMS: dict[str, type[DeviceStream]] = {"cuda": CudaStream}
"""The class for each type of device that has several streams. Tests add one for the CPU, which checks the order."""


def new_stream(device: torch.device) -> DeviceStream:
    """Return a stream of the device on which nothing runs yet."""
    return STREAMS.get(device.type, DeviceStream)(device)


def current_stream(device: torch.device) -> DeviceStream:
    """Return the stream on which the calling thread's work on the device runs."""
    return STREAMS.get(device.type, DeviceStream).current(device)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on the device. The calling thread does not wait: a CUDA device copies it from pinned
    memory."""
    return current_stream(device).upload(array)


def to_host(tensor: Tensor) -> Tensor:
    """Return the tensor in this process. Waits for the device."""
    return current_stream(tensor.device).fetch(tensor)
