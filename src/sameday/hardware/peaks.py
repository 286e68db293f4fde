"""The fastest that this device does of each thing a training step needs, measured in a second or two: large matmuls
in the recipe's numeric format, copies in memory, copies to the device, reads from a disk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sameday.hardware.disk import read_rate

Precision = Literal["bf16", "float32", "tf32"]
Shape = tuple[int, int, int]

GPU_SHAPES: tuple[Shape, ...] = ((8192, 8192, 8192), (16384, 4096, 4096), (4096, 4096, 12288), (4096, 12288, 4096))
CPU_SHAPES: tuple[Shape, ...] = ((128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024))
"""(m, k, n): squares, and what decoder layers have. No one shape is the fastest everywhere."""
GPU_BYTES, CPU_BYTES = 2**30, 2**28
"""Of a copy: too many to stay in a cache."""
CALLS = 8
"""One after the other on a GPU, where a launch takes as long as a small matmul."""
FP8_CAPABILITY = (8, 9)
"""Compute capability from which on GPUs multiply in fp8."""
SECONDS = 0.2
"""For each thing that is timed; at least three times, whatever they take."""


@dataclass(frozen=True)
class Peaks:
    """`flop_per_second` in `precision`, a multiply-add being two. Memory is read and written: both count. What goes to
    the device counts once. The disk's rate is None where it cannot be measured, that of fp8 matmuls beside bf16 where
    the device has none."""

    device: str
    precision: str
    flop_per_second: float
    memory_bytes_per_second: float
    copy_bytes_per_second: float
    disk_bytes_per_second: float | None
    fp8_flop_per_second: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(device: torch.device, precision: Precision, folder: Path | None, shapes: Sequence[Shape] = ()) -> Peaks:
    """`folder` is on the disk that is read from; without one no disk is measured. `shapes` are tried besides the
    usual ones: a step's own may be faster."""
    cuda = device.type == "cuda"
    usual, size = (GPU_SHAPES, GPU_BYTES) if cuda else (CPU_SHAPES, CPU_BYTES)
    fp8 = cuda and precision == "bf16" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
    return Peaks(
        device=torch.cuda.get_device_name(device) if cuda else "CPU",
        precision=precision,
        flop_per_second=best_product_rate(device, precision, (*usual, *shapes)),
        memory_bytes_per_second=memory_rate(device, size),
        copy_bytes_per_second=copy_rate(device, min(size, 2**28)),
        disk_bytes_per_second=None if folder is None else read_rate(folder, checked=False),
        fp8_flop_per_second=max(fp8_rate(device, shape) for shape in (*usual, *shapes)) if fp8 else None,
    )


def best_product_rate(device: torch.device, precision: Precision, shapes: Sequence[Shape]) -> float:
    """From the smallest on, as long as a matmul takes no longer than its time: a CPU without bf16 is very slow."""
    best = 0.0
    for shape in sorted(shapes, key=math.prod):
        if best and 2 * math.prod(shape) / best > SECONDS:
            break
        best = max(best, product_rate(device, precision, shape))
    return best


def product_rate(device: torch.device, precision: Precision, shape: Shape) -> float:
    """FLOP per second of (m, k) @ (k, n), of normal numbers: a GPU takes less power for zeros, and is faster."""
    m, k, n = shape
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(size, device=device, dtype=kind) for size in ((m, k), (n, k)))
    out = torch.empty(m, n, device=device, dtype=kind)
    with number_format(precision):
        return 2 * m * k * n / best_seconds(lambda: torch.mm(a, b.T, out=out), device)


def fp8_rate(device: torch.device, shape: Shape, fast_sums: bool = False, whole: bool = False) -> float:
    """The same of fp8 operands with a scale for each row and column, or with one for the `whole` of each, summed in
    float32 unless `fast_sums` says so, with a result in bf16."""
    m, k, n = shape
    a, b = (torch.randn(size, device=device).to(torch.float8_e4m3fn) for size in ((m, k), (n, k)))
    rows, columns = (torch.ones(() if whole else size, device=device) for size in ((m, 1), (1, n)))

    def call() -> Tensor:
        return torch._scaled_mm(a, b.t(), rows, columns, out_dtype=torch.bfloat16, use_fast_accum=fast_sums)

    return 2 * m * k * n / best_seconds(call, device)


def memory_rate(device: torch.device, size: int) -> float:
    """Bytes per second of a copy in the device's memory, read and written."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / best_seconds(lambda: target.copy_(source), device)


def copy_rate(device: torch.device, size: int) -> float:
    """Bytes per second from page-locked host memory to the device; on a CPU, from memory to memory."""
    cuda = device.type == "cuda"
    source = torch.ones(size, dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return size / best_seconds(lambda: target.copy_(source, non_blocking=True), device)


@contextmanager
def number_format(precision: Precision) -> Iterator[None]:
    """Float32 matmuls as the recipe has them, and what was set before afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def best_seconds(call: Callable[[], Tensor], device: torch.device, seconds: float | None = None) -> float:
    """The least of several calls, after one that pays for what is made once."""
    seconds = SECONDS if seconds is None else seconds
    timed = _on_gpu if device.type == "cuda" else _on_cpu
    timed(call, device)
    timings, began = [timed(call, device) for _ in range(3)], time.perf_counter()
    while time.perf_counter() - began < seconds:
        timings.append(timed(call, device))
    return min(timings)


def _on_cpu(call: Callable[[], Tensor], _device: torch.device) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _on_gpu(call: Callable[[], Tensor], device: torch.device) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        began.record()
        for _ in range(CALLS):
            call()
        ended.record()
        ended.synchronize()
    return began.elapsed_time(ended) / 1000 / CALLS
