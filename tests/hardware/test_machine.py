"""A recipe's numeric format, set by one function for all tasks; a GPU that stands for another."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from sameday.hardware import machine
from sameday.hardware.kernels import without_fused
from sameday.hardware.known import KNOWN
from sameday.hardware.machine import capability_of, detect_machine, numeric_format
from sameday.spec.errors import BadInput


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


def test_a_gpu_that_stands_for_another_has_no_more_than_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pretended H200: what is asked of it is what each GPU says."""
    found = SimpleNamespace(
        name="NVIDIA H200", total_memory=140 * 2**30, major=9, minor=0, shared_memory_per_block_optin=232448
    )
    shares = [1.0]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: shares[-1])
    own = detect_machine("cuda")
    assert (own.shown_name, own.memory, own.shared_memory, own.capability) == (
        "NVIDIA H200",
        140 * 2**30,
        232448,
        (9, 0),
    )
    assert shares == [1.0]
    monkeypatch.setattr(machine, "_looked_at", [])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert capability_of(torch.device("cuda")) == (9, 0)
    a100 = detect_machine("cuda", KNOWN["a100-40gb"])
    assert capability_of(torch.device("cuda")) == (8, 0), "for kernels that are chosen when they are called"
    assert (a100.name, a100.shown_name, a100.memory) == ("NVIDIA H200", "A100 40 GB", 40 * 2**30)
    assert (a100.shared_memory, a100.capability) == (163 * 1024, (8, 0)) and shares[1:] == [40 / 140]
    if a100.triton:
        assert without_fused(own) is None
        assert without_fused(a100) == "A100 40 GB has compute capability 8.0, and it needs 9.0"
    assert detect_machine("cuda").memory == 40 * 2**30, "whoever asks again in this process"
    assert detect_machine("cuda", KNOWN["rtx-4090"]).shared_memory == 99 * 1024
    found.major, found.minor, found.shared_memory_per_block_optin = 8, 9, 99 * 1024
    assert detect_machine("cuda", KNOWN["a100-40gb"]).shared_memory == 99 * 1024, "no more than is there"
    words = "NVIDIA H200 has compute capability 8.9, and H100 80 GB has 9.0 and kernels that cannot be tried here"
    with pytest.raises(BadInput, match=words):
        detect_machine("cuda", KNOWN["h100"])


def test_the_shared_memory_of_each_known_gpu_is_known() -> None:
    assert all(99 * 1024 <= gpu.shared_memory < 256 * 1024 for gpu in KNOWN.values())
