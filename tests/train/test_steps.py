"""Steps that are launched and finished: in order, each with how it ended, and after a bad one nothing has changed that
was launched behind it."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sets
import torch
from torch import Tensor

from sameday.hardware import garbage
from sameday.hardware.phases import Clock, silence
from sameday.hardware.ranks import Ranks
from sameday.spec.errors import EXIT_DIVERGED, EXIT_OUT_OF_MEMORY, BadInput, RunStopped
from sameday.spec.plan import Plan
from sameday.tasks.classify.task import ClassifyTask
from sameday.train import commit
from sameday.train import steps as steps_module
from sameday.train.steps import Diverged, Failed, GivenUp, Good, Outcome, OutOfMemory, Steps

RATE = 1e-2
PLANS = {"as it is known": Plan(), "a step ahead": Plan(optimizer_impl="fused")}
Planted = Callable[[int, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sets.write_set(tmp_path_factory.mktemp("steps"), train=80)


@pytest.fixture(autouse=True)
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU has it."""
    monkeypatch.setattr(commit, "AHEAD", {"cpu": 1})


class Others(Ranks):
    """Another rank that has no part in any step."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


def make(
    home: Path,
    plan: Plan,
    planted: Planted | None = None,
    ranks: Ranks | None = None,
    give_up: Callable[[], bool] = lambda: False,
) -> tuple[Any, Steps]:
    recipe = sets.tiny_recipe()
    task = sets.make_task(home, recipe, plan)
    if planted is not None:
        plain = task.loss_sum

        def loss_sum(batch: Any, step: int) -> tuple[Tensor, Tensor]:
            return planted(step, plain(batch, step))

        task.loss_sum = loss_sum  # type: ignore[method-assign]
    task.training(True)
    return task, Steps(recipe, plan, task, ranks or Ranks(), give_up)


def weights(task: ClassifyTask) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in task.trained().values()]


def moments(steps: Steps) -> list[Tensor]:
    return [value.clone() for state in steps.optimizer.state.values() for value in state.values()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def after(
    home: Path, plan: Plan, count: int, ranks: Ranks | None = None
) -> tuple[list[Tensor], list[Tensor], list[Outcome]]:
    """Weights and optimizer state after so many good steps, and how these ended."""
    task, steps = make(home, plan, ranks=ranks)
    ended: list[Outcome] = []
    with closing(steps):
        steps.open(range(count))
        for step in range(count):
            steps.launch(step, RATE)
            ended += steps.finish(0)
    return weights(task), moments(steps), ended


def bad_at(at: int, kind: str, once: bool = False) -> Planted:
    """A step that runs out of memory, is not finite, or cannot be computed at all."""
    met: list[int] = []

    def planted(step: int, losses: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if step != at or (once and met):
            return losses
        met.append(step)
        if kind == "out of memory":
            raise torch.OutOfMemoryError("planted")
        if kind == "unreadable":
            raise BadInput("planted")
        return losses[0] * math.nan, losses[1] * math.nan

    return planted


# Good steps


@pytest.mark.parametrize("name", PLANS)
def test_steps_that_nobody_wants_any_more_are_not_found_by_the_next(home: Path, name: str) -> None:
    """Whoever times steps and has seen enough, while the device is ahead, goes on with others."""
    _, steps = make(home, PLANS[name])
    with closing(steps):
        with closing(steps.run(range(4))) as done:
            assert next(done).step == 0
        assert steps.pending == 0
        assert [good.step for good in steps.run([2, 2])] == [2, 2]


@pytest.mark.parametrize("name", PLANS)
def test_steps_end_in_order_each_with_its_own_numbers(home: Path, name: str) -> None:
    plan = PLANS[name].model_copy(update={"micro_batch": 3})
    _, _, alone = after(home, plan, 4)
    task, steps = make(home, plan)
    ended: list[Outcome] = []
    with closing(steps):
        steps.open(range(4))
        for step in range(4):
            steps.launch(step, RATE)
            assert steps.pending <= steps.ahead + 1
            ended += steps.finish(steps.ahead)
            assert steps.pending == min(step + 1, steps.ahead)
        ended += steps.finish(0)
    assert steps.pending == 0 and steps.ahead == (1 if name == "a step ahead" else 0)
    assert [good.step for good in ended if isinstance(good, Good)] == list(range(4))
    for good, other in zip(ended, alone, strict=True):
        assert isinstance(good, Good) and isinstance(other, Good)
        assert (good.loss, good.norm, good.rate) == (other.loss, other.norm, RATE)
        assert (good.samples, good.micro_batches, good.stop, good.phases) == (8, 3, False, None)
        assert good.seconds > 0 and good.input["wait"] > 0
    assert not same(weights(task), after(home, plan, 0)[0])


@pytest.mark.parametrize("name", PLANS)
def test_a_rank_that_was_asked_to_stop_tells_the_others(home: Path, name: str) -> None:
    """Asked once the step is computed; and no step is left whose end is not known."""
    computed: list[int] = []

    def planted(step: int, losses: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        computed.append(step)
        return losses

    _, steps = make(home, PLANS[name], planted)
    with closing(steps):
        steps.open(range(3))
        steps.launch(0, RATE, lambda: computed == [0])
        if steps.ahead:
            steps.launch(1, RATE)
        ended = list(steps.finish(steps.ahead))
        assert steps.pending == 0
    assert [good.stop for good in ended if isinstance(good, Good)] == [True, False][: 1 + steps.ahead]


def test_each_step_may_have_a_clock(home: Path) -> None:
    """One of its own, which has ended when the step's end is known."""
    _, steps = make(home, PLANS["a step ahead"])
    with closing(steps):
        steps.open(range(3))
        for step in range(3):
            steps.launch(step, RATE, clock=Clock(torch.device("cpu")) if step == 1 else None)
        ended = [good for good in steps.finish(0) if isinstance(good, Good)]
    assert [good.phases is None for good in ended] == [True, False, True]
    phases = ended[1].phases
    assert phases is not None and phases["forward"] > 0 and phases["backward"] > 0


