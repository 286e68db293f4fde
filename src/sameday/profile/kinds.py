"""What a GPU's kernels are for, by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable

KINDS = (
    ("elementwise", r"^triton_(poi|per|red|for)_"),
    ("attention", r"flash|fmha|sdpa|attention|flex|^(forward|products|of_queries|of_keys)$"),
    ("LoRA", r"^(down|total|up|up_back|down_back)$"),
    ("levels", r"^(encode|attend|gate|join|unjoin|ungate|pull|unattend)$"),
    ("optimizer", r"multi_tensor|adam"),
    ("matmuls", r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitK|^triton_tem_"),
    ("elementwise", r"elementwise|reduce|[sS]oft[mM]ax|norm|CatArray|index|gather|scatter|scan|sort|::cub::"),
    ("copies", r"^Mem(cpy|set)|^copy_rows$"),
)
"""The first that fits. Triton's kernels of ours have the names of their functions; those of torch.compile begin with
what they are. LoRA's small matmuls in plain PyTorch are matmuls by their names."""
OTHER = "other"


def kind_of(kernel: str) -> str:
    return next((kind for kind, names in KINDS if re.search(names, kernel)), OTHER)


def by_kind(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Names of kernels with what each took, added up, the most first."""
    return _summed((kind_of(name), seconds) for name, seconds in kernels)


def by_name(kernels: Iterable[tuple[str, float]], most: int = 40) -> dict[str, float]:
    """The same of those that took longest, each under its own name."""
    return dict(list(_summed(kernels).items())[:most])


def _summed(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, seconds in kernels:
        sums[name] = sums.get(name, 0.0) + seconds
    return dict(sorted(sums.items(), key=lambda each: -each[1]))


def kind_words(kinds: dict[str, float]) -> str:
    return ", ".join(f"{kind} {1000 * seconds:.1f}" for kind, seconds in kinds.items() if 1000 * seconds >= 0.05)
