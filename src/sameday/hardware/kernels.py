"""Which kernels this machine has, and why not the others."""

from __future__ import annotations

import importlib
import shutil
from typing import NamedTuple

import torch

from sameday.hardware.machine import Machine


class Kernel(NamedTuple):
    name: str
    there: bool
    why: str


def kernels(machine: Machine, precision: str) -> list[Kernel]:
    """Of those that a plan can name."""
    cuda = machine.device == "cuda"
    triton = _triton() if machine.triton else "no GPU" if not cuda else "Triton is not installed"
    flash = cuda and precision == "bf16" and torch.cuda.get_device_capability() >= (8, 0)
    split = (
        "flash attention of shared prefixes and of branches" if flash else f"no flash attention for {precision} here"
    )
    compiler = shutil.which("g++") or shutil.which("clang++") or ""
    builds = triton if cuda else compiler or "no C++ compiler"
    return [
        Kernel("attention sdpa", True, "a dense mask, everywhere"),
        Kernel("attention split", flash or not cuda, split if cuda else "in plain PyTorch"),
        Kernel("attention flex", cuda and machine.triton, triton),
        Kernel("level_kernel fused", cuda and machine.triton, triton),
        Kernel("compile layers", machine.triton if cuda else bool(compiler), builds),
        Kernel("cuda_graphs", cuda, f"CUDA {torch.version.cuda}" if cuda else "no GPU"),
        Kernel("optimizer_impl fused", True, "torch's own, on a GPU one kernel"),
    ]


def _triton() -> str:
    """By its module: what it is installed as has other names too."""
    try:
        return f"Triton {importlib.import_module('triton').__version__}"
    except (ImportError, AttributeError):
        return "Triton, its version unknown"
