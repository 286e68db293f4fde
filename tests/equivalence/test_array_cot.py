"""Every value of every plan field trains the same chain of thought as the plain plan, over whole images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from arms import Stage

from sameday.spec.plan import Plan
from sameday.tasks.cot.setup import CotSetup
from sameday.verify.registry import trial_values

QUESTION = 30
"""About how many tokens a question of these worlds has."""
VALUES = trial_values(CotSetup(worlds.cot_recipe(Path("model")), Path()), "cpu", QUESTION)


def plans() -> list[dict[str, Any]]:
    """Few that hold every value of every field. All pairs of values, and compiled layers, are tried for questions about
    images, whose layouts and layers these are."""
    count = max(map(len, VALUES.values()))
    chosen = [{name: values[(i + 1) % len(values)] for name, values in VALUES.items()} for i in range(count)]
    # Split attention is for packed rows.
    uncompiled = {"compile": "none", "activation_budget": 1.0}
    return [plan | {"packing": i % 2 == 1} | uncompiled for i, plan in enumerate(chosen)]


PLANS = plans()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    root = tmp_path_factory.mktemp("array-cot")
    home = worlds.write_world(root / "world", 0, (4, 1, 3), sizes=((48, 32), (32, 64)))
    model = worlds.write_tiny(root / "model", text={"num_hidden_layers": 2})
    yield Stage(root, home, worlds.cot_recipe(model, effective_batch=4, weight_decay=0.1), steps=4)
    torch.use_deterministic_algorithms(False)


def test_every_value_is_there() -> None:
    for name, values in VALUES.items():
        assert name in ("compile", "activation_budget") or all(
            any(plan[name] == value for plan in PLANS) for value in values
        ), name


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PLANS)))
def test_a_plan_trains_the_same_model(stage: Stage, number: int) -> None:
    found = stage.compare(Plan(**PLANS[number]))
    assert found.same, "\n".join(map(str, found.differences))
