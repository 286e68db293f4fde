"""Every claim of classification's plan fields is put to the test: each pair of values, against the plain plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sets
import torch
from arms import Stage
from covering import trial_plans, uncovered

from sameday.models import compiled
from sameday.spec.plan import Plan, claims
from sameday.tasks.classify.setup import ClassifySetup
from sameday.verify.registry import trial_values

SETUP = ClassifySetup(sets.tiny_recipe(), Path())
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""What is fused runs on a GPU, or in an interpreter on a machine that has none."""
VALUES = trial_values(SETUP, DEVICE, 2)
PLANS = trial_plans(SETUP, DEVICE, 2)
IMPOSSIBLE = [(("compile", "layers"), ("level_kernel", "fused"))]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    root = tmp_path_factory.mktemp("array")
    home = sets.write_set(root / "world")
    # One level, one head and few images: what is fused may run in an interpreter.
    recipe = sets.tiny_recipe(model=sets.TINY | {"levels": 1, "heads": 1, "latents": 1}, effective_batch=3)
    with pytest.MonkeyPatch.context() as patch:
        # Compiling is tried with the graphs alone: which backend turns them into kernels depends on the machine.
        patch.setattr(compiled, "BACKEND", "eager")
        yield Stage(root, home, recipe, steps=4, device=DEVICE)
    torch.use_deterministic_algorithms(False)


def test_every_pair_is_there() -> None:
    assert "fused" in VALUES["level_kernel"], "without Triton's interpreter the fused kernels are not tried"
    assert uncovered([plan.model_dump() for plan in PLANS], VALUES) == IMPOSSIBLE


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PLANS)))
def test_a_plan_of_the_array_trains_the_same_model(stage: Stage, number: int) -> None:
    torch._dynamo.reset()
    found = stage.compare(PLANS[number])
    assert found.same, "\n".join(map(str, found.differences))


@pytest.mark.slow
@pytest.mark.parametrize("which", [1, -1])
def test_fields_that_claim_the_same_bits_keep_them(stage: Stage, which: int) -> None:
    """All of them changed at once, to their second values and to their last ones."""
    bitwise = [name for name in VALUES if claims()[name] == "bitwise"]
    assert {"images_on", "prefetch", "workers"} <= set(bitwise)
    found = stage.compare(Plan(**{name: VALUES[name][which] for name in bitwise}))
    assert found.same, "\n".join(map(str, found.differences))
    assert found.bitwise or DEVICE == "cuda", "a GPU sums in any order unless both plans are deterministic"
