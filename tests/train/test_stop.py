"""A run that is asked to stop, or finds a folder that is not as it left it: saved, said, and gone on with."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from processes import assert_same_run, finished, last_step, records, started, weights, write_run

from sameday.record import checkpoint
from sameday.record.manifest import MANIFEST
from sameday.spec.errors import EXIT_BAD_INPUT, EXIT_STOPPED

SETS = ("plan.save_steps=4", "plan.save_total_limit=4", "plan.device=cpu")
"""A GPU gives the same bits only under plan.deterministic."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Path:
    """A world with a finished, uninterrupted run: `reference`."""
    folder = write_run(tmp_path_factory.mktemp("stop"), tiny_qwen3, num_epochs=6)
    finished(folder, *SETS, out="reference")
    return folder


def copy_of_reference(home: Path, name: str) -> Path:
    """The finished run with its end taken away: it has checkpoints, and no weights yet."""
    run = home / name
    shutil.copytree(home / "reference", run)
    shutil.rmtree(run / "adapter")
    return run


def test_asked_to_stop(home: Path) -> None:
    run, resumed = home / "asked", None
    for number, after in ((signal.SIGTERM, 2), (signal.SIGUSR1, 9), (signal.SIGXCPU, 14)):
        with started(home, *SETS, out=run.name) as process:
            assert process.until_step(after)
            process.send(number)
            assert process.wait() == EXIT_STOPPED, process.stderr
        said = re.search(r"asked to stop: step (\d+) of 24 is saved; run again to go on", process.stderr)
        assert said and "Traceback" not in process.stderr
        assert resumed is None or f"resumed from {resumed}" in process.stdout
        saved = run / "checkpoints" / f"step-{int(said[1]):06d}"
        assert checkpoint.fault(saved) is None
        assert json.loads((saved / checkpoint.STATE).read_text())["step"] == last_step(run) >= after
        assert not (run / "adapter").exists()
        resumed = saved.name
    assert f"resumed from {resumed}" in finished(home, *SETS, out=run.name).stdout
    assert weights(run) == weights(home / "reference")
    assert records(run) == records(home / "reference")


def test_asked_to_stop_together_with_its_workers(home: Path) -> None:
    """A batch system signals every process of a job, those that load images too."""
    sets = (*SETS, "plan.workers=1")
    with started(home, *sets, out="group") as process:
        assert process.until_step(3)
        os.killpg(process.popen.pid, signal.SIGTERM)
        assert process.wait() == EXIT_STOPPED, process.stderr
    finished(home, *sets, out="group")
    assert weights(process.run) == weights(home / "reference")


def test_stopping_early_ends_the_workers(home: Path) -> None:
    """They ignore signals, so that only the run itself can end them."""
    words = ["train", "recipe.yaml", "--out", "early", "--stop-after", "2", "--set", "plan.workers=2"]
    command = [sys.executable, "-m", "sameday", *words]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=240)
    assert done.returncode == EXIT_STOPPED, done.stderr


def test_images_that_go_away_cost_no_steps(tmp_path: Path, tiny_qwen3: Path) -> None:
    """As with a network disk: done steps are saved, and the same command goes on once it is there again."""
    write_run(tmp_path, tiny_qwen3)
    sets = (*SETS, "plan.save_steps=100")
    with started(tmp_path, *sets, out="run") as process:
        assert process.until_step(3)
        (tmp_path / "images").rename(tmp_path / "away")
        assert process.wait() == EXIT_BAD_INPUT, process.stderr
    said = re.search(
        r": was there when the data was checked, and now No such file or directory; step (\d+) is saved, and "
        r"the same command goes on from there\n",
        process.stderr,
    )
    assert said, process.stderr
    assert json.loads((tmp_path / "run" / "stopped.json").read_text())["code"] == EXIT_BAD_INPUT
    (tmp_path / "away").rename(tmp_path / "images")
    assert f"resumed from step-{int(said[1]):06d}" in finished(tmp_path, *sets, out="run").stdout


