"""The folder of a run: which checkpoints are in it, how one becomes visible, which go, and who saves into it.

Knows checkpoint.json, and nothing of what else a checkpoint holds: `checkpoint` fills its folder. `storage` reads and
writes, here or on any fsspec system; `catalog` decides which checkpoints count and go; `run_owner` says who saves.
A save in steps: 1. look, and refuse another run's folder; 2. write the owner with the name to come; 3. fill a folder of
this machine; 4. write all of it but checkpoint.json; 5. look whether this process is still the owner, and write
checkpoint.json (where there is a rename, that does all of 4 and 5 at once); 6. remove what is beyond `keep`.
"""

import json
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from satrap.checkpoint.catalog import Catalog, Version
from satrap.checkpoint.run_owner import OWNER, RunOwner
from satrap.checkpoint.storage import open_storage
from satrap.data.inputs import Position
from satrap.errors import CheckpointError, SatrapError
from satrap.table.snapshot.manifest import FILE_NAME, Manifest, checksum
from satrap.table.snapshot.saved_table import SavedTable

MANIFEST, STATE, TABLES = "checkpoint.json", "state.safetensors", "tables"
_FORMAT, _FORMAT_VERSION, _UNBOUND_VERSION = "satrap-checkpoint", 3, 2
_LOCK_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """One complete checkpoint, as its checkpoint.json says."""

    folder: Path
    """A folder of this machine that holds it, or a copy of it."""
    where: str
    """Names it in messages: its path or URL."""
    name: str | None
    """What its folder was called. None: an earlier Satrap did not note it."""
    step: int
    parent: str | None
    parent_crc32c: int | None
    """Checksum of the parent's checkpoint.json. None: no parent, or an earlier Satrap did not note it."""
    positions: tuple[Position | None, ...]
    """Of each trainer's source, in the order of their ranks."""
    source: Mapping[str, Any] | None
    """The signature of the source that the positions are of."""
    tables: tuple[str, ...]
    saved: tuple[SavedTable, ...] | None
    """Which snapshots belong to it, in the order of `tables`. None: an earlier Satrap did not note it."""
    state_crc32c: int

    @classmethod
    def parse(cls, data: bytes, folder: Path, where: str) -> "CheckpointManifest":
        """Reads the bytes of a checkpoint.json; CheckpointError if it is torn or of another format."""
        path = f"{where}/{MANIFEST}"
        try:
            content = json.loads(data)
            body = {key: value for key, value in content.items() if key != "crc32c"}
            version = content["format_version"]
            if content["format"] != _FORMAT or version not in (_FORMAT_VERSION, _UNBOUND_VERSION):
                raise CheckpointError(
                    f"{path} is of format {content['format']!r} version {version!r}; "
                    f"this Satrap reads {_FORMAT!r} version {_UNBOUND_VERSION} or {_FORMAT_VERSION}"
                )
            if content["crc32c"] != checksum(_canonical(body)):
                raise CheckpointError(f"{path} is damaged: its checksum does not match; remove {where} to use an older")
            tables, parent = content["tables"], content["parent"]
            bound = version != _UNBOUND_VERSION
            return cls(
                folder=folder,
                where=where,
                name=content.get("name"),
                step=content["step"],
                parent=parent["name"] if bound and parent is not None else parent,
                parent_crc32c=parent["crc32c"] if bound and parent is not None else None,
                positions=tuple(None if at is None else Position.from_dict(at) for at in content["positions"]),
                source=content["source"],
                tables=tuple(table["name"] for table in tables) if bound else tuple(tables),
                saved=tuple(SavedTable.from_dict(table) for table in tables) if bound else None,
                state_crc32c=content["state_crc32c"],
            )
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); remove {where} to use an older one") from error

    def to_json(self) -> bytes:
        """Returns the bytes of checkpoint.json."""
        body: dict[str, Any] = {
            "format": _FORMAT,
            "format_version": _FORMAT_VERSION,
            "name": self.name,
            "step": self.step,
            "parent": None if self.parent is None else {"name": self.parent, "crc32c": self.parent_crc32c},
            "positions": [None if at is None else at.to_dict() for at in self.positions],
            "source": self.source,
            "tables": [
                {"name": name, **saved.to_dict()} for name, saved in zip(self.tables, self.saved or (), strict=True)
            ],
            "state_crc32c": self.state_crc32c,
        }
        return _canonical(body | {"crc32c": checksum(_canonical(body))})

    def require_name(self, name: str) -> None:
        """Raises unless this is the checkpoint that was saved by that name."""
        if self.name not in (None, name):
            raise CheckpointError(
                f"{self.where} was saved as {self.name}, and its folder is called {name}: give it that name again, or "
                f"remove {self.where}"
            )

    def require_parent(self, parent: bytes) -> None:
        """Raises unless this is the checkpoint.json of the parent that it was saved after."""
        if self.parent_crc32c is not None and checksum(parent) != self.parent_crc32c:
            raise CheckpointError(
                f"{self.where} was saved after another checkpoint called {self.parent}: the {MANIFEST} there has the "
                f"crc32c {checksum(parent)}; wanted {self.parent_crc32c}: put that one back, or remove {self.where}"
            )

    def keys(self, read: Any) -> Iterator[str]:
        """Names all objects that belong to it. read(key) returns a manifest's bytes."""
        yield STATE
        for i, table in enumerate(self.saved or ()):
            for part in table.parts:
                folder = f"{table_key(i)}/{part.folder}".rstrip("/")
                yield f"{folder}/{FILE_NAME}"
                manifest = Manifest.from_json(read(f"{folder}/{FILE_NAME}"), f"{self.where}/{folder}/{FILE_NAME}")
                yield from (f"{folder}/{file.name}" for file in manifest.files)


