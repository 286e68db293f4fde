"""Builders that are killed, that share the work, and whose disk is full or cannot be written to."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builds import LIMIT, SETTINGS, assert_right, entry, finish, jobs_of, no_thread_is_left, parts, prepare, run
from torch import Tensor

from sameday.cache.build import Job, estimate
from sameday.cache.store import CacheFull, CacheReadOnly, Store, in_bytes, prune
from sameday.spec.errors import EXIT_DISK_FULL, BadInput

INSIDE = "SAMEDAY_TEST_INSIDE_A_NAMESPACE"
FORK = multiprocessing.get_context("fork")


def started(target: Callable[..., object], *arguments: Any) -> multiprocessing.process.BaseProcess:
    process = FORK.Process(target=target, args=arguments)
    process.start()
    return process


def ended(process: multiprocessing.process.BaseProcess) -> int | None:
    process.join(LIMIT)
    assert not process.is_alive(), "the builder hangs"
    return process.exitcode


def kill_builders(store: Store, jobs: list[Job[int]], kills: int, rng: random.Random) -> tuple[int, int]:
    """How many were killed before their end, and how many of those in the middle of a write."""
    killed = in_write = 0
    for number in range(kills):
        if len(store.contents()) > len(jobs) // 2:
            for content in store.contents():
                store.path(content).unlink()
        before, remains = len(store.contents()), set(parts(store))
        process = started(run, store, jobs)
        goal = before + rng.randrange(len(jobs) // 8)
        while process.is_alive() and len(store.contents()) < goal:
            time.sleep(0.001)
        while number % 2 and process.is_alive() and not set(parts(store)) - remains:
            pass
        process.kill()
        killed += ended(process) == -signal.SIGKILL
        in_write += bool(set(parts(store)) - remains)
        assert_right(store, jobs, whole=False)
    run(store, jobs)
    assert_right(store, jobs)
    return killed, in_write


def test_kills(tmp_path: Path) -> None:
    store = Store(tmp_path, SETTINGS)
    killed, in_write = kill_builders(store, jobs_of(store, 80, 1_000_000), 5, random.Random(7))
    assert killed >= 3 and in_write >= 1, (killed, in_write)


@pytest.mark.soak
def test_fifty_kills(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    store = Store(tmp_path, SETTINGS)
    killed, in_write = kill_builders(store, jobs_of(store, 400, 1_000_000), 50, random.Random(seed))
    print(f"\nseed {seed}: {killed} kills, {in_write} during a write; every entry that was seen was right")


def build_slowly(store: Store, jobs: list[Job[int]], answers: Any) -> None:
    def slowly(job: Job[int]) -> tuple[str, int]:
        time.sleep(0.01)
        return prepare(job)

    built = run(store, jobs, prepare=slowly)
    answers.put((built.made, built.found))


def test_builders_share_the_work(tmp_path: Path) -> None:
    store, answers = Store(tmp_path, SETTINGS), FORK.SimpleQueue()
    jobs = jobs_of(store, 150)
    builders = [started(build_slowly, store, jobs, answers) for _ in range(3)]
    assert [ended(builder) for builder in builders] == [0, 0, 0]
    found = [answers.get() for _ in builders]
    assert all(made > 10 and made + there == 150 for made, there in found), found
    assert sum(made for made, _ in found) < 150 + 60, found  # where they meet, a few are made twice
    assert_right(store, jobs)
    assert not parts(store)


def build_until_told(store: Store, jobs: list[Job[int]], leave: bool) -> None:
    def asked(_number: int, _frame: object) -> None:
        raise SystemExit(75)

    def slowly(prepared: tuple[str, int]) -> dict[str, Tensor]:
        time.sleep(0.01)
        return finish(prepared)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start without one
    if leave:
        signal.signal(signal.SIGTERM, asked)
    run(store, jobs, finish=slowly)


@pytest.mark.parametrize(("number", "leave", "code"), [(signal.SIGINT, False, 1), (signal.SIGTERM, True, 75)])
def test_signals_leave_nothing_behind(tmp_path: Path, number: int, leave: bool, code: int) -> None:
    store = Store(tmp_path, SETTINGS)
    jobs = jobs_of(store, 1000)
    process = started(build_until_told, store, jobs, leave)
    while process.is_alive() and len(store.contents()) < 5:
        time.sleep(0.005)
    assert process.pid is not None
    os.kill(process.pid, number)
    assert ended(process) == code and not parts(store)
    assert 5 <= assert_right(store, jobs, whole=False) < 1000


def on_a_disk_of(size: int) -> Callable[[Callable[[Path], None]], Callable[..., None]]:
    """The test gets a small disk of its own: mounted by root, or by the same test in a namespace where it is root."""

    def wrapped(body: Callable[[Path], None]) -> Callable[..., None]:
        def test(tmp_path: Path, request: pytest.FixtureRequest) -> None:
            disk = tmp_path / "disk"
            disk.mkdir()
            mounting = _command("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk))
            if mounting is None:
                try:
                    body(disk)
                finally:
                    subprocess.run(["umount", str(disk)], check=True)
                return
            if INSIDE in os.environ:
                pytest.skip(f"no disk can be mounted in a namespace: {mounting}")
            entering = _command("unshare", "-rm", "true")
            if entering is not None:
                pytest.skip(f"no small disk can be made: {mounting}; {entering}")
            program = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", request.node.nodeid]
            done = subprocess.run(
                ["unshare", "-rm", *program, f"--basetemp={tmp_path / 'inside'}"],
                cwd=request.config.rootpath,
                env=os.environ | {INSIDE: "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            if "1 skipped" in done.stdout:
                pytest.skip(done.stdout)
            assert done.returncode == 0, done.stdout + done.stderr

        test.__doc__ = body.__doc__
        return test

    return wrapped


def _command(*words: str) -> str | None:
    """Why it failed, or None where it did not."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip() or f"{words[0]} gave {done.returncode}")


