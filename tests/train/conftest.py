"""Checks the invariants of every ledger in the tests of this folder, after each event."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ledger_invariants import Checks, checked


@pytest.fixture(autouse=True)
def ledgers() -> Iterator[Checks]:
    with checked() as checks:
        yield checks
