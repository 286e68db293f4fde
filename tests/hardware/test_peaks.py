"""Measured peaks are rates of the things they are named after."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sameday.hardware import peaks
from sameday.hardware.peaks import Precision, best_product_rate, best_seconds, measure, number_format, product_rate

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shapes, and a few repetitions."""
    monkeypatch.setattr(peaks, "SECONDS", 0.01)
    monkeypatch.setattr(peaks, "CPU_SHAPES", ((64, 64, 64), (128, 128, 128)))
    monkeypatch.setattr(peaks, "CPU_BYTES", 2**22)


@pytest.mark.parametrize("precision", ["bf16", "float32", "tf32"])
def test_a_cpu_has_peaks(tmp_path: Path, precision: Precision) -> None:
    found = measure(CPU, precision, tmp_path)
    assert (found.device, found.precision) == ("CPU", precision)
    rates = [value for value in found.as_dict().values() if isinstance(value, float)]
    assert len(rates) == 4 and all(1e6 < rate < 1e15 for rate in rates)
    assert json.loads(json.dumps(found.as_dict())) == found.as_dict()
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_no_disk_is_measured(tmp_path: Path) -> None:
    assert measure(CPU, "float32", None).disk_bytes_per_second is None
    (tmp_path / "file").write_text("")
    assert measure(CPU, "float32", tmp_path / "file").disk_bytes_per_second is None


def test_the_best_shape_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {(64, 64, 64): 3e9, (128, 128, 128): 2e9, (64, 32, 16): 4e9}
    monkeypatch.setattr(peaks, "product_rate", lambda _device, _precision, shape: rates[shape])
    assert measure(CPU, "float32", None).flop_per_second == 3e9
    assert measure(CPU, "float32", None, shapes=[(64, 32, 16)]).flop_per_second == 4e9


def test_a_slow_device_is_not_given_large_products(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(peaks, "product_rate", lambda _device, _precision, shape: asked.append(shape) or 1e8)
    assert best_product_rate(CPU, "bf16", [(1024,) * 3, (64,) * 3, (32,) * 3]) == 1e8
    assert asked == [(32,) * 3, (64,) * 3]  # 5 ms, and 20 s would be too long


@given(st.tuples(*[st.integers(1, 40)] * 3))
def test_a_product_is_two_flops_a_pair(shape: tuple[int, int, int]) -> None:
    """With a clock that says two seconds."""
    m, k, n = shape
    made: list[tuple[int, ...]] = []

    def clock(call: Callable[[], Tensor], _device: torch.device) -> float:
        made.append(tuple(call().shape))
        return 2.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peaks, "best_seconds", clock)
        assert product_rate(CPU, "float32", shape) == m * k * n and made == [(m, n)]
        assert peaks.memory_rate(CPU, 100) == 100  # read and written, in two seconds
        assert peaks.copy_rate(CPU, 100) == 50


def test_the_least_of_several_calls_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    takes = iter([0.01, 0.06, 0.02, 0.04])  # of a clock of its own: a busy machine's says little
    monkeypatch.setattr(peaks, "_on_cpu", lambda *_: next(takes))
    assert best_seconds(lambda: torch.zeros(0), CPU, 0.0) == 0.02, "the first one warms up"
    assert next(takes, None) is None  # one to warm up and three that count


def test_a_slower_product_has_a_lower_rate() -> None:
    """Ten products for one: what is timed is the work, not a constant."""
    a = torch.randn(256, 256)
    once = best_seconds(lambda: a @ a, CPU, 0.05)
    often = best_seconds(lambda: [a @ a for _ in range(10)][-1], CPU, 0.05)
    assert 4 * once < often


def test_the_format_of_float32_products_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    with number_format("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
    with pytest.raises(KeyError), number_format("tf32"):
        raise KeyError
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_peaks(tmp_path: Path) -> None:
    cuda = torch.device("cuda")
    half, full = (measure(cuda, precision, tmp_path) for precision in ("bf16", "float32"))
    assert half.flop_per_second > 2 * full.flop_per_second
    assert full.fp8_flop_per_second is None
    assert (half.fp8_flop_per_second is not None) == (torch.cuda.get_device_capability() >= peaks.FP8_CAPABILITY)
    assert half.memory_bytes_per_second > half.copy_bytes_per_second > 1e9
