"""A real browser for tests: starts headless Chromium or Chrome and speaks its DevTools protocol through a pipe."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from waiting import DEADLINE_SECONDS

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")


def find_browser() -> str | None:
    """Return the path of the browser that SATRAP_TEST_BROWSER names, or of the first of NAMES; None: there is none."""
    named = os.environ.get("SATRAP_TEST_BROWSER")
    return shutil.which(named) if named else next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a headless browser, and what it reported: console messages, exceptions and requests."""

    def __init__(self, commands: int, replies: int) -> None:
        self._commands, self._replies = commands, replies
        self._unread = b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        """Errors and warnings of the console, and exceptions of the page's script."""
        self.requests: list[str] = []
        """Addresses that the page requested, its own first."""
        self._is_loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while True:
            reply = self._next()
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                result: dict[str, Any] = reply["result"]
                return result

    def open(self, path: Path, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Open a file in a window of this size that prefers this colour scheme."""
        self.problems.clear()
        self.requests.clear()
        self._is_loaded = False
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._is_loaded:
            self._next()

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def picture(self, box: dict[str, float]) -> np.ndarray:
        """Return what a place of the page shows, as an array [height, width, 3] of bytes."""
        clip = {name: box[name] for name in ("x", "y", "width", "height")} | {"scale": 1}
        data = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"), np.int64)

    def move_pointer(self, x: float, y: float) -> None:
        """Move the pointer to a place in the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser did not answer in time"
            data = os.read(self._replies, 1 << 16)
            assert data, "the browser exited"
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        self._observe(found.get("method", ""), found.get("params", {}))
        return found

    def _observe(self, method: str, values: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown" or (
            method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert")
        ):
            self.problems.append(json.dumps(values))
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.problems.append(values["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Page.loadEventFired":
            self._is_loaded = True


@contextlib.contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    """Start the browser of `find_browser`, with its profile in the folder."""
    path = find_browser()
    assert path is not None
    from_browser, to_test = os.pipe()
    from_test, to_browser = os.pipe()

    def give_pipes() -> None:  # the browser reads descriptor 3 and writes 4
        one, two = os.dup(from_test), os.dup(to_test)
        os.dup2(one, 3)
        os.dup2(two, 4)

    options = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}", "--disable-gpu"]
    options += ["--no-first-run", "--disable-background-networking", "--disable-extensions", "--disable-dev-shm-usage"]
    options += ["--no-sandbox"] if os.geteuid() == 0 else []
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            [path, *options, "about:blank"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, close_fds=False,
            preexec_fn=give_pipes, start_new_session=True,
        )  # fmt: skip
    for file in (from_test, to_test):
        os.close(file)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its helpers as well
        process.wait()
        for file in (to_browser, from_browser):
            os.close(file)
