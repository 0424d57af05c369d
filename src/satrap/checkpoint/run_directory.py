"""The folder of a run: finds its checkpoints, publishes new ones, removes old ones, and checks which process saves into
it.

The folder knows checkpoint.json, and leaves the other content of a checkpoint to `checkpoint`. `publisher` publishes
and removes, on a disk or under a URL; `catalog` decides which checkpoints count and which are removed; `run_owner`
records which process saves. A save has these steps: 1. scan, and refuse another run's folder; 2. write the owner file
with the name of the new checkpoint; 3. all processes write their parts of it; 4. check that this process is still the
owner, and write checkpoint.json (on a disk, with the rename of the folder); 5. remove checkpoints beyond `keep`.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from satrap.checkpoint.catalog import Catalog, Version
from satrap.checkpoint.publisher import open_publisher
from satrap.checkpoint.run_owner import OWNER, RunOwner
from satrap.config.durable import checksum, json_checksum, json_with_checksum, parse_json
from satrap.config.regular_file import MAX_JSON_BYTES
from satrap.config.validation import LAST_STEP
from satrap.data.inputs import Position
from satrap.errors import CheckpointError, SatrapError
from satrap.storage.folder import Folder
from satrap.storage.open_folder import open_folder, require_usable
from satrap.table.snapshot.saved_table import SavedTable

MANIFEST, STATE, TABLES = "checkpoint.json", "state.safetensors", "tables"
_BEST = "best"  # in place of a name: the version that was last saved as the best
_LOG = logging.getLogger("satrap.checkpoint")
_FORMAT, _FORMAT_VERSION = "satrap-checkpoint", 1
_LOCK_SECONDS = 60.0
_INDENT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """The content of one complete checkpoint, as its checkpoint.json declares it."""

    folder: Folder
    name: str
    """The name under which it was saved."""
    step: int
    parent: str | None
    parent_crc32c: int | None
    """Checksum of the parent's checkpoint.json; None if there is no parent."""
    positions: tuple[Position | None, ...]
    """Position of each trainer's source, in the order of their ranks."""
    source: Mapping[str, Any] | None
    """Signature of the source that the positions refer to."""
    tables: tuple[str, ...]
    saved: tuple[SavedTable, ...]
    """Snapshots of the tables, in the order of `tables`."""
    state_crc32c: int
    is_best: bool = False
    """Whether it was the best of its run when it was saved: it is kept until there is a better one."""

    @classmethod
    def parse(cls, data: bytes, folder: Folder) -> "CheckpointManifest":
        """Parse the bytes of a checkpoint.json; raise CheckpointError if it is torn or of another format."""
        where = str(folder)
        path = f"{where}/{MANIFEST}"
        try:
            content = parse_json(data)
            version = content["format_version"]
            if content["format"] != _FORMAT or version != _FORMAT_VERSION:
                raise CheckpointError(
                    f"{path} is of format {content['format']!r} version {version!r}; expected {_FORMAT!r} version "
                    f"{_FORMAT_VERSION}: resume it with the release of Satrap that saved it"
                )
            if content["crc32c"] != json_checksum(content, _INDENT):
                raise CheckpointError(
                    f"{path} is damaged: its checksum does not match; remove {where} to use an older checkpoint"
                )
            tables, parent = content["tables"], content["parent"]
            manifest = cls(
                folder=folder,
                name=content["name"],
                step=content["step"],
                parent=None if parent is None else parent["name"],
                parent_crc32c=None if parent is None else parent["crc32c"],
                positions=tuple(
                    None if position is None else Position.from_dict(position) for position in content["positions"]
                ),
                source=content["source"],
                tables=tuple(table["name"] for table in tables),
                saved=tuple(SavedTable.from_dict({"rows": table["rows"], "parts": table["parts"]}) for table in tables),
                state_crc32c=content["state_crc32c"],
                is_best=content.get("is_best", False),
            )
            if problem := manifest._problem():
                raise TypeError(problem)
            return manifest
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}); remove {where} to use an older checkpoint"
            ) from error

    def _problem(self) -> str | None:
        """Return which field has a wrong value."""
        kinds: dict[str, Any] = {"name": str, "step": int, "parent": str | None, "parent_crc32c": int | None}
        kinds |= {"source": Mapping | None, "state_crc32c": int, "is_best": bool}
        wrong = [name for name, kind in kinds.items() if not isinstance(getattr(self, name), kind)]
        wrong += ["tables"] if not all(isinstance(table, str) for table in self.tables) else []
        if not wrong and not 0 <= self.step <= LAST_STEP:
            return f"step is {self.step}; expected 0 to {LAST_STEP}"
        return f"{wrong[0]} is of a wrong type" if wrong else None

    @property
    def where(self) -> str:
        """Its path or URL, for messages."""
        return str(self.folder)

    def to_json(self) -> bytes:
        """Return the bytes of checkpoint.json."""
        body: dict[str, Any] = {
            "format": _FORMAT,
            "format_version": _FORMAT_VERSION,
            "name": self.name,
            "step": self.step,
            "parent": None if self.parent is None else {"name": self.parent, "crc32c": self.parent_crc32c},
            "positions": [None if position is None else position.to_dict() for position in self.positions],
            "source": self.source,
            "tables": [{"name": name, **saved.to_dict()} for name, saved in zip(self.tables, self.saved, strict=True)],
            "state_crc32c": self.state_crc32c,
        }
        if self.is_best:
            body["is_best"] = True
        return json_with_checksum(body, _INDENT)

    def require_name(self, name: str) -> None:
        """Raise CheckpointError unless this checkpoint was saved under the name."""
        if self.name != name:
            raise CheckpointError(
                f"{self.where} was saved as {self.name}, but its folder is called {name}: rename the folder back, or "
                f"remove {self.where}"
            )

    def require_parent(self, parent: bytes) -> None:
        """Raise CheckpointError unless `parent` is the checkpoint.json of the parent of this checkpoint."""
        if checksum(parent) != self.parent_crc32c:
            raise CheckpointError(
                f"{self.where} has another parent {self.parent}: its {MANIFEST} has the crc32c {checksum(parent)}; "
                f"expected {self.parent_crc32c}: restore the original parent, or remove {self.where}"
            )


