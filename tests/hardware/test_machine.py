"""A recipe's numeric format, set by one function for all tasks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sameday.hardware.machine import numeric_format


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    matmuls, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(matmuls)
    torch.backends.cudnn.allow_tf32 = convolutions


@pytest.mark.parametrize(
    ("precision", "matmuls", "kind"),
    [("bf16", "highest", torch.bfloat16), ("float32", "highest", torch.float32), ("tf32", "high", torch.float32)],
)
def test_what_a_format_means(precision: str, matmuls: str, kind: torch.dtype) -> None:
    one = torch.ones(2, 2)
    with numeric_format(precision, "cpu"):
        assert (one @ one).dtype == kind and torch.get_float32_matmul_precision() == matmuls
        assert torch.backends.cudnn.allow_tf32 == (precision == "tf32")
    assert (one @ one).dtype == torch.float32, "nothing is left of autocast outside"
