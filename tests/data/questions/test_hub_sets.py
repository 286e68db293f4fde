"""Sets by their name on the Hub: from a cache laid out as the library does it, from a server that answers as the Hub
does, and what is said where neither has them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from huggingface_hub import constants
from shapes import kvasir
from typer.testing import CliRunner
from worlds import tiny_recipe, write_world

from sameday.cli import app
from sameday.data.questions.hub import brought, located, name_of
from sameday.spec.dataset import HubName, hub_name
from sameday.spec.document import Document
from sameday.spec.errors import BadInput
from sameday.spec.explain import validate
from sameday.spec.vqa import VqaRecipe
from sameday.tasks.vqa.setup import VqaSetup

pytest.importorskip("pyarrow")
COMMIT = "ab" * 20


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def lay_out(cache: Path, repo: str, source: Path) -> Path:
    """Files of a folder as the library keeps them: by their content, with links that have their names."""
    entry = cache / f"datasets--{repo.replace('/', '--')}"
    snapshot = entry / "snapshots" / COMMIT
    (entry / "refs").mkdir(parents=True)
    (entry / "refs/main").write_text(COMMIT)
    for file in (each for each in source.rglob("*") if each.is_file()):
        blob = entry / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(file.read_bytes())
        link = snapshot / file.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    return snapshot


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("data/train.jsonl", None),
        ("hf:org/set", HubName("org/set")),
        ("hf:org/my.set-2@v1.0", HubName("org/my.set-2", "v1.0")),
        ("hf:org/set@main/data/raw-*.parquet", HubName("org/set", "main", "data/raw-*.parquet")),
        ("hf://datasets/org/set/train.json", HubName("org/set", None, "train.json")),
    ],
)
def test_names(value: str, name: HubName | None) -> None:
    assert hub_name(value) == name


@pytest.mark.parametrize(
    "value",
    [
        "hf:",
        "hf:kvasir",
        "hf:a b/c",
        "hf:org/set@",
        "hf:../../etc/passwd",
        "hf:org/..",
        "hf:org/set/../../../etc/passwd",
    ],
)
def test_no_names(value: str) -> None:
    with pytest.raises(BadInput) as error:
        validate(VqaRecipe, Document("r.yaml", {"model": "m", "data": {"train": value}}))
    form = "must be a file, or a set on the Hub as hf:OWNER/NAME, with @REVISION, /FILE or both behind it"
    assert str(error.value).endswith(f"data.train is {value!r}; {form}")
    with pytest.raises(BadInput, match=form):
        CliRunner().invoke(app, ["data", value], catch_exceptions=False)


def test_a_set_in_the_cache_needs_no_network(cache: Path, tmp_path: Path, tiny_qwen3: Path) -> None:
    snapshot = lay_out(cache, "org/kvasir", kvasir(tmp_path / "there", images=4))
    assert brought(HubName("org/kvasir"), print) == snapshot
    assert located(tmp_path, "hf:org/kvasir", "train", print) == snapshot / "data/raw-*.parquet"
    (tmp_path / "images").mkdir()
    for name in ("hf:org/kvasir", f"hf:org/kvasir@{COMMIT}/data/raw-*.parquet"):
        data = {"train": name, "image_root": "images", "skip": {"answer": ["nan"]}}
        audited = VqaSetup(tiny_recipe(tiny_qwen3, data=data), tmp_path).audit(lambda _: None, ("train",))
        assert audited.sizes == {"train": 19}
    with pytest.raises(BadInput) as error:
        located(tmp_path, "hf:org/kvasir", "test", print)
    assert str(error.value) == (
        "recipe.data.test is hf:org/kvasir, which has no file whose name says test; there are train (raw-*.parquet); "
        "hf:org/kvasir/FILE names one"
    )


def test_a_set_on_the_hub_is_looked_at(cache: Path, tmp_path: Path, tiny_qwen3: Path) -> None:
    snapshot = lay_out(cache, "org/kvasir", kvasir(tmp_path / "there", images=4))
    before = sorted(snapshot.rglob("*"))
    out = tmp_path / "r.yaml"
    said = CliRunner().invoke(
        app, ["data", "hf:org/kvasir", "--model", str(tiny_qwen3), "--recipe", str(out)], catch_exceptions=False
    )
    assert "raw-*.parquet (train)" in said.stdout
    data = yaml.safe_load(out.read_text())["data"]
    assert data["train"] == f"hf:org/kvasir@{COMMIT}/data/raw-*.parquet", "of this version, whatever comes later"
    assert sorted(snapshot.rglob("*")) == before, "nothing is written into the cache of the Hub"
    assert name_of(tmp_path / "train.jsonl") is None
    recipe = VqaRecipe.model_validate(yaml.safe_load(out.read_text()))
    assert sum(map(len, VqaSetup(recipe, tmp_path).audit(lambda _: None, ("train", "val")).splits.values())) <= 19


def test_without_a_network_it_is_said_what_to_do(cache: Path, tmp_path: Path, tiny_qwen3: Path) -> None:
    data = {"train": "hf:org/absent@v2", "image_root": "."}
    with pytest.raises(BadInput) as error:
        VqaSetup(tiny_recipe(tiny_qwen3, data=data), tmp_path).audit(lambda _: None, ("train",))
    assert str(error.value) == (
        f"hf:org/absent@v2: it is not in the cache ({cache}), and HF_HUB_OFFLINE forbids to ask the Hub: on a machine "
        "with a network `hf download org/absent --repo-type dataset` brings it, and HF_HOME names the cache"
    )
    lay_out(cache, "org/kvasir", kvasir(tmp_path / "there", images=4))
    with pytest.raises(BadInput) as error:
        brought(HubName("org/kvasir", None, "data/rwa-*.parquet"), print)
    parts = "data/raw-00000-of-00002.parquet, data/raw-00001-of-00002.parquet"
    assert str(error.value).startswith(
        f"hf:org/kvasir/data/rwa-*.parquet: of it the cache has {parts} ({cache}), and HF_HUB_OFFLINE forbids"
    )


FILES = {"data/train.jsonl": b'{"image": "a.png", "question": "q?", "answer": "a"}\n', "weights.bin": b"0" * 5000}


class Hub(BaseHTTPRequestHandler):
    """A repository of datasets: its files, their sizes and contents."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.server.asked.append(f"{self.command} {path}")  # type: ignore[attr-defined]
        sizes: dict[str, int] = self.server.sizes  # type: ignore[attr-defined]
        refused: dict[str, tuple[int, str]] = self.server.refused  # type: ignore[attr-defined]
        if path in refused:
            self.refuse(*refused[path])
        elif path.startswith("/api/datasets/org/set/tree/"):
            listed = [{"type": "file", "path": n, "size": sizes[n], "oid": _oid(n)} for n in FILES]
            self.answer(json.dumps(listed).encode())
        elif path.startswith("/api/datasets/org/set"):
            siblings = [{"rfilename": name, "size": sizes[name], "blobId": _oid(name)} for name in FILES]
            self.answer(json.dumps({"_id": "0" * 24, "id": "org/set", "sha": COMMIT, "siblings": siblings}).encode())
        elif (name := path.removeprefix(f"/datasets/org/set/resolve/{COMMIT}/")) in FILES:
            self.answer(FILES[name], sizes[name] if self.command == "HEAD" else None, {"ETag": f'"{_oid(name)}"'})
        else:
            self.refuse(404, "RepoNotFound")

    def refuse(self, code: int, why: str) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", why)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def answer(self, content: bytes, size: int | None = None, more: dict[str, str] | None = None) -> None:
        self.send_response(200)
        headers = {
            "Content-Length": str(len(content) if size is None else size),
            "X-Repo-Commit": COMMIT,
            **(more or {}),
        }
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_arguments: Any) -> None:
        pass


