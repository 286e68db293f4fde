"""When jobs of a suite that is under way will begin and end: the forecast that `sameday suite plan` makes, corrected by
what has happened since, for whoever watches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sameday.spec.suite import Suite
from sameday.suite.jobs import OpenSuite
from sameday.suite.running.gpus import count_gpus
from sameday.suite.state import JobState
from sameday.suite.times.forecast import forecast
from sameday.suite.times.predict import Predictor


@dataclass(frozen=True)
class Expected:
    """Times are seconds since 1970. `why` says why the finish is not known."""

    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Begin and end of jobs that are not done, where they are known."""
    finish: float | None = None
    low: float | None = None
    high: float | None = None
    why: str = ""


def expected(opened: OpenSuite, states: Mapping[str, JobState], now: float) -> Expected:
    """While a job has failed, or nobody knows how long one takes, only those that run have an end."""
    suite, gpus = _machine(opened.suite, states)
    opened = opened._replace(suite=suite)
    found = forecast(opened, gpus, Predictor(suite, opened.home, opened.folder, now=now), advise=False)
    todo = [name for name in suite.jobs if states[name].state != "done"]
    why = _why(todo, states, {name: found.estimates[name].source for name in found.unknown})
    placed = {name: found.schedule.placed[name] for name in todo if name not in found.unknown}
    spans = {
        name: (now + each.start, now + each.end)
        for name, each in placed.items()
        if not why or states[name].state == "running"
    }
    if why or not todo:
        return Expected(spans, why=why)
    return Expected(spans, now + found.seconds, now + found.low, now + found.high)


def _machine(suite: Suite, states: Mapping[str, JobState]) -> tuple[Suite, int]:
    """With the number of its GPUs. A scheduler is taken at its best: every job starts when it can."""
    if any(state.slurm for state in states.values()):
        return suite.model_copy(update={"at_once": len(suite.jobs)}), sum(job.gpus for job in suite.jobs.values())
    seen = max((gpu + 1 for state in states.values() for gpu in state.gpus), default=0)
    return suite, max(seen, count_gpus()) if suite.gpus is None else suite.gpus


def _why(todo: list[str], states: Mapping[str, JobState], unknown: Mapping[str, str]) -> str:
    """What the finish waits for; nothing where it is known."""
    for bad in ("failed", "cancelled", "blocked"):
        for name in todo:
            if states[name].state == bad:
                return f"{name} is {bad}"
    return next((f"{name}: {unknown[name]}" for name in todo if name in unknown), "")
