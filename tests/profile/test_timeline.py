"""Steps that are timed by the training loop itself: nothing is left behind, and what ends them early says so."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sets
import torch

from sameday.profile.timeline import practice, record
from sameday.spec.errors import EXIT_DIVERGED, EXIT_STOPPED, RunStopped
from sameday.spec.plan import Plan
from sameday.train import checkpoint, ending

pytestmark = pytest.mark.usefixtures("own_signals")

PLANS = {"as it is known": Plan(), "a step ahead": Plan(optimizer_impl="fused")}


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(ending, "AHEAD", {"cpu": 1})
    return PLANS[request.param]


@pytest.fixture
def ready(tmp_path: Path) -> Callable[..., tuple[Any, Any]]:
    home = sets.write_set(tmp_path)

    def make(plan: Plan, **changes: Any) -> tuple[Any, Any]:
        recipe = sets.tiny_recipe(**changes)
        return recipe, sets.make_task(home, recipe, plan)

    return make


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (3, 2)])
def test_as_many_steps_as_were_asked_for(
    ready: Any, tmp_path: Path, plan: Plan, steps: int, warmup: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a checkpoint is written")

    monkeypatch.setattr(checkpoint, "write", never)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    recipe, task = ready(plan)
    told: list[int] = []
    line = record(recipe, plan, task, tmp_path, steps, warmup, told.append)
    assert len(line.steps) + len(line.left_out) == steps
    assert line.samples == statistics.mean(len(task.step_ids(step)) for step in range(warmup, warmup + steps))
    assert told == list(range(warmup + steps + 2))
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_asked_to_stop(ready: Any, tmp_path: Path, plan: Plan) -> None:
    recipe, task = ready(plan)
    with pytest.raises(RunStopped, match="asked to stop before all steps were timed") as stopped:
        record(recipe, plan, task, tmp_path, 3, 1, lambda n: os.kill(os.getpid(), signal.SIGTERM) if n == 2 else None)
    assert stopped.value.code == EXIT_STOPPED


def test_a_run_that_diverges_says_so(ready: Any, tmp_path: Path, plan: Plan) -> None:
    recipe, task = ready(plan, learning_rate=1e30, warmup_steps=0)
    with pytest.raises(RunStopped, match=r"step \d: ") as stopped:
        record(recipe, plan, task, tmp_path, 5, 1)
    assert stopped.value.code == EXIT_DIVERGED


def test_practice_gives_each_step_once(ready: Any, plan: Plan) -> None:
    recipe, task = ready(plan.model_copy(update={"micro_batch": 3}))
    start = [p.detach().clone() for p in task.trained().values()]
    assert list(practice(recipe, plan, task, [0, 4, 5])) == [3, 3, 3]
    assert all(torch.equal(p, q) for p, q in zip(task.trained().values(), start, strict=True))


def test_a_step_that_is_done_again_counts_once(ready: Any, tmp_path: Path, plan: Plan) -> None:
    recipe, task = ready(plan)
    plain, refused = task.loss_sum, list[int]()

    def loss_sum(batch: Any, step: int) -> Any:
        if step == 2 and not refused:
            refused.append(step)
            time.sleep(0.5)
            raise torch.OutOfMemoryError("planted")
        return plain(batch, step)

    task.loss_sum = loss_sum
    line = record(recipe, plan, task, tmp_path, 3, 1)
    assert refused and len(line.steps) + len(line.left_out) == 3 and max((*line.seconds, *line.left_out)) < 0.5