def table_key(number: int) -> str:
    """Where a checkpoint holds the table of that number."""
    return f"{TABLES}/{number}"


def table_folders(chain: Sequence[CheckpointManifest]) -> dict[str, list[Path]]:
    """Returns of each table the folders to restore it from, oldest first. Raises unless each of them holds what its
    checkpoint was saved with.

    chain: the newest checkpoint and its parents, oldest first.
    """
    found: dict[str, list[Path]] = {name: [] for name in chain[-1].tables}
    for entry in chain:
        if sorted(entry.tables) != sorted(found):
            raise CheckpointError(
                f"{entry.where} has tables {sorted(entry.tables)}, and {chain[-1].where}, which continues it, has "
                f"{sorted(found)}: one of the two comes from another run; put the right one back"
            )
        for i, name in enumerate(entry.tables):
            found[name].append(entry.folder / table_key(i))
        for i, saved in enumerate(entry.saved or ()):
            saved.require(entry.folder / table_key(i), entry.where)
    return found


def require_rows(chain: Sequence[CheckpointManifest], found: Mapping[str, int]) -> None:
    """Raises unless each table that was restored from there has as many rows as when it was saved. Warns if an earlier
    Satrap saved it, which did not note what `table_folders` and this check.

    found: how many rows each table has, by name.
    """
    newest = chain[-1]
    for name, saved in zip(newest.tables, newest.saved or (), strict=newest.saved is not None):
        if found[name] != saved.rows:
            raise CheckpointError(
                f"{newest.where}: table {name!r} has {found[name]} rows now and had {saved.rows} when it was saved: do "
                "not use these rows; take an older checkpoint, and report this"
            )
    if any(entry.saved is None for entry in chain):
        warnings.warn(
            f"{newest.where} was saved by an earlier Satrap, which did not note which tables, parts and parents belong "
            "together: that was not checked. The next full save notes it",
            stacklevel=3,
        )


