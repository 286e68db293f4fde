"""When jobs of a suite that is under way will begin and end: the forecast that `sameday suite plan` makes, corrected by
what has happened since, for whoever watches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sameday.spec.suite import Suite
from sameday.suite.jobs import OpenSuite
from sameday.suite.running.gpus import count_gpus
from sameday.suite.state import JobState, State
from sameday.suite.times.forecast import make_forecast
from sameday.suite.times.predict import Predictor

LOST: tuple[State, ...] = ("failed", "cancelled", "blocked")
"""Jobs that nobody runs until the next `suite run`, the cause before what it leads to."""


@dataclass(frozen=True)
class Expected:
    """Times are seconds since 1970. `why` says why the finish is not known."""

    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Begin and end of jobs that are not done, where they are known."""
    rest: float | None = None
    """When the jobs end that can still run, where others failed or were cancelled."""
    finish: float | None = None
    low: float | None = None
    high: float | None = None
    why: str = ""


def expected(opened: OpenSuite, states: Mapping[str, JobState], now: float) -> Expected:
    """While a job has failed, the end of all is not known, but that of the others is. While nobody knows how long one
    takes, only those that run have an end."""
    suite, gpus = _machine(opened.suite, states)
    lost = {name: states[name].state for name in suite.jobs if states[name].state in LOST}
    suite = suite.model_copy(update={"jobs": {name: job for name, job in suite.jobs.items() if name not in lost}})
    opened = opened._replace(suite=suite)
    forecast = make_forecast(opened, gpus, Predictor(suite, opened.home, opened.folder, now=now), advise=False)
    todo = [name for name in suite.jobs if states[name].state != "done"]
    unknown = next((f"{name}: {forecast.estimates[name].source}" for name in todo if name in forecast.unknown), "")
    first = min(lost, key=lambda name: LOST.index(lost[name]), default=None)
    spans = {
        name: (now + forecast.schedule.placed[name].start, now + forecast.schedule.placed[name].end)
        for name in todo
        if name not in forecast.unknown and (not unknown or states[name].state == "running")
    }
    if first is not None:
        rest = now + forecast.seconds if todo and not unknown else None
        return Expected(spans, rest, why=f"{first} is {lost[first]}")
    if unknown or not todo:
        return Expected(spans, why=unknown)
    return Expected(spans, None, now + forecast.seconds, now + forecast.low, now + forecast.high)


def _machine(suite: Suite, states: Mapping[str, JobState]) -> tuple[Suite, int]:
    """With the number of its GPUs. A scheduler is taken at its best: every job starts when it can."""
    if any(state.slurm for state in states.values()):
        return suite.model_copy(update={"at_once": len(suite.jobs)}), sum(job.gpus for job in suite.jobs.values())
    seen = max((gpu + 1 for state in states.values() for gpu in state.gpus), default=0)
    return suite, max(seen, count_gpus()) if suite.gpus is None else suite.gpus
