"""`sameday suite run` on this machine: jobs that are ready start on free GPUs, each in a session of its own. All that
is known about them is in files: a runner that was killed leaves jobs that go on, and the next one waits for these."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sameday.hardware.signals import taken
from sameday.spec.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED, BadInput, refuse
from sameday.spec.suite import Suite
from sameday.spec.words import clock, count, first_names, tell
from sameday.suite.jobs import OpenSuite, result_of
from sameday.suite.running.execute import begun_otherwise, changed, ending, last_lines
from sameday.suite.running.gpus import count_gpus
from sameday.suite.state import QUIET, JobState, ask_to_stop, take
from sameday.suite.times.machine import Task
from sameday.suite.times.predict import remaining
from sameday.suite.times.schedule import priority
from sameday.suite.times.work import wrong

PAUSE = 0.2
"""Seconds between two looks at the files."""
TRIES = 3
"""How often one runner starts a job whose process vanished without a word."""


TOLD = 8
"""Last lines of a failed job that are told at once; the status has more of them."""


def run(opened: OpenSuite, gpus: int | None = None, again: Collection[str] = (), say: Any = tell) -> int:
    """Until nothing more can be done: 0 where all jobs are done, 75 where it was stopped, else 1."""
    suite = opened.suite
    there = gpus_here(suite, gpus)
    if not opened.folder.path.exists():  # what is refused leaves no folder behind
        check(opened, there, again)
    with only_runner(opened):
        check(opened, there, again)
        for name in after(suite, again):
            put_aside(opened, name, say)
        for name, state in take_up(opened).items():
            say(f"{name}: {state}")
        opened.folder.begin()
        say(_header(opened, there))
        left = {name: each.seconds for name, each in remaining(suite, opened.home, opened.folder).items()}
        order = starting_order(suite, there, left)
        with _Asked() as asked:
            return Runner(opened, there, order, say, asked).run()


# Before anything begins


@contextlib.contextmanager
def only_runner(opened: OpenSuite) -> Iterator[None]:
    path = opened.folder.path / "runner.lock"
    lock = take(path)
    if lock is None:
        pid, _, more = path.read_text(encoding="utf-8", errors="replace").strip().partition(" ")
        raise BadInput(
            f"{opened.folder.path}: process {pid or 'unknown'} {more} runs this suite already; `sameday suite status` "
            "shows how far it is, and another --out begins it anew"
        )
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(lock)


def gpus_here(suite: Suite, asked: int | None = None) -> int:
    """How many GPUs jobs are given. Where the machine has none, the suite's number says how many jobs of one GPU run at
    once; without a number they take the places of jobs that need no GPU."""
    wanted, there = suite.gpus if asked is None else asked, count_gpus()
    if there == 0:
        return wanted or 0
    if wanted is not None and wanted > there:
        raise BadInput(f"gpus is {wanted}, and this machine has {there}; allowed: 0 to {there}")
    return there if wanted is None else wanted


def check(opened: OpenSuite, gpus: int, again: Collection[str], here: bool = True) -> None:
    """All problems at once, those included that a job would find hours later. `here` is where data must be."""
    suite, folder = opened.suite, opened.folder
    problems = [
        f"--again {name}: is no job of this suite; there are {', '.join(suite.jobs)}"
        for name in again
        if name not in suite.jobs
    ]
    for name, job in suite.jobs.items() if gpus else ():
        if job.gpus > gpus:
            problems.append(f"{name} needs {job.gpus} GPUs, and there are {gpus}")
        if job.gpu is not None and job.gpu >= gpus:
            problems.append(f"{name} wants GPU {job.gpu}, and there are {gpus}: 0 to {gpus - 1}")
    anew = set(after(suite, [name for name in again if name in suite.jobs]))
    problems += [f"{name} runs; cancel it before --again" for name in sorted(anew) if folder.held(name)]
    for name in suite.jobs:
        if name in anew or folder.read(name).state != "done":
            lines = wrong(suite, opened.home, folder, name, here)
            problems += [f"{name}: {line}" for line in lines]
            if name not in anew and not lines and (other := begun_otherwise(opened, name)) is not None:
                problems.append(other)
        elif (changes := changed(opened, name)) is not None:
            problems.append(changes)
    refuse(problems)


def after(suite: Suite, names: Collection[str]) -> list[str]:
    """These jobs and all that wait for them, whose outcome would be another."""
    chosen: set[str] = set(names)
    for name in suite.order():
        if chosen & set(suite.needs(name)):
            chosen.add(name)
    return [name for name in suite.jobs if name in chosen]


def put_aside(opened: OpenSuite, name: str, say: Any = tell) -> None:
    """What a job made so far goes to OUT/earlier, whole."""
    job = opened.folder.job(name)
    if not job.exists():
        return
    earlier = opened.folder.path / "earlier"
    earlier.mkdir(parents=True, exist_ok=True)
    number = 1
    while (place := earlier / f"{name}-{number}").exists():
        number += 1
    shutil.move(job, place)
    say(f"{name}: begins anew; what it made before is in {place}")


def take_up(opened: OpenSuite) -> dict[str, str]:
    """Jobs that failed or were cancelled wait again, and so do those that waited for them, and those whose result was
    removed: what needs it is not done anew, since the same result comes out."""
    found: dict[str, str] = {}
    folder = opened.folder
    for name in opened.suite.jobs:
        before = folder.read(name)
        gone = before.state == "done" and before.made and not result_of(opened.suite, folder, name).exists()
        if (before.state in ("failed", "blocked", "cancelled") or gone) and not folder.held(name):
            folder.change(name, state="waiting", why="")
            if before.state != "blocked":
                result = result_of(opened.suite, folder, name)
                found[name] = f"done again, since {result} is gone" if gone else f"{before.state}, and tried again"
    return found


def _header(opened: OpenSuite, gpus: int) -> str:
    suite, real = opened.suite, count_gpus()
    done = sum(opened.folder.read(name).state == "done" for name in suite.jobs)
    before = f", {done} of them done before" if done else ""
    places = gpus or suite.at_once
    where = count(gpus, "GPU") if gpus and real else f"no GPU here, {count(places, 'job')} at once on the CPU"
    return f"{suite.name} in {opened.folder.path}: {count(len(suite.jobs), 'job')}{before}; {where}"


# While it runs


def starting_order(suite: Suite, gpus: int, seconds: Mapping[str, float | None] | None = None) -> list[str]:
    """As the schedule starts jobs that take so long; one of which nothing is known is taken for as long as the longest
    of the others."""
    told = {name: (seconds or {}).get(name) for name in suite.jobs}
    most = max((each for each in told.values() if each is not None), default=1.0) or 1.0
    tasks = {
        name: Task(
            most if told[name] is None else float(told[name] or 0.0),
            tuple(suite.needs(name)),
            job.gpus if gpus else 0,
            (job.gpu,) if gpus and job.gpu is not None else None,
        )
        for name, job in suite.jobs.items()
    }
    return priority(tasks, gpus, suite.at_once)


def place(
    ready: Sequence[str], suite: Suite, gpus: int, busy: Collection[int], slots: int, wanted: Collection[int] = ()
) -> dict[str, list[int]]:
    """Which of the ready jobs, best first, start now and on which GPUs; `slots` are free places of jobs without one. A
    job of several GPUs keeps those that are free until they suffice, and GPUs that are `wanted` by name go last."""
    free = sorted(set(range(gpus)) - set(busy), key=lambda gpu: (gpu in wanted, gpu))
    placed: dict[str, list[int]] = {}
    for name in ready:
        job = suite.jobs[name]
        if job.gpus == 0 or gpus == 0:
            if slots > 0:
                slots -= 1
                placed[name] = []
        elif job.gpu is not None:
            if job.gpu in free:
                free.remove(job.gpu)
                placed[name] = [job.gpu]
        elif job.gpus <= len(free):
            placed[name], free = sorted(free[: job.gpus]), free[job.gpus :]
        else:
            free = []
    return placed


class _Asked:
    """Ctrl-C, SIGTERM or the warning of a batch system: jobs are asked to stop. A second Ctrl-C does not wait for them.
    A terminal that is closed stops nothing: jobs have sessions of their own, and what waits would be left out."""

    def __init__(self) -> None:
        self.stop = False

    def __enter__(self) -> _Asked:
        asking = [number for number in taken() if number != signal.SIGHUP]
        self._before: dict[int, Any] = {number: signal.signal(number, self._ask) for number in asking}
        self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _frame: Any) -> None:
        if self.stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.stop = True


@dataclass
class Started:
    process: subprocess.Popen[bytes]
    gpus: list[int]
    attempt: int
    """The job's last one before this."""
    log: int
    """Where its own part of the log begins."""


