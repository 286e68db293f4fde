"""How long jobs take: steps times the time of a step, and what is besides steps. From what the user expects, from the
job's own records while it runs, from runs whose steps cost the same, or from a measurement; else it is not known."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sameday.commands.session import silent
from sameday.record.times import read_times
from sameday.spec.errors import BadInput, in_short
from sameday.spec.plan import Plan
from sameday.spec.suite import Suite
from sameday.spec.words import count
from sameday.suite.jobs import request
from sameday.suite.running.gpus import gpu_names
from sameday.suite.state import JobState, SuiteFolder, read_state
from sameday.suite.times.elsewhere import Elsewhere, Range
from sameday.suite.times.measured import Measured, read_measured
from sameday.suite.times.pace import (
    Earlier,
    Pace,
    Recorded,
    borrowed,
    earlier_requests,
    earlier_runs,
    pace_of,
    recorded,
    shown,
)
from sameday.suite.times.work import CPU, Counts, Training, Work, cache_cost, search_cost, step_cost, work_of
from sameday.tasks.base import Say
from sameday.tasks.registry import setup_of

OWN, LENT, MEASURED, OTHER_DATA, OTHER_PLAN = 0.03, 0.06, 0.1, 0.25, 0.4
"""The least share by which steps may be off, by where their pace is from: this very run, a run like it, a few steps
that were timed, a run on other samples, a run under another plan."""
BESIDES = 0.25
"""The share by which all that is besides steps may be off."""
TO_VERIFY = 0.15
"""What `sameday tune` may take beyond its minutes, as a share of them."""
PREDICTIONS = "predictions.jsonl"


@dataclass(frozen=True)
class Estimate:
    """Seconds, between `low` and `high`; None where nothing is known. `lacks` is what is not counted in them."""

    seconds: float | None
    low: float | None
    high: float | None
    source: str
    lacks: tuple[str, ...] = ()

    @classmethod
    def exact(cls, seconds: float, source: str) -> Estimate:
        return cls(seconds, seconds, seconds, source)

    @classmethod
    def unknown(cls, why: str) -> Estimate:
        return cls(None, None, None, f"not known: {why}")

    def plus(self, more: float, error: float = 0.0) -> Estimate:
        if self.seconds is None or self.low is None or self.high is None:
            return self
        return replace(self, seconds=self.seconds + more, low=self.low + more - error, high=self.high + more + error)


def predict(
    suite: Suite, home: Path, folder: SuiteFolder, *, audit: bool = False, now: float | None = None
) -> dict[str, Estimate]:
    """Of each job, from its begin to its end. With `audit`, data that was not counted yet is read for it."""
    return Predictor(suite, home, folder, audit, now).whole()


def remaining(
    suite: Suite, home: Path, folder: SuiteFolder, *, audit: bool = False, now: float | None = None
) -> dict[str, Estimate]:
    """What is left of each job from now on, once it has what it waits for."""
    return Predictor(suite, home, folder, audit, now).left()


@dataclass
class Predictor:
    suite: Suite
    home: Path
    folder: SuiteFolder
    audit: bool = False
    now: float | None = None
    say: Say = silent
    elsewhere: Elsewhere | None = None
    """Another kind of GPU, where nothing has begun."""
    _works: dict[str, Work | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.moment = time.time() if self.now is None else self.now
        begun = self.elsewhere is None
        self.states = self.folder.states(self.suite) if begun else {name: JobState() for name in self.suite.jobs}
        self.counts = Counts(self.folder, self.audit, self.say)

    @cached_property
    def runs(self) -> list[Earlier]:
        return earlier_runs(self.folder) if self.elsewhere is None else []

    @cached_property
    def measured(self) -> list[Measured]:
        gpu = None if self.elsewhere is None else self.elsewhere.gpu
        asked = None if gpu is None else (gpu.memory, gpu.name)
        return [each for each in read_measured(self.folder) if each.stood_for == asked]

    def _recorded(self, folder: Path) -> Recorded:
        return recorded(folder) if self.elsewhere is None else Recorded([], [])

    def _pace(self, one: Measured, sizes: Mapping[str, int]) -> Pace | None:
        return one.pace(sizes, MEASURED_ON) if self.elsewhere is None else self.elsewhere.pace(one, sizes)

    def whole(self) -> dict[str, Estimate]:
        return {name: each.plus(self.elapsed(name)) for name, each in self.left().items()}

    def left(self) -> dict[str, Estimate]:
        return {name: self._left(name) for name in self.suite.jobs}

    def elapsed(self, name: str) -> float:
        """In all attempts."""
        state = self.states[name]
        return state.spent + (self._running(state) or 0.0)

    def _running(self, state: JobState) -> float | None:
        """Seconds since its process began; None where there is none."""
        if state.state != "running" or state.started is None:
            return None
        return max(0.0, self.moment - state.started)

    def work(self, name: str) -> Work | str:
        """Or what is wrong with its recipe."""
        if name not in self._works:
            try:
                self._works[name] = work_of(self.suite, self.home, self.folder, name)
            except BadInput as error:
                self._works[name] = in_short(error)
        return self._works[name]

    def _left(self, name: str) -> Estimate:
        job, state, work = self.suite.jobs[name], self.states[name], self.work(name)
        if state.state == "done":
            return Estimate.exact(0.0, "done")
        own = isinstance(work, Work) and any(self._own(each) for each in work.trainings)
        if job.expected is not None and not own:
            return Estimate.exact(max(0.0, job.expected - self.elapsed(name)), "expected, as the suite says")
        if isinstance(work, str):
            return Estimate.unknown(work)
        if job.do == "train":
            return self._train(name, work)
        if job.do == "eval":
            return self._eval(name, work)
        if job.do == "tune":
            return self._tune(name)
        return self._cache(name)

    def _tune(self, name: str) -> Estimate:
        """Its minutes, and besides them what such a search took before: its start, and the proof at its end."""
        seconds, gone = 60 * self.suite.jobs[name].minutes, self._running(self.states[name]) or 0.0
        wanted = search_cost(request(self.suite, self.home, name))
        for folder, made in earlier_requests(self.folder) if self.elsewhere is None else ():
            state, minutes = read_state(folder), made.get("minutes")
            ended = state.state == "done" and state.started is not None and state.ended is not None
            if made.get("do") == "tune" and ended and isinstance(minutes, int | float) and search_cost(made) == wanted:
                besides = max(0.0, (state.ended or 0.0) - (state.started or 0.0) - 60 * minutes)
                left, error = max(0.0, seconds + besides - gone), BESIDES * besides
                where = f"its minutes, and what {shown(folder)} took besides them on {state.host}"
                return Estimate(left, max(0.0, left - error), left + error, where)
        left, most = max(0.0, seconds - gone), seconds * TO_VERIFY
        return Estimate(left + most / 2, left, left + most, "its minutes, and verify")

    def _cache(self, name: str) -> Estimate:
        """As long as such a job took before, here or in another suite; less where entries are there already."""
        wanted = cache_cost(request(self.suite, self.home, name))
        for folder, made in earlier_requests(self.folder):
            state = read_state(folder)
            if made.get("do") == "cache" and state.state == "done" and cache_cost(made) == wanted:
                left = max(0.0, state.spent - self.elapsed(name))
                return Estimate(left, 0.0, 1.25 * left, f"what {shown(folder)} took on {state.host}")
        return Estimate.unknown("no such cache was filled before; `expected` in the suite can say what it takes")

    # Training

    def _train(self, name: str, work: Work) -> Estimate:
        each = [self._training(training, self.states[name]) for training in work.trainings]
        sum_ = _sum(each)
        if sum_.seconds is None or work.evaluation is None:
            return sum_
        state, folder = self.states[name], self.folder.run(name)
        after = self._answering(name, work, folder / "answers", _last(folder, "finish") or state.started)
        if after.seconds is None:
            return replace(sum_, lacks=(*sum_.lacks, "its evaluation"))
        return _sum([sum_, replace(after, source="")])

    def _own(self, training: Training) -> Pace | None:
        read = self._recorded(training.folder)
        return pace_of(read.seconds, read.times, recent=True)

    def _training(self, training: Training, state: JobState) -> Estimate:
        read = self._recorded(training.folder)
        counted = self.counts.of(training.recipe, training.home)
        if counted.per_epoch is None:
            alike = (run.per_epoch for run in self.runs if run.cost == training.cost)
            counted = replace(counted, per_epoch=next((each for each in alike if each is not None), None))
        total = read.total or counted.total(training.recipe)
        if total is None:
            return Estimate.unknown(counted.why)
        if total == 0:
            return Estimate.exact(0.0, "nothing to train on")
        if read.done >= total and any(record.get("what") == "finish" for record in read.times):
            return Estimate.exact(0.0, "done")
        lent, own = self._lent(training), self._own(training)
        if own is not None:
            rest = lent or own
            parts: dict[str, Any] = {part: _either(getattr(own, part), getattr(rest, part)) for part in PARTS}
            # Its own first one may have been slow for what it does once.
            once = [part for part in REPEATED if sum(record.get("what") == part for record in read.times) == 1]
            parts |= {part: _either(getattr(rest, part), parts[part]) for part in once}
            pace, floor, where = replace(own, **parts), OWN, f"its own records, {count(own.steps, 'step')}"
        elif lent is not None:
            pace, floor = lent, OTHER_PLAN if not lent.alike else LENT if lent.same else OTHER_DATA
            floor = MEASURED if lent.where.startswith(MEASURED_ON) else floor
            other = f", on other {training.recipe.sample}s" if not lent.same else ""
            where = lent.where + other + ("" if lent.alike else ", under another plan")
        else:
            return Estimate.unknown("no run with such steps is recorded; `sameday suite plan --measure` times some")
        pace = replace(pace, finish=_either(pace.finish, pace.save))  # the finished weights are saved once more
        per_epoch = counted.per_epoch or total / training.recipe.num_epochs
        looks = {
            "validate": _due(training, total, per_epoch, read.done, "validate"),
            "save": _due(training, total, per_epoch, read.done, "save"),
        }
        begun = self._running(state) is not None and read.times and read.times[-1]["time"] >= (state.started or 0.0)
        besides = sum((getattr(pace, what) or 0.0) * number for what, number in looks.items()) + (pace.finish or 0.0)
        if not begun:
            # What it has been starting for already is no longer before it.
            besides += max(0.0, (pace.start or 0.0) - (self._running(state) or 0.0 if not read.done else 0.0))
        if read.done == 0:
            besides += pace.warm
        steps = (total - read.done) * pace.step
        error = max(floor, pace.error) * steps + BESIDES * besides
        lacks = tuple(WORDS[part] for part in PARTS if getattr(pace, part) is None and looks.get(part, 1))
        lacks = lacks if counted.sizes.get("val", 1) else tuple(each for each in lacks if each != WORDS["validate"])
        return Estimate(steps + besides, max(0.0, steps + besides - error), steps + besides + error, where, lacks)

    def _lent(self, training: Training) -> Pace | None:
        """Of a run that went through such steps; before one under another plan or on other samples, what was measured
        of this very one."""
        device = self._device(training)
        run = borrowed(training, self.runs, device)
        if run is not None and run.alike and run.same:
            return run
        sizes = self.counts.of(training.recipe, training.home).sizes
        fitting = [each for each in self.measured if each.fits(training) and device in (None, each.machine)]
        return self._pace(fitting[-1], sizes) if fitting else run

    def _device(self, work: Training | Work) -> str | None:
        """What it would run on here: a GPU's name, or CPU; None where that is not known, as on a login node, and where
        it is about a GPU that is not here."""
        if self.elsewhere is not None:
            return None
        return CPU if work.on_cpu else self.gpu

    @cached_property
    def gpu(self) -> str | None:
        """This machine's, where all of them are the same."""
        names = gpu_names()
        return names.pop() if len(names) == 1 else None

    def knows(self, training: Training) -> bool:
        """Whether the pace of such steps is known under this plan, so that nothing need be measured."""
        lent = self._lent(training)
        return self._own(training) is not None or (lent is not None and lent.alike and lent.same)

    def knows_evaluation(self, name: str, work: Work) -> bool:
        """Whether it is known what the evaluation of a job takes; true too where it has nothing to evaluate."""
        total = self._questions(work)
        return not total or self._whole_evaluation(name, work, total)[0] is not None

    # Evaluation

    def _eval(self, name: str, work: Work) -> Estimate:
        state = self.states[name]
        estimate = self._answering(name, work, self.folder.run(name), state.started)
        loading = self._loading(work)
        whole = "whole" in estimate.source
        if estimate.seconds is None or loading is None or whole or self._running(state) is not None:
            return estimate
        return estimate.plus(loading, BESIDES * loading)

    def _answering(self, name: str, work: Work, answers: Path, since: float | None) -> Estimate:
        """An evaluation, or what is left of it: `answers` are below this folder, written `since` then."""
        state = self.states[name]
        total = self._questions(work)
        there = _lines(answers) if state.attempt else 0
        running = self._running(state)
        if there and total and running is not None and since is not None and self.moment > since:
            rate = there / (self.moment - since)
            left = max(0, total - there) / rate
            return Estimate(left, 0.8 * left, 1.25 * left, f"its own answers, {there} of {total}")
        whole, source = self._whole_evaluation(name, work, total)
        if whole is None:
            return Estimate.unknown("no such evaluation is recorded; `sameday suite plan --measure` times one")
        part = 1 - there / total if total else 1
        rest = whole.middle * part
        if running is not None and since is not None and self.suite.jobs[name].do == "eval":
            rest = max(0.0, rest - (self.moment - since))
        return Estimate(rest, min(rest, whole.low * part), max(rest, whole.high * part), source)

    def _questions(self, work: Work) -> int | None:
        assert work.recipe is not None and work.evaluation is not None
        return self.counts.of(work.recipe, work.home).sizes.get(work.evaluation.split)

    def _loading(self, work: Work) -> float | None:
        """What an eval job takes until its model is there: about what a training of it does."""
        assert work.recipe is not None
        pace = borrowed(self._of(work), self.runs, self._device(work))
        timed = [each.start for each in self._timed(work) if each.cost == step_cost(work.recipe)]
        return timed[-1] if timed and (pace is None or pace.start is None) else None if pace is None else pace.start

    def _timed(self, work: Work) -> list[Measured]:
        """What was measured on the device of an evaluation, of its data and model as they are."""
        device, files = self._device(work), self._of(work).files
        return [each for each in self.measured if each.files == files and device in (None, each.machine)]

    def _of(self, work: Work) -> Training:
        """A training like that of what is evaluated, under whatever plan."""
        assert work.recipe is not None
        return Training(work.recipe, work.home, Plan(), Path(), planned=False, on_cpu=work.on_cpu)

    def _whole_evaluation(self, name: str, work: Work, total: int | None) -> tuple[Range | None, str]:
        assert work.recipe is not None and work.evaluation is not None
        device = self._device(work)
        for other, state in self.states.items():
            theirs = self.work(other)
            if other == name or isinstance(theirs, str) or theirs.evaluation is None:
                continue
            if theirs.answered != work.answered:
                continue
            there = self._questions(theirs)
            share = total / there if total and there else 1.0
            if self.suite.jobs[other].do == "eval" and state.state == "done":
                return _about(share * state.spent), f"the whole of {other}"
            read = self._recorded(self.folder.run(other))
            if (seconds := read.evaluation) is not None and read.fits(device):
                return _about(share * seconds), f"the evaluation of {other}"
        for run in self.runs:
            if (
                run.answered == (work.answered, work.evaluation.split)
                and (seconds := recorded(run.folder).evaluation) is not None
                and recorded(run.folder).fits(device)
            ):
                return _about(seconds), f"the evaluation of {shown(run.folder)}"
        for each in reversed(self._timed(work)):
            if each.answered == work.answered and total:
                if self.elsewhere is not None:
                    estimated = self.elsewhere.evaluation(each, total)
                    return estimated, "" if estimated is None else self.elsewhere.words(each)
                return _about(each.evaluation(total)), f"{MEASURED_ON} {each.machine}"
        if not setup_of(work.recipe, work.home).generates and total:
            return self._as_validation(work, total)
        return None, ""

    def _as_validation(self, work: Work, total: int) -> tuple[Range | None, str]:
        """Scores alone take what a validation does, for as many samples."""
        assert work.recipe is not None
        sizes = self.counts.of(work.recipe, work.home).sizes
        pace = self._lent(self._of(work))
        if pace is None or pace.validate is None or not sizes.get("val"):
            return None, ""
        return _about(pace.validate * total / sizes["val"]), f"a validation of {pace.where}"


