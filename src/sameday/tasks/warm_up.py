"""What a run will meet is compiled and recorded before its first step: later, each new kind of micro-batch would stall
the run for a quarter of a minute in the middle of an epoch.

A task names a few micro-batches of the coming steps and validations that stand for all of them. They go through the
same forward and backward pass as a step's, and nothing of them is kept: no weight, no optimizer state and no score
changes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import zip_longest
from typing import Any, Protocol

import torch

from sameday.hardware import garbage
from sameday.hardware.compiling import Graphs, cache_folder, graphs, in_words
from sameday.hardware.ranks import Ranks
from sameday.hardware.signals import AskedToStop
from sameday.kernels.ahead import compile_together
from sameday.spec.words import count
from sameday.tasks.base import Task, WarmUpBatch

SHORT = 0.5
"""Seconds below which nothing is said where nothing was compiled."""


class Screen(Protocol):
    """Where a person looks: `live` is the line that changes, on a terminal."""

    live: Any

    def say(self, text: str) -> None: ...


def warm_up(
    task: Task,
    steps: range,
    budget: int | None,
    ranks: Ranks,
    train_on: Callable[[Any, int], bool],
    screen: Screen,
    at_once: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, float]:
    """Goes through the task's warm-up batches for these steps, and leaves the task in training. `train_on` does the
    forward and backward pass and says whether there was memory for it. Returns the seconds that this took, by name, for
    the record of the run's start; nothing where the task has no such batches. In `at_once` a signal is raised: nothing
    is kept of what it breaks off. AskedToStop on every rank where one was asked to before its last batch was done."""
    began, before = time.perf_counter(), graphs()
    batches = task.warm_up_batches(steps, budget, ranks)
    task.training(True)
    if not batches:
        _say_ready(task, screen)
        return {}
    doing, recorded = _doing(task), task.recorded_sizes()
    if screen.live is None:
        screen.say(f"{doing} what this run will meet, so that no step waits for it: {len(batches)} micro-batches")
    short, failed, done = list[str](), None, 0
    with suppress(AskedToStop), _little_to_collect(task.device), at_once():
        launches = [launch for each in batches for launch in each.launches]
        if launches and screen.live is not None:
            screen.live.update(f"{doing} what this run will meet: kernels, several at once")
        compile_together(launches, task.device, max(1, len(os.sched_getaffinity(0)) // ranks.size))
        for number, (each, made) in enumerate(_made_ahead(batches), 1):
            if task.stop_asked():
                break
            if screen.live is not None:
                seconds = time.perf_counter() - began
                screen.live.update(
                    f"{doing} what this run will meet: {number} of {len(batches)}, {each.name}, {seconds:.0f} s"
                )
            try:
                if not _gone_through(task, each, made, train_on):
                    short.append(each.name)
                    torch.cuda.empty_cache()  # does nothing where no GPU is used
            except Exception as error:
                failed = in_words(error)
                break
            done = number
    seconds = time.perf_counter() - began
    if any(ranks.gather(done < len(batches) and task.stop_asked())):
        # Before anything of it is used again: a compiler that was broken off may have left anything.
        screen.say(
            f"the warm-up was broken off after {seconds:.1f} s: {done} of {len(batches)} micro-batches were done"
        )
        raise AskedToStop
    if task.device.type == "cuda":
        torch.cuda.synchronize(task.device)
    task.training(True)
    _raise_together(failed, ranks)
    seconds = time.perf_counter() - began
    for line in _told(seconds, graphs().since(before), task.recorded_sizes() - recorded, short):
        screen.say(line)
    _say_ready(task, screen)
    return {"compile": round(seconds, 4)}


@contextmanager
def _little_to_collect(device: torch.device) -> Iterator[None]:
    """Before each recording garbage is collected, not among the objects that are there already. Nor in the steps that
    follow, until they are closed, among what was compiled and recorded."""
    garbage.collect(device)
    garbage.freeze(device)
    try:
        yield
    finally:
        garbage.freeze(device)


def _say_ready(task: Task, screen: Screen) -> None:
    if (words := task.warmed_up()) is not None:
        screen.say(words)


def _doing(task: Task) -> str:
    if not task.plan.cuda_graphs:
        return "compiling"
    return "recording" if task.plan.compile == "none" else "compiling and recording"


def _made_ahead(batches: Sequence[WarmUpBatch]) -> Iterator[tuple[WarmUpBatch, Callable[[], Any]]]:
    """Each with what gives it as it was built on the host while the one before it was computed."""
    beside = ThreadPoolExecutor(1)
    try:
        made = beside.submit(batches[0].make)
        for each, after in zip_longest(batches, batches[1:]):
            this = made
            if after is not None:
                made = beside.submit(after.make)
            yield each, this.result
    finally:
        beside.shutdown(cancel_futures=True)


def _gone_through(task: Task, each: WarmUpBatch, made: Callable[[], Any], train_on: Callable[[Any, int], bool]) -> bool:
    """Whether there was memory for it."""
    try:
        batch = made().to(task.device)
        if each.score is None:
            task.training(True)
            return train_on(batch, each.step)
        task.training(False)
        with torch.no_grad():
            each.score(batch)
        return True
    except torch.OutOfMemoryError:
        return False


def _raise_together(failed: Exception | None, ranks: Ranks) -> None:
    """Where a rank failed, none goes on to a sum that the others would wait for. One process alone raises its error as
    it is: compiling that was chosen for the machine gives way there."""
    of_all = ranks.failure(failed)
    if of_all is not None:
        raise of_all


def _told(seconds: float, done: Graphs, recorded: int, short: Sequence[str]) -> list[str]:
    lines, sizes = [], f"{count(recorded, 'size')} of micro-batches"
    if done.made:
        folder = cache_folder()
        where = f" ({folder})" if folder and (done.found or done.kept) else ""
        disk = f", {done.found} of them found on disk" if done.found else ""
        then = "; the next run on this machine finds them" if done.kept else ""
        lines.append(
            f"compiled what this run will meet in {seconds:.1f} s: {count(done.made, 'graph')}{disk}{then}{where}"
            + (f", and recorded {sizes}" if recorded else "")
        )
    elif recorded:
        lines.append(f"recorded {sizes} that this run will meet in {seconds:.1f} s; there was nothing to compile")
    elif seconds > SHORT:
        lines.append(f"went through what this run will meet in {seconds:.1f} s; there was nothing to compile")
    if short:
        which = "; ".join(dict.fromkeys(short))
        then = "training begins all the same, and cuts its steps smaller where it must"
        lines.append(f"out of memory in the warm-up ({which}): {then}")
    return lines
