"""What one batch of one trainer costs each role: seconds of a core, and bytes on each link. Pure.

unique = expected different ids of the batch, by table
row    = dim numbers as the wire carries them
client -> server   8 bytes for each unique id, a row for each gradient
server -> client   a row for each unique id
worker <-> trainer the vectors of each sample, and their gradients; dense features once
trainer -> trainer 2 (T - 1) / T of the dense gradients: a ring of T trainers
"""

from dataclasses import dataclass

from satrap.planning.coefficients import Coefficients
from satrap.planning.layout import Layout
from satrap.planning.workload import Workload

_ID_BYTES = 8
_WIRE_BYTES = {"float32": 4.0, "float16": 2.0}
_FLOAT = 4.0


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
    requests: float
    """Bytes from the client to all servers."""
    replies: float
    """Bytes from all servers to the client."""
    vectors_to_trainer: float
    """Bytes from a worker process to its trainer."""
    vectors_to_worker: float
    reduced: float
    """Bytes that a trainer sends to another one, and receives."""
    data: float
    """Bytes of training data."""
    server_thread_seconds: float
    """Seconds of the thread of each server that receives and sends, which is one."""
    client_thread_seconds: float
    """The same of a client, in which Python runs one thread at a time: what neither cores nor threads divide."""


def demand_of(workload: Workload, layout: Layout, costs: Coefficients) -> Demand:
    """Return what a batch costs with the processes of this layout."""
    training = workload.training
    batch, servers = training.batch_size, layout.count("server")
    ids = sum(batch * each.ids_per_sample for each in workload.tables)
    unique = {each.table.name: each.unique_ids(batch) for each in workload.tables}
    wire = _WIRE_BYTES[training.wire]
    rows = sum(unique[each.table.name] * each.table.dim for each in workload.tables)
    touched = sum(unique[each.table.name] * each.row_bytes for each in workload.tables)
    looked_up = sum(batch * each.ids_per_sample * each.table.dim for each in workload.tables)
    total_unique = sum(unique.values())
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
    own = costs.local.step + transfer if has_workers else 0.0
    trainers = layout.count("trainer")
    reduced = 2.0 * (trainers - 1) / trainers * _FLOAT * training.dense_parameters if trainers > 1 else 0.0
    return Demand(
        ids=ids,
        unique_ids=total_unique,
        server_seconds=server,
        client_seconds=client + (transfer if has_workers else 0.0),
        trainer_seconds=own,
        dense_flops=workload.step_flops,
        reduce_seconds=costs.reduce_step + costs.reduce_byte * reduced if trainers > 1 else 0.0,
        requests=requests,
        replies=replies,
        vectors_to_trainer=vectors + numbers,
        vectors_to_worker=vectors,
        reduced=reduced,
        data=training.read_bytes_per_sample * batch,
        server_thread_seconds=costs.server.step + encrypted / servers if servers else 0.0,
        client_thread_seconds=fixed + encrypted,
    )
