"""What the processes of a run are given on a cluster: sizes, bundles and the words for them. Needs no Ray."""

from __future__ import annotations

import pytest

from satrap.errors import ConfigError
from satrap.launch.resources import Needs, Resources, amounts, size_in_bytes
from satrap.launch.supervisor import Plan, Role

NEEDS = Needs(server=Resources(memory_bytes=3 << 29), worker=Resources(cpus=2), trainer=Resources(cpus=4, gpus=1))


def test_sizes() -> None:
    texts = ("5", "2KiB", "3 MiB", "64GiB", "1TiB")
    assert [size_in_bytes(text) for text in texts] == [5, 2048, 3 << 20, 64 << 30, 1 << 40]
    for text in ("4G", "GiB", "-1", "1.5GiB", ""):
        with pytest.raises(ConfigError, match=f"memory is '{text}'; wanted a whole number of bytes"):
            size_in_bytes(text)


def test_resources_in_rays_words_and_in_ours() -> None:
    assert Resources().bundle() == {"CPU": 1.0} and str(Resources()) == "1 CPU"
    whole = Resources(cpus=4, gpus=1, memory_bytes=3 << 29)
    assert whole.bundle() == {"CPU": 4.0, "GPU": 1.0, "memory": float(3 << 29)}
    assert str(whole) == "4 CPU, 1 GPU, 1.5 GiB memory"
    assert amounts({"CPU": 0.0, "node:1": 1.0}) == "nothing" and amounts({"memory": 1 << 30}) == "1.0 GiB memory"


@pytest.mark.parametrize(("name", "value"), [("cpus", 0), ("gpus", -1), ("memory_bytes", -1), ("cpus", 2**50 + 1)])
def test_resources_that_are_none_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        Resources(**{name: value})


def test_what_all_processes_need() -> None:
    assert [NEEDS.of(role) for role in Role] == [NEEDS.server, NEEDS.worker, NEEDS.trainer]
    plan = Plan(servers=3, workers=2, trainers=5)
    assert NEEDS.cpus(plan) == 3 * 1 + 2 * 2 + 5 * 4
    told = "3 x server with 1 CPU, 1.5 GiB memory, 2 x worker with 2 CPU, 5 x trainer with 4 CPU, 1 GPU"
    assert NEEDS.asked(plan) == told
    assert NEEDS.asked(Plan(servers=1, workers=0, trainers=1)).count(" x ") == 2
