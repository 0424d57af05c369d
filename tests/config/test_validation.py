"""The words and limits that all errors of the checks share."""

from __future__ import annotations

import inspect
import json
import pydoc
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import satrap
from satrap.config.validation import LARGEST_FLOAT32, Config, Serializable, flat, kind_of, suggest
from satrap.data.synthetic import Clicks
from satrap.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Point(Serializable):
    x: float
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Circle(Config):
    radius: int = 1


@dataclass(frozen=True, slots=True)
class Square(Config):
    side: int = 1


@dataclass(frozen=True, slots=True)
class Drawing(Serializable):
    points: tuple[Point, ...]
    shape: Circle | Square
    named: Mapping[str, str | Point]
    best: Point | None = None
    layers: tuple[tuple[int, ...], ...] = ()


points = st.builds(Point, st.integers(), st.none() | st.text())
drawings = st.builds(
    Drawing,
    st.lists(points).map(tuple),
    st.builds(Circle, st.integers()) | st.builds(Square, st.integers()),
    st.dictionaries(st.text(), st.text() | points),
    st.none() | points,
    st.lists(st.lists(st.integers()).map(tuple)).map(tuple),
)
DRAWING: dict[str, Any] = {"points": [{"x": 1.0}], "shape": {"type": "Circle"}, "named": {}}


@given(drawings)
def test_an_object_survives_its_form(drawing: Drawing) -> None:
    assert Drawing.from_dict(json.loads(json.dumps(drawing.to_dict()))) == drawing


def test_a_class_is_named_where_several_may_stand() -> None:
    assert Circle(2).to_dict() == {"type": "Circle", "radius": 2}
    assert Point(0.5).to_dict() == {"x": 0.5, "name": None}
    assert Drawing.from_dict(DRAWING) == Drawing((Point(1.0),), Circle(), {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"points": {"x": 1.0}}, r"Drawing: points is {'x': 1.0} \(dict\); expected a list"),
        ({"points": [3]}, r"Drawing: points: found 3 \(int\); expected a dict, as to_dict\(\) returns"),
        ({"points": [{"name": "a"}]}, "Point: the key 'x' is missing; add it"),
        ({"points": [{"x": 1.0, "nam": "a"}]}, "Point: unknown key 'nam'; the nearest known one is 'name'"),
        ({"shape": {"radius": 1}}, "Drawing: shape: the key 'type' is missing; add it, one of Circle, Square"),
        ({"shape": {"type": "Sqare"}}, "Drawing: shape: type is 'Sqare'; the nearest known one is 'Square'"),
        ({"shape": None}, r"Drawing: shape: found None \(NoneType\); expected a dict"),
        ({"best": "first"}, r"Drawing: best: found 'first' \(str\); expected a dict"),
        ({"layers": [[1], 2]}, r"Drawing: layers is 2 \(int\); expected a list"),
    ],
)
def test_a_form_that_is_not_the_objects(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        Drawing.from_dict(DRAWING | changes)


def test_what_has_no_form_is_refused() -> None:
    options: dict[str, Any] = {"x": [np.zeros(1)]}
    with pytest.raises(
        ConfigError, match=r"^Point: x is array\(\[0\.\]\) \(ndarray\), which has no form in plain JSON"
    ):
        Point(**options).to_dict()


def test_kinds_have_their_article() -> None:
    found = [kind_of(1), kind_of("text"), kind_of([1]), kind_of(np.array(0))]
    assert found == ["an int", "a str", "a list", "a ndarray"]


def test_the_nearest_known_name_or_all_of_them() -> None:
    assert suggest("itme", ["user", "item", "items"]) == "the nearest known one is 'item'"
    assert suggest("x", ["user", "item"]) == "known are 'user', 'item'"


DECLARATIONS: list[type] = [
    getattr(satrap, name)
    for name in satrap.__all__
    if is_dataclass(getattr(satrap, name)) and name not in ("Counters", "Inputs", "Report")
]


RETURNED = "Batch HybridOptimizer JaggedSequence PrefetchedBatches ProcessGroup ReaderTable Sequence ShardedTable "
RETURNED += "ShardedTables Stream StoredRows Counters Inputs Report"
CALLS: list[Any] = [
    getattr(module, name)
    for module in (satrap, satrap.models, satrap.nn)
    for name in module.__all__
    if name not in RETURNED.split() and callable(getattr(module, name)) and not name.endswith("Error")
]
CALLS += [satrap.negatives.add, satrap.negatives.in_batch, Clicks, satrap.Table.bag, satrap.Table.sequence]
CALLS += [satrap.Checkpoint.save, satrap.Checkpoint.resume, satrap.Reader.stream, satrap.Embeddings.optimizer]
CALLS += [satrap.Embeddings.parallel, satrap.Embeddings.stream, satrap.Embeddings.prefetch]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)
def test_calls_say_which_argument_is_near_an_unknown_one(call: Any) -> None:
    """Declarations, other objects, functions and methods do; the steps of a loop do not, which are hot."""
    refused = f"^{call.__qualname__} got an unexpected keyword argument"
    parameters = inspect.signature(call).parameters
    for name in parameters.keys() - {"self"}:
        if f"{name}s" not in parameters:
            with pytest.raises(TypeError, match=f"{refused} '{name}s': (the nearest known one is|known are) '"):
                call(**{f"{name}s": 1})
    with pytest.raises(TypeError, match=f"{refused} 'xyzzy': known are") as raised:
        call(xyzzy=1)
    assert "'_" not in str(raised.value) and "'self'" not in str(raised.value), "what is no argument"
    assert "P.args" not in pydoc.render_doc(call)


