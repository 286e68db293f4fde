"""Published figures of GPUs that people have, for estimates: about machines that are not here, and before anything was
measured."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class KnownGpu:
    """`flop_per_second` is the published peak of dense bf16 matmuls with float32 sums, `shared_memory` what a
    multiprocessor can lend to one program, in bytes."""

    name: str
    memory: int
    flop_per_second: float
    memory_bytes_per_second: float
    capability: tuple[int, int]

    @property
    def shared_memory(self) -> int:
        return SHARED_MEMORY[self.capability]


SHARED_MEMORY = {(8, 0): 163 * 1024, (8, 6): 99 * 1024, (8, 9): 99 * 1024, (9, 0): 227 * 1024}
"""By compute capability."""


def _gpu(name: str, capability: tuple[int, int], gigabytes: int, teraflops: float, terabytes: float) -> KnownGpu:
    return KnownGpu(name, gigabytes * 2**30, 1e12 * teraflops, 1e12 * terabytes, capability)


KNOWN = {
    "a100-40gb": _gpu("A100 40 GB", (8, 0), 40, 312, 1.555),
    "a100-80gb": _gpu("A100 80 GB", (8, 0), 80, 312, 2.039),
    "h100": _gpu("H100 80 GB", (9, 0), 80, 989, 3.35),
    "h200": _gpu("H200", (9, 0), 140, 989, 4.8),
    "l40s": _gpu("L40S", (8, 9), 48, 362, 0.864),
    "a6000": _gpu("RTX A6000", (8, 6), 48, 154.8, 0.768),
    "rtx-4090": _gpu("RTX 4090", (8, 9), 24, 165.2, 1.008),
    "rtx-3090": _gpu("RTX 3090", (8, 6), 24, 71, 0.936),
}

REACHED = 0.8
"""Of a published peak, by large matmuls: 775 of 989 TFLOP/s were seen on an H200."""

_PARTS = {"MIG", "LAPTOP"}
"""Words in the names of GPUs that are slower than their name says."""


def peak_of(name: str) -> float | None:
    """The published peak of bf16 matmuls of a GPU by the name that its driver has for it, as "NVIDIA A100-SXM4-40GB";
    None where it is not known."""
    words = set(re.split(r"[\s-]+", name.upper()))
    for gpu in KNOWN.values():
        if {*re.sub(r" \d+ GB$", "", gpu.name).upper().split()} <= words and not words & _PARTS:
            return gpu.flop_per_second
    return None
