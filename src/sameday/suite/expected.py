"""When each job will begin and end, as it stands now: what is left of it, on the GPUs that the runner would give it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sameday.spec.suite import Suite
from sameday.suite.local import count_gpus, place
from sameday.suite.predict import Estimate, remaining
from sameday.suite.schedule import Task, paths
from sameday.suite.state import JobState, SuiteFolder

NEVER = ("failed", "blocked", "cancelled")


@dataclass(frozen=True)
class Forecast:
    """Times are seconds since 1970. `why` says why the finish is not known."""

    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Begin and end of each job that is not done, where they are known."""
    finish: float | None = None
    low: float | None = None
    high: float | None = None
    why: str = ""


def forecast(suite: Suite, home: Path, folder: SuiteFolder, states: Mapping[str, JobState], now: float) -> Forecast:
    """Of the jobs that are left. While one of them failed, the end is not known: it waits for someone to mend it."""
    estimates = remaining(suite, home, folder, now=now)
    todo = [name for name in suite.jobs if states[name].state != "done"]
    done = set(suite.jobs) - set(todo)
    running = {name: states[name].gpus for name in todo if states[name].state == "running"}
    gpus, slots = _machine(suite, states)
    never = [name for name in todo if states[name].state in NEVER]

    def placed(which: str) -> dict[str, tuple[float, float]]:
        known = {name: getattr(estimates[name], which) for name in todo if name not in never}
        left = {name: seconds for name, seconds in known.items() if seconds is not None}
        return simulate(suite, left, {n: g for n, g in running.items() if n in left}, done, gpus, slots)

    usual, low, high = (placed(which) for which in ("seconds", "low", "high"))
    spans = {name: (now + begin, now + end) for name, (begin, end) in usual.items()}
    if not todo or set(usual) != set(todo):
        return Forecast(spans, why=_why(todo, never, estimates, usual, states))
    finish, least, most = (now + max(end for _, end in each.values()) for each in (usual, low, high))
    return Forecast(spans, finish, min(least, finish), max(most, finish))


def _machine(suite: Suite, states: Mapping[str, JobState]) -> tuple[int, int]:
    """GPUs and places of jobs without one. A scheduler is taken at its best: everything starts when it can."""
    if any(state.slurm for state in states.values()):
        return sum(job.gpus for job in suite.jobs.values()), len(suite.jobs)
    seen = max((gpu + 1 for state in states.values() for gpu in state.gpus), default=0)
    return (max(seen, count_gpus()) if suite.gpus is None else suite.gpus), suite.at_once


def _why(
    todo: Sequence[str],
    never: Sequence[str],
    estimates: Mapping[str, Estimate],
    placed: Collection[str],
    states: Mapping[str, JobState],
) -> str:
    if never:
        first = next((name for name in never if states[name].state != "blocked"), never[0])
        return f"{first} is {states[first].state}"
    unknown = [name for name in todo if estimates[name].seconds is None]
    if unknown:
        return f"{unknown[0]}: {estimates[unknown[0]].source}"
    stuck = [name for name in todo if name not in placed]
    return f"{stuck[0]} asks for GPUs that are not there" if stuck else ""


def simulate(
    suite: Suite,
    left: Mapping[str, float],
    running: Mapping[str, Sequence[int]],
    done: Collection[str],
    gpus: int,
    slots: int,
) -> dict[str, tuple[float, float]]:
    """Begin and end of each job in seconds from now, as the runner starts them, the longest path first. Jobs that could
    not begin are left out."""
    tasks = {name: Task(seconds, tuple(n for n in suite.needs(name) if n in left)) for name, seconds in left.items()}
    behind = paths(tasks)
    pins = {job.gpu for name, job in suite.jobs.items() if job.gpu is not None and name in left}
    busy = {name: list(given) for name, given in running.items()}
    spans = {name: (0.0, left[name]) for name in running}
    ended, clock = set(done), 0.0
    while True:
        ready = [name for name in left if name not in spans and ended.issuperset(suite.needs(name))]
        ready.sort(key=lambda name: -behind[name])
        taken = {gpu for given in busy.values() for gpu in given}
        none = sum(suite.jobs[name].gpus == 0 or not gpus for name in busy)
        for name, given in place(ready, suite, gpus, taken, slots - none, pins).items():
            busy[name], spans[name] = given, (clock, clock + left[name])
        if not busy:
            return spans
        first = min(busy, key=lambda name: spans[name][1])
        clock = spans[first][1]
        ended.add(first)
        del busy[first]
