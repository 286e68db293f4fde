"""Steps that are timed as the training loop does them: nothing is left behind, and what ends them early says so."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import sets
import torch

from sameday.commands.session import Session, Specs
from sameday.hardware.ranks import Ranks
from sameday.profile.timeline import beside, record, under_way
from sameday.record import checkpoint
from sameday.spec.errors import EXIT_DIVERGED, EXIT_OUT_OF_MEMORY, EXIT_STOPPED, RunStopped
from sameday.spec.plan import Plan
from sameday.tasks.setup import TRAINING
from sameday.train import commit

pytestmark = pytest.mark.usefixtures("own_signals")

PLANS = {"as it is known": Plan(device="cpu"), "a step ahead": Plan(device="cpu", optimizer_impl="fused")}


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(commit, "AHEAD", {"cpu": 1})
    return PLANS[request.param]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def ready(tmp_path: Path, said: list[str]) -> Iterator[Callable[..., tuple[Session, Any]]]:
    home = sets.write_set(tmp_path)
    with ExitStack() as open_sessions:

        def make(plan: Plan, **changes: Any) -> tuple[Session, Any]:
            session = Session.start(Specs(sets.tiny_recipe(**changes), home, plan), said.append, splits=TRAINING)
            open_sessions.enter_context(closing(session))
            return session, session.load()

        yield make


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (3, 2)])
def test_as_many_steps_as_were_asked_for(
    ready: Any, tmp_path: Path, plan: Plan, steps: int, warmup: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a checkpoint is written")

    monkeypatch.setattr(checkpoint, "write", never)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    session, task = ready(plan)
    start, files = [p.detach().clone() for p in task.trained().values()], set(tmp_path.rglob("*"))
    told: list[int] = []
    line = record(session, task, steps, warmup, told.append)
    assert len(line.steps) + len(line.left_out) == steps
    assert line.samples == statistics.mean(len(task.step_ids(step)) for step in range(warmup, warmup + steps))
    assert told == list(range(1, warmup + steps + 3)), "two more: the steps that count are followed by others, as usual"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert all(torch.equal(p, q) for p, q in zip(task.trained().values(), start, strict=True))
    assert set(tmp_path.rglob("*")) == files, "nothing of the user's is written"


def _refusing(loss_sum: Callable[..., Any], at: int) -> Callable[..., Any]:
    """A GPU without room for step `at`, once."""
    refused: list[int] = []

    def refusing(batch: Any, step: int) -> Any:
        if step == at and not refused:
            refused.append(step)
            time.sleep(0.5)
            raise torch.OutOfMemoryError("planted")
        return loss_sum(batch, step)

    return refusing


def test_what_is_watched_was_recorded_before(ready: Any, plan: Plan, said: list[str]) -> None:
    """Gradients are others each time, and what is recorded for them is made anew."""
    session, task = ready(plan)
    loss_sum, computed, slow = task.loss_sum, list[int](), set[int]()

    def listening(batch: Any, step: int) -> Any:
        computed.append(step)
        if step in slow:
            time.sleep(0.5)
            slow.remove(step)
        return loss_sum(batch, step)

    task.loss_sum = listening
    counts = {step: len(list(task.batches(step, None, Ranks()))) for step in range(5)}
    for records in (False, True):
        task.plan = task.plan.model_copy(update={"cuda_graphs": records})
        task._recording = lambda _: task._losses["train"]  # a CPU records nothing
        computed.clear()
        with under_way(session, task, range(2, 5), None) as done:
            before = set(computed)
            assert next(done).step == 3, "the first is over"
        assert before == {2, 3, 4} if records else 4 not in before
        computed.clear()
        slow |= set(range(5)) if records else set()
        told: list[int] = []
        line = record(session, task, 2, 1, told.append, watched=False)
        assert max((*line.seconds, *line.left_out)) < 0.5, "what came before is in none of them"
        assert told == [*([0] * 5 if records else []), *range(1, 6)]
        assert list(dict.fromkeys(computed)) == [0, 1, 2, 3, 4] and len(line.seconds + list(line.left_out)) == 2
        assert len(computed) == (2 if records else 1) * sum(counts[step] for step in range(5))
        computed.clear()
        with closing(session.steps(task)) as warm:
            record(session, task, 2, 1, watched=False, by=warm)
            assert len(computed) == sum(counts[step] for step in range(5)), "nothing has to come once before"
            assert [good.step for good in warm.run(range(2))] == [0, 1], "it stays open"
            if records:
                task.loss_sum, refused = _refusing(listening, 2), len(said)
                computed.clear()
                record(session, task, 2, 1, watched=False, by=warm)
                assert len(said) == refused + 1 and computed.count(4) == 2 * 2 * counts[4], "of half the size, twice"


def test_a_profilers_kernels_are_held_against_the_same_steps() -> None:
    """Where images have many sizes, others take longer or shorter."""
    laps = [{"forward": 0.5}, {"forward": 0.25, "data": 0.75}, {"forward": 2.0}, {"forward": 0.5}, {"forward": 1.0}]
    assert beside(laps, 2) == (1.0, 1.5)
    assert beside(laps, 4) == (1.0, 4.5 / 4)
    assert beside(laps, 5) == (1.0, 1.0), "one of these was not timed"
    laps[2] = {"forward": 4.0}
    assert beside(laps, 2) == (0.75, 0.75) and beside(laps, 1) == (0.75, 1.0), "something was compiled in the third"


def test_asked_to_stop(ready: Any, plan: Plan) -> None:
    session, task = ready(plan)
    with pytest.raises(RunStopped, match="asked to stop before all steps were timed") as stopped:
        record(session, task, 3, 1, lambda n: os.kill(os.getpid(), signal.SIGTERM) if n == 2 else None)
    assert stopped.value.code == EXIT_STOPPED


def test_a_run_that_diverges_says_so(ready: Any, plan: Plan) -> None:
    session, task = ready(plan)
    plain = task.loss_sum

    def loss_sum(batch: Any, step: int) -> Any:
        loss, each = plain(batch, step)
        return (loss * float("nan") if step == 3 else loss), each

    task.loss_sum = loss_sum
    with pytest.raises(RunStopped, match=r"step 4: loss nan") as stopped:
        record(session, task, 5, 1)
    assert stopped.value.code == EXIT_DIVERGED


def test_a_step_that_runs_out_of_memory_counts_once(ready: Any, plan: Plan, said: list[str]) -> None:
    """All steps are done again, with the budget of the step that had no room; what was lost is in none of them."""
    session, task = ready(plan)
    refusing, sizes = _refusing(task.loss_sum, 2), list[tuple[int, int]]()

    def loss_sum(batch: Any, step: int) -> Any:
        sizes.append((step, len(batch)))
        return refusing(batch, step)

    task.loss_sum = loss_sum
    line = record(session, task, 3, 1)
    assert len(line.steps) + len(line.left_out) == 3 and max((*line.seconds, *line.left_out)) < 0.5
    assert said == ["step 3: out of memory; micro batch 8 -> 4, all steps are done again"]
    again = sizes[sizes.index((2, 8)) + 1 :]
    assert [step for step, _ in again] == [step for step in range(6) for _ in range(2)]
    assert max(size for _, size in again) == 4


def test_the_step_that_ran_out_of_memory_is_the_one_that_is_cut(ready: Any, plan: Plan, said: list[str]) -> None:
    """Its neighbours may be in single samples already: here the last step of an epoch, which has only six images."""
    session, task = ready(plan)
    plain = task.loss_sum

    def loss_sum(batch: Any, step: int) -> Any:
        if len(batch) > 5 and len(task.step_ids(step)) == 6:
            raise torch.OutOfMemoryError("planted")
        return plain(batch, step)

    task.loss_sum = loss_sum
    assert len(task.step_ids(3)) == 6 and len(task.step_ids(0)) == 8
    record(session, task, 3, 1)
    assert said == ["step 4: out of memory; micro batch 6 -> 3, all steps are done again"]


def test_a_sample_that_never_fits(ready: Any, plan: Plan) -> None:
    session, task = ready(plan)

    def loss_sum(*_: object) -> None:
        raise torch.OutOfMemoryError("planted")

    task.loss_sum = loss_sum
    with pytest.raises(RunStopped, match="out of memory with a single image in a micro-batch") as stopped:
        record(session, task, 3, 1)
    assert stopped.value.code == EXIT_OUT_OF_MEMORY
