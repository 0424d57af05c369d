"""The state of a run on disk: what is written is read back, and a damaged file is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from satrap.errors import ConfigError
from satrap.launch.run_state import RunState

RUN_STATE = RunState(name="test")


def test_a_damaged_run_state_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert RunState.read(file) is None
    trainers_know = replace(RUN_STATE, servers=("", "tcp://127.0.0.1:2"), launch=RUN_STATE.launch + 1)
    trainers_know.write(file)
    assert RunState.read(file) == trainers_know
    for text in ("{", "[]", '{"name": "../x"}', '{"name": "a", "launch": -1}', '{"name": "a", "color": 1}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"run\.json is not the state of a run"):
            RunState.read(file)
