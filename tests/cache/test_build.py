"""A cache is filled whatever comes in between: kills, other builders, a full disk, images that went away."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sameday.cache import build as module
from sameday.cache.build import Built, Job, build, estimate, in_time
from sameday.cache.key import Settings
from sameday.cache.store import CacheFull, CacheReadOnly, Store, in_bytes, prune
from sameday.spec.errors import BadInput

SETTINGS = Settings("pixels", {"backend": "pil", "max_pixels": 1310720})
INSIDE = "SAMEDAY_TEST_INSIDE_A_NAMESPACE"
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


def test_build_says_what_it_will_do_and_does_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache", SETTINGS)
    jobs, said = jobs_of(store, 30), list[str]()
    before = estimate(store, jobs)
    built = run(store, [*jobs, *jobs[:7]], said)  # a content that is asked for twice is made once
    assert (built.made, built.found, built.stopped) == (30, 0, False)
    assert_right(store, jobs)
    written = sum(store.path(job.content).stat().st_size for job in jobs)
    assert written == before.to_write == before.size == built.size == 30 * jobs[0].size
    size = in_bytes(written)
    line = rf"pixels: 30 images, {size} \({size} to write, .* free\), about [0-9.]+ s with 2 threads"
    assert len(said) == 2 and re.fullmatch(line, said[0]), said
    assert re.fullmatch(rf"pixels: 30 images made, {size} in [0-9.]+ s", said[1]), said
    assert no_thread_is_left() and not parts(store)


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    store, made = Store(tmp_path, SETTINGS), []
    jobs = jobs_of(store, 12)
    for job in jobs[:5]:
        store.write(job.content, entry(job.content))
    os.truncate(store.path(jobs[3].content), 100)
    before = {job.content: store.path(job.content).stat().st_ino for job in jobs[:5]}

    def counted(job: Job[int]) -> tuple[str, int]:
        made.append(job.content)
        return prepare(job)

    built = run(store, jobs, prepare=counted)
    assert (built.made, built.found) == (8, 4)
    assert sorted(made) == sorted([jobs[3].content, *(job.content for job in jobs[5:])])
    assert [store.path(c).stat().st_ino == i for c, i in before.items()] == [True, True, True, False, True]
    assert_right(store, jobs)
    said: list[str] = []
    assert run(store, jobs, said) == Built(0, 12, 0, 0.0, False)
    assert said == [f"pixels: 12 images, {in_bytes(12 * jobs[0].size)}, all of them there"]
    assert run(store, []).made == 0


def test_each_builder_has_an_order_of_its_own(tmp_path: Path) -> None:
    def order(store: Store) -> list[str]:
        seen: list[str] = []

        def noted(job: Job[int]) -> tuple[str, int]:
            seen.append(job.content)
            return prepare(job)

        run(store, jobs_of(store, 20), prepare=noted, workers=1)
        return seen

    one, two = order(Store(tmp_path / "one", SETTINGS)), order(Store(tmp_path / "two", SETTINGS))
    assert one != two and sorted(one) == sorted(two)


def test_only_a_few_entries_are_in_memory(tmp_path: Path) -> None:
    store, lock = Store(tmp_path, SETTINGS), threading.Lock()
    jobs = jobs_of(store, 40)
    count = {"now": 0, "most": 0}

    def held(job: Job[int]) -> tuple[str, int]:
        with lock:
            count["now"] += 1
            count["most"] = max(count.values())
        return prepare(job)

    def slowly(prepared: tuple[str, int]) -> dict[str, Tensor]:
        time.sleep(0.005)
        assert threading.current_thread() is threading.main_thread()
        with lock:
            count["now"] -= 1
        return finish(prepared)

    run(store, jobs, prepare=held, finish=slowly, workers=3)
    assert count["most"] <= 3 + module.SPARE
    assert_right(store, jobs)


def test_errors_of_some_do_not_lose_the_others(tmp_path: Path) -> None:
    store = Store(tmp_path, SETTINGS)
    jobs = jobs_of(store, 40)
    broken = {job.content for job in jobs[::5]}
    gone = tmp_path / "gone.png"

    def fail(job: Job[int]) -> tuple[str, int]:
        if job.content == jobs[0].content:
            gone.read_bytes()
        if job.content in broken - {jobs[5].content}:
            raise BadInput("has changed since the data was checked")
        return prepare(job)

    def fail_later(prepared: tuple[str, int]) -> dict[str, Tensor]:
        if prepared[0] == jobs[5].content:
            raise ValueError("makes no sense")
        return finish(prepared)

    with pytest.raises(BadInput) as caught:
        run(store, jobs, prepare=fail, finish=fail_later)
    first, *lines = str(caught.value).splitlines()
    assert first == "pixels of 8 of 40 images could not be made; all others are there:"
    assert sorted(lines) == sorted(
        [
            f"  {jobs[0].content}: [Errno 2] No such file or directory: '{gone}'",
            f"  {jobs[5].content}: makes no sense",
            *(f"  {job.content}: has changed since the data was checked" for job in jobs[10::5]),
        ]
    )
    assert store.contents() == {job.content for job in jobs} - broken
    assert_right(store, jobs, whole=False)
    with pytest.raises(BadInput, match=r"and 20 more$"):
        run(Store(tmp_path / "other", SETTINGS), jobs, prepare=lambda job: gone.read_bytes())
    run(store, jobs)
    assert_right(store, jobs)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError, AssertionError])
def test_an_interrupt_or_a_fault_of_the_program_ends_it_at_once(tmp_path: Path, error: type[BaseException]) -> None:
    store, done = Store(tmp_path, SETTINGS), []
    jobs = jobs_of(store, 60)

    def interrupted(prepared: tuple[str, int]) -> dict[str, Tensor]:
        done.append(prepared)
        if len(done) == 10:
            raise error("enough")
        return finish(prepared)

    with pytest.raises(error, match="enough"):
        run(store, jobs, finish=interrupted)
    assert len(done) == 10 and no_thread_is_left() and not parts(store)
    assert_right(store, jobs, whole=False)
    run(store, jobs)
    assert_right(store, jobs)


def test_what_has_not_begun_is_dropped(tmp_path: Path) -> None:
    store, begun = Store(tmp_path, SETTINGS), []

    def slowly(job: Job[int]) -> tuple[str, int]:
        begun.append(job)
        time.sleep(0.3)
        return prepare(job)

    def interrupted(prepared: tuple[str, int]) -> dict[str, Tensor]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(store, jobs_of(store, 9), prepare=slowly, finish=interrupted, workers=1)
    assert len(begun) <= 2


def test_a_job_that_claims_another_size_is_a_fault(tmp_path: Path) -> None:
    store = Store(tmp_path, SETTINGS)
    wrong = [Job(job.content, job.size + 1, job.item) for job in jobs_of(store, 3)]
    with pytest.raises(AssertionError, match=f"has {wrong[0].size - 1} bytes, and its job says {wrong[0].size}"):
        run(store, wrong)
    assert store.contents() == set()


def test_stop(tmp_path: Path) -> None:
    store, said = Store(tmp_path, SETTINGS), list[str]()
    jobs = jobs_of(store, 60)
    built = run(store, jobs, said, stop=lambda: len(store.contents()) >= 10)
    assert built.stopped and 10 <= built.made == assert_right(store, jobs, whole=False) < 60
    assert said[-1].endswith(", stopped before the end") and no_thread_is_left()
    again = run(store, jobs)
    assert (again.made, again.found, again.stopped) == (60 - built.made, built.made, False)
    assert_right(store, jobs)


def test_lines_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_SECONDS", 0.0)
    store, said = Store(tmp_path, SETTINGS), list[str]()
    jobs = jobs_of(store, 110)
    for job in jobs[:10]:
        store.write(job.content, entry(job.content))
    run(store, jobs, said)
    first, *lines, last = said
    assert "110 images" in first and "100 images made" in last
    assert 5 <= len(lines) <= 10, said
    for line in lines:
        assert re.fullmatch(r"pixels: \d+ of 110 images, [0-9.]+ [kM]B/s, about [0-9.]+ s left", line), line


def test_durations_as_people_say_them() -> None:
    assert [in_time(s) for s in (0.04, 9.94, 42.3, 130, 3 * 3600 + 29)] == [
        "0.0 s",
        "9.9 s",
        "42 s",
        "2 min 10 s",
        "3 h 0 min",
    ]


def test_workers_are_needed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="workers 0 of a build: at least 1 is needed"):
        run(Store(tmp_path, SETTINGS), [], workers=0)


def test_too_little_room_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache", SETTINGS)
    jobs = [Job(job.content, 1 << 50, job.item) for job in jobs_of(store, 3)]
    with pytest.raises(BadInput) as caught:
        run(store, jobs, prepare=None)
    assert re.fullmatch(
        rf"{re.escape(str(store.folder))}: pixels of 3 images need 3445.3 TB of disk, and .* are free; make room, or "
        "choose another folder",
        str(caught.value),
    )
    assert not store.root.exists()


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
