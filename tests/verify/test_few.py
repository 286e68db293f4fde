"""Tensors of few numbers: by chance alone they are further from a reference than others, and that is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sameday.spec.vqa import VqaRecipe
from sameday.verify.compare import Comparison, _against_reference, _generation, _judge
from sameday.verify.limits import COARSE, LIMITS, limits_of

STEPS, DRAWS = 4, 400


def arm(gradients: list[Tensor]) -> Any:
    return arms({"bias": each} for each in gradients)


def arms(gradients: Iterable[dict[str, Tensor]]) -> Any:
    known = list(gradients)
    return SimpleNamespace(fixed=lambda step: known[step - 1], fixed_losses=[0.0] * len(known))


def judged(numbers: int, scale: float) -> int:
    """How many of the draws are called different; `scale` is the fault."""
    generator = torch.Generator().manual_seed(numbers)
    alarms = 0
    for _ in range(DRAWS):
        true = [torch.randn(numbers, generator=generator).double() for _ in range(STEPS)]
        # Errors in proportion to the numbers spread the most.
        plan, plain = ([z * (1 + 0.01 * torch.randn(numbers, generator=generator)) for z in true] for _ in range(2))
        found = Comparison("bf16")
        _against_reference(found, arm([scale * z for z in plan]), arm(plain), arm(true), LIMITS)
        alarms += any(difference.name == "bias" and "all" not in difference.text for difference in found.differences)
        assert found.bounds["ratio_tensor"] == LIMITS.ratio("ratio_tensor", STEPS * numbers)
        assert found.worst["ratio_tensor"] <= found.bounds["ratio_tensor"] or found.differences
    return alarms


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [2, 3, 10, 50])
def test_chance_raises_no_alarm(numbers: int) -> None:
    assert judged(numbers, 1.0) <= 4  # of the 400; without an allowance 80 of the smallest


@pytest.mark.slow
@pytest.mark.parametrize(("numbers", "fault"), [(2, 2.0), (3, 1.5), (10, 1.1), (50, 0.96)])
def test_a_fault_does(numbers: int, fault: float) -> None:
    assert judged(numbers, fault) == DRAWS


def test_many_numbers_have_the_usual_limits() -> None:
    assert LIMITS.ratio("ratio_group", 200) == LIMITS.ratio_group and LIMITS.slope_of(200) == LIMITS.slope
    assert LIMITS.ratio("ratio_tensor", 40) == LIMITS.ratio_tensor < LIMITS.ratio("ratio_tensor", 20)
    assert LIMITS.ratio("ratio_tensor", 0) < float("inf")


def test_what_is_kept_is_the_true_ratio_and_its_own_limit() -> None:
    """Of two tensors the one that is the further for its limit, though the other's R is larger."""
    few, many = torch.ones(4).double(), torch.ones(400).double()
    plain = {"head.bias": few * 1.01, "body.kernel": many * 1.01}
    plan = {"head.bias": few * 1.06, "body.kernel": many * 0.965}  # R is 6 and 3.5, which few and many may have
    found = Comparison("bf16")
    _against_reference(found, arms([plan]), arms([plain]), arms([{"head.bias": few, "body.kernel": many}]), LIMITS)
    assert found.names["ratio_tensor"] == "body.kernel"
    assert found.worst["ratio_tensor"] == pytest.approx(3.5) and found.bounds["ratio_tensor"] == LIMITS.ratio_tensor
    assert found.groups["head.bias"]["R"] == pytest.approx(6)
    assert found.worst["ratio_group"] == pytest.approx(3.5) and found.bounds["ratio_group"] == LIMITS.ratio_group
    # Slopes: 0.06 and 0.035 from 1, the other plan's 0.01, all of an error of 0.01.
    assert found.worst["slope"] == pytest.approx(2.5) and found.bounds["slope"] == LIMITS.slope

    alone = Comparison("bf16")
    _against_reference(alone, arm([few * 1.06]), arm([few * 1.01]), arm([few]), LIMITS)
    assert alone.worst["ratio_tensor"] == pytest.approx(6) and alone.worst["slope"] == pytest.approx(5)
    assert alone.bounds["ratio_tensor"] == LIMITS.ratio("ratio_tensor", 4) > 50
    assert alone.bounds["slope"] == LIMITS.slope_of(4) == 4


def test_what_is_not_a_number_is_the_worst() -> None:
    found = Comparison("bf16")
    for value, limit in ((3.0, 4.0), (math.nan, 50.0), (math.inf, 2.0), (5.0, 4.0)):
        found.note("ratio_tensor", value, f"{value}", limit)
    assert math.isnan(found.worst["ratio_tensor"])
    assert found.names["ratio_tensor"] == "nan" and found.bounds["ratio_tensor"] == 50.0


def test_an_arm_that_equals_its_reference_is_no_difference() -> None:
    """A task may compute in the reference's own format: another arm's rounding must not be infinitely far from it."""
    reference = torch.randn(3, 200, dtype=torch.float64)
    rounded = reference + 1e-8 * torch.randn_like(reference)

    def sums(plan: Tensor, plain: Tensor) -> Tensor:
        each = ((plan - reference) ** 2, (plain - reference) ** 2, plan * reference, plain * reference, reference**2)
        return torch.stack([*(x.sum(1) for x in each), torch.full((3,), 200.0, dtype=torch.float64)], 1)

    near = _judge(sums(rounded, reference))
    assert near["R"] < 1 and abs(near["off"]) < 1
    assert _judge(sums(1.01 * reference, reference))["R"] > 1000


def test_generated_tokens_are_further_apart_where_matmuls_have_fewer_bits() -> None:
    fields = {"model": "any", "data": {"train": "train.jsonl"}}
    stored = [("precision", "bf16"), ("fp8", "float32"), ("fp8", "bf16")]
    recipes = [VqaRecipe.model_validate(fields | {"base_format": a, "precision": b}) for a, b in stored]
    assert [limits_of(recipe) for recipe in recipes] == [LIMITS, LIMITS, COARSE]
    found = Comparison("bf16", COARSE)
    trace: Any = SimpleNamespace(generation={"gaps": {"train.jsonl:1": 0.7}, "failed": ""})
    _generation(found, trace, COARSE)
    assert found.same and found.bounds["generation"] == COARSE.bf16_generation
    _generation(found, trace, LIMITS)
    assert "0.7 standard deviations above it (limit 0.25)" in str(found.differences[0])


def test_gradients_that_are_mostly_noise_may_be_that_far_apart() -> None:
    """Two equivalent arms whose every gradient is 1.33 of its length off."""
    exact = torch.randn(4000, dtype=torch.float64)
    one, other = (exact + 1.33 * torch.randn_like(exact) for _ in range(2))
    apart = float((one - other).norm() / other.norm())
    assert apart > LIMITS.bf16_trained_gradient and apart < LIMITS.noisier(1.33).bf16_trained_gradient
    assert LIMITS.noisier(0.35) == LIMITS