def table_key(number: int) -> str:
    """Return the folder of a table within a checkpoint."""
    return f"{TABLES}/{number}"


def table_folders(chain: Sequence[CheckpointManifest]) -> dict[str, list[Folder]]:
    """Return the folders from which to restore each table, oldest first. Raise CheckpointError unless each folder holds
    what its checkpoint was saved with.

    chain: the newest checkpoint and its parents, oldest first.
    """
    folders: dict[str, list[Folder]] = {name: [] for name in chain[-1].tables}
    for entry in chain:
        if sorted(entry.tables) != sorted(folders):
            raise CheckpointError(
                f"{entry.where} has tables {sorted(entry.tables)}, but {chain[-1].where}, which continues it, has "
                f"{sorted(folders)}: one of the two comes from another run; restore the right one"
            )
        for i, (name, saved) in enumerate(zip(entry.tables, entry.saved, strict=True)):
            folders[name].append(entry.folder / table_key(i))
            saved.require(entry.folder / table_key(i), entry.where)
            if entry.parent is None and (rows := sum(part.rows for part in saved.parts)) != saved.rows:
                raise CheckpointError(
                    f"{entry.where}: table {name!r} has {rows} rows in its files; expected {saved.rows}, as "
                    "when it was saved: use an older checkpoint, and report this"
                )
    return folders


def require_rows(newest: CheckpointManifest, num_rows: Mapping[str, int]) -> None:
    """Raise CheckpointError unless each restored table has as many rows as when the checkpoint was saved. The files of
    changes do not say how many rows a table has, so the tables are filled first.

    num_rows: the number of rows in each table, by name.
    """
    for name, saved in zip(newest.tables, newest.saved, strict=True):
        if num_rows[name] != saved.rows:
            raise CheckpointError(
                f"{newest.where}: table {name!r} has {num_rows[name]} rows; expected {saved.rows}, the number when it "
                "was saved: do not use these rows; use an older checkpoint, and report this"
            )


