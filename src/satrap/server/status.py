"""What a server reports of its state, for `satrap status` and `--http`.

It takes no lock, so a server answers while a restore, a save or a migration runs, and delays no other call. The numbers
are read one after the other, not at one moment.
"""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from satrap.event_log import place_of_process
from satrap.monitor.memory import memory
from satrap.monitor.samples import Sample, memory_samples, snapshot_samples, staleness_distribution, table_samples
from satrap.rpc.release import RELEASE
from satrap.server.state import ServerState
from satrap.table.table_group import transfers_of


def server_status(
    state: ServerState | None,
    *,
    is_restoring: bool,
    leaves: bool,
    leases: dict[str, list[str | float]],
    shared: str | os.PathLike[str] | None,
) -> dict[str, Any]:
    """Return what `satrap.server.protocol.ServerCalls.status` does.

    is_restoring: these are the new tables of a restore, which fills them.
    leaves: this server was asked to stop, and moves its buckets to other servers first.
    shared: the shared-memory file of the rows, if they are in one."""
    status: dict[str, Any] = {
        "where": place_of_process(),
        "release": RELEASE,
        "not_ready": _not_ready(state, is_restoring, leaves),
        "memory": memory(shared),
        "leases": leases,
        "leaves": leaves,
    }
    if state is None:
        return status
    try:
        return status | _state_of(state)
    except AttributeError:  # a restore has just removed these tables, see Server._recreate_tables
        return status | {"not_ready": "a restore is running"}


def _not_ready(state: ServerState | None, is_restoring: bool, leaves: bool) -> str:
    """Return why this server has no rows to serve; "" if it has."""
    if leaves:
        return "this server was asked to stop, and moves its buckets to others"
    if is_restoring:
        return "a restore is running"
    if state is None:
        return "no trainer has given this server its job yet"
    if not state.has_handshake:
        return "this server was restarted, and no trainer has called it yet"
    return "this server owns no buckets" if state.owns_nothing else ""


def _state_of(state: ServerState) -> dict[str, Any]:
    engine, participant = state.engine, state.participant
    return {
        "number": state.number,
        "num_servers": len(state.shard_map.addresses),
        "addresses": list(state.shard_map.addresses),
        "map_version": state.shard_map.version,
        "attempt": engine.attempt,
        "step": engine.latest_step,
        "tables": {name: table.stats() for name, table in state.tables.items()},
        "snapshots": transfers_of(state.tables).to_dict(),
        "save_folders": sorted(set(dict(state.save_folders).values())),
        "restore_folders": list(state.restore_folders),
        "staleness": {str(trainer): steps for trainer, steps in dict(state.staleness).items()},
        "missed_updates": {str(others): updates for others, updates in dict(state.missed).items()},
        "buckets": {
            "owned": int(np.count_nonzero(state.owned())),
            "frozen": len(participant.outgoing),
            "incoming": len(participant.incoming),
        },
        "moved_rows": {"in": participant.rows_in, "out": participant.rows_out},
    }


def server_samples(status: Mapping[str, Any]) -> list[Sample]:
    """Return the samples of a server's status."""
    samples = memory_samples(status["memory"])
    if "tables" not in status:
        return [*samples, Sample("satrap_attempt", 0)]
    samples += table_samples(status["tables"]) + snapshot_samples(status["snapshots"])
    samples += [Sample("satrap_attempt", status["attempt"]), Sample("satrap_step", status["step"])]
    missed = {int(others): updates for others, updates in status["missed_updates"].items()}
    samples.append(Sample("satrap_missed_updates", staleness_distribution(missed)))
    samples += [Sample("satrap_buckets", number, {"state": state}) for state, number in status["buckets"].items()]
    return samples + [
        Sample("satrap_moved_rows", rows, {"direction": way}) for way, rows in status["moved_rows"].items()
    ]
