"""What may be a secret is hidden by its name, in any form of settings; what is none stays as it is."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from report_records import read_records
from satrap.launch.process_command import Script
from satrap.monitor.hidden_secrets import HIDDEN, hide_secrets
from satrap.monitor.progress import Progress

SECRET = "hunter2"
NAMES = ["password", "PASSWORD", "db_password", "api-key", "apiKey", "aws_secret_access_key", "token", "tokens", "key"]
NAMES += ["HF_TOKEN", "credentials", "secret.name", "authToken", "passwd", "X-Amz-Signature"]
OTHERS = ["lr", "monkey", "keyboard", "epochs", "run", "tokenizer", "author", "bypass"]


@dataclass
class Settings:
    """Settings of a script that are no mapping."""

    password: str
    lr: float = 0.5


@pytest.mark.parametrize("name", NAMES)
def test_a_secret_is_hidden_in_any_form(name: str) -> None:
    given: list[Any] = [
        {name: SECRET},
        {name: [SECRET, SECRET]},
        {name: {"value": SECRET}},
        {"a": {"b": {name: SECRET}}},
        {"arguments": [f"--{name}", SECRET, "--lr", "0.5"]},
        {"arguments": [f"--{name}={SECRET}"]},
        {"text": f"{name}: '{SECRET} x', lr: 0.5"},
        {"url": f"s3://bucket/run?lr=1&{name}={SECRET}"},
    ]
    for each in given:
        hidden = str(hide_secrets(each))
        assert SECRET not in hidden and HIDDEN in hidden, each


def test_other_texts_with_secrets() -> None:
    found = hide_secrets({"config": Settings(SECRET), "db": f"postgres://me:{SECRET}@host/x", "path": Path("a/b")})
    assert found == {
        "config": f"Settings(password={HIDDEN}, lr=0.5)", "db": f"postgres://me:{HIDDEN}@host/x", "path": Path("a/b")
    }  # fmt: skip


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "Basic ", "token  ", ""])
def test_the_secret_of_a_header_is_hidden_with_its_scheme(scheme: str) -> None:
    texts = [f"Authorization: {scheme}{SECRET}", f"x Authorization={scheme}{SECRET}; lr=0.5"]
    texts += [f'{{"Authorization": "{scheme}{SECRET}"}}', f"curl -H 'Proxy-Authorization: {scheme}{SECRET}' a"]
    for text in texts:
        for each in (text, {"headers": [text]}, ["--header", text]):
            hidden = str(hide_secrets(each))
            assert SECRET not in hidden and HIDDEN in hidden, each


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["a", "s3://b/c", "1:2"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(OTHERS), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_what_is_no_secret_stays(value: Any) -> None:
    assert hide_secrets(value) == value


def test_numbers_are_no_secrets() -> None:
    settings = {"num_tokens": 5, "key": None, "token": True, "password": ""}
    assert hide_secrets(settings) == settings


def test_a_record_has_no_secret(tmp_path: Path) -> None:
    with Progress(None, [], record=tmp_path, settings={"password": SECRET, "lr": 0.5}):
        pass
    (start, _) = read_records(tmp_path / "records" / "trainer-0.jsonl").lines
    assert start["settings"]["script"] == {"password": HIDDEN, "lr": 0.5}
    assert SECRET not in json.dumps(start)


def test_a_secret_is_no_path_that_servers_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be in a server's command line, and in the error that lists what is permitted."""
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    arguments = ["--password", SECRET, f"--db-token={SECRET}", f"secret={SECRET}", "--run", "runs/a", "key=s3://b/c"]
    arguments += ["--key-file", "keys/client.key", "--token", "--verbose", "plain"]
    named = Script(path=Path("x.py"), arguments=tuple(arguments)).named_paths()
    words = ("runs/a", "keys/client.key", "plain")
    assert set(named) == {str(tmp_path), "s3://b/c", *(f"{tmp_path}/{each}" for each in words)}


@pytest.mark.parametrize(
    "secret", ["wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "/9j4AAQSkZJRg/abcDEF==", "ab+c/", "YWJj=="]
)
def test_a_secret_in_base64_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    """It may have slashes. A path that exists is one, as is one with a dot, and a URL."""
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    Path("keys").mkdir()
    arguments = ["--aws-secret-access-key", secret, f"--token={secret}", f"password={secret}"]
    arguments += ["--key-file", "keys/new", "--key-folder", f"{tmp_path}/keys/a", "--keys=gs://b/c", f"--run={secret}x"]
    named = Script(path=Path("x.py"), arguments=tuple(arguments)).named_paths()
    paths = {f"{tmp_path}/keys/new", f"{tmp_path}/keys/a", "gs://b/c", os.path.abspath(f"{secret}x")}
    assert set(named) == {str(tmp_path), *paths}
