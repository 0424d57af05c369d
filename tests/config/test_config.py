"""Every check of the configuration classes fires, and their dict form restores an equal object."""

import dataclasses
import json
import math
import pickle
import pydoc
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from satrap import _core
from satrap.config import tables
from satrap.config.job import Job
from satrap.config.optimizers import SGD, Adagrad, Adam, AdamW, Ftrl, Optimizer, RowWiseAdagrad
from satrap.config.tables import (
    Always,
    Constant,
    Feature,
    MinCount,
    Normal,
    Probability,
    ScaledUniform,
    Table,
    Uniform,
    Zeros,
)
from satrap.errors import ConfigError, InputError
from satrap.sharding.bucket_map import BucketMap
from satrap.table.engine import native_config

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
OPTIMIZERS: list[Callable[..., Any]] = [SGD, Adagrad, RowWiseAdagrad, Adam, AdamW, Ftrl]
CONFIGS: list[Any] = [
    *OPTIMIZERS,
    Uniform,
    Normal,
    Zeros,
    Constant,
    ScaledUniform,
    Always,
    Probability,
    MinCount,
    Table,
]
REQUIRED: dict[Any, dict[str, Any]] = {
    Constant: {"value": 1.0},
    Probability: {"p": 0.5},
    MinCount: {"n": 2},
    Table: {"name": "item", "dim": 4},
}


def required(kind: Any) -> dict[str, Any]:
    return dict(REQUIRED.get(kind, {}))


def fields_of_type(*types: object) -> list[tuple[Any, str]]:
    return [(kind, each.name) for kind in CONFIGS for each in dataclasses.fields(kind) if each.type in types]


NUMBERS = fields_of_type(float)
INTEGERS = fields_of_type(int, int | None)


# Wrong types and ranges, for every field of that type


