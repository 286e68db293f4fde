"""`sameday suite plan`: the graph in order, each job's time and GPU, the end, what it waits for, and the deadline."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from sameday.commands.batch import too_few
from sameday.hardware.signals import orderly_end
from sameday.spec.errors import BadInput, refuse
from sameday.spec.suite import Suite
from sameday.spec.words import clock, count, tell, when
from sameday.suite.jobs import OpenSuite
from sameday.suite.running.execute import begun_otherwise, changed
from sameday.suite.running.local import gpus_here
from sameday.suite.state import JobState
from sameday.suite.times.elsewhere import Elsewhere, known_gpu
from sameday.suite.times.machine import Task
from sameday.suite.times.measure import measure
from sameday.suite.times.measured import Measured, keep_measured
from sameday.suite.times.predict import Estimate, Predictor
from sameday.suite.times.remedies import Changeable, Remedy, by_image, cached, remedies
from sameday.suite.times.schedule import Schedule, schedule
from sameday.suite.times.unknown import key_of, unknown
from sameday.suite.times.work import Training, Work, wrong

WIDTH = 100
"""Columns of a line."""
Say = Callable[[str], Any]


@dataclass(frozen=True)
class Forecast:
    """From `now` on. `low` and `high` are when it ends if all jobs take the least, and the most; jobs in `unknown` are
    counted as if they took no time."""

    suite: Suite
    gpus: int
    now: float
    states: Mapping[str, JobState]
    estimates: Mapping[str, Estimate]
    schedule: Schedule
    low: float
    high: float
    left: float | None
    """Until the deadline; None where there is none."""
    remedies: tuple[Remedy, ...] = ()
    elsewhere: Elsewhere | None = None

    @property
    def unknown(self) -> list[str]:
        return [name for name, each in self.estimates.items() if each.seconds is None]

    @property
    def seconds(self) -> float:
        return self.schedule.seconds

    @property
    def holds(self) -> bool | None:
        """Whether the deadline does; None where that is not known."""
        if self.left is None or (self.unknown and self.seconds <= self.left):
            return None
        return self.seconds <= self.left


def tasks(
    suite: Suite, estimates: Mapping[str, Estimate], states: Mapping[str, JobState], gpus: int, which: str = "seconds"
) -> dict[str, Task]:
    """Jobs for the schedule, with what is left of them. Without GPUs all of them take slots."""
    made = {}
    for name, job in suite.jobs.items():
        on = job.gpus if gpus else 0
        pinned: tuple[int, ...] | None = (job.gpu,) if job.gpu is not None and on else None
        running, held = states[name].state == "running", tuple(states[name].gpus)
        if running and on and len(held) == on and max(held) < gpus:
            pinned = held
        running = running and (pinned is not None or not on)
        made[name] = Task(getattr(estimates[name], which) or 0.0, tuple(suite.needs(name)), on, pinned, running)
    return made


def make_forecast(opened: OpenSuite, gpus: int, predictor: Predictor, advise: bool = True) -> Forecast:
    """Without advice it takes milliseconds: the schedule is not searched for either."""
    suite = opened.suite
    estimates, states, now = predictor.left(), predictor.states, predictor.moment
    made = _scheduled(tasks(suite, estimates, states, gpus), gpus, suite.at_once, advise)
    ends = [
        _scheduled(tasks(suite, estimates, states, gpus, which), gpus, suite.at_once, advise).seconds
        for which in ("low", "high")
    ]
    began = opened.folder.began() if predictor.elsewhere is None else None
    left = None if suite.deadline is None else suite.deadline - (0.0 if began is None else now - began)
    low, high = min(ends[0], made.seconds), max(ends[1], made.seconds)
    forecast = Forecast(suite, gpus, now, states, estimates, made, low, high, left, elsewhere=predictor.elsewhere)
    if not advise or left is None or left <= 0 or forecast.holds is not False or not made.seconds:
        return forecast

    def end(other: Suite, number: int) -> float | None:
        changed = replace(predictor, suite=other, now=now, _works={})
        each = changed.left()
        if any(one.seconds is None and estimates[name].seconds is not None for name, one in each.items()):
            return None
        return _scheduled(tasks(other, each, states, number), number, other.at_once).seconds

    known = {name: each for name, each in changeable(suite, predictor).items() if name not in forecast.unknown}
    return replace(forecast, remedies=tuple(remedies(suite, gpus, left, known, end)))


def _scheduled(jobs: Mapping[str, Task], gpus: int, slots: int, search: bool = True) -> Schedule:
    try:
        return schedule(jobs, gpus, slots, search)
    except ValueError as error:
        raise BadInput(f"{error}; --gpus plans for another number") from None


def changeable(suite: Suite, predictor: Predictor) -> dict[str, Changeable]:
    trainings = {}
    for name, job in suite.jobs.items():
        work, state = predictor.work(name), predictor.states[name]
        if job.do == "train" and isinstance(work, Work) and work.recipe is not None and not state.attempt:
            first = work.trainings[0]
            trainings[name] = Changeable(work.recipe, first.plan, first.automatic, job.expected is not None)
    return trainings


# As people read it


def lines(forecast: Forecast) -> Iterator[str]:
    suite = forecast.suite
    machine = count(forecast.gpus, "GPU") if forecast.gpus else f"no GPU, {count(suite.at_once, 'job')} at once"
    if forecast.elsewhere is not None:
        machine += f" {forecast.elsewhere.gpu.name}, which is AN ESTIMATE from another GPU"
    yield f"{suite.name}: {count(len(suite.jobs), 'job')} on {machine}"
    yield from _table(forecast)
    if all(state.state == "done" for state in forecast.states.values()):
        yield "all jobs are done"
        return
    yield from _sources(forecast)
    if forecast.unknown and not forecast.seconds:
        yield "finish        not known"
        if forecast.left is not None:
            yield from _wrapped("deadline      ", _deadline(forecast))
        return
    least = "at least " if forecast.unknown or any(each.lacks for each in forecast.estimates.values()) else ""
    at = when(forecast.now + forecast.seconds, forecast.now)
    between = f" ({clock(forecast.low)} to {clock(forecast.high)})" if forecast.high > forecast.low else ""
    yield f"finish        {least}{clock(forecast.seconds)} from now{between}, at {at}"
    kind = "no other is shorter" if forecast.schedule.best else "longest path first"
    yield f"schedule      {kind}; no schedule here can end before {clock(forecast.schedule.bound)}"
    yield from _wrapped("critical path ", " ".join(_chain(forecast)))
    if forecast.left is not None:
        yield from _wrapped("deadline      ", _deadline(forecast))


def _remedies(forecast: Forecast) -> Iterator[str]:
    if forecast.holds is not False or forecast.left is None or forecast.left <= 0:
        return
    if any(remedy.holds is not False for remedy in forecast.remedies):
        yield "what would make it hold:"
    else:
        yield "nothing that is known here makes it hold" + (":" if forecast.remedies else "")
    for remedy in forecast.remedies:
        yield from _wrapped("  - ", _remedy(remedy))


def _table(forecast: Forecast) -> Iterator[str]:
    rows = [("job", "do", "waits for", "GPU", "start", "takes", "low to high", "end")]
    for name in forecast.schedule.order:
        here, each, state = forecast.schedule.placed[name], forecast.estimates[name], forecast.states[name]
        job = forecast.suite.jobs[name]
        gpus = ",".join(map(str, here.gpus)) or "-"
        known = each.seconds is not None
        takes = clock(each.seconds or 0.0) + ("+" if each.lacks else "") if known else "?"
        between = f"{clock(each.low or 0.0)} to {clock(each.high or 0.0)}" if known and each.low != each.high else ""
        if state.state == "done":
            rows.append((name, job.do, "", "", "", "done", f"in {clock(state.spent)}", ""))
            continue
        start = "running" if state.state == "running" else clock(here.start)
        needs = _short([each for each in forecast.suite.needs(name) if forecast.states[each].state != "done"])
        rows.append((name, job.do, needs, gpus, start, takes, between, clock(here.end) if known else "?"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    right = (4, 5, 7)
    for row in rows:
        cells = (c.rjust(w) if n in right else c.ljust(w) for n, (c, w) in enumerate(zip(row, widths, strict=True)))
        yield "  ".join(cells).rstrip()


def _short(names: list[str]) -> str:
    return ", ".join(names) if len(", ".join(names)) <= 24 else f"{names[0]} and {len(names) - 1} more"


def _sources(forecast: Forecast) -> Iterator[str]:
    by_source: dict[str, list[str]] = {}
    for name, each in forecast.estimates.items():
        if forecast.states[name].state != "done":
            by_source.setdefault(each.source, []).append(name)
    yield "times are from"
    for source, names in by_source.items():
        yield from _wrapped("  - ", f"{', '.join(names)}: {source}")
    lacking = {name: each.lacks for name, each in forecast.estimates.items() if each.lacks}
    for name, what in lacking.items():
        yield from _wrapped("  - ", f"{name}: not known, and not counted: {', '.join(what)}")


def _chain(forecast: Forecast) -> Iterator[str]:
    for name, why in forecast.schedule.critical():
        if forecast.states[name].state != "done":
            gpus = ",".join(map(str, forecast.schedule.placed[name].gpus))
            waits = {"needs": "->", "gpu": f"-> (GPU {gpus} is free)", "slot": "-> (a place is free)"}
            yield f"{waits.get(why, '')} {name}".strip()


def _deadline(forecast: Forecast) -> str:
    assert forecast.left is not None
    late = forecast.seconds - forecast.left
    if forecast.holds is None:
        jobs = f"{', '.join(forecast.unknown)} {'takes' if len(forecast.unknown) == 1 else 'take'}"
        return f"in {clock(forecast.left)}: not known, since it is not known how long {jobs}"
    asked = f"in {clock(forecast.left)}" if forecast.left > 0 else f"over since {clock(-forecast.left)}"
    if forecast.holds:
        unsure = forecast.high > forecast.left
        may = f"; if jobs take the most, it ends {clock(forecast.high - forecast.left)} too late" if unsure else ""
        return f"{asked}: holds, with {clock(-late)} to spare{may}"
    spare = forecast.left - forecast.low
    may = f"; if jobs take the least, it holds with {clock(spare)}" if spare >= 0 else ""
    return f"{asked}: does not hold, {clock(late)} too late{may}"


def _remedy(remedy: Remedy) -> str:
    if remedy.seconds is None:
        outcome = "not known how long that takes; --measure times some steps of it"
    else:
        outcome = f"ends in {clock(remedy.seconds)}" + ("" if remedy.holds else ", which is too late")
    return f"{remedy.what}: {outcome}" + (f". Price: {remedy.price}" if remedy.price else "")


def _wrapped(first: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False)


# The command


def plan(
    opened: OpenSuite,
    gpus: int | None = None,
    measured: bool = False,
    gpu: str | None = None,
    advise: bool = True,
    say: Say = tell,
) -> Forecast:
    """`sameday suite plan`. Where nobody says how many GPUs, those of this machine, or of the suite. For planning a
    machine need not have them. `gpu` is another kind of GPU, for an estimate from what is measured on this one. Without
    advice nothing is said or measured of what would make a deadline hold."""
    suite, home, folder, _ = opened
    elsewhere = None if gpu is None else Elsewhere(known_gpu(gpu))
    number = gpus if gpus is not None else max(1, gpus_here(suite)) if gpu else gpus_here(suite)
    done = {name for name in suite.jobs if folder.read(name).state == "done"}
    refuse(
        f"{name}: {line}" for name in suite.jobs if name not in done for line in wrong(suite, home, folder, name, False)
    )
    predictor = Predictor(suite, home, folder, audit=True, say=say, elsewhere=elsewhere)
    refuse(_too_few(predictor, [name for name, job in suite.jobs.items() if name not in done and job.expected is None]))
    if measured:
        _measure(opened, [predictor], say)
        predictor = _again(predictor)
    forecast = make_forecast(opened, number, predictor)
    for line in lines(forecast):
        say(line)
    if advise and measured and forecast.holds is False and (others := _others(opened, predictor)):
        # The plan is known by now and stands above: what follows takes as long again, and may be cut short.
        _measure(opened, others, say, filled=True)
        forecast = make_forecast(opened, number, _again(predictor))
    for line in _remedies(forecast) if advise else ():
        say(line)
    refusals = (changed(opened, name) if name in done else begun_otherwise(opened, name) for name in suite.jobs)
    for line in filter(None, refusals):
        say(f"`suite run` refuses: {line}")
    return forecast


def _too_few(predictor: Predictor, jobs: Sequence[str]) -> Iterator[str]:
    """What jobs would say of their data once they have read it, where it is read for a plan. Stages may have few
    samples, as in a run."""
    for name in jobs:
        work = predictor.work(name)
        if isinstance(work, Work) and work.recipe is not None and len(work.trainings) == 1:
            there = predictor.counts.of(work.recipe, work.home).sizes.get("train")
            problem = None if there is None or work.recipe.stage_recipes() else too_few(work.recipe, there)
            if problem is not None:
                yield f"{name}: {problem}"


def _others(opened: OpenSuite, predictor: Predictor) -> list[Predictor]:
    """Of suites that may hold a deadline, those of which something is not measured yet."""
    trainings = changeable(opened.suite, predictor)
    cache = cached(opened.suite, trainings)
    suites = (by_image(opened.suite, trainings), None if cache is None else cache[0])
    made = [replace(predictor, suite=each, _works={}) for each in suites if each is not None]
    return [each for each in made if unknown(each)]


def _again(predictor: Predictor) -> Predictor:
    return replace(predictor, now=time.time(), _works={})


def _measure(opened: OpenSuite, predictors: Sequence[Predictor], say: Say, filled: bool = False) -> None:
    """What each of them does not know. Kept as soon as it is there: a plan that is killed has lost one of them. Caches
    that nobody has chosen yet are timed as if they were `filled`, and not in the user's folder."""
    elsewhere = predictors[0].elsewhere
    every, begun = list({key_of(each.training): each for one in predictors for each in unknown(one)}.values()), 0
    asked = [(replace(each.training, filled=filled and _caches(each.training)), each.evaluation) for each in every]
    events = measure(asked, None if elsewhere is None else elsewhere.gpu)
    with orderly_end(), closing(events):
        for event in events:
            name, training, _ = every[event.number]
            if event.failed is not None:
                say(f"{name}: could not be measured: {event.failed}")
            elif event.measured is not None:
                keep_measured(opened.folder, event.measured)
                if event.seconds is not None:
                    for stall in event.measured.stalls:
                        say(f"{name}: {stall}")
                    say(f"{name}: {_words(event.measured)}; measured in {clock(event.seconds)}")
            elif event.again:
                say(f"measuring {name}, {training.recipe.name} again, which finds on disk what was compiled")
            else:
                begun += 1
                what = "the evaluation" if training.evaluated else "some steps"
                say(f"measuring {what} of {name}, {training.recipe.name} ({begun} of {len(every)})")


def _caches(training: Training) -> bool:
    return training.plan.cache in ("pixels", "features")


def _words(one: Measured) -> str:
    if not one.steps:
        each = (one.score_each or 0.0) + (one.answer_each or 0.0)
        return f"scores and answers of a sample {each:.3g} s"
    step = median(one.steps[1:] or one.steps)  # the first one may have compiled
    share = "" if one.floor is None else f", of which its floor is {one.floor / step:.0%}"
    return f"median step {step:.3g} s{share}"
