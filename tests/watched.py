"""A suite whose files are written as a runner writes them, and its page as it is served."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sameday.suite.page.snapshot import Snapshot
from sameday.suite.page.watch import Pages, Server
from sameday.suite.state import SuiteFolder, begin

TEXT = """
name: {name}
deadline: 6h
gpus: 2
jobs:
  features: {{do: cache, recipe: exp.yaml, kind: features}}
  exp1: {{do: train, recipe: exp.yaml, after: [features]}}
  exp2: {{do: train, recipe: exp.yaml, gpus: 2}}
  exp1-test: {{do: eval, of: exp1, split: test}}
"""


def write_suite(home: Path, name: str = "night", out: str = "out") -> tuple[Path, SuiteFolder]:
    home.mkdir(exist_ok=True)
    (home / "exp.yaml").write_text("name: x\n")
    (home / "night.yaml").write_text(TEXT.format(name=json.dumps(name)))
    return home / "night.yaml", SuiteFolder(home / out)


def record(step: int, loss: float | None = None, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1 / step if loss is None else loss, "seconds": 2.0, "samples": 16, "gpu": 90, **more}


def train_some(folder: SuiteFolder, name: str, steps: range, total: int = 20) -> None:
    """Records and log as `sameday train` adds them."""
    folder.run(name).mkdir(parents=True, exist_ok=True)
    with (folder.run(name) / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record(step)) + "\n" for step in steps)
    with folder.log(name).open("a") as file:
        file.writelines(f"step {step}/{total}  loss {1 / step:.4f}  2.000 s/step  left 0:10\n" for step in steps)


@contextlib.contextmanager
def running(folder: SuiteFolder, name: str, gpus: list[int]) -> Iterator[None]:
    """Held by this process, as its executor holds it."""
    with folder.hold(name) as mine:
        assert mine
        begin(folder, name, "asked", gpus)
        yield


@contextlib.contextmanager
def served(path: Path, folder: SuiteFolder, host: str = "127.0.0.1", port: int = 0) -> Iterator[Server]:
    server = Server(Pages(Snapshot(path, folder.path)), host, port)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(server: Server, address: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Code, headers and body, with the address as it is given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.putrequest(method, address, skip_host=True, skip_accept_encoding=True)
        for name, value in {"Host": "127.0.0.1", **headers}.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def data(server: Server) -> Any:
    code, _, body = ask(server, "/data.json")
    assert code == 200
    return json.loads(body)