@pytest.mark.parametrize(("kind", "name"), NUMBERS)
@pytest.mark.parametrize("value", ["0.1", None, True, [0.1], 1j, math.nan, math.inf, -math.inf, 1e39, 10**400])
def test_a_number_must_be_a_finite_float32_number(kind: Any, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{kind.__name__}: {name} is .* expected a (finite )?number"):
        kind(**required(kind) | {name: value})


@pytest.mark.parametrize(
    ("kind", "name"), [each for each in NUMBERS if each[1] not in ("low", "high", "mean", "value")]
)
def test_a_number_that_cannot_be_negative(kind: Any, name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{kind.__name__}: {name} is -0.5 \(float\); expected a number of at least 0$"
    ):
        kind(**required(kind) | {name: -0.5})


@pytest.mark.parametrize(("kind", "name"), [*INTEGERS, (Table, "capacity")])
@pytest.mark.parametrize("value", ["4", 4.0, True, 0, -1, 2**64])
def test_an_integer_in_its_range(kind: Any, name: str, value: object) -> None:
    where = "table 'item'" if kind is Table else kind.__name__
    with pytest.raises(ConfigError, match=rf"^{where}: {name} is .*; expected an integer from 1 to \d+$"):
        kind(**required(kind) | {name: value})


@pytest.mark.parametrize(
    ("kind", "name", "largest"),
    [
        (Table, "dim", 65536),
        (Table, "num_buckets", 65536),
        (Table, "expire_after", 2**32 - 2),
        (MinCount, "n", 2**31 - 1),
        (MinCount, "window", 2**63 - 1),
    ],
)
def test_the_largest_integer(kind: Any, name: str, largest: int) -> None:
    assert getattr(kind(**required(kind) | {name: largest}), name) == largest
    with pytest.raises(ConfigError, match=str(largest)):
        kind(**required(kind) | {name: largest + 1})


@pytest.mark.parametrize("value", [1, None, "yes", 0.0])
def test_nesterov_is_a_flag(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"SGD: nesterov is .* expected True or False"):
        SGD(momentum=0.9, nesterov=value)


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize(
    "value", [0.9, (0.9,), (0.9, 0.99, 0.999), "ab", (0.9, 1.0), (1.0, 0.9), (-0.1, 0.9), ("a", 0.9)]
)
def test_betas(kind: Any, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{kind.__name__}: betas"):
        kind(betas=value)


@pytest.mark.parametrize("name", ["dtype", "on_full", "absent", "on_nonfinite", "shard"])
@pytest.mark.parametrize("value", ["", "Float32", None, 3, ["evict"]])
def test_a_choice(name: str, value: object) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=rf"^table 'item': {name} is .*; expected one of '"):
        Table("item", dim=4, **options)


@pytest.mark.parametrize("name", ["optimizer", "initial", "admission"])
def test_a_part_must_be_an_object_of_its_kind(name: str) -> None:
    for value in ("adagrad", None, Table("other", dim=4), Always() if name == "initial" else Zeros, 0.1):
        options: dict[str, Any] = {name: value}
        with pytest.raises(ConfigError, match=rf"^table 'item': {name} is .*; expected an object of one of"):
            Table("item", dim=4, **options)


def test_a_class_in_place_of_an_object_is_explained() -> None:
    options: dict[str, Any] = {"optimizer": Adagrad}
    with pytest.raises(ConfigError, match=r"optimizer is the class Adagrad; expected an object: Adagrad\(\.\.\.\)"):
        Table("item", dim=4, **options)


@pytest.mark.parametrize("name", [None, 3, b"item", "", "a\nb", "\x00", "\ud800", "x" * 256, "é" * 128])
def test_a_table_name_is_short_printable_text(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"^Table: name is .*; expected "):
        Table(name, dim=4)


# Values that contradict each other


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(nesterov=True), "nesterov is True and momentum is 0"),
        (lambda: Ftrl(lr=0.0), "Ftrl: lr is 0; expected > 0"),
        (lambda: Ftrl(beta=0.0, l2=0.0), "beta and l2 are both 0"),
        (lambda: Uniform(low=0.2, high=0.1), "low 0.2 is above high 0.1"),
        (lambda: Probability(0.0), r"p is 0.0; expected a number in \(0, 1\]"),
        (lambda: Probability(1.0000001), r"p is 1.0000001; expected a number in \(0, 1\]"),
        (
            lambda: Table("t", dim=4, frozen="all"),
            r"table 't': frozen is 'all' \(str\); expected True, False, a range .*, or the ids themselves: a list",
        ),
        (lambda: Table("t", dim=4, frozen=3), r"frozen is 3 \(int\); expected True"),
        (
            lambda: Table("t", dim=4, frozen=[3, 0.5]),
            r"table 't', frozen: ids\[1\] is 0.5 \(float\); expected an integer",
        ),
        (lambda: Table("t", dim=4, frozen={2**64}), r"table 't', frozen: ids\[0\] is 18446744073709551616"),
        (lambda: Table("t", dim=4, frozen=["a"]), r"table 't', frozen: ids\[0\] is 'a'.*make ids of strings with"),
        (lambda: Table("t", dim=4, frozen=np.ones(3)), r"table 't', frozen: ids are float64; expected uint64 \(or"),
        (lambda: Table("t", dim=4, frozen=np.ones((2, 2), np.int64)), r"frozen: ids have the shape \(2, 2\)"),
        (
            lambda: Table("t", dim=4, num_rows=9, frozen=[3, 9, 11]),
            r"table 't': frozen has the id 11; expected ids from 0 to 8, because num_rows is 9",
        ),
        (
            lambda: dataclasses.replace(Table("t", dim=4, num_rows=12, frozen=[3, 9, 11]), num_rows=9),
            "frozen has the id 11; expected ids from 0 to 8",
        ),
        (lambda: Table("t", dim=4, num_rows=9, frozen=[-1]), "frozen has the id 18446744073709551615; expected ids"),
        (
            lambda: Table.from_dict({"name": "t", "dim": 4, "frozen": [1, 3, 7]}),
            r"table 't': frozen is \[1, 3, 7\] \(list\); expected \[first, end\] of a range of ids",
        ),
        (lambda: Table.from_dict({"name": "t", "dim": 4, "frozen": "3 ids"}), r"table 't': frozen is '3 ids' \(str\)"),
        (lambda: Table("t", dim=4, frozen=range(0, 9, 2)), r"frozen is range\(0, 9, 2\) .*step 1 from 0 to 2\*\*64"),
        (lambda: Table("t", dim=4, frozen=range(-1, 9)), r"frozen is range\(-1, 9\)"),
        (lambda: Table("t", dim=4, frozen=range(9, 3)), r"frozen is range\(9, 3\)"),
        (lambda: Table("t", dim=4, frozen=range(2**64 + 1)), "such as range"),
        (lambda: Table("t", dim=4, num_buckets=3), "table 't': num_buckets is 3; expected a power of two: 2 or 4"),
        (lambda: Table("t", dim=4, num_buckets=131072), "num_buckets is 131072; expected an integer from 1 to 65536"),
        (lambda: Table("t", dim=4, num_buckets=8, capacity=7), "num_buckets is 8 and capacity 7"),
        (
            lambda: Table("t", dim=4, num_buckets=1, capacity=2**32 - 1),
            r"capacity is 4294967295 in 1 buckets; expected at most 4294967294 in each: give num_buckets=2 or less",
        ),
        (
            lambda: Table("t", dim=4, num_buckets=4, capacity=2**34 + 2**20),
            "in 4 buckets.*: give num_buckets=8 or less",
        ),
        (lambda: Table("t", dim=4, capacity=4096 * (2**32 - 2) + 1), "in 4096 buckets.*: give num_buckets=8192 or"),
        (lambda: Table("t", dim=4, capacity=2**48), f"capacity is .*; expected an integer from 1 to {2**48 - 2**17}$"),
        (
            lambda: Table("t", dim=4, on_full="raise"),
            "table 't': on_full is 'raise' and there is no capacity to reach: set a capacity",
        ),
        (lambda: Table("t", dim=4, dtype="float16", initial=Constant(65505.0)), "float16 holds at most 65504"),
        (lambda: Table("t", dim=4, dtype="float16", initial=Normal(mean=-7e4)), "float16 holds at most 65504"),
        (lambda: Table("t", dim=4, dtype="float16", initial=Uniform(low=-7e4)), "float16 holds at most 65504"),
        (
            lambda: Table("t", dim=4, dtype="bfloat16", initial=Constant(LARGEST_FLOAT32)),
            "bfloat16 holds at most 3.38953e",
        ),
    ],
)
def test_contradictions(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("optimizer", [SGD(), SGD(momentum=0.5), Adagrad(), RowWiseAdagrad(), Adam(), AdamW(), Ftrl()])
def test_the_state_of_a_row_is_known_without_a_table_of_it(optimizer: Optimizer) -> None:
    native = native_config(Table("t", dim=3, optimizer=optimizer))
    assert native.state_dim == _core.Engine([native], 0, 1).state_dim(0)


def test_the_core_refuses_more_rows_than_it_can_number() -> None:
    fields = Table("t", dim=1, num_buckets=2, capacity=2**33 - 4).to_dict()
    with pytest.raises(InputError, match="table 't': capacity=8589934589 is above 4294967294 rows for each of num_b"):
        _core.TableConfig(fields | {"capacity": 2**33 - 3})
    assert _core.Engine([_core.TableConfig(fields)], 0, 1).num_rows(0) == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dim": 0}, "table 't': dim=0, expected 1..65536"),
        ({"dim": "four"}, "table 't': dim is 'four', which the core cannot hold"),
        ({"name": None, "dim": 2**32}, "table '': dim is 4294967296, which the core cannot hold"),
        ({"num_buckets": 3}, "table 't': num_buckets=3, expected a power of two up to 65536"),
        ({"on_nonfinite": "warn"}, "table 't': on_nonfinite='warn' is not known; expected one of 'raise', 'skip'"),
        ({"optimizer": "sgd"}, "table 't': optimizer is 'sgd'; expected a dict"),
        (
            {"optimizer": {"type": "SGD", "lr": 0.1, "damping": 0.5}},
            "table 't': optimizer: the .* 'damping'",
        ),
        (
            {"optimizer": {"type": "Adam", "betas": [0.9]}},
            r"table 't': optimizer: betas is \[0.9\], which the",
        ),
        ({"colour": "red"}, "table 't': the core knows no field 'colour'"),
    ],
)
def test_the_core_refuses_a_configuration_that_it_cannot_hold(changed: dict[str, Any], message: str) -> None:
    fields = Table("t", dim=1, num_buckets=2).to_dict()
    with pytest.raises(InputError, match=f"^{message}"):
        _core.TableConfig(fields | changed)


