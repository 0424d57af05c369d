"""Paths and URLs are told apart in one place: what looks like a URL and is none reaches no disk, wherever a path is
taken."""

from __future__ import annotations

import argparse
import os
import re
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import satrap
from satrap import CSV, Arrow, Criteo, Deployment, Parquet, Reader
from satrap.checkpoint.run_directory import RunDirectory
from satrap.cli.main import main
from satrap.cli.parser import command_parser
from satrap.config.location import Location, local_path
from satrap.config.optimizers import Adagrad
from satrap.config.path_allowlist import PathAllowlist
from satrap.config.tables import Table
from satrap.data.source import Source
from satrap.data.synthetic import Clicks
from satrap.deploy.job_file import Storage
from satrap.errors import ConfigError, SatrapError
from satrap.monitor.training_record import open_record
from satrap.rpc.keys import Keys, create_keys
from satrap.server.server import Server
from satrap.storage.open_folder import open_folder
from satrap.table.store import Store

SCHEMES = st.sampled_from(["s3", "S3", "gs", "az", "abfss", "memory", "hdfs", "https", "x-y+z.1"])
NAMES = st.text(string.ascii_letters + string.digits + "-_.= ", min_size=1, max_size=8).filter(
    lambda name: name.strip(".") == name.strip() == name
)
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
LOOKALIKES = ["s3:/bucket/run", "s3://", "s3:///run", "memory:/x", "memory://", "file://", "file:/x", "s3:bucket/run"]
LOOKALIKES += ["ck=s3://b/run", " s3://b/run", "s3://b/run ", "./s3://b", "runs/s3:/b", "/app/s3:/b/run", "x=gs:/b"]
LOOKALIKES += ["c://x", "s3://b/s3://c", "s3://b*/x", "file:///a/s3://b", "simplecache::s3://b/x"]


@given(scheme=SCHEMES, path=PATHS)
def test_a_url_is_what_its_text_says_and_no_url_after_pathlib(scheme: str, path: str) -> None:
    url = f"{scheme}://{path}"
    for text in (url, f"{url}/"):
        location = Location.parse(text)
        assert location.is_url and (location.scheme, location.path) == (scheme.lower(), path)
    assert str(location) == f"{scheme.lower()}://{path}" == str(location.absolute())
    assert Location.parse(str(location)) == location
    mangled: list[object] = [Path(url), Path(url) / "run", str(Path(url)), f"ck={url}", f" {url}", f"base/{url}"]
    mangled += [os.path.join("/base", url)]
    if scheme != "x-y+z.1":  # a folder within a path: only of schemes that are known
        mangled += [os.path.abspath(url), Path(url).absolute(), Path("base") / url, f"{scheme}:{path}"]
    for each in mangled:
        with pytest.raises(ConfigError, match=rf"^Store: path is {re.escape(repr(os.fspath(each)))}") as caught:  # type: ignore[call-overload]
            Location.parse(each, "Store: path")
        assert f"://{path}" in str(caught.value), "the error names the URL"


@given(path=PATHS, begin=st.sampled_from(["", "/", "../", "./"]))
@example(path="12:30/a", begin="")
@example(path="a:b", begin="")
@example(path="day:1/x", begin="./")
def test_a_path_is_local_and_keeps_its_name(path: str, begin: str) -> None:
    location = Location.parse(begin + path)
    assert not location.is_url and (begin == "./" or location == Location.parse(Path(begin + path)))
    assert os.path.abspath(location.path) == os.path.abspath(begin + path)
    assert local_path(f"file://{os.path.abspath(begin + path)}", "x") == Path(os.path.abspath(begin + path))
    assert Location.parse(location.absolute().path) == location.absolute()


def test_a_file_whose_name_has_a_colon_is_reachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a:b", "./s3:b", "./s3:/b", f"{tmp_path}/gs:b"):
        store = Store(Table("t", dim=2, optimizer=Adagrad(lr=0.1)))
        store.save(name)
        store.save(name)
        assert Path(name, "manifest.json").is_file() and len(Store.load(name)) == 0
        with Reader(name) as reader:
            assert list(reader.tables) == ["t"]
    assert len(Store.load(f"{tmp_path}/s3:/b")) == 0  # since there is such a folder
    with pytest.raises(ConfigError, match=re.escape("for a local file or folder, './s3:/b', as a string")):
        Store.load("s3:/b")


