"""Environment variables that a plan sets: before torch is loaded, and for as long as one command lasts."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sameday.spec.plan import Plan

TOKENIZERS, CUBLAS = "TOKENIZERS_PARALLELISM", "CUBLAS_WORKSPACE_CONFIG"
READ_LATER = (TOKENIZERS, CUBLAS)
"""What libraries read when a model computes, and not only when they are loaded."""

_changed: ContextVar[dict[str, tuple[str | None, str]] | None] = ContextVar("changed", default=None)
"""Of the call that is under way: what each variable was before, None where it was not set, and what it was set to."""


def prepare_environment(plan: Plan) -> None:
    """Before torch is loaded: variables that it and the tokenizers read once, at their start."""
    for name, value in plan.environment.items():
        _set(name, value)
    if TOKENIZERS not in os.environ:
        _set(TOKENIZERS, "false")  # worker processes are forked
    if plan.deterministic and CUBLAS not in os.environ:
        _set(CUBLAS, ":4096:8")


def _set(name: str, value: str) -> None:
    changed = _changed.get()
    if changed is not None:
        before, _ = changed.get(name, (os.environ.get(name), value))
        changed[name] = before, value
    os.environ[name] = value


@contextmanager
def environment_given_back(but: Collection[str] = ()) -> Iterator[None]:
    """What plans set in here is afterwards as it was, `but` for these variables: the process is not ours, and its next
    call may have another plan. What something else has changed meanwhile is left as it is."""
    changed: dict[str, tuple[str | None, str]] = {}
    token = _changed.set(changed)
    try:
        yield
    finally:
        _changed.reset(token)
        for name, (before, value) in changed.items():
            if name in but or os.environ.get(name) != value:
                continue
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