class RunDirectory:
    """The folder of a run, on this machine or on another file system."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._publisher = open_publisher(path)
        self.folder = self._publisher.folder
        self._this_owner = RunOwner()
        self._has_claim = False  # whether this process has resumed or saved
        self._previous_writer: str | None = None  # the previous writer, the only one from which this process takes over
        self._announced: set[str] = set()  # names under which this process has written
        self._known_parents: dict[str, str | None] = {}  # parent of each version known to be complete
        self._known_best: set[str] = set()  # versions that were the best of the run when they were saved
        self._warned_about: set[str] = set()

    @classmethod
    def of_checkpoint(cls, folder: Folder) -> "tuple[RunDirectory, str] | None":
        """Return the folder of the run that has this folder as a checkpoint, and the checkpoint's name; None if the
        folder is no checkpoint. A link to one is followed, since its parents are beside it."""
        with cls(folder)._read_errors():
            try:
                data = folder.read(MANIFEST, MAX_JSON_BYTES)
            except (FileNotFoundError, NotADirectoryError):
                return None
            folder = open_folder(os.path.realpath(folder)) if folder.is_local else folder
        CheckpointManifest.parse(data, folder).require_name(folder.name)
        return cls(os.fspath(folder).rpartition("/")[0] or "/"), folder.name

    @property
    def name(self) -> str:
        """The last part of its path, which is the same on all machines."""
        return self.folder.name if not self.folder.is_local else os.path.basename(os.path.abspath(self.folder))

    def require_usable(self) -> None:
        """Raise CheckpointError unless this process can write, read, list and delete objects under the URL."""
        try:
            require_usable(self.folder)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder} cannot be used: {error.strerror or error} at {error.filename or self.folder}; expected "
                "a place where this process may write, read, list and delete objects: correct the URL, or the "
                "credentials and the endpoint in the environment of this process"
            ) from error

    @contextmanager
    def new(self, step: int, last: str | None) -> Iterator[Folder]:
        """Yield a folder for a new checkpoint of the step, and remove it unless it is published. Only one save may run
        at a time.

        last: the newest checkpoint that this run saved or resumed; see `require_mine`.
        """
        publisher = self._publisher
        try:
            self._require_no_run()
            with self._locked():
                catalog = self._scan(last)
                self._require_alone()
                self._require_mine(catalog, last)
                self._warn_of_skipped(catalog)
                publisher.remove_hidden(_is_hidden)  # left by saves that were killed
                name = catalog.next(step, "" if self.folder.is_local else self._this_owner.writer[:8]).name
                self._claim(name)
                folder = publisher.begin(name)
                try:
                    yield folder
                except BaseException as error:
                    if self.folder.is_local or isinstance(error, Exception):  # a killed process cannot clean up
                        publisher.discard(folder)
                    if not self.folder.is_local and isinstance(error, SatrapError):
                        self._require_owned()  # else another process has removed what was missing
                    raise
        except OSError as error:
            raise CheckpointError(
                f"step {step}: {self.folder} cannot be written: {error.strerror or error} at "
                f"{error.filename or self.folder}; its checkpoints are unchanged"
            ) from error

    def require_mine(self, last: str | None) -> None:
        """Raise CheckpointError if there is a checkpoint newer than `last`, the newest that this run saved or resumed:
        saves would eventually remove the checkpoints of another run."""
        with self._read_errors():
            self._require_no_run()
            self._require_mine(self._scan(last), last)

    def checksum_of(self, name: str) -> int | None:
        """Return the checksum of a checkpoint's checkpoint.json, or None if there is no such checkpoint."""
        with self._read_errors():
            data = self._read(name)
        return None if data is None else checksum(data)

    @staticmethod
    def name_of(folder: Folder) -> str:
        """Return the name under which `publish` publishes a folder of `new`."""
        return folder.name.split(".", 2)[2] if folder.is_local else folder.name

    def publish(self, folder: Folder, manifest: bytes) -> str:
        """Publish the folder as a checkpoint; return its name. manifest: the bytes of its checkpoint.json."""
        name = self.name_of(folder)
        self._publisher.publish(folder, name, MANIFEST, manifest, self._require_owned)
        return name

    def newest_name(self) -> str | None:
        """Return the name of the newest checkpoint, or None if there is none."""
        with self._read_errors():
            return self._scan(None).newest

    def best_name(self) -> str | None:
        """Return the name of the version that was last saved as the best, or None if there is none."""
        with self._read_errors():
            return self._scan(None).best

    @contextmanager
    def chain_of(self, name: str | None = None) -> Iterator[list[CheckpointManifest]]:
        """Yield a checkpoint and its parents, oldest first; an empty list if the folder has none. From then on this
        process may save, even if there are newer checkpoints.

        name: of the checkpoint, or "best"; None: the newest one."""
        chain: list[CheckpointManifest] = []
        with self._read_errors():
            catalog = self._scan(None)
            owner = self._owner()
            self._has_claim, self._previous_writer = True, None if owner is None else owner.writer
            self._warn_of_skipped(catalog)
            resolved = self._resolved(catalog, name)
            self._announced |= {catalog.newest} if name is not None and catalog.newest is not None else set()
            name = resolved
            while name is not None:
                chain.insert(0, self._entry(name, chain[0] if chain else None))
                name = chain[0].parent
                if name is not None and not catalog.is_older(name, chain[0].folder.name):
                    raise CheckpointError(
                        f"{chain[0].where} names {name!r} as its parent, which is no older checkpoint; expected one "
                        f"with a lower number: remove {chain[0].where} to use an older checkpoint"
                    )
        yield chain

    def remove_beyond(self, keep: int) -> None:
        """Remove old checkpoints, except the parents of those kept. The next save retries removals that fail."""
        try:
            catalog = self._scan(None)
            for name in (*catalog.garbage(), *catalog.removable(keep)):
                self._known_parents.pop(name, None)
                self._publisher.remove(name, MANIFEST)
        except (OSError, SatrapError) as error:
            why = f"{error.strerror or error} at {error.filename}" if isinstance(error, OSError) else str(error)
            _LOG.warning("%s: old checkpoints could not be removed: %s; the next save retries", self.folder, why)

    # -- reading ------------------------------------------------------------------------------------------------------

    def _scan(self, last: str | None) -> Catalog:
        """Scan the folder. A list may lag, so names known from elsewhere are looked up, too: the last one that this
        process has written, and the earlier ones that were complete at the last scan."""
        listed, owner = set(self.folder.names()), self._owner()
        names = (last, owner and owner.announced, self._this_owner.announced)
        used = {*(self._announced & self._known_parents.keys()), *(name for name in names if name)}
        versions = sorted(version for name in listed | used if (version := Version.parse(name)) is not None)
        parents: dict[str, str | None] = {}
        torn = []
        for name in (version.name for version in reversed(versions)):
            if parents and name in self._known_parents:
                parents[name] = self._known_parents[name]
                continue
            data = self._read(name)
            if data is not None and (self.folder.is_local or _is_json(data)):  # a URL may show an object in part
                parents[name], is_best = _parent_and_best(data)
                self._known_best |= {name} if is_best else set()
            elif name in listed:
                torn.append(name)
        self._known_parents = parents
        return Catalog(parents, torn, used, self._known_best)

    def _read(self, name: str) -> bytes | None:
        try:
            return self.folder.read(f"{name}/{MANIFEST}", MAX_JSON_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _entry(self, name: str, child: CheckpointManifest | None) -> CheckpointManifest:
        """Read a checkpoint. child: the checkpoint that has it as its parent."""
        folder, data = self.folder / name, self._read(name)
        if data is None:
            missing = f"{child.where} needs its parent {name!r}" if child else f"{folder} was just removed"
            raise CheckpointError(f"{missing}, which is not in {self.folder}{': copy it there' if child else ''}")
        entry = CheckpointManifest.parse(data, folder)
        entry.require_name(name)
        if child is not None:
            child.require_parent(data)
        return entry

    def _resolved(self, catalog: Catalog, name: str | None) -> str | None:
        """Return the name of the checkpoint that `name` means, or None if the folder has none; raise CheckpointError if
        it has others only."""
        if name is None or (name == _BEST and catalog.newest is None):
            return catalog.newest
        if name == _BEST and catalog.best is not None:
            return catalog.best
        if name not in catalog.parents:
            missing = "no checkpoint that was saved as the best" if name == _BEST else f"no checkpoint {name!r}"
            raise CheckpointError(
                f"{self.folder} has {missing}; it has {sorted(catalog.parents)}: name one of these, or none: the newest"
            )
        return name

    def _require_mine(self, catalog: Catalog, last: str | None) -> None:
        newest = catalog.newest
        if newest is not None and newest not in self._announced and catalog.is_newer(newest, last):
            raise CheckpointError(
                f"{self.folder} holds {newest}, which this run neither saved nor resumed: call resume() first, "
                "or use another folder"
            )

    def _warn_of_skipped(self, catalog: Catalog) -> None:
        for name in set(catalog.skipped) - self._warned_about - self._announced:
            self._warned_about.add(name)
            _LOG.warning(
                f"{self.folder}/{name} has no complete {MANIFEST}: its save or its copy was cut short. It is "
                f"skipped; {catalog.newest or 'no checkpoint'} is the newest before it. "
                f"{'The next save removes it' if name in catalog.removed_later else 'Complete it, or remove it'}"
            )

    # -- ownership ---------------------------------------------------------------------------------------------------

    def _require_no_run(self) -> None:
        if self._publisher.is_locked_by_run():
            raise CheckpointError(
                f"{self.folder} is the --folder of a live satrap run, which keeps it locked; expected another folder "
                f"for checkpoints, such as {self.folder / 'checkpoints'}"
            )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with ExitStack() as stack:
            try:
                stack.enter_context(self._publisher.locked(_LOCK_SECONDS))
            except TimeoutError as error:
                raise CheckpointError(
                    f"{self.folder}: another process has been saving into it for {_LOCK_SECONDS:g} s; terminate "
                    "it if it is suspended, or belongs to an earlier launch of this run"
                ) from error
            yield

    def _owner(self) -> RunOwner | None:
        with suppress(FileNotFoundError):
            return RunOwner.from_json(self.folder.read(OWNER, MAX_JSON_BYTES), f"{self.folder}/{OWNER}")
        return None

    def _require_alone(self) -> None:
        """Raise CheckpointError if another process has saved here since this one resumed or saved."""
        owner = self._owner()
        is_known = owner is None or owner.writer in (self._this_owner.writer, self._previous_writer)
        if self._has_claim and not is_known:
            raise self._two_owners(owner)

    def _claim(self, name: str) -> None:
        """Record this process as the owner, and the name of its next checkpoint."""
        self._this_owner = replace(self._this_owner, announced=name)
        self.folder.write(OWNER, self._this_owner.to_json())
        self._has_claim, self._previous_writer = True, None
        self._announced.add(name)

    def _require_owned(self) -> None:
        if (owner := self._owner()) != self._this_owner:
            raise self._two_owners(owner)

    def _two_owners(self, owner: RunOwner | None) -> CheckpointError:
        other = f"{owner} saves into it" if owner else f"its {OWNER} was removed"
        return CheckpointError(
            f"{self.folder}: {other}, and so did this process, {self._this_owner}, which now stops saving here; "
            "terminate one of the two, and give each run its own folder"
        )

    @contextmanager
    def _read_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.folder} cannot be read: {error.strerror or error} at {error.filename}"
            ) from error


def _is_hidden(name: str) -> bool:
    """Return whether the name is that of a folder that a killed save has left."""
    dot, token, rest = (*name.split(".", 2), "", "")[:3]
    return not dot and len(token) == 8 and Version.parse(rest) is not None


def _is_json(data: bytes) -> bool:
    """Return whether the data is complete JSON; data that was cut short lacks the brace that closes the object."""
    try:
        parse_json(data)
    except ValueError:
        return False
    return True


def _parent_and_best(data: bytes) -> tuple[str | None, bool]:
    """Return the parent's name, and whether the version was the best; (None, False) if the file is damaged: removing
    such a checkpoint is up to the user."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        content = parse_json(data)
        parent = content["parent"]
        name = None if parent is None else parent["name"]
        return name if isinstance(name, str) else None, content.get("is_best") is True
    return None, False
