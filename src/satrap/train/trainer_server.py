"""The server that each of several trainers runs in its own process, if no other servers were named.

So `torchrun train.py` alone shards the rows over the trainers' memory. Trainers reach each other's rows by the same
calls as those of separate servers: through Unix sockets on one machine, otherwise over TCP with keys of this run.
"""

import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from satrap.config.cores import thread_count
from satrap.config.job import Job
from satrap.errors import ConfigError, RpcError
from satrap.rpc import Keys, Service
from satrap.rpc.address import join_address, resolve_host
from satrap.server.protocol import ServerCalls
from satrap.server.server import Server
from satrap.table.engine import Slot
from satrap.train.process_group import ProcessGroup

_ANYWHERE = ("192.0.2.1", "2001:db8::1")  # beyond the default routes: addresses reserved for documents


class TrainerServer:
    """The server of this trainer's rows, and the addresses of all trainers' servers."""

    def __init__(
        self, trainers: ProcessGroup, num_threads: int | None, open_tables: Callable[[Job], list[Slot]] | None = None
    ) -> None:
        """All trainers call this together.

        open_tables: creates the tables of a job; None: in the memory of this process.
        num_threads: None: an equal share of the cores for each trainer on this machine."""
        self._folder = tempfile.TemporaryDirectory(prefix="satrap-trainer-")
        self._trainers = trainers
        self.keys: Keys | None = None
        """The key of the servers' clients; None on one machine, where they use Unix sockets."""
        hosts = trainers.gather(socket.gethostname().encode())
        self._host: str | None = None
        self._server_keys: Keys | None = None
        if not trainers.all(all(map(_is_own_folder, trainers.gather(self._folder.name.encode())))):
            self._host = _own_address(hosts)
            drawn = [key.text() for key in Keys.draw()] if trainers.rank == 0 else []
            self._server_keys, self.keys = map(Keys.parse, trainers.gather(b"\0".join(drawn))[0].split(b"\0"))
        share = max(1, thread_count(None) // hosts.count(hosts[trainers.rank]))
        self.num_threads = share if num_threads is None else num_threads
        """Threads of one call."""
        server = Server(
            num_threads=self.num_threads, checkpoints=["/"], open_tables=open_tables
        )  # it may write what the trainer may
        self._services: list[Service] = []
        self.addresses = self.serve("trainer", server, ServerCalls)

    def serve(self, name: str, served: object, protocol: Callable[..., Any]) -> tuple[str, ...]:
        """Serve an object until the server is closed; return the addresses of those of all trainers, which call this
        together."""
        if self._host is None:
            address = f"ipc://{self._folder.name}/{name}-{self._trainers.rank}"
        else:
            address = join_address(self._host, 0)
        self._services.append(Service(served, protocol, address, self._server_keys))
        return tuple(address.decode() for address in self._trainers.gather(self._services[-1].address.encode()))

    def close(self) -> None:
        """Stop the server, and free its rows. Idempotent."""
        for service in self._services:
            service.close()
        self._folder.cleanup()


def _is_own_folder(name: bytes) -> bool:
    folder = Path(name.decode())
    return folder.is_dir() and folder.stat().st_uid == os.geteuid()


def _own_address(hosts: list[bytes]) -> str:
    """Return the address from which this machine reaches another one of these, or any."""
    own = socket.gethostname()
    others = [host.decode() for host in hosts if host.decode() != own]
    for host in (*others[:1], *_ANYWHERE, own):
        with suppress(OSError, ConfigError):
            number = resolve_host(host)
            family = socket.AF_INET6 if ":" in number else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((number, 9))  # sends nothing
                return str(probe.getsockname()[0])
    raise RpcError(f"{own} has no address at which other trainers can reach it: connect it to a network")
