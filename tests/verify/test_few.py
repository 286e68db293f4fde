"""Tensors of few numbers: by chance alone they are further from a reference than others, and that is allowed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sameday.verify.compare import Comparison, _against_reference
from sameday.verify.limits import LIMITS

STEPS, DRAWS = 4, 400


def arm(gradients: list[Tensor]) -> Any:
    return SimpleNamespace(fixed=lambda step: {"bias": gradients[step - 1]}, fixed_losses=[0.0] * STEPS)


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
        assert found.worst["ratio_tensor"] <= LIMITS.ratio_tensor or found.differences
    return alarms


@pytest.mark.parametrize("numbers", [2, 3, 10, 50])
def test_chance_raises_no_alarm(numbers: int) -> None:
    assert judged(numbers, 1.0) <= 4  # of the 400; without an allowance 80 of the smallest


@pytest.mark.parametrize(("numbers", "fault"), [(2, 2.0), (3, 1.5), (10, 1.1), (50, 0.96)])
def test_a_fault_does(numbers: int, fault: float) -> None:
    assert judged(numbers, fault) == DRAWS


def test_many_numbers_have_the_usual_limits() -> None:
    assert LIMITS.ratio("ratio_group", 200) == LIMITS.ratio_group and LIMITS.slope_of(200) == LIMITS.slope
    assert LIMITS.ratio("ratio_tensor", 40) == LIMITS.ratio_tensor < LIMITS.ratio("ratio_tensor", 20)
    assert LIMITS.ratio("ratio_tensor", 0) < float("inf")
