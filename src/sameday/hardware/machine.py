"""What this machine has, as far as choices depend on it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sameday.hardware.known import KnownGpu
from sameday.hardware.ranks import Ranks
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan


@dataclass(frozen=True)
class Machine:
    device: str
    name: str
    memory: int
    cores: int
    triton: bool
    shared_memory: int = 0
    """What a GPU's multiprocessor can lend to one program, in bytes."""
    capability: tuple[int, int] = (0, 0)
    """A GPU's compute capability."""
    stands_for: str = ""
    """The GPU whose steps are tried on this one, where that is another: memory and kernels are what that one has."""

    @property
    def shown_name(self) -> str:
        """Of the GPU that has this memory and these kernels."""
        return self.stands_for or self.name


_looked_at: list[tuple[int, int]] = []
"""Compute capabilities of the GPUs that this process's stood for."""


def capability_of(device: torch.device) -> tuple[int, int]:
    """A GPU's compute capability, or that of the one that it stands for."""
    return _looked_at[-1] if _looked_at else torch.cuda.get_device_capability(device)


def detect_machine(device: str, instead_of: KnownGpu | None = None) -> Machine:
    """The machine as a run on `device` (cuda or cpu) sees it. A GPU that is looked at `instead_of` another has no more
    than that one: this process takes no more of its memory, then and later."""
    cores = len(os.sched_getaffinity(0))
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        triton = importlib.util.find_spec("triton") is not None
        shared = getattr(properties, "shared_memory_per_block_optin", 0)
        total, capability = properties.total_memory, (properties.major, properties.minor)
        other = ""
        if instead_of is not None:
            if capability < instead_of.capability:
                here, there = (".".join(map(str, each)) for each in (capability, instead_of.capability))
                raise BadInput(
                    f"{properties.name} has compute capability {here}, and {instead_of.name} has {there} and kernels "
                    "that cannot be tried here"
                )
            if instead_of.memory < total:
                torch.cuda.set_per_process_memory_fraction(instead_of.memory / total)
            _looked_at.append(instead_of.capability)
            capability, shared = instead_of.capability, min(shared, instead_of.shared_memory)
            other = instead_of.name
        return Machine(
            "cuda",
            properties.name,
            round(total * torch.cuda.get_per_process_memory_fraction()),
            cores,
            triton,
            shared,
            capability,
            other,
        )
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine("cpu", "CPU", pages, cores, False)


def most_workers(machine: Machine) -> int:
    """Loader processes that may be asked for: more would only take memory from one another."""
    return max(16, 4 * machine.cores)


def device_kind(plan: Plan) -> str:
    """cuda or cpu; a GPU that is asked for must be there."""
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("plan.device is cuda, and torch finds no GPU here; allowed: auto, cpu")
    if plan.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return plan.device


def pick_device(plan: Plan, ranks: Ranks) -> torch.device:
    return torch.device("cuda", ranks.local) if device_kind(plan) == "cuda" else torch.device("cpu")


@contextmanager
def numeric_format(precision: str, device: str) -> Iterator[None]:
    """A recipe's format, for whatever is computed inside."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
        yield


def set_deterministic(on: bool) -> None:
    """Only kernels that give the same bits each time, or any."""
    torch.use_deterministic_algorithms(on)
    # New memory would be filled, for code that reads what nobody wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
