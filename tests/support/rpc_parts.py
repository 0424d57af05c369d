"""Parts of the tests of satrap.rpc: a Protocol, an object that satisfies it, a raw peer and a faulty network."""

from __future__ import annotations

import atexit
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zmq
from hypothesis import strategies as st
from numpy.typing import NDArray
from zmq.utils import garbage

from child_processes import child_process
from satrap import errors
from satrap.rpc import Origin
from satrap.rpc.header import Header, Kind
from satrap.rpc.methods import methods_of
from satrap.rpc.values import ArrayType, ValueType, read_type
from waiting import DEADLINE_SECONDS

Ids = NDArray[np.uint64]
Floats = NDArray[np.float32]

_SOCKETS = Path(tempfile.gettempdir(), f"satrap-test-{secrets.token_hex(4)}")
ANYWHERE = f"ipc://{_SOCKETS}/*"
"""A Unix socket with any free name, in a folder of this process."""
LOOPBACK = "tcp://127.0.0.1:0"


def _remove_sockets(process: int) -> None:
    if os.getpid() == process:  # not in its forks
        shutil.rmtree(_SOCKETS, ignore_errors=True)


atexit.register(_remove_sockets, os.getpid())

# pyzmq frees sent frames in a thread that it starts once and keeps. Start it before the tests count their threads.
garbage.gc.start()


class Calls(Protocol):
    """One method for every kind of behaviour."""

    def echo(
        self,
        origin: Origin,
        ids: Ids,
        rows: Floats | None,
        flags: NDArray[np.bool_],
        words: NDArray[np.uint32],
        offsets: NDArray[np.int64],
        data: NDArray[np.uint8],
        step: int,
        lr: float,
        train: bool,
        name: str,
        note: str | None = None,
        sizes: list[int] | None = None,
        *,
        options: dict[str, object] | None = None,
    ) -> tuple[
        dict[str, int],
        Ids,
        Floats | None,
        NDArray[np.bool_],
        NDArray[np.uint32],
        NDArray[np.int64],
        NDArray[np.uint8],
        int,
        float,
        bool,
        str,
        str | None,
        list[int] | None,
        dict[str, object] | None,
    ]: ...
    def double(self, ids: Ids) -> Ids: ...
    def nothing(self) -> None: ...
    def fail(self, kind: str, text: str) -> None: ...
    def add(self, amount: int) -> int: ...
    def wait(self, amount: int) -> int: ...
    def meet(self, number: int) -> int: ...


class Served:
    """Satisfies `Calls`. `wait` returns once `go` is set, `meet` once `num_meeting` callers have arrived."""

    def __init__(self, num_meeting: int = 2) -> None:
        self.go, self.num_meeting = threading.Event(), num_meeting
        self.total = self.num_runs = 0
        self._lock = threading.Lock()
        self._meeting: list[Future[int]] = []

    def echo(self, origin: Origin, *values: Any, options: Any) -> Any:
        fields = {name: getattr(origin, name) for name in ("attempt", "trainer", "step", "map_version")}
        return (fields, *values, options)

    def double(self, ids: Ids) -> Ids:
        assert not ids.flags.writeable
        return 2 * ids

    def nothing(self) -> None:
        pass

    def fail(self, kind: str, text: str) -> None:
        raise {**vars(errors), "KeyError": KeyError, "SystemExit": SystemExit}[kind](text)

    def add(self, amount: int) -> int:
        with self._lock:
            self.num_runs += 1
            self.total += amount
            return self.total

    def wait(self, amount: int) -> int:
        with self._lock:
            self.num_runs += 1
        assert self.go.wait(DEADLINE_SECONDS)
        return amount

    def meet(self, number: int) -> Future[int]:
        own: Future[int] = Future()
        with self._lock:
            self._meeting.append(own)
            met = self._meeting if len(self._meeting) == self.num_meeting else []
        for each in met:
            each.set_result(number)
        return own


def request(name: str, *arguments: object, client: int = 1, call: int = 1, seconds: float = 60.0) -> list[bytes]:
    """Returns the frames of a request. A Client sends those of a small one as one frame; a Service accepts both."""
    method = methods_of(Calls)[name]
    origin, frames = method.encode_arguments(arguments, {})
    header = Header(
        kind=Kind.REQUEST,
        method=method.number,
        client=client,
        call=call,
        num_frames=len(frames),
        body_bytes=sum(frame.nbytes for frame in frames),
        deadline_ms=int(1000 * seconds),
        origin=origin,
    )
    return [header.pack(), *map(bytes, frames)]


def received(peer: zmq.Socket[bytes]) -> tuple[Header, list[bytes]]:
    """Receives a message; returns its header and its frames."""
    message = [memoryview(frame) for frame in peer.recv_multipart()]
    header = Header.unpack(message[0])
    return header, [bytes(frame) for frame in header.frames_of(message)]


