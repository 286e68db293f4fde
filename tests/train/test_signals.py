"""A signal in the middle of a step: the step is given up between two micro-batches, what was done before it is saved,
and the run that goes on has the same bits as one that was never asked. Before the loop it ends the run at once."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sets
from processes import assert_same_run
from typed import Said, sameday

from sameday.commands.session import Session
from sameday.hardware.signals import (
    AGAIN,
    ASKING,
    AskedToStop,
    StopRequest,
    nothing_left_to_stop,
    stops_at_once,
    unbroken,
)
from sameday.record import checkpoint
from sameday.record.folder import RunFolder
from sameday.spec.document import dump_yaml
from sameday.spec.errors import EXIT_OUT_OF_MEMORY, EXIT_STOPPED, RunStopped
from sameday.tasks.classify.task import ClassifyTask

pytestmark = pytest.mark.usefixtures("own_signals")

SETS = ("--set", "plan.device=cpu", "--set", "plan.micro_batch=2", "--set", "plan.save_steps=2")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen images in steps of eight, four micro-batches each: four steps; and a run of them that nobody stopped."""
    folder = sets.write_set(tmp_path_factory.mktemp("signals"), train=20)
    (folder / "recipe.yaml").write_text(dump_yaml(sets.tiny_recipe(data={"path": "set", "val": 4})))
    assert sameday(folder, "train", "recipe.yaml", "--out", "reference", *SETS).code == 0
    return folder


def signalled(home: Path, run: str, after: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Said, int]:
    """A run that is sent SIGTERM while its micro-batch of this number is computed; and how many it computed."""
    plain, computed = ClassifyTask.loss_sum, list[int]()

    def loss_sum(self: ClassifyTask, batch: Any, step: int) -> Any:
        computed.append(step)
        if len(computed) == after:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, batch, step)

    with monkeypatch.context() as patch:
        patch.setattr(ClassifyTask, "loss_sum", loss_sum)
        said = sameday(home, "train", "recipe.yaml", "--out", run, *SETS)
    return said, len(computed)


