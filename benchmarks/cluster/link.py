"""An emulated network, decided: when a packet arrives, given each machine's rate and the delay between any two.

Every machine has a cable of its own to one switch, both ways at the same rate. A packet leaves when its sender's cable
is free, goes on through the switch as it comes (not when all of it is there) as soon as its receiver's cable is free,
and arrives the delay later. What would wait behind more than LIMIT bytes is dropped. Values in, values out, time
passed in; `switch.py` moves the packets.
"""

from dataclasses import dataclass

LIMIT = 8 << 20
"""Bytes that wait for one cable."""
_HEADERS = 52  # of IPv4 and of TCP with timestamps, in every packet on the wire
_FRAME = 38  # Ethernet's header, check sum, preamble and gap


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a network is like."""

    gbit: float | None = None
    """Of each cable, each way, in 10^9 bits per second; None: as fast as the emulation can."""
    delay_ms: float = 0.0
    """From one machine to another; there and back takes twice that."""

    @property
    def name(self) -> str:
        return "unshaped" if self.gbit is None else f"{self.gbit:g}gbit-{self.delay_ms:g}ms"

    @property
    def bytes_per_second(self) -> float:
        return float("inf") if self.gbit is None else self.gbit * 1e9 / 8


class Network:
    """Some machines, numbered, and what their cables are busy with."""

    def __init__(self, num_machines: int) -> None:
        self.shape = Shape()
        self._out, self._in = ([0.0] * num_machines for _ in range(2))  # since when each cable is free

    def arrival(self, now: float, size: int, source: int, target: int) -> float | None:
        """When a packet of `size` bytes on the wire, sent now, is there; None: it is lost. In seconds of any clock."""
        rate = self.shape.bytes_per_second
        begin = max(now, self._out[source])
        through = max(begin, self._in[target])
        if (through - now) * rate > LIMIT:
            return None
        self._out[source], self._in[target] = begin + size / rate, through + size / rate
        return self._in[target] + self.shape.delay_ms / 1e3


def wire_bytes(size: int, segment: int) -> int:
    """What a packet takes on the wire. segment: the payload of each part, if a network card would cut it; else 0."""
    parts = -(-max(1, size - _HEADERS) // segment) if segment else 1
    return size + (parts - 1) * _HEADERS + parts * _FRAME
