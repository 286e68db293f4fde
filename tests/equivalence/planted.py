"""An arm on several ranks, with a fault or without, joined by gloo as torchrun would join them. Processes are forked
from this one, so that libraries are loaded once, unless it may have used a GPU: autograd cannot be forked then."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
from typing import Any

import torch

from sameday.verify.arm import DIED, Job, run_part
from sameday.verify.trace import Trace

LIMIT = 120
"""Seconds after which ranks that should have ended are taken for ones that hang."""


def run(job: Job, fault: str | None, ranks: int) -> Trace:
    """`fault` is a name in the catalogue. Both parts, one after the other; the kill is an exit without clearing up."""
    assert os.environ.get("OMP_NUM_THREADS") == "1", "a process that has had OpenMP threads hangs once it is forked"
    shutil.rmtree(job.out, ignore_errors=True)
    job.out.mkdir(parents=True)
    for part in (1, 2):
        codes = _processes(job, part, fault, ranks)
        assert (job.out / DIED).exists() == (part == 1), f"part {part}: exit codes {codes}"
        assert part == 1 or not any(codes), f"part {part}: exit codes {codes}"
        (job.out / DIED).unlink(missing_ok=True)
    return Trace(job.out)


def _processes(job: Job, part: int, fault: str | None, ranks: int) -> list[int | None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    everyone = [context.Process(target=_rank, args=(job, part, fault, rank, ranks, port)) for rank in range(ranks)]
    for process in everyone:
        process.start()
    for process in everyone:
        process.join(LIMIT)
        process.kill()
    return [process.exitcode for process in everyone]


def _rank(job: Job, part: int, fault: str | None, rank: int, ranks: int, port: int) -> None:
    from faults import FAULTS

    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in here.items()}
    run_part(job, part, lambda: os._exit(1), FAULTS[fault].plant if fault else None)