@dataclass
class Runner:
    """Starts what is ready and tells every change of state."""

    opened: OpenSuite
    gpus: int
    order: list[str]
    say: Any
    asked: _Asked
    mine: dict[str, Started] = field(default_factory=dict)
    tries: dict[str, int] = field(default_factory=dict)
    told: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def run(self) -> int:
        told_stop = False
        try:
            while True:
                for name in [name for name, each in self.mine.items() if each.process.poll() is not None]:
                    self._ended(name, self.mine.pop(name))
                held = {name for name in self.opened.suite.jobs if self.opened.folder.held(name)}
                states = self.opened.folder.states(self.opened.suite)
                # One that runs from before, and is stopped by somebody, is not begun again by this runner.
                before = [name for name in held - self.mine.keys() if states[name].state == "running"]
                self.tries |= {name: 1 for name in before if not self.tries.get(name)}
                self._tell(states, held)
                if self.asked.stop and not told_stop:
                    told_stop = True
                    self._stop(held)
                started = not self.asked.stop and self._start(states, held)
                if not started and not self.mine and not held:
                    return self._finish(states)
                time.sleep(PAUSE)
        except KeyboardInterrupt:
            self.say("left without waiting; jobs that were asked to stop save themselves and leave")
            return EXIT_STOPPED

    def _start(self, states: Mapping[str, JobState], held: Collection[str]) -> bool:
        suite, folder = self.opened.suite, self.opened.folder
        ready = [name for name in self.order if self._ready(name, states, held)]
        if not ready:
            return False
        others = [states[name].gpus for name in held - self.mine.keys() if states[name].state == "running"]
        busy = {gpu for each in (*others, *(own.gpus for own in self.mine.values())) for gpu in each}
        busy |= folder.busy_gpus()
        none = [name for name in self.mine.keys() | held if suite.jobs[name].gpus == 0 or not self.gpus]
        pins = {job.gpu for name, job in suite.jobs.items() if job.gpu is not None and states[name].state != "done"}
        placed = place(ready, suite, self.gpus, busy, suite.at_once - len(none), pins)
        for name, gpus in placed.items():
            self._begin(name, gpus, states[name].attempt)
        return bool(placed)

    def _ready(self, name: str, states: Mapping[str, JobState], held: Collection[str]) -> bool:
        if name in self.mine or name in held:
            return False
        if any(states[each].state != "done" for each in self.opened.suite.needs(name)):
            return False
        state, tries = states[name].state, self.tries.get(name, 0)
        return (state in ("waiting", "queued", "stopped", "interrupted") and tries == 0) or (
            state == "interrupted" and tries < TRIES
        )

    def _begin(self, name: str, gpus: list[int], attempt: int) -> None:
        folder = self.opened.folder
        self.tries[name] = self.tries.get(name, 0) + 1
        words = ["-m", "sameday.suite.running.execute", str(self.opened.path), str(folder.path), name]
        numbers = ",".join(map(str, gpus))
        folder.job(name).mkdir(parents=True, exist_ok=True)
        with folder.log(name).open("ab") as log:
            end = log.tell()
            process = subprocess.Popen(
                [sys.executable, *words, "--gpus", numbers],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.mine[name] = Started(process, gpus, attempt, end)

    def _ended(self, name: str, started: Started) -> None:
        """One that could not even begin says nothing itself."""
        folder = self.opened.folder
        state = folder.read(name)
        begun = state.attempt > started.attempt or state.state in ("done", "blocked", "cancelled")
        code = started.process.returncode
        if code in (EXIT_OK, EXIT_STOPPED) or begun or self.asked.stop or folder.held(name):
            return
        why = [f"it did not begin, {ending(code)}", *last_lines(folder.log(name), started.log)]
        folder.change(name, state="failed", why="\n".join(why), code=code)

    def _stop(self, held: Collection[str]) -> None:
        running = sorted(self.mine.keys() | set(held))
        self.say(f"asked to stop: {first_names(running) or 'nothing runs'}")
        for name in running:
            if name in self.mine:
                with contextlib.suppress(ProcessLookupError):
                    self.mine[name].process.terminate()
            else:
                ask_to_stop(self.opened.folder, name)

    def _tell(self, states: Mapping[str, JobState], held: Collection[str]) -> None:
        for name, state in states.items():
            now = (state.state, state.attempt, state.why)
            if self.told.get(name) == now:
                continue
            first, self.told[name] = name not in self.told, now
            if first and state.state in ("waiting", "done"):
                continue
            also = ", from before" if first and state.state == "running" and name not in self.mine else ""
            also += f", on {state.host}" if also and state.host != socket.gethostname() else ""
            self.say(f"{time.strftime('%H:%M:%S')}  {name}: {told(state)}{also}")

    def _finish(self, states: Mapping[str, JobState]) -> int:
        code = exit_code(states)
        self.say(summary(states))
        for name, state in states.items():
            if state.state == "running":
                self.say(
                    f"{name} began on {state.host}, and nobody here holds it. If that machine is gone, `sameday suite "
                    f"cancel` with its name frees it now; by itself it counts as interrupted "
                    f"{QUIET / 60:.0f} minutes after its last line"
                )
        return code


def told(state: JobState) -> str:
    """One state in words, and the last lines of one that failed."""
    if state.state == "running":
        where = f" on GPU {', '.join(map(str, state.gpus))}" if state.gpus else ""
        return f"running{where}" + (f", attempt {state.attempt}" if state.attempt > 1 else "")
    if state.state == "done":
        return f"done in {clock(state.spent)}"
    if state.state == "failed":
        first, *lines = state.why.splitlines() or [""]
        return "\n".join([f"failed, {first}", *(f"    {line}" for line in lines[-TOLD:])])
    if state.state == "interrupted":
        return "interrupted: its process is gone, and did not say why"
    return f"{state.state}: {state.why}" if state.why else state.state


def exit_code(states: Mapping[str, JobState]) -> int:
    kinds = {state.state for state in states.values()}
    if kinds == {"done"}:
        return EXIT_OK
    return EXIT_FAILED if kinds & {"failed", "interrupted"} else EXIT_STOPPED


def summary(states: Mapping[str, JobState]) -> str:
    by_state: dict[str, list[str]] = {}
    for name, state in states.items():
        by_state.setdefault(state.state, []).append(name)
    done = len(by_state.pop("done", []))
    rest = "".join(f"; {state}: {first_names(names)}" for state, names in by_state.items())
    more = ". `sameday suite run` goes on with what is missing, and tries failed jobs again" if rest else ""
    return f"{done} of {len(states)} done{rest}{more}"
