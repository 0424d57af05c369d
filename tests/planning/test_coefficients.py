"""Costs: what a fit finds, and the file of coefficients."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from satrap.errors import ConfigError
from satrap.planning.calibration import fit_cost
from satrap.planning.coefficients import DEFAULTS, Coefficients, Cost
from satrap.planning.input_files import read_coefficients, write_coefficients

SHAPES = [(128.0, 4e3), (32768.0, 1e6), (32768.0, 1.6e7)]


@given(st.tuples(st.floats(1e-5, 1e-2), st.floats(1e-9, 1e-6), st.floats(1e-11, 1e-8)))
def test_a_fit_finds_the_cost_that_was_measured(parts: tuple[float, float, float]) -> None:
    cost = Cost(step=parts[0], id=parts[1], byte=parts[2])
    found = fit_cost([(i, b, cost.seconds(i, b)) for i, b in SHAPES])
    for ids, moved in SHAPES:
        assert found.seconds(ids, moved) == pytest.approx(cost.seconds(ids, moved), rel=1e-6)


@given(st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=3))
def test_no_part_of_a_fit_is_negative(seconds: list[float]) -> None:
    found = fit_cost([(i, b, s) for (i, b), s in zip(SHAPES, seconds, strict=True)])
    assert min(found.step, found.id, found.byte) >= 0 < max(found.step, found.id, found.byte)


def test_coefficients_keep_their_values_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    costs = replace(DEFAULTS, source="this test", call=0.25)
    write_coefficients(path, costs)
    assert read_coefficients(path) == costs


@pytest.mark.parametrize("name", [each.name for each in fields(Coefficients) if each.type is float])
def test_a_negative_coefficient_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"coefficients: {name} is -1"):
        Coefficients.from_dict(DEFAULTS.to_dict() | {name: -1.0})


def test_a_share_of_no_cores_is_refused() -> None:
    with pytest.raises(ConfigError, match="coefficients: joint_cores is 0"):
        Coefficients.from_dict(DEFAULTS.to_dict() | {"joint_cores": 0})


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not JSON"), ("[]", "expected a dict"), ('{"source": "x"}', "the key 'local' is missing"), (None, "cannot")],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=rf"bad\.json: .*{message}"):
        read_coefficients(path)
