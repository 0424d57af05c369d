"""Sources under URLs: every format from every kind of store, as from a disk; how many requests; errors."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import clicks
from clicks import KINDS, expected, make, read, source
from object_stores import BUCKET, S3, ObjectStore, use
from satrap.config.columns import IdColumn
from satrap.config.location import Location
from satrap.data.delimited import CSV
from satrap.errors import ConfigError, SourceError
from satrap.storage.object_folder import ObjectFile
from satrap.storage.open_folder import open_folder, open_store
from waiting import DEADLINE_SECONDS

CONTENT = bytes(range(256)) * 2000
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("seek"), st.integers(0, len(CONTENT) + 9), st.just(io.SEEK_SET)),
        st.tuples(st.just("seek"), st.integers(-9, 9), st.just(io.SEEK_END)),
        st.tuples(st.just("read"), st.integers(-1, 300_000)),
        st.tuples(st.just("read_at"), st.integers(0, 300_000), st.integers(0, len(CONTENT) + 9)),
    )
)


@given(calls=CALLS)
def check_file(calls: list[Any]) -> None:
    folder = open_folder("memory://files")
    opened, model = ObjectFile(folder, "a", len(CONTENT)), io.BytesIO(CONTENT)  # type: ignore[arg-type]
    for call, *arguments in calls:
        match call:
            case "read_at":
                size, offset = arguments
                assert bytes(opened.read_at(size, offset)) == CONTENT[offset : offset + size]
            case "seek":
                assert opened.seek(*arguments) == model.seek(*arguments)
            case "read":
                assert bytes(opened.read(*arguments)) == model.read(*arguments)
        assert opened.tell() == model.tell()


def test_an_object_is_read_like_a_file(memory: Any) -> None:
    memory.pipe_file("/files/a", CONTENT)
    check_file()


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_is_read_from_every_store(kind: str, object_store: ObjectStore, tmp_path: Path, seed: int) -> None:
    samples = make(200, seed)
    folder = open_folder(f"{object_store.root}/data-{object_store.scheme}-{kind}")
    for i in range(2):
        clicks.write(tmp_path / f"a.{kind}", samples[100 * i : 100 * i + 100])
        folder.write(f"day=2026-11-0{i} 1%3A00/[{i}].{kind}", (tmp_path / f"a.{kind}").read_bytes())
    folder.write(f"day=2026-11-01/_log/x.{kind}", b"")
    rows = [expected(sample) for sample in samples]
    for path in (f"{folder}", f"{folder}/*/?[01]?.{kind}", f"{folder}/**/[[]*"):
        assert read(source(kind, path, num_threads=2)) == rows, path
    assert read(source(kind, f"{folder}/day=2026-11-01 1%3A00/[1].{kind}")) == rows[100:]


def test_a_filesystem_that_is_passed_is_read_like_its_url(memory: Any) -> None:
    memory.pipe_file("/a.csv", b"a\n1\n2\n")
    data = CSV("memory://a.csv", ids={"a": IdColumn(kind="integer")})
    for other in (data, data.replace(path="/a.csv", filesystem=memory)):
        assert [batch.values.tolist() for batch in other.batches(["a"])] == [[1, 2]]


# -- errors ------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_read_is_named(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    began, root = time.monotonic(), object_store.root
    open_folder(f"{root}/errors").write("a.csv", b"a\n1\n")
    data = CSV(f"{root}/errors/a.csv")
    batches = data.batches(["a"])
    for path, words in (
        (f"{root}/errors/none.csv", f"{root}/errors/none.csv: there is no such file or folder"),
        (f"{root}/errors/*.txt", r"\*.txt: the glob matches no file"),
        (f"{object_store.scheme}://none/a.csv", f"{object_store.scheme}://none/a.csv: .*{object_store.no_bucket}: "),
    ):
        with pytest.raises(SourceError, match=words):
            data.replace(path=path).batches(["a"])
    with object_store.refused():
        for path in (f"{root}/errors/*.csv", f"{root}/errors/a.csv"):
            with pytest.raises(SourceError, match=r"errors/.*\.csv: it cannot be reached \(AccessDenied: "):
                data.replace(path=path).batches(["a"])
        with pytest.raises(SourceError, match=rf"{root}/errors/a.csv: cannot be read \(.*(AccessDenied|403)"):
            next(batches)
    use(monkeypatch, object_store, "http://127.0.0.1:1")
    with pytest.raises(SourceError, match=rf"errors/a.csv: .*http://127\.0\.0\.1:1/{BUCKET}/errors"):
        CSV(f"{root}/errors/a.csv").batches(["a"])
    assert time.monotonic() - began < DEADLINE_SECONDS


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"AWS_METADATA_ENDPOINT": "http://127.0.0.1:1"}, "; the environment of this process has no credentials"),
        ({"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}, "; set AWS_REGION to the region"),
    ],
    ids=["credentials", "region"],
)
def test_what_the_environment_lacks_is_named(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with redirecting() as endpoint:
        for name, value in {"AWS_ENDPOINT_URL": endpoint, **variables}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SourceError, match=rf"s3://lacks-{len(variables)}/a.csv: it cannot be reached \(.*{words}"):
            CSV(f"s3://lacks-{len(variables)}/a.csv").batches(["a"])


@contextmanager
def redirecting() -> Iterator[str]:
    """Serve what S3 answers for a bucket of another region; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(301)
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_object_that_changes_meanwhile(s3: S3) -> None:
    s3.put("changes.csv", b"a\n1\n2\n")
    batches = CSV(f"s3://{BUCKET}/changes.csv").batches(["a"])
    s3.put("changes.csv", b"a\n1\n")
    with pytest.raises(SourceError, match=r"changes.csv has 4 bytes and had 6 when reading began; it must not change"):
        list(batches)


def test_empty_objects_that_stand_for_folders_are_no_files(s3: S3) -> None:
    """Consoles and Hadoop create such objects."""
    for key, content in (
        ("marks/", b""),
        ("marks/day=1/", b""),
        ("marks/day=1/a.csv", b"a\n1\n"),
        ("marks/empty/", b""),
    ):
        s3.put(key, content)
    data = CSV(f"s3://{BUCKET}/marks", ids={"a": IdColumn(kind="integer")})
    assert [batch.values.tolist() for batch in data.batches(["a"])] == [[1]]
    with pytest.raises(SourceError, match="the folder holds no file"):
        data.replace(path=f"s3://{BUCKET}/marks/empty").batches(["a"])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "satrap.storage.obstore_store", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"s3://lacks needs the package obstore \(.*pip install 'satrap\[train\]'"):
        CSV("s3://lacks/a.csv").batches(["a"])


def test_one_opener_knows_the_key_of_a_url(memory: Any) -> None:
    for url, key in (
        ("s3://bucket/a/*.csv", "a/*.csv"),
        ("gcs://bucket/a", "a"),
        ("gs://bucket", ""),
        ("memory://a/b?", "/a/b?"),
    ):
        assert open_store(Location.parse(url))[1] == key
