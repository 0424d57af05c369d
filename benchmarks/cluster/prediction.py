"""A bound on the time of a step over a network, predicted from measurements without one.

Machine 0 is the server, the others are trainers. Of a step of all trainers:

    sent, received, reduced bytes on the wire: trainers to the server, the server to trainers, one trainer to another
    link                    the most that crosses one cable one way / rate
    serial                  compute(0) + (sent + received + reduced) / rate + SERIAL_TRIPS x round trip
    step(0)                 serial
    step(k)                 max(compute(k) + reduced / rate + OPEN_TRIPS x round trip, link, serial / (k + 1))
    step(async)             max(compute(async), link)

compute is a step of the same job over a network without a limit: the work of trainers and server, which share the
cores. At staleness 0 each message waits for the one before: ids, rows, all-reduces of dense gradients, gradients of
rows. With staleness lookups and updates overlap the dense network, but the trainers still wait for their all-reduces;
and at most k + 1 steps are in flight, each of which takes as long as at 0. The bound ignores queues, slow start and
pauses between messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cluster.link import Shape

SERIAL_TRIPS = 4
"""Round trips of a synchronous step: lookup, update, DDP's all-reduce, and whether every trainer has a batch."""
OPEN_TRIPS = 2
"""Round trips that staleness does not hide: the latter two."""
SYNCHRONOUS, HYBRID, ASYNC = "0", "4", "async"
"""Modes that are measured without a network; another staleness is predicted from HYBRID."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """A step over a network without a limit."""

    seconds: float
    crossed: Sequence[Sequence[float]]
    """Bytes on the wire, [source][target]."""


def link_bytes(crossed: Sequence[Sequence[float]]) -> float:
    """Return the most bytes that cross one cable one way."""
    return max(map(sum, [*crossed, *zip(*crossed, strict=True)]))


def step_seconds(shape: Shape, alone: Mapping[str, Alone], mode: str) -> float:
    """Return the seconds of a step over a network. mode: a staleness, or "async"."""
    rate, trip = shape.bytes_per_second, 2 * shape.delay_ms / 1e3
    if mode == ASYNC:
        return max(alone[ASYNC].seconds, link_bytes(alone[ASYNC].crossed) / rate)
    crossed = alone[SYNCHRONOUS].crossed
    trainers = range(1, len(crossed))
    sent, received = sum(crossed[trainer][0] for trainer in trainers), sum(crossed[0])
    reduced = max(crossed[one][other] for one in trainers for other in trainers)
    serial = alone[SYNCHRONOUS].seconds + (sent + received + reduced) / rate + SERIAL_TRIPS * trip
    if mode == SYNCHRONOUS:
        return serial
    open_seconds = alone[HYBRID].seconds + reduced / rate + OPEN_TRIPS * trip
    return max(open_seconds, link_bytes(crossed) / rate, serial / (int(mode) + 1))
