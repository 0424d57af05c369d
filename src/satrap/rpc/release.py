"""Compares the releases of two processes, which have to be the same: messages and saved state may differ otherwise.

The first answer of a server or worker has its `RELEASE`, so the caller knows before it changes anything there.
"""

from importlib.metadata import version

from satrap.errors import ConfigError

RELEASE = version("satrap")
"""The release of this process."""


def require_same_release(release: object, peer: str) -> None:
    """Raise ConfigError unless the peer has this process's release.

    release: what its answer has as "release".
    peer: its role and address.
    """
    if release != RELEASE:
        raise ConfigError(
            f"{peer} runs satrap {release}, and this process satrap {RELEASE}; install the same release everywhere and "
            "start both again"
        )
