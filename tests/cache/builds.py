"""Builds of a cache for tests: what belongs to a content is its own bytes over and over."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from typing import Any

import torch
from torch import Tensor

from sameday.cache.build import Built, Job, build
from sameday.cache.key import Settings
from sameday.cache.store import Store

SETTINGS = Settings("pixels", {"backend": "pil", "max_pixels": 1310720})
LIMIT = 60
"""Seconds after which something that should have ended is taken to hang."""


def entry(content: str, length: int = 3000) -> dict[str, Tensor]:
    """What belongs to a content: its own bytes over and over."""
    own = torch.frombuffer(bytearray.fromhex(content), dtype=torch.uint8)
    return {"pixels": own.repeat(length // len(own) + 1)[:length]}


def jobs_of(store: Store, count: int, length: int = 3000) -> list[Job[int]]:
    contents = [hashlib.blake2b(str(number).encode(), digest_size=16).hexdigest() for number in range(count)]
    return [Job(content, store.size_of(content, entry(content, length)), length) for content in contents]


def prepare(job: Job[int]) -> tuple[str, int]:
    return job.content, job.item


def finish(prepared: tuple[str, int]) -> dict[str, Tensor]:
    return entry(*prepared)


def run(store: Store, jobs: list[Job[int]], said: list[str] | None = None, **changes: Any) -> Built:
    """A build as it mostly is; `changes` replace its arguments."""
    lines: list[str] = [] if said is None else said
    arguments: dict[str, Any] = {"prepare": prepare, "finish": finish, "workers": 2, "say": lines.append}
    return build(store, jobs, **(arguments | changes))


def assert_right(store: Store, jobs: list[Job[int]], whole: bool = True) -> int:
    """Everything that can be seen is right. How much that is."""
    lengths = {job.content: job.item for job in jobs}
    there = store.contents()
    for content in there:
        found = store.read(content)
        assert found is not None and torch.equal(found["pixels"], entry(content, lengths[content])["pixels"])
    assert not whole or there == lengths.keys()
    return len(there)


def parts(store: Store) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return [name for name in os.listdir(store.folder) if name.endswith(".part")]
    return []


def no_thread_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("cache")]
