"""The keys of a cluster: two files, one for all servers and one for all clients, with which both know each other.

Each file holds its own secret key, its own public key and the public key of the other side (CURVE: Curve25519, as
ZeroMQ does it). A server lets in that one client key; a client goes on only with that one server key; what they say is
encrypted. A file is readable by its owner only, complete whenever it is visible, and refused if others may read it or
it is damaged.
"""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from satrap.errors import ConfigError

_FORMAT = "satrap key 1"
_FIELDS = ("format", "role", "secret", "public", "peer")
_KEY_CHARACTERS = 40  # Z85 of 32 bytes
ROLES = ("server", "client")


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """What one side holds, each key as 40 characters of Z85."""

    role: str
    """"server" or "client"."""
    secret: bytes = field(repr=False)
    public: bytes
    peer: bytes
    """The public key of the other side."""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Keys":
        """The keys in a file that `satrap keys` wrote, or ConfigError."""
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"keys is {path!r}; wanted the path of a key file")
        try:
            with open(path, "rb") as file:
                found = os.fstat(file.fileno())
                mode = found.st_mode & 0o777
                if found.st_uid not in (os.geteuid(), 0):
                    raise ConfigError(f"{path}: user {found.st_uid} made it, who has its secret; make new keys")
                if mode & 0o077:
                    raise ConfigError(f"{path}: others may read it (mode {mode:o}); make new keys, or chmod 600 it")
                text = file.read(4096)
        except OSError as error:
            raise ConfigError(f"{path}: the key cannot be read: {error}; `satrap keys FOLDER` makes keys") from None
        return _parse(path, text)

    def require_role(self, role: str) -> None:
        if self.role != role:
            raise ConfigError(f"these are the keys of a {self.role}; wanted those of a {role}: read {role}.key")


def make_keys(folder: str | Path) -> list[Path]:
    """Writes server.key and client.key into the folder, which is made if need be, for this user alone. Never replaces
    a file."""
    folder = Path(folder)
    paths = [folder / f"{role}.key" for role in ROLES]
    server, client = zmq.curve_keypair(), zmq.curve_keypair()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        for path in paths:
            if os.path.lexists(path):
                raise ConfigError(f"{path} is there already; name another folder, or remove both files")
        for path, own, other in ((paths[0], server, client), (paths[1], client, server)):
            _write(path, Keys(role=path.stem, public=own[0], secret=own[1], peer=other[0]))
    except OSError as error:
        raise ConfigError(f"keys cannot be written to {folder}: {error}; name a folder that can be written") from None
    return paths


def _parse(path: object, text: bytes) -> Keys:
    damaged = ConfigError(f"{path}: not a key file, or a damaged one; copy it again, or make new keys")
    try:
        data = json.loads(text)
        values = [data[name] for name in _FIELDS]
        if data["checksum"] != _checksum(values) or values[0] != _FORMAT or values[1] not in ROLES:
            raise damaged
        secret, public, peer = (value.encode("ascii") for value in values[2:])
        if {len(secret), len(public), len(peer)} != {_KEY_CHARACTERS} or zmq.curve_public(secret) != public:
            raise damaged
    except (ValueError, KeyError, TypeError, AttributeError, zmq.ZMQError, RecursionError):
        raise damaged from None
    return Keys(role=values[1], secret=secret, public=public, peer=peer)


def _write(path: Path, keys: Keys) -> None:
    values = [_FORMAT, keys.role, *(key.decode() for key in (keys.secret, keys.public, keys.peer))]
    text = json.dumps(dict(zip(_FIELDS, values, strict=True)) | {"checksum": _checksum(values)}, indent=1) + "\n"
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(file, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(file)
        os.link(unfinished, path)  # unlike a rename it replaces nothing
    finally:
        os.unlink(unfinished)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _checksum(values: list[str]) -> str:
    return hashlib.sha256("\n".join(values).encode()).hexdigest()
