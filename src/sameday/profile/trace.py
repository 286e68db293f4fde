"""A few steps as PyTorch's profiler sees them, in a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from sameday.commands.session import Session
from sameday.hardware.phases import as_ranges
from sameday.profile.timeline import under_way
from sameday.tasks.base import Task

TRACED = 3
"""Steps in a trace: a file of them has some megabytes."""


def write_trace(session: Session, task: Task, path: Path, first: int, budget: int | None) -> None:
    """Steps from `first` on, at a learning rate of zero, each a range with its phases inside. A file that is there
    stays until the new one is whole."""
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU]
    if task.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    numbers = range(first, first + TRACED + 2)
    with (
        under_way(session, task, numbers, budget) as done,
        profile(activities=activities, acc_events=True) as seen,
        as_ranges(),
    ):
        for number in numbers[1 : TRACED + 1]:
            with record_function(f"step {number + 1}"):
                next(done)
        if task.device.type == "cuda":
            torch.cuda.synchronize()
    made = path.with_name(f".{os.getpid()}.{path.name[-50:]}")
    try:
        seen.export_chrome_trace(str(made))
        os.replace(made, os.path.realpath(path))
    finally:
        made.unlink(missing_ok=True)
