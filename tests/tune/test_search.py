"""The search by plans whose cost is known: it finds the best, keeps noise out, and says what it had no time for."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sets
import worlds
from hypothesis import given
from hypothesis import strategies as st

from sameday.hardware.machine import Machine
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan, fields_of
from sameday.tasks.classify.setup import ClassifySetup
from sameday.tasks.setup import Choice, TaskSetup
from sameday.tasks.vqa.automatic import attention_kernel
from sameday.tasks.vqa.setup import VqaSetup
from sameday.tasks.vqa.trials import TUNED_BUDGETS as BUDGETS
from sameday.tune.search import (
    OutOfTime,
    SearchState,
    ablation,
    confirm,
    doubts,
    explore,
    faster,
    gain,
    leave_out,
    search,
)
from sameday.tune.space import choices, choices_made
from sameday.tune.trial import Result

STEPS = range(4, 12)
CPU = Machine("cpu", "CPU", 2**34, 8, False)
GPU = Machine("cuda", "GPU", 2**36, 8, True, shared_memory=2**18, capability=(9, 0))
CHOICES = [
    Choice("share_images", ({"share_images": True, "packing": True, "max_questions": None},)),
    Choice("label_only_logits", ({"label_only_logits": True},)),
    Choice("token_budget", tuple({"token_budget": n, "max_questions": None} for n in BUDGETS), climb=True, cuts=True),
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

    @property
    def room(self) -> float:
        """Every trial takes a second: one may begin as long as this is not below zero."""
        return self.most - self.trials - 1

    usual = 1.0

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


def searched(world: World, guess: Plan | None = None) -> SearchState:
    state = SearchState(Plan(), CHOICES, guess)
    search(state, world.measure, allowed)
    return state


def allowed(plan: Plan) -> bool:
    try:
        attention_kernel(plan, CPU, "float32")
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
    state = searched(world)
    assert state.best.share_images and state.best.label_only_logits and state.best.token_budget == 1024
    assert state.best.optimizer_impl == "foreach" and state.best.attention == "auto"
    assert not state.ahead and world.trials >= len(state.results)


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
    state = searched(world)
    least = math.prod(min(1.0, *table.values()) for table in costs.values())
    # What gives less than a few hundredths, a choice at a time, is not taken for a gain.
    assert world.cost(state.best) <= least * 1.04 ** len(costs)


def test_noise_is_no_gain() -> None:
    """A hundred searches where nothing matters: what is taken at all is taken for a gain of a few hundredths."""
    kept, promised = 0, []
    for seed in range(100):
        world = World({}, noise=0.05, seed=seed)
        state = searched(world)
        confirm(state, world.measure)
        kept += state.best == Plan()
        plain, best = state.of(state.plain), state.of(state.best)
        assert plain is not None and best is not None
        promised.append(math.exp(gain(best, plain)[0]))
    assert kept >= 95 and max(promised) < 1.15, (kept, max(promised))


def test_a_guess_is_a_start_and_no_end() -> None:
    guess = Plan(share_images=True, packing=True, max_questions=None, token_budget=8192)
    world = World(COSTS)
    state = searched(world, guess)
    assert state.best.token_budget == 1024 and state.best.label_only_logits
    slow = World({**COSTS, "share_images": {True: 9.0}})
    assert not searched(slow, guess).best.share_images


def test_plans_without_room_are_left() -> None:
    world = World({**COSTS, "token_budget": {n: 1024 / n for n in BUDGETS}})
    world.too_large = lambda plan: plan.token_budget > 16384 and plan.max_questions is None
    state = searched(world)
    assert state.best.token_budget == 16384
    assert any(result.failed == "out of memory" for result in state.results.values())


@pytest.mark.parametrize("most", [1, 2, 5, 9, 12])
def test_what_there_is_no_time_for_is_said(most: int) -> None:
    world = World(COSTS)
    world.most = most
    state = searched(world)
    worth = ablation(state, world.measure, allowed)
    assert state.not_tried and world.trials == most
    asked = 3 * len(choices_made(state.best, Plan(), CHOICES))
    answered = sum(each is not None for row in worth for each in (row.alone, row.added, row.left_out))
    assert answered + sum(map(len, state.missing.values())) == asked
    assert len(state.not_tried) <= 5, "a sentence for many choices"


def test_what_was_not_tried_is_told_apart() -> None:
    """Nothing of a choice, a part of it, or a second look; several in one sentence."""
    told = {}
    for most in range(1, 60):
        world = World(COSTS, noise=0.0)
        world.most = most
        told[most] = [text for text in searched(world).not_tried if text.startswith("the search ended")]
    rest = "token_budget, attention and optimizer_impl"
    assert told[1] == [f"the search ended before share_images, label_only_logits, {rest}"]
    assert told[3] == [f"the search ended before {rest}"]
    assert told[4] == ["the search ended within token_budget, before attention and optimizer_impl"]
    *_, last = filter(None, told.values())
    assert last == ["the search ended before a second look at attention and optimizer_impl"]
    assert told[59] == []

    world = World(COSTS)
    world.most = 1
    guess = Plan(packing=True, max_questions=None)
    assert "before the plan chosen for this machine, share_images, " in searched(world, guess).not_tried[0]


def test_choices_that_could_not_be_asked_about_are_one_sentence() -> None:
    world = World(COSTS)
    state = searched(world)
    confirm(state, world.measure)
    state.results = {key: state.results[key] for key in (Plan().model_dump_json(), state.best.model_dump_json())}
    world.most = world.trials + 2
    ablation(state, world.measure, allowed)
    assert state.not_tried[0] == "left out: no time was left for token_budget and optimizer_impl"
    assert state.not_tried[2] == "alone: no time was left for share_images, label_only_logits, token_budget and " + (
        "optimizer_impl"
    )


def test_the_time_is_shared_between_search_and_ablation() -> None:
    """Where there is time for all, all is done; where not, the search leaves what the ablation needs, half at most."""
    free = World(COSTS, noise=0.0)
    state = SearchState(Plan(), CHOICES)
    explore(state, free, allowed)
    assert not state.not_tried and state.best.token_budget == 1024
    for most in range(2, free.trials + 5):
        world = World(COSTS, noise=0.0)
        world.most = most
        state = SearchState(Plan(), CHOICES)
        explore(state, world, allowed)
        assert world.trials == min(most, free.trials), "a search that was cut short goes on with what was left over"
        assert most < 18 or not state.missing, "and it did not take what the ablation needed"
        assert most < free.trials or not state.not_tried


def test_time_that_is_left_goes_to_plans_that_may_be_faster() -> None:
    """A gain that one pair of processes does not tell from noise: a search alone keeps it seldom, or keeps nothing."""
    costs = {"optimizer_impl": {"foreach": 0.92, "fused": 1.0}}
    alone, whole, used = 0, 0, []
    for seed in range(40):
        alone += searched(World(costs, noise=0.1, seed=seed)).best.optimizer_impl == "foreach"
        world = World(costs, noise=0.1, seed=seed)
        world.most = 150
        state = SearchState(Plan(), CHOICES)
        explore(state, world, allowed)
        whole += state.best.optimizer_impl == "foreach"
        used.append(world.trials)
        assert not doubts(state) or world.trials >= world.most - 1, "it did not end with a question and with time"
    assert alone < 20 and whole >= 1.5 * alone, (alone, whole)
    assert max(used) <= 150


@pytest.mark.slow
def test_noise_is_no_gain_however_often_it_is_timed() -> None:
    kept = 0
    for seed in range(60):
        world = World({}, noise=0.05, seed=seed)
        world.most = 300
        state = SearchState(Plan(), CHOICES)
        explore(state, world, allowed)
        kept += state.best == Plan()
        assert not doubts(state)
    assert kept >= 54, kept


def test_questions_that_the_time_left_open_are_told() -> None:
    world = World({}, noise=0.2)
    world.most = 15
    state = SearchState(Plan(), CHOICES)
    explore(state, world, allowed)
    assert world.trials == world.most, "all of it was used"
    count = len(doubts(state))
    assert f"often enough to know: whether {count} other plans are faster than the best one" in state.not_tried


def test_a_search_goes_on_where_it_was() -> None:
    whole = World(COSTS, noise=0.0)
    best = searched(whole).best
    world = World(COSTS, noise=0.0)
    state = SearchState(Plan(), CHOICES)
    for most in range(1, 60):
        world.most = most
        search(state, world.measure, allowed)
    assert state.best == best and not state.ahead
    assert world.trials == whole.trials, "nothing was timed twice"


def test_a_choice_that_costs_time_is_left_out() -> None:
    """A guess is taken whole; what makes it slower for sure goes, what makes no difference stays."""
    guess = Plan(share_images=True, packing=True, max_questions=None, label_only_logits=True, optimizer_impl="foreach")
    costs = {"share_images": {True: 0.25}, "label_only_logits": {True: 1.06}, "optimizer_impl": {"foreach": 1.0}}
    world = World(costs, noise=0.002)
    state = SearchState(Plan(), CHOICES, guess)
    worth = explore(state, world, allowed)
    assert state.best == guess.model_copy(update={"label_only_logits": False}) and state.best == state.sure
    assert [row.name for row in worth] == ["share_images", "optimizer_impl"]


@pytest.mark.parametrize("slower", [1.06, 1.5])
def test_a_choice_is_not_left_out_for_one_bad_moment(slower: float) -> None:
    world = World(COSTS, noise=0.0)
    state = SearchState(Plan(), CHOICES)
    state.best = state.sure = Plan(share_images=True, packing=True, max_questions=None, attention="sdpa")
    state.timed(Plan(), world.measure)
    held = {step: slower * seconds for step, seconds in world.measure(state.best).seconds.items()}
    state.results[state.best.model_dump_json()] = Result(held)
    assert not leave_out(state, world.measure, allowed)
    world.costs = {**COSTS, "attention": {"sdpa": slower}}
    assert leave_out(state, world.measure, allowed) and state.best.attention == "auto"


def test_what_looked_faster_without_a_choice_is_settled_first_or_told() -> None:
    """Evidence that is there needs one pair of processes; where there is no time for it, it is told."""
    world = World(COSTS, noise=0.0)
    best = Plan(share_images=True, packing=True, max_questions=None, label_only_logits=True, attention="sdpa")
    world.costs = {**COSTS, "attention": {"sdpa": 1.6}}
    for more, kept in ((2, "auto"), (0, "sdpa")):
        state = SearchState(Plan(), CHOICES)
        state.best = state.sure = best
        world.trials, world.most = 0, 100
        for plan in (Plan(), best, best.model_copy(update={"attention": "auto"})):
            state.timed(plan, world.measure)
        world.most = world.trials + more
        leave_out(state, world.measure, allowed)
        assert state.best.attention == kept
        ablation(state, world.measure, allowed)
        told = "again, which no time was left for: the best plan looked faster without attention"
        assert (told in state.not_tried) == (more == 0)


def test_a_plan_without_the_choice_in_question_answers_nothing() -> None:
    """A kernel for packed rows cannot run alone: the plain plan in its place would be called as fast as itself."""
    world = World(COSTS, noise=0.0)

    def packed(plan: Plan) -> bool:
        return allowed(plan) and (plan.attention != "split" or plan.packing)

    state = SearchState(Plan(), CHOICES)
    state.best = state.sure = Plan(share_images=True, packing=True, max_questions=None, attention="split")
    rows = {row.name: row for row in ablation(state, world.measure, packed)}
    assert rows["attention"].alone is None and rows["attention"].added is not None
    assert rows["attention"].left_out is not None and rows["share_images"].left_out is not None
    assert "alone: no such plan can run for attention" in state.not_tried


def test_a_machine_that_became_slower_does_not_take_the_best_plan_away() -> None:
    world = World(COSTS, noise=0.0)
    state = searched(world)
    best = state.best
    world.costs = {**COSTS, "deterministic": {False: 20.0}}
    confirm(state, world.measure)
    assert state.best == state.sure == best and not state.refused
    assert state.unsteady == pytest.approx(20.0)
    plain, again = state.of(Plan()), state.of(best)
    assert plain is not None and again is not None
    assert math.exp(gain(again, plain)[0]) == pytest.approx(world.cost(Plan()) / world.cost(best)), (
        "both are of one time"
    )


def test_a_plan_that_was_lucky_gives_way_to_the_last_sure_one() -> None:
    world = World(COSTS, noise=0.0)
    state = searched(world)
    confirm(state, world.measure)
    sure, lucky = state.sure, state.best.model_copy(update={"workers": 1})
    assert sure == state.best
    state.best = lucky
    world.costs = {"share_images": {True: 9.0}}
    confirm(state, world.measure)
    assert state.best == sure and state.refused == {lucky.model_dump_json()} and not state.not_tried


def test_the_ablation_has_every_choice_three_times() -> None:
    world = World(COSTS, noise=0.0)
    state = searched(world)
    rows = {row.name: row for row in ablation(state, world.measure, allowed)}
    assert list(rows) == ["share_images", "label_only_logits", "token_budget", "optimizer_impl"]
    plain, best = state.of(state.plain), state.of(state.best)
    assert plain is not None and best is not None

    def times(over: Result, result: Result | None) -> float:
        assert result is not None
        return math.exp(gain(result, over)[0])

    assert times(plain, rows["label_only_logits"].alone) == pytest.approx(1 / 0.8)
    assert times(plain, rows["share_images"].alone) == pytest.approx(4 * 1.5)
    assert times(best, rows["label_only_logits"].left_out) == pytest.approx(0.8)
    # Questions stay together where the budget says so: what is left out is the sharing alone.
    assert times(best, rows["share_images"].left_out) == pytest.approx(0.25)
    assert times(plain, rows["optimizer_impl"].added) == pytest.approx(world.cost(Plan()) / world.cost(state.best))


def test_one_step_that_was_held_up_decides_nothing() -> None:
    calm = Result({step: 1.0 + step / 10 for step in STEPS})
    held = Result({step: seconds * (40 if step == 7 else 1) for step, seconds in calm.seconds.items()})
    assert not faster(calm, held) and not faster(held, calm)
    assert faster(Result({step: seconds / 1.1 for step, seconds in calm.seconds.items()}), calm)
    assert not faster(Result({}, failed="out of memory"), calm) and faster(calm, Result({}, failed="no"))


SETUPS: dict[str, TaskSetup] = {
    "vqa": VqaSetup(worlds.tiny_recipe(Path("model"), precision="bf16"), Path()),
    "classify": ClassifySetup(sets.tiny_recipe(precision="bf16", effective_batch=1024), Path()),
}


@pytest.mark.parametrize("task", SETUPS)
@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "cuda"])
def test_only_fields_of_the_task_are_tried(task: str, machine: Machine) -> None:
    setup = SETUPS[task]
    known = choices(setup, machine)
    assert {name for choice in known for name in choice.fields} <= set(fields_of(setup.recipe))
    for choice in known:
        for value in choice.values:
            plan = Plan.model_validate(Plan(packing=task == "vqa").model_dump() | value)
            setup.check_plan(plan, machine)
    assert len({choice.name for choice in known}) == len(known)
    assert [choice.name for choice in known if choice.cuts] == (["token_budget"] if task == "vqa" else [])


@pytest.mark.parametrize("task", SETUPS)
def test_the_threads_of_a_cpu_are_tried_first(task: str) -> None:
    for cores, counts in ((1, ["1"]), (2, ["1", "2"]), (8, ["1", "4", "8"])):
        first = choices(SETUPS[task], replace(CPU, cores=cores))[0]
        assert [value["environment"] for value in first.values] == [{"OMP_NUM_THREADS": count} for count in counts]
    assert choices(SETUPS[task], GPU)[-1].name == "environment"


@pytest.mark.parametrize("cuts", [True, False])
def test_a_step_in_one_piece_is_not_cut_into_larger_ones(cuts: bool) -> None:
    """Whole steps have room already; any other climb is tried upwards too."""
    world = World({"token_budget": {n: 1 / n for n in BUDGETS}}, noise=0.0)
    climb = Choice("any name", CHOICES[2].values, climb=True, cuts=cuts)
    state = SearchState(Plan(), [climb], Plan(token_budget=32768, max_questions=None))
    search(state, world.measure, allowed)
    assert state.best.token_budget == (32768 if cuts else max(BUDGETS)), "20000 tokens are a whole step"
