"""Where the rows of a model are, and how its process reaches them.

A script leaves this out: alone, the rows are in its process, several trainers shard them over their processes, and
under `satrap run` they are on the run's servers.
"""

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from os import PathLike
from typing import Any, Literal, Self

from satrap.config.location import local_path
from satrap.config.validation import KnownArguments, check_choice, check_flag, set_field
from satrap.errors import ConfigError
from satrap.hidden_names import internal
from satrap.run_context import current_context

_FILES = {"keys": " in it: client.key, which `satrap keys` wrote", "shared": " to create in it, such as /dev/shm/rows"}


@internal("in_context")
@dataclass(frozen=True, slots=True)
class Deployment(KnownArguments):
    """Where the rows of an `Embeddings` are, and how to reach them. The default is this process; with several trainers,
    the processes of all of them; under `satrap run`, the run's servers and workers.

    servers: addresses of the `satrap server` processes that hold the rows, "ipc:///folder/name" or "tcp://host:port",
        always in the same order. The default under `satrap run` is the run's servers.
    workers: addresses of the `satrap worker` processes, which read the files of declared sources, look up and update;
        each trainer uses the worker of its rank. This process looks up data from other sources. The default under
        `satrap run` is the run's workers; [] means none.
    keys: path of the client.key file that `satrap keys` wrote, for servers at tcp:// addresses.
    wire: format of rows and gradients on the network. "float32" sends them bit for bit; "float16" sends half the bytes,
        with each number rounded by at most 2^-11 of the largest magnitude in its row, and never overflows. With workers
        it holds twice: between servers and workers, and between a worker and its trainers.
    shared: path of a new shared-memory file for rows in this process, which then outlive it.
    take_over: take the servers from another process that trains on them, which ends its training. The default refuses
        such servers. To read the rows of a live run use a `Reader`.
    """

    servers: Sequence[str] | None = None
    _: KW_ONLY
    workers: Sequence[str] | None = None
    keys: str | PathLike[str] | None = None
    wire: Literal["float32", "float16"] = "float32"
    shared: str | PathLike[str] | None = None
    take_over: bool = False

    def __post_init__(self) -> None:
        for name in ("servers", "workers"):
            addresses: Any = getattr(self, name)
            if addresses is None:
                continue
            if not isinstance(addresses, list | tuple) or not all(isinstance(address, str) for address in addresses):
                raise ConfigError(f"Deployment: {name} is {addresses!r}; expected a list of 'tcp://host:port'")
            set_field(self, name, tuple(addresses))
        if self.servers is not None and len(set(self.servers)) < len(self.servers):
            raise ConfigError(f"Deployment: servers is {list(self.servers)}; expected each server once")
        if self.servers == ():
            raise ConfigError("Deployment: servers is []; expected a list of at least one 'tcp://host:port', or None")
        for name in ("keys", "shared"):
            if (path := getattr(self, name)) is not None:
                set_field(self, name, str(local_path(path, f"Deployment: {name}")))
                if os.path.isdir(getattr(self, name)):
                    raise ConfigError(
                        f"Deployment: {name} is {os.fspath(path)!r}, a folder; expected a file{_FILES[name]}"
                    )
        check_choice("Deployment", "wire", self.wire, ("float32", "float16"))
        check_flag("Deployment", "take_over", self.take_over)
        if self.servers is not None and self.shared is not None:
            raise ConfigError(
                "Deployment: shared is a file for local rows, but servers hold them: pass it to `satrap server`"
            )

    def in_context(self) -> Self:
        """Return this deployment with what the run gives, if `satrap run` started this process."""
        context, resolved = current_context(), self
        if resolved.servers is None and context is not None:
            keys = context.keys if resolved.keys is None else resolved.keys
            resolved = replace(resolved, servers=context.servers, keys=keys)
        if resolved.workers is None:
            resolved = replace(resolved, workers=() if context is None else context.workers)
        if resolved.servers is None and resolved.workers:
            raise ConfigError("found workers but no servers: pass Deployment(servers=[...]), which the workers call")
        if resolved.servers is None and (resolved.keys is not None or resolved.wire != "float32"):
            option = f"wire={resolved.wire!r}" if resolved.keys is None else "keys"
            raise ConfigError(f"found {option} but no servers: leave it out, or pass Deployment(servers=[...])")
        return resolved
