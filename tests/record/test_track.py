"""Metrics for a tracker. None of the libraries is installed where this is tested: modules with their documented calls
(init, log, finish; set_experiment, start_run, log_params, log_metrics, end_run) stand in their place."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import worlds
from typed import refused, sameday, write_recipe

from sameday.record import track
from sameday.record.folder import RunFolder
from sameday.record.track import Tracker
from sameday.spec.plan import Plan, claims

WRITTEN = """
import json, os
OUT = os.environ["TRACKED"]

def note(what, *values, **named):
    with open(OUT, "a") as file:
        file.write(json.dumps([what, values, named], default=str) + "\\n")
"""
LIKE_WANDB = """
def init(**named):
    note("init", **named)
def log(values, step=None):
    if os.environ.get("FAILS") == "log":
        raise ConnectionError("no route to host")
    if os.environ.get("FAILS") == "hangs":
        import time; time.sleep(60)
    note("log", values, step=step)
def finish():
    note("finish")
"""
LIKE_MLFLOW = """
class info:
    run_id = "run-1"
class started:
    info = info
def set_experiment(name):
    note("set_experiment", name)
def start_run(run_id=None, run_name=None):
    note("start_run", run_id=run_id, run_name=run_name)
    return started
def log_params(values):
    note("log_params", values)
def log_metrics(values, step=None):
    note("log", values, step=step)
def end_run():
    note("finish")
"""
MODULES = {"wandb": LIKE_WANDB, "trackio": LIKE_WANDB, "mlflow": LIKE_MLFLOW}


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file in which they write down what they were told."""
    for name, text in MODULES.items():
        (tmp_path / "libraries").mkdir(exist_ok=True)
        (tmp_path / "libraries" / f"{name}.py").write_text(WRITTEN + text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "libraries"))
    monkeypatch.setenv("TRACKED", str(tmp_path / "told.jsonl"))
    yield tmp_path / "told.jsonl"
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Path:
    folder = worlds.write_world(tmp_path_factory.mktemp("track"), 6, (3, 2), hard=False)
    write_recipe(folder, tiny_qwen3)
    (folder / "plan.yaml").write_text(json.dumps({"device": "cpu", "log_steps": 1}))
    return folder


def told(file: Path) -> list[tuple[str, list[Any], dict[str, Any]]]:
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def train(world: Path, out: str, kind: str) -> str:
    words = ("train", "recipe.yaml", "--plan", "plan.yaml", "--out", out, "--set", f"plan.track={kind}")
    said = sameday(world, *words)
    assert said.code == 0, said.err
    return said.out


@pytest.mark.parametrize("kind", MODULES)
def test_the_tracker_gets_what_the_record_has(world: Path, libraries: Path, kind: str) -> None:
    train(world, f"run-{kind}", kind)
    records = RunFolder.read(world / f"run-{kind}").metrics
    calls = told(libraries)
    logged = [(values[0], named["step"]) for what, values, named in calls if what == "log"]
    steps = [(each["train/loss"], step) for each, step in logged if "train/loss" in each]
    assert steps == [(record["loss"], record["step"]) for record in records if "split" not in record]
    assert [each["val/loss"] for each, _ in logged if "val/loss" in each] == [
        record["loss"] for record in records if record.get("split") == "val"
    ]
    assert calls[-1][0] == "finish" and calls[0][0] in ("init", "set_experiment")


def test_a_run_that_goes_on_is_the_same_run_there(world: Path, libraries: Path, own_signals: None) -> None:
    words = ("train", "recipe.yaml", "--plan", "plan.yaml")
    for kind in ("wandb", "mlflow"):
        run = (*words, "--out", f"on-{kind}", "--set", f"plan.track={kind}")
        assert sameday(world, *run, "--stop-after", "1").code == 75
        assert sameday(world, *run).code == 0
    starts = [named for what, _, named in told(libraries) if what in ("init", "start_run")]
    assert starts[0]["id"] == starts[1]["id"] and starts[1]["resume"] == "allow"
    assert starts[0]["config"]["recipe"]["learning_rate"] == 0.01 and starts[0]["project"] == "sameday"
    assert [start["run_id"] for start in starts[2:]] == [None, "run-1"]


def test_it_changes_no_bit(world: Path, libraries: Path) -> None:
    assert claims()["track"] == "bitwise"
    train(world, "bits-with", "trackio")
    train(world, "bits-without", "none")
    weights = [world / run / "adapter" / "adapter_model.safetensors" for run in ("bits-with", "bits-without")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_library_that_fails_stops_nothing(world: Path, libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "log")
    said = train(world, "fails", "wandb")
    why = "(ConnectionError: no route to host); the run goes on, and metrics.jsonl has every record"
    assert said.count(f"plan.track: wandb is given up {why}") == 1
    assert [record["step"] for record in RunFolder.read(world / "fails").metrics if "split" not in record] == [1, 2]


def test_a_server_that_hangs_delays_the_end_alone(
    tmp_path: Path, libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", "hangs")
    monkeypatch.setattr(track, "WAIT", 0.2)
    lines: list[str] = []
    run = RunFolder(tmp_path / "run", worlds.tiny_recipe(tmp_path), Plan(track="wandb"), tmp_path)
    tracker = Tracker("wandb", run, lines.append)
    for step in range(1, 100):
        tracker.log({"train/loss": 1.0, "what": "text", "bad": float("nan")}, step)
    assert not lines
    tracker.close()
    assert lines == [
        "plan.track: wandb is given up (TimeoutError: it has not taken all values 0.2 s after the end); the run goes "
        "on, and metrics.jsonl has every record"
    ]


def test_a_library_that_is_not_there_is_an_error_before_anything_is_written(world: Path) -> None:
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    for name in missing:
        words = ("train", "recipe.yaml", "--out", "never", "--set", f"plan.track={name}", "--set", "plan.device=cpu")
        assert refused(world, *words) == (
            f"plan.track is {name}, and that library is not installed here: pip install 'sameday[{name}]', or "
            "plan.track none"
        )
        assert not (world / "never").exists()


def test_offline_is_the_librarys_own(tmp_path: Path, libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its variables, of the shell or of plan.environment; names of projects too."""
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    run = RunFolder(tmp_path / "run", worlds.tiny_recipe(tmp_path), Plan(track="wandb"), tmp_path)
    tracker = Tracker("wandb", run, print)
    tracker.log({"train/loss": 1.0}, 1)
    tracker.close()
    assert told(libraries)[0][2]["project"] == "ours" and "mode" not in told(libraries)[0][2]
