"""The live page as it is served: it only looks, only at what the suite has, and however many ask, files are read once a
second."""

from __future__ import annotations

import gzip
import json
import math
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typed import refused
from watched import ask, data, running, served, train_some, write_suite

from sameday.suite.page.snapshot import Snapshot
from sameday.suite.page.watch import Kept, Server, watch
from sameday.suite.state import SuiteFolder


@pytest.fixture
def suite(tmp_path: Path) -> tuple[Path, SuiteFolder]:
    return write_suite(tmp_path)


@pytest.fixture
def server(suite: tuple[Path, SuiteFolder]) -> Iterator[Server]:
    with served(*suite) as server:
        yield server


def test_what_is_served(server: Server, suite: tuple[Path, SuiteFolder]) -> None:
    _, folder = suite
    train_some(folder, "exp1", range(1, 4))
    with running(folder, "exp1", [1]):
        shown = data(server)
    assert (shown["name"], shown["states"][0]) == ("night", {"state": "running", "jobs": 1})
    row = shown["rows"][1]
    assert (row["job"], row["cells"][0]["state"], row["cells"][1]["text"]) == ("exp1", "running", "3 of 20")
    assert shown["gpus"] == [{"host": socket.gethostname(), "gpu": 1, "job": "exp1", "use": 90}]
    assert [chart["name"] for chart in shown["charts"]] == ["Training loss", "GPU use"]
    code, headers, packed = ask(server, "/data.json", **{"Accept-Encoding": "gzip"})
    assert (code, headers["Content-Encoding"]) == (200, "gzip")
    assert json.loads(gzip.decompress(packed))["name"] == "night"
    code, headers, log = ask(server, "/log/exp1")
    assert (code, headers["Content-Type"]) == (200, "text/plain; charset=utf-8")
    assert log.decode().splitlines()[-1].startswith("step 3/20  loss 0.3333")
    assert ask(server, "/log/exp2")[::2] == (200, b"")
    for address, kind in (("/", "text/html"), ("/watch.css", "text/css"), ("/watch.js", "text/javascript")):
        code, headers, body = ask(server, address)
        assert (code, headers["Content-Type"]) == (200, f"{kind}; charset=utf-8") and body
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")
        code, headers, nothing = ask(server, address, "HEAD")
        assert (code, nothing, int(headers["Content-Length"])) == (200, b"", len(body))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE", "MKCOL"])
def test_nothing_can_be_written(server: Server, suite: tuple[Path, SuiteFolder], method: str) -> None:
    path, folder = suite
    folder.log("exp1").parent.mkdir(parents=True)
    folder.log("exp1").write_text("kept")
    for address in ("/", "/data.json", "/log/exp1"):
        code, headers, body = ask(server, address, method, **{"Content-Length": "0"})
        assert (code, headers["Allow"], body) == (405, "GET, HEAD", b"this page is read-only\n")
    assert folder.log("exp1").read_text() == "kept" and path.exists()


@pytest.mark.parametrize(
    "address",
    [
        *("/log/../../../../etc/passwd", "/log/..%2f..%2fnight.yaml", "/log/exp1/../../night.yaml", "//etc/passwd"),
        *("/../night.yaml", "/log/", "/log/nobody", "/log/exp1/", "/log/exp1%00", "/template/watch.js", "/night.yaml"),
        *("/log//exp1", "/LOG/exp1", "/data.json/..", "/.", "http://[bad/", "/log/exp1\\..\\x"),
    ],
)
def test_there_is_nothing_else(server: Server, suite: tuple[Path, SuiteFolder], address: str) -> None:
    _, folder = suite
    folder.log("exp1").parent.mkdir(parents=True)
    folder.log("exp1").write_text("a log")
    code, _, body = ask(server, address)
    assert (code, body) == (404, b"there is nothing here\n")


@pytest.mark.parametrize(
    ("host", "code"),
    [
        *(("127.0.0.1", 200), ("localhost:9999", 200), ("[::1]:8765", 200), ("127.0.0.1:1", 200)),
        *(("evil.example", 403), ("evil.example:8765", 403), ("127.0.0.1.evil.example", 403), ("", 403)),
        *(("localhost.evil.example", 403), ("[", 403), ("10.0.0.1", 403), ("user@evil.example", 403)),
    ],
)
def test_only_this_machines_names_are_answered(server: Server, host: str, code: int) -> None:
    """Otherwise a site whose name is pointed here could read the page in its visitor's browser."""
    assert ask(server, "/data.json", Host=host)[0] == code


