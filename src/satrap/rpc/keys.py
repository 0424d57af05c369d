"""The keys of a cluster: two files, one for all servers and one for all clients, which authenticate both sides.

Each file holds a secret key, its public key, and the public key of the other side (CURVE: Curve25519, as in ZeroMQ). A
server accepts only that client key, a client only that server key, and traffic is encrypted. A file is readable by its
owner only and is created atomically. It is refused if other users may read it or if it is damaged. A file of root may
be readable by its group, too: so Kubernetes mounts a Secret for a process that is not root.
"""

import errno
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from satrap.config.durable import put_on_disk, write_file
from satrap.config.location import local_path
from satrap.config.regular_file import open_regular
from satrap.errors import ConfigError

_FORMAT = "satrap key 1"
_FIELDS = ("format", "role", "secret", "public", "peer")
_KEY_CHARACTERS = 40  # Z85 of 32 bytes
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # on file systems without hard links
ROLES = ("server", "client")


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """The keys of one side, each as 40 characters of Z85."""

    role: str
    """"server" or "client"."""
    secret: bytes = field(repr=False)
    public: bytes
    peer: bytes
    """The public key of the other side."""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Keys":
        """Return the keys in a file that `satrap keys` wrote; ConfigError if it cannot be trusted."""
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"keys is {path!r}; expected the path of a key file")
        path = local_path(path, "keys")
        try:
            with open_regular(path) as file:
                if problem := _distrust(os.fstat(file.fileno()), os.geteuid()):
                    raise ConfigError(f"{path}: {problem}")
                text = file.read(4096)
        except IsADirectoryError:
            raise ConfigError(f"keys is '{path}', a folder; expected a key file in it, such as client.key") from None
        except OSError as error:
            raise ConfigError(f"{path}: the key cannot be read: {error}; create keys with `satrap keys DIR`") from None
        return cls.parse(text, path)

    @classmethod
    def draw(cls) -> tuple["Keys", "Keys"]:
        """Return new keys of the servers and of their clients."""
        server, client = zmq.curve_keypair(), zmq.curve_keypair()
        return (
            cls(role="server", public=server[0], secret=server[1], peer=client[0]),
            cls(role="client", public=client[0], secret=client[1], peer=server[0]),
        )

    @classmethod
    def parse(cls, text: bytes, where: object = "the keys") -> "Keys":
        """Return the keys in the content of a key file. where: its path, for the error."""
        damaged = ConfigError(f"{where}: not a key file, or a damaged one; copy it again, or create new keys")
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
        return cls(role=values[1], secret=secret, public=public, peer=peer)

    def text(self) -> bytes:
        """Return the content of a key file."""
        values = [_FORMAT, self.role, *(key.decode() for key in (self.secret, self.public, self.peer))]
        return (
            json.dumps(dict(zip(_FIELDS, values, strict=True)) | {"checksum": _checksum(values)}, indent=1) + "\n"
        ).encode()

    def require_role(self, role: str) -> None:
        if self.role != role:
            raise ConfigError(f"found the keys of a {self.role}, expected those of a {role}; read {role}.key")


def create_keys(folder: str | Path) -> list[Path]:
    """Write server.key and client.key into the folder and return their paths. Creates the folder, for this user
    alone, if it is missing. Never replaces a file."""
    folder = local_path(folder, "the folder of the keys")
    paths = [folder / f"{role}.key" for role in ROLES]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        for path in paths:
            if os.path.lexists(path):
                raise ConfigError(f"{path} already exists; choose another folder, or remove both key files")
        for path, keys in zip(paths, Keys.draw(), strict=True):
            _write(path, keys)
    except OSError as error:
        raise ConfigError(
            f"keys cannot be written to {folder}: {error}; choose a folder that can be written to"
        ) from None
    return paths


def _distrust(status: os.stat_result, user: int) -> str | None:
    """Return why this user cannot trust a key file with that status; None: the user can."""
    mode = status.st_mode & 0o777
    if status.st_uid not in (user, 0):
        return f"it belongs to user {status.st_uid}, who may know its secret; create new keys"
    if mode & (0o037 if status.st_uid == 0 else 0o077):
        return (
            f"other users may read or change it (mode {mode:o}); create new keys, or chmod 600 it. Only a file of root "
            "may be readable by its group, too (mode 440), as a Kubernetes Secret with defaultMode 0440 is"
        )
    return None


def _write(path: Path, keys: Keys) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_file(temporary, keys.text(), 0o600)
        os.link(temporary, path)  # unlike a rename, it replaces no file
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        write_file(path, keys.text(), 0o600)  # not atomic: what a kill cut short is refused by its checksum
    finally:
        temporary.unlink(missing_ok=True)
    put_on_disk(path.parent)


def _checksum(values: list[str]) -> str:
    return hashlib.sha256("\n".join(values).encode()).hexdigest()
