"""The calls of a server that save some or all of its tables as they are at a cut.

A trainer takes the cut of all servers while no trainer trains, which takes no time that depends on rows, and lets them
write it while training continues. Until it is written no bucket migrates: a migration gets a NotReadyError and retries.
A cut that the trainer does not write soon is given up, and so is one whose rows are replaced, by a restore or in the
next attempt.
"""

import os
import time
from concurrent.futures import wait

import numpy as np

from satrap.config.location import is_url
from satrap.config.path_allowlist import PathAllowlist
from satrap.config.validation import check_integer
from satrap.errors import ChangesError, InputError, MovedError, SnapshotError
from satrap.rpc import Origin
from satrap.server.call_fence import CallFence
from satrap.server.state import HeldCut, ServerState
from satrap.storage.folder import Folder
from satrap.storage.open_folder import open_folder, require_usable
from satrap.table.snapshot.directory import part_name

_LAST_VERSION = 2**32 - 2


class SaveCalls:
    """The part of `satrap.server.protocol.ServerCalls` that saves."""

    def __init__(self, fence: CallFence, permitted: PathAllowlist) -> None:
        """permitted: the folders below which the server may write."""
        self._fence, self._permitted = fence, permitted

    def versions(self, origin: Origin) -> list[int]:
        with self._fence.exclusive():
            state = self._state_for_cut(origin)
            return [store.version for store in state.tables.values()]

    def take_cut(
        self, origin: Origin, cut: int, tables: list[int], versions: list[int], since: list[int] | None, memory: int
    ) -> bool:
        if (other := self._fence.require_state().cut) is not None and other.number != cut:
            wait([other.written])
        with self._fence.exclusive():
            state = self._state_for_cut(origin)
            if state.cut is not None and state.cut.number == cut:
                return state.cut.tables.changes_known  # a duplicate
            if not len(versions) == len(tables) == len(versions if since is None else since):
                raise InputError(f"take_cut: found {len(versions)} versions; expected one of each table")
            stores = {(store := state.store(table)).table.name: store for table in tables}
            state.participant.thaw_if_abandoned(time.monotonic())
            if state.participant.outgoing_migration:
                raise MovedError("take_cut: buckets of this server are migrating: retry the call")
            if state.cut is not None and state.cut.is_pending:
                raise MovedError("take_cut: another save has just begun: retry the call")
            state.verified = None
            for table, version, store in zip(tables, versions, stores.values(), strict=True):
                if store.version >= check_integer("take_cut", "version", version, 2, _LAST_VERSION):
                    raise ChangesError("take_cut: a table has this version already: take the cut of a later one")
                state.engine.reach_table(table, version - 1, 0)
            owners = state.shard_map.bucket_map.owners
            group_cut = state.tables.take_cut(
                None if since is None else dict(zip(stores, since, strict=True)),
                names=list(stores),
                owned=[np.array(owners[table]) == state.number for table in tables],
                memory=memory,
            )
            state.cut = HeldCut(cut, group_cut)
            return group_cut.changes_known

    def write_cut(
        self, origin: Origin, cut: int, folders: list[str], is_full: bool, is_beside: bool
    ) -> tuple[list[int], list[str]]:
        with self._fence.admit(origin) as state:
            parts = [self._part(state, folder) for folder in folders]
            held = self._require_cut(state, cut)
        if held.begin():  # not as an admitted call: the calls of a migration, or of another attempt, would wait for it
            try:
                names = list(held.tables.versions)
                rows = held.tables.write(dict(zip(names, parts, strict=True)), is_full=is_full, is_beside=is_beside)
                state.save_folders = state.save_folders | dict(zip(names, folders, strict=True))
                held.written.set_result((list(rows.values()), list(held.tables.snapshot_ids.values())))
            except BaseException as error:
                held.written.set_exception(error)
        return held.written.result()

    def release_cut(self, origin: Origin, cut: int) -> None:
        with self._fence.admit(origin) as state:
            if state.cut is not None and state.cut.number == cut:
                state.cut.give_up()

    def _state_for_cut(self, origin: Origin) -> ServerState:
        """Return the state, of the call's attempt and map."""
        state = self._fence.require_state()
        if origin.map_version > state.shard_map.version:  # the caller has found a newer map elsewhere, and starts over
            state.drop_cut()  # which keeps this server from taking that map
        self._fence.require_current(state, origin)
        return state

    def _require_cut(self, state: ServerState, number: int) -> HeldCut:
        if state.cut is None or state.cut.number != number:
            raise ChangesError(
                "the server no longer has the cut that it is to write: it was restarted, or its rows were replaced or "
                "have migrated since; save again, the whole tables"
            )
        return state.cut

    def require_permitted(self, origin: Origin, folder: str) -> None:
        require_permitted(self._permitted, folder)
        try:
            require_usable(folder)
        except OSError as error:
            raise SnapshotError(
                f"this server cannot use {folder}: {error.strerror or error} at {error.filename or folder}; expected a "
                "place where it may write, read, list and delete objects: correct the URL, or the credentials and the "
                "endpoint in the environment of the server"
            ) from error

    def _part(self, state: ServerState, folder: str) -> Folder:
        """Return this server's folder within that of a table, into which it may write."""
        part = open_folder(folder) / part_name(state.number, len(state.shard_map.addresses))
        require_permitted(self._permitted, os.fspath(part))
        return part


def require_permitted(permitted: PathAllowlist, folder: str) -> None:
    """Raise unless the server may read and write in the folder, a URL or an absolute path."""
    if not is_url(folder) and folder != os.path.abspath(folder):
        raise InputError(f"the folder is {folder!r}; expected an absolute path without '..'")
    permitted.require(folder)
