"""`suite plan --measure` reads a model once for all trainings of it, and no training notices those before it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import sets
import torch
import worlds
from hypothesis import given
from hypothesis import strategies as st

from sameday.commands.session import Session, Specs
from sameday.data.questions.source import Source
from sameday.hardware.known import KNOWN
from sameday.hardware.machine import Machine, detect_machine
from sameday.hardware.ranks import Ranks
from sameday.models import features
from sameday.models.features import share_made
from sameday.models.kept import KeptBase
from sameday.models.load import load_base
from sameday.spec.errors import BadInput
from sameday.spec.evaluation import Evaluation
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.suite.times import measure as measuring
from sameday.suite.times import trial
from sameday.suite.times.measure import Event, measure, shared
from sameday.suite.times.pace import pace_of
from sameday.suite.times.trial import Asked, in_turn
from sameday.suite.times.work import Training
from sameday.tasks.registry import setup_of
from sameday.tasks.setup import TRAINING
from sameday.train.steps import Steps

CPU = Plan(device="cpu")
DATA = {"train": "train.jsonl", "image_root": "images"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.write_world(tmp_path_factory.mktemp("world"), seed=5, counts=(4, 4, 4), hard=False)


def load(recipe: Recipe, home: Path, kept: KeptBase | None) -> Any:
    setup = setup_of(recipe, home)
    setup.kept = kept
    plan = setup.resolve_auto(CPU, detect_machine("cpu")).plan
    return setup.load(plan, torch.device("cpu"), setup.audit(lambda _: None).splits)


def test_a_kept_base_is_as_if_it_were_read_again(world: Path, two_layers: Path) -> None:
    """Whatever was done to the models around it: other adapters, heads, four bits, steps that diverged."""
    small = {"effective_batch": 4, "max_steps": 2}
    recipes: list[Any] = [
        worlds.tiny_recipe(two_layers, **small),
        worlds.tiny_recipe(two_layers, lora={"r": 2, "alpha": 4, "dropout": 0.1}, seed=3, **small),
        worlds.cot_recipe(two_layers, order="by_image", **small),
        *[worlds.tiny_recipe(two_layers, base_format="nf4", **small)] * 2,
    ]
    kept = KeptBase()
    for number, recipe in enumerate(recipes):
        mine, plain = load(recipe, world, kept), load(recipe, world, None)
        assert (kept.spared > 0) is (number not in (0, 3)), "read for the first of them, and in another format"
        assert mine.model.base_digest == plain.model.base_digest
        for task in (mine, plain):
            stepped = Steps(recipe, task.plan, task, Ranks())
            task.losses = [good.loss for good in stepped.run(range(2))]
        assert mine.losses == plain.losses and mine.evaluate("val", Ranks()) == plain.evaluate("val", Ranks())
        for name, trained in plain.trained().items():
            assert torch.equal(mine.trained()[name], trained), name
        for trained in mine.trained().values():
            trained.data.fill_(math.nan)


def test_other_weights_are_not_shared(world: Path, two_layers: Path) -> None:
    def training(recipe: Recipe, **plan: Any) -> Training:
        return Training(recipe, world, Plan(**plan), Path())

    one = worlds.tiny_recipe(two_layers)
    every = [
        training(one),
        training(worlds.tiny_recipe(two_layers, train="all")),
        training(worlds.cot_recipe(two_layers, lora={"r": 2, "alpha": 4})),
        training(worlds.tiny_recipe(world / "other")),
        training(worlds.tiny_recipe(two_layers, precision="bf16")),
        training(worlds.tiny_recipe(two_layers, base_format="nf4")),
        training(one, environment={"MALLOC_ARENA_MAX": "2"}),
        training(one, deterministic=True),
        training(one, device="cpu"),
        training(worlds.tiny_recipe(two_layers, order="by_image"), packing=True, share_images=True),
        training(worlds.tiny_recipe(two_layers, train="all")),
        training(sets.tiny_recipe()),
    ]
    assert [each for each in shared(every) if len(each) > 1] == [[0, 2, 9]]
    assert sorted(number for each in shared(every) for number in each) == list(range(len(every)))


def test_trainings_of_one_process(world: Path, two_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of each is that of a process of its own."""
    read: list[str] = []

    def counted(name: str, *more: Any) -> Any:
        read.append(name)
        return load_base(name, *more)

    monkeypatch.setattr("sameday.tasks.vqa.task.load_base", counted)
    recipes: list[Any] = [
        worlds.tiny_recipe(two_layers, effective_batch=4, max_steps=4),
        worlds.cot_recipe(two_layers, order="by_image", effective_batch=4, max_steps=1),
    ]
    evaluation = Evaluation(split="val", max_new_tokens=2)
    asked = [Asked(Specs(each, world, CPU), evaluation, None) for each in recipes]
    monkeypatch.setattr(trial, "_allocated", lambda: 7 * trial.LEFT)  # of others, who were there before
    *results, alone = in_turn([*asked, asked[0]._replace(steps=False)])
    assert read == [str(two_layers)]
    assert [(each["total"], len(each["steps"]), each["machine"]) for each in results] == [(4, 4, "CPU"), (1, 3, "CPU")]
    assert pace_of(results[1]["steps"]) is not None, "a training that is shorter than a pace is known all the same"
    assert all(each["save"] and each["score_each"] and each["answer_each"] for each in results)
    assert alone["score_each"] and alone["answer_each"] and alone["start"] > 0, "an evaluation without a step"
    assert (alone["steps"], alone["total"]) == ([], 0) and "save" not in alone
    with_gpu = Asked(Specs(recipes[1], world, CPU), evaluation, KNOWN["l40s"])
    again = Asked.from_json(json.loads(json.dumps(with_gpu.as_json())))
    assert (again.specs, again.evaluation) == (Specs(recipes[1], world, CPU), evaluation)
    assert again.instead_of == KNOWN["l40s"]