MEASURED_ON = "measured on"
PARTS = ("start", "validate", "save", "finish")
REPEATED = ("validate", "save")
WORDS = {"start": "its start", "validate": "validation", "save": "saving", "finish": "its end"}


def _about(seconds: float) -> Range:
    return Range(0.8 * seconds, 1.25 * seconds)


def _either(one: float | None, other: float | None) -> float | None:
    return other if one is None else one


def _sum(each: Sequence[Estimate]) -> Estimate:
    """One after another; what is not known of one is not known of all."""
    unknown = [one for one in each if one.seconds is None]
    if unknown:
        return unknown[0]
    sources = [one.source for one in each if one.source and one.source != "done"]
    lacks = tuple(dict.fromkeys(what for one in each for what in one.lacks))
    seconds, low, high = (sum(getattr(one, name) for one in each) for name in ("seconds", "low", "high"))
    return Estimate(seconds, low, high, "; ".join(dict.fromkeys(sources)) or "done", lacks)


def _due(training: Training, total: int, per_epoch: float, done: int, what: str) -> int:
    """How often a run validates or saves after so many steps that are done, its last step included."""
    plan, best = training.plan, training.recipe.best
    asked = [plan.save_steps] if what == "save" else [plan.eval_steps, *([best.every] if best else [])]
    at = {total}
    for every in asked:
        if every == "epoch":
            at |= {round(per_epoch * (number + 1)) for number in range(int(total / per_epoch))}
        elif isinstance(every, int):
            at |= set(range(every, total + 1, every))
    return sum(step > done for step in at)


def _last(folder: Path, what: str) -> float | None:
    """When a run, or one of its stages, noted this last."""
    each = [record for path in (folder, *folder.glob("stages/*")) for record in read_times(path)]
    moments = [record.get("time") for record in each if record.get("what") == what]
    return max((float(moment) for moment in moments if isinstance(moment, int | float)), default=None)


def _lines(folder: Path) -> int:
    """Answers in the newest file of them below a folder."""
    files: Iterable[Path] = [*folder.glob(PREDICTIONS), *folder.glob(f"*/{PREDICTIONS}")]
    try:
        newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
        return 0 if newest is None else newest.read_bytes().count(b"\n")
    except OSError:
        return 0
