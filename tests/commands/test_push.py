"""`sameday push`: what would go to the Hub, what goes there, and what is said where it cannot. The Hub is a small
server of this process that answers as the library expects it."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import worlds
import yaml
from huggingface_hub import constants
from typed import refused, sameday, write_recipe

from sameday.commands.card import split_readme
from sameday.record.manifest import fault
from sameday.spec.load import load_plan, load_recipe
from sameday.spec.plan import Plan, changed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Path:
    """A folder with a finished run. Not to be written to."""
    folder = worlds.write_world(tmp_path_factory.mktemp("push"), 6, (3, 2), hard=False)
    data = {"train": str(folder / "train.jsonl"), "val": "val.jsonl", "image_root": "images"}
    write_recipe(folder, tiny_qwen3, data=data)
    said = sameday(folder, "train", "recipe.yaml", "--out", "run", "--set", "plan.device=cpu")
    assert said.code == 0, said.err
    (folder / "run" / "eval-test.json").write_text(json.dumps({"loss": 1.5, "exact_match": 0.25}))
    answers = folder / "run" / "answers" / "adapter-test"
    answers.mkdir(parents=True)
    (answers / "metrics.json").write_text(json.dumps({"metrics": {"exact_match": {"value": 0.125, "questions": 8}}}))
    judged(folder / "run")
    return folder


def judged(run: Path, **fields: Any) -> None:
    """A verdict in the run: its plan beside the plain one, but for these fields."""
    recipe, plan = load_recipe(run / "recipe.yaml"), load_plan(run / "plan.yaml")
    told = changed(Plan(), plan.model_copy(update=fields), recipe.dropout > 0)
    verdict = {
        "verdict": "rounding",
        "recipe": recipe.fingerprint,
        "against": "plain: one sample at a time",
        "fields": {name: {"against": a, "plan": b, "claim": claim} for name, (a, b, claim) in told.items()},
    }
    (run / "verify.json").write_text(json.dumps(verdict))


@pytest.fixture
def world(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    shutil.copytree(trained / "run", tmp_path / "world" / "run")
    return tmp_path / "world"


VERIFIED = "| the same model as another plan trains | verified |"


def card_of(world: Path) -> list[str]:
    shutil.rmtree(world / "run" / "push", ignore_errors=True)
    said = sameday(world, "push", "run", "me/polyps", "--dry-run")
    assert said.code == 0, said.err
    return (world / "run" / "push" / "README.md").read_text().splitlines()


def test_only_a_verdict_of_the_runs_own_plan_is_on_the_card(world: Path) -> None:
    run = world / "run"
    judged(run)
    assert VERIFIED in card_of(world)
    judged(run, max_questions=3)
    assert VERIFIED not in card_of(world)
    recipe = load_recipe(run / "recipe.yaml").fingerprint
    for names, verified in ((["run", "other"], True), (["one", "other"], False)):
        (run / "verify.json").write_text(json.dumps({"verdict": "rounding", "recipe": recipe, "runs": names}))
        assert (VERIFIED in card_of(world)) is verified
    (run / "verify.json").write_text(json.dumps({"verdict": "rounding", "recipe": recipe}))  # it does not say of what
    assert VERIFIED not in card_of(world)


def test_a_dry_run_writes_the_folder(world: Path, trained: Path, tiny_qwen3: Path) -> None:
    said = sameday(world, "push", "run", "me/polyps", "--dry-run", "--license", "cc-by-4.0")
    assert said.code == 0, said.err
    local, counted = said.out.splitlines()
    assert local == f"the base model {tiny_qwen3} is a folder of this machine: --base NAME gives its name on the Hub"
    assert counted == "--dry-run: nothing was pushed; 11 files for me/polyps are in run/push"
    folder = world / "run" / "push"
    assert fault(folder) is None
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "recipe.yaml"} <= {
        path.name for path in folder.iterdir()
    }
    header, body = split_readme((folder / "README.md").read_text())
    assert header == {"license": "cc-by-4.0", "library_name": "peft", "tags": ["sameday"]}
    fingerprint = load_recipe(trained / "recipe.yaml").fingerprint
    for line in (
        "# small",
        'model = PeftModel.from_pretrained(model, ".")',
        "## What was trained",
        "| test | exact_match | 0.25 |",
        "| test, generated answers | exact_match | 0.125 |",
        "| validation | samples | 5 |",
        f"| recipe | {fingerprint} |",
        "| steps | 2 |",
        VERIFIED,
        "  train: train.jsonl",
    ):
        assert line in body.splitlines(), line
    for path in folder.iterdir():  # nothing of this machine's folders
        assert path.suffix == ".safetensors" or str(trained.parent) not in path.read_text(), path
    kept = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert kept["lora"]["r"] == 2 and kept["data"]["val"] == "val.jsonl"
    again = refused(world, "push", "run", "me/polyps", "--dry-run")
    assert again == "run/push: is there already, and is not overwritten; choose another --out"


def test_of_a_checkpoint_nothing_is_pushed_that_only_a_resumed_run_reads(world: Path, trained: Path) -> None:
    last = sorted((world / "run" / "checkpoints").glob("step-*"))[-1]
    assert {"state.json", "optimizer.safetensors"} <= {file.name for file in last.iterdir()}
    said = sameday(world, "push", "run", "me/polyps", "--dry-run", "--checkpoint", last.name)
    assert said.code == 0, said.err
    folder = world / "run" / "push"
    names = {file.name for file in folder.iterdir()}
    assert fault(folder) is None and "adapter_model.safetensors" in names
    assert not names & {"state.json", "optimizer.safetensors"}
    for file in folder.iterdir():
        assert str(trained).encode() not in file.read_bytes(), f"{file.name}: a path of this machine"


def test_the_base_models_name_on_the_hub(world: Path) -> None:
    words = ("--dry-run", "--base", "Qwen/Qwen3-VL-8B-Instruct", "--out", "there", "--checkpoint", "step-2")
    assert sameday(world, "push", "run", "me/polyps", *words).code == 0
    header, body = split_readme((world / "there" / "README.md").read_text())
    assert header["base_model"] == "Qwen/Qwen3-VL-8B-Instruct" and header["tags"] == ["sameday", "adapter"]
    config = json.loads((world / "there" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "Qwen/Qwen3-VL-8B-Instruct"
    assert "from_pretrained('Qwen/Qwen3-VL-8B-Instruct', dtype=torch.float32)" in body
    assert "| val | samples | 5 |" in body and "| test |" not in body and "generated answers" not in body
    assert "The model “Qwen/Qwen3-VL-8B-Instruct” learns answers" in body


def in_cache(home: Path, name: str, kind: str) -> None:
    """As the Hub's library keeps what it downloaded."""
    folder = home / f"models--{name.replace('/', '--')}"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps({"model_type": kind}))


