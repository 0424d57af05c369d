"""YAML as `satrap deploy render` writes it: a reader gets the same values, whatever text they hold."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from satrap.deploy.yaml_text import Command, Note, Octal, document, plain

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
