"""Which TCP connections of a service are ended, so that no stranger can use up its memory or its file descriptors.

ZeroMQ accepts every connection, and collects all frames of a message before it hands over the first. So a service
compares, for each connection, what TCP has received on it with what has been handed over as messages: the rest waits
in ZeroMQ for its message's end. Pure: time, numbers and file descriptors in, those to be ended out.

1. Of connections that have not brought a message yet only so many stay, the newest.
2. Of all connections only so many stay: those that have brought one, and the oldest of these.
3. A message that stands still (less than 64 KiB of it came in 10 s) is given up.
4. Where unfinished messages take more than so many bytes together, those that stand still go first (64 KiB in 1 s),
   then those that began last: the ones that began first come to their end. What goes is sent again by its client.

Time in which nobody looked (the process was stopped) does not count.
"""

from dataclasses import dataclass

_STEP_BYTES = 64 << 10  # that count as progress
_STALL_SECONDS, _PRESSED_STALL_SECONDS = 10.0, 1.0
_SLACK_BYTES = 128 << 10  # of a connection: frame headers, heartbeats, and what is not worth ending it for
_BLINK_SECONDS = 2.0  # between two looks, that count as time


@dataclass(slots=True, eq=False)
class _Peer:
    file: int
    """The inode: file descriptors are used again."""
    since: float
    spoke: bool = False
    received: int = 0
    taken: int = 0
    """Of the received bytes those that were handed over, and their overhead."""
    began: float | None = None
    """When what is unfinished now began to come; None: nothing is."""
    mark: int = 0
    """Received bytes at the last progress, and when that was."""
    mark_at: float = 0.0

    @property
    def unfinished(self) -> int:
        return max(0, self.received - self.taken)


class Connections:
    """See the file's docstring. Connections are named by their file descriptors."""

    def __init__(self, *, most: int, most_silent: int, most_bytes: int) -> None:
        self._most, self._most_silent, self._most_bytes = most, most_silent, most_bytes
        self._peers: dict[int, _Peer] = {}  # in the order in which they came
        self._clock = 0.0
        self._looked_at: float | None = None

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def unfinished_bytes(self) -> int:
        """Of all connections together."""
        return sum(peer.unfinished for peer in self._peers.values())

    def is_waiting(self) -> bool:
        """Whether time alone may make it necessary to end one."""
        return any(peer.began is not None for peer in self._peers.values())

    def accepted(self, fd: int, file: int) -> None:
        """A connection was made. file: its inode."""
        self._peers.pop(fd, None)
        self._peers[fd] = _Peer(file, self._clock, mark_at=self._clock)

    def closed(self, fd: int) -> None:
        """It is gone."""
        self._peers.pop(fd, None)

    def file(self, fd: int) -> int | None:
        """Its inode, if it is known."""
        peer = self._peers.get(fd)
        return None if peer is None else peer.file

    def took(self, fd: int, num_bytes: int) -> None:
        """A message of so many bytes that came over it was handed over."""
        if (peer := self._peers.get(fd)) is not None:
            peer.spoke, peer.began = True, None
            peer.taken += num_bytes

    def received(self, fd: int, num_bytes: int) -> None:
        """TCP has received so many bytes on it, from its beginning."""
        peer = self._peers.get(fd)
        if peer is None:
            return
        peer.received = num_bytes
        if peer.began is None:
            if peer.unfinished <= _SLACK_BYTES:
                peer.taken = peer.received if peer.spoke else 0
                return
            peer.began, peer.mark, peer.mark_at = self._clock, peer.received, self._clock
        elif peer.received - peer.mark >= _STEP_BYTES:
            peer.mark, peer.mark_at = peer.received, self._clock

    def to_end(self, now: float) -> dict[int, int]:
        """The connections to be ended, with their inodes; they are forgotten."""
        if self._looked_at is not None:
            self._clock += min(now - self._looked_at, _BLINK_SECONDS)
        self._looked_at = now
        found: dict[int, int] = {}
        for rule in (self._too_many, self._too_slow, self._too_large):
            found |= {fd: self._peers.pop(fd).file for fd in rule()}
        return found

    def _too_many(self) -> list[int]:
        silent = [fd for fd, peer in self._peers.items() if not peer.spoke]
        spoken = [fd for fd, peer in self._peers.items() if peer.spoke]
        surplus = max(len(silent) - self._most_silent, len(self._peers) - self._most)
        return [] if surplus <= 0 else [*silent, *reversed(spoken)][:surplus]

    def _too_slow(self) -> list[int]:
        return [fd for fd, peer in self._peers.items() if self._stands_still(peer, _STALL_SECONDS)]

    def _too_large(self) -> list[int]:
        total = self.unfinished_bytes
        if total <= self._most_bytes:
            return []
        unfinished = [(fd, peer) for fd, peer in reversed(self._peers.items()) if peer.began is not None]
        last_first = sorted(unfinished, key=lambda each: -(each[1].began or 0.0))
        order = sorted(last_first, key=lambda each: not self._stands_still(each[1], _PRESSED_STALL_SECONDS))
        found = []
        for fd, peer in order:
            if total <= self._most_bytes:
                break
            total -= peer.unfinished
            found.append(fd)
        return found

    def _stands_still(self, peer: _Peer, seconds: float) -> bool:
        return peer.began is not None and self._clock - peer.mark_at > seconds
