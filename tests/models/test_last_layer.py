"""In training the last layer's MLP is computed at targets alone, and gradients are those of all places."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from torch import Tensor
from worlds import FAMILIES, SQUARE

from sameday.data.questions.batch import Batch
from sameday.hardware.ranks import Ranks
from sameday.spec.plan import Plan
from sameday.tasks.vqa.task import VqaTask
from sameday.train.steps import Steps

SHARED = {"share_images": True, "packing": True, "label_only_logits": True}
PLANS: dict[str, dict[str, Any]] = {
    "one at a time": {"label_only_logits": True, "max_questions": 1},
    "shared": SHARED,
    "shared, selective": SHARED | {"checkpointing": "selective"},
    "shared, full": SHARED | {"checkpointing": "full"},
}
MLP = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "gate_proj", "down_proj"]}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.write_world(tmp_path_factory.mktemp("last"), 3, (3, 1), sizes=((48, 32),))


def make(world: Path, model: Path, plan: dict[str, Any], **recipe: Any) -> VqaTask:
    asked = worlds.tiny_recipe(model, **{"effective_batch": 4, "order": "by_image"} | recipe)
    task = worlds.make_task(world, asked, Plan(**plan))
    worlds.stir(task)
    task.module().double()
    task.training(True)
    return task


def first(task: VqaTask) -> Batch:
    return next(iter(task.batches(0, None, Ranks())))


def rows_of(task: VqaTask, batch: Batch) -> list[int]:
    """That each layer's MLP is given."""
    seen: list[int] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, given: seen.append(given[0].flatten(0, -2).shape[0]))
        for layer in task.model.text.layers
    ]
    task.launched_loss(batch, 0)
    for hook in hooks:
        hook.remove()
    return seen


def gradients(task: VqaTask) -> Tensor:
    steps = Steps(task.recipe, task.plan, task, Ranks())
    steps.accumulate((batch.to(task.device) for batch in task.batches(0, None, Ranks())), 0)
    return steps.gradients.all.clone()


def apart(found: Tensor, wanted: Tensor) -> float:
    assert wanted.norm() > 1e-3
    return float((found - wanted).norm() / wanted.norm())


def assert_as_at_all_places(task: VqaTask, monkeypatch: pytest.MonkeyPatch) -> None:
    found = gradients(task)
    assert task.read_at(first(task)) is not None
    monkeypatch.setattr(VqaTask, "read_at", lambda *_: None)
    assert apart(found, gradients(task)) < 1e-10


@pytest.mark.parametrize("family", [*FAMILIES, *SQUARE])
def test_its_mlp_is_given_the_targets_alone(world: Path, tiny_models: dict[str, Path], family: str) -> None:
    task = make(world, tiny_models[family], SHARED)
    batch = first(task)
    tokens, targets = batch.tokens.numel(), len(batch.target_at)
    *others, last = rows_of(task, batch)
    assert set(others) == {tokens} and last == targets < tokens / 2
    with torch.no_grad():
        assert set(rows_of(task, batch)) == {tokens}, "nothing is compiled for it alone in validation"


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", [*FAMILIES, *SQUARE])
def test_gradients_are_those_of_all_places(
    world: Path, tiny_models: dict[str, Path], family: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make(world, tiny_models[family], PLANS[plan], lora={**MLP, "dropout": 0.0})
    assert_as_at_all_places(task, monkeypatch)


def test_everything_that_is_trained_has_its_gradient(
    world: Path, tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tower, projector and DeepStack too."""
    task = make(world, tiny_models["qwen3_vl"], SHARED, train="all", train_vision=True)
    assert_as_at_all_places(task, monkeypatch)


def test_other_places_have_other_gradients(
    world: Path, tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make(world, tiny_models["qwen3_vl"], SHARED)
    wanted = gradients(task)
    monkeypatch.setattr(VqaTask, "read_at", lambda _, batch: batch.target_at - 1)
    assert apart(gradients(task), wanted) > 1e-2


def test_where_it_is_computed_at_all_places(world: Path, tiny_models: dict[str, Path], two_layers: Path) -> None:
    model = tiny_models["qwen3_vl"]
    cases = {
        "logits of all places": make(world, model, SHARED | {"label_only_logits": False}),
        "masks of all tokens": make(world, model, SHARED, lora={**MLP, "dropout": 0.1}),
        "DeepStack behind it": make(world, two_layers, SHARED),
    }
    for why, task in cases.items():
        batch = first(task)
        assert set(rows_of(task, batch)) == {batch.tokens.numel()}, why
    dropped = make(world, model, SHARED, lora={"r": 4, "alpha": 8, "dropout": 0.1, "target_modules": ["q_proj"]})
    batch = first(dropped)
    assert rows_of(dropped, batch)[-1] == len(batch.target_at), "dropout elsewhere has nothing to do with it"
    one = replace(batch, **{name: getattr(batch, name)[:1] for name in ("target_at", "target", "weight", "owner")})
    assert set(rows_of(dropped, one)) == {batch.tokens.numel()}, "a size of its own for torch.compile"
