"""Micro-batches that are padded to few shapes and recorded learn what the others do. Without a GPU nothing is recorded,
but what would be is run from the same tensors, filled anew for each micro-batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing, suppress
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import recordings
import torch
import worlds
from processes import assert_same_run, records, training_steps
from recordings import PLAN
from torch import Tensor

from sameday.hardware.graphs import Launched, NotRecorded
from sameday.hardware.machine import Machine, detect_machine
from sameday.hardware.ranks import Ranks
from sameday.kernels.dropout import dropouts
from sameday.models import features
from sameday.models.features import FeatureMemory
from sameday.models.load import load_base
from sameday.models.vlm import VisionLanguageModel
from sameday.record.folder import RunFolder
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.tasks.vqa import recorded
from sameday.tasks.vqa.setup import VqaSetup
from sameday.tasks.vqa.task import VqaTask
from sameday.tasks.warm_up import warm_up
from sameday.train.loop import train
from sameday.train.steps import Steps
from sameday.verify.arm import Killed
from sameday.verify.trace import Trace, Witness

RECIPE = recordings.LONG | {"loss_weight": "sample"}
GPU = Machine("cuda", "a GPU", 2**37, 16, True, 2**17, (9, 0))
Make = Callable[..., VqaTask]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.write_world(tmp_path_factory.mktemp("world"), 4, (6, 5, 4, 6), hard=False, sizes=recordings.SIZES)


@pytest.fixture(scope="module")
def make(tiny_qwen3: Path, world: Path) -> Make:
    """A task, its weights away from their start. Files are read once. With `graphs` the plan asks for recorded
    micro-batches, which loading would refuse on a CPU."""
    first, cpu = worlds.make_task(world, worlds.tiny_recipe(tiny_qwen3, **RECIPE), Plan(**PLAN)), torch.device("cpu")
    base = load_base(str(tiny_qwen3), first.recipe, cpu)

    def made(graphs: bool, plan: dict[str, Any] | None = None, **changes: Any) -> VqaTask:
        recipe = worlds.tiny_recipe(tiny_qwen3, **RECIPE | changes)
        asked = Plan(**PLAN | (plan or {}), cuda_graphs=graphs)
        computing = VisionLanguageModel(
            deepcopy(base), first.model.family, recipe, asked, cpu, first.processor.byte_table
        )
        computing.memory = FeatureMemory(cpu) if asked.keep_features else None
        encoder = deepcopy(first.encoder)
        task = VqaTask(recipe, asked, computing, encoder, first.processor, dict(first.splits))
        worlds.stir(task)
        return task

    return made


def test_the_last_layer_of_these_tasks_ends_at_targets(make: Make) -> None:
    """So that it is part of all that is compared here."""
    task = make(False)
    assert task.read_at(next(iter(task.batches(0, None, Ranks())))) is not None


def learned(task: VqaTask, steps: range, budget: int | None = None) -> list[dict[str, Tensor]]:
    """Of each step its gradients, its loss, and each question's own."""
    task.training(True)
    loss_sum, told = task.loss_sum, []

    def listening(batch: Any, step: int) -> tuple[Tensor, Tensor]:
        loss, losses = loss_sum(batch, step)
        told.append(task.sample_losses(batch, losses))
        return loss, losses

    found = []
    with patch.object(task, "loss_sum", listening):
        for after in recordings.computed(task, steps, budget=budget):
            own = {id: torch.tensor(loss) for each in told for id, loss in each.items()}
            told.clear()
            gradients = {name: p.grad.clone() for name, p in task.trained().items() if p.grad is not None}
            found.append(gradients | {f"loss of {id}": own[id] for id in sorted(own)})
            found[-1]["loss"] = after.gradients.tail[0].clone()
    return found


