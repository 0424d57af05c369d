"""S3 for tests: moto's HTTP server in a process that can hold, refuse and record requests. `python moto_s3.py FOLDER`.

The folder is how a test talks to it: `hold` has a pattern, and a request to write a key that matches waits as long as
that file exists, and creates `held` first; `refuse` refuses all requests, as if the credentials had no permission.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rpc_parts import wait_until
from satrap.storage.open_folder import _bucket

BUCKET = "bucket"
_ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
_DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class S3:
    """The server, from the tests' side."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        import boto3

        self.endpoint, self._folder = endpoint, folder
        self._client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )
        self._client.create_bucket(Bucket=BUCKET)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return the keys that begin with the prefix, with their bytes."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {each["Key"]: each["Size"] for page in pages for each in page.get("Contents", [])}

    def get(self, key: str) -> bytes:
        return bytes(self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read())

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=key, Body=data)

    @contextmanager
    def held(self, pattern: str) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
        """Hold writes of keys that match. Yields two functions: one waits until a write is held, one lets it go, and
        those that follow."""
        hold, held, new = (self._folder / name for name in ("hold", "held", "new"))
        new.write_text(pattern)
        new.rename(hold)
        try:
            yield lambda: wait_until(held.exists), hold.unlink
        finally:
            hold.unlink(missing_ok=True)
            held.unlink(missing_ok=True)

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Refuse all requests."""
        (self._folder / "refuse").touch()
        try:
            yield
        finally:
            (self._folder / "refuse").unlink()


@contextmanager
def running_s3(folder: Path) -> Iterator[S3]:
    """Start the server; afterwards end it."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder)], stdout=subprocess.PIPE, text=True, env={**os.environ, **_ENVIRONMENT}
    )
    assert process.stdout is not None
    try:
        yield S3(folder, f"http://127.0.0.1:{int(process.stdout.readline())}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Make this process, and those that it starts, use the endpoint."""
    for name, value in {**_ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)
    _bucket.cache_clear()


class _Held:
    """A WSGI application that holds and refuses requests to another one."""

    def __init__(self, application: Any, folder: Path) -> None:
        self._application, self._folder = application, folder

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if (self._folder / "refuse").exists():
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [_DENIED]
        hold = self._folder / "hold"
        while environ["REQUEST_METHOD"] in ("PUT", "POST") and hold.exists():
            try:
                if not re.search(hold.read_text(), environ["PATH_INFO"]):
                    break
            except FileNotFoundError:
                break
            (self._folder / "held").touch()
            time.sleep(0.01)
        return self._application(environ, start_response)


def main(folder: Path) -> None:
    import logging

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = _Held(DomainDispatcherApplication(create_backend_app), folder)
    server = make_server("127.0.0.1", 0, application, threaded=True)
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