# What is accepted


@pytest.mark.parametrize(
    ("short", "full"),
    [
        *((kind(0.25), kind(lr=0.25)) for kind in (SGD, Adagrad, RowWiseAdagrad, Adam, AdamW, Ftrl)),
        (Uniform(-0.05, 0.05), Uniform(low=-0.05, high=0.05)),
        (Normal(0.5, 0.1), Normal(mean=0.5, std=0.1)),
        (Constant(0.5), Constant(value=0.5)),
        (Probability(0.5), Probability(p=0.5)),
        (MinCount(3), MinCount(n=3)),
        (Table("user", 16), Table(name="user", dim=16)),
    ],
)
def test_arguments_of_one_natural_order(short: object, full: object) -> None:
    assert short == full


@pytest.mark.parametrize(
    "make",
    [
        *(lambda kind=kind: kind(0.25, 0.9) for kind in (SGD, Adagrad, RowWiseAdagrad, Adam, AdamW, Ftrl)),
        lambda: MinCount(3, 10),  # type: ignore[call-arg]
        lambda: Table("user", 16, Adagrad()),  # type: ignore[call-arg]
    ],
)
def test_other_arguments_need_their_names(make: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        make()


def test_one_bound_of_uniform_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"is above high 0.01: give both, e\.g\. Uniform\(-0\.1, 0\.1\)$"):
        Uniform(0.05)