@pytest.mark.parametrize(("after", "done"), [(6, 1), (9, 2), (12, 3)])
def test_the_step_is_given_up_and_done_again(
    home: Path, after: int, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second step; in the first micro-batch after a checkpoint; in the last micro-batch, which ends its step."""
    run = f"given-up-{after}"
    said, computed = signalled(home, run, after, monkeypatch)
    assert said.code == EXIT_STOPPED and computed == after, "no micro-batch was begun after the signal"
    assert said.err == f"asked to stop: step {done} of 4 is saved; run again to go on\n"
    assert json.loads((home / run / "stopped.json").read_text())["code"] == EXIT_STOPPED
    assert checkpoint.steps(home / run / "checkpoints")[-1][0] == done
    again = sameday(home, "train", "recipe.yaml", "--out", run, *SETS)
    assert again.code == 0 and f"resumed from step-{done:06d}" in again.out
    for extra in set(checkpoint.steps(home / run / "checkpoints")):
        if not (home / "reference" / "checkpoints" / extra[1].name).exists():
            shutil.rmtree(extra[1])  # the one that the signal made
    assert_same_run(home / run, home / "reference")


def test_a_signal_before_the_first_step_is_done(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, computed = signalled(home, "first", 2, monkeypatch)
    assert said.code == EXIT_STOPPED and computed == 2
    nothing = "no step was done yet, so that there is nothing to save; run again to begin"
    assert said.err == f"asked to stop: {nothing}\n"
    assert not checkpoint.steps(home / "first" / "checkpoints")
    assert sameday(home, "train", "recipe.yaml", "--out", "first", *SETS).code == 0
    assert_same_run(home / "first", home / "reference")


NOTHING_LOST = "asked to stop: nothing is lost, and the same command goes on"


def test_a_signal_while_the_model_is_loaded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the code of a run that was asked to stop, at once; under the same command it goes on."""
    plain = Session.load
    for number in ASKING:
        signal.signal(number, StopRequest()._ask)  # a run that does not listen goes on
        with monkeypatch.context() as patch:
            patch.setattr(Session, "load", lambda *of, **more: (os.kill(os.getpid(), number), plain(*of, **more))[1])  # noqa: B023
            said = sameday(home, "train", "recipe.yaml", "--out", "loading", *SETS)
        assert (said.code, said.err) == (EXIT_STOPPED, f"{NOTHING_LOST}\n")
        assert "images" in said.out.splitlines()[-1], "the run was announced, and no step begun"
        assert json.loads((home / "loading" / "stopped.json").read_text())["why"] == NOTHING_LOST
    assert sameday(home, "train", "recipe.yaml", "--out", "loading", *SETS).code == 0
    assert_same_run(home / "loading", home / "reference")


def asked(then: Callable[[], None] = lambda: None) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    then()


def test_a_signal_that_something_else_took_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops what is raised in `__del__`; what fails on the way out is no error of its own; of several ranks the
    first one speaks."""

    def closed() -> None:
        try:
            asked()
        except AskedToStop:
            raise ConnectionError("closed by peer") from None

    with pytest.raises(RunStopped, match=f"^{NOTHING_LOST}$"), stops_at_once():
        closed()
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match=f"^{EXIT_STOPPED}$"), stops_at_once():
        asked()
    with stops_at_once():
        try:
            asked()
        except AskedToStop:
            with StopRequest() as loop:
                assert loop.asked


class Asks:
    """Sends a signal where Python drops what is raised."""

    def __del__(self) -> None:
        asked()


def in_del() -> None:
    Asks()


def in_weak_reference() -> None:
    kept = set[int]()
    watching = weakref.ref(kept, lambda _: asked())
    del kept
    assert watching() is None


def in_a_collection() -> None:
    kept = [Asks()]
    kept.append(kept)  # type: ignore[arg-type]
    del kept
    gc.collect()


@pytest.mark.parametrize("drops", [in_del, in_weak_reference, in_a_collection])
def test_a_signal_that_python_drops_comes_again(drops: Callable[[], None], capfd: pytest.CaptureFixture[str]) -> None:
    """At once, in the middle of what goes on."""
    hook, began = sys.unraisablehook, time.monotonic()
    with pytest.raises(RunStopped, match=f"^{NOTHING_LOST}$"), stops_at_once():
        drops()
        while time.monotonic() < began + 60:
            Asks()  # some of them are dropped again
    assert time.monotonic() < began + 30
    assert sys.unraisablehook is hook and "Exception ignored" not in capfd.readouterr().err


def test_a_signal_that_python_drops_is_for_the_next_that_listens() -> None:
    with stops_at_once():
        Asks()
        with StopRequest() as loop:
            assert loop.asked
            time.sleep(5 * AGAIN)  # it does not come again there
            with pytest.raises(AskedToStop), loop.at_once():
                pass
        nothing_left_to_stop()
        time.sleep(5 * AGAIN)


def test_a_signal_that_something_caught_ends_what_it_did_not_end() -> None:
    done = list[str]()
    with pytest.raises(RunStopped, match=f"^{NOTHING_LOST}$"), stops_at_once():
        with contextlib.suppress(BaseException):
            asked()
        done.append("the rest")
    assert done == ["the rest"]
    with stops_at_once():
        with contextlib.suppress(BaseException):
            asked()
        nothing_left_to_stop()


def test_what_else_python_drops_is_told_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails:
        def __del__(self) -> None:
            raise ValueError("planted")

    told = list[str]()
    monkeypatch.setattr(sys, "unraisablehook", lambda about: told.append(str(about.exc_value)))
    with stops_at_once():
        Fails()
    assert told == ["planted"]


def test_a_signal_in_a_destructor_while_the_model_is_loaded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Session.load
    with monkeypatch.context() as patch:
        patch.setattr(Session, "load", lambda *of, **more: (in_del(), time.sleep(0.2), plain(*of, **more))[2])
        said = sameday(home, "train", "recipe.yaml", "--out", "destructor", *SETS)
    assert (said.code, said.err) == (EXIT_STOPPED, f"{NOTHING_LOST}\n")


def test_a_signal_after_a_run_is_finished(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes nothing: all is saved and said."""
    plain = RunFolder.close
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "close", lambda folder: (asked(), plain(folder))[1])
        said = sameday(home, "train", "recipe.yaml", "--out", "finished", *SETS)
    assert (said.code, said.err) == (0, "")
    assert_same_run(home / "finished", home / "reference")


def test_a_signal_that_comes_too_late_for_one_ends_what_follows() -> None:
    """As in the last line of a training that an evaluation follows."""
    with stops_at_once():
        with StopRequest():
            asked()
        with StopRequest() as evaluation:
            assert evaluation.asked


def test_what_must_not_be_broken_is_finished_first() -> None:
    done = list[str]()
    with pytest.raises(RunStopped), stops_at_once(), unbroken():
        asked(lambda: done.append("whole"))
    assert done == ["whole"]


def test_a_forked_process_ends_of_a_signal() -> None:
    """As it did before its parent listened."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with stops_at_once():
        if not (child := os.fork()):
            try:
                asked()
            finally:
                os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM


def test_data_workers_that_are_always_killed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps before it are saved, and a run without workers goes on from there."""
    plain = ClassifyTask.batches

    def batches(self: ClassifyTask, step: int, *more: Any) -> Any:
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, step, *more)

    words = ("train", "recipe.yaml", "--out", "workers", *SETS)
    with monkeypatch.context() as patch:
        patch.setattr(ClassifyTask, "batches", batches)
        said = sameday(home, *words, "--set", "plan.workers=1")
    assert said.code == EXIT_OUT_OF_MEMORY, said.err
    assert said.err.count("all workers are started again") >= 2
    assert said.err.splitlines()[-1].startswith("data workers were killed 3 times in a row")
    assert [step for step, _ in checkpoint.steps(home / "workers" / "checkpoints")] == [2, 3]
    assert "resumed from step-000003" in sameday(home, *words).out
    shutil.rmtree(home / "workers" / "checkpoints" / "step-000003")
    assert_same_run(home / "workers", home / "reference")