def test_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert os.fspath(open_folder("~/run")) == f"{tmp_path}/run" == os.fspath(open_folder("file://~/run"))


def in_all_places(path: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields the name and the call of everything that takes a path."""
    store = Store(Table("t", dim=2, optimizer=Adagrad(lr=0.1)))
    kinds: dict[str, Callable[..., Source]] = {each.__name__: each for each in (CSV, Parquet, Arrow)}
    for name, kind in kinds.items():
        yield name, lambda kind=kind: kind(path=path).signature()  # type: ignore[misc]
    yield "Criteo", lambda: Criteo(path=path).signature()
    yield "Store.save", lambda: store.save(path)
    yield "Store.save_changes", lambda: store.save_changes(path, since=1)
    yield "Store.load", lambda: Store.load(path)
    yield "Store.apply_changes", lambda: store.apply_changes(path)
    yield "Store", lambda: Store(Table("t", dim=2, optimizer=Adagrad(lr=0.1)), shared=path)
    yield "Store.attach", lambda: Store.attach(path)
    yield "Checkpoint", lambda: RunDirectory(path)
    yield "Reader", lambda: Reader(path)
    yield "Reader.keys", lambda: Reader(servers=["tcp://h:1"], keys=path)
    yield "Deployment.keys", lambda: Deployment(["tcp://h:1"], keys=path)
    yield "Deployment.shared", lambda: Deployment(shared=path)
    yield "Server", lambda: Server(shared=path)
    yield "--checkpoints", lambda: Server(checkpoints=[path])
    yield "--data", lambda: PathAllowlist([path], "--data")
    yield "Progress", lambda: open_record(path, 0)
    yield "JsonLines", lambda: satrap.JsonLines(path)
    yield "TensorBoard", lambda: satrap.TensorBoard(path)
    yield "Keys", lambda: Keys.read(path)
    yield "keys", lambda: create_keys(path)
    yield "Clicks", lambda: Clicks(num_samples=1).write_parquet(path)
    yield "Storage", lambda: Storage(checkpoints=[os.fspath(path)])


@pytest.mark.parametrize("path", [*LOOKALIKES, Path("s3://bucket") / "run"])
def test_no_place_takes_a_lookalike(path: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = os.fspath(path)
    for name, call in in_all_places(path):
        with pytest.raises(SatrapError) as caught:
            call()
        assert f"is {text!r}" in str(caught.value), name
    assert not list(tmp_path.iterdir())


PATH_WORDS = ("FILE", "DIR", "RUN", "JOB", "DIR|URL")


def path_options() -> Iterator[tuple[str, argparse.Action]]:
    """Yields each option or argument of the command line that names a path, with its command."""
    (commands,) = (each for each in command_parser()._actions if isinstance(each, argparse._SubParsersAction))
    for name, command in commands._name_parser_map.items():
        for action in command._actions:
            nested = action._name_parser_map.items() if isinstance(action, argparse._SubParsersAction) else ()
            for each in [action, *(inner for _, parser in nested for inner in parser._actions)]:
                if each.metavar in PATH_WORDS:
                    yield name, each


def test_every_option_that_names_a_path_parses_it() -> None:
    options = list(path_options())
    assert {name for name, _ in options} >= {"run", "scale", "status", "report", "plan", "server", "worker", "deploy"}
    for name, action in options:
        assert action.type is not None, (name, action.dest)
        for text in LOOKALIKES:
            with pytest.raises(argparse.ArgumentTypeError, match=re.escape(f"is {text!r}")):
                action.type(text)  # type: ignore[operator]
        takes_urls = action.metavar == "DIR|URL"
        if takes_urls:
            assert action.type("S3://b/run/") == "s3://b/run"  # type: ignore[operator]
        else:
            with pytest.raises(argparse.ArgumentTypeError, match="a URL; expected the path of a local"):
                action.type("s3://b/run")  # type: ignore[operator]


@pytest.mark.parametrize("command", [["status", "--folder"], ["report"], ["run", "x.py", "--checkpoints"]])
def test_a_command_says_what_is_wrong(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "s3:/bucket/run"])
    assert caught.value.code == 2 and "is no URL; expected 's3://bucket/run'" in capsys.readouterr().err
