"""Decides which TCP connections of a service to close, so that no stranger can exhaust its memory or file descriptors.

ZeroMQ accepts every connection, and collects all frames of a message before it delivers the first one. So a service
compares, for each connection, the bytes that TCP received with those that were delivered as messages: the difference
is buffered in ZeroMQ until its message is complete. Pure: time, numbers and file descriptors in, connections to close
out.

1. The number of connections that have not sent a message yet is limited; the oldest of them are closed.
2. The number of all connections is limited; those without a message are closed first, then the newest.
3. A stalled message (less than 64 KiB received in 10 s) is dropped with its connection.
4. If unfinished messages exceed a number of bytes together, stalled ones (64 KiB in 1 s) are dropped first, then those
   that started last, so that the ones that started first can finish. Their clients send them again.

Time during which no check ran (the process was suspended) does not count.
"""

from dataclasses import dataclass

_PROGRESS_BYTES = 64 << 10  # received bytes that count as progress
_STALL_SECONDS, _PRESSED_STALL_SECONDS = 10.0, 1.0
_SLACK_BYTES = 128 << 10  # per connection: frame headers, heartbeats, and small unfinished messages
_MAX_GAP_SECONDS = 2.0  # longest time between two checks that counts


@dataclass(slots=True, eq=False)
class _Peer:
    inode: int
    """Inode of the descriptor, since descriptor numbers are reused."""
    since: float
    has_sent: bool = False
    received: int = 0
    delivered: int = 0
    """Received bytes that were delivered, including their overhead."""
    unfinished_since: float | None = None
    """Time at which the unfinished message started; None: there is none."""
    progress_bytes: int = 0
    """Received bytes at the last progress, whose time is `progress_at`."""
    progress_at: float = 0.0

    @property
    def unfinished(self) -> int:
        return max(0, self.received - self.delivered)


class Connections:
    """The TCP connections of one service, by file descriptor."""

    def __init__(self, *, max_connections: int, max_silent: int, max_unfinished_bytes: int) -> None:
        self._max_connections, self._max_silent = max_connections, max_silent
        self._max_unfinished_bytes = max_unfinished_bytes
        self._peers: dict[int, _Peer] = {}  # in the order of their creation
        self._clock = 0.0
        self._checked_at: float | None = None

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def unfinished_bytes(self) -> int:
        """Bytes of the unfinished messages of all connections."""
        return sum(peer.unfinished for peer in self._peers.values())

    def is_waiting(self) -> bool:
        """Return whether a connection may have to be closed because time passes."""
        return any(peer.unfinished_since is not None for peer in self._peers.values())

    def record_accepted(self, fd: int, inode: int) -> None:
        self._peers.pop(fd, None)
        self._peers[fd] = _Peer(inode, self._clock, progress_at=self._clock)

    def record_closed(self, fd: int) -> None:
        self._peers.pop(fd, None)

    def inode(self, fd: int) -> int | None:
        """Return the inode of a connection, if it is known."""
        peer = self._peers.get(fd)
        return None if peer is None else peer.inode

    def record_message(self, fd: int, num_bytes: int) -> None:
        """Record that a message of so many bytes was delivered."""
        if (peer := self._peers.get(fd)) is not None:
            peer.has_sent, peer.unfinished_since = True, None
            peer.delivered += num_bytes

    def record_received(self, fd: int, num_bytes: int) -> None:
        """Record how many bytes TCP has received on a connection in total."""
        peer = self._peers.get(fd)
        if peer is None:
            return
        peer.received = num_bytes
        if peer.unfinished_since is None:
            if peer.unfinished <= _SLACK_BYTES:
                peer.delivered = peer.received if peer.has_sent else 0
                return
            peer.unfinished_since, peer.progress_bytes, peer.progress_at = self._clock, peer.received, self._clock
        elif peer.received - peer.progress_bytes >= _PROGRESS_BYTES:
            peer.progress_bytes, peer.progress_at = peer.received, self._clock

    def select_to_close(self, now: float) -> dict[int, int]:
        """Return the connections to close, with their inodes, and forgets them."""
        if self._checked_at is not None:
            self._clock += min(now - self._checked_at, _MAX_GAP_SECONDS)
        self._checked_at = now
        selected: dict[int, int] = {}
        for rule in (self._too_many, self._too_slow, self._too_large):
            selected |= {fd: self._peers.pop(fd).inode for fd in rule()}
        return selected

    def _too_many(self) -> list[int]:
        silent = [fd for fd, peer in self._peers.items() if not peer.has_sent]
        senders = [fd for fd, peer in self._peers.items() if peer.has_sent]
        surplus = max(len(silent) - self._max_silent, len(self._peers) - self._max_connections)
        return [] if surplus <= 0 else [*silent, *reversed(senders)][:surplus]

    def _too_slow(self) -> list[int]:
        return [fd for fd, peer in self._peers.items() if self._is_stalled(peer, _STALL_SECONDS)]

    def _too_large(self) -> list[int]:
        total = self.unfinished_bytes
        if total <= self._max_unfinished_bytes:
            return []
        unfinished = [(fd, peer) for fd, peer in reversed(self._peers.items()) if peer.unfinished_since is not None]
        last_first = sorted(unfinished, key=lambda each: -(each[1].unfinished_since or 0.0))
        candidates = sorted(last_first, key=lambda each: not self._is_stalled(each[1], _PRESSED_STALL_SECONDS))
        selected = []
        for fd, peer in candidates:
            if total <= self._max_unfinished_bytes:
                break
            total -= peer.unfinished
            selected.append(fd)
        return selected

    def _is_stalled(self, peer: _Peer, seconds: float) -> bool:
        return peer.unfinished_since is not None and self._clock - peer.progress_at > seconds