# Bad steps


@pytest.mark.parametrize("name", PLANS)
def test_a_failed_launch_comes_after_the_good_one_before_it(home: Path, name: str) -> None:
    task, steps = make(home, PLANS[name], bad_at(1, "unreadable"))
    ended: list[Outcome] = []
    with closing(steps):
        steps.open(range(3))
        steps.launch(0, RATE)
        ended += steps.finish(steps.ahead)
        steps.launch(1, RATE)
        ended += steps.finish(steps.ahead)
    good, failed = ended
    assert isinstance(good, Good) and good.step == 0
    assert isinstance(failed, Failed) and isinstance(failed.error, BadInput)
    assert same(weights(task), after(home, PLANS[name], 1)[0]), "what failed changed nothing"
    assert not list(steps.finish(0)), "it is told once"


@pytest.mark.parametrize("kind", ["out of memory", "not finite"])
@pytest.mark.parametrize("name", PLANS)
def test_after_a_bad_step_nothing_that_was_launched_later_changed_anything(home: Path, name: str, kind: str) -> None:
    """And it can be done again, with what came behind it, to the same bits as if nothing had happened."""
    plan = PLANS[name]
    task, steps = make(home, plan, bad_at(1, kind, once=True))
    with closing(steps):
        steps.open(range(4))
        steps.launch(0, RATE)
        assert [type(each) for each in steps.finish(0)] == [Good]
        before = weights(task), moments(steps)
        assert same(before[0], after(home, plan, 1)[0])
        steps.launch(1, RATE)
        if steps.ahead:
            steps.launch(2, RATE)
        (bad,) = steps.finish(0)
        assert isinstance(bad, OutOfMemory if kind == "out of memory" else Diverged) and bad.step == 1
        assert steps.pending == 0
        assert same(weights(task), before[0]) and same(moments(steps), before[1])
        steps.open(range(1, 4))
        ended: list[Outcome] = []
        for step in range(1, 4):
            steps.launch(step, RATE)
            ended += steps.finish(steps.ahead)
        ended += steps.finish(0)
    whole, state, expected = after(home, plan, 4)
    assert same(weights(task), whole) and same(moments(steps), state)
    assert [good.loss for good in ended if isinstance(good, Good)] == [
        good.loss for good in expected[1:] if isinstance(good, Good)
    ]


def test_words_of_what_is_not_finite() -> None:
    assert str(Diverged(3, math.nan, 1.0)) == "loss nan"
    assert str(Diverged(3, 1.25, math.inf)) == "gradient norm inf at loss 1.2500"


