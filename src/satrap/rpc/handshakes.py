"""Notices that a server refuses the handshakes of a socket, while the socket has no connection.

ZeroMQ reports handshakes on a second pair of sockets. So the `Handshakes` of a socket exist only until the connection
is there: a process with connections to hundreds of servers would need twice the descriptors otherwise.

A server whose secret key does not belong to the public key that a client has for it closes the connection without a
word, and ZeroMQ reconnects forever. Its greeting (ZMTP 3.1), which precedes all keys and is read here over a plain
socket, tells such a server from a port at which nothing answers yet.
"""

import itertools
import socket
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from satrap.rpc.address import is_unix, split_address, unix_path
from satrap.rpc.open_files import require_files

_SUSPECT_HANDSHAKES = 20  # cut ones in a row, within 1 to 4 s, that cause a look at the server's greeting
_PROBE_SECONDS = 0.5
_NUM_FILES = 2
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_VERSION = bytes([3, 1])
_MECHANISM = b"CURVE".ljust(20, b"\0")
_FIRST_BYTES = 64
_numbers = itertools.count()
_EVENTS = (
    zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_SUCCEEDED
)


class Handshakes:
    """The handshakes of a socket from now on."""

    def __init__(self, watched: "zmq.Socket[bytes]", endpoint: str, has_keys: bool) -> None:
        require_files(_NUM_FILES, f"the handshakes with {endpoint}")
        self.monitor = watch_events(watched, _EVENTS)
        """The socket that is readable when a handshake has ended."""
        self._watched, self._endpoint, self._has_keys = watched, endpoint, has_keys
        self._num_cut = 0  # that the server ended without a word

    def read(self) -> str | None:
        """Read one event. Returns why the server refuses this client; None if it does not."""
        event = recv_monitor_message(self.monitor)["event"]
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._num_cut = 0
            return None
        if event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            self._num_cut += 1
            is_suspect = self._has_keys and self._num_cut % _SUSPECT_HANDSHAKES == 0
            if not is_suspect or not expects_keys(self._endpoint, _PROBE_SECONDS):
                return None  # nothing listens there yet, or the network cut the connection
            return (
                "the server there has keys of another pair; use the client.key that `satrap keys` wrote beside its "
                "server.key"
            )
        if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            return "the server there does not know this client's key; use the client.key that belongs to its server.key"
        return "only one of the two has keys, or the process that listens there is not a satrap server"

    def close(self) -> None:
        """Stop watching."""
        self._watched.disable_monitor()
        self.monitor.close(0)


def watch_events(watched: "zmq.Socket[bytes]", events: int) -> "zmq.Socket[bytes]":
    """Return the socket on which the events of another one arrive from now on. Its address is never used again: ZeroMQ
    frees an address only some time after it was closed, and pyzmq's own choice is the watched socket's descriptor."""
    return watched.get_monitor_socket(events, f"inproc://satrap-events-{next(_numbers)}")


def expects_keys(address: str, seconds: float) -> bool:
    """Return whether a ZeroMQ server that requires keys answers at the address within so many seconds."""
    sent = (_SIGNATURE + _VERSION + _MECHANISM).ljust(_FIRST_BYTES, b"\0")
    received = b""
    with suppress(OSError), _connect(address, seconds) as connection:
        connection.sendall(sent)
        while len(received) < _FIRST_BYTES and (data := connection.recv(_FIRST_BYTES - len(received))):
            received += data
    start = len(_SIGNATURE) + len(_VERSION)
    is_zeromq = len(received) == _FIRST_BYTES and received[0] == _SIGNATURE[0] and received[9] == _SIGNATURE[9]
    return is_zeromq and received[start:].startswith(_MECHANISM)


def _connect(address: str, seconds: float) -> socket.socket:
    if not is_unix(address):
        return socket.create_connection(split_address(address), seconds)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        connection.connect(str(unix_path(address)))
    except BaseException:
        connection.close()
        raise
    return connection
