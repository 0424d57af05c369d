"""Duplicate and late calls of a migration: fencing tokens order coordinators, and received rows are kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from bag_oracle import update
from cluster import batch, features, one_table, running_servers, server_processes, sharded_worker
from contents import contents
from satrap.config.job import Job
from satrap.errors import ConfigError
from satrap.rpc import Client, Origin
from satrap.server.migration.coordinator import Migration
from satrap.server.migration.participant import MigrationParticipant
from satrap.server.protocol import ServerCalls

EXACT = np.arange(200, dtype=np.uint64)


def test_an_export_keeps_its_rows_while_another_call_replaces_the_cache() -> None:
    """A coordinator that was replaced may still export; its call may run between any two lines of the other's."""
    participant = MigrationParticipant(Job(tables=features().tables, seed=0), cast(Any, None))
    buckets, columns = np.array([0], np.uint32), {"id": EXACT}

    class ReplacedInBetween(bytes):
        __hash__ = bytes.__hash__

        def __eq__(self, other: object) -> bool:
            participant.thaw()
            return bytes(self) == other

    participant.engine = cast(Any, SimpleNamespace(freeze=lambda *_: None))
    participant._cached_columns = 0, ReplacedInBetween(buckets.tobytes()), columns
    assert participant._columns(buckets, 0) is columns
    assert participant._cached_columns is None


def test_fencing_tokens_outlive_the_server(tmp_path: Path) -> None:
    """A restarted server, and one whose tables were replaced by a clear, refuse an earlier coordinator."""
    buckets = np.array([0], np.uint32)
    with server_processes(tmp_path, 1) as servers, sharded_worker(features(), [servers[0].address]) as worker:
        for _ in range(2):
            Migration([servers[0].address], [servers[0].address]).run()
        servers[0].kill()
        servers[0].restart()
        worker.tables["item"].stats()  # repeats the handshake
        with Client(ServerCalls, servers[0].address) as client:
            for _ in range(2):
                with pytest.raises(
                    ConfigError, match="another migration is running: it holds fencing token 2, this one 1;"
                ):
                    client.call.freeze(Origin(step=1, map_version=1), 7, buckets)
                worker.tables.clear()
            with pytest.raises(ConfigError, match="holds fencing token 2, too"):
                client.call.take_fencing_token(Origin(step=2), 12)


def test_a_coordinator_takes_its_token_again_after_the_server_was_killed(tmp_path: Path) -> None:
    """The answer was lost with the server: it accepts the holder's duplicate, and no other holder of that number."""
    with (
        server_processes(tmp_path, 1) as servers,
        sharded_worker(one_table(), [servers[0].address]) as worker,
        Client(ServerCalls, servers[0].address) as client,
    ):
        for turn, change in enumerate((lambda: None, worker.tables.clear), 1):
            client.call.take_fencing_token(Origin(step=turn), 12)
            change()  # a clear creates new tables, next to which the token is stored, too
            servers[0].kill()
            servers[0].restart()
            client.call.take_fencing_token(Origin(step=turn), 12)
            with pytest.raises(ConfigError, match=f"holds fencing token {turn}, too"):
                client.call.take_fencing_token(Origin(step=turn), 13)
            worker.tables["t"].stats()  # repeats the handshake


def test_a_late_duplicate_of_receive_does_not_discard_rows() -> None:
    """A call is sent again while it has no answer, so a duplicate may arrive after the calls that followed it."""
    with running_servers(2) as services, sharded_worker(one_table(), [services[0].address]) as worker:
        both = [each.address for each in services]
        looked = worker.lookup(batch(EXACT), step=1)
        update(worker, looked, np.ones((len(EXACT), 2), np.float32), step=1)
        wanted, begin = contents(worker, EXACT), Client.start
        made: list[tuple[Client[Any], tuple[Any, ...]]] = []

        def late(self: Client[Any], method: str, *arguments: Any, **named: Any) -> Any:
            if method == "expect_buckets":
                made.append((self, arguments))
            elif method == "import_metadata":
                for client, again in made:
                    begin(client, "expect_buckets", *again).result()
            return begin(self, method, *arguments, **named)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Client, "start", late)
            Migration(both[:1], both).run()
        assert made and contents(worker, EXACT) == wanted
