"""Object stores for tests: S3 and Google Cloud Storage by moto, Azure by Azurite, which may be missing.

No emulator that can be installed implements the calls with which obstore writes to Google Cloud Storage. They are those
of S3 but for the credentials, so moto's S3 answers them.
"""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import http.client
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from satrap.storage.open_folder import _bucket
from waiting import wait_until

BUCKET, SCHEMES = "bucket", ("s3", "gs", "az")
AZURITE = "azurite-blob"
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # Azurite's own
_LISTENS = re.compile(r"successfully listens on (http://\S+)")


class ObjectStore:
    """A server with one bucket, from the tests' side."""

    scheme: str
    no_bucket: str
    """The code of the error about a missing bucket."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.endpoint, self._folder = endpoint, folder

    @property
    def root(self) -> str:
        return f"{self.scheme}://{BUCKET}"

    def environment(self, endpoint: str) -> dict[str, str]:
        """Return the variables with which a process uses the endpoint."""
        raise NotImplementedError

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return the keys that begin with the prefix, with their bytes."""
        raise NotImplementedError

    @contextmanager
    def held(self, pattern: str) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
        """Hold writes of keys that match. Yields two functions: one waits until a write is held, one lets it go, and
        those that follow."""
        name = f"held-{secrets.token_hex(4)}"  # for this call: a request of an earlier one may still create its file
        hold, held, new = (self._folder / each for each in ("hold", name, "new"))
        new.write_text(f"{name}\n{pattern}\n")
        new.rename(hold)
        try:
            yield lambda: wait_until(held.exists), hold.unlink
        finally:
            hold.unlink(missing_ok=True)

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Refuse all requests."""
        (self._folder / "refuse").touch()
        try:
            yield
        finally:
            (self._folder / "refuse").unlink()


class S3(ObjectStore):
    scheme, no_bucket = "s3", "NoSuchBucket"

    def __init__(self, folder: Path, endpoint: str) -> None:
        import boto3

        super().__init__(folder, endpoint)
        self._client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )
        self._client.create_bucket(Bucket=BUCKET)

    def environment(self, endpoint: str) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint,
        }

    def sizes(self, prefix: str = "") -> dict[str, int]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {each["Key"]: each["Size"] for page in pages for each in page.get("Contents", [])}

    def get(self, key: str) -> bytes:
        return bytes(self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read())

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=key, Body=data)


class Google(S3):
    scheme = "gs"

    def environment(self, endpoint: str) -> dict[str, str]:
        names = ("client_email", "private_key", "private_key_id")
        account = {"gcs_base_url": endpoint, "disable_oauth": True, **dict.fromkeys(names, "")}
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account)}


class Azure(ObjectStore):
    scheme, no_bucket = "az", "ContainerNotFound"

    def __init__(self, folder: Path, endpoint: str) -> None:
        import obstore

        super().__init__(folder, f"{endpoint}/{_ACCOUNT}")
        _create_container(endpoint)
        self._list: Any = obstore.list
        self._store: Any = obstore.store.AzureStore(
            BUCKET,
            account_name=_ACCOUNT,
            account_key=_KEY,
            endpoint=self.endpoint,
            client_options={"allow_http": True},
        )

    def environment(self, endpoint: str) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
            "AZURE_STORAGE_ENDPOINT": endpoint,
        }

    def sizes(self, prefix: str = "") -> dict[str, int]:
        return {each["path"]: each["size"] for chunk in self._list(self._store, prefix or None) for each in chunk}


def _create_container(endpoint: str) -> None:
    """Create the bucket, which obstore cannot do."""
    sent = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = [f"{name}:{value}" for name, value in sent.items()]
    text = "\n".join(["PUT", *[""] * 11, *lines, f"/{_ACCOUNT}/{_ACCOUNT}/{BUCKET}", "restype:container"])
    digest = hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256).digest()
    sent["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"))
    try:
        connection.request("PUT", f"/{_ACCOUNT}/{BUCKET}?restype=container", headers=sent)
        assert connection.getresponse().status == 201
    finally:
        connection.close()


@contextmanager
def running_moto(folder: Path) -> Iterator[dict[str, S3]]:
    """Start moto; afterwards end it. Yields the stores by scheme, which have the same bucket."""
    with _served(folder) as endpoint:
        yield {each.scheme: each(folder, endpoint) for each in (S3, Google)}


@contextmanager
def running_azurite(folder: Path) -> Iterator[dict[str, Azure]]:
    """Start Azurite, or skip the test if there is none; afterwards end it."""
    program = shutil.which(AZURITE)
    if program is None:
        pytest.skip(f"needs {AZURITE} on the PATH: npm install --global azurite")
    command = [program, "--blobPort", "0", "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"]
    log = folder / "azurite.log"
    with ExitStack() as stack:
        _start(stack, command, stack.enter_context(log.open("w")))
        wait_until(lambda: _LISTENS.search(log.read_text()))
        found = _LISTENS.search(log.read_text())
        assert found is not None
        yield {Azure.scheme: Azure(folder, stack.enter_context(_served(folder, found[1])))}


@contextmanager
def _served(folder: Path, *forward_to: str) -> Iterator[str]:
    """Start object_store_server.py; yields its endpoint."""
    script = Path(__file__).with_name("object_store_server.py")
    with ExitStack() as stack:
        process = _start(stack, [sys.executable, str(script), str(folder), *forward_to], subprocess.PIPE)
        assert process.stdout is not None
        stack.callback(process.stdout.close)
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"


def _start(stack: ExitStack, command: list[str], stdout: Any) -> subprocess.Popen[str]:
    """Start a process, which the stack ends."""
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    process = subprocess.Popen(command, stdout=stdout, text=True, env=environment)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def use(monkeypatch: pytest.MonkeyPatch, store: ObjectStore, endpoint: str | None = None) -> None:
    """Make this process, and those that it starts, use the store, or the same kind of store at another endpoint."""
    for name, value in store.environment(store.endpoint if endpoint is None else endpoint).items():
        monkeypatch.setenv(name, value)
    _bucket.cache_clear()
