"""All that there is to see of a suite at one moment, from its files alone. Each look reads what is new, and of that no
more than a bounded part: a running suite does not notice that it is watched."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sameday.record.folder import stage_folders
from sameday.record.metrics import is_step
from sameday.record.times import read_times
from sameday.report.charts import Point, thin
from sameday.report.gather import amount_of, number_of
from sameday.spec.errors import BadInput
from sameday.spec.suite import Suite, load_suite
from sameday.spec.words import visible
from sameday.suite.jobs import open_suite
from sameday.suite.running.slurm import current
from sameday.suite.state import JobState, SuiteFolder
from sameday.suite.times.expected import Expected, expected

TAIL = 2**16
"""Bytes of the end of a log that are read."""
CHUNK, CHUNKS = 2**20, 16
"""Bytes of a metrics.jsonl at once, and how often at one look; the rest waits for the next."""
LINES = 400
KEPT = 480
"""Points of a curve: ends, lows and highs stay."""
RECENT = 50
"""Steps of which a speed is the mean."""
ANEW, SOON, SELDOM = 10.0, 2.0, 10.0
"""Seconds after which predictions are made anew, after which at the earliest, and how many times what they took."""
PROGRESS = re.compile(r"^(?:step|answers) (\d{1,12})/(\d{1,12}) .*$", re.MULTILINE)
ANSWERED = re.compile(r"(\d{1,12}(?:\.\d+)?) questions/s")


@dataclass(frozen=True)
class Part:
    """A piece of a file, which file it was, and how many bytes that has."""

    file: tuple[int, int]
    size: int
    content: bytes


def read_part(path: Path, start: int, most: int) -> Part | None:
    """At most so many bytes from `start` on, or before the end where that is below zero; None where there is no file
    to be read."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without waiting for the other end of a pipe
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode):
                begin = max(0, status.st_size + start) if start < 0 else start
                return Part((status.st_dev, status.st_ino), status.st_size, os.pread(descriptor, most, begin))
        finally:
            os.close(descriptor)
    return None


def tail(path: Path) -> str:
    """The last lines of a log, as they can be shown."""
    part = read_part(path, -TAIL, TAIL)
    if part is None:
        return ""
    lines = part.content.decode("utf-8", "replace").splitlines()
    whole = lines if part.size <= TAIL else lines[1:]
    return "\n".join(visible(line) for line in whole[-LINES:])


class Growing:
    """A metrics.jsonl while its run goes on. A run that is resumed writes it anew: it is read anew then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin(None)

    def _begin(self, file: tuple[int, int] | None) -> None:
        self._file, self._offset = file, 0
        self.step = 0
        self.losses: list[Point] = []
        self.validation: list[Point] = []
        self.gpu: list[Point] = []
        self.recent: deque[tuple[float, float]] = deque(maxlen=RECENT)

    def look(self) -> None:
        for _ in range(CHUNKS):
            part = read_part(self.path, self._offset, CHUNK)
            if part is None:
                if self._file is not None:
                    self._begin(None)
                return
            if part.file != self._file or part.size < self._offset:
                again = self._offset > 0
                self._begin(part.file)
                if again:
                    continue
            whole, newline, _ = part.content.rpartition(b"\n")
            if not newline and len(part.content) == CHUNK:
                whole = part.content  # no record is that long: passed over
            self._offset += len(whole) + len(newline)
            for line in whole.split(b"\n"):
                self._take(line)
            if not whole or self._offset >= part.size:
                return

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(record, dict) or not is_step(record.get("step")):
            return
        step = int(record["step"])
        loss = number_of(record, "loss")
        if record.get("split") is not None:
            if record["split"] == "val" and loss is not None:
                self.validation = _added(self.validation, (step, loss))
            return
        self.step = step
        if loss is not None:
            self.losses = _added(self.losses, (step, loss))
        if (use := amount_of(record, "gpu")) is not None:
            self.gpu = _added(self.gpu, (step, min(use, 100)))
        seconds, samples = amount_of(record, "seconds"), amount_of(record, "samples")
        if seconds and samples is not None:
            self.recent.append((seconds, samples))

    @property
    def pace(self) -> float | None:
        """Seconds of a step."""
        return sum(seconds for seconds, _ in self.recent) / len(self.recent) if self.recent else None

    @property
    def rate(self) -> float | None:
        """Samples a second."""
        return sum(samples for _, samples in self.recent) / sum(s for s, _ in self.recent) if self.recent else None


def _added(points: list[Point], point: Point) -> list[Point]:
    points.append(point)
    return points if len(points) < 4 * KEPT else thin(points, KEPT)


@dataclass
class JobView:
    """One job. Times are seconds since 1970, `left` is seconds; None is what nobody knows."""

    name: str
    do: str
    needs: list[str]
    asked_gpus: int
    state: JobState
    step: int | None = None
    total: int | None = None
    unit: str = "step"
    loss: float | None = None
    rate: float | None = None
    gpu: float | None = None
    left: float | None = None
    begins: float | None = None
    """As predicted, where it has not begun."""
    finish: float | None = None
    """As predicted, where it is not done."""
    spent: float = 0.0
    gpu_hours: float = 0.0
    losses: list[Point] = field(default_factory=list)
    validation: list[Point] = field(default_factory=list)
    use: list[Point] = field(default_factory=list)
    last: str = ""
    """Its log's last line."""


