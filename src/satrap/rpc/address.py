"""Addresses as "tcp://host:port", resolved to what is bound, and whether they are of this machine only."""

import ipaddress
import re
import socket

from satrap.errors import ConfigError

_FORM = re.compile(r"tcp://(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>[^:/\[\]]+)):(?P<port>\d{1,5}|\*)")
_EXAMPLE = "tcp://127.0.0.1:5555, tcp://[::1]:5555 or tcp://*:0 (any address of this machine, any free port)"


def split_address(address: str) -> tuple[str, int]:
    """Host and port; 0 is any free port."""
    found = _FORM.fullmatch(address) if isinstance(address, str) else None
    if found is None or (found["port"] != "*" and int(found["port"]) > 0xFFFF):
        raise ConfigError(f"the address is {address!r}; wanted e.g. {_EXAMPLE}")
    return found["v6"] or found["host"], 0 if found["port"] == "*" else int(found["port"])


def join_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


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


def is_loopback(number: str) -> bool:
    return ipaddress.ip_address(number).is_loopback


def is_wildcard(number: str) -> bool:
    return ipaddress.ip_address(number).is_unspecified


def require_loopback(address: str, number: str, what: str) -> None:
    """Without keys nothing goes over a network: whoever can reach it could read and change it."""
    if not is_loopback(number):
        raise ConfigError(
            f"{address} is not of this machine only, and there are no keys: {what} without keys is for loopback "
            "(tcp://127.0.0.1:0). Make keys with `satrap keys FOLDER` and give them, as keys= or --keys"
        )
