"""AdamW replayed in float64: quiet about what float32 cannot store, and not about an update that is another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from arms import Stage
from safetensors.torch import save_file
from worlds import tiny_recipe, write_world

from sameday.spec.plan import Plan
from sameday.verify.limits import LIMITS
from sameday.verify.replay import replay
from sameday.verify.trace import Record

HOW: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}


def trained(folder: Path, rate: float, fault: float = 1.0) -> tuple[dict[str, torch.Tensor], list[Record]]:
    """Weights of about one by torch's own AdamW in float32, after a step of warm-up at a rate of zero. `fault` is what
    it multiplies the rate by, and tells nobody."""
    generator = torch.Generator().manual_seed(3)
    weights = {"norm": torch.ones(64), "matrix": torch.randn(64, 32, generator=generator)}
    parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in weights.items()}
    groups = [{"params": [p], "names": [name], "weight_decay": 0.1 * (p.ndim > 1)} for name, p in parameters.items()]
    optimizer = torch.optim.AdamW(groups, lr=0.0, **HOW)
    records = []
    for step in range(1, 7):
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        now = rate * (step > 1)
        for group in optimizer.param_groups:
            group["lr"] = now * fault
        files = folder / f"gradient-{step}.safetensors", folder / f"weights-{step}.safetensors"
        save_file({name: p.grad for name, p in parameters.items() if p.grad is not None}, files[0])
        optimizer.step()
        save_file({name: p.detach() for name, p in parameters.items()}, files[1])
        told = [{"names": g["names"], "weight_decay": g["weight_decay"], "lr": now, **HOW} for g in groups]
        records.append(Record(1, step, {"groups": told}, 1.0, 1.0, *files))
    return weights, records


@pytest.mark.parametrize("rate", [1e-3, 1e-5, 1e-6, 1e-7])
def test_rounding_of_small_updates_is_no_difference(tmp_path: Path, rate: float) -> None:
    assert max(off for _, _, off in replay(*trained(tmp_path, rate))) < LIMITS.replay / 4


@pytest.mark.parametrize(("rate", "fault"), [(1e-3, 1.01), (1e-5, 1.05), (1e-6, 1.3), (1e-6, 0.0)])
def test_another_update_is_found(tmp_path: Path, rate: float, fault: float) -> None:
    found = list(replay(*trained(tmp_path, rate, fault)))
    assert found[0][2] == 0 and max(off for _, _, off in found) > LIMITS.replay


def test_all_weights_beside_a_frozen_tower_raise_no_alarm_at_a_small_rate(tmp_path: Path, two_layers: Path) -> None:
    home = write_world(tmp_path / "world", 1, (3, 2), hard=False, sizes=((48, 32),))
    recipe = tiny_recipe(two_layers, effective_batch=4, train="all", learning_rate=1e-6, order="by_image")
    plan = Plan(share_images=True, packing=True, max_questions=None, device="cpu")
    found = Stage(tmp_path, home, recipe, steps=4).compare(plan)
    assert found.same, [*map(str, found.differences)]
