"""All faults of a cluster in random order, for `--faults-seconds`; and a server that is merely slow.

pytest -m faults --faults-seconds 600
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from cluster import features, server_processes, sharded_worker
from faults import BAD, Fault, kill, networked_cluster, random_faults, stop_and_go, train_both_until
from network import CALM, CUT, TRAINER, Weather
from rpc_parts import FrameProxy, resident_bytes
from satrap.worker.local_rows import local_worker

RETRY_SECONDS = 0.1


@pytest.mark.faults
def test_any_faults_at_random(
    tmp_path: Path, seed: int, rng: np.random.Generator, request: pytest.FixtureRequest
) -> None:
    local = local_worker(features(), num_threads=1)
    seconds = request.config.getoption("--faults-seconds")
    with networked_cluster(tmp_path, seed, most_seconds=seconds) as (wire, servers, worker):

        def weather(name: str, there: Weather, back: Weather) -> Fault:
            return Fault(name, lambda: wire.be(there, back), lambda: wire.be(CALM, CALM), 1.0)

        def kill_behind_a_cut(which: int) -> Fault:
            def begin() -> None:
                wire.be(CUT, CUT)
                servers[which].kill()

            def end() -> None:
                servers[which].restart()
                wire.be(CALM, CALM)

            return Fault(f"kill {which} behind a cut", begin, end, 0.5)

        faults = [
            *(make(each) for each in servers for make in (kill, lambda server: stop_and_go(server, 1.0))),
            *map(kill_behind_a_cut, range(2)),
            *(weather(f"{name} there", each, CALM) for name, each in (("cut", CUT), ("bad", BAD))),
            *(weather(f"{name} back", CALM, each) for name, each in (("cut", CUT), ("bad", BAD))),
            weather("cut", CUT, CUT),
            Fault("link", lambda: wire.link(TRAINER, "down"), lambda: wire.link(TRAINER, "up"), 1.0),
        ]
        with random_faults(faults, seed, seconds=seconds) as over:
            train_both_until(over, local, worker, rng)


def test_a_slow_server_only_slows(tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    """One of two servers is stopped most of the time. A call is sent again only after its retry time, so there are no
    more messages than calls and retries; and neither side accumulates anything."""
    local = local_worker(features(), num_threads=1)
    with ExitStack() as stack:
        servers = stack.enter_context(server_processes(tmp_path))
        proxies = [stack.enter_context(FrameProxy(each.address, seed, 0.0, 0.0, 0.0)) for each in servers]
        addresses = [each.address for each in proxies]
        worker = stack.enter_context(sharded_worker(features(), addresses, retry_seconds=RETRY_SECONDS))
        before = [resident_bytes(pid) for pid in (os.getpid(), servers[1].pid)]
        began, first = time.monotonic(), [each.num_requests for each in proxies]
        with random_faults([stop_and_go(servers[1], 0.4)], seed, seconds=5.0, gap=0.1) as over:
            num_calls = 3 * train_both_until(over, local, worker, rng)
        moments = (time.monotonic() - began) / RETRY_SECONDS
        for proxy, number in zip(proxies, first, strict=True):
            assert proxy.num_requests - number <= num_calls + moments + 20
        for pid, at_first in zip((os.getpid(), servers[1].pid), before, strict=True):
            assert resident_bytes(pid) < at_first + (128 << 20)
