"""A device that takes on the next step before the end of this one is known, as a GPU with a fused optimizer does: the
same run to the last bit, whatever goes wrong on the way."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import sets
import torch
import worlds
from torch import Tensor

from sameday.hardware.ranks import Ranks
from sameday.record.folder import RunFolder, read_metrics
from sameday.spec.errors import EXIT_DIVERGED, EXIT_STOPPED, BadInput, RunStopped
from sameday.spec.plan import Plan
from sameday.tasks.vqa import task as vqa
from sameday.tasks.vqa.task import VqaTask
from sameday.train import commit
from sameday.train.loop import train

pytestmark = pytest.mark.usefixtures("own_signals")

PLAN = Plan(
    share_images=True,
    packing=True,
    max_questions=None,
    token_budget=2048,
    optimizer_impl="fused",
    eval_steps=5,
    save_steps=4,
    log_steps=3,
)

EPOCHS = 4

Change = Callable[[VqaTask], None]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with patch.object(vqa, "load_base", worlds.once(vqa.load_base)):
        yield worlds.write_world(tmp_path_factory.mktemp("ahead"), 5, (9, 1, 5, 3), hard=True)


class Runs:
    """Runs of one recipe, each with its own plan of what goes wrong."""

    def __init__(self, world: Path, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.folder, self.patch = world, folder, monkeypatch
        self.recipe = worlds.tiny_recipe(model, num_epochs=EPOCHS, order="by_image", effective_batch=8)

    def train(self, name: str, ahead: int, change: Change = lambda _: None, stop_after: int | None = None) -> VqaTask:
        self.patch.setattr(commit, "AHEAD", {"cpu": ahead})
        task = worlds.make_task(self.world, self.recipe, PLAN)
        change(task)
        self.task = task
        with closing(RunFolder.open(self.folder / name, self.recipe, PLAN, self.world)) as run:
            train(self.recipe, PLAN, task, run, Ranks(), stop_after)
        return task

    @property
    def total(self) -> int:
        return EPOCHS * self.task.steps_per_epoch()

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """Without what depends on the time."""
        found = read_metrics(self.folder / name / "metrics.jsonl")
        return [{k: r[k] for k in r.keys() & {"step", "split", "loss", "lr", "grad_norm", "samples"}} for r in found]


@pytest.fixture
def runs(world: Path, tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(world, tiny_qwen3, tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def plain(world: Path, tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The whole run with nothing ahead and nothing wrong, for all that are compared with it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        runs = Runs(world, tiny_qwen3, tmp_path_factory.mktemp("plain"), monkeypatch)
        runs.train("plain", 0)
    return runs


def same(a: VqaTask, b: VqaTask) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.trained().values(), b.trained().values(), strict=True))


def before_losses(task: Any, then: Callable[[Any, int], None]) -> None:
    plain = task.loss_sum

    def loss_sum(batch: Any, step: int) -> tuple[Tensor, Tensor]:
        then(batch, step)
        return plain(batch, step)

    task.loss_sum = loss_sum


def test_the_same_run(runs: Runs, plain: Runs) -> None:
    launched: list[int] = []
    known: list[int] = []
    finish = commit.StepCommit.finish

    def finishing(self: commit.StepCommit, scalars: commit.PendingScalars) -> list[float]:
        known.append(len(launched))
        return finish(self, scalars)

    runs.patch.setattr(commit.StepCommit, "finish", finishing)
    ahead = runs.train("ahead", 1, lambda task: before_losses(task, lambda _, step: launched.append(step)))
    assert same(plain.task, ahead) and plain.metrics("plain") == runs.metrics("ahead")
    assert runs.total >= 12
    each = len(launched) // runs.total
    lag = [number // each - step for step, number in enumerate(known, 1)]
    wait = {step for step in range(1, runs.total + 1) if step % 5 == 0 or step % 4 == 0 or step == runs.total}
    assert lag == [0 if step in wait else 1 for step in range(1, runs.total + 1)]
    parts = [r for r in read_metrics(runs.folder / "ahead" / "metrics.jsonl") if "phases" in r]
    assert [r["step"] for r in parts] == list(range(3, runs.total + 1, 3))
    assert all(r["phases"]["optimizer"] > 0 for r in parts)


@pytest.mark.parametrize("at", [1, 2, 3, 6])
def test_memory_runs_out(runs: Runs, at: int, capsys: pytest.CaptureFixture[str]) -> None:
    """In the step before one that is launched, or at one whose end is waited for; once."""

    def short(task: VqaTask) -> None:
        refused: list[int] = []

        def refuse(_: Any, step: int) -> None:
            if step == at and not refused:
                refused.append(step)
                raise torch.OutOfMemoryError("planted")

        before_losses(task, refuse)

    plain, ahead = runs.train("plain", 0, short), runs.train("ahead", 1, short)
    said = re.findall(r"step (\d+): out of memory", capsys.readouterr().out)
    assert said == [str(at + 1)] * 2
    assert same(plain, ahead) and runs.metrics("plain") == runs.metrics("ahead")


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_loss_is_not_finite(runs: Runs, at: int) -> None:
    """The weights are those of the step before, though the step after was launched."""

    def spoil(task: VqaTask) -> None:
        plain = task.loss_sum

        def loss_sum(batch: Any, step: int) -> tuple[Tensor, Tensor]:
            loss, each = plain(batch, step)
            return (loss * math.nan, each * math.nan) if step == at else (loss, each)

        task.loss_sum = loss_sum  # type: ignore[method-assign]

    with pytest.raises(RunStopped, match=rf"step {at + 1}: loss nan") as stopped:
        runs.train("ahead", 1, spoil)
    assert stopped.value.code == EXIT_DIVERGED
    found = runs.task
    with pytest.raises(RunStopped, match=f"step {at} of"):
        runs.train("plain", 0, stop_after=at)
    assert same(found, runs.task) and runs.metrics("ahead") == runs.metrics("plain")


@pytest.mark.parametrize("how", ["signal", "stop_after"])
def test_asked_to_stop(runs: Runs, plain: Runs, how: str) -> None:
    def ask(task: VqaTask) -> None:
        before_losses(task, lambda _, step: os.kill(os.getpid(), signal.SIGTERM) if step == 5 else None)

    with pytest.raises(RunStopped, match="asked to stop: step 6 of") as stopped:
        if how == "signal":
            runs.train("ahead", 1, ask)
        else:
            runs.train("ahead", 1, stop_after=6)
    assert stopped.value.code == EXIT_STOPPED
    assert runs.metrics("ahead")[-1]["step"] == 6
    assert same(plain.task, runs.train("ahead", 1)) and plain.metrics("plain") == runs.metrics("ahead")


@pytest.mark.parametrize("spoiled", [False, True])
def test_what_was_launched_is_not_lost_with_what_fails_after_it(runs: Runs, spoiled: bool) -> None:
    """Data that cannot be read in step 7; step 6 was good, or was not finite and is the one to be named."""

    def fail(task: VqaTask) -> None:
        plain = task.loss_sum

        def loss_sum(batch: Any, step: int) -> tuple[Tensor, Tensor]:
            if step == 6:
                raise BadInput("unreadable")
            loss, each = plain(batch, step)
            return (loss * math.nan, each * math.nan) if spoiled and step == 5 else (loss, each)

        task.loss_sum = loss_sum  # type: ignore[method-assign]

    words = "step 6: loss nan" if spoiled else "unreadable; step 6 is saved, and the same command goes on from there"
    for name, ahead in (("plain", 0), ("ahead", 1)):
        with pytest.raises(RunStopped, match=words):
            runs.train(name, ahead, fail)
    assert runs.metrics("plain") == runs.metrics("ahead")
    assert runs.metrics("ahead")[-1]["step"] == (5 if spoiled else 6)


def test_each_step_has_its_own_seconds(runs: Runs) -> None:
    """Those whose end is waited for too, and those after them."""
    runs.train("ahead", 1, lambda task: before_losses(task, lambda _, __: time.sleep(0.05)))
    steps = [r for r in read_metrics(runs.folder / "ahead" / "metrics.jsonl") if "split" not in r]
    assert all(r["seconds"] >= 0.05 and r["wait"] <= r["seconds"] for r in steps)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("at", [2, 3])
def test_memory_runs_out_after_graphs_were_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the device was given is thrown away; smaller batches are recorded anew."""
    home, recipe = sets.write_set(tmp_path), sets.tiny_recipe()
    plan = Plan(cuda_graphs=True, images_on="device", optimizer_impl="fused", save_steps=4, log_steps=1)
    found = []
    for ahead in (0, 1):
        monkeypatch.setattr(commit, "AHEAD", {"cuda": ahead})
        task = sets.make_task(home, recipe, plan, "cuda")
        seen: list[int] = []

        def refuse(_: Any, step: int, seen: list[int] = seen) -> None:
            seen.append(step)
            # Once, and not in the warm-up, which goes from the first step to an epoch's last.
            if seen[-2:] == [at - 1, at] and seen.count(at - 1) == 1:
                torch.empty(2**45, device="cuda")

        before_losses(task, refuse)
        with closing(RunFolder.open(tmp_path / str(ahead), recipe, plan, home)) as run:
            train(recipe, plan, task, run, Ranks())
        losses = [r["loss"] for r in read_metrics(tmp_path / str(ahead) / "metrics.jsonl") if "split" not in r]
        found.append((losses, [p.detach().cpu() for p in task.trained().values()]))
    assert re.findall(r"step (\d+): out of memory", capsys.readouterr().out) == [str(at + 1)] * 2
    (losses, weights), (others, same_weights) = found
    assert losses == pytest.approx(others, rel=1e-5) and len(losses) == 8
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(weights, same_weights, strict=True))