@pytest.mark.parametrize("ranks", [Ranks(), Others()], ids=["alone", "one of two"])
def test_a_bad_step_before_one_that_failed(home: Path, ranks: Ranks) -> None:
    """It is the one to be told of, to every rank."""
    first, second = bad_at(1, "not finite"), bad_at(2, "unreadable")

    def planted(step: int, losses: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return second(step, first(step, losses))

    task, steps = make(home, PLANS["a step ahead"], planted, ranks)
    with closing(steps):
        steps.open(range(3))
        for step in range(3):
            steps.launch(step, RATE)
        ended = list(steps.finish(1))
        assert [type(each) for each in ended] == [Good, Diverged]
        assert not list(steps.finish(0)) and steps.pending == 0
    assert all(weight.isfinite().all() for weight in weights(task))


@pytest.mark.parametrize("name", PLANS)
def test_a_rank_that_failed_goes_on_until_the_others_know(home: Path, name: str) -> None:
    """It has a part in every sum that they go through, and what is launched after its failure changes nothing."""
    task, steps = make(home, PLANS[name], bad_at(1, "unreadable"), Others())
    ended: list[Outcome] = []
    with closing(steps):
        steps.open(range(5))
        for step in range(2 + steps.ahead):
            steps.launch(step, RATE)
            assert steps.pending == min(step, steps.ahead) + 1
            ended += steps.finish(steps.ahead)
        good, failed = ended
        assert isinstance(good, Good) and good.step == 0
        assert isinstance(failed, Failed) and isinstance(failed.error, BadInput) and not failed.error.alone
        assert same(weights(task), after(home, PLANS[name], 1, Others())[0])
        assert not list(steps.finish(0)) and steps.pending == 0, "it is told once"
        assert [good.step for good in steps.run([2, 3])] == [2, 3], "other steps are none of its matter"


def test_one_rank_alone_knows_at_once_that_memory_ran_out(home: Path) -> None:
    """Several find out in the order of steps: until the sum only one of them knows."""
    for ranks, left in ((Ranks(), 0), (Others(), 1)):
        _, steps = make(home, PLANS["a step ahead"], bad_at(1, "out of memory"), ranks)
        with closing(steps):
            steps.open(range(3))
            steps.launch(0, RATE)
            steps.launch(1, RATE)
            kinds = [type(each) for each in steps.finish(1)]
            assert (kinds, steps.pending) == ([Good, OutOfMemory] if left == 0 else [Good], left)


# Steps without training


@pytest.mark.parametrize("name", PLANS)
def test_run_gives_each_step_once_and_changes_no_weight(home: Path, name: str) -> None:
    task, steps = make(home, PLANS[name].model_copy(update={"micro_batch": 3}))
    start = weights(task)
    task.training(False)
    with closing(steps):
        ended = list(steps.run([0, 4, 5]))
        assert [(good.step, good.micro_batches, good.rate) for good in ended] == [(0, 3, 0.0), (4, 3, 0.0), (5, 3, 0.0)]
        assert [good.micro_batches for good in steps.run([1, 2], budget=1)] == [8, 8]
    assert same(weights(task), start) and task.module().training


@pytest.mark.parametrize("name", PLANS)
def test_run_by_one_clock_times_every_step_without_a_gap(home: Path, name: str) -> None:
    _, steps = make(home, PLANS[name])
    clock = Clock(torch.device("cpu"))
    with closing(steps):
        ended = list(steps.run(range(4), clock))
        clock.stop()
    laps = clock.steps()
    assert len(laps) == len(ended) == 4 and all(good.phases is None for good in ended)
    assert all(lap["forward"] > 0 and lap["backward"] > 0 and lap["optimizer"] > 0 for lap in laps)


@pytest.mark.parametrize("name", PLANS)
def test_run_ends_with_a_bad_step(home: Path, name: str) -> None:
    for kind, error, words in (
        ("out of memory", torch.OutOfMemoryError, "in step 3"),
        ("not finite", RunStopped, "step 3: loss nan"),
        ("unreadable", BadInput, "planted"),
    ):
        _, steps = make(home, PLANS[name], bad_at(2, kind))
        done: list[int] = []
        with closing(steps), pytest.raises(error, match=words) as raised:
            for good in steps.run(range(4)):
                done.append(good.step)
        assert done == [0, 1], "those before it"
        assert kind != "not finite" or raised.value.code == EXIT_DIVERGED  # type: ignore[attr-defined]
    silence()


def test_an_optimizer_without_room_is_said_before_any_data_is_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(steps_module, "allocate_state", full)
    monkeypatch.setattr(ClassifyTask, "batches", lambda *_: pytest.fail("data is read"))
    with pytest.raises(RunStopped, match="gradients and optimizer state do not fit beside the model") as stopped:
        make(home, Plan())
    assert stopped.value.code == EXIT_OUT_OF_MEMORY and "plan.level_kernel fused" in str(stopped.value)


@pytest.mark.parametrize("name", PLANS)
def test_an_update_without_room_is_no_step_to_be_done_again(
    home: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some weights are changed then and others are not: it must not look like a step that ran out of memory."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("planted")

    _, steps = make(home, PLANS[name])
    monkeypatch.setattr(torch.optim.AdamW, "step", full)
    with closing(steps), pytest.raises(RunStopped, match="out of memory in the optimizer's update") as stopped:
        steps.open(range(2))
        steps.launch(0, RATE)
        list(steps.finish(0))
    assert stopped.value.code == EXIT_OUT_OF_MEMORY


# Given up


def asked_after(micro_batches: int) -> tuple[Planted, Callable[[], bool]]:
    """A signal that comes while the last of so many micro-batches is computed."""
    computed: list[int] = []

    def planted(step: int, losses: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        computed.append(step)
        return losses

    return planted, lambda: len(computed) >= micro_batches


@pytest.mark.parametrize("name", PLANS)
def test_a_step_is_given_up_between_two_micro_batches(home: Path, name: str) -> None:
    """With eight micro-batches a step, a signal in the eleventh ends the second step there; weights and optimizer are
    those of one step, and what was launched behind it changed nothing."""
    plan = PLANS[name].model_copy(update={"micro_batch": 1})
    planted, asked = asked_after(11)
    task, steps = make(home, plan, planted, give_up=asked)
    ended: list[Outcome] = []
    with closing(steps):
        steps.open(range(4))
        for step in range(3):
            steps.launch(step, RATE, asked)
            ended += steps.finish(steps.ahead)
        ended += steps.finish(0)
    assert [(type(each), each.step) for each in ended[:2] if not isinstance(each, Failed)] == [(Good, 0), (GivenUp, 1)]
    whole, state, _ = after(home, plan, 1)
    assert same(weights(task), whole) and same(moments(steps), state)


def test_a_signal_in_the_last_micro_batch_gives_nothing_up(home: Path) -> None:
    plan = Plan(micro_batch=1)
    planted, asked = asked_after(8)
    task, steps = make(home, plan, planted, give_up=asked)
    with closing(steps):
        steps.open(range(2))
        steps.launch(0, RATE, asked)
        (good,) = steps.finish(0)
    assert isinstance(good, Good) and good.stop
    assert same(weights(task), after(home, plan, 1)[0])


@pytest.fixture
def frozen_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU, on whatever these tests run."""
    monkeypatch.setattr(garbage, "DEVICES", ("cpu", "cuda"))
    gc.unfreeze()
    yield
    gc.freeze()  # what `spared` had frozen


def test_on_a_cpu_garbage_is_collected_as_ever(home: Path) -> None:
    """All of it at once takes longer than steps that are as short as those of tests."""
    task, steps = make(home, Plan())
    found: list[int] = []

    def seen(phase: str, about: dict[str, int]) -> None:
        found.extend([about["generation"]] if phase == "start" else [])

    before = gc.get_freeze_count()
    gc.disable()
    gc.callbacks.append(seen)
    try:
        with closing(steps):
            steps.open(range(1))
            assert (gc.get_freeze_count() != before) == (2 in found) == (task.device.type == "cuda")
    finally:
        gc.callbacks.remove(seen)
        gc.enable()


@pytest.mark.usefixtures("frozen_here")
def test_no_step_looks_for_garbage_among_all_that_was_loaded(home: Path) -> None:
    """Half a million objects take half a second. What a step itself leaves behind is found as ever."""
    found: list[int] = []

    def seen(phase: str, about: dict[str, int]) -> None:
        if phase == "start" and about["generation"] == 2 and gc.get_freeze_count():
            found.append(len(gc.get_objects()))

    def planted(step: int, loss: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        around: list[Any] = [loss[0].detach()]
        around.append(around)
        gc.collect()
        return loss

    _, steps = make(home, Plan(), planted)
    everything = len(gc.get_objects())
    gc.callbacks.append(seen)
    try:
        with closing(steps):
            goods = list(steps.run(range(3)))
            assert gc.get_freeze_count() > 0.5 * everything
    finally:
        gc.callbacks.remove(seen)
    assert len(goods) == 3 and len(found) == 3 and max(found) < 0.2 * everything
    assert gc.get_freeze_count() == 0, "whoever comes next collects as before"


@pytest.mark.usefixtures("frozen_here")
def test_no_garbage_is_kept_while_steps_are_open(home: Path) -> None:
    """Such as the model of an earlier training in this process, whose modules know each other."""

    class Model:
        def __init__(self) -> None:
            self.itself = self

    _, steps = make(home, Plan())
    gc.disable()
    try:
        earlier = weakref.ref(Model())
        with closing(steps):
            steps.open(range(1))
            assert earlier() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("frozen_here")
def test_what_a_warm_up_froze_is_let_go_of_where_no_step_follows(home: Path) -> None:
    """A run may end between the two, asked to stop or out of memory in its first validation."""
    _, steps = make(home, Plan())
    with closing(steps):
        gc.freeze()
    assert gc.get_freeze_count() == 0
