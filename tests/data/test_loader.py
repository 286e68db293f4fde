"""Processes that prepare batches: in order, and none left behind."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sameday.data import loader
from sameday.data.loader import feed, supply
from sameday.spec.errors import EXIT_OUT_OF_MEMORY, BadInput, RunStopped
from sameday.spec.plan import Plan

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Made:
    job: int
    process: int

    def to(self, _device: torch.device, non_blocking: bool = False) -> Made:
        return self


def build(job: int) -> list[Made]:
    return [Made(job, os.getpid())]


def tensors(job: int) -> list[Tensor]:
    return [torch.full((4096,), job)]


def round_of(plan: Plan, jobs: list[int]) -> set[int]:
    """The processes that did it."""
    with closing(feed(plan, CPU, jobs, build)) as batches:
        found = list(chain.from_iterable(batches))
    assert [made.job for made in found] == jobs
    return {made.process for made in found}


@pytest.fixture
def before() -> Iterator[set[multiprocessing.process.BaseProcess]]:
    yield set(multiprocessing.active_children())


def test_without_workers_this_process_does_it() -> None:
    assert round_of(Plan(), [1, 2, 3]) == round_of(Plan(), [4]) == {os.getpid()}


def test_workers_end_with_their_round(before: set[multiprocessing.process.BaseProcess]) -> None:
    plan = Plan(workers=2)
    first, second = round_of(plan, [1, 2, 3, 4]), round_of(plan, [1, 2, 3, 4])
    assert len(first) == len(second) == 2 and not first & second
    assert set(multiprocessing.active_children()) <= before


class Remembered:
    """Garbage that says where it was collected."""

    def __init__(self, where: Path) -> None:
        self.where, self.itself = where, self

    def __del__(self) -> None:
        with self.where.open("a") as file:
            print(os.getpid(), file=file)


def test_a_worker_collects_nothing_that_it_was_forked_with(tmp_path: Path) -> None:
    """A CUDA graph that the training process is done with would abort it."""
    gc.collect()
    gc.disable()
    try:
        Remembered(tmp_path / "collected")

        def collect(job: int) -> list[Made]:
            gc.collect()
            return build(job)

        with closing(feed(Plan(workers=1), CPU, [1, 2], collect)) as batches:
            assert len(list(chain.from_iterable(batches))) == 2
        assert not (tmp_path / "collected").exists()
        gc.collect()
        assert (tmp_path / "collected").read_text().split() == [str(os.getpid())]
    finally:
        gc.enable()


def test_a_round_that_is_given_up_ends_its_workers(before: set[multiprocessing.process.BaseProcess]) -> None:
    plan = Plan(workers=1, prefetch=4)
    with closing(feed(plan, CPU, [1, 2, 3, 4], build)) as batches:
        assert [made.job for made in next(batches)] == [1]
    assert set(multiprocessing.active_children()) <= before
    round_of(plan, [1, 2, 3, 4])


def test_a_process_that_leaves_in_a_round_ends() -> None:
    """Workers ignore the signal that Python's own exit sends them, and would be waited for without an end."""
    code = """
import sys
import torch
from contextlib import closing
from sameday.data.loader import feed
from sameday.spec.errors import EXIT_OUT_OF_MEMORY, RunStopped
from sameday.spec.plan import Plan
with closing(feed(Plan(workers=2), torch.device("cpu"), [1, 2, 3], lambda _job: [])) as batches:
    print(list(next(batches)))
    sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (3, "[]\n"), done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_is_killed_loses_nothing(
    tmp_path: Path,
    workers: int,
    number: int,
    before: set[multiprocessing.process.BaseProcess],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the middle of its job, twice: every job's batches come, in order, and the user is told."""
    deadly = {2: tmp_path / "first", 6: tmp_path / "second"}

    def build_or_die(job: int) -> list[Made]:
        if job in deadly and not deadly[job].exists():
            deadly[job].touch()
            os.kill(os.getpid(), number)
        return build(job)

    how = f"a data worker was ended by {signal.Signals(number).name}"
    how += ", as a system does where memory runs out" if number == signal.SIGKILL else ""
    jobs = list(range(9))
    with closing(feed(Plan(workers=workers), CPU, jobs, build_or_die)) as batches:
        assert [made.job for made in chain.from_iterable(batches)] == jobs
    again = f"{how}: all workers are started again with prefetch 1, and no data is lost\n"
    assert capsys.readouterr().err.count(again) == 2
    assert set(multiprocessing.active_children()) <= before


