"""Which kernels this machine has, and why not the others."""

from __future__ import annotations

import importlib
import shutil
from typing import Any, NamedTuple

import torch

from sameday.hardware.machine import Machine

FLASH_CAPABILITY, FUSED_CAPABILITY = (8, 0), (9, 0)
_COMMON = ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
FLASH_ARGUMENTS = {
    "_flash_attention_forward": ["query", "key", "value", *_COMMON, "return_debug_mask"],
    "_flash_attention_backward": [
        *("grad_out", "query", "key", "value", "out", "logsumexp", *_COMMON),
        *("rng_state", "unused"),
    ],
}
"""Of torch's operators, in the order in which they are given."""
FLASH_KEYWORDS = {"scale"}


class Kernel(NamedTuple):
    name: str
    there: bool
    why: str


def kernels(machine: Machine, precision: str) -> list[Kernel]:
    """Of those that a plan can name."""
    cuda = machine.device == "cuda"
    triton = _triton() if machine.triton else "no GPU" if not cuda else "Triton is not installed"
    no_flash = without_flash(machine, precision)
    split = no_flash or "flash attention of shared prefixes and of branches"
    no_fused = without_fused(machine)
    compiler = shutil.which("g++") or shutil.which("clang++") or ""
    builds = triton if cuda else compiler or "no C++ compiler"
    return [
        Kernel("attention sdpa", True, "a dense mask, everywhere"),
        Kernel("attention split", no_flash is None or not cuda, split if cuda else "in plain PyTorch"),
        Kernel("attention fused", no_fused is None, no_fused or triton),
        Kernel("attention flex", cuda and machine.triton, triton),
        Kernel("lora_kernel triton", cuda and machine.triton, triton),
        Kernel("level_kernel fused", cuda and machine.triton, triton),
        Kernel("compile layers", machine.triton if cuda else bool(compiler), builds),
        Kernel("cuda_graphs", cuda, f"CUDA {torch.version.cuda}" if cuda else "no GPU"),
        Kernel("optimizer_impl fused", True, "torch's own, on a GPU one kernel"),
    ]


def without_flash(machine: Machine, precision: str) -> str | None:
    """Why this machine has no flash attention for the format; None where it has."""
    if machine.device != "cuda":
        return "there is no GPU"
    if machine.capability < FLASH_CAPABILITY:
        return _too_old(machine, FLASH_CAPABILITY)
    if precision != "bf16":
        return f"it has no {precision}"
    return None if flash_operators() else f"torch {torch.__version__} has no such operators as are called"


def without_fused(machine: Machine) -> str | None:
    """Why no GPU of this machine runs our own kernels for shared prefixes; None where one does."""
    if machine.device != "cuda":
        return "no GPU"
    if not machine.triton:
        return "Triton is not installed"
    return _too_old(machine, FUSED_CAPABILITY) if machine.capability < FUSED_CAPABILITY else None


def _too_old(machine: Machine, least: tuple[int, int]) -> str:
    there, needed = (".".join(map(str, each)) for each in (machine.capability, least))
    return f"{machine.shown_name} has compute capability {there}, and it needs {needed}"


def flash_operators() -> bool:
    """Whether torch's own flash attention, which has no public name with log-sum-exp, takes what it is given here."""
    return all(_takes(getattr(torch.ops.aten, name, None), called) for name, called in FLASH_ARGUMENTS.items())


def _takes(operator: Any, called: list[str]) -> bool:
    """All arguments by position as they are called, and of those by keyword none that must be given besides."""
    if operator is None:
        return False
    arguments = operator.default._schema.arguments
    keywords = [argument for argument in arguments if argument.kwarg_only]
    needed = {argument.name for argument in keywords if not argument.has_default_value()}
    by_position = [argument.name for argument in arguments if not argument.kwarg_only]
    return by_position == called and needed <= FLASH_KEYWORDS <= {argument.name for argument in keywords}


def _triton() -> str:
    """By its module: what it is installed as has other names too."""
    try:
        return f"Triton {importlib.import_module('triton').__version__}"
    except (ImportError, AttributeError):
        return "Triton, its version unknown"
