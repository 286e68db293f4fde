"""A cache is filled whatever comes in between: errors, interrupts, images that went away."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import pytest
from builds import SETTINGS, assert_right, entry, finish, jobs_of, no_thread_is_left, parts, prepare, run
from torch import Tensor

from sameday.cache import build as module
from sameday.cache.build import Built, Job, estimate, in_time
from sameday.cache.store import Store, in_bytes
from sameday.spec.errors import BadInput


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
