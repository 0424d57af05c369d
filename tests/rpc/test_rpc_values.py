"""Values as frames and methods as numbers, without a socket: encoded values are decoded, and other frames refused."""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rpc_parts import Calls, pairs, same
from satrap.errors import ConfigError, InputError, RpcError
from satrap.rpc.faults import decode_error, encode_error
from satrap.rpc.header import Origin
from satrap.rpc.methods import methods_of
from satrap.rpc.values import ArrayType, ValueType, decode, encode, in_pieces, read_type


def name(i: int) -> str:
    return f"value {i}"


@given(st.lists(pairs(), max_size=6), st.integers(0, 7), st.integers(1, 100))
def test_values_make_a_round_trip(given: list[tuple[ValueType, Any]], shift: int, most: int) -> None:
    kinds, values = [kind for kind, _ in given], [value for _, value in given]
    frames = encode(kinds, values, name, InputError)
    assert len(frames) == 1 + sum(isinstance(value, np.ndarray) for value in values)
    pieces = in_pieces(frames, most)
    assert pieces[0] == frames[0] and all(len(piece) <= most for piece in pieces[1:])
    for each in (frames, pieces):
        # A frame may start anywhere in the receive buffer.
        moved = [memoryview(b" " * shift + bytes(frame))[shift:] for frame in each]
        decoded = decode(kinds, moved, name)
        assert all(map(same, decoded, values))
        for value in decoded:
            assert not isinstance(value, np.ndarray) or (value.flags.aligned and not value.flags.writeable)


@given(st.lists(pairs(), max_size=4), st.data())
def test_damaged_frames_are_refused_or_mean_other_values(given: list[tuple[ValueType, Any]], data: Any) -> None:
    kinds = [kind for kind, _ in given]
    frames = [bytes(frame) for frame in encode(kinds, [value for _, value in given], name, InputError)]
    at = data.draw(st.integers(0, len(frames) - 1))
    frames[at] = data.draw(st.binary(max_size=90) | st.just(frames[at] + b"\0") | st.just(frames[at][:-1]))
    try:
        decoded = decode(kinds, [memoryview(frame) for frame in frames], name)
    except RpcError:
        return
    again = encode(kinds, decoded, name, InputError)
    assert all(map(same, decode(kinds, again, name), decoded))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1",
        "[NaN]",
        "[Infinity]",
        "[1e999]",
        "[1]x",
        "[" * 100_000,
        '["1"]',
        "[1.5]",
        "[true]",
        "[null]",
        "[18446744073709551616]",
        "[1, 2]",
        "[]",
        "[" + "9" * 5000 + "]",
        "\xff",
    ],
)
def test_json_that_is_not_the_value(text: str) -> None:
    with pytest.raises(RpcError):
        decode([read_type("x", int)], [text.encode("latin-1")], name)


@pytest.mark.parametrize("size", ["1", "3", "-1", "true", "null", '"2"', "2.0", "[]"])
def test_an_arrays_size_must_be_that_of_its_frame(size: str) -> None:
    kinds = [ArrayType(np.dtype(np.uint32))]
    assert decode(kinds, [b"[2]", bytes(8)], name)[0].size == 2
    with pytest.raises(RpcError, match=r"value 0 has (a|no) frame|found 2 frames; expected 1"):
        decode(kinds, [f"[{size}]".encode(), bytes(8)], name)


