"""Mistakes in the description of a job and in the list of machines: an error names the file and the key, and says what
is expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from satrap.errors import ConfigError
from satrap.planning.input_files import read_description, read_prices, split_changes

MODEL = """
[training]
samples_per_second = 1e6
batch_size = 4096
dense_flops = 1e6
dense_parameters = 1000

[[tables]]
name = "item"
dim = 16
rows = 1e9
"""
MACHINES = """
[[machines]]
name = "m"
cores = 8
memory_gib = 64
network_gbit = 10
price_per_hour = 1.0
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "input.toml"
    path.write_text(text)
    return path


def test_the_defaults(tmp_path: Path) -> None:
    job = read_description(write(tmp_path, MODEL))
    (table,) = job.tables
    assert (table.rows, table.ids_per_sample, table.vectors_per_sample, table.zipf) == (10**9, 1.0, 1.0, 1.05)
    assert (job.training.batch_size, job.training.staleness, job.training.wire) == (4096, 0, "float32")
    listed = read_prices(write(tmp_path, MACHINES))
    assert (listed.currency, listed.limits.memory, listed.machines[0].roles) == (
        "$",
        0.8,
        ("server", "worker", "trainer"),
    )


def test_keys_are_changed_by_set(tmp_path: Path) -> None:
    changes = ["training.staleness=4", "tables.item.rows=5", "tables.*.optimizer=Adam", "training.wire=float16"]
    job = read_description(write(tmp_path, MODEL), changes)
    assert (job.training.staleness, job.training.wire, job.tables[0].rows) == (4, "float16", 5)
    assert type(job.tables[0].table.optimizer).__name__ == "Adam"


def test_values_of_the_price_list_are_changed_by_set(tmp_path: Path) -> None:
    path = write(tmp_path, 'source = "Provider, 2026-11, on demand"\n' + MACHINES)
    mixed = ["training.staleness=4", "machines.m.price_per_hour=2.5", "machines.*.available=7", "limits.memory=0.5"]
    of_job, of_prices = split_changes(mixed)
    assert of_job == mixed[:1]
    listed = read_prices(path, of_prices)
    assert (listed.machines[0].price_per_hour, listed.machines[0].available, listed.limits.memory) == (2.5, 7, 0.5)
    assert listed.source == "Provider, 2026-11, on demand"
    for change, message in (
        ("machines.n.cores=4", "no machine 'n'; known are 'm'"),
        ("machines.m.core=4", "machine 'm': unknown key 'core'"),
        ("limits=4", "expected limits.KEY=VALUE, machines.NAME.KEY=VALUE"),
        ("machines.m.available=0", "no available machine has the role 'server'; found m"),
        ("machines.m.pod_memory_gib=65", "pod_memory_gib is 65 and memory_gib 64; expected at most memory_gib"),
        ("limits.storage_gb_per_second=0", "storage_gb_per_second is 0"),
    ):
        with pytest.raises(ConfigError, match=rf"input\.toml: .*{message}"):
            read_prices(path, [change])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("staleness=4", "expected training.KEY=VALUE"),
        ("tables.item=4", "expected training.KEY=VALUE, tables.NAME.KEY=VALUE"),
        ("tables.itme.rows=4", "no table 'itme'; the nearest known one is 'item'"),
        ("training.staleness", "expected training.KEY=VALUE"),
        ("training.stalenes=4", "unknown key 'stalenes'; the nearest known one is 'staleness'"),
        ("training.samples_per_second=0", "samples_per_second is 0; expected more than 0"),
        ("training.batch_size=1.5", "batch_size is 1.5 .*expected a whole number"),
        ("training.batch_size=0", "batch_size is 0; expected an integer from 1"),
        ("training.wire=int8", "wire is 'int8' .*expected one of 'float32', 'float16'"),
        ("training.dense_flops=-1", "dense_flops is -1"),
        ("tables.item.row=4", "table 'item': unknown key 'row'; the nearest known one is 'rows'"),
        ("tables.item.rows=0", "rows is 0; expected an integer from 1"),
        ("tables.item.capacity=1e6", "rows is 1000000000 and capacity 1000000; expected at most the capacity"),
        ("tables.item.unique_share=2", r"unique_share is 2; expected a number in \(0, 1\]"),
        ("tables.item.zipf=-1", "zipf is -1"),
        ("tables.item.optimizer=Adamm", "type is 'Adamm'; the nearest known one is 'Adam'"),
        ("tables.item.dim=0", "dim is 0"),
    ],
)
def test_a_wrong_key_of_a_model(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"input\.toml: .*{message}"):
        read_description(write(tmp_path, MODEL), [change])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[training", "not TOML"),
        (MODEL + "[model]\n", "unknown key 'model'"),
        ("[training]\n", "expected at least one table"),
        (MODEL.replace("rows = 1e9", ""), r"table 'item': found neither rows.* --set tables.item.rows=N"),
        (MODEL.replace("batch_size = 4096", ""), "the key 'batch_size' is missing"),
        (MODEL + MODEL[MODEL.index("[[") :], "table 'item' is listed more than once"),
        ("tables = 3", "tables is 3"),
    ],
)
def test_a_wrong_model(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"input\.toml: .*{message}"):
        read_description(write(tmp_path, text))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cores = 8", "", "machine 'm': the key 'cores' is missing"),
        ("cores = 8", "core = 8", "machine 'm': unknown key 'core'; the nearest known one is 'cores'"),
        ("cores = 8", "cores = 0", "cores is 0"),
        ("network_gbit = 10", "network_gbit = 0", "network_gbit is 0; expected a number above 0"),
        ("price_per_hour = 1.0", "price_per_hour = -1", "price_per_hour is -1"),
        ("cores = 8", "cores = 8\ngpus = 2", "gpus is 2 and gpu_tflops 0; expected what your dense network reaches"),
        ("cores = 8", 'cores = 8\nroles = ["servers"]', "expected a list of 'server', 'worker', 'trainer'"),
        ("cores = 8", 'cores = 8\nroles = ["server"]', "no available machine has the role 'trainer'; found m"),
        (
            "price_per_hour = 1.0",
            "price_per_hour = 1.0\n[limits]\nmemory = 80",
            r"memory is 80; expected a share in \(0, 1\]",
        ),
        ("[[machines]]", "[[machine]]", "unknown key 'machine'; the nearest known one is 'machines'"),
        ("[[machines]]", MACHINES + "[[machines]]", "machine 'm' is listed more than once"),
    ],
)
def test_a_wrong_price_list(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"input\.toml: .*{message}"):
        read_prices(write(tmp_path, MACHINES.replace(old, new, 1)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read \(No such file or directory\)"):
        read_prices(tmp_path / "none.toml")