def assert_near(found: list[dict[str, Tensor]], plain: list[dict[str, Tensor]], most: float = 1e-5) -> None:
    for one, other in zip(found, plain, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert value.abs().max() > 0, name
            assert (one[name] - value).norm() <= most * value.norm(), name


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        pytest.param({}, {}, id="forks"),
        pytest.param(
            {"checkpointing": "full", "token_budget": 150},
            {},
            id="recomputed, several to a step",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"label_only_logits": False, "share_images": False},
            {"prompt": None},
            id="questions alone",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"share_text": False},
            {"lora": {"r": 4, "dora": True, "dropout": 0.1}},
            id="dora",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_padded_micro_batches_learn_what_others_do(make: Make, plan: dict[str, Any], changes: dict[str, Any]) -> None:
    """Over more than an epoch, so that each shape is filled with other questions, images and masks; dropout is on."""
    padded, steps = make(True, plan, **changes), range(5)
    found = learned(padded, steps)
    batches = [batch for step in steps for batch in padded.batches(step, None, Ranks())]
    shapes = {batch.shape for batch in batches} - {None}
    assert shapes and len(padded.recorder._made) == len(shapes) < len(batches), "a shape serves several"
    assert_near(found, learned(make(False, plan, **changes), steps))


def test_padding_is_learned_nothing_from(make: Make) -> None:
    """Whatever stands at places of padding, the bits are the same."""
    task = make(True)
    before = learned(task, range(2))
    build = task._build

    def other(*how: Any) -> Any:
        batch = build(*how)
        assert batch.shape is not None
        batch.tokens[batch.group < 0] = 7
        batch.keys[batch.group < 0] = 99
        batch.target[len(batch.owner) :] = 5
        return batch

    with patch.object(task, "_build", other):
        found = learned(task, range(2))
    for one, two in zip(before, found, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_loss_holds_no_graph(make: Make) -> None:
    """A node that adds to a gradient and outlives its micro-batch would end the next recording."""
    task = make(True)
    steps = Steps(task.recipe, task.plan, task, Ranks())
    (batch,) = task.batches(0, None, Ranks())
    loss, losses = task.loss_sum(batch, 0)
    assert loss.requires_grad and not losses.requires_grad and len(losses) == len(batch.owner)
    reached, nodes = [], [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        reached.append(node)
        nodes += [each for each, _ in node.next_functions if each is not None]
    assert len(reached) == 2, "the loss's own node, and what lets it have a backward pass"
    loss.backward()
    assert steps.gradients.norm() > 0
    with torch.no_grad():
        assert not task.loss_sum(batch, 0)[0].requires_grad


def test_what_was_recorded_while_dropout_drops_does_not_serve_where_it_is_off(make: Make) -> None:
    """Whether it drops is written into a graph, and gradients stay where they are: a step of each way is recorded."""
    task = make(True)
    stepped, silenced = Steps(task.recipe, task.plan, task, Ranks()), dropouts(task.module())
    assert silenced
    task.training(True)
    for on in (True, False, True):
        for layer in silenced:
            layer.train(on)
        list(recordings.computed(task, range(2), stepped))
    shapes = {batch.shape for step in range(2) for batch in task.batches(step, None, Ranks())}
    assert set(task.recorder._made) == {(shape, drops) for shape in shapes for drops in (True, False)}


def test_shapes_are_a_matter_of_recipe_plan_and_data(make: Make) -> None:
    one, other = make(True), make(True)
    learned(other, range(3))
    shapes = one.shapes(1)
    assert shapes.all and shapes.all == other.shapes(1).all and 0.5 < shapes.served <= 1 < shapes.padded
    assert shapes.steps.keys() == set(shapes.all)
    for shape, step in shapes.steps.items():
        assert shape in {batch.shape for batch in one.batches(step, None, Ranks())}
    words = f"{len(shapes.all)} shape(s|) of micro-batches are recorded, for 1?[0-9]?[0-9]% of micro-batches, which are"
    assert re.search(words, shapes.words()) and shapes.words().endswith("; the others are launched")
    rare = make(True, max_steps=1)
    assert not rare.shapes(1).all and "nothing is recorded" in rare.shapes(1).words()
    assert all(batch.shape is None for batch in rare.batches(0, None, Ranks()))
    assert all(batch.shape is None for batch in make(False).batches(0, None, Ranks()))


def test_what_is_too_large_to_be_worth_it_is_launched_as_it_is(make: Make) -> None:
    """On a GPU whose kernels end later than their launches from some size on."""
    most, asked = 384, {"effective_batch": 14}
    task, plain = make(True, **asked), make(False, **asked)
    task.most_recorded = most
    shapes = task.shapes(1)
    assert shapes.all and max(shape.tokens for shape in shapes.all) <= most and 0 < shapes.larger < 1
    larger = f"; the others are launched; [0-9]+% have more than {most} tokens, for which kernels take longer than"
    assert re.search(larger, shapes.words())
    batches = [batch for step in range(8) for batch in task.batches(step, None, Ranks())]
    assert {batch.shape for batch in batches} == {None, *shapes.all}
    unpadded = [batch.tokens for step in range(8) for batch in plain.batches(step, None, Ranks())]
    for batch, tokens in zip(batches, unpadded, strict=True):
        assert batch.shape is not None or torch.equal(batch.tokens, tokens)
        assert tokens.numel() <= most or batch.shape is None
    assert_near(learned(task, range(3)), learned(plain, range(3)))
    none = make(True)
    none.most_recorded = 8
    assert none.shapes(1).words() == (
        "cuda_graphs: nothing is recorded, since 100% of micro-batches have more than 8 tokens, for which kernels take "
        "longer than their launches"
    )
    assert all(batch.shape is None for batch in none.batches(0, None, Ranks()))


def test_all_shapes_come_in_the_warm_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that come late in a run; whatever has none is launched as before."""
    monkeypatch.setattr("sameday.tasks.vqa.warm.STEPS", 1)
    task = make(True)
    batches = [each.make() for each in task.warm_up_batches(range(task.steps_per_epoch() * 2), None, Ranks())]
    assert {batch.shape for batch in batches} - {None} == set(task.shapes(1).all) and len(task.shapes(1).all) > 1
    sizes = [0 if batch.shape is None else batch.shape.tokens for batch in batches]
    assert sizes == sorted(sizes, reverse=True), "smaller shapes fit into the memory of the largest"
    late = task.warm_up_batches(range(10 * task.steps_per_epoch(), 11 * task.steps_per_epoch()), None, Ranks())
    assert {each.make().shape for each in late} >= set(task.shapes(1).all), "also where a run goes on"
    assert all(each.name.endswith(", recorded") == (each.make().shape is not None) for each in late)
    plain = [each.make() for each in make(False, {"compile": "layers"}).warm_up_batches(range(4), None, Ranks())]
    assert plain and not any(batch.shape for batch in plain)


def test_the_largest_and_the_smallest_that_are_launched_come_in_the_warm_up(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all steps that shapes are chosen by, not of the first ones alone."""
    monkeypatch.setattr("sameday.tasks.vqa.warm.STEPS", 1)
    monkeypatch.setattr("sameday.tasks.vqa.warm.EPOCHS", 0)
    task = make(True, effective_batch=4)
    task.most_recorded = 8
    steps = range(2 * task.steps_per_epoch())
    sizes = {step: [each.tokens.numel() for each in task.batches(step, None, Ranks())] for step in steps}
    every = [size for each in sizes.values() for size in each]
    extremes = [max(every), min(every)]
    assert not {*extremes} & {*sizes[0], *sizes[steps[-1]]}, "else they would come anyway"
    warmed = [each.make() for each in task.warm_up_batches(steps, None, Ranks()) if each.score is None]
    launched = [batch.tokens.numel() for batch in warmed]
    assert [max(launched), min(launched)] == extremes and len(launched) < len(every)


class Counted(Launched):
    """Stands for a recording, which needs a GPU. How often one is made is counted."""

    made = 0

    def __init__(self, run: Any, *_how: Any) -> None:
        super().__init__(run)
        type(self).made += 1


@pytest.mark.slow
def test_nothing_is_recorded_after_the_warm_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the run says what was."""
    said: list[str] = []
    screen: Any = SimpleNamespace(live=None, say=said.append)
    monkeypatch.setattr(recorded, "Recorded", Counted)
    monkeypatch.setattr(recorded, "GraphMemory", object)
    monkeypatch.setattr(Counted, "made", 0)
    task = make(True)
    task.recorder.records = True
    steps, total, shapes = Steps(task.recipe, task.plan, task, Ranks()), 4 * task.steps_per_epoch(), task.shapes(1)
    warm_up(task, range(total), None, Ranks(), steps.warm_up, screen)
    assert Counted.made == len(shapes.all) == task.recorded_sizes() > 1 and not steps.gradients.buffer.any()
    sizes = [name[0].tokens for name in task.recorder._made]
    assert sizes == sorted(sizes, reverse=True)
    served = 0
    for step in range(total):
        batches = list(task.batches(step, None, Ranks()))
        served += sum(batch.shape is not None for batch in batches)
        steps.accumulate(batches, step)
    assert Counted.made == len(shapes.all) < served and steps.gradients.norm() > 0
    assert said[0].startswith("recording what this run will meet, so that no step waits for it: ")
    assert said[1].startswith(f"recorded {len(shapes.all)} sizes of micro-batches that this run will meet in ")


def trained(task: VqaTask, world: Path, out: Path, dies_in: int | None = None) -> VqaTask:
    """After a run to its end, or, from `dies_in` on (from 0), as a kill leaves it."""
    launch = Steps.launch

    def launched(steps: Steps, step: int, *how: Any) -> None:
        if step == dies_in:
            raise Killed
        launch(steps, step, *how)

    with (
        patch.object(Steps, "launch", launched),
        suppress(Killed),
        closing(RunFolder.open(out, task.recipe, task.plan, world)) as run,
    ):
        train(task.recipe, task.plan, task, run, Ranks())
    return task


@pytest.mark.slow
@pytest.mark.usefixtures("own_signals")
def test_a_run_that_is_killed_and_resumed_ends_in_the_same_bits(
    make: Make,
    world: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Killed in an epoch, and resumed in the middle of it: what shapes were filled with before is gone, and so are the
    features that stay in memory. Dropout is on. On a GPU `test_vqa_graphs.py` does the same."""
    monkeypatch.setattr(features, "LEFT", 0.0)  # other processes may have most of the memory

    def fresh() -> VqaTask:
        return make(True, {"keep_features": True, "save_steps": 3}, num_epochs=3)

    whole = trained(fresh(), world, tmp_path / "whole")
    assert whole.steps_per_epoch() == 4 and whole.recorder._made and whole.recipe.dropout
    memory = whole.model.memory
    assert memory is not None and len(memory) == 4, "images of later epochs are not computed again"
    cut = trained(fresh(), world, tmp_path / "killed", dies_in=7)
    assert training_steps(tmp_path / "killed") == list(range(1, 8)) and cut.recorder._made
    capsys.readouterr()
    resumed = trained(fresh(), world, tmp_path / "killed")
    assert "resumed from step-000006" in capsys.readouterr().out
    assert training_steps(tmp_path / "killed") == list(range(1, 13))
    assert records(tmp_path / "killed") == records(tmp_path / "whole")
    assert all(torch.equal(weight, resumed.trained()[name]) for name, weight in whole.trained().items())
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_a_comparison_counts_what_was_recorded(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the steps of an arm: a micro-batch that is launched is none of them, whatever its plan says."""
    monkeypatch.setattr(recorded, "Recorded", Counted)
    monkeypatch.setattr(recorded, "GraphMemory", object)

    def counted(out: Path, records: bool) -> tuple[tuple[int, int], int]:
        task = make(True, effective_batch=14)
        task.most_recorded, task.recorder.records = 384, records
        witness: Any = Witness(task, out / "part-1", Ranks())
        with witness.watching(), closing(Steps(task.recipe, task.plan, witness, Ranks())) as steps:
            assert len(list(steps.run(range(4)))) == 4
        batches = [batch for step in range(4) for batch in task.batches(step, None, Ranks())]
        assert Trace(out).recorded[1] == len(batches)
        return Trace(out).recorded, sum(batch.shape is not None for batch in batches)

    (found, every), shaped = counted(tmp_path / "recorded", True)
    assert found == shaped and 0 < shaped < every
    assert counted(tmp_path / "launched", False) == ((0, every), shaped)


def test_new_gradients_are_recorded_anew(make: Make) -> None:
    """A recording adds to tensors at a place: where others stand there, it is made again."""
    task = make(True)
    learned(task, range(1))
    before = list(task.recorder._made.values())
    learned(task, range(1))
    assert before and not {*map(id, before)} & {*map(id, task.recorder._made.values())}
    assert task.smaller_budget(0, None, Ranks()) and not task.recorder._made, "they hold memory"


def test_what_is_not_recorded_for_memory_is_launched(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    task, tries = make(True), []
    task.recorder.records = True

    def short(*_how: Any) -> Any:
        tries.append(1)
        raise torch.OutOfMemoryError("none left")

    with (
        patch.object(recorded, "Recorded", short),
        patch.object(recorded, "GraphMemory", object),
        patch.object(torch.cuda, "empty_cache", lambda: None),
    ):
        found = learned(task, range(4))
    sizes = [name[0].tokens for name in task.recorder._made]
    smaller = sum(size < min(sizes[:number], default=size + 1) for number, size in enumerate(sizes))
    assert len(tries) == 2 * smaller, "once more when memory that was kept is free, and then nothing that is as large"
    assert task.recorder._memory is None and not task.recorded_sizes()
    said = capsys.readouterr().err
    assert said.count(f"cuda_graphs: out of memory while a micro-batch of {sizes[0]} tokens was recorded") == 1
    assert all(isinstance(program.passes, Launched) for program in task.recorder._made.values())
    assert_near(found, learned(make(False), range(4)))


def test_what_cannot_be_recorded_is_launched(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    task, tries = make(True), []
    task.recorder.records = True

    def broken(*_how: Any) -> Any:
        tries.append(1)
        raise NotRecorded("operation not permitted")

    with patch.object(recorded, "Recorded", broken), patch.object(recorded, "GraphMemory", object):
        found = learned(task, range(4))
    first = next(iter(task.recorder._made))[0].tokens
    assert len(tries) == 1 < len(task.recorder._made) and not task.recorded_sizes(), "it is not tried again"
    assert capsys.readouterr().err == (
        f"cuda_graphs: a micro-batch of {first} tokens could not be recorded (operation not permitted): it is "
        "launched, and so is all that is not recorded yet. plan.cuda_graphs false does not try.\n"
    )
    assert_near(found, learned(make(False), range(4)))


def test_workers_send_padded_batches(make: Make) -> None:
    """And what a batch holds is not a matter of who makes it."""
    task = make(True, {"workers": 1})
    stepped = Steps(task.recipe, task.plan, task, Ranks())
    stepped.open([0])
    try:
        stepped.gradient(0)
    finally:
        stepped.close()
    (name,) = task.recorder._made
    assert name[0] in task.shapes(1).all


def test_what_cannot_be_recorded_is_refused_by_name(tiny_qwen3: Path, world: Path) -> None:
    def refused(machine: Machine = GPU, recipe: dict[str, Any] | None = None, **plan: Any) -> str:
        fields = RECIPE | {"precision": "bf16"} | (recipe or {})
        setup = VqaSetup(worlds.tiny_recipe(tiny_qwen3, **fields), world)
        with pytest.raises(BadInput) as error:
            setup.resolve_auto(Plan(**PLAN | {"cuda_graphs": True} | plan), machine)
        return str(error.value)

    needs = "plan.cuda_graphs true needs"
    assert f"{needs} a GPU; allowed here: false" in refused(detect_machine("cpu"))
    assert f"{needs} packed rows: set plan.packing true" in refused(packing=False, attention="sdpa")
    assert f"{needs} plan.attention split or fused, and it is flex" in refused(attention="flex")
    assert f"{needs} split attention, which is flash attention on a GPU, and it has no float32" in refused(
        recipe={"precision": "float32"}, attention="auto"
    )
    assert "those of recipe.base_format nf4 cannot" in refused(recipe={"base_format": "nf4"})
    assert f"{needs} a frozen vision tower and projector" in refused(recipe={"train_vision": True})
