"""Notices that a server refuses the handshakes of a socket, while the socket has no connection.

ZeroMQ reports handshakes on a second pair of sockets. So the `Handshakes` of a socket exist only until the connection
is there: a process with connections to hundreds of servers would need twice the descriptors otherwise.
"""

import zmq
from zmq.utils.monitor import recv_monitor_message

from satrap.rpc.key_probe import expects_keys
from satrap.rpc.open_files import require_files
from satrap.rpc.socket_events import watch_events

_SUSPECT_HANDSHAKES = 20  # cut ones in a row, within 1 to 4 s, that cause a look at the server's greeting
_PROBE_SECONDS = 0.5
_NUM_FILES = 2
_EVENTS = (
    zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_SUCCEEDED
)


class Handshakes:
    """The handshakes of a socket from now on."""

    def __init__(self, socket: "zmq.Socket[bytes]", endpoint: str, has_keys: bool) -> None:
        require_files(_NUM_FILES, f"the handshakes with {endpoint}")
        self.monitor = watch_events(socket, _EVENTS)
        """The socket that is readable when a handshake has ended."""
        self._watched, self._endpoint, self._has_keys = socket, endpoint, has_keys
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
