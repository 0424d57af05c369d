"""The HTTP server of an object store, which can hold and refuse requests: `python object_store_server.py FOLDER [URL]`.

It is moto's S3, or it forwards to the Azurite at the URL. It prints its port. The folder is how a test talks to it:
`hold` has the name of a file and a pattern, each in a line: a request to write a key that matches creates the named
file, and waits as long as `hold` exists; `refuse` refuses all requests, as if the credentials had no permission.
"""

from __future__ import annotations

import http.client
import re
import sys
import time
from pathlib import Path
from typing import Any

_DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
_SIGNED = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
_OF_A_CONNECTION = {"connection", "keep-alive", "transfer-encoding"}


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
                held, pattern = hold.read_text().splitlines()
            except FileNotFoundError:
                break
            if not re.search(pattern, environ["PATH_INFO"]):
                break
            (self._folder / held).touch()
            time.sleep(0.01)
        return self._application(environ, start_response)


class _Moto:
    """moto's S3. A request for Google Cloud Storage differs in its credentials only. moto does not verify them, but
    reads the service from them."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self._application = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if not environ.get("HTTP_AUTHORIZATION", "").startswith("AWS4"):
            environ["HTTP_AUTHORIZATION"] = _SIGNED
        return self._application(environ, start_response)


class _Forward:
    """A WSGI application that forwards requests to another server. Azure's signatures do not cover the host."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        headers = {
            name.removeprefix("HTTP_").replace("_", "-"): value
            for name, value in environ.items()
            if (name.startswith("HTTP_") or name in ("CONTENT_TYPE", "CONTENT_LENGTH")) and value
        }
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        connection = http.client.HTTPConnection(self._address)
        try:
            connection.request(environ["REQUEST_METHOD"], environ["REQUEST_URI"], body, headers)
            response = connection.getresponse()
            given = [each for each in response.getheaders() if each[0].lower() not in _OF_A_CONNECTION]
            start_response(f"{response.status} {response.reason}", given)
            return [response.read()]
        finally:
            connection.close()


def main(folder: Path, forward_to: str | None = None) -> None:
    import logging

    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = _Moto() if forward_to is None else _Forward(forward_to.removeprefix("http://"))
    server = make_server("127.0.0.1", 0, _Held(application, folder), threaded=True)
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
