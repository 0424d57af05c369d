"""Processes of different releases: the caller names both releases, and no server or worker has changed by then."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster import one_table
from satrap import ConfigError, Deployment, Embeddings, Reader
from satrap.rpc import Client, Origin
from satrap.rpc.release import RELEASE, require_same_release
from satrap.server.migration.coordinator import Migration
from satrap.server.protocol import NO_ATTEMPT, ServerCalls
from waiting import DEADLINE_SECONDS

OTHER = "97.98.99"
_PROGRAM = """\
import importlib.metadata, sys
own = importlib.metadata.version
release = sys.argv.pop(1)
importlib.metadata.version = lambda name: release if name == "satrap" else own(name)
from satrap.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@contextmanager
def process(role: str, folder: Path, name: str, release: str) -> Iterator[str]:
    """Start a server or worker of a release, and yield its address."""
    folder.chmod(0o700)
    command = [sys.executable, "-c", _PROGRAM, release, role, "--listen", f"ipc://{folder}/{name}", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            yield started.stdout.readline().split()[-1]
        finally:
            started.terminate()
            assert started.wait(DEADLINE_SECONDS) == 0


@contextmanager
def two_servers(folder: Path, *releases: str) -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(process("server", folder, f"server-{i}", release)) for i, release in enumerate(releases)
        ]


def has_job(address: str) -> bool:
    with Client(ServerCalls, address) as client:
        return bool(client.call.get_shard_map(Origin(), 0)["version"])


def open_embeddings(**deployment: Any) -> Embeddings:
    return Embeddings(one_table(), deployment=Deployment(**deployment))


def test_a_server_of_another_release_is_named_before_any_server_gets_the_job(tmp_path: Path) -> None:
    with two_servers(tmp_path, RELEASE, OTHER) as servers:
        wanted = (
            rf"^the server at {servers[1]} runs satrap {OTHER}, and this process satrap {RELEASE}; install the same"
        )
        with pytest.raises(ConfigError, match=wanted):
            open_embeddings(servers=servers)
        assert not any(map(has_job, servers))
        with pytest.raises(ConfigError, match=wanted):
            Migration(servers[:1], servers).run()
        with pytest.raises(ConfigError, match=wanted):
            Reader(servers=servers[1:])


def test_a_worker_of_another_release_is_named_before_an_attempt_begins(tmp_path: Path) -> None:
    with two_servers(tmp_path, RELEASE) as servers, process("worker", tmp_path, "worker", OTHER) as worker:
        wanted = rf"^the worker at {worker} runs satrap {OTHER}, and this process satrap {RELEASE}; install the same"
        with pytest.raises(ConfigError, match=wanted):
            open_embeddings(servers=servers, workers=[worker])
        assert not has_job(servers[0])
        with open_embeddings(servers=servers), Client(ServerCalls, servers[0]) as client:
            assert client.call.get_shard_map(Origin(), 0)["state"]["attempt"] == NO_ATTEMPT, "of no earlier one"


def test_a_peer_of_the_same_release_is_accepted() -> None:
    require_same_release(RELEASE, "the server at a")
