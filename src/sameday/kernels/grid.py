"""A Triton kernel on its grid: launched, or compiled and not launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

_compiled_alone: ContextVar[bool] = ContextVar("compiled_alone", default=False)


@contextmanager
def compiled_alone() -> Iterator[None]:
    """No kernel is launched here: Triton compiles it, if it did not do so before."""
    token = _compiled_alone.set(True)
    try:
        yield
    finally:
        _compiled_alone.reset(token)


def on_grid(kernel: Any, *grid: Any) -> Callable[..., object]:
    """What takes the kernel's arguments."""
    return partial(kernel.run, grid=grid, warmup=_compiled_alone.get())