def test_a_gpu_that_is_used_instead_of_another_is_looked_at_as_such(
    world: Path, two_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From what is asked for to the machine that plans are chosen for; here it is a CPU, which stands for no GPU."""
    asked: list[Any] = []

    def looked_at(device: str, instead_of: Any = None) -> Machine:
        asked.append(instead_of)
        return detect_machine(device)

    monkeypatch.setattr("sameday.hardware.machine.detect_machine", looked_at)
    one = Asked(Specs(worlds.tiny_recipe(two_layers), world, CPU), None, KNOWN["l40s"])
    with pytest.raises(BadInput, match="is estimated from one, and here it runs on the CPU"):
        list(in_turn([one]))
    assert asked[:1] == [KNOWN["l40s"]]


def test_steps_that_stall_are_told_with_their_reason() -> None:
    seconds = [1.0] * 12 + [9.0] + [1.0] * 20
    waited = {12: 8.0}

    def run(order: Sequence[int]) -> Iterator[SimpleNamespace]:
        for step in order:
            yield SimpleNamespace(step=step, seconds=seconds[step], input={"wait": waited.get(step, 0.0)})

    stalls: list[str] = []
    stepped, watch = SimpleNamespace(run=run, ahead=0), SimpleNamespace(step=lambda good: None)
    found = trial._until_enough(cast(Any, stepped), range(33), cast(Any, watch), stalls)
    assert found == seconds[: len(found)] and len(found) > 12
    assert stalls == ["step 13 stalled: 9.0 s, usual before it 1.000 s; 8.0 s of it waiting for input"]


def test_a_cache_is_timed_when_it_is_filled(world: Path, two_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not in the user's folder, where nobody asked for one."""
    ready: list[bool] = []
    read_image = Source.read_image

    def noted(self: Source, image: Any) -> Any:
        picture = read_image(self, image)
        ready.append(picture.ready)
        return picture

    monkeypatch.setattr(Source, "read_image", noted)
    recipe = worlds.tiny_recipe(two_layers, effective_batch=4, max_steps=3, data={**DATA, "val": None})
    plan = CPU.model_copy(update={"cache": "features"})
    (found,) = in_turn([Asked(Specs(recipe, world, plan), None, None, filled=True)])
    assert len(found["steps"]) == 3 and not ready[0] and all(ready[-3:])
    assert not (world / "sameday-cache").exists()


@given(
    st.lists(st.floats(0.1, 9), min_size=4, max_size=9),
    st.floats(0.2, 1),
    st.floats(0.05, 1),
    st.floats(0, 1),
    st.integers(1, 3),
)
def test_a_step_costs_what_it_makes(first: list[float], there: float, made: float, in_all: float, odd: int) -> None:
    """Whatever share was made when it was timed, and though one step took far longer when all was there."""
    kept = [each * there for each in first]
    usual = [each * (there + (1 - there) * in_all / made) for each in first]
    assert trial.with_share(first, kept, made, in_all) == pytest.approx(usual)
    kept[odd] *= 100
    found = trial.with_share([*first, *first], [*kept, *(each * there for each in first)], made, in_all)
    assert found == pytest.approx([*usual, *usual]) and min(found) > 0
    assert trial.with_share(first, kept, 0.0, in_all) == first == trial.with_share(first, kept[:1], made, in_all)


def test_features_that_stay_in_memory_are_a_part_of_a_pace(
    world: Path, two_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most steps of two epochs find them there, and those that are timed first do not."""
    monkeypatch.setattr(features, "LEFT", 0.0)
    orders: list[list[int]] = []
    until_enough = trial._until_enough

    def timed(stepped: Any, order: Sequence[int], *more: Any) -> list[float]:
        orders.append(list(order)[:4])
        until_enough(stepped, orders[-1], *more)
        return [[9.0, 5.0, 5.0, 5.0], [3.0, 3.0, 3.0, 3.0]][len(orders) - 1]

    monkeypatch.setattr(trial, "_until_enough", timed)
    recipe = worlds.tiny_recipe(
        two_layers, effective_batch=4, num_epochs=2, order="by_image", data={**DATA, "val": None}
    )
    specs = Specs(recipe, world, CPU.model_copy(update={"keep_features": True}))
    (found,) = in_turn([Asked(specs, None, None)])
    assert len(orders) == 2 and orders[0] == orders[1]
    with closing(Session.start(specs, print, splits=TRAINING)) as session:
        task = session.load()
        steps = [task.contents_of(step) for step in range(found["total"])]
    made, in_all = (share_made(some, 99) for some in (steps[:4], steps))
    assert 0 < in_all < made <= 1
    assert found["steps"][1:] == pytest.approx([3 + 2 * in_all / made] * 3), "of five seconds three are there"


@pytest.mark.slow
def test_what_others_compile_meanwhile_is_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what it found on disk: both would have it timed once more for nothing."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(trial, "_load_libraries", lambda specs: 0.0)
    made, found = counters["stats"]["unique_graphs"], counters["aot_autograd"]["autograd_cache_hit"]

    def run(asked: tuple[int, int], *_: Any) -> dict[str, Any]:
        (tmp_path / f"of another process {len([*tmp_path.iterdir()])}").touch()
        counters["stats"]["unique_graphs"] += asked[0]
        counters["aot_autograd"]["autograd_cache_hit"] += asked[1]
        return {}

    class Case(NamedTuple):
        made: int
        found: int
        specs: None = None

    monkeypatch.setattr(trial, "run", run)
    cases: list[Any] = [Case(0, 0), Case(2, 2), Case(2, 1), Case(0, 0)]
    try:
        assert [each["compiled"] for each in in_turn(cases)] == [False, False, True, False]
    finally:
        counters["stats"]["unique_graphs"], counters["aot_autograd"]["autograd_cache_hit"] = made, found


RESULT = {"machine": "GPU", "steps": [9.0, *[0.5] * 20], "start": 10.0, "total": 100, "compiled": False}


class Scripted:
    """Processes that time trainings by name: which of them fail, always or behind others, and what is compiled."""

    def __init__(self, always: str = "", behind: str = "", compiled: str = "") -> None:
        self.always, self.behind, self.compiled = always, behind, compiled
        self.processes: list[list[str]] = []

    def __call__(self, asked: Sequence[Asked]) -> Scripted:
        self.processes.append([each.specs.recipe.name for each in asked])
        self.failed = False
        return self

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def results(self) -> Iterator[dict[str, Any]]:
        first = not any(set(self.compiled) & set(each) for each in self.processes[:-1])
        for number, name in enumerate(self.processes[-1]):
            if name in self.always or (number and name in self.behind):
                self.failed = True
                return
            slow = name in self.compiled and first
            yield RESULT | ({"steps": [70.0, *[0.5] * 20], "compiled": True} if slow else {})

    def ended(self) -> tuple[float | None, str]:
        return (None, "exit code 4: no room") if self.failed else (3.0, "exit code 0: without a word")


def run(script: Scripted, world: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    monkeypatch.setattr(measuring, "Apart", script)
    monkeypatch.setattr(measuring, "_executor", lambda: 0.5)
    trainings = [Training(worlds.tiny_recipe(model, name=name), world, CPU, Path()) for name in "abcd"]
    return list(measure([(each, None) for each in trainings], None))


def test_one_that_fails_leaves_the_others(world: Path, two_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """b cannot be measured; c can, as the first of a process."""
    script = Scripted(always="b", behind="c")
    events = run(script, world, two_layers, monkeypatch)
    assert script.processes == [["a", "b", "c", "d"], ["b", "c", "d"], ["c", "d"]]
    assert [(each.number, each.failed) for each in events if each.failed] == [(1, "exit code 4: no room")]
    begun = [each.number for each in events if each.measured is None and each.failed is None]
    told = [each.number for each in events if each.seconds is not None]
    assert (begun, told) == ([0, 1, 2, 3], [0, 2, 3]), "each once, and as soon as it is there"
    last = {each.number: each.measured for each in events if each.measured is not None}
    assert {each.end for each in last.values()} == {3.0} and {each.start for each in last.values()} == {10.5}
    assert events[1].measured is not None and events[1].measured.end == 0, "known before its process was gone"


def test_what_was_compiled_is_found_on_disk(world: Path, two_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted(compiled="bd")
    events = run(script, world, two_layers, monkeypatch)
    assert script.processes == [["a", "b", "c", "d"], ["b", "d"]]
    last = [{each.number: each.measured for each in events}[number] for number in range(4)]
    assert [None if each is None else each.compiling for each in last] == pytest.approx([0, 61, 0, 61])
    assert [None if each is None else each.steps[0] for each in last] == [9, 9, 9, 9]
    assert [each.number for each in events if each.again and each.measured is None] == [1, 3]
