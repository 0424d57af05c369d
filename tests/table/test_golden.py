"""Files of an earlier build (tests/support/golden.py) are read bit for bit, and training continues from them alike."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from checkpoint_job import Job, same
from golden import MORE_STEPS, STEPS, TABLES, method_numbers, recorded, state, take_steps
from satrap import Store, Table
from satrap.launch.run_state import RunState

GOLDEN = Path(__file__).parents[1] / "fixtures/golden"
each_table = pytest.mark.parametrize("table", TABLES, ids=[table.name for table in TABLES])


def assert_recorded(store: Store, name: str) -> None:
    wanted, found = recorded(GOLDEN / store.table.name, name), state(store)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert np.asarray(found[key]).tobytes() == value.tobytes(), key


def goes_on(store: Store, table: Table) -> None:
    assert store.table == table
    assert_recorded(store, "changes")
    take_steps(store, STEPS + MORE_STEPS, STEPS + MORE_STEPS + 1)
    assert_recorded(store, "next")


@each_table
def test_a_snapshot_and_its_changes(table: Table) -> None:
    folder = GOLDEN / table.name
    store = Store.load(folder / "full", num_threads=1)
    assert_recorded(store, "full")
    store.apply_changes(folder / "changes")
    goes_on(store, table)


@each_table
def test_a_file_in_shared_memory(table: Table, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.touch(0o600)
    with gzip.open(GOLDEN / table.name / "shared.gz") as packed, open(path, "wb") as file:
        shutil.copyfileobj(packed, file)
    goes_on(Store.attach(path, num_threads=1), table)


def test_a_run_folder(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "run", tmp_path / "run")
    job = Job(str(tmp_path / "run"), 4, full_every=3)
    assert job.run.resume()
    with np.load(GOLDEN / "run.npz", allow_pickle=True) as wanted:
        same(job.state(), wanted)


def test_the_state_of_satrap_run(tmp_path: Path) -> None:
    found = RunState.read(GOLDEN / "run_state.json")
    assert found == RunState(name="golden", launch=3, first_launch=2, servers=("ipc:///a/b", "tcp://h:1"), workers=())
    found.write(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (GOLDEN / "run_state.json").read_bytes()


def test_the_numbers_of_methods() -> None:
    assert method_numbers() == json.loads((GOLDEN / "methods.json").read_text())
