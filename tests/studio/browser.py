"""A headless Chromium in which tests open pages: the protocol of its developer tools, over a pair of pipes."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from time import monotonic
from typing import Any

# Debian's name first. If the browser has another name, a path may be given.
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")


def installed() -> str | None:
    """Return the path of a browser; None if no browser is installed."""
    given = os.environ.get("PENSTOCK_TEST_CHROMIUM")
    return given or next(filter(None, map(shutil.which, _NAMES)), None)


class Browser:
    """A browser with one page.

    Args:
        program: the path of the browser.
        folder: the folder for files that the browser writes.
    """

    def __init__(self, program: str, folder: Path) -> None:
        to_child, self._writing = os.pipe()
        self._reading, from_child = os.pipe()
        options = [
            "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={folder}",
        ]  # fmt: skip
        # The browser expects the pipes as descriptors 3 and 4, and prints much that is of no interest.
        command = 'exec "$0" "$@" 3<&%d 4>&%d' % (to_child, from_child)  # noqa: UP031 - of a shell
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, *options], pass_fds=(to_child, from_child), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_child)
        os.close(from_child)
        self._buffer = b""
        self._sent = 0
        self._session: str | None = None
        self.messages: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._session = None
        try:
            self.send("Browser.close")
        finally:
            os.close(self._writing)
            os.close(self._reading)
            self._process.wait()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command to the browser; return its answer."""
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._sent:
            self.messages.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, page: Path | str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a page, a file or an address, and wait until it has loaded and was painted."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.messages.clear()
        self.send("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while not any(message.get("method") == "Page.loadEventFired" for message in self.messages):
            self.messages.append(self._receive())
        self.painted()

    def run(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript; wait for it if it is a promise."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = 15.0) -> None:
        """Wait until an expression of JavaScript is true."""
        give_up = monotonic() + seconds
        while not self.run(f"Boolean({expression})"):
            assert monotonic() < give_up, f"never true: {expression}"
            self.painted()

    def painted(self) -> None:
        """Wait until the requested changes are painted."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def click(self, x: float, y: float) -> None:
        """Click on a place of the window."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.painted()

    def press(self, key: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key)
        self.painted()

    def requests(self) -> list[str]:
        """Return the addresses of all requests since the page was opened."""
        self.run("0")
        return [
            message["params"]["request"]["url"]
            for message in self.messages
            if message.get("method") == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[Any]:
        """Return the errors of scripts, and the messages of the console, since the page was opened."""
        self.run("0")
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [message["params"] for message in self.messages if message.get("method") in kinds]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._reading, 1 << 16)
            assert read, "the browser has ended"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
