"""Compiles kernels ahead for a GPU that need not be there, and prints how many Triton has of each kernel: after the
first time, and after the same once more.

    python compiled_ahead.py 90
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from sameday.kernels import fused_attention_triton, lora, lora_launch, lora_triton
from sameday.kernels.ahead import OPERATORS, AdapterLaunch, AttentionLaunch, Launch, compile_together

KERNELS = {
    fused_attention_triton: ("forward", "products", "of_queries", "of_keys"),
    lora_triton: ("down", "total", "up", "up_back", "down_back"),
}


class Elsewhere:
    """What Triton's compiler asks of a driver."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(sys.argv[1]), 32)


def launches() -> list[Launch]:
    attention = [AttentionLaunch(32, 8, 128, torch.bfloat16, 1, back) for back in (False, True)]
    adapter = (torch.bfloat16, torch.float32, 4096, (4096, 1024, 1024), (4, 4, 4), 7)
    return [*attention, *(AdapterLaunch(operator, *adapter) for operator in OPERATORS)]


def compiled() -> dict[str, int]:
    kernels: dict[str, Any] = {name: getattr(module, name) for module, names in KERNELS.items() for name in names}
    return {name: len(kernel.device_caches[0][0]) for name, kernel in kernels.items()}


def main() -> None:
    driver.set_active(Elsewhere())
    # Whose tensors are on a CPU here.
    lora._group = lambda like, ranks: lora_launch.Group(like.dtype, ranks)  # type: ignore[assignment]
    counts = []
    for _ in range(2):
        compile_together(launches(), torch.device("cpu"), 2)
        counts.append(compiled())
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
