"""What one batch of one trainer costs each role, and what each process holds: seconds of a core, bytes of links and
memory, file descriptors. Pure.

unique = expected different ids of the batch, by table
row    = dim numbers as the wire carries them
client -> server   8 bytes for each unique id, a row for each gradient
server -> client   a row for each unique id
worker <-> trainer the vectors of each sample, and their gradients; dense features once
trainer -> trainer 2 (T - 1) / T of the dense gradients: a ring of T trainers
"""

import math
from dataclasses import dataclass

from satrap.planning.coefficients import Coefficients
from satrap.planning.machines import Layout
from satrap.planning.workload import Workload

_ID_BYTES = 8
_WIRE_BYTES = {"float32": 4.0, "float16": 2.0}
_FLOAT = 4.0
_OTHER_FILES = 32
"""File descriptors of a process without a connection: its libraries, log, data and epoll."""
_DENSE_COPIES = 16.0
"""Bytes of a dense parameter in a trainer: itself, its gradient, two states of an optimizer, float32."""
_MESSAGES = 3.0
"""Copies of a batch in flight that a process holds: as it came, as it is worked on, as it leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one batch needs."""

    ids: float
    unique_ids: float
    server_seconds: float
    """Seconds of all servers together."""
    client_seconds: float
    """Seconds of the worker, or without workers of the trainer."""
    trainer_seconds: float
    """Seconds of the trainer's process beside its dense network and what a client does."""
    dense_flops: float
    reduce_seconds: float
    """Seconds of a trainer for its part in averaging the dense gradients."""
    requests: float
    """Bytes from the client to all servers."""
    replies: float
    """Bytes from all servers to the client."""
    vectors_to_trainer: float
    """Bytes from a worker process to its trainer."""
    vectors_to_worker: float
    reduced: float
    """Bytes that a trainer sends to the next one of the ring, and receives from the one before."""
    data: float
    """Bytes of training data."""
    server_thread_seconds: float
    """Seconds of the one thread of each server that receives and sends."""
    client_thread_seconds: float
    """Seconds of a client's serial work: Python runs one thread at a time."""


def demand_of(workload: Workload, layout: Layout, costs: Coefficients) -> Demand:
    """Return what a batch costs with the processes of this layout."""
    training = workload.training
    batch, servers = training.batch_size, layout.count("server")
    ids = sum(batch * load.ids_per_sample for load in workload.tables)
    unique = [(load, load.unique_ids(batch)) for load in workload.tables]
    total_unique = sum(count for _, count in unique)
    wire = _WIRE_BYTES[training.wire]
    rows = sum(count * load.table.dim for load, count in unique)
    touched = sum(count * load.row_bytes for load, count in unique)
    looked_up = sum(batch * load.ids_per_sample * load.table.dim for load in workload.tables)
    crosses = 1.0 if layout.num_machines > 1 else 0.0
    requests = total_unique * _ID_BYTES + rows * wire if servers else 0.0
    replies = rows * wire if servers else 0.0
    encrypted = crosses * costs.key_byte * (requests + replies)
    fixed = costs.client.step + costs.call * (servers - 1) if servers else costs.local.step
    if servers:
        client = costs.client.seconds(ids, 2 * _FLOAT * (looked_up + rows)) + costs.call * (servers - 1) + encrypted
        server = costs.server.seconds(total_unique, 2 * (_FLOAT * rows + touched))
        server += costs.server.step * (servers - 1) + encrypted
    else:
        client = costs.local.seconds(ids, 2 * (_FLOAT * looked_up + touched))
        server = 0.0
    client += costs.read_byte * training.read_bytes_per_sample * batch
    has_workers = layout.count("worker") > 0
    vectors = workload.vector_floats * batch * wire if has_workers else 0.0
    numbers = training.dense_features * batch * _FLOAT if has_workers else 0.0
    transfer = (costs.transfer_byte + crosses * costs.key_byte) * (2 * vectors + numbers)
    trainers, gpus = layout.count("trainer"), layout.pool_of("trainer").machine.gpus
    reduced = 2.0 * (trainers - 1) / trainers * _FLOAT * training.dense_parameters
    return Demand(
        ids=ids,
        unique_ids=total_unique,
        server_seconds=server,
        client_seconds=client + (transfer if has_workers else 0.0),
        trainer_seconds=costs.local.step + transfer if has_workers else 0.0,
        dense_flops=workload.step_flops,
        reduce_seconds=costs.reduce_step + (0.0 if gpus else costs.reduce_byte * reduced) if trainers > 1 else 0.0,
        requests=requests,
        replies=replies,
        vectors_to_trainer=vectors + numbers,
        vectors_to_worker=vectors,
        reduced=reduced,
        data=training.read_bytes_per_sample * batch,
        server_thread_seconds=costs.server.step + encrypted / servers if servers else 0.0,
        client_thread_seconds=fixed + encrypted,
    )


def memory_of(workload: Workload, layout: Layout, demand: Demand, costs: Coefficients) -> dict[str, float]:
    """Return the bytes of memory of each process, by role."""
    training = workload.training
    servers, trainers = layout.count("server"), layout.count("trainer")
    in_flight = (training.staleness + 1) * _MESSAGES
    message = demand.requests + demand.replies
    block = 2 * workload.vector_floats * training.batch_size * _FLOAT
    client = in_flight * (message + 2 * _ID_BYTES * demand.ids + block)
    trainer = costs.trainer_bytes + _DENSE_COPIES * training.dense_parameters + in_flight * block
    trainer += client if layout.client_role == "trainer" else 0.0
    if not servers:
        return {"trainer": trainer + workload.bytes}
    server = costs.server_bytes + workload.server_bytes(servers) + trainers * in_flight * message / servers
    memory = {"trainer": trainer, "server": server}
    if layout.count("worker"):
        memory["worker"] = costs.server_bytes + client * -(-trainers // layout.count("worker"))
    return memory


def files_of(layout: Layout, costs: Coefficients) -> dict[str, int]:
    """Return the file descriptors of each process, by role. Trainers have connections to each other, too."""
    servers, workers, trainers = (layout.count(role) for role in ("server", "worker", "trainer"))
    trainers_of_worker = -(-trainers // workers) if workers else 0
    connections = {
        "server": costs.server_files * trainers,
        "worker": (costs.worker_files * servers + costs.server_files) * trainers_of_worker,
        "trainer": costs.client_files * (1 if workers else servers) + trainers,
    }
    return {role: _OTHER_FILES + math.ceil(count) for role, count in connections.items() if layout.count(role)}
