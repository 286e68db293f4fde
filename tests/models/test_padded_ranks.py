"""Adapters with zeros behind their matrices compute the same, and keep the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import worlds

from sameday.hardware.ranks import Ranks
from sameday.models.adapters import ALIGNMENT, _PaddedDown, _PaddedUp, pad_ranks
from sameday.spec.plan import Plan
from sameday.tasks.vqa.task import VqaTask

ROWS: dict[str, Any] = {"share_images": True, "packing": True, "max_questions": None, "token_budget": 300}


def task_of(home: Path, plan: Plan, precision: str = "float32", device: str = "cpu", **lora: Any) -> VqaTask:
    if not (home / "model").is_dir():
        worlds.write_world(home, 3, (9, 1, 5))
        worlds.write_tiny(home / "model", "qwen3_vl")
    fields = {"r": 4, "alpha": 6, "dropout": 0.1, "target_modules": worlds.OF_THE_DECODER} | lora
    recipe = worlds.tiny_recipe(home / "model", order="by_image", effective_batch=8, lora=fields, precision=precision)
    task = worlds.make_task(home, recipe, plan, device)
    worlds.stir(task)
    task.training(True)
    return task


def learned(task: VqaTask) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    batch = next(iter(task.batches(0, None, Ranks()))).to(task.device)
    loss = task.loss_sum(batch, 0)[0]
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in task.trained().items() if p.grad is not None}


def padded(task: VqaTask) -> int:
    return sum(isinstance(module, _PaddedDown | _PaddedUp) for module in task.module().modules())


@pytest.mark.parametrize(
    ("lora", "changed"), [({"r": 1}, True), ({"r": 4}, True), ({"r": 12, "dora": True}, True), ({"r": 8}, False)]
)
def test_it_learns_the_same(tmp_path: Path, lora: dict[str, Any], changed: bool) -> None:
    plan = Plan(**ROWS, attention="sdpa", device="cpu")
    plain, other = (task_of(tmp_path, plan, **lora) for _ in range(2))
    before = {name: tensor.clone() for name, tensor in other.module().state_dict().items()}
    pad_ranks([other.module()])
    assert (padded(other) > 0) is changed and padded(plain) == 0
    after = other.module().state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    (loss, gradients), (other_loss, others) = learned(plain), learned(other)
    assert abs(loss - other_loss) <= 1e-6 * abs(loss)
    assert gradients.keys() == others.keys() and len(gradients) > 4
    for name, gradient in gradients.items():
        assert gradient.norm() > 0 and (gradient - others[name]).norm() <= 1e-5 * gradient.norm(), name
    seen = [module for module in other.module().modules() if isinstance(module, _PaddedDown)]
    widths = {module(torch.ones(2, module.in_features)).shape[1] for module in seen}
    assert widths == ({-(-lora["r"] // ALIGNMENT) * ALIGNMENT} if changed else set())
    other.training(False)
    assert all(module(torch.ones(2, module.in_features)).shape == (2, lora["r"]) for module in seen)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only matmuls of a GPU are padded")
@pytest.mark.parametrize(
    ("compile", "precision", "pads"),
    [("layers", "bf16", True), ("none", "bf16", False), ("layers", "float32", False)],
)
def test_where_it_pays(tmp_path: Path, compile: str, precision: str, pads: bool) -> None:
    plan = Plan(**ROWS, attention="sdpa", compile=compile)
    assert (padded(task_of(tmp_path, plan, precision, "cuda")) > 0) is pads
