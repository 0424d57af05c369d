"""YAML as `satrap deploy render` writes it: a reader gets the same values, whatever text they hold."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy_jobs import plain
from satrap.deploy.yaml_text import Command, Note, Octal, document

TEXT = st.one_of(
    st.text(max_size=20),
    st.text(alphabet=" -:#'\"\\$(){}[],&*!|>%@`?=\n\tab01.\u0085\u2028", max_size=12),
    st.sampled_from(
        ["", "yes", "No", "null", "~", "1", "1.0", "0x1f", "1_0", "1e3", "12:30", "2026-11-23", "-", "---", "a: b"]
    ),
)


def is_no_note(value: object) -> bool:
    return not isinstance(value, Note)


SCALAR = st.one_of(TEXT, st.integers(-(10**15), 10**15), st.booleans())
VALUE: st.SearchStrategy[Any] = st.recursive(
    st.one_of(SCALAR, st.lists(TEXT, max_size=3).map(lambda words: Command([shlex.quote(word) for word in words]))),
    lambda each: st.one_of(
        st.lists(each, max_size=3),
        st.dictionaries(TEXT, each, max_size=3),
        st.builds(Note, st.text("ab cd", min_size=1, max_size=150).filter(str.strip), each.filter(is_no_note)),
    ),
    max_leaves=12,
)


@given(st.dictionaries(TEXT, VALUE, min_size=1, max_size=4))
@settings(max_examples=150)
def test_a_reader_gets_the_values_that_were_written(value: dict[str, Any]) -> None:
    text = document(value)
    assert yaml.safe_load(text) == plain(value), text


def test_a_document_is_what_a_person_would_write() -> None:
    value = {
        "name": "run",
        "replicas": Note("One for each machine.", 2),
        "image": "example.com/team/satrap:1.0",
        "version": "1.0",
        "mode": Octal(0o440),
        "on": True,
        "command": ["satrap", "server"],
        "run": Command(["satrap", "run", "/app/train.py", "--servers", "2"]),
        "script": "set -eu\nexec true\n",
        "env": [{"name": "A", "value": "$(B)"}, Note("No value.", {"name": "C"})],
        "empty": {},
    }
    assert document(value) == (
        "name: run\n"
        "# One for each machine.\n"
        "replicas: 2\n"
        "image: example.com/team/satrap:1.0\n"
        'version: "1.0"\n'
        "mode: 0440\n"
        '"on": true\n'
        'command: ["satrap", "server"]\n'
        "run: >-\n  satrap run /app/train.py\n  --servers 2\n"
        "script: |\n  set -eu\n  exec true\n"
        "env:\n  - name: A\n    value: $(B)\n  # No value.\n  - name: C\n"
        "empty: {}\n"
    )


@pytest.mark.parametrize(
    "text", ["0o17", "0b1", "+1", ".5", "1.", ".inf", "NaN", "=", "<<", "y", "null", "1e5", "0777"]
)
def test_text_that_another_reader_takes_for_something_else_is_quoted(text: str) -> None:
    """PyYAML reads some of these as text, and others would not."""
    assert document({"a": text}) == f'a: "{text}"\n'


WORDS = st.lists(st.text("ab", min_size=1, max_size=40), min_size=1, max_size=30)


def assert_filled(lines: list[str], words: list[str], prefix: str) -> None:
    """Each line holds as many words as fit into 110 characters, one at least."""
    assert all(line.startswith(prefix) for line in lines)
    held = [line.removeprefix(prefix).split(" ") for line in lines]
    assert [word for line in held for word in line] == words
    for line, after in zip(lines, [*held[1:], None], strict=True):
        assert len(line) <= 110 or " " not in line.removeprefix(prefix)
        assert after is None or len(f"{line} {after[0]}") > 110


@given(WORDS, st.integers(0, 2))
@settings(max_examples=settings().max_examples // 3)
def test_a_comment_fills_its_lines(words: list[str], depth: int) -> None:
    value: dict[str, Any] = {"key": Note("  ".join(words), 1)}
    for _ in range(depth):
        value = {"outer": value}
    *lines, last = document(value).splitlines()[depth:]
    pad = "  " * depth
    assert last == f"{pad}key: 1"
    assert_filled(lines, words, f"{pad}# ")


@given(WORDS)
@settings(max_examples=settings().max_examples // 3)
def test_a_command_fills_its_lines(words: list[str]) -> None:
    first, *lines = document({"run": Command(words)}).splitlines()
    assert first == "run: >-"
    assert_filled(lines, words, "  ")


def test_an_option_of_a_command_begins_a_line() -> None:
    words = ["--first", "a", "-n", "--", "b", "c-d", "-"]
    assert document({"run": Command(words)}) == "run: >-\n  --first a\n  -n\n  -- b c-d\n  -\n"


@pytest.mark.parametrize("words", [[], ["a  b"], ["a", ""], ["", "a"], ["a\tb"], ["\xe9"], ["a\nb"]])
def test_a_command_that_lines_would_change_is_on_one(words: list[str]) -> None:
    (line,) = document({"run": Command(words)}).splitlines()
    assert yaml.safe_load(line) == {"run": " ".join(words)}


@pytest.mark.parametrize(("length", "num_lines"), [(66, 1), (67, 2)])
def test_a_list_of_texts_is_on_one_line_if_it_is_short(length: int, num_lines: int) -> None:
    """At most 70 characters with its brackets and quotes; never if it has anything but texts."""
    assert len(document({"a": ["x" * length]}).splitlines()) == num_lines
    assert document({"a": ["x", 1]}) == "a:\n  - x\n  - 1\n"
    assert document({"a": []}) == "a: []\n"


@pytest.mark.parametrize("text", ["\n", "a", "a\nb", " a\nb\n", "a\n\n", "\na\n", "a\tb\n", "\xe9\n"])
def test_text_that_a_block_would_change_is_quoted(text: str) -> None:
    (line,) = document({"a": text}).splitlines()
    assert yaml.safe_load(line) == {"a": text}


def test_an_empty_line_of_a_block_has_no_spaces() -> None:
    assert document({"a": {"b": "c\n\n d\n"}}) == "a:\n  b: |\n    c\n\n     d\n"


def test_comments_of_a_lists_mappings() -> None:
    value = {"a": [{"b": Note("On b.", 1), "c": Note("On c.", 2)}, {}, [{"d": 1}], Note("On e.", "e")]}
    assert document(value) == (
        "a:\n  # On b.\n  - b: 1\n    # On c.\n    c: 2\n  - {}\n  -\n    - d: 1\n  # On e.\n  - e\n"
    )
