"""The registry of claims: for every plan field of a task the values under which its claim is put to the test. A field
without a line here or in the task fails a test."""

from __future__ import annotations

from typing import Any

from sameday.spec.plan import fields_of
from sameday.tasks.setup import TaskSetup

Values = dict[str, tuple[Any, ...]]


def trial_values(setup: TaskSetup, device: str, size: int) -> Values:
    """The plain value first. `size` is about how large a sample is, in what the task's budgets count: they are meant to
    cut a step into several micro-batches. A field that needs a GPU has one value where there is none."""
    known = _everywhere(device) | setup.trial_values(device, size)
    return {name: known[name] for name in fields_of(setup.recipe)}


def _everywhere(device: str) -> Values:
    return {
        "compile": ("none", "layers"),
        "optimizer_impl": ("loop", "foreach", "fused"),
        "device": ("auto", device),
        "workers": (0, 1),
        "prefetch": (2, 1),
        "pin_memory": (False, True),
        "environment": ({}, {"OMP_NUM_THREADS": "1"}),
        "deterministic": (False, True),
        "log_steps": (10, 1),
        "eval_steps": ("epoch", 2, None),
        "save_steps": ("epoch", 2),
        "save_total_limit": (3, 1, None),
        "track": ("none", "wandb"),  # an arm tells no tracker: tests/train/test_track.py compares real ones
    }
