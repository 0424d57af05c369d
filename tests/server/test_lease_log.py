"""A server logs the trainers whose leases expire, and not those that release them."""

from __future__ import annotations

from logged import logged
from satrap.server.lease import Leases
from waiting import wait_until


def test_an_expired_lease_is_logged_and_a_released_one_is_not() -> None:
    with logged("satrap.server", "is lost") as records:
        leases = Leases()
        leases.renew(1, "a", "process 1 on a", 0.05)
        leases.renew(1, "b", "process 2 on b", 60.0)
        leases.renew(1, "b", "process 2 on b", 0.0)  # released
        leases.renew(1, "c", "process 3 on c", 0.3)
        wait_until(lambda: len(records) >= 2)
    assert [each.event for each in records] == ["peer_lost"] * 2  # type: ignore[attr-defined]
    assert [each.getMessage().partition(" is lost")[0] for each in records] == ["process 1 on a", "process 3 on c"]
    assert not leases.remaining()
