"""With dropout on, how a group of questions that share an image is split changes no mask, and so no gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from torch import Tensor

from sameday.data.questions.batch import Batch
from sameday.hardware.ranks import Ranks
from sameday.spec.plan import Plan
from sameday.tasks.vqa import task as vqa
from sameday.tasks.vqa.task import VqaTask

SHARED = {"share_images": True, "max_questions": None, "token_budget": 10**6}
SPLITS: dict[str, tuple[dict[str, Any], int]] = {
    "packed": ({"packing": True}, 1),
    "small budget": ({"token_budget": 90}, 1),
    "small budget, packed": ({"token_budget": 90, "packing": True}, 1),
    "two questions": ({"max_questions": 2, "packing": True}, 1),
    "one question": ({"max_questions": 1}, 1),
    "two ranks": ({"packing": True}, 2),
    "seven ranks, small budget": ({"token_budget": 90, "packing": True}, 7),
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> VqaTask:
    folder = worlds.write_world(tmp_path_factory.mktemp("groups"), 11, (7, 3, 2))
    recipe = worlds.tiny_recipe(tiny_qwen3, lora={"r": 4, "alpha": 8, "dropout": 0.2})
    loaded = worlds.make_task(folder, recipe, Plan(**SHARED))
    worlds.stir(loaded)
    return loaded


def batches(task: VqaTask, ranks: int = 1) -> list[Batch]:
    return [batch for rank in range(ranks) for batch in task.batches(0, None, Ranks(rank, ranks))]


def gradient(task: VqaTask, ranks: int = 1) -> Tensor:
    """Of one step, summed over its micro-batches and ranks."""
    task.training(True)
    parameters = list(task.trained().values())
    total = torch.cat([torch.zeros_like(p).flatten() for p in parameters])
    for batch in batches(task, ranks):
        loss, _ = task.loss_sum(batch, step=0)
        total += torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    return total


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLITS)
def test_a_split_group_has_the_gradient_of_a_whole_one(task: VqaTask, name: str) -> None:
    change, ranks = SPLITS[name]
    split = task.with_plan(change)
    assert len(batches(split, ranks)) > 1 or name == "packed"
    assert distance(gradient(split, ranks), gradient(task)) < 1e-5


def test_the_splits_hold_what_they_are_for(task: VqaTask) -> None:
    """Groups in several parts, a question of a group alone, and dropout that matters."""
    small = batches(task.with_plan(SPLITS["small budget"][0]))
    grouped = [row.unique() for batch in small for row in batch.branch]
    assert any(len(branches) > 2 for branches in grouped)
    assert any(len(batch.sample_ids) == 1 and len(batch.grids) == 1 for batch in small)
    whole = gradient(task)
    task.training(False)
    parameters = list(task.trained().values())
    losses = [task.loss_sum(batch, step=0)[0] for batch in batches(task)]
    without = torch.cat([g.flatten() for g in torch.autograd.grad(torch.stack(losses).sum(), parameters)])
    assert distance(whole, without) > 1e-2


def test_a_whole_group_is_keyed_by_its_first_question(task: VqaTask, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the layout were told nothing of the step."""
    (told,) = batches(task.with_plan({"packing": True}))
    monkeypatch.setattr(vqa, "mask_ids_of", lambda *_: {})
    (untold,) = batches(task.with_plan({"packing": True}))
    assert torch.equal(told.keys, untold.keys)


def test_without_sharing_each_question_has_its_own_masks(task: VqaTask) -> None:
    alone = batches(task.with_plan({"share_images": False, "max_questions": 1}))
    firsts = {int(batch.keys[0, 0]) for batch in alone}
    assert len(firsts) == len(alone) == 16
    shared = batches(task.with_plan({"max_questions": 1}))
    assert len({int(batch.keys[0, 0]) for batch in shared}) < len(alone)