def _oid(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.sizes = [], {n: len(each) for n, each in FILES.items()}  # type: ignore[attr-defined]
    server.refused = {}  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_set_is_downloaded_once_its_size_is_known(hub: Any, cache: Path) -> None:
    said: list[str] = []
    folder = brought(HubName("org/set"), said.append)
    assert (folder / "data/train.jsonl").read_bytes() == FILES["data/train.jsonl"]
    assert not (folder / "weights.bin").exists(), "only files that may hold questions"
    assert len(said) == 1 and said[0].startswith(f"hf:org/set: 0.0 GB to download to {cache}, where ")
    asked = len(hub.asked)
    assert brought(HubName("org/set"), said.append) == folder and len(hub.asked) == asked, "then nobody is asked"


def test_test_questions_that_are_not_here_are_not_downloaded_for_a_hint(
    hub: Any, cache: Path, tmp_path: Path, tiny_qwen3: Path
) -> None:
    home = write_world(tmp_path / "here", 3, (2, 2), hard=False)
    data = {"train": "train.jsonl", "test": "hf:org/held/test.jsonl", "image_root": "images"}
    setup = VqaSetup(tiny_recipe(tiny_qwen3, data=data), home)
    splits = setup.drop_too_long(setup.audit(lambda _: None).splits)
    assert setup.hints(splits) == [] and not hub.asked
    (tmp_path / "held").mkdir()
    (tmp_path / "held/test.jsonl").write_bytes((home / "train.jsonl").read_bytes())
    lay_out(cache, "org/held", tmp_path / "held")
    assert setup.hints(splits) == ["train and test have 2 images in common: scores of test will be too good"]


def test_a_set_that_does_not_fit_is_refused(hub: Any, cache: Path) -> None:
    hub.sizes["data/train.jsonl"] = 10**18
    with pytest.raises(BadInput) as error:
        brought(HubName("org/set", None, "data/train.jsonl"), print)
    assert str(error.value).startswith("hf:org/set/data/train.jsonl: 1000000000.0 GB to download to ")
    assert str(error.value).endswith(" GB are free. HF_HOME names another place.")
    assert not list(cache.rglob("*.jsonl"))


REFUSED = {
    "org/other": (404, "RepoNotFound", "the Hub has no set of that name; a private one needs `hf auth login`"),
    "org/gated": (
        403,
        "GatedRepo",
        "the Hub gives it to those who accepted its terms: do so at https://huggingface.co/datasets/org/gated, then "
        "`hf auth login`",
    ),
    "org/set@v9": (404, "RevisionNotFound", "the Hub has no version 'v9' of it; without @v9 the newest is taken"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_hub_does_not_give(hub: Any, cache: Path, name: str) -> None:
    repo, _, revision = name.partition("@")
    hub.refused = {f"/api/datasets/{repo}/revision/{revision or 'main'}": REFUSED[name][:2]}
    with pytest.raises(BadInput) as error:
        brought(HubName(repo, revision or None), print)
    assert str(error.value) == f"hf:{name}: it is not in the cache ({cache}), and {REFUSED[name][2]}"


def test_a_hub_that_cannot_be_reached(hub: Any, cache: Path) -> None:
    hub.shutdown()
    hub.server_close()
    with pytest.raises(BadInput) as error:
        brought(HubName("org/set"), print)
    assert str(error.value).startswith(f"hf:org/set: it is not in the cache ({cache}), and the Hub cannot be reached: ")
    assert str(error.value).endswith("`hf download org/set --repo-type dataset` brings it, and HF_HOME names the cache")
    assert "\n" not in str(error.value)


def test_a_file_that_a_set_does_not_have(hub: Any) -> None:
    with pytest.raises(BadInput) as error:
        brought(HubName("org/set", None, "none-*.csv"), print)
    assert str(error.value) == (
        "hf:org/set/none-*.csv: has no file of questions there; known are none-*.csv; there are data/train.jsonl"
    )
