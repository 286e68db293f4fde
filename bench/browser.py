"""A headless Chromium, spoken to over a pipe: pages are opened, measured and drawn at any width, light or dark."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str | None:
    """Where a Chromium is on this machine; SAMEDAY_CHROMIUM names another."""
    named = os.environ.get("SAMEDAY_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


def _above(descriptor: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return int(moved)


class Browser:
    """One page in a fresh profile. `events` keeps what the page did: its requests, its dialogs, its errors."""

    def __init__(self, program: str, patience: float = 60.0) -> None:
        self.events: list[dict[str, Any]] = []
        self._patience, self._last, self._unread = patience, 0, b""
        self._profile = tempfile.TemporaryDirectory(prefix="sameday-browser-", ignore_cleanup_errors=True)
        # Chromium reads orders from descriptor 3 and answers on 4: ours stand above them, out of the way.
        orders, answers = (tuple(map(_above, os.pipe())) for _ in range(2))
        words = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        words += ["--no-first-run", "--disable-extensions", "--disable-background-networking", "--hide-scrollbars"]
        words += ["--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", "about:blank"]
        quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
        ends = [(os.POSIX_SPAWN_DUP2, orders[0], 3), (os.POSIX_SPAWN_DUP2, answers[1], 4)]
        self._pid = os.posix_spawnp(program, words, os.environ, file_actions=[*quiet, *ends])
        os.close(orders[0])
        os.close(answers[1])
        self._orders, self._answers = orders[1], answers[0]
        os.set_blocking(self._answers, False)
        self._session: str | None = None
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """A browser leaves when its pipe is closed; one that does not is ended."""
        for pipe in (self._orders, self._answers):
            os.close(pipe)
        deadline = time.monotonic() + 10
        while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            time.sleep(0.02)
        self._profile.cleanup()

    def open_more(self, address: str, count: int) -> list[str]:
        """So many pages besides, each in a window of its own; they are not spoken to."""
        session, self._session = self._session, None
        try:
            asked = {"url": address, "newWindow": True, "background": True}
            return [self.call("Target.createTarget", **asked)["targetId"] for _ in range(count)]
        finally:
            self._session = session

    def close_pages(self, targets: list[str]) -> None:
        for target in targets:
            self.call("Target.closeTarget", targetId=target)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        order: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            order["sessionId"] = self._session
        os.write(self._orders, json.dumps(order).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") != self._last:
                self.events.append(message)
            elif "error" in message:
                raise RuntimeError(f"{method}: {message['error']['message']}")
            else:
                return dict(message["result"])

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + self._patience
        while b"\0" not in self._unread:
            try:
                chunk = os.read(self._answers, 1 << 20)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"Chromium says nothing for {self._patience:.0f} s") from None
                time.sleep(0.005)
                continue
            if not chunk:
                raise RuntimeError("Chromium has left")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(line))

    def open(self, page: Path | str, width: int, height: int = 900, dark: bool = False, density: float = 1) -> None:
        """Show a file, as wide as asked, with the network off; or an address, with it on."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=density, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        rate = 0 if isinstance(page, Path) else -1
        rates = {"latency": 0, "downloadThroughput": rate, "uploadThroughput": rate}
        self.call("Network.emulateNetworkConditions", offline=isinstance(page, Path), **rates)
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri() if isinstance(page, Path) else page)
        deadline = time.monotonic() + self._patience
        while self.evaluate("document.readyState") != "complete" or self.evaluate("location.href") == "about:blank":
            if time.monotonic() > deadline:
                raise TimeoutError(f"{page} is not shown after {self._patience:.0f} s")
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression[:80]}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def requests(self) -> list[str]:
        """Everything that the page asked for, itself included."""
        sent = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return sent

    def screenshot(self, whole: bool = False) -> bytes:
        more: dict[str, Any] = {"captureBeyondViewport": True} if whole else {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            more["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", **more)["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])
