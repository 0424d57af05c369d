"""The calls of a server that write whole rows and list their ids: `Store.write` and `Store.ids` for rows on servers."""

import threading

import numpy as np

from satrap import _core
from satrap.errors import MovedError
from satrap.rpc import Origin
from satrap.server.call_fence import CallFence
from satrap.server.protocol import Floats, Ids

_WRITERS = 2048
"""The windows of trainer r's writes are those of trainer number 2048 + r: a run has fewer trainers."""


class RowCalls:
    """The part of `satrap.server.protocol.ServerCalls` that writes rows and lists their ids."""

    def __init__(self, fence: CallFence) -> None:
        self._fence = fence
        self._writes = threading.Lock()  # a write and the mark that it is done are one

    def write(self, origin: Origin, table: int, ids: Ids, values: Floats, state: Floats, has_state: bool) -> None:
        with self._fence.admit(origin) as server_state, self._writes:
            engine, store = server_state.engine, server_state.store(table)
            config, writer = server_state.job.tables, _WRITERS + origin.trainer
            if any(engine.finished(writer, origin.step + later) for later in range(_core.WINDOW_STEPS)):
                return
            first_bucket = sum(earlier.resolved_num_buckets for earlier in config[:table])
            buckets = first_bucket + _core.bucket_of(ids, config[table].resolved_num_buckets, config[table].is_direct)
            if np.isin(buckets, server_state.participant.outgoing).any():
                raise MovedError("write: some of the ids' buckets are migrating: call again")
            state_rows = state.reshape(len(ids), -1) if has_state and len(ids) else None
            store.write(ids, values.reshape(len(ids), config[table].dim), state_rows)
            engine.finish(writer, origin.step)

    def rows_with(self, origin: Origin, table: int, ids: Ids) -> Ids:
        with self._fence.admit(origin, reads=True) as server_state:
            counts: Ids = server_state.engine.rows_with(table, ids)
            return counts

    def bucket_ids(self, origin: Origin, table: int, bucket: int) -> Ids:
        with self._fence.admit(origin, reads=True) as server_state:
            return server_state.store(table).bucket_ids(bucket)