def test_the_defaults_are_torchs() -> None:
    assert (SGD().momentum, SGD().nesterov, SGD().weight_decay) == (0.0, False, 0.0)
    assert Adagrad() == Adagrad(lr=0.01, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10)
    assert Adam() == Adam(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    assert AdamW().weight_decay == 1e-2


def test_numbers_of_other_types_become_plain_ones() -> None:
    adagrad = Adagrad(lr=1, eps=np.float32(0.5), weight_decay=Fraction(1, 4))  # type: ignore[arg-type]
    assert [type(value) for value in (adagrad.lr, adagrad.eps, adagrad.weight_decay)] == [float] * 3
    table = Table("item", dim=np.uint8(4), capacity=np.int64(8))  # type: ignore[arg-type]
    assert type(table.dim) is int
    assert json.loads(json.dumps(table.to_dict()))["capacity"] == 8
    assert Adam(betas=[0, 0.5]).betas == (0.0, 0.5)  # type: ignore[arg-type]


def test_the_edges_are_accepted() -> None:
    SGD(lr=0.0, momentum=0.9, nesterov=True)
    Adagrad(lr=LARGEST_FLOAT32, eps=0.0)
    Ftrl(beta=0.0, l2=0.1)
    Uniform(low=0.5, high=0.5)
    Probability(1.0)
    Table("é" * 127, dim=65536, num_buckets=65536, capacity=65536)
    Table("t", dim=1, num_buckets=65536, capacity=65536 * (2**32 - 2))
    Table("t", dim=1, num_buckets=1, capacity=2**32 - 2)
    Table("t", dim=1, dtype="float16", initial=Constant(-65504.0))


@pytest.mark.parametrize(
    ("capacity", "num_buckets"),
    [(None, 256), (1, 1), (32768, 1), (65535, 1), (65536, 2), (98304, 2), (1 << 20, 32), (1 << 40, 4096)],
)
def test_the_default_number_of_buckets(capacity: int | None, num_buckets: int) -> None:
    assert Table("item", dim=4, capacity=capacity).resolved_num_buckets == num_buckets
    assert Table("item", dim=4, capacity=1 << 30, num_buckets=64).resolved_num_buckets == 64


@given(st.integers(1, 3000))
def test_a_number_of_buckets_serves_so_many_servers(num_servers: int) -> None:
    """Each server owns some, and none many more than the others; a number that the table names stands."""
    tables = (Table("a", dim=4), Table("b", dim=4, capacity=1 << 20), Table("c", dim=4, num_buckets=64))
    job = Job(tables=(*tables, Table("d", dim=4, shard="table"))).on_servers(num_servers, None)
    assert job.tables[1:] == (*tables[1:], Table("d", dim=4, shard="table"))
    buckets = job.tables[0].resolved_num_buckets
    assert buckets == max(256, 1 << (8 * num_servers - 1).bit_length())
    owned = np.bincount(BucketMap.even([buckets], num_servers).owners[0], minlength=num_servers)
    assert owned.min() > 0 and owned.max() <= 1.13 * buckets / num_servers
    there = Job(tables=(Table("a", dim=4, num_buckets=1024), Table("c", dim=4, num_buckets=128)))
    assert Job(tables=tables).on_servers(num_servers, there).tables == (there.tables[0], *tables[1:])


@pytest.mark.parametrize("kind", CONFIGS)
def test_objects_are_frozen_hashable_and_picklable(kind: Any) -> None:
    made = kind(**required(kind))
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
        made.anything = 1
    assert hash(made) == hash(kind(**required(kind)))
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize("kind", [*CONFIGS, Feature])
def test_help_explains_every_field(kind: Any) -> None:
    text = pydoc.plain(pydoc.render_doc(kind))
    for each in dataclasses.fields(kind):
        assert re.search(rf"^ \|  {each.name}: \S", text, re.MULTILINE), f"help() says nothing of {each.name}"


# The dict form

amounts = st.floats(0.0, LARGEST_FLOAT32)
values = st.floats(-60000.0, 60000.0)  # fits every dtype
betas = st.tuples(*[st.floats(0.0, 1.0, exclude_max=True)] * 2)
positive = st.floats(1e-30, 1e30)
optimizers: st.SearchStrategy[Optimizer] = st.one_of(
    st.builds(SGD, lr=amounts, momentum=positive, nesterov=st.booleans(), weight_decay=amounts),
    st.builds(Adagrad, lr=amounts, weight_decay=amounts, initial_accumulator_value=amounts, eps=amounts),
    st.builds(RowWiseAdagrad, lr=amounts, weight_decay=amounts, initial_accumulator_value=amounts, eps=amounts),
    st.builds(Adam, lr=amounts, betas=betas, eps=amounts, weight_decay=amounts),
    st.builds(AdamW, lr=amounts, betas=betas, eps=amounts, weight_decay=amounts),
    st.builds(Ftrl, lr=st.floats(1e-5, 1e30), beta=positive, l1=amounts, l2=st.floats(0.0, 1e38)),
)
initials: st.SearchStrategy[tables.Initial] = st.one_of(
    st.builds(lambda pair: Uniform(low=min(pair), high=max(pair)), st.tuples(values, values)),
    st.builds(Normal, mean=values, std=st.floats(0.0, 500.0)),
    st.builds(Constant, values),
    st.sampled_from([Zeros(), ScaledUniform()]),
)
admissions: st.SearchStrategy[tables.Admission] = st.one_of(
    st.just(Always()),
    st.builds(Probability, st.floats(0.0, 1.0, exclude_min=True)),
    st.builds(MinCount, st.integers(1, 2**31 - 1), window=st.integers(1, 2**63 - 1)),
)
names = st.text(min_size=1, max_size=60).filter(str.isprintable)
bounds: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(dict, on_full=st.sampled_from(["evict", "grow"])),
    st.builds(dict, capacity=st.integers(65536, 2**32 - 2), on_full=st.sampled_from(["evict", "raise", "grow"])),
)
made_tables = st.builds(
    lambda name, bound, **options: Table(name, **bound, **options),
    names,
    bounds,
    dim=st.integers(1, 65536),
    optimizer=optimizers,
    initial=initials,
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    admission=admissions,
    expire_after=st.none() | st.integers(1, 2**32 - 2),
    absent=st.sampled_from(["initial", "zeros"]),
    on_nonfinite=st.sampled_from(["raise", "skip"]),
    frozen=st.booleans()
    | st.lists(st.integers(0, 2**64), min_size=2, max_size=2).map(lambda pair: range(*sorted(pair)))
    | st.sets(st.integers(0, 2**64 - 1), max_size=5),
    shard=st.sampled_from(["rows", "table"]),
    num_buckets=st.none() | st.integers(0, 16).map(lambda bits: 1 << bits),
)


