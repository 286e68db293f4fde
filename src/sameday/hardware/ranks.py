"""The processes of a data-parallel run: who I am, and sums over all. One process alone is the same thing with no
one to talk to."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sameday.spec.errors import EXIT_FAILED, SAID, BadInput, FailedElsewhere, RunStopped

Value = TypeVar("Value")

SUM_TIMEOUT = timedelta(minutes=30)
"""Ranks come to the all-reduce of a step within minutes of each other, even where one compiles or reads a slow disk.
One that is missing for longer hangs."""
WAIT_TIMEOUT = timedelta(days=1)
"""While the first rank checks data, saves or evaluates, the others wait: for hours, where a set is large and its disk
slow. Should it die, they learn that from its closed connection at once."""


class Ranks:
    """Started by torchrun (WORLD_SIZE in the environment) or alone."""

    def __init__(self, rank: int = 0, size: int = 1, local: int = 0, waiting: dist.ProcessGroup | None = None) -> None:
        """`waiting` is the group that objects and barriers go through; sums go through the default one."""
        self.rank, self.size, self.local, self._waiting = rank, size, local, waiting

    @classmethod
    def join(cls, device: str) -> Ranks:
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if device == "cuda":
            there = torch.cuda.device_count()
            if local >= there:
                raise BadInput(
                    f"process {local + 1} of this machine has no GPU: {there} here; start one process for each "
                    f"(torchrun --nproc-per-node {there}), or ask for plan.device cpu"
                )
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=SUM_TIMEOUT)
        # Apart from NCCL, which ends every process of a run whose ranks are apart for longer than its time-out.
        waiting = dist.new_group(backend="gloo", timeout=WAIT_TIMEOUT)
        return cls(dist.get_rank(), dist.get_world_size(), local, waiting)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """In place, over all ranks."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._waiting)
        return values

    def failure(self, mine: Exception | None) -> Exception | None:
        """What ended the work of this rank, if anything did, is told to all. The same error on every rank, the first
        one's that has failed; only a bug stays where it was met, and comes first. None where no rank has failed."""
        bug = mine is not None and not isinstance(mine, SAID)
        words = f"rank {self.rank} failed: {type(mine).__name__}: {mine}"
        told = [each for each in self.gather(FailedElsewhere(words, EXIT_FAILED) if bug else mine) if each is not None]
        if bug or not told:
            return mine
        failed: BadInput | RunStopped = next((each for each in told if isinstance(each, FailedElsewhere)), told[0])
        failed.alone = False
        return failed

    def from_first(self, make: Callable[[], Value]) -> Value:
        """What the first rank makes, on every rank. Where it raises, the others leave without a word."""
        if self.size == 1:
            return make()
        held: list[Any] = [None]
        if self.first:
            try:
                held = [(make(), None)]
            except Exception as error:
                held = [(None, error)]
        dist.broadcast_object_list(held, src=0, group=self._waiting)
        value, raised = held[0]
        if raised is not None and self.first:
            raise raised
        if raised is not None:
            sys.exit(getattr(raised, "code", 1))
        return value

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier(group=self._waiting)

    def leave(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def joined_size() -> int:
    """Of the processes that this one has joined."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
