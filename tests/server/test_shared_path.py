"""A path at which no shared-memory file can be created is refused when the server starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from satrap.errors import ConfigError
from satrap.server.server import Server


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/no/such/folder/rows", "No such file or directory"),
        ("/proc/rows", "No such file or directory"),
        ("/dev/null/rows", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("a\0b", "embedded null byte"),
    ],
)
def test_an_unusable_path_is_refused(path: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"no shared-memory file can be created there: {why}; expected a file in a w"):
        Server(shared=path)


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shared is '' \(str\); expected the path of a local file"):
        Server(shared="")


def test_a_usable_path_is_left_free(tmp_path: Path) -> None:
    Server(shared=tmp_path / "rows")
    assert list(tmp_path.iterdir()) == []
