"""Before a download: a real server answers as the Hub does, and a fresh process asks it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

SIZES: dict[str, dict[str, int]] = {
    "org/small": {
        "model-00001-of-00002.safetensors": 2_000_000_000,
        "model-00002-of-00002.safetensors": 400_000_000,
        "config.json": 1_000,
        "pytorch_model.bin": 50_000_000_000,  # the same weights again, which nobody downloads
    },
    "org/huge": {"model.safetensors": 10**18},
}
ASK = """
import sys
from sameday.models.hub import announce_download
from sameday.spec.errors import BadInput
try:
    announce_download(sys.argv[1], None, lambda text: print("said:", text))
except BadInput as error:
    print("refused:", error)
"""


class Hub(BaseHTTPRequestHandler):
    """`/api/models/ORG/NAME`, with file sizes where they are asked for."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        name = url.path.removeprefix("/api/models/")
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        if name not in SIZES:
            return self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        sizes = (
            SIZES[name] if parse_qs(url.query).get("blobs", [""])[0].lower() == "true" else dict.fromkeys(SIZES[name])
        )
        siblings = [
            {"rfilename": file, "size": size, "blobId": "0" * 40} if size else {"rfilename": file}
            for file, size in sizes.items()
        ]
        return self.answer(200, {"_id": "0" * 24, "id": name, "sha": "0" * 40, "siblings": siblings}, {})

    def answer(self, status: int, body: dict[str, Any], headers: dict[str, str]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        headers = {**headers, "Content-Type": "application/json", "Content-Length": str(len(content))}
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(model: str, home: Path, port: int, **more: str) -> str:
    """What a process with this cache and this Hub says. The library reads both once, at its import."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    env |= {"HF_HOME": str(home), "HF_ENDPOINT": f"http://127.0.0.1:{port}", **more}
    done = subprocess.run(
        [sys.executable, "-c", ASK, model], env=env, capture_output=True, text=True, check=False, cwd=home
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_size_and_room_are_told(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    said = ask("org/small", tmp_path, hub.server_port)
    start = f"said: org/small: 2.4 GB to download to {tmp_path}/hub, where "
    assert said.startswith(start) and said.endswith(" GB are free")
    assert float(said.removeprefix(start).split()[0]) > 0


def test_a_model_that_does_not_fit_is_refused(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    said = ask("org/huge", tmp_path, hub.server_port)
    assert said.startswith(f"refused: org/huge: 1000000000.0 GB to download to {tmp_path}/hub, where ")
    assert said.endswith(" GB are free. HF_HOME names another place.")


def test_what_the_hub_does_not_have_is_refused(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    said = ask("org/absent", tmp_path, hub.server_port)
    start = f"refused: model 'org/absent' is neither a folder nor in the cache ({tmp_path}/hub), "
    assert said.startswith(f"{start}and the hub did not give it: 404") and "\n" not in said


def test_an_unreachable_hub_is_named(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as closed:
        port = closed.server_port
    said = ask("org/small", tmp_path, port)
    assert said.startswith("refused: model 'org/small' is neither a folder nor in the cache") and "\n" not in said
    offline = ask("org/small", tmp_path, port, HF_HUB_OFFLINE="1")
    assert "the hub did not give it" in offline and "offline" in offline.lower()


@pytest.mark.parametrize("name", ["/no/such/folder", "../models/typo", "a/b/c"])
def test_a_misspelt_folder_is_no_name_on_the_hub(hub: ThreadingHTTPServer, tmp_path: Path, name: str) -> None:
    said = ask(name, tmp_path, hub.server_port)
    assert said.startswith(f"refused: model '{name}' is neither a folder nor in the cache") and "\n" not in said


def test_a_folder_or_a_cached_model_asks_nobody(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    commit = "0" * 40
    entry = tmp_path / "hub/models--org--small"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs/main").write_text(commit)
    (entry / "snapshots" / commit).mkdir(parents=True)
    (entry / "snapshots" / commit / "config.json").write_text("{}")
    before = len(hub.asked)  # type: ignore[attr-defined]
    assert ask("org/small", tmp_path, hub.server_port) == ""
    assert ask(str(tmp_path), tmp_path, hub.server_port) == ""
    assert len(hub.asked) == before  # type: ignore[attr-defined]