def test_the_name_that_is_given_is_not_taken_on_trust(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kind is compared where its configuration is in the cache, and the card says what was not checked."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(world / "hub"))
    in_cache(world / "hub", "org/same", "qwen3_vl")
    in_cache(world / "hub", "org/other", "llava")
    words = ("push", "run", "me/polyps", "--dry-run", "--out", "there", "--base")
    assert refused(world, *words, "org/other") == (
        "--base org/other: is of model_type llava, and the model that was trained is of model_type qwen3_vl"
    )
    assert not (world / "there").exists()
    note = (
        "The base model's name, `org/same`, was given with `--base`; that its weights are those of the training was "
        "not checked."
    )
    assert sameday(world, *words, "org/same").code == 0
    assert note in (world / "there" / "README.md").read_text().splitlines()
    assert sameday(world, *words[:-2], "elsewhere").code == 0
    assert "was not checked" not in (world / "elsewhere" / "README.md").read_text()


def test_offline_is_a_dry_run(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said = sameday(world, "push", "run", "me/polyps")
    assert said.code == 0
    assert "HF_HUB_OFFLINE is set: nothing was pushed; 11 files for me/polyps are in run/push" in said.out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ["run", "me/polyps"],
            "me/polyps: the Hub wants a token, and there is none: `hf auth login`, or HF_TOKEN; --dry-run writes the "
            "folder that would be pushed",
        ),
        (["run", "me/po lyps"], "me/po lyps: is no name on the Hub: "),
        (["run", "me/polyps", "--base", "a/b/c", "--dry-run"], "--base a/b/c: is no name on the Hub: "),
        (["run", "me/polyps", "--checkpoint", "step-9"], "run: has no such checkpoint as step-9"),
        (["run", "me/polyps", "--out", "there"], "--out belongs to --dry-run: a push leaves nothing here"),
        (
            ["run", "me/polyps", "--dry-run", "--out", "run/recipe.yaml/x"],
            "--out run/recipe.yaml/x: cannot be a folder: Not a directory; choose another one",
        ),
        (["nothing", "me/polyps"], "nothing: is not a run folder: it has no recipe.yaml"),
    ],
)
def test_what_is_refused(world: Path, words: list[str], why: str) -> None:
    assert refused(world, "push", *words).startswith(why)
    assert not (world / "there").exists() and not (world / "run" / "push").exists()