def test_broken_checkpoints_are_left_aside(home: Path) -> None:
    run = copy_of_reference(home, "broken")
    weights_path = run / "checkpoints" / "step-000024" / "adapter_model.safetensors"
    content = bytearray(weights_path.read_bytes())
    content[len(content) // 2] ^= 1
    weights_path.write_bytes(content)
    optimizer_path = run / "checkpoints" / "step-000020" / checkpoint.OPTIMIZER
    os.truncate(optimizer_path, optimizer_path.stat().st_size - 1)
    (run / "checkpoints" / "step-000016" / MANIFEST).unlink()
    process = finished(home, *SETS, out=run.name)
    assert [line for line in process.stdout.splitlines() if "left aside" in line or "resumed" in line] == [
        "checkpoint step-000024 is left aside: adapter_model.safetensors is not what was written",
        "checkpoint step-000020 is left aside: optimizer.safetensors is not what was written",
        "checkpoint step-000016 is left aside: its manifest is missing or unreadable",
        "resumed from step-000012",
    ]
    assert_same_run(run, home / "reference")


def test_killed_between_last_checkpoint_and_end(home: Path) -> None:
    run = copy_of_reference(home, "late")
    (run / "eval.json").unlink()
    (run / "checkpoints" / "best.json").unlink()
    (run / "checkpoints" / ".writing-step-000023").mkdir()
    (run / ".plan.yaml.1.tmp").write_text("half")
    finished(home, *SETS, out="late")
    assert_same_run(run, home / "reference")


def test_finished_run_again(home: Path) -> None:
    run = home / "again"
    shutil.copytree(home / "reference", run)
    before = (run / "metrics.jsonl").read_bytes()
    written = (run / "adapter" / "manifest.json").stat()
    process = finished(home, *SETS, out="again")
    assert "finished already: all 24 steps are done, and the weights are in again/adapter\n" in process.stdout
    assert (run / "adapter" / "manifest.json").stat().st_ino == written.st_ino, "the weights were written again"
    assert (run / "metrics.jsonl").read_bytes() == before
    assert_same_run(run, home / "reference")


def test_changed_data_is_refused(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    # The question file is as it was: only pixels behind one of its names are others.
    shutil.copy(tmp_path / "images/1.png", tmp_path / "images/0.png")
    process = finished(tmp_path, *SETS, out="reference", code=EXIT_BAD_INPUT)
    image = tmp_path / "images/0.png"
    both = f"the training data (newer: {image}) and the validation data (newer: {image})"
    ways = "put it back as it was, or choose another --out"
    assert f"error: reference: {both} changed since step-000024 was saved; {ways}\n" in process.stderr
    assert "questions" not in process.stdout, "the run was announced"
    assert weights(tmp_path / "reference") == weights(home / "reference")


def test_an_image_that_changed_is_named_whatever_the_time_of_its_file(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    image = tmp_path / "images/0.png"
    Image.new("RGB", Image.open(image).size, "teal").save(image)
    os.utime(image, (0, 0))
    process = finished(tmp_path, *SETS, out="reference", code=EXIT_BAD_INPUT)
    named = f"(not the images of then: {image})"
    assert f"the training data {named} and the validation data {named} changed since step-000024" in process.stderr


def test_newest_and_best_are_kept(tmp_path: Path, tiny_qwen3: Path) -> None:
    # In one pass the first half of the questions teaches the answer of the validation, and the second half another.
    folder = write_run(tmp_path, tiny_qwen3, num_epochs=1, order="listed", learning_rate=0.03)
    for name, count in (("train", 96), ("val", 9)):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        answers = ["red" if i < 48 else "instruments" for i in range(count)]
        lines = [{**rows[i % len(rows)], "answer": answer} for i, answer in enumerate(answers)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = finished(folder, "plan.save_steps=2", "plan.eval_steps=2", "plan.save_total_limit=2").run
    losses = {record["step"]: record["loss"] for record in records(run) if record.get("split") == "val"}
    assert sorted(losses) == list(range(2, 25, 2))
    best = json.loads((run / "checkpoints" / "best.json").read_text())
    assert losses[best["step"]] == best["loss"] == min(losses.values())
    assert best["step"] < 22, "the trial is too easy: its best step is among the newest"
    kept = checkpoint.steps(run / "checkpoints")
    assert [step for step, _ in kept] == [best["step"], 22, 24]
    assert [checkpoint.fault(path) for _, path in kept] == [None, None, None]
    assert json.loads((run / "eval.json").read_text())["best"] == best


def test_another_recipe_is_refused(home: Path) -> None:
    before = records(home / "reference")
    sets = (*SETS, "recipe.learning_rate=0.002", "recipe.lora.r=2", "recipe.seed=5")
    process = finished(home, *sets, out="reference", code=EXIT_BAD_INPUT)
    assert "reference: holds a run of another recipe" in process.stderr
    for line in (
        "learning_rate: 0.001 there, 0.002 here",
        "lora.r: 4 there, 2 here",
        "seed: 0 there, 5 here",
    ):
        assert line in process.stderr
    assert "Choose another --out" in process.stderr and process.stderr.count(" there, ") == 4
    assert records(home / "reference") == before


def test_second_process_is_refused(home: Path) -> None:
    long = (*SETS, "recipe.num_epochs=5000")  # it must not end before the other one has started
    with started(home, *long, out="held") as first:
        assert first.until_step(1)
        second = finished(home, *long, out="held", code=EXIT_BAD_INPUT)
        assert first.popen.poll() is None
    assert f"held: in use by process {first.popen.pid} on " in second.stderr