def test_wrong_numbers_of_frames_and_invalid_bools() -> None:
    kinds: list[ValueType] = [ArrayType(np.dtype(np.bool_))]
    with pytest.raises(RpcError, match="found 3 frames; expected 2"):
        decode(kinds, [b"[1]", b"\1", b""], name)
    with pytest.raises(RpcError, match="value 0 has no frame"):
        decode(kinds, [b"[1]"], name)
    with pytest.raises(RpcError, match="no list of values; expected 1"):
        decode(kinds, [], name)
    with pytest.raises(RpcError, match="neither 0 nor 1; expected bool\\[\\]"):
        decode(kinds, [b"[1]", b"\2"], name)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, True),
        (int, 1.0),
        (int, 2**64),
        (int, np.int64(1)),
        (float, "1"),
        (float, float("nan")),
        (float, float("inf")),
        (bool, 1),
        (str, b"x"),
        (str, None),
        (list[int], [1, "2"]),
        (list[int], (1, 2)),
        (dict[str, int], {1: 1}),
        (object, {"a": {1: 2}}),
        (object, [object()]),
        (object, float("-inf")),
        (NDArray[np.uint64], [1]),
        (NDArray[np.uint64], np.zeros(2)),
        (NDArray[np.uint64], np.zeros((1, 2), np.uint64)),
        (NDArray[np.uint64], None),
        (NDArray[np.float32] | None, 0),
    ],
)
def test_values_that_do_not_fit_are_refused_before_they_are_sent(annotation: Any, value: object) -> None:
    with pytest.raises(InputError, match=r"value 0 is .*; expected "):
        encode([read_type("x", annotation)], [value], name, InputError)


def test_values_that_nest_too_deeply_or_are_too_many() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InputError, match="expected object"):
        encode([read_type("x", object)], [endless], name, InputError)
    with pytest.raises(InputError, match="at most 4194304: send arrays"):
        encode([read_type("x", str)], ["x" * (5 << 20)], name, InputError)
    with pytest.raises(RpcError, match="expected at most 4194304"):
        decode([read_type("x", str)], [json.dumps(["x" * (5 << 20)]).encode()], name)


def test_arrays_that_are_not_contiguous_arrive_in_order() -> None:
    ids = np.arange(10, dtype=np.uint64)[::-2]
    frames = encode([ArrayType(ids.dtype)], [ids], name, InputError)
    assert np.array_equal(decode([ArrayType(ids.dtype)], frames, name)[0], ids)


@pytest.mark.parametrize(
    "annotation",
    [
        tuple[int, int],
        set[int],
        bytes,
        dict[int, int],
        np.ndarray,
        NDArray[np.complex128],
        NDArray[np.str_],
        Origin,
        NDArray[Any],
        NDArray[np.float32] | int,
        NDArray[np.float32] | NDArray[np.int64],
        list[NDArray[np.int64]],
        Callable[[], int],
    ],
)
def test_annotations_that_cannot_be_encoded(annotation: Any) -> None:
    with pytest.raises(ConfigError, match=r"x: found .*"):
        read_type("x", annotation)


# -- methods -----------------------------------------------------------------------------------------------------------


def test_a_methods_number_depends_on_its_whole_signature() -> None:
    methods = methods_of(Calls)
    assert str(methods["double"]) == "Calls.double(ids: uint64[]) -> uint64[]"
    assert str(methods["nothing"]) == "Calls.nothing() -> None"
    assert str(methods["echo"]).startswith("Calls.echo(Origin, ids: uint64[], rows: float32[] | None, flags: bool[],")
    assert str(methods["echo"]).endswith("str | None, list[int] | None, dict[str, object] | None)")
    assert len({method.number for method in methods.values()}) == len(methods)

    class Other(Protocol):
        def double(self, ids: NDArray[np.int64]) -> NDArray[np.uint64]: ...

    assert methods_of(Other)["double"].number != methods["double"].number


def test_arguments_by_position_by_name_and_by_default() -> None:
    class Named(Protocol):
        def read(self, origin: Origin, table: int, ids: NDArray[np.uint64], *, train: bool = True) -> None: ...

    method, origin, ids = methods_of(Named)["read"], Origin(step=3), np.arange(3, dtype=np.uint64)
    whole: tuple[object, ...] = (origin, 1, ids)
    good: list[tuple[tuple[object, ...], dict[str, object]]]
    good = [(whole, {}), (whole[:1], {"ids": ids, "table": 1}), (whole, {"train": True})]
    for by_place, named in good:
        sent, frames = method.encode_arguments(by_place, named)
        positional, by_name = method.decode_arguments(sent, frames)
        assert positional[:2] == [origin, 1] and np.array_equal(positional[2], ids) and by_name == {"train": True}
    bad: list[tuple[tuple[object, ...], dict[str, object]]]
    bad = [(whole[:1], {}), ((*whole, True), {}), (whole, {"trian": True})]
    for by_place, named in bad:
        with pytest.raises(InputError, match=r"Named\.read: .*; expected Named\.read\(Origin, table: int,"):
            method.encode_arguments(by_place, named)
    with pytest.raises(InputError, match=r"the first argument has type int; expected Origin"):
        method.encode_arguments((1, 1, ids), {})


