"""Addresses: "tcp://host:port", resolved to what is bound, and "ipc:///folder/name", the path of a Unix socket."""

import os
import re
import socket
from pathlib import Path

from satrap.errors import ConfigError

_TCP = re.compile(r"tcp://(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>[^:/\[\]]+)):(?P<port>\d{1,5}|\*)")
_IPC = "ipc://"
_EXAMPLE = (
    "tcp://10.0.0.5:5555, tcp://[::1]:5555, tcp://*:0 (all addresses of this machine, any free port), or within one "
    "machine ipc:///run/satrap/0 (a Unix socket; ipc:///run/satrap/* chooses a free name)"
)
MAX_PATH_BYTES = 107
"""The longest path of a Unix socket that the kernel accepts."""


def is_unix(address: str) -> bool:
    return isinstance(address, str) and address.startswith(_IPC)


def split_address(address: str) -> tuple[str, int]:
    """Return the host and port of a TCP address; port 0 is any free port."""
    match = _TCP.fullmatch(address) if isinstance(address, str) else None
    if match is None or (match["port"] != "*" and int(match["port"]) > 0xFFFF):
        raise ConfigError(f"the address is {address!r}; expected e.g. {_EXAMPLE}")
    return match["v6"] or match["host"], 0 if match["port"] == "*" else int(match["port"])


def join_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def unix_path(address: str) -> Path:
    """Return the path of a Unix socket's address; the name "*" is any free one."""
    text = address.removeprefix(_IPC)
    path = Path(text)
    if not path.is_absolute() or "\0" in text or path.name in ("", "..") or len(path.parts) < 3:
        raise ConfigError(
            f"the address is {address!r}; expected an absolute path with a name in a folder, e.g. {_EXAMPLE}"
        )
    if (size := len(os.fsencode(path))) > MAX_PATH_BYTES:
        raise ConfigError(
            f"the address is {address!r}, a path of {size} bytes; a Unix socket's path has at most {MAX_PATH_BYTES}: "
            "choose a folder with a shorter path"
        )
    return path


def join_unix(path: Path) -> str:
    return f"{_IPC}{path}"


def resolve_host(host: str) -> str:
    """Return the numeric address of a host, preferring IPv4 to IPv6. "*" is every address, of IPv6 too if the system
    has it."""
    if host == "*":
        return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    try:
        results = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"the host {host!r} cannot be resolved ({error}); give another name or a numeric address"
        ) from None
    numbers = [str(address[0]) for family, *_, address in results if family == socket.AF_INET]
    return (numbers or [str(address[0]) for family, *_, address in results if family == socket.AF_INET6])[0]


def advertised_address(advertise: str | None, bound: str) -> str:
    """Return the address that other processes should call a service by. advertise: what the user chose, whose port 0
    stands for the port of `bound`; None: `bound` itself, the address that the service listens at."""
    if advertise is None:
        return bound
    host, port = split_address(advertise)
    if is_unix(bound):
        raise ConfigError(
            f"advertise is {advertise!r}, and the service listens at {bound}; expected a tcp:// address there"
        )
    if host == "*" or is_wildcard(host):
        raise ConfigError(f"advertise is {advertise!r}, which names no machine; expected e.g. tcp://server-0.jobs:5555")
    return join_address(host, port or split_address(bound)[1])


def is_wildcard(number: str) -> bool:
    return number in ("0.0.0.0", "::")
