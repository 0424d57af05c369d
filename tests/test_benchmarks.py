"""The benchmark's command line where it should not begin. Nothing is measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks import store


def test_without_satrap_nothing_is_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def measure(*_: Any) -> list[str]:
        raise AssertionError("a case was begun")

    monkeypatch.setattr(store, "imports", lambda python, module: module != "satrap.store")
    monkeypatch.setattr(store, "measure", measure)
    assert store.main(["--quick", "--peers-home", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert "satrap does not import" in printed.err and "make setup" in printed.err and printed.out == ""