def test_results_that_do_not_match_the_annotation() -> None:
    methods = methods_of(Calls)
    with pytest.raises(RpcError, match=r"Calls\.nothing returned type int; expected None"):
        methods["nothing"].encode_result(1)
    with pytest.raises(RpcError, match=r"Calls\.double: the result is float64 of shape \(2,\); expected uint64\[\]"):
        methods["double"].encode_result(np.zeros(2))
    with pytest.raises(RpcError, match=r"Calls\.echo returned type list; expected a tuple of 14"):
        methods["echo"].encode_result([])


class NotAnnotated(Protocol):
    def f(self, x) -> None: ...  # type: ignore[no-untyped-def]


class NoResult(Protocol):
    def f(self, x: int): ...  # type: ignore[no-untyped-def]


class VariableArguments(Protocol):
    def f(self, *x: int) -> None: ...


class Reserved(Protocol):
    def f(self, deadline: float) -> None: ...


class Empty(Protocol):
    def _f(self) -> None: ...


class NotAProtocol:
    def f(self) -> None: ...


@pytest.mark.parametrize(
    ("protocol", "words"),
    [
        (NotAnnotated, "NotAnnotated.f: x has no annotation"),
        (NoResult, "NoResult.f: the result has no annotation"),
        (VariableArguments, "takes any number of arguments"),
        (Reserved, "deadline is reserved for callers"),
        (Empty, "has no public method"),
        (NotAProtocol, "expected a class derived from typing.Protocol"),
    ],
)
def test_protocols_that_cannot_be_served(protocol: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        methods_of(protocol)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_long_error_is_shortened() -> None:
    long = decode_error(encode_error(ValueError("x" * 10**6)), "m", "a")
    assert len(str(long)) < 10_000 and "(1000000 characters)" in str(long)


@pytest.mark.parametrize(
    "frames", [[], [b""], [b"[]"], [b'["A", 1]'], [b'["A"]'], [b"{}"], [b"[" * 10**5], [b"x", b"y"]]
)
def test_errors_that_cannot_be_read(frames: list[bytes]) -> None:
    with pytest.raises(RpcError, match="its error is not readable"):
        raise decode_error(frames, "m", "a")


def test_an_unknown_error_name_is_not_looked_up() -> None:
    for name in ("SystemExit", "__builtins__", "__doc__", "Exception"):
        assert type(decode_error([json.dumps([name, "x"]).encode()], "m", "a")) is RpcError


def test_what_a_signals_handler_raises_while_json_is_read_passes_through() -> None:
    kinds = [read_type("x", int)]
    value, refusal = encode(kinds, [7], name, InputError), encode_error(InputError("no"))
    for reads in (lambda: decode(kinds, value, name), lambda: decode_error(refusal, "m", "a")):
        for moment in itertools.count():
            with raised_in_json(moment) as came:
                try:
                    reads()
                except InputError as error:
                    assert str(error) == "stop"
            if not came:
                break
        assert moment > 3


@contextmanager
def raised_in_json(moment: int) -> Iterator[list[int]]:
    """Raise an error at the n-th line that runs in the json module; what it returns is filled when that happened."""
    came: list[int] = []
    lines = itertools.count()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(str(Path(json.__file__).parent)):
            return None
        if event == "line" and next(lines) == moment:
            came.append(moment)
            raise InputError("stop")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield came
    finally:
        sys.settrace(before)