@contextmanager
def raw_peer(address: str) -> Iterator[zmq.Socket[bytes]]:
    """Opens a DEALER socket, for arbitrary messages."""
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    peer.rcvtimeo = peer.sndtimeo = int(1000 * DEADLINE_SECONDS)
    peer.connect(address)
    try:
        yield peer
    finally:
        peer.close()
        context.term()


@contextmanager
def server_process(address: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts a process that serves `Served`, and returns it with its address. It is killed when the context ends."""
    child = Path(__file__).with_name("rpc_server_child.py")
    command = [sys.executable, str(child), address, *options]
    with child_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process, process.stdout.readline().strip()


def resident_bytes(process: int, *, field: str = "VmRSS") -> int:
    """Returns the memory of a process; field="VmHWM" is its peak."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class FrameProxy:
    """A proxy between clients and a server that randomly drops, duplicates and delays messages."""

    def __init__(self, address: str, seed: int, drop: float, repeat: float, hold: float) -> None:
        self._random, self._chances = random.Random(seed), (drop, repeat, hold)
        self._to = address
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.linger = 0
        self._front.bind("tcp://127.0.0.1:0")
        self.address = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self._held: list[tuple[float, Callable[[], object]]] = []
        self.num_requests = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="frame-proxy")
        self._thread.start()

    def __enter__(self) -> FrameProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_SECONDS)

    def _run(self) -> None:
        backs: dict[bytes, zmq.Socket[bytes]] = {}
        while not self._stop.is_set():
            everyone = [(self._front, zmq.POLLIN), *((back, zmq.POLLIN) for back in backs.values())]
            for ready, _ in zmq.zmq_poll(everyone, 5):
                if ready is self._front:
                    route, *frames = self._front.recv_multipart()
                    self.num_requests += 1
                    if route not in backs:
                        backs[route] = self._context.socket(zmq.DEALER)
                        backs[route].linger = 0
                        backs[route].connect(self._to)
                    self._pass(backs[route], frames)
                else:
                    route = next(name for name, back in backs.items() if back is ready)
                    self._pass(self._front, [route, *backs[route].recv_multipart()])
            now = time.monotonic()
            for held in [each for each in self._held if each[0] <= now]:
                self._held.remove(held)
                held[1]()
        for each in (self._front, *backs.values()):
            each.close(0)
        self._context.term()

    def _pass(self, to: zmq.Socket[bytes], frames: list[bytes]) -> None:
        drop, repeat, hold = self._chances
        if self._random.random() < drop:
            return
        for _ in range(2 if self._random.random() < repeat else 1):
            if self._random.random() < hold:
                until = time.monotonic() + self._random.uniform(0.0, 0.1)
                self._held.append((until, lambda: to.send_multipart(frames)))
            else:
                to.send_multipart(frames)


INTS = st.integers(-(2**63), 2**64 - 1)


REALS = st.floats(allow_nan=False, allow_infinity=False)


JSON = st.recursive(
    st.none() | st.booleans() | INTS | REALS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def arrays(dtype: Any) -> st.SearchStrategy[NDArray[Any]]:
    size = np.dtype(dtype).itemsize

    def make(data: bytes) -> NDArray[Any]:
        whole = np.frombuffer(data[: len(data) // size * size], np.uint8)
        return (whole & 1).view(np.bool_) if dtype is np.bool_ else whole.view(dtype)

    return st.binary(max_size=80).map(make)


DTYPES = [np.bool_, np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64]
FLOATS = [np.float16, np.float32, np.float64]
PLAIN: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (None, st.none()),
    (bool, st.booleans()),
    (int, INTS),
    (float, REALS),
    (str, st.text()),
    (list[int], st.lists(INTS, max_size=4)),
    (dict[str, float], st.dictionaries(st.text(), REALS, max_size=4)),
    (list[dict[str, str | None]], st.lists(st.dictionaries(st.text(), st.none() | st.text()), max_size=3)),
    (str | None, st.none() | st.text()),
    (int | list[str], INTS | st.lists(st.text(), max_size=3)),
    (dict, st.dictionaries(st.text(), JSON, max_size=3)),
    (object, JSON),
]


def pairs() -> st.SearchStrategy[tuple[ValueType, Any]]:
    """Returns a strategy for a type and a value of it."""
    plain = [st.tuples(st.just(read_type("x", annotation)), value) for annotation, value in PLAIN]
    whole = [st.tuples(st.just(ArrayType(np.dtype(dtype))), arrays(dtype)) for dtype in DTYPES + FLOATS]
    absent = st.sampled_from(DTYPES).map(lambda dtype: (ArrayType(np.dtype(dtype), optional=True), None))
    return st.one_of(*plain, *whole, absent)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())
    return type(a) is type(b) and bool(a == b)
