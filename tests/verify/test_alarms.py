"""Equivalent plans over seeds: how far apart they are, and whether any of them raises an alarm. The limits of
`sameday verify` are set by what this prints."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import worlds
from arms import Stage, run
from covering import trial_plans
from peft.tuners.lora import LoraLayer

from sameday.hardware.machine import detect_machine
from sameday.spec.plan import Plan
from sameday.tasks.vqa.setup import VqaSetup
from sameday.verify.compare import Comparison, compare, doubtful
from sameday.verify.limits import LIMITS

SEEDS, PLANS_EACH = 10, 10
RECIPES: list[dict[str, Any]] = [
    {"order": "by_image", "loss_weight": "sample"},
    {"loss_weight": "token", "weight_decay": 0.1},
    {"order": "by_image", "train": "all", "learning_rate": 1e-4},
    {"train": "all", "train_vision": True, "loss_weight": "sample", "learning_rate": 3e-4},
    {"order": "by_image", "lora": {"r": 8, "alpha": 16}, "max_grad_norm": 0.5, "warmup_steps": 100},
]
"""What differs from seed to seed besides the seed."""


def stage(root: Path, seed: int, precision: str) -> Stage:
    """A world, a model and a recipe of this seed, small enough for bf16 on a CPU that has none."""
    home = worlds.write_world(
        root / "world", seed, (4, 3, 1, 4), hard=precision == "float32", sizes=((48, 32), (32, 64))
    )
    family = ("qwen3_vl", "qwen2_5_vl")[seed % 2]
    layers = {"num_hidden_layers": 2}
    model = worlds.write_tiny(root / "model", family, text=layers, seed=seed)
    return Stage(
        root, home, worlds.tiny_recipe(model, effective_batch=4, seed=seed, precision=precision, **RECIPES[seed % 5])
    )


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_equivalent_plans_raise_no_alarm(tmp_path: Path, precision: str) -> None:
    alarms, largest, count = [], Comparison(precision), 0
    first = random.randrange(100_000)  # new ones each time: limits must hold for what they were not set by
    for seed in range(first, first + SEEDS):
        here = stage(tmp_path / str(seed), seed, precision)
        setup = VqaSetup(here.recipe, here.home)
        cannot = setup.cannot(detect_machine("cpu"))
        every = [p for p in trial_plans(setup, "cpu", 40) if not cannot & set(p.model_dump(include={"cache"}).items())]
        plans = [p for p in every if p.compile == "none"]
        more = [p.model_copy(update={"compile": "none", "activation_budget": 1.0}) for p in every]
        for plan in random.Random(seed).sample(plans + more, PLANS_EACH):
            found = here.compare(Plan.model_validate(plan.model_dump()))
            count += 1
            for measure, value in found.worst.items():
                whose, limit = f"seed {seed} {found.names[measure]}", found.bounds.get(measure)
                largest.note(measure, value, whose, limit)
            alarms += [f"seed {seed}, {plan}: {difference}" for difference in found.differences]
        print(f"{precision}: seed {seed}, {count} comparisons, {len(alarms)} alarms", flush=True)
    print(f"\n{precision}: {count} comparisons, {len(alarms)} false alarms; the largest of each measure:")
    for measure, value in largest.worst.items():
        print(f"  {measure:20s} {value:9.2e}  {largest.names[measure]}")
    print(f"limits: {LIMITS}")
    assert count == SEEDS * PLANS_EACH and not alarms, "\n".join(alarms)


@pytest.mark.soak
def test_a_deep_model_raises_no_alarm(tmp_path: Path) -> None:
    """Its float32 gradients are further apart than a shallow one's: float64 tells rounding from a fault."""
    home = worlds.write_world(tmp_path / "world", 0, (4, 3), hard=False, sizes=((48, 32),))
    model = worlds.write_tiny(tmp_path / "model", text={"num_hidden_layers": 24})
    here = Stage(tmp_path, home, worlds.tiny_recipe(model, order="by_image", effective_batch=4), steps=4)
    plan = Plan(share_images=True, packing=True, max_questions=None, attention="split")
    direct = compare(run(here.job("plan", plan)), here.plain(plan).arm)
    assert doubtful(direct) and not direct.same, direct.worst
    found = here.compare(plan)
    assert found.same, "\n".join(map(str, found.differences))
    assert found.groups["all"]["error"] > LIMITS.gradient

    def scaled(task: Any, _ranks: Any) -> AbstractContextManager[Any]:
        for layer in task.module().modules():
            if isinstance(layer, LoraLayer):
                layer.scaling["default"] *= 1.0002
        return nullcontext()

    wrong = here.compare(plan, scaled)
    assert not wrong.same and wrong.worst["ratio_all"] > 2, wrong.worst
