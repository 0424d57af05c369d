"""What metrics cost: the CPU time that they add to the calls of a step, and that of a scrape."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from cluster import ANYWHERE, batch, one_table, sharded_worker
from satrap.cli.http import StatusEndpoint
from satrap.rpc import Origin, Service
from satrap.rpc.header import Header, Kind
from satrap.rpc.ledger import CallTimes, Counts, Request
from satrap.server.protocol import ServerCalls
from satrap.server.server import Server
from satrap.server.status import server_samples
from scrape import number, scrape

_STEPS = 300
_MAX_SHARE = 0.005
_SCRAPE_SECONDS = 15.0  # between two scrapes, Prometheus's usual interval


def cpu_seconds(work: Callable[[], object], times: int) -> float:
    """Return the least CPU time of the process for one call of `work`, of five rounds."""
    rounds = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(times):
            work()
        rounds.append(time.process_time() - start)
    return min(rounds) / times


@pytest.mark.alone
def test_the_cpu_time_of_metrics_is_a_small_share_of_a_step() -> None:
    """The step is a small one, of 512 ids: a larger one has the same calls and takes longer."""
    server, ids = Server(num_threads=1), np.arange(512, dtype=np.uint64)
    with (
        StatusEndpoint("server", "0", lambda: server.status(Origin()), server_samples) as endpoint,
        Service(server, ServerCalls, ANYWHERE) as service,
        sharded_worker(one_table(dim=16), [service.address]) as worker,
    ):
        (line,) = endpoint.attach(service)
        gradients, steps = np.ones((512, 16), np.float32), iter(range(1, 10 * _STEPS))

        def step() -> None:
            number = next(steps)
            found = worker.lookup(batch(ids), step=number)
            assert found.ticket is not None
            worker.update([found.ticket], [gradients], [{}], step=number)

        step_seconds = cpu_seconds(step, _STEPS)
        url = line.split()[-1]
        calls = number(scrape(url), "satrap_calls_total") / (5 * _STEPS)
        scrape_seconds = cpu_seconds(lambda: scrape(url), 5)
    assert 2 <= calls < 2.2
    # What a call has more than without metrics: it is timed, and its bytes and the staleness are noted.
    header = Header(kind=Kind.REQUEST, method=1, client=1, call=1)
    times, counts, request = CallTimes({1: "lookup"}), Counts(), Request(header, (), 0.0)
    staleness: dict[int, int] = {}

    def added() -> None:
        request.started_at = 1.0
        counts.received_bytes += 1000
        times.record(request.header.method, time.monotonic() - request.started_at)
        counts.sent_bytes += 1000
        staleness[header.origin.trainer] = header.origin.step - 1

    added_seconds = calls * cpu_seconds(added, 20_000)
    shares = {"calls": added_seconds / step_seconds, "scrapes": scrape_seconds / _SCRAPE_SECONDS}
    print(
        f"step {1e6 * step_seconds:.0f} us of CPU, of which metrics {1e6 * added_seconds:.2f} us; "
        f"scrape {1e3 * scrape_seconds:.1f} ms; shares { ({name: f'{share:.4%}' for name, share in shares.items()}) }"
    )
    assert all(share < _MAX_SHARE for share in shares.values())