@given(made_tables)
def test_a_table_survives_json_exactly_and_the_core_reads_every_field(table: Table) -> None:
    native_config(table)
    through = Table.from_dict(json.loads(json.dumps(table.to_dict(), allow_nan=False)))
    assert through == table
    assert repr(through) == repr(table)  # == calls 0.0 and -0.0 equal, repr does not


def test_a_dict_may_leave_out_what_has_a_default() -> None:
    short = {"name": "item", "dim": 4, "optimizer": {"type": "Adam", "betas": [0.5, 0.5]}}
    assert Table.from_dict(short) == Table("item", dim=4, optimizer=Adam(betas=(0.5, 0.5)))
    assert Adagrad.from_dict({"lr": 0.5}) == Adagrad.from_dict(Adagrad(lr=0.5).to_dict()) == Adagrad(lr=0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capasity": 4}, "table 'item': unknown key 'capasity'; the nearest known one is 'capacity'"),
        ({"foo": 4}, "table 'item': unknown key 'foo'; known are 'name', 'dim', 'optimizer', .*, 'shard'$"),
        ({7: 4}, "table 'item': unknown key 7; known are 'name', 'dim', 'optimizer', "),
        (
            {"optimizer": {"type": "SGD", "momentun": 0.9}},
            "table 'item': optimizer: SGD: .*nearest known one is 'momentum'",
        ),
        ({"optimizer": {"type": "Adagard"}}, "table 'item': optimizer: type is 'Adagard'; the nearest .* 'Adagrad'"),
        ({"optimizer": {"type": ["SGD"]}}, r"table 'item': optimizer: type is \['SGD'\]; the nearest"),
        ({"optimizer": {"type": "foo"}}, "optimizer: type is 'foo'; known are 'SGD', 'Adagrad', .*'Ftrl'$"),
        ({"optimizer": {"lr": 0.1}}, "table 'item': optimizer: the key 'type' is missing; add it, one of SGD, Adagrad"),
        ({"optimizer": {"type": "SGD", "lr": -1}}, "table 'item': optimizer: SGD: lr is -1"),
        ({"optimizer": "SGD"}, "table 'item': optimizer: found 'SGD' .*; expected a dict"),
        ({"initial": {"type": "Constant"}}, "table 'item': initial: Constant: the key 'value' is missing"),
        ({"initial": {"type": "Zeros", "low": 0}}, "initial: Zeros: unknown key 'low'; Zeros has none: remove it"),
        ({"admission": {"type": "MinCount", "n": 0}}, "table 'item': admission: MinCount: n is 0"),
        ({"name": 3}, "Table: name is 3"),
    ],
)
def test_a_wrong_dict_is_explained(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Table.from_dict({"name": "item", "dim": 4} | changes)


def test_a_dict_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="SGD: type is 'Adam'; expected 'SGD'"):
        SGD.from_dict(Adam().to_dict())
    wrong: Any = [("lr", 0.1)]
    for kind in (SGD, Table):
        with pytest.raises(ConfigError, match="expected a dict"):
            kind.from_dict(wrong)
