"""The search by plans whose cost is known: it finds the best, keeps noise out, and says what it had no time for."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sameday.hardware.choose import attention_kernel
from sameday.hardware.choose_classify import check_plan
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan, fields_of
from sameday.tune.search import OutOfTime, ablation, confirm, faster, gain, search
from sameday.tune.space import BUDGETS, Choice, choices, choices_made
from sameday.tune.trial import Result

STEPS = range(4, 12)
CHOICES = [
    Choice("share_images", ({"share_images": True, "packing": True, "max_questions": None},)),
    Choice("label_only_logits", ({"label_only_logits": True},)),
    Choice("token_budget", tuple({"token_budget": n, "max_questions": None} for n in BUDGETS), climb=True),
    Choice("attention", ({"attention": "sdpa"}, {"attention": "split"})),
    Choice("optimizer_impl", ({"optimizer_impl": "foreach"}, {"optimizer_impl": "fused"})),
]


class World:
    """Costs by field and value. Steps differ by a factor of two; each measurement has noise of its own."""

    def __init__(self, costs: dict[str, dict[Any, float]], noise: float = 0.01, seed: int = 0) -> None:
        self.costs, self.noise, self.random = costs, noise, random.Random(seed)
        self.trials = 0
        self.most = math.inf
        self.too_large: Callable[[Plan], bool] = lambda plan: False

    def cost(self, plan: Plan) -> float:
        return math.prod(table.get(getattr(plan, name), 1.0) for name, table in self.costs.items())

    def measure(self, plan: Plan) -> Result:
        if self.trials >= self.most:
            raise OutOfTime
        self.trials += 1
        if self.too_large(plan):
            return Result({}, failed="out of memory")
        sizes = {step: 0.1 * (1 + step % 3 / 2) for step in STEPS}
        process = math.exp(self.random.gauss(0, self.noise / 3))
        noisy = {
            step: process * size * self.cost(plan) * math.exp(self.random.gauss(0, self.noise))
            for step, size in sizes.items()
        }
        return Result(noisy, pieces=max(1.0, 20000 / plan.token_budget))


def allowed(plan: Plan) -> bool:
    try:
        attention_kernel(plan, "cpu", "float32", False)
    except BadInput:
        return False
    return True


COSTS = {
    "share_images": {True: 0.25},
    "label_only_logits": {True: 0.8},
    "token_budget": {n: 1 + 0.2 * abs(math.log2(n / 1024)) for n in BUDGETS},
    "max_questions": {1: 1.5},
    "optimizer_impl": {"foreach": 0.85, "fused": 1.3},
    "attention": {"split": 1.2},
}


@pytest.mark.parametrize("seed", range(5))
def test_the_best_is_found_from_the_plain_plan(seed: int) -> None:
    world = World(COSTS, seed=seed)
    found = search(Plan(), None, CHOICES, world.measure, allowed)
    assert found.best.share_images and found.best.label_only_logits and found.best.token_budget == 1024
    assert found.best.optimizer_impl == "foreach" and found.best.attention == "auto"
    assert not found.not_tried and world.trials >= len(found.results)


@given(
    st.fixed_dictionaries(
        {
            "share_images": st.fixed_dictionaries({True: st.floats(0.2, 3)}),
            "label_only_logits": st.fixed_dictionaries({True: st.floats(0.5, 2)}),
            "optimizer_impl": st.fixed_dictionaries({"foreach": st.floats(0.5, 2), "fused": st.floats(0.5, 2)}),
        }
    ),
    st.integers(0, 2**20),
)
def test_choices_that_do_not_touch_each_other_are_all_found(costs: dict[str, dict[Any, float]], seed: int) -> None:
    world = World(costs, noise=0.002, seed=seed)
    found = search(Plan(), None, CHOICES, world.measure, allowed)
    least = math.prod(min(1.0, *table.values()) for table in costs.values())
    # What gives less than a few hundredths, a choice at a time, is not taken for a gain.
    assert world.cost(found.best) <= least * 1.04 ** len(costs)


def test_noise_is_no_gain() -> None:
    """A hundred searches where nothing matters: what is taken at all is taken for a gain of a few hundredths."""
    kept, promised = 0, []
    for seed in range(100):
        world = World({}, noise=0.05, seed=seed)
        found = search(Plan(), None, CHOICES, world.measure, allowed)
        confirm(found, world.measure)
        kept += found.best == Plan()
        plain, best = found.of(found.plain), found.of(found.best)
        assert plain is not None and best is not None
        promised.append(math.exp(gain(best, plain)[0]))
    assert kept >= 95 and max(promised) < 1.15, (kept, max(promised))


def test_a_guess_is_a_start_and_no_end() -> None:
    guess = Plan(share_images=True, packing=True, max_questions=None, token_budget=8192)
    world = World(COSTS)
    found = search(Plan(), guess, CHOICES, world.measure, allowed)
    assert found.best.token_budget == 1024 and found.best.label_only_logits
    slow = World({**COSTS, "share_images": {True: 9.0}})
    assert not search(Plan(), guess, CHOICES, slow.measure, allowed).best.share_images


def test_plans_without_room_are_left() -> None:
    world = World({**COSTS, "token_budget": {n: 1024 / n for n in BUDGETS}})
    world.too_large = lambda plan: plan.token_budget > 16384 and plan.max_questions is None
    found = search(Plan(), None, CHOICES, world.measure, allowed)
    assert found.best.token_budget == 16384
    assert any(result.failed == "out of memory" for result in found.results.values())


@pytest.mark.parametrize("most", [1, 2, 5, 9, 12])
def test_what_there_is_no_time_for_is_said(most: int) -> None:
    world = World(COSTS)
    world.most = most
    found = search(Plan(), None, CHOICES, world.measure, allowed)
    worth = ablation(found, CHOICES, world.measure, allowed)
    assert found.not_tried and world.trials == most
    asked = 3 * len(choices_made(found.best, Plan(), CHOICES))
    answered = sum(each is not None for row in worth for each in (row.alone, row.added, row.left_out))
    assert answered + sum("no time was left" in text for text in found.not_tried) == asked


def test_the_ablation_has_every_choice_three_times() -> None:
    world = World(COSTS, noise=0.0)
    found = search(Plan(), None, CHOICES, world.measure, allowed)
    rows = {row.name: row for row in ablation(found, CHOICES, world.measure, allowed)}
    assert list(rows) == ["share_images", "label_only_logits", "token_budget", "optimizer_impl"]
    plain, best = found.of(found.plain), found.of(found.best)
    assert plain is not None and best is not None

    def times(over: Result, result: Result | None) -> float:
        assert result is not None
        return math.exp(gain(result, over)[0])

    assert times(plain, rows["label_only_logits"].alone) == pytest.approx(1 / 0.8)
    assert times(plain, rows["share_images"].alone) == pytest.approx(4 * 1.5)
    assert times(best, rows["label_only_logits"].left_out) == pytest.approx(0.8)
    # Questions stay together where the budget says so: what is left out is the sharing alone.
    assert times(best, rows["share_images"].left_out) == pytest.approx(0.25)
    assert times(plain, rows["optimizer_impl"].added) == pytest.approx(world.cost(Plan()) / world.cost(found.best))


def test_one_step_that_was_held_up_decides_nothing() -> None:
    calm = Result({step: 1.0 + step / 10 for step in STEPS})
    held = Result({step: seconds * (40 if step == 7 else 1) for step, seconds in calm.seconds.items()})
    assert not faster(calm, held) and not faster(held, calm)
    assert faster(Result({step: seconds / 1.1 for step, seconds in calm.seconds.items()}), calm)
    assert not faster(Result({}, failed="out of memory"), calm) and faster(calm, Result({}, failed="no"))


@pytest.mark.parametrize("task", ["vqa", "classify"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_fields_of_the_task_are_tried(task: str, device: str) -> None:
    found = choices(task, device, device == "cuda", 8, 1024)
    assert {name for choice in found for name in choice.fields} <= set(fields_of(task))
    check: Any = attention_kernel if task == "vqa" else check_plan
    for choice in found:
        for value in choice.values:
            plan = Plan.model_validate(Plan(packing=task == "vqa").model_dump() | value)
            check(plan, device, "bf16", device == "cuda")
    assert len({choice.name for choice in found}) == len(found)
