"""File descriptors: raises the limit of this process, and checks that there are enough before they are opened.

ZeroMQ opens the connection of a socket in another thread. If there is no descriptor for it, the socket stays without a
connection and no error says why.
"""

import os
import resource

from satrap.errors import ConfigError

_MAX_FILES = 1 << 16  # enough, and some programs take long if there may be millions
FILES_PER_CONNECTION = 2
"""Descriptors of a channel: those of its socket and of its connection. It has two more during a handshake."""


def raise_limit() -> None:
    """Raise the soft limit of descriptors to the hard one, at most to 65,536. Child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def require_files(num_needed: int, what: str) -> None:
    """Raise the limit; ConfigError unless this process may open so many more descriptors. what: what they are for."""
    raise_limit()
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and num_open + num_needed > limit:
        raise ConfigError(
            f"{what} need {num_needed} file descriptors besides the {num_open} that this process has open; its limit "
            f"is {limit} (hard limit: {hard}): raise the hard limit to {num_open + num_needed} or more, with `ulimit "
            "-Hn` as root, with LimitNOFILE= of its systemd unit or with --ulimit of its container"
        )