@dataclass
class SuiteView:
    """All jobs, in the file's order."""

    name: str
    out: str
    now: float
    began: float | None
    deadline: float | None
    finish: float | None
    earliest: float | None
    latest: float | None
    unknown: str
    """Why the finish is not known."""
    jobs: list[JobView]
    rest: float | None = None
    """When the jobs end that can still run, where others failed."""
    problem: str = ""
    """What is wrong with the suite's file now, where it was changed since it was read."""


class Snapshot:
    """A suite's files, looked at again and again."""

    def __init__(self, path: Path, out: Path | None, now: Callable[[], float] = time.time) -> None:
        self._now, self._problem = now, ""
        self.opened = open_suite(path, out)
        self._version = self._file_version()
        self._records: dict[Path, Growing] = {}
        self._totals: dict[str, int] = {}
        self._tails: dict[str, tuple[Any, str]] = {}
        self._foreseen, self._foreseen_at = Expected(), -math.inf
        self._foreseen_of: tuple[Any, float] = ((), 0.0)

    @property
    def suite(self) -> Suite:
        return self.opened.suite

    @property
    def folder(self) -> SuiteFolder:
        return self.opened.folder

    def look(self) -> SuiteView:
        self._read_again()
        states, now = current(self.opened), self._now()
        jobs = [self._job(name, state, now) for name, state in states.items()]
        began = self.folder.began()
        if began is None or not 0 <= began < 1e12:  # who runs it did not say when
            began = min((job.state.started for job in jobs if job.state.started is not None), default=None)
        deadline = None if began is None or self.suite.deadline is None else began + self.suite.deadline
        ahead = self._expected(states, now)
        for job in jobs:
            _foresee(job, ahead, now)
        finish = ahead.finish
        if all(job.state.state == "done" for job in jobs):
            finish = max((job.state.ended for job in jobs if job.state.ended is not None), default=None)
        return SuiteView(
            name=str(self.suite.name),
            out=str(self.folder.path),
            now=now,
            began=began,
            deadline=deadline,
            finish=finish,
            earliest=ahead.low,
            latest=ahead.high,
            unknown=ahead.why,
            jobs=jobs,
            rest=ahead.rest,
            problem=self._problem,
        )

    def _expected(self, states: Mapping[str, JobState], now: float) -> Expected:
        """Made anew now and then, and when a job changed its state: it reads more than the rest."""
        seen = tuple((name, state.state, state.attempt) for name, state in states.items())
        began = time.monotonic()
        age, (before, took) = began - self._foreseen_at, self._foreseen_of
        if age < (ANEW if seen == before else SOON) + SELDOM * took:
            return self._foreseen
        try:
            self._foreseen = expected(self.opened, states, now)
        except Exception as error:  # whatever stands in the files of a stranger: a guess must not end the page
            self._foreseen = Expected(why=f"no prediction: {error}")
        self._foreseen_at = time.monotonic()
        self._foreseen_of = seen, self._foreseen_at - began
        return self._foreseen

    def log(self, name: str) -> str:
        """The end of a job's log."""
        assert name in self.suite.jobs  # it becomes a path
        return self._tail(name)

    def _file_version(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            status = self.opened.path.stat()
            return status.st_mtime_ns, status.st_size
        return None

    def _read_again(self) -> None:
        """A suite may be given more jobs while it runs."""
        if (version := self._file_version()) == self._version:
            return
        self._version = version
        try:
            suite = load_suite(self.opened.path)
        except (BadInput, OSError) as error:
            self._problem = f"the suite's file was changed, and cannot be read any more: {error}"
            return
        self.opened, self._problem = self.opened._replace(suite=suite), ""

    def _job(self, name: str, state: JobState, now: float) -> JobView:
        job = self.suite.jobs[name]
        # One that began on this machine without a GPU has used none, whatever it asks for elsewhere.
        without = state.attempt > 0 and not state.gpus and state.slurm is None
        view = JobView(name, job.do, self.suite.needs(name), 0 if without else job.gpus * job.nodes, state)
        running = state.state == "running" and state.started is not None
        view.spent = state.spent + (max(0.0, now - float(state.started or now)) if running else 0.0)
        view.gpu_hours = view.spent * view.asked_gpus / 3600
        if state.state == "waiting" and not state.attempt:
            return view
        log = self._tail(name)
        view.last = log.rpartition("\n")[2][:300]
        if job.do == "train":
            self._trained(view)
        said = [*PROGRESS.finditer(log)]
        if said:
            last = said[-1]
            if job.do == "eval":
                view.step, view.unit = int(last[1]), "question"
                rates = ANSWERED.findall(last[0])
                view.rate = float(rates[-1]) if rates else None
            self._totals[name] = int(last[2])
        view.total = self._totals.get(name) or self._noted_total(view)
        if state.state == "done" and view.total is not None and job.do == "eval":
            view.step = view.total
        if view.total is not None and view.step is not None and running:
            self._time_left(view)
        return view

    def _noted_total(self, view: JobView) -> int | None:
        """As the run itself notes at its start, before its first line."""
        if view.step is None or view.do != "train":
            return None
        run = self.folder.run(view.name)
        noted = [each.get("total") for each in read_times((stage_folders(run) or [run])[-1])]
        totals = [each for each in noted if isinstance(each, int) and is_step(each)]
        if totals:
            self._totals[view.name] = totals[-1]
        return self._totals.get(view.name)

    def _tail(self, name: str) -> str:
        """A log that did not grow is not read again."""
        path = self.folder.log(name)
        try:
            status = path.stat()
        except OSError:
            return ""
        version = (status.st_ino, status.st_size, status.st_mtime_ns)
        if self._tails.get(name, (None, ""))[0] != version:
            self._tails[name] = version, tail(path)
        return self._tails[name][1]

    def _trained(self, view: JobView) -> None:
        """The stages of a run one after another."""
        run = self.folder.run(view.name)
        before = 0
        for folder in stage_folders(run) or [run]:
            records = self._records.setdefault(folder, Growing(folder / "metrics.jsonl"))
            records.look()
            for own, shown in (
                (records.losses, view.losses),
                (records.validation, view.validation),
                (records.gpu, view.use),
            ):
                shown += [(before + step, value) for step, value in own]
            if records.step:
                view.step, view.rate = records.step, records.rate
                view.loss = records.losses[-1][1] if records.losses else None
                view.gpu = records.gpu[-1][1] if records.gpu else None
            before += records.step

    def _time_left(self, view: JobView) -> None:
        assert view.total is not None and view.step is not None
        todo = max(0, view.total - view.step)
        if view.unit == "question":
            view.left = todo / view.rate if view.rate else None
            return
        folders = stage_folders(self.folder.run(view.name)) or [self.folder.run(view.name)]
        pace = self._records[folders[-1]].pace if folders[-1] in self._records else None
        view.left = None if pace is None else todo * pace


def _foresee(job: JobView, ahead: Expected, now: float) -> None:
    """What is known from the records of all, before what the job's own last steps say."""
    state = job.state.state
    if job.name in ahead.spans and state != "done":
        begins, job.finish = ahead.spans[job.name]
        if state == "running":
            job.left = max(0.0, job.finish - now)
        else:
            job.begins = begins
    elif job.left is not None:
        job.finish = now + job.left


def plain_view(view: SuiteView) -> dict[str, Any]:
    """As JSON has it, without curves, which are drawn."""
    jobs = []
    for job in view.jobs:
        state = {key: value for key, value in vars(job.state).items() if key not in ("asked", "pid")}
        drawn = ("state", "losses", "validation", "use")
        jobs.append({key: value for key, value in vars(job).items() if key not in drawn} | state | {"spent": job.spent})
    return {**{key: value for key, value in vars(view).items() if key != "jobs"}, "jobs": jobs}
