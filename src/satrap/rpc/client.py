"""The client: calls the methods of a Protocol in another process.

Each thread that calls has its own DEALER socket, so no message passes between threads. `start` sends a request and
returns a `PendingCall`, so that one thread can call many servers and then collect the results; `call` does both.
Replies are matched by call number; a reply to a call that has ended is ignored.

1. A call has a deadline. Until then an unanswered request is sent again every `retry_seconds`, as the same call.
2. A request to a busy server is retried after a pause that doubles up to a limit.
3. The deadline of a patient call restarts whenever the server reports that the call is running. This is for calls that
   may take long: only silence means that the server has failed.
4. ZeroMQ connects and reconnects by itself. A request is only sent on an established connection (with keys: to a
   server that proved its own), so DeadlineError can say whether there was one.
5. ZeroMQ does not reconnect to a server that refused this client's key, or that has keys when the client has none: its
   calls fail at once, and the next call creates a new connection. Nor does it reconnect to a peer whose answer it
   cannot read: a call that waits for a connection reconnects every ten seconds.

A call that Ctrl-C interrupts is abandoned, and may still run at the server. Messages are always sent and received
whole, so the connection can be used for the next call.

Delivery is at least once: a served method must be idempotent. Arrays are sent without a copy, so do not change the
arrays of a call before it has its result; received arrays are read-only views.
"""

import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, Self, TypeVar, cast

from satrap.collected import close_when_collected
from satrap.config.validation import check_number, suggest
from satrap.errors import ConfigError, InputError
from satrap.rpc.address import is_unix, split_address, unix_path
from satrap.rpc.channel import PendingCall
from satrap.rpc.channels import Channels
from satrap.rpc.header import MAX_DEADLINE_MS, Header, Kind, Message
from satrap.rpc.keys import Keys
from satrap.rpc.ledger import Limits
from satrap.rpc.methods import Method, methods_of
from satrap.rpc.schedule import Schedule
from satrap.rpc.unix_socket import require_private
from satrap.rpc.values import in_pieces

P = TypeVar("P")

_CONNECT_SECONDS = 1.0  # wait of a thread's first call for its connection, in start()
_MAX_FRAME_BYTES, _MAX_MESSAGE_BYTES = Limits().max_frame_bytes, Limits().max_bytes