def test_what_is_no_request_is_refused(server: Server) -> None:
    for sent in (
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"x" * 70_000 + b"\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := connection.recv(4096):
                answer += piece
        assert b"Python" not in answer and b"<" not in answer and b"this is no request" in answer
    assert ask(server, "/")[0] == 200


def test_damaged_files_do_not_end_the_page(server: Server, suite: tuple[Path, SuiteFolder]) -> None:
    _, folder = suite
    for name, content in (("exp1", b"\xff{"), ("exp2", b'{"state": "done", "started": 1e999}')):
        folder.run(name).mkdir(parents=True)
        (folder.job(name) / "state.json").write_bytes(content)
        (folder.run(name) / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": NaN}\n\xff\n')
        folder.log(name).write_bytes(b"\xff\xfe\x00step 99999999999999999999/3  \n")
    (folder.path / "begun.json").write_text('{"time": NaN}')
    assert {row["cells"][0]["state"] for row in data(server)["rows"]} == {"waiting"}


def test_long_curves_are_small_on_the_way(server: Server, suite: tuple[Path, SuiteFolder]) -> None:
    _, folder = suite
    for name in ("exp1", "exp2"):
        train_some(folder, name, range(1, 3000), total=3000)
        folder.change(name, state="done", attempt=1)
    assert len(ask(server, "/data.json", **{"Accept-Encoding": "gzip"})[2]) < 40_000


# Fifty pages


@given(st.lists(st.floats(0, 0.4), min_size=1, max_size=60))
def test_what_was_read_serves_for_a_second(pauses: list[float]) -> None:
    clock, reads = [0.0], []

    def read() -> bytes:
        reads.append(clock[0])
        clock[0] += 0.01
        return b"%d" % len(reads)

    kept = Kept(read, lambda: clock[0])
    for pause in pauses:
        clock[0] += pause
        age = kept.get()
        assert int(age) == len(reads) and clock[0] - reads[-1] <= 1.02
    assert all(later - earlier > 1.0 for earlier, later in pairwise(reads))


def test_a_slow_disk_is_asked_less_often() -> None:
    clock, reads = [0.0], []

    def read() -> bytes:
        reads.append(clock[0])
        clock[0] += 2.0
        return b""

    kept = Kept(read, lambda: clock[0])
    while clock[0] < 60:
        kept.get()
        clock[0] += 0.1
    assert len(reads) <= 60 / 10 + 1  # a fifth of the time


@pytest.mark.slow
def test_fifty_open_pages_read_the_files_once_a_second(
    suite: tuple[Path, SuiteFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where files are opened: as often as for one page."""
    path, folder = suite
    train_some(folder, "exp1", range(1, 200), total=200)
    looks: list[float] = []
    logs: list[str] = []
    real, real_log = Snapshot.look, Snapshot.log
    monkeypatch.setattr(Snapshot, "look", lambda self: looks.append(time.monotonic()) or real(self))
    monkeypatch.setattr(Snapshot, "log", lambda self, name: logs.append(name) or real_log(self, name))
    answers: list[int] = []
    with running(folder, "exp1", [0]), served(path, folder) as server:
        began = time.monotonic()
        until = began + 2.5

        def page() -> None:
            while time.monotonic() < until:
                answers.append(ask(server, "/data.json")[0])
                answers.append(ask(server, "/log/exp1")[0])
                time.sleep(0.2)

        pages = [threading.Thread(target=page) for _ in range(50)]
        for each in pages:
            each.start()
        for each in pages:
            each.join()
    most = 1 + math.ceil(time.monotonic() - began)  # the last answers may be late on a machine that is busy
    assert len(answers) >= 200 and set(answers) == {200}
    assert len(looks) <= most and len(logs) <= most < 50, (looks, logs)


# The command


def test_a_port_that_is_taken_is_told(server: Server, suite: tuple[Path, SuiteFolder]) -> None:
    path, _ = suite
    port = str(server.server_port)
    said = refused(path.parent, "suite", "watch", "night.yaml", "--port", port)
    assert said == (
        f"--port {port}: cannot be used on 127.0.0.1: Address already in use; choose another, or 0 for any that is free"
    )
    said = refused(path.parent, "suite", "watch", "night.yaml", "--host", "no such host")
    assert said.startswith("--host no such host: is no address of this machine")


def test_who_may_read_it_is_said_aloud(suite: tuple[Path, SuiteFolder], monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = suite

    def interrupted(_: Server) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", interrupted)
    said: list[str] = []
    watch(path, folder.path, "127.0.0.1", 0, said.append)
    assert said[0].startswith("watch it at http://127.0.0.1:") and said[1].startswith("from another machine: ssh -L ")
    said.clear()
    watch(path, folder.path, "0.0.0.0", 0, said.append)
    assert said[0].startswith(f"watch it at http://{socket.gethostname()}:")
    assert said[1].startswith("warning: anyone who can reach 0.0.0.0 at port ") and said[1].endswith(
        "this suite's logs"
    )


def test_other_addresses_answer_by_any_name(suite: tuple[Path, SuiteFolder]) -> None:
    with served(*suite, host="0.0.0.0") as server:
        assert ask(server, "/data.json", Host="cluster.example")[0] == 200


def test_ctrl_c_ends_it(suite: tuple[Path, SuiteFolder]) -> None:
    path, folder = suite
    words = ["suite", "watch", str(path), "--out", str(folder.path), "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from sameday.cli import main; main()", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[3]
        with urllib.request.urlopen(f"{address}data.json", timeout=20) as answer:
            assert json.load(answer)["name"] == "night"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, "")
