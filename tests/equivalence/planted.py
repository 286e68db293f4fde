"""An arm on several ranks, with a fault or without: processes forked from this one, so that libraries are loaded once,
and joined by gloo as torchrun would join them."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket

import torch

from sameday.verify.arm import DIED, Job, Plant, run_part
from sameday.verify.trace import Trace

LIMIT = 120
"""Seconds after which ranks that should have ended are taken for ones that hang."""


def run(job: Job, plant: Plant | None, ranks: int) -> Trace:
    """Both parts, one after the other; the kill is an exit without any clearing up."""
    assert os.environ.get("OMP_NUM_THREADS") == "1", "a process that has had OpenMP threads hangs once it is forked"
    shutil.rmtree(job.out, ignore_errors=True)
    job.out.mkdir(parents=True)
    for part in (1, 2):
        codes = _processes(job, part, plant, ranks)
        assert (job.out / DIED).exists() == (part == 1), f"part {part}: exit codes {codes}"
        assert part == 1 or not any(codes), f"part {part}: exit codes {codes}"
        (job.out / DIED).unlink(missing_ok=True)
    return Trace(job.out)


def _processes(job: Job, part: int, plant: Plant | None, ranks: int) -> list[int | None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    everyone = [fork.Process(target=_rank, args=(job, part, plant, rank, ranks, port)) for rank in range(ranks)]
    for process in everyone:
        process.start()
    for process in everyone:
        process.join(LIMIT)
        process.kill()
    return [process.exitcode for process in everyone]


def _rank(job: Job, part: int, plant: Plant | None, rank: int, ranks: int, port: int) -> None:
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in here.items()}
    torch.cuda.is_available = lambda: False  # forked from a process that may have used one: it cannot be used here
    run_part(job, part, lambda: os._exit(1), plant)
