"""How much of a device's memory this process could still take."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

CGROUPS = Path("/sys/fs/cgroup")


def free_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of a device's memory that neither others have nor this process has had at any moment since a model was
    loaded, and how many there are. On a GPU what torch's allocator holds beyond that counts as free: it gives it back
    where memory runs short."""
    if device.type != "cuda":
        return _free_on_host()
    free, total = torch.cuda.mem_get_info(device)
    may_take = round(total * torch.cuda.get_per_process_memory_fraction(device.index))
    ours = torch.cuda.memory_reserved(device) + free
    return min(ours, may_take) - torch.cuda.max_memory_allocated(device), may_take


def forget_peak(device: torch.device) -> None:
    """What this process has had until now counts no more for `free_memory`: other steps are to come."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)


def idle_in_graphs(device: torch.device) -> int:
    """Bytes that recorded CUDA graphs have for themselves while no tensor is in them. `free_memory` counts them as
    free, since the allocator holds them, and it gives them to nobody else."""
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":  # no other tells
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != (0, 0)
    )


def out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, gave no more memory: a CPU's allocator has no class of its own for it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and "allocate memory" in str(error)


def segments_grow() -> bool:
    """Whether torch's allocator was told to let its segments grow, so that tensors do not cut them into pieces."""
    set_to = (os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return any("expandable_segments:True" in "".join(each.split()) for each in set_to)


def _free_on_host() -> tuple[int, int]:
    """By the kernel's own estimate, and within what this process may take."""
    page = os.sysconf("SC_PAGE_SIZE")
    free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    with suppress(OSError):
        kib = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(kib.get("MemAvailable:", free // 1024))
    bounds = list(_of_groups(CGROUPS))
    of_process, _ = resource.getrlimit(resource.RLIMIT_AS)
    if of_process != resource.RLIM_INFINITY:
        bounds.append((of_process, page * int(Path("/proc/self/statm").read_text().split()[0])))
    for bound, taken in bounds:
        free, total = min(free, bound - taken), min(total, bound)
    return free, total


def _of_groups(root: Path, listed: Path = Path("/proc/self/cgroup")) -> Iterator[tuple[int, int]]:
    """What the groups that this process is in, and those above them, may take, and have taken for good: pages of files
    are given back where memory runs short. Both versions of control groups. In a container a group's own folder may not
    be there, and then that of the whole container is."""
    lines = []
    with suppress(OSError):
        lines = listed.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, bound, taken, files = root, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            top, bound, taken, files = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        own = top / path.lstrip("/")
        for group in (each for each in (own, *own.parents) if each.is_relative_to(top)):
            with suppress(OSError, ValueError):  # not there, or without a bound
                limit, used = int((group / bound).read_text()), int((group / taken).read_text())
                yield limit, max(0, used - _of_files(group, files))


def _of_files(group: Path, prefix: str) -> int:
    """Bytes of a control group's pages that only hold what files have."""
    with suppress(OSError, ValueError):
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    return 0
