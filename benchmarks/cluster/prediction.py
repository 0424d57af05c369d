"""How long a step should take over a network: a bound from what was measured without one, to hold the measured against.

Machine 0 is the server, the others are trainers. Of a step of all trainers:

    asked, told, reduced    bytes on the wire: trainers to the server, the server to trainers, one trainer to another
    link                    the most that crosses one cable one way / rate
    serial                  compute(0) + (asked + told + reduced) / rate + SERIAL_TRIPS x round trip
    step(0)                 serial
    step(k)                 max(compute(k) + reduced / rate + OPEN_TRIPS x round trip, link, serial / (k + 1))
    step(async)             max(compute(async), link)

compute is a step of the same job over a network that is not slowed down: what trainers and server, sharing these cores,
work. At staleness 0 everything waits for everything: ids go, rows come, dense gradients go round, gradients of rows go.
With staleness lookups and updates cross beside the dense network, but the trainers still wait for their all-reduces;
and at most k + 1 steps are under way, each of which takes as long as at 0. The bound knows no queue, no slow start and
no pause between messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cluster.link import Shape

SERIAL_TRIPS = 4
"""Of a synchronous step: lookup, update, DDP's all-reduce, and the trainers' word on whether all have a batch."""
OPEN_TRIPS = 2
"""Of these the ones that staleness does not hide: the latter two."""
SYNCHRONOUS, HYBRID, ASYNC = "0", "4", "async"
"""The modes that are measured without a network; another staleness is predicted from that of HYBRID."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """A step over a network that is not slowed down."""

    seconds: float
    crossed: Sequence[Sequence[float]]
    """Bytes on the wire, [source][target]."""


def link_bytes(crossed: Sequence[Sequence[float]]) -> float:
    """The most that crosses one cable one way."""
    return max(map(sum, [*crossed, *zip(*crossed, strict=True)]))


def step_seconds(shape: Shape, alone: Mapping[str, Alone], mode: str) -> float:
    """Of a step over a network like that. mode: a staleness, or "async"."""
    rate, trip = shape.bytes_per_second, 2 * shape.delay_ms / 1e3
    if mode == ASYNC:
        return max(alone[ASYNC].seconds, link_bytes(alone[ASYNC].crossed) / rate)
    crossed = alone[SYNCHRONOUS].crossed
    trainers = range(1, len(crossed))
    asked, told = sum(crossed[trainer][0] for trainer in trainers), sum(crossed[0])
    reduced = max(crossed[one][other] for one in trainers for other in trainers)
    serial = alone[SYNCHRONOUS].seconds + (asked + told + reduced) / rate + SERIAL_TRIPS * trip
    if mode == SYNCHRONOUS:
        return serial
    open_seconds = alone[HYBRID].seconds + reduced / rate + OPEN_TRIPS * trip
    return max(open_seconds, link_bytes(crossed) / rate, serial / (int(mode) + 1))
