"""Every claim is put to the test: each pair of values that two plan fields can take, against the plain plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import worlds
from arms import Stage
from covering import trial_plans, uncovered

from sameday.models import vlm
from sameday.spec.plan import Plan, claims
from sameday.tasks.vqa.setup import VqaSetup
from sameday.verify.registry import trial_values

QUESTION = 30
"""About how many tokens a question of these worlds has."""
SETUP = VqaSetup(worlds.tiny_recipe(Path("model")), Path())
VALUES = trial_values(SETUP, "cpu", QUESTION)
PLANS = trial_plans(SETUP, "cpu", QUESTION)
IMPOSSIBLE = [(("packing", False), ("attention", "split"))]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Iterator[Stage]:
    root = tmp_path_factory.mktemp("array")
    home = worlds.write_world(root / "world", 0, (5, 1, 4), sizes=((48, 32), (32, 64)))
    lora = {"r": 4, "alpha": 8, "dropout": 0.1}
    recipe = worlds.tiny_recipe(tiny_qwen3, order="by_image", effective_batch=4, lora=lora, weight_decay=0.1)
    with pytest.MonkeyPatch.context() as patch:
        # Compiling is tried with the graphs alone: which backend turns them into kernels depends on the machine.
        patch.setattr(vlm, "COMPILE_BACKEND", "eager")
        yield Stage(root, home, recipe)
    torch.use_deterministic_algorithms(False)


def test_every_pair_is_there() -> None:
    assert uncovered([plan.model_dump() for plan in PLANS], VALUES) == IMPOSSIBLE


@pytest.mark.parametrize("number", range(len(PLANS)))
def test_a_plan_of_the_array_trains_the_same_model(stage: Stage, number: int) -> None:
    torch._dynamo.reset()
    found = stage.compare(PLANS[number])
    assert found.same, "\n".join(map(str, found.differences))


@pytest.mark.parametrize("which", [1, -1])
def test_fields_that_claim_the_same_bits_keep_them(stage: Stage, which: int) -> None:
    """All of them changed at once, to their second values and to their last ones."""
    bitwise = [name for name in VALUES if claims()[name] == "bitwise"]
    assert len(bitwise) > 5
    found = stage.compare(Plan(**{name: VALUES[name][which] for name in bitwise}))
    assert found.same and found.bitwise, "\n".join(map(str, found.differences))