@pytest.mark.parametrize(
    ("call", "name", "answer"),
    [
        (satrap.Table.bag, "mode", r'write table\.bag\("mean"\)'),
        (satrap.Table.bag, "per_sample_weights", "write weighted=True"),
        (satrap.Table.bag, "padding_idx", "the nearest known one is 'padding_id'"),
        (satrap.convert, "min_row", "the nearest known one is 'min_rows'"),
        (satrap.convert, "stalenes", "the nearest known one is 'staleness'"),
        (satrap.convert, "servers", r"write deployment=satrap\.Deployment\(servers=\.\.\.\)"),
    ],
)
def test_an_argument_of_another_call_is_answered_by_what_to_write(call: Any, name: str, answer: str) -> None:
    with pytest.raises(TypeError, match=f"^{call.__qualname__} got an unexpected keyword argument '{name}': {answer}"):
        call(**{name: "mean"})


@pytest.mark.parametrize("cls", [cls for cls in (*DECLARATIONS, Clicks) if cls.__name__ != "Position"])
def test_help_describes_every_argument_of_a_declaration_once(cls: type) -> None:
    page = pydoc.plain(pydoc.render_doc(cls))
    described = Counter(
        name for names in re.findall(r"^ \|  (\w+(?:, \w+)*): ", page, re.MULTILINE) for name in names.split(", ")
    )
    arguments = list(inspect.signature(cls).parameters)
    assert {described[name] for name in arguments} <= {1}
    in_order = [name for name in described if name in arguments]
    assert in_order[:1] == [name for name in arguments if name in described][:1], "a call begins with it"
    assert len(max(page.splitlines(), key=len)) < 3000 and "NestedSequence" not in page


def test_nested_mappings_become_flat() -> None:
    found = flat({"a": 1, "b": {"c": 2, "d": {"e": 3}}})
    assert found == {"a": 1, "b.c": 2, "b.d.e": 3}
    assert flat({"a": 1}, "of.") == {"of.a": 1}


def test_the_largest_float32() -> None:
    assert float(np.finfo(np.float32).max) == LARGEST_FLOAT32
