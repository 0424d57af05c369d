"""The servers of a running job, for a process that only reads: it learns the job from them and starts no attempt.

It makes no handshake and belongs to no attempt, so it neither replaces a trainer nor assigns an empty server to a job.
It follows the bucket map, and a run that starts over: it reads what the servers hold at the moment of each call. While
a server restarts, a call waits for it until the deadline.
"""

import time
from collections.abc import Sequence
from typing import Any

from satrap.config.job import Job
from satrap.errors import NotReadyError, RpcError
from satrap.rpc import Client, Keys, Origin
from satrap.rpc.release import require_same_release
from satrap.server.protocol import ServerCalls
from satrap.sharding.shard_map import ShardMap, check_addresses
from satrap.worker.server_group import RetryState, ServerGroup, Topology


class ReaderServers(ServerGroup):
    """The servers of a running job, for a process that only reads."""

    def __init__(self, addresses: Sequence[str], *, keys: Keys | None = None, deadline: float = 60.0) -> None:
        """addresses: of one or more servers of the run. keys: the client's."""
        check_addresses(addresses)
        jobs = _ask_for_job(addresses, keys, deadline)
        shard_map, state = ShardMap.from_dict(jobs["shard_map"]), jobs["state"]
        self._newest = state["attempt"], shard_map.version
        super().__init__(Job.from_dict(jobs["job"]), shard_map.addresses, begin=False, keys=keys, deadline=deadline)
        self.latest_step, self.lrs = state["latest_step"], state["lrs"]
        self._adopt(shard_map)

    @property
    def newest_step(self) -> int:
        """The latest step that the run has looked up or updated."""
        retries = RetryState(time.monotonic() + self._deadline)

        def ask(topology: Topology) -> int:
            calls = dict.fromkeys(range(len(topology)), (0,))
            while True:
                answers = self.call_servers("get_shard_map", 0, calls, topology=topology)
                jobless = next((server for server, answer in answers.items() if not answer["version"]), None)
                if jobless is None:
                    return max(int(answer["state"]["latest_step"]) for answer in answers.values())
                where = topology.shard_map.addresses[jobless]
                error = NotReadyError(f"{where} was restarted, and no trainer has given it its job yet: wait for one")
                self._handshake_again(topology, jobless, error, retries)

        return self.follow(ask)

    def _connect(self) -> None:
        """Do nothing: a reader makes no handshake."""

    def _refresh(self, topology: Topology, server: int) -> bool:
        """Treat any map of a later attempt as newer: the run has started over."""
        if topology is not self.topology:
            return True
        answer = topology.clients[server].call.get_shard_map(Origin(), 0)
        if answer["version"]:
            newest, shard_map = (answer["state"]["attempt"], answer["version"]), ShardMap.from_dict(answer["shard_map"])
            with self._lock:
                if newest >= self._newest and shard_map != self.topology.shard_map:
                    self._adopt(shard_map)
                self._newest = max(newest, self._newest)
        return topology is not self.topology

    def _handshake_again(self, topology: Topology, server: int, error: NotReadyError, retries: RetryState) -> None:
        """Wait for a restarted server until a trainer has made a handshake with it."""
        self._pause(topology, server, error, retries)


def _ask_for_job(addresses: Sequence[str], keys: Keys | None, deadline: float) -> dict[str, Any]:
    """Return the answer of the first server that has a job. Each one gets an equal share of the deadline."""
    failed: dict[str, RpcError] = {}
    for address in addresses:
        try:
            with Client(ServerCalls, address, keys, deadline=deadline / len(addresses)) as client:
                answer: dict[str, Any] = client.call.get_shard_map(Origin(), 0)
                require_same_release(answer.get("release"), f"the server at {address}")
        except RpcError as error:
            failed[address] = error
            continue
        if answer["version"]:
            return answer
    if not failed:
        raise NotReadyError(f"no server at {', '.join(addresses)} has a job yet: start a trainer on them first")
    first = next(iter(failed.values()))
    raise type(first)(
        "; ".join(str(failed.get(address, f"{address} has no job yet")) for address in addresses)
    ) from first
