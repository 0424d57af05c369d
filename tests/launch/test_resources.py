"""Resources of a run's processes on a cluster: sizes, bundles and descriptions. Needs no Ray."""

from __future__ import annotations

from typing import Any

import pytest

from satrap.errors import ConfigError
from satrap.launch.resources import (
    Resources,
    describe_resources,
    describe_run,
    parse_custom,
    parse_labels,
    total_cpus,
)
from satrap.launch.run_events import Role
from satrap.launch.supervisor import RunConfig

RESOURCES = {
    Role.SERVER: Resources(memory_bytes=3 << 29),
    Role.WORKER: Resources(cpus=2),
    Role.TRAINER: Resources(cpus=4, gpus=1),
}


def test_resources_as_bundles_and_in_words() -> None:
    assert Resources().bundle() == {"CPU": 1.0} and str(Resources()) == "1 CPU"
    whole = Resources(cpus=4, gpus=1, memory_bytes=3 << 29)
    assert whole.bundle() == {"CPU": 4.0, "GPU": 1.0, "memory": float(3 << 29)}
    assert str(whole) == "4 CPU, 1 GPU, 1.5 GiB memory"
    assert (
        describe_resources({"CPU": 0.0, "node:1": 1.0}) == "nothing"
        and describe_resources({"memory": 1 << 30}) == "1.0 GiB memory"
    )


def test_custom_resources_and_labels() -> None:
    assert parse_custom(["satrap_server=1", "disk=0.5"]) == {"satrap_server": 1.0, "disk": 0.5}
    assert parse_labels(["role=server", "zone=a=b"]) == {"role": "server", "zone": "a=b"}
    whole = Resources(custom={"disk": 0.5}, labels={"role": "server"})
    assert whole.bundle() == {"CPU": 1.0, "disk": 0.5}
    assert str(whole) == "1 CPU, 0.5 disk on a node with the label role=server"
    for text in ("disk", "disk=", "disk=0", "disk=-1", "disk=nan", "=1", "CPU=1", "memory=1"):
        with pytest.raises(ConfigError, match=f"resource is '{text}'; expected NAME=AMOUNT"):
            parse_custom([text])
    for text in ("role", "role=", "=server"):
        with pytest.raises(ConfigError, match=f"label is '{text}'; expected NAME=VALUE"):
            parse_labels([text])


@pytest.mark.parametrize(("name", "value"), [("cpus", 0), ("gpus", -1), ("memory_bytes", -1), ("cpus", 2**50 + 1)])
def test_invalid_resources_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        Resources(**{name: value})


def test_resources_of_a_whole_run() -> None:
    run_config = RunConfig(servers=3, workers=2, trainers=5)
    assert total_cpus(RESOURCES, run_config) == 3 * 1 + 2 * 2 + 5 * 4
    expected = "3 x server with 1 CPU, 1.5 GiB memory, 2 x worker with 2 CPU, 5 x trainer with 4 CPU, 1 GPU"
    assert describe_run(RESOURCES, run_config) == expected
    assert describe_run(RESOURCES, RunConfig(servers=1, workers=0, trainers=1)).count(" x ") == 2
