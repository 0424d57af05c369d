"""A server logs the trainers whose leases expire, and not those that release them."""

from __future__ import annotations

import logging
import time

from logged import Records
from satrap.server.lease import Leases


def test_an_expired_lease_is_logged_and_a_released_one_is_not() -> None:
    logger, handler = logging.getLogger("satrap.server"), Records()
    logger.addHandler(handler)
    try:
        leases = Leases()
        leases.renew(1, "a", "process 1 on a", 0.05)
        leases.renew(1, "b", "process 2 on b", 60.0)
        leases.renew(1, "b", "process 2 on b", 0.0)  # released
        leases.renew(1, "c", "process 3 on c", 0.3)
        deadline = time.monotonic() + 60
        while len(handler.records) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        logger.removeHandler(handler)
    assert [each.event for each in handler.records] == ["peer_lost"] * 2  # type: ignore[attr-defined]
    assert [each.partition(" is lost")[0] for each in handler.messages] == ["process 1 on a", "process 3 on c"]
    assert not leases.remaining()