class Hub(BaseHTTPRequestHandler):
    """Takes what it is given; a repository called `taken` is somebody else's."""

    commits: ClassVar[list[dict[str, str]]] = []

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Authorization"] == "Bearer hf_secret"
        status, answer = 200, dict[str, Any]()
        if self.path == "/api/repos/create":
            name = json.loads(sent)
            whole = f"{name.get('organization', 'me')}/{name['name']}"
            status = 403 if name["name"] == "taken" else 200
            answer = {"url": f"http://127.0.0.1/{whole}", "id": whole, "error": "you may not write there"}
        elif "/preupload/" in self.path:
            listed = [{"path": each["path"], "uploadMode": "regular"} for each in json.loads(sent)["files"]]
            answer = {"files": [{**each, "shouldIgnore": False} for each in listed]}
        elif "/commit/" in self.path:
            rows = [json.loads(line) for line in sent.splitlines()]
            Hub.commits.append({"summary": rows[0]["value"]["summary"]})
            Hub.commits[-1] |= {row["value"]["path"]: row["value"]["content"] for row in rows if row["key"] == "file"}
            answer = {"commitUrl": "http://127.0.0.1/me/x/commit/1", "commitOid": "1" * 40, "hookOutput": ""}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield address
    server.shutdown()


def test_a_push(world: Path, hub: str, trained: Path) -> None:
    said = sameday(world, "push", "run", "me/polyps", "--base", "Qwen/Qwen3-VL-8B-Instruct")
    assert said.code == 0, said.err
    assert said.out.splitlines()[-1] == f"pushed: 11 files to {hub}/me/polyps"
    sent = Hub.commits[-1]
    assert sent["summary"] == f"small (recipe {load_recipe(trained / 'recipe.yaml').fingerprint})"
    weights = (world / "run" / "adapter" / "adapter_model.safetensors").read_bytes()
    assert base64.b64decode(sent["adapter_model.safetensors"]) == weights
    assert base64.b64decode(sent["README.md"]).startswith(b"---\nbase_model: Qwen/Qwen3-VL-8B-Instruct\n")
    assert not list((world / "run").glob(".push-*")) and not (world / "run" / "push").exists()


def test_a_hub_that_does_not_take_it(world: Path, hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(world, "push", "run", "me/taken").startswith("me/taken: the Hub did not take it: ")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    why = refused(world, "push", "run", "me/polyps")
    assert why.startswith("me/polyps: the Hub did not take it: ") and why.endswith(
        "--dry-run writes the folder that would be pushed"
    )
    assert not list((world / "run").glob(".push-*"))