def test_a_worker_that_dies_after_it_has_sent_a_batch_loses_nothing(
    before: set[multiprocessing.process.BaseProcess],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A batch's tensors are fetched from the worker when it is received. Its end may be known a moment after that they
    cannot be."""
    received, check, alive = list[Tensor](), loader._check_workers, multiprocessing.process.BaseProcess.is_alive
    looks: dict[str, int] = {"check": 0, "alive": 0}

    def not_yet(what: str) -> bool:
        looks[what] += 1
        return looks[what] == 1

    with closing(feed(Plan(workers=1, prefetch=4), CPU, list(range(8)), tensors)) as batches:
        received += next(batches)
        [worker] = set(multiprocessing.active_children()) - before
        time.sleep(0.3)  # the next ones were sent
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        monkeypatch.setattr(loader, "_check_workers", lambda ahead: None if not_yet("check") else check(ahead))
        monkeypatch.setattr(type(worker), "is_alive", lambda process: not_yet("alive") or alive(process))
        received += chain.from_iterable(batches)
    assert [int(each[0]) for each in received] == list(range(8)) and min(looks.values()) > 1
    assert "ended by SIGKILL" in (said := capsys.readouterr().err) and said.count("no data is lost\n") == 1
    assert set(multiprocessing.active_children()) <= before


def test_the_death_of_a_worker_that_cannot_be_reached_any_more_is_waited_for() -> None:
    """What tells of it comes while it is waited for, and must not end the wait with an error of its own."""

    def die() -> None:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

    worker = multiprocessing.get_context("fork").Process(target=die)

    class Ahead:
        _workers = (worker,)

        def __next__(self) -> None:
            raise ConnectionResetError("by peer")

    worker.start()
    heard = signal.getsignal(signal.SIGCHLD)
    with pytest.raises(loader._WorkerKilled, match="ended by SIGKILL"):
        loader._next(Ahead())
    assert signal.getsignal(signal.SIGCHLD) == heard


def test_what_is_missing_for_a_job_is_no_dead_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "NOTICED", 0.1)

    def missing(job: int) -> list[Made]:
        raise FileNotFoundError(f"no file for {job}")

    with (
        closing(feed(Plan(workers=1), CPU, [4], missing)) as batches,
        pytest.raises(FileNotFoundError, match="no file"),
    ):
        list(chain.from_iterable(batches))


def test_a_worker_that_dies_while_nobody_waits_for_it(
    before: set[multiprocessing.process.BaseProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    """The error must not come in the middle of whatever this process does then."""
    with closing(feed(Plan(workers=2), CPU, list(range(8)), build)) as batches:
        first = [made for _ in range(3) for made in next(batches)]
        for made in first:
            with contextlib.suppress(ProcessLookupError):
                os.kill(made.process, signal.SIGKILL)
        time.sleep(0.3)  # here torch's own handler would raise
        rest = list(chain.from_iterable(batches))
    assert "a data worker was ended by SIGKILL" in capsys.readouterr().err
    assert [made.job for made in [*first, *rest]] == list(range(8))
    assert set(multiprocessing.active_children()) <= before


def test_a_worker_that_dies_while_another_round_is_waited_for(
    before: set[multiprocessing.process.BaseProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    """As a training worker does in a validation: the validation goes on, and the training loses nothing."""
    with closing(feed(Plan(workers=1, prefetch=1), CPU, list(range(8)), build)) as train:
        assert [made.job for made in next(train)] == [0]
        [worker] = set(multiprocessing.active_children()) - before

        def kill_the_other(job: int) -> list[Made]:
            if job == 1:
                assert worker.pid is not None
                os.kill(worker.pid, signal.SIGKILL)
                time.sleep(0.3)  # the process that waits for this batch hears of it first
            return build(job)

        with closing(feed(Plan(workers=1), CPU, [0, 1, 2], kill_the_other)) as validation:
            assert [made.job for made in chain.from_iterable(validation)] == [0, 1, 2]
        rest = [made.job for made in chain.from_iterable(train)]
    assert capsys.readouterr().err.count("all workers are started again") == 1
    assert rest == list(range(1, 8))
    assert set(multiprocessing.active_children()) <= before


def test_workers_that_are_always_killed(before: set[multiprocessing.process.BaseProcess]) -> None:
    def die(job: int) -> list[Made]:
        if job == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return build(job)

    with (
        closing(feed(Plan(workers=1), CPU, [0, 1, 2], die)) as batches,
        pytest.raises(RunStopped) as stopped,
    ):
        list(chain.from_iterable(batches))
    assert stopped.value.code == EXIT_OUT_OF_MEMORY and str(stopped.value) == (
        "data workers were killed 3 times in a row (a data worker was ended by SIGKILL, as a system does where memory "
        "runs out). What is left to try: fewer plan.workers, a smaller plan.prefetch, plan.workers 0."
    )
    assert set(multiprocessing.active_children()) <= before


def test_what_a_job_raises_is_raised(before: set[multiprocessing.process.BaseProcess]) -> None:
    def bad(job: int) -> list[Made]:
        raise RuntimeError(f"job {job} is bad")

    with closing(feed(Plan(workers=1), CPU, [4, 5], bad)) as batches, pytest.raises(RuntimeError, match="job 4 is bad"):
        list(chain.from_iterable(batches))
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_job_tells_users_is_told_without_a_traceback(workers: int) -> None:
    def bad(job: int) -> list[Made]:
        raise (BadInput(f"job {job} is bad") if job == 5 else RunStopped(f"job {job} has no room", EXIT_OUT_OF_MEMORY))

    for job, kind, words in ((5, BadInput, "job 5 is bad"), (6, RunStopped, "job 6 has no room")):
        with closing(feed(Plan(workers=workers), CPU, [job], bad)) as batches, pytest.raises(kind) as raised:
            list(chain.from_iterable(batches))
        assert str(raised.value) == words


def test_only_a_gpu_has_its_input_pinned() -> None:
    plan = Plan(pin_memory=True, workers=3, prefetch=5)
    assert supply(plan, CPU) == {"workers": 3, "prefetch": 5, "pin_memory": False}
    assert supply(plan, torch.device("cuda")) == {"workers": 3, "prefetch": 5, "pin_memory": True}
