"""What torch.compile did in this process: graphs that it made, graphs that it found on disk, errors in words."""

from __future__ import annotations

import sys
from typing import NamedTuple

from sameday.spec.errors import EXIT_FAILED, CompileFailed


class Graphs(NamedTuple):
    """`made`: all of them. `found`: of these on disk, where an earlier process left them. `kept`: left there for the
    next one."""

    made: int = 0
    found: int = 0
    kept: int = 0

    def since(self, before: Graphs) -> Graphs:
        return Graphs(*(now - then for now, then in zip(self, before, strict=True)))


def graphs() -> Graphs:
    """Until now. The compiler is not loaded for this: it takes seconds."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    made = counters["stats"]["unique_graphs"] if "stats" in counters else 0
    disk = counters.get("aot_autograd", {})
    return Graphs(made, disk.get("autograd_cache_hit", 0), disk.get("autograd_cache_saved", 0))


def cache_folder() -> str | None:
    """Where graphs are kept on disk; None before any was compiled to kernels."""
    where = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    return None if where is None else str(where.cache_dir())


def in_words(error: Exception) -> Exception:
    """An error of torch.compile as one that a user can read; any other as it is."""
    compiler = sys.modules.get("torch._dynamo.exc")  # not loaded for this either
    if compiler is None or not isinstance(error, compiler.TorchDynamoException):
        return error
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return CompileFailed(
        f"torch.compile failed: {why}; with plan.compile none the run goes on from what is saved",
        EXIT_FAILED,
        alone=True,
    )