class RunDirectory:
    """The folder of a run, here or on another file system."""

    def __init__(self, path: str) -> None:
        self._storage = open_storage(path)
        self._me = RunOwner()
        self._looked = False  # whether this process has resumed or saved
        self._before: str | None = None  # who saved here until then: this process takes over from that one alone
        self._announced: set[str] = set()  # the names that this process has written under
        self._parents: dict[str, str | None] = {}  # of versions known to be whole
        self._said: set[str] = set()

    @property
    def local(self) -> Path:
        """The folder itself, or the one in which checkpoints are put together for another file system."""
        return self._storage.staging

    @property
    def name(self) -> str:
        """Its last part, the same wherever the folder is seen from."""
        return Path(self._storage.url.rpartition("://")[2]).absolute().name

    @contextmanager
    def new(self, step: int, last: str | None) -> Iterator[Path]:
        """A folder for a checkpoint of the step; removed unless it is published. One save at a time.

        last: the newest that this run saved or resumed; see `require_mine`.
        """
        storage = self._storage
        try:
            with self._errors(), self._locked():
                catalog = self._look(last)
                self._require_alone()
                self._require_mine(catalog, last)
                self._say_passed_over(catalog)
                for left in storage.staging.iterdir():  # of saves that were killed
                    if _is_hidden(left.name):
                        shutil.rmtree(left, ignore_errors=True)
                name = catalog.next(step, "" if storage.is_atomic else self._me.writer[:8]).name
                self._claim(name)
                folder = storage.staging / f".{secrets.token_hex(4)}.{name}"
                try:
                    folder.mkdir()
                    yield folder
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            raise CheckpointError(
                f"step {step}: {storage.url} cannot be written: {error.strerror or error} at "
                f"{error.filename or storage.url}; the checkpoints there are as they were"
            ) from error

    def require_mine(self, last: str | None) -> None:
        """Raises if there is a checkpoint newer than `last`, the newest that this run saved or resumed: saving would
        at last remove another run."""
        with self._reading():
            self._require_mine(self._look(last), last)

    def checksum_of(self, name: str) -> int | None:
        """The checksum of a checkpoint's checkpoint.json; None: there is no such checkpoint."""
        data = self._read(name)
        return None if data is None else checksum(data)

    @staticmethod
    def name_of(folder: Path) -> str:
        """What a folder of `new` will be called."""
        return folder.name.split(".", 2)[2]

    def publish(self, folder: Path) -> str:
        """Makes the folder a checkpoint; returns its name."""
        name = self.name_of(folder)
        try:
            self._storage.publish(folder, name, MANIFEST, self._require_owned)
        except Exception:
            if not self._storage.is_atomic:  # what cannot be removed goes when there is a newer one
                with suppress(Exception):
                    self._storage.remove(name, MANIFEST)
            raise
        return name

    def newest_name(self) -> str | None:
        """The name of the newest checkpoint; None if there is none."""
        with self._reading():
            return self._look(None).newest

    @contextmanager
    def newest(self) -> Iterator[list[CheckpointManifest]]:
        """The newest checkpoint and its parents, oldest first, in folders of this machine; empty if there is none."""
        chain: list[CheckpointManifest] = []
        try:
            with self._errors():
                with self._reading():
                    catalog = self._look(None)
                    owner = self._owner()
                    self._looked, self._before = True, None if owner is None else owner.writer
                    self._say_passed_over(catalog)
                    name = catalog.newest
                    while name is not None:
                        chain.insert(0, self._entry(name, chain[0] if chain else None))
                        name = chain[0].parent
                yield chain
        finally:
            self._storage.drop_copies()

    def forget_beyond(self, keep: int) -> None:
        """Removes old checkpoints, but no parent of one that stays. What cannot be removed is tried again next time."""
        try:
            catalog = self._look(None)
            for name in (*catalog.garbage(), *catalog.removable(keep)):
                self._parents.pop(name, None)
                self._storage.remove(name, MANIFEST)
        except (OSError, SatrapError) as error:
            why = f"{error.strerror or error} at {error.filename}" if isinstance(error, OSError) else str(error)
            warnings.warn(
                f"{self._storage.url}: old checkpoints could not be removed: {why}; the next save tries again",
                stacklevel=2,
            )

    # -- inside ------------------------------------------------------------------------------------------------------

    def _look(self, last: str | None) -> Catalog:
        """Finds out what is there now. A list may lag, so names that are known otherwise are looked up, too."""
        listed, owner = set(self._storage.names()), self._owner()
        used = {*self._announced, *(each for each in (last, owner and owner.announced) if each)}
        versions = sorted(version for name in listed | used if (version := Version.parse(name)) is not None)
        parents: dict[str, str | None] = {}
        torn = []
        for name in (version.name for version in reversed(versions)):
            if parents and name in self._parents:
                parents[name] = self._parents[name]
                continue
            data = self._read(name)
            if data is not None and (self._storage.is_atomic or _is_json(data)):
                parents[name] = _parent(data)
            elif name in listed:
                torn.append(name)
        self._parents = parents
        return Catalog(parents, torn, used)

    def _read(self, name: str) -> bytes | None:
        try:
            return self._storage.read(f"{name}/{MANIFEST}")
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _entry(self, name: str, child: CheckpointManifest | None) -> CheckpointManifest:
        """Reads a checkpoint, and copies it if it is on another machine. child: the checkpoint that names it as its
        parent."""
        where, data = f"{self._storage.url}/{name}", self._read(name)
        if data is None:
            needed = f"{child.where} needs its parent {name!r}" if child else f"{where} was just removed"
            raise CheckpointError(f"{needed}, which is not in {self._storage.url}")
        entry = CheckpointManifest.parse(data, Path(), where)
        entry.require_name(name)
        if child is not None:
            child.require_parent(data)
        if entry.saved is None:
            keys: Iterator[str] = iter(self._storage.keys(name))
        else:
            keys = entry.keys(lambda key: self._storage.read(f"{name}/{key}"))
        return replace(entry, folder=self._storage.local_copy(name, keys))

    def _require_mine(self, catalog: Catalog, last: str | None) -> None:
        newest = catalog.newest
        if newest is not None and newest not in self._announced and catalog.is_newer(newest, last):
            raise CheckpointError(
                f"{self._storage.url} holds {newest}, which this run neither saved nor resumed: call resume() first, "
                "or name another folder"
            )

    def _say_passed_over(self, catalog: Catalog) -> None:
        for name in set(catalog.passed_over) - self._said - self._announced:
            self._said.add(name)
            warnings.warn(
                f"{self._storage.url}/{name} has no whole {MANIFEST}: its save was cut short, or part of it copied. "
                f"It is passed over; {catalog.newest or 'no checkpoint'} is the newest before it. "
                f"{'The next save removes it' if name in catalog.swept_later else 'Complete it, or remove it'}",
                stacklevel=4,
            )

    # Whose it is.

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with ExitStack() as stack:
            try:
                stack.enter_context(self._storage.locked(_LOCK_SECONDS))
            except TimeoutError as error:
                raise CheckpointError(
                    f"{self._storage.url}: another process has been saving into it for {_LOCK_SECONDS:g} s; end it if "
                    "it is stopped, or one that this run has replaced"
                ) from error
            yield

    def _owner(self) -> RunOwner | None:
        with suppress(FileNotFoundError):
            return RunOwner.from_json(self._storage.read(OWNER), f"{self._storage.url}/{OWNER}")
        return None

    def _require_alone(self) -> None:
        """Raises if another process has begun to save here since this one resumed or saved."""
        found = self._owner()
        if self._looked and found is not None and found.writer not in (self._me.writer, self._before):
            raise self._two(found)

    def _claim(self, name: str) -> None:
        """Writes that this process saves here, under that name."""
        self._me = replace(self._me, announced=name)
        self._storage.write(OWNER, self._me.to_json())
        self._looked, self._before = True, None
        self._announced.add(name)

    def _require_owned(self) -> None:
        if (found := self._owner()) is None or (found.writer, found.announced) != (self._me.writer, self._me.announced):
            raise self._two(found)

    def _two(self, found: RunOwner | None) -> CheckpointError:
        other = f"{found} saves into it now" if found else f"its {OWNER} was removed"
        return CheckpointError(
            f"{self._storage.url}: {other}, and so did this one, {self._me}: this one saves no more here; end "
            "one of the two, and give each run a folder of its own"
        )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self._storage.url} cannot be read: {error.strerror or error} at {error.filename}"
            ) from error

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Says in errors that name a copy what it is a copy of."""
        try:
            yield
        except SatrapError as error:
            if str(self._storage.staging) != self._storage.url:
                error.add_note(f"{self._storage.staging} holds copies of what is in {self._storage.url}")
            raise


def _is_hidden(name: str) -> bool:
    """Whether it is what a save that was killed has left."""
    dot, token, rest = (*name.split(".", 2), "", "")[:3]
    return not dot and len(token) == 8 and Version.parse(rest) is not None


def _is_json(data: bytes) -> bool:
    """Returns False if it was cut short: the last byte closes the object."""
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


def _parent(data: bytes) -> str | None:
    """Reads the parent's name; None if the file is damaged: to remove such a checkpoint is the user's decision."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        parent = json.loads(data)["parent"]
        return parent if isinstance(parent, str) else str(parent["name"])
    return None


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, indent=1).encode()
