"""A headless Chromium driven over a pipe: what a test of a page asks, and nothing of a browser library.

`Browser.find()` gives the program's path or None; a test that has none skips with a notice.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = [
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--no-first-run", "--disable-gpu", "--mute-audio"),
    *("--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking", "--hide-scrollbars"),
    "--disable-component-update",
]


class PageError(AssertionError):
    """The page threw, or did not come to what was awaited."""


class Browser:
    """One Chromium with one tab."""

    @staticmethod
    def find() -> str | None:
        return next((path for name in NAMES if (path := shutil.which(name))), None)

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self._numbers, self._buffer = itertools.count(1), b""
        self.events: list[dict[str, Any]] = []
        to_it, self._out = os.pipe()
        self._in, from_it = os.pipe()

        def descriptors() -> None:  # Chromium reads 3 and writes 4
            high = [os.dup2(fd, place) for fd, place in ((to_it, 60), (from_it, 61))]
            for fd, place in zip(high, (3, 4), strict=True):
                os.dup2(fd, place, inheritable=True)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"],
            preexec_fn=descriptors,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_it)
        os.close(from_it)
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._session = None
            self.send("Browser.close", timeout=5)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._folder.cleanup()

    def send(self, method: str, timeout: float = 60, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        deadline = time.monotonic() + timeout
        while True:
            answer = self._read(deadline)
            if answer.get("id") == number:
                if "error" in answer:
                    raise PageError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            if not data:
                raise PageError("the browser does not answer")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    # --- what tests ask -------------------------------------------------------------------------------------------

    def view(self, width: int, height: int = 900, dark: bool = False) -> None:
        """The size of the screen, and the colours that the reader prefers."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)

    def open(self, page: Path) -> None:
        self.events.clear()
        self.send("Page.navigate", url=page.absolute().as_uri())
        self.wait("document.documentElement?.dataset.ready === 'yes'")

    def run(self, script: str) -> Any:
        """The value of an expression, which may be a promise."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def wait(self, condition: str, timeout: float = 30) -> None:
        deadline = time.monotonic() + timeout
        while not self.run(condition):
            if time.monotonic() > deadline:
                raise PageError(f"still not: {condition}; {self.faults()}")
            time.sleep(0.05)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            code = {"Enter": 13, "Escape": 27}.get(key, 0)
            self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def faults(self) -> list[str]:
        """Everything that the page threw or logged as an error since it was opened."""
        self.run("0")  # collects what has come meanwhile
        found = []
        for event in self.events:
            about = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(about["exceptionDetails"].get("exception", {}).get("description", "an exception"))
            elif event.get("method") == "Log.entryAdded" and about["entry"]["level"] == "error":
                found.append(about["entry"]["text"])
            elif event.get("method") == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
                found.append(" ".join(str(one.get("value", one.get("description"))) for one in about["args"]))
        return found

    def requests(self) -> list[str]:
        """Whatever the page asked for, but itself and what it holds."""
        self.run("0")
        urls = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("data:", "blob:", "file:"))]