class Client(Generic[P]):
    """Calls the methods of a Protocol at one address. A context manager; thread-safe."""

    call: P
    """The Protocol's methods: `client.call.lookup(ids)`."""

    def __init__(
        self,
        protocol: Callable[..., P],
        address: str,
        keys: Keys | None = None,
        *,
        deadline: float = 30.0,
        retry_seconds: float = 2.0,
    ) -> None:
        """Create a client of the server at `address`, e.g. "tcp://server:5555". Connects at the first call.

        keys: `Keys.read("client.key")`, which `satrap keys` wrote. Without keys, a server at tcp:// must have none
            either; it is then not authenticated, and traffic is not encrypted.
        deadline: default time limit of a call, in seconds.
        retry_seconds: interval at which an unanswered request is sent again.
        """
        self._methods = methods_of(protocol)
        self._keys = keys
        if is_unix(address):
            path = unix_path(address)
            require_private(path.parent)
            is_one = path.name != "*"
        else:
            host, port = split_address(address)
            is_one = port != 0 and host not in ("*", "0.0.0.0", "::")
        if not is_one:
            raise ConfigError(
                f"the address is {address!r}; expected that of one server: a host and its port, or a path"
            )
        if self._keys is not None:
            self._keys.require_role("client")
        self.address = address
        self._deadline = _check_seconds("deadline", deadline)
        self._retry_seconds = _check_seconds("retry_seconds", retry_seconds)
        self._channels = Channels(address, keys)
        close_when_collected(self, self._channels.close)
        self.call = self.with_deadline(self._deadline)

    def with_deadline(self, deadline: float) -> P:
        """Return the Protocol's methods with another deadline in seconds: `client.with_deadline(5).lookup(ids)`."""
        seconds = _check_seconds("deadline", deadline)
        return cast(P, SimpleNamespace(**{name: partial(_call, self, name, seconds) for name in self._methods}))

    def start(
        self, name: str, /, *arguments: Any, deadline: float | None = None, patient: bool = False, **named: Any
    ) -> PendingCall:
        """Prepare a call and send it. A thread's first call waits for the connection, at most a second. See
        `prepare`."""
        pending = self.prepare(name, *arguments, deadline=deadline, patient=patient, **named)
        pending.channel.connect_within(min(pending.seconds, _CONNECT_SECONDS))
        pending.send()
        return pending

    def prepare(
        self, name: str, /, *arguments: Any, deadline: float | None = None, patient: bool = False, **named: Any
    ) -> PendingCall:
        """Return a call of the method of that name, for this thread to `send` at once, since its deadline has begun.
        Its result is collected later, in this thread.

        patient: the call may take as long as the server reports that it is running; `deadline` limits the silence.
            The deadline only moves while the caller waits (`PendingCall.wait`, `PendingCall.result`).
        """
        method = self._methods.get(name)
        if method is None:
            raise InputError(f"there is no method {name!r}; {suggest(name, list(self._methods))}")
        seconds = self._deadline
        if deadline is not None and deadline is not seconds:
            seconds = _check_seconds("deadline", deadline)
        channel = self._channels.for_this_thread()
        number = next(channel.numbers)
        packed = None if named else method.pack_arguments(arguments, channel.client, number)
        message: Message = (
            [packed] if packed is not None else self._encode(method, arguments, named, channel.client, number)
        )
        now = time.monotonic()
        patience = seconds if patient else 0.0
        schedule = Schedule(deadline=now + seconds, retry_seconds=self._retry_seconds, due=now, patience=patience)
        schedule.observe(now)
        return PendingCall(self, channel, method, number, message, schedule, seconds)

    def _encode(
        self, method: Method, arguments: tuple[Any, ...], named: dict[str, Any], client: int, number: int
    ) -> Message:
        """Return the frames of a request: the header, and those of the values."""
        origin, frames = method.encode_arguments(arguments, named)
        largest = max((frame.nbytes for frame in frames), default=0)
        if largest > _MAX_FRAME_BYTES:
            raise InputError(
                f"{method.name}: an array of {largest} bytes; a server accepts at most {_MAX_FRAME_BYTES} bytes in "
                "one array: use smaller batches, or more servers"
            )
        if (total := sum(frame.nbytes for frame in frames)) > _MAX_MESSAGE_BYTES:
            raise InputError(
                f"{method.name}: arrays of {total} bytes; a server accepts at most {_MAX_MESSAGE_BYTES} bytes in one "
                "call: use smaller batches, or more servers"
            )
        if self._keys is not None:
            frames = in_pieces(frames)
        header = Header(
            kind=Kind.REQUEST,
            method=method.number,
            client=client,
            call=number,
            num_frames=len(frames),
            body_bytes=total,
            deadline_ms=1,
            origin=origin,
        )
        return header.message(frames)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections of all threads; waiting calls raise RpcError. Idempotent; does nothing in a fork. A
        client is also closed when it is collected and at the end of the process."""
        self._channels.close()


def _call(client: Client[Any], name: str, deadline: float, /, *arguments: Any, **named: Any) -> Any:
    return client.start(name, *arguments, deadline=deadline, **named).result()


def _check_seconds(name: str, value: float) -> float:
    seconds = check_number("Client", name, value, 0.0)
    if not 0.001 <= seconds <= MAX_DEADLINE_MS / 1000:
        raise ConfigError(f"Client: {name} is {value!r}; expected 0.001 to {MAX_DEADLINE_MS // 1000} seconds")
    return seconds
