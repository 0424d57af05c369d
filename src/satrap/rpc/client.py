"""The caller's side: a Protocol's methods, called in another process.

Each thread that calls has a DEALER socket of its own, so nothing is handed between threads. `begin` sends and returns
a `Pending`, so that one thread can ask many servers and then collect; `call` does both. Replies are matched by call
number; one that nobody waits for is ignored.

1. A call has a deadline. Until then a request without an answer is sent again every `retry_seconds`, as the same call.
2. A server that is busy is asked again after a pause that grows.
3. A patient call's deadline counts from the last answer that the server still works at it: for calls that may take
   long, of which only silence says that the server is gone.
4. ZeroMQ connects and reconnects by itself. A request is only given to a connection that stands (with keys: to a
   server that proved its own), so DeadlineError can say whether there was one.
5. ZeroMQ does not reconnect to a server that refused this client's key, or that has keys where it has none: its calls
   end at once, and the next call makes another connection. Nor does it reconnect to a peer whose answer it cannot
   read: a call that waits for a connection reconnects every ten seconds.

A call that Ctrl-C interrupts is given up, and may still run at the server. A message is sent and taken whole, whatever
comes, so the connection is good for the next call.

Delivery is at least once: a served method must be idempotent. Arrays are sent from where they lie, so leave the arrays
of a call alone until its result came; received ones are read-only views.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Self, TypeVar, cast

from satrap.collected import close_when_collected
from satrap.config.validation import check_number, suggest
from satrap.errors import ConfigError, InputError
from satrap.interrupts import Uninterrupted
from satrap.rpc.address import is_unix, split_address, unix_path
from satrap.rpc.channel import Pending
from satrap.rpc.channels import Channels
from satrap.rpc.header import MAX_DEADLINE_MS
from satrap.rpc.keys import Keys
from satrap.rpc.ledger import Limits
from satrap.rpc.methods import methods_of
from satrap.rpc.schedule import Schedule
from satrap.rpc.unix_socket import require_private
from satrap.rpc.values import in_pieces

P = TypeVar("P")

_CONNECT_SECONDS = 1.0  # that a thread's first call waits for its connection before begin() returns
_MOST_FRAME_BYTES, _MOST_MESSAGE_BYTES = Limits().max_frame_bytes, Limits().max_partial_bytes


class Client(Generic[P]):
    """Calls the methods of a Protocol at one address; a context manager. Any number of threads may use it."""

    call: P
    """Its methods are the Protocol's: `client.call.lookup(ids)`."""

    def __init__(
        self,
        protocol: Callable[..., P],
        address: str,
        keys: Keys | None = None,
        *,
        deadline: float = 30.0,
        retry_seconds: float = 2.0,
    ) -> None:
        """Calls are answered at `address`, e.g. "tcp://server:5555"; nothing is sent before the first one.

        keys: `Keys.read("client.key")`, which `satrap keys` wrote. Without them a server at tcp:// is called that does
        without, too: who it is, and who listens, is not known.
        deadline: seconds that a call may take, unless it says otherwise.
        retry_seconds: after which a request without an answer is sent again.
        """
        self._methods = {name: (method, method.number) for name, method in methods_of(protocol).items()}
        self._keys = keys
        if is_unix(address):
            path = unix_path(address)
            require_private(path.parent)
            is_one = path.name != "*"
        else:
            host, port = split_address(address)
            is_one = port != 0 and host not in ("*", "0.0.0.0", "::")
        if not is_one:
            raise ConfigError(f"the address is {address!r}; wanted that of one server: a host and its port, or a path")
        if self._keys is not None:
            self._keys.require_role("client")
        self.address = address
        self._deadline = _check_seconds("deadline", deadline)
        self._retry_seconds = _check_seconds("retry_seconds", retry_seconds)
        self._channels = Channels(address, keys)
        close_when_collected(self, self._channels.close)
        self.call = self.within(self._deadline)

    def within(self, deadline: float) -> P:
        """The same as `call` with another deadline in seconds: `client.within(5).lookup(ids)`."""
        return cast(P, _Calls(self, _check_seconds("deadline", deadline)))

    def begin(
        self, name: str, /, *arguments: Any, deadline: float | None = None, patient: bool = False, **named: Any
    ) -> Pending:
        """Sends a call of the method of that name; its result is collected later, in this thread.

        patient: it may take as long as the server says that it works at it; `deadline` is for silence. It has to be
        waited for (`Pending.wait`, `Pending.result`) to be kept alive.
        """
        if name not in self._methods:
            raise InputError(f"there is no method {name!r}; {suggest(name, list(self._methods))}")
        method, number = self._methods[name]
        origin, frames = method.encode_arguments(arguments, named)
        most = max((frame.nbytes for frame in frames), default=0)
        if most > _MOST_FRAME_BYTES:
            raise InputError(
                f"{method.name}: an array of {most} bytes; a server takes at most {_MOST_FRAME_BYTES} in one: "
                "smaller batches, or more servers"
            )
        if (size := sum(frame.nbytes for frame in frames)) > _MOST_MESSAGE_BYTES:
            raise InputError(
                f"{method.name}: arrays of {size} bytes; a server takes at most {_MOST_MESSAGE_BYTES} together: "
                "smaller batches, or more servers"
            )
        if self._keys is not None:
            frames = in_pieces(frames)
        seconds = self._deadline
        if deadline is not None and deadline is not seconds:
            seconds = _check_seconds("deadline", deadline)
        now = time.monotonic()
        patience = seconds if patient else 0.0
        schedule = Schedule(deadline=now + seconds, retry_seconds=self._retry_seconds, due=now, patience=patience)
        schedule.look(now)
        channel = self._channels.own(min(seconds, _CONNECT_SECONDS))
        pending = Pending(self, channel, method, number, origin, frames, schedule, seconds)
        with Uninterrupted(), channel.lock:
            channel.require_open()
            channel.waiting[pending.number] = pending
            channel.try_send(pending, time.monotonic())
        return pending

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections of all threads; calls that wait raise RpcError. Does nothing twice, or in a fork. A
        client that is collected, or left at the end of the process, is closed likewise."""
        self._channels.close()


class _Calls:
    """Has the methods of the Protocol as attributes."""

    def __init__(self, client: Client[Any], deadline: float) -> None:
        for name in client._methods:
            setattr(self, name, partial(_call, client, name, deadline))


def _call(client: Client[Any], name: str, deadline: float, /, *arguments: Any, **named: Any) -> Any:
    return client.begin(name, *arguments, deadline=deadline, **named).result()


def _check_seconds(name: str, value: float) -> float:
    seconds = check_number("Client", name, value, 0.0)
    if not 0.001 <= seconds <= MAX_DEADLINE_MS / 1000:
        raise ConfigError(f"Client: {name} is {value!r}; wanted 0.001 to {MAX_DEADLINE_MS // 1000} seconds")
    return seconds
