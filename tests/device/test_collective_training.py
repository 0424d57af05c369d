"""Rows on the devices of several trainers: the same bits as with the rows in their memory, or on servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainers import Trainers, require_same_as_alone


def same(found: dict[str, Any], other: dict[str, Any]) -> bool:
    return (found["dense"], found["rows"]) == (other["dense"], other["rows"])


@pytest.mark.parametrize(("world_size", "overlap"), [(2, False), (3, True)])
def test_it_equals_one_trainer_on_the_joined_batch(
    trainers: Trainers, world_size: int, overlap: bool, tmp_path: Path
) -> None:
    found = trainers.run([], world_size, tmp_path, batches=6 * world_size, overlap=overlap, device="cpu")
    require_same_as_alone(found, 6 * world_size)
