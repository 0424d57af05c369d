"""Addresses: "tcp://host:port", resolved to what is bound, and "ipc:///folder/name", the Unix socket at that path."""

import os
import re
import socket
from pathlib import Path

from satrap.errors import ConfigError

_TCP = re.compile(r"tcp://(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>[^:/\[\]]+)):(?P<port>\d{1,5}|\*)")
_IPC = "ipc://"
_EXAMPLE = (
    "tcp://10.0.0.5:5555, tcp://[::1]:5555, tcp://*:0 (any address of this machine, any free port), or for this "
    "machine alone ipc:///run/satrap/0 (a Unix socket; ipc:///run/satrap/* is any free name)"
)
MOST_PATH_BYTES = 107
"""Of a Unix socket's path: what the kernel takes."""


def is_unix(address: str) -> bool:
    """Whether this is the address of a Unix socket."""
    return isinstance(address, str) and address.startswith(_IPC)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of a TCP address; 0 is any free port."""
    found = _TCP.fullmatch(address) if isinstance(address, str) else None
    if found is None or (found["port"] != "*" and int(found["port"]) > 0xFFFF):
        raise ConfigError(f"the address is {address!r}; wanted e.g. {_EXAMPLE}")
    return found["v6"] or found["host"], 0 if found["port"] == "*" else int(found["port"])


def join_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def unix_path(address: str) -> Path:
    """The path of a Unix socket's address; the name "*" is any free one."""
    text = address.removeprefix(_IPC)
    path = Path(text)
    if not path.is_absolute() or "\0" in text or path.name in ("", "..") or len(path.parts) < 3:
        raise ConfigError(f"the address is {address!r}; wanted a name in a folder, from the root, e.g. {_EXAMPLE}")
    if (size := len(os.fsencode(path))) > MOST_PATH_BYTES:
        raise ConfigError(
            f"the address is {address!r}, a path of {size} bytes; a Unix socket's has at most {MOST_PATH_BYTES}: "
            "choose a folder with a shorter name"
        )
    return path


def join_unix(path: Path) -> str:
    return f"{_IPC}{path}"


def resolve_host(host: str) -> str:
    """The host as a number, the fourth version of IP before the sixth; "*" is every address."""
    if host == "*":
        return "0.0.0.0"
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the host {host!r} cannot be resolved ({error}); give a name or number that can") from None
    numbers = [str(place[0]) for family, *_, place in found if family == socket.AF_INET]
    return (numbers or [str(place[0]) for family, *_, place in found if family == socket.AF_INET6])[0]


def is_wildcard(number: str) -> bool:
    return number in ("0.0.0.0", "::")
