"""`sameday suite watch`: one live page about a suite. It reads and never writes: fixed addresses, GET and HEAD alone,
no part of an address becomes a path. However many pages are open, files are read once a second."""

from __future__ import annotations

import contextlib
import gzip
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import urlsplit

from sameday.spec.errors import BadInput
from sameday.spec.words import tell
from sameday.suite.page.snapshot import Snapshot
from sameday.suite.page.view import page_data

FRESH = 1.0
"""Seconds for which what was read is shown to all who ask."""
BUSY = 4.0
"""Reading takes at most one part in so many of the time: on a slow disk pages become older instead."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
TEXT = "text/plain; charset=utf-8"
DATA = "/data.json"
"""Compressed once for all who ask: curves are long, and tunnels may be slow."""


class Kept:
    """What a function gave, for a second; one caller asks it, all others wait for that answer."""

    def __init__(self, make: Callable[[], bytes], clock: Callable[[], float] = time.monotonic) -> None:
        self._make, self._clock, self._lock = make, clock, threading.Lock()
        self._until, self._content = -1.0, b""

    def get(self) -> bytes:
        with self._lock:
            if self._until < (began := self._clock()):
                self._content = self._make()
                ended = self._clock()
                self._until = ended + max(FRESH, BUSY * (ended - began))
            return self._content


class Pages:
    """Everything that is served, by its address."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._data = Kept(self._look)
        self._logs: dict[str, Kept] = {}
        own, shared = resources.files("sameday.suite.page") / "template", resources.files("sameday.report") / "template"
        style = (shared / "page.css").read_bytes() + (own / "watch.css").read_bytes()
        self._fixed = {
            "/": ("text/html; charset=utf-8", (own / "watch.html").read_bytes()),
            "/watch.css": ("text/css; charset=utf-8", style),
            "/watch.js": ("text/javascript; charset=utf-8", (own / "watch.js").read_bytes()),
        }

    def get(self, address: str) -> tuple[str, bytes] | None:
        """Kind and content, of DATA compressed; None where nothing has this address."""
        if address in self._fixed:
            return self._fixed[address]
        if address == DATA:
            return "application/json; charset=utf-8", self._data.get()
        name = address.removeprefix("/log/")
        if name != address and name in self._snapshot.suite.jobs:
            return TEXT, self._logs.setdefault(name, Kept(lambda: self._log(name))).get()
        return None

    def _look(self) -> bytes:
        view = self._snapshot.look()
        return gzip.compress(json.dumps(page_data(self._snapshot.suite, view), allow_nan=False).encode(), 6)

    def _log(self, name: str) -> bytes:
        return self._snapshot.log(name).encode()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, pages: Pages, host: str, port: int) -> None:
        self.pages = pages
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.address_family = family
            super().__init__((str(address[0]), port), Handler)
        except (OSError, OverflowError, UnicodeError) as error:
            raise BadInput(_unable(host, port, error)) from None
        self.ip = str(address[0]).partition("%")[0]
        self.loopback = ipaddress.ip_address(self.ip).is_loopback

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # without asking a name server what this machine is called
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    @property
    def place(self) -> str:
        """Host and port, as addresses have them."""
        name = socket.gethostname() if ipaddress.ip_address(self.ip).is_unspecified else self.server_name
        return f"[{name}]:{self.server_port}" if ":" in name else f"{name}:{self.server_port}"

    @property
    def address(self) -> str:
        return f"http://{self.place}/"

    def handle_error(self, *_: object) -> None:
        """A page that was closed halfway is nothing to tell of."""


def _unable(host: str, port: int, error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return f"--host {host}: is no address of this machine: {error.strerror}"
    if isinstance(error, OverflowError):
        return f"--port {port}: must be from 0 to 65535"
    if isinstance(error, OSError) and error.errno is not None:
        why = f"cannot be used on {host}: {error.strerror}"
        return f"--port {port}: {why}; choose another, or 0 for any that is free"
    return f"--host {host}: is no address: {error}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds that a connection may say nothing
    server_version, sys_version = "sameday", ""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def __getattr__(self, name: str) -> Any:
        """Every other method."""
        if name.startswith("do_"):
            return lambda: self._send(405, TEXT, b"this page is read-only\n", {"Allow": "GET, HEAD"})
        raise AttributeError(name)

    def _answer(self) -> None:
        if self.server.loopback and not _is_loopback(self.headers.get("Host", "")):
            # Another site's name may have been pointed at this machine, to read the page in its reader's browser.
            self._send(403, TEXT, b"this page is for localhost and 127.0.0.1 alone\n")
            return
        address = self.path.partition("?")[0]
        found = self.server.pages.get(address)
        if found is None:
            self._send(404, TEXT, b"there is nothing here\n")
        elif address != DATA:
            self._send(200, *found)
        elif "gzip" in self.headers.get("Accept-Encoding", ""):
            self._send(200, *found, {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"})
        else:
            self._send(200, found[0], gzip.decompress(found[1]), {"Vary": "Accept-Encoding"})

    def _send(self, code: int, kind: str, content: bytes, more: dict[str, str] | None = None) -> None:
        self.close_connection = True  # no page holds a thread between two looks, and no body is taken for a request
        self.send_response(code)
        own = {"Content-Type": kind, "Content-Length": str(len(content)), "Connection": "close"}
        for name, value in {**own, **HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What is no request at all."""
        self.request_version = getattr(self, "request_version", "") or "HTTP/1.1"
        self.command = getattr(self, "command", None) or "GET"
        self._send(code, TEXT, b"this is no request\n")

    def log_message(self, *_: Any) -> None:
        """The terminal stays quiet."""


def _is_loopback(host: str) -> bool:
    """Whatever the port, which is another one behind a tunnel."""
    with contextlib.suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    return False


def watch(path: Path, out: Path | None, host: str, port: int, say: Callable[[str], None] = tell) -> None:
    """Until it is interrupted."""
    server = Server(Pages(Snapshot(path, out)), host, port)
    with server, contextlib.suppress(KeyboardInterrupt):
        say(f"watch it at {server.address} (read-only; Ctrl-C ends the page, and no job)")
        if server.loopback:
            tunnel = f"ssh -L {server.server_port}:{server.place} {socket.gethostname()}"
            say(f"from another machine: {tunnel}, and open the same address there")
        else:
            say(f"warning: anyone who can reach {host} at port {server.server_port} can read this suite's logs")
        server.serve_forever()