@on_a_disk_of(8 << 20)
def test_full_disk(disk: Path) -> None:
    """Another job fills the disk while a build goes on."""
    store, done = Store(disk / "cache", SETTINGS), []
    jobs = jobs_of(store, 40, 100_000)
    filler = disk / "filler"

    def meanwhile(prepared: tuple[str, int]) -> dict[str, Tensor]:
        done.append(prepared)
        if len(done) == 20:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        return finish(prepared)

    with pytest.raises(CacheFull) as caught:
        run(store, jobs, finish=meanwhile)
    full, there = caught.value, assert_right(store, jobs, whole=False)
    assert 10 <= there <= 20 and no_thread_is_left() and not parts(store)
    left = estimate(store, jobs)
    assert full.code == EXIT_DISK_FULL
    assert (full.needed, full.free, len(left.missing)) == (left.needed, left.free, 40 - there)
    assert full.needed > 20 * 100_000 and full.free < 4 * 104_000
    assert str(full) == (
        f"{store.folder}: {in_bytes(full.needed)} needed, {in_bytes(full.free)} free; {there} of 40 entries are done "
        "and stay: make room, and the same command makes the rest"
    )
    one = next(job for job in jobs if job.content not in store.contents())
    while True:  # the parts that were removed left a little room
        try:
            store.write(one.content, entry(one.content, one.item))
        except CacheFull as error:
            assert error.needed == one.size and error.free < one.size
            break
        with (disk / "more").open("ab") as file:
            file.write(bytes(4096))
        store.path(one.content).unlink()
    assert not parts(store)
    with pytest.raises(BadInput, match=f"pixels of {40 - there} images need .* of disk, and .* are free"):
        run(store, jobs)
    filler.unlink()
    built = run(store, jobs)
    assert (built.made, built.found) == (40 - there, there)
    assert_right(store, jobs)


@on_a_disk_of(1 << 20)
def test_small_disk(disk: Path) -> None:
    store = Store(disk, SETTINGS)
    jobs = jobs_of(store, 12, 90_000)
    said: list[str] = []
    with pytest.raises(BadInput, match=r"pixels of 12 images need 1\.2 MB of disk, and 1\.0 MB are free"):
        run(store, jobs, said)
    assert said == [] and os.listdir(disk) == []
    run(store, jobs[:10], said)
    assert_right(store, jobs[:10])
    assert "(904.1 kB to write, 1.0 MB free)" in said[0], said


@on_a_disk_of(8 << 20)
def test_read_only(disk: Path) -> None:
    store = Store(disk / "cache", SETTINGS)
    jobs = jobs_of(store, 20)
    run(store, jobs[:10])
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert run(store, jobs[:10]).found == assert_right(store, jobs[:10]) == 10
    why = f"{re.escape(str(store.folder))}: cannot be written: Read-only file system"
    with pytest.raises(CacheReadOnly, match=why):
        store.write(jobs[0].content, entry(jobs[0].content))
    with pytest.raises(CacheReadOnly, match=why):
        run(store, jobs)
    with pytest.raises(CacheReadOnly):
        Store(disk / "new", SETTINGS).write(jobs[0].content, entry(jobs[0].content))
    with pytest.raises(CacheReadOnly):
        prune(store.root, {SETTINGS.name: ()})
    assert no_thread_is_left()
    assert_right(store, jobs[:10])
