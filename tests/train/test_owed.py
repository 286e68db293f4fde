"""What a run owes where it is ended in something that is no step: a validation that was given up or failed is done when
the run goes on, and the outcome is that of a run that nothing ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import sets
from processes import assert_same_run, records
from processes import weights as weights_of
from typed import sameday

from sameday.spec.document import dump_yaml
from sameday.spec.errors import EXIT_DIVERGED, EXIT_OUT_OF_MEMORY, EXIT_STOPPED
from sameday.tasks.classify import task as classify
from sameday.tasks.classify.task import ClassifyTask

pytestmark = pytest.mark.usefixtures("own_signals")

TRAIN = ("train", "recipe.yaml", "--set", "plan.device=cpu", "--set", "plan.eval_batch=2", "--set", "plan.save_steps=5")
STEPS = 12


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that nothing ended: `whole`."""
    folder = sets.write_set(tmp_path_factory.mktemp("owed"), train=20)
    data, best = {"path": "set", "val": 6}, {"metric": "accuracy", "every": 2}
    recipe = sets.tiny_recipe(data=data, effective_batch=4, max_steps=STEPS, learning_rate=0.05, best=best)
    (folder / "recipe.yaml").write_text(dump_yaml(recipe))
    assert sameday(folder, *TRAIN, "--out", "whole").code == 0
    return folder


class Counted:
    """Does something at one of the micro-batches of all validations."""

    def __init__(self, at: int, what: Any) -> None:
        self.at, self.what, self.count, self.plain = at, what, 0, classify._score_or_halve

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        if self.count == self.at:
            return self.what(*args)
        return self.plain(*args)


@pytest.mark.parametrize("at", [1, 5, 3 * STEPS // 2])
def test_asked_to_stop_in_a_validation(home: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not go on to its end: three micro-batches each, and six validations."""

    def ask(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return counted.plain(*args)

    counted = Counted(at, ask)
    with monkeypatch.context() as patch:
        patch.setattr(classify, "_score_or_halve", counted)
        said = sameday(home, *TRAIN, "--out", f"asked-{at}")
    step = 2 * -(-at // 3)
    if at % 3:
        assert said.code == EXIT_STOPPED and f"asked to stop: step {step} of {STEPS} is saved" in said.err
        assert counted.count == at, "what is left of it was not computed"
    assert sameday(home, *TRAIN, "--out", f"asked-{at}").code == 0
    assert_same_run(home / f"asked-{at}", home / "whole")


@pytest.mark.parametrize("at", [4, 3 * STEPS // 2])
def test_a_validation_that_failed_is_done_again(home: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(classify, "_score_or_halve", Counted(at, lambda *_: 0))  # the number of an image without room
        said = sameday(home, *TRAIN, "--out", f"failed-{at}")
    assert said.code == EXIT_OUT_OF_MEMORY and "out of memory in evaluation with a single image" in said.err
    assert sameday(home, *TRAIN, "--out", f"failed-{at}").code == 0
    assert_same_run(home / f"failed-{at}", home / "whole")


def test_a_finished_run_stays_as_it_is(home: Path) -> None:
    files = [path for path in (home / "whole").rglob("*") if path.is_file() and path.name != ".lock"]
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    said = sameday(home, *TRAIN, "--set", "plan.save_total_limit=1", "--set", "plan.images_on=host", "--out", "whole")
    assert said.code == 0 and f"finished already: all {STEPS} steps are done" in said.out
    after = [path for path in (home / "whole").rglob("*") if path.is_file() and path.name != ".lock"]
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in after} == before


@pytest.mark.parametrize("what", ["gone", "cut", "gone but for an early one"])
def test_a_finished_run_needs_no_checkpoints(home: Path, what: str) -> None:
    """People make room with them. What was trained stays, and its record."""
    run = home / f"without {what}"
    shutil.copytree(home / "whole", run)
    checkpoints = sorted(run.glob("checkpoints/step-*"))
    for path in checkpoints[1 if what.endswith("one") else 0 :]:
        if what == "cut":
            (path / "model.safetensors").write_bytes(b"cut")
        else:
            shutil.rmtree(path)
    files = [path for path in run.rglob("*") if path.is_file() and path.name != ".lock"]
    before = {path: path.read_bytes() for path in files}
    said = sameday(home, *TRAIN, "--out", run.name)
    assert said.code == 0 and f"finished already: all {STEPS} steps are done" in said.out
    if not what.endswith("one"):
        assert f"no checkpoint can be gone on from, and none is needed: {run.name}/model is whole" in said.out
    assert "begins again" not in said.out
    after = [path for path in run.rglob("*") if path.is_file() and path.name != ".lock"]
    assert {path: path.read_bytes() for path in after} == before


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_that_has_nothing_left_says_that_it_begins_again(home: Path, finished: bool) -> None:
    run = home / f"nothing left, finished {finished}"
    shutil.copytree(home / "whole", run)
    shutil.rmtree(run / "checkpoints")
    why = ""
    if finished:
        (run / "model" / "model.safetensors").write_bytes(b"cut")
        why = f"{run.name}/model: model.safetensors is not what was written; "
    else:
        shutil.rmtree(run / "model")
    said = sameday(home, *TRAIN, "--out", run.name, "--stop-after", "2")
    assert said.code == EXIT_STOPPED
    assert f"\n{why}there is no checkpoint to go on from: the run begins again at its first step\n" in said.out


def test_a_score_that_is_not_finite_is_said_each_time(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ClassifyTask.evaluate
    spoilt = lambda *args: {**plain(*args), "loss": float("nan")}  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(ClassifyTask, "evaluate", spoilt)
        assert sameday(home, *TRAIN, "--out", "spoilt").code == EXIT_DIVERGED
    again = sameday(home, *TRAIN, "--out", "spoilt")
    assert again.code == EXIT_DIVERGED and "validation loss nan: not finite" in again.err


def test_the_best_weights_are_looked_at_when_a_run_goes_on(home: Path) -> None:
    """Damaged, they are found again from a checkpoint before them."""
    best = json.loads((home / "whole" / "eval.json").read_text())["best"]["step"]
    stop = min(best + 3, STEPS - 1)
    assert sameday(home, *TRAIN, "--out", "lost", "--stop-after", str(stop)).code == EXIT_STOPPED
    weights = home / "lost" / "checkpoints" / f"step-{best:06d}" / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"x")
    said = sameday(home, *TRAIN, "--out", "lost")
    why = f"the best weights so far, of step-{best:06d}, cannot be used: model.safetensors is not what was written"
    assert said.code == 0 and f"checkpoint step-{stop:06d} is left aside: {why}" in said.out
    lost, whole = home / "lost", home / "whole"
    assert weights_of(lost) == weights_of(whole) and records(lost) == records(whole)
    assert (lost / "eval.json").read_text() == (whole / "eval.json").read_text()


@pytest.mark.parametrize("line", ["{}", '{"step": 3, "note": "x"}', '{"step": 2, "loss": null}'])
def test_records_of_others_are_no_reason_not_to_go_on(home: Path, line: str) -> None:
    name = f"odd-{abs(hash(line))}"
    assert sameday(home, *TRAIN, "--out", name, "--stop-after", "7").code == EXIT_STOPPED
    with (home / name / "metrics.jsonl").open("a") as file:
        print(line, file=file)
    said = sameday(home, *TRAIN, "--out", name)
    assert said.code == 0, said.err
    assert records(home / name)[-1]["step"] == STEPS
