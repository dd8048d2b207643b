"""A headless Chromium that a test opens a page in, over the devtools protocol on a pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in BROWSERS if (path := shutil.which(name))), None)
DEADLINE = 120.0  # seconds for one answer


class Page:
    """One page: what it logged and asked for, and the user's hands."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._buffer, self._next = read, write, b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The command's result; events that come before it are kept."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + DEADLINE
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") == self._next:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self.events.append(answer)

    def _receive(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium did not answer {method} within {DEADLINE:g} s"
            piece = os.read(self._read, 1 << 20)
            assert piece, "Chromium has ended"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Nothing; shows the file at this size and waits until the page says that it is drawn."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.documentElement?.dataset.ready === 'yes'")

    def wait(self, expression: str) -> None:
        """Nothing; the expression has become true."""
        deadline = time.monotonic() + DEADLINE
        while not self.run(expression):
            assert time.monotonic() < deadline, f"{expression} did not become true; {self.problems()}"
            time.sleep(0.1)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def click(self, selector: str) -> None:
        """Nothing; the mouse was pressed on the middle of the element."""
        place = self.run(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Nothing; the key was pressed and released."""
        arrows = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        codes = {"Tab": 9, " ": 32, "End": 35, "Home": 36, **arrows}
        text = {"text": " "} if key == " " else {}
        for kind in ("keyDown", "keyUp"):
            extra = text if kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code="Space" if key == " " else key,
                windowsVirtualKeyCode=codes[key], **extra,
            )  # fmt: skip

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Nothing; a PNG of the page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(data["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def problems(self) -> list[str]:
        """Console errors and warnings, exceptions and log entries so far."""
        found = []
        for event in self.events:
            parameters = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                found.append(str(parameters["args"]))
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(str(parameters["entry"]))
        return found

    def requests(self) -> list[str]:
        """Every URL that was asked for so far, but those inside the file (data: and blob:)."""
        urls = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("data:", "blob:", "about:"))]


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A Page of a new headless Chromium whose profile lies in the folder `profile`."""
    assert CHROMIUM is not None
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()

    def place_pipes() -> None:
        # The browser reads commands from descriptor 3 and writes to 4; the copies first move out of their way.
        source, sink = os.dup2(to_browser, 20), os.dup2(from_browser, 21)
        os.dup2(source, 3)
        os.dup2(sink, 4)

    browser = subprocess.Popen(
        [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
        ],
        close_fds=False, preexec_fn=place_pipes, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(read, write)
    finally:
        os.close(write)  # the browser ends with its pipe
        try:
            browser.wait(timeout=20)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait()
        os.close(read)
