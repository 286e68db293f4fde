"""A search over plans that are timed one by one. It knows nothing of how they are timed."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sameday.spec.plan import Plan
from sameday.tasks.setup import Choice
from sameday.tune.space import choices_made, without
from sameday.tune.trial import Result

SURE = 3.0
"""Standard errors by which a plan must be faster: less is noise. A search makes a dozen comparisons."""
WORTH = 0.03
"""And by what share at least: two processes with the same plan differ by a few hundredths, however steady each is."""
CLEAR = 0.1
"""A share that needs no second pair of processes."""
ROUNDS = 6
"""How often a plan that may be faster is timed again, beside the best one."""
APART = 0.02
"""By what share two processes with the same plan differ, at least."""
FLAT = 2
"""Values in a row that change nothing, after which none further on is tried."""
HOW = ("left out", "added", "alone")
"""What is asked of a choice, in the order of asking."""


class OutOfTime(Exception):
    """There is not enough left for another trial."""


Measure = Callable[[Plan], Result]
"""Times a plan, or raises OutOfTime."""

Allowed = Callable[[Plan], bool]


class Timer(Protocol):
    """Whoever times plans, as long as there is time."""

    def measure(self, plan: Plan) -> Result: ...

    @property
    def room(self) -> float:
        """Seconds in which another trial may begin."""

    @property
    def usual(self) -> float:
        """Seconds that a trial has taken, on the average."""


def gain(new: Result, old: Result) -> tuple[float, float]:
    """The logarithm of how many times faster the new one is, and its standard error: step by step, since steps differ
    more than plans do."""
    if new.failed or not new.seconds:
        return -math.inf, 0.0
    if old.failed or not old.seconds:
        return math.inf, 0.0
    common = sorted(new.seconds.keys() & old.seconds.keys())
    ratios = [math.log(old.seconds[step] / new.seconds[step]) for step in common]
    if not ratios:
        return math.log(middle(old) / middle(new)), math.inf
    # One step that something else held up must not decide.
    center = statistics.median(ratios)
    spread = statistics.median(abs(ratio - center) for ratio in ratios) * 1.4826  # of a normal distribution
    return center, (1.2533 * spread / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.02)


def middle(result: Result) -> float:
    return statistics.median(result.seconds.values())


def faster(new: Result, old: Result) -> bool:
    ratio, error = gain(new, old)
    return ratio > max(SURE * error, WORTH)


@dataclass
class SearchState:
    """What is known, and how far the search has come."""

    plain: Plan
    known: Sequence[Choice]
    guess: Plan | None = None
    """A plan to begin with; none once it was timed."""
    results: dict[str, Result] = field(default_factory=dict)
    """By the plan's text."""
    refused: set[str] = field(default_factory=set)
    """Plans that looked faster and were not, when they were timed again."""
    missing: dict[str, list[str]] = field(default_factory=dict)
    """What the ablation could not say: why, and the choices."""
    rounds: dict[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    """Gains of plans over others, each in a pair of processes of its own."""
    unsteady: float = 1.0
    """How many times as long the best plan took once more, or the other way round, at the worst."""

    def __post_init__(self) -> None:
        self.best = self.plain
        self.sure = self.plain
        """The last best plan that was timed twice."""
        self.ahead = list(self.known)
        self.begun = False
        """The first of those ahead."""
        self.gained = False
        """The best plan is another than at first, so that all choices deserve a second look."""
        self.again = False
        """Those ahead were looked at before."""

    def of(self, plan: Plan) -> Result | None:
        return self.results.get(plan.model_dump_json())

    def timed(self, plan: Plan, measure: Measure) -> Result:
        key = plan.model_dump_json()
        if key not in self.results:
            self.results[key] = measure(plan)
        return self.results[key]

    @property
    def progress(self) -> tuple[int, ...]:
        return len(self.ahead), len(self.results), len(self.refused)

    @property
    def not_tried(self) -> list[str]:
        """In sentences."""
        told = [self._cut_short()] if self.ahead else []
        if self.best not in (self.sure, self.plain):
            told.append("the best plan a second time, which would leave its luck out")
        if count := len(doubts(self)):
            what = "another plan is" if count == 1 else f"{count} other plans are"
            told.append(f"often enough to know: whether {what} faster than the best one")
        return told + [f"{why} {listed(names)}" for why, names in self.missing.items()]

    @property
    def tried(self) -> bool:
        """Whether a plan besides the plain one was timed."""
        return len(self.results) > 1

    def _cut_short(self) -> str:
        names = [choice.name for choice in self.ahead]
        if self.again:
            return f"the search ended before a second look at {listed(names)}"
        if self.begun:
            return f"the search ended within {names[0]}" + (f", before {listed(names[1:])}" if names[1:] else "")
        guess = ["the plan chosen for this machine"] if self.guess is not None else []
        return f"the search ended before {listed([*guess, *names])}"


def listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def explore(state: SearchState, timer: Timer, allowed: Allowed) -> list[Worth]:
    """Search and ablation, and again as long as the search was cut short and there is time. A search leaves time for
    the ablation of the best plan so far, up to half of what there is."""
    while True:
        before = state.progress
        search(state, _leaving(state, timer, allowed), allowed)
        confirm(state, timer.measure)
        while leave_out(state, timer.measure, allowed):
            confirm(state, timer.measure)
        ablation(state, timer.measure, allowed)
        if state.ahead and state.progress != before:
            continue
        if not settle(state, timer.measure):
            return ablation(state, timer.measure, allowed)


def doubts(state: SearchState) -> list[str]:
    """Plans that may be faster than the best one, by what was timed so far; the likeliest first."""
    best = state.of(state.best)
    if best is None:
        return []
    likely = {}
    for key in state.results.keys() - state.refused - {state.best.model_dump_json()}:
        rounds = state.rounds.get((key, state.best.model_dump_json()), ())
        ratio, error = _mean(rounds) if rounds else gain(state.results[key], best)
        if math.isfinite(ratio) and ratio + SURE * error > WORTH and len(rounds) < ROUNDS:
            likely[key] = ratio
    return sorted(likely, key=lambda key: (-likely[key], key))


def _mean(rounds: Sequence[float]) -> tuple[float, float]:
    """Of gains in several pairs of processes, and its standard error: what differs is the processes, not the steps."""
    if not all(map(math.isfinite, rounds)):
        return -math.inf, 0.0
    spread = max(statistics.stdev(rounds), APART) if len(rounds) > 1 else APART
    return statistics.fmean(rounds), spread / math.sqrt(len(rounds))


def settle(state: SearchState, measure: Measure) -> bool:
    """Whether the best plan is another now, since one that might be faster is so for sure. Time that is left goes to
    such plans, in turns, each beside the best one; the times by which they were picked do not count, nor does a lead
    after a few rounds."""
    with contextlib.suppress(OutOfTime):
        best = state.best.model_dump_json()
        while asked := doubts(state):
            key = min(asked, key=lambda key: len(state.rounds.get((key, best), ())))
            new, old = measure(Plan.model_validate_json(key)), measure(state.best)
            rounds = state.rounds[key, best] = (*state.rounds.get((key, best), ()), gain(new, old)[0])
            ratio, error = _mean(rounds)
            if len(rounds) == ROUNDS and ratio > max(SURE * error, WORTH):
                if state.best in (state.sure, state.plain):
                    state.sure = Plan.model_validate_json(key)
                state.results |= {key: new, best: old}
                state.best = Plan.model_validate_json(key)
                return True
    return False


def _leaving(state: SearchState, timer: Timer, allowed: Allowed) -> Measure:
    half = timer.room / 2

    def measure(plan: Plan) -> Result:
        wanted = {each.model_dump_json() for each in _asked(state, allowed).values() if allowed(each)}
        trials = len(wanted - state.results.keys()) + (state.best != state.sure)
        if timer.room < min(trials * timer.usual, half):
            raise OutOfTime
        return timer.measure(plan)

    return measure


def search(state: SearchState, measure: Measure, allowed: Allowed) -> None:
    """From the better of the plain plan and a guess, choice by choice, as long as one of them is faster for sure. Cut
    short and called again, it goes on where it was."""
    with contextlib.suppress(OutOfTime):
        plain = state.timed(state.plain, measure)
        if state.guess is not None and faster(state.timed(state.guess, measure), plain):
            state.best = state.guess
        state.guess = None
        while state.ahead:
            for plan in _steps(state, state.ahead[0], measure, allowed):
                if _beats(state, plan, measure):
                    state.best, state.gained = plan, True
                state.begun = True
            state.ahead, state.begun = state.ahead[1:], False
            if not state.ahead and state.gained and not state.again:
                state.ahead, state.again = list(state.known), True  # what came later may change what earlier ones give


def _beats(state: SearchState, plan: Plan, measure: Measure, clear: float = CLEAR) -> bool:
    """Faster than the best for sure; where it is not by far, in another pair of processes too."""
    new, old = state.timed(plan, measure), state.timed(state.best, measure)
    if plan.model_dump_json() in state.refused or not faster(new, old):
        return False
    return gain(new, old)[0] > clear or faster(measure(plan), measure(state.best))


def confirm(state: SearchState, measure: Measure) -> None:
    """The best plan once more: who is picked as the fastest of many was lucky too, and a fresh measurement was not."""
    plain = state.of(state.plain)
    if state.best in (state.sure, state.plain) or plain is None:
        return
    with contextlib.suppress(OutOfTime):
        again, once = measure(state.best), state.of(state.best)
        state.results[state.best.model_dump_json()] = again
        if once and once.seconds and again.seconds:
            state.unsteady = max(state.unsteady, math.exp(abs(gain(again, once)[0])))
        if not faster(again, plain):
            with contextlib.suppress(OutOfTime):  # the machine may be slower now than it was
                plain = state.results[state.plain.model_dump_json()] = measure(state.plain)
        if faster(again, plain):
            state.sure = state.best
        else:
            state.refused.add(state.best.model_dump_json())
            state.best = state.sure


def leave_out(state: SearchState, measure: Measure, allowed: Allowed) -> bool:
    """Whether the best plan was faster for sure without one of its choices. Then it is without it from now on. Always
    by a second pair of processes: the best plan's own time may be of another hour."""
    before = state.best
    asked = [plan for (_, how), plan in _asked(state, allowed).items() if how == "left out" and plan != state.plain]
    with contextlib.suppress(OutOfTime):
        for plan in sorted(asked, key=lambda plan: state.of(plan) is None):  # what is timed already needs less time
            if allowed(plan) and _beats(state, plan, measure, clear=math.inf):
                state.best = plan
    return state.best != before


def _steps(state: SearchState, choice: Choice, measure: Measure, allowed: Allowed) -> Iterator[Plan]:
    """Plans to try. Where values are in order, from the present one upwards, then downwards, as long as it gets
    better."""

    def changed(value: dict[str, Any]) -> Plan | None:
        plan = state.best.model_copy(update=value)
        return plan if plan != state.best and allowed(plan) else None

    if not choice.climb:
        for value in choice.values:
            plan = changed(value)
            if plan is not None:
                yield plan
        return
    place = next((i for i, value in enumerate(choice.values) if _holds(state.best, value)), None)
    if place is None:
        name = choice.fields[0]
        place = sum(value[name] < getattr(state.best, name) for value in choice.values) - 1
    for way in (1, -1):
        whole = choice.cuts and state.timed(state.best, measure).pieces == 1
        if way == 1 and whole and state.best != state.plain:
            continue  # whole steps have room already
        start, flat = state.best, 0
        here = place
        while 0 <= here + way < len(choice.values) and flat < FLAT:
            here += way
            plan, before = changed(choice.values[here]), state.best
            if plan is None:
                continue
            yield plan
            flat = 0 if state.best != before else flat + 1
            if faster(state.timed(before, measure), state.timed(plan, measure)):
                break
        if state.best != start:
            return


def _holds(plan: Plan, value: dict[str, Any]) -> bool:
    return all(getattr(plan, name) == each for name, each in value.items())


def _that_runs(plan: Plan, plain: Plan, allowed: Allowed) -> Plan:
    """A kernel that another choice is needed for goes with it."""
    for name in ("attention", "cuda_graphs", "compile"):
        if not allowed(plan):
            plan = plan.model_copy(update={name: getattr(plain, name)})
    return plan


@dataclass(frozen=True)
class Worth:
    """What a choice of the best plan is worth: alone over the plain plan, added to those before it, left out."""

    name: str
    change: dict[str, Any]
    alone: Result | None
    added: Result | None
    left_out: Result | None


def _asked(state: SearchState, allowed: Allowed) -> dict[tuple[str, str], Plan]:
    """The plans of an ablation by choice and question, in the order of asking. Some may not be allowed, as one that
    cannot run without what is asked about."""
    made = choices_made(state.best, state.plain, state.known)
    plans: dict[tuple[str, str], Plan] = {}
    before = state.plain
    for choice, change in made:
        others = {name for other, more in made if other is not choice for name in more}
        before = before.model_copy(update=change)
        plans[choice.name, "left out"] = without(state.best, state.plain, set(change) - others)
        plans[choice.name, "added"] = before
        plans[choice.name, "alone"] = state.plain.model_copy(update=change)
    changes = {choice.name: change for choice, change in made}

    def that_runs(name: str, how: str, plan: Plan) -> Plan:
        runs = _that_runs(plan, state.plain, allowed)
        # With the choice itself gone it would be another question's answer.
        kept = runs != state.best if how == "left out" else _holds(runs, changes[name])
        return runs if kept else plan

    return {
        (name, how): that_runs(name, how, plan) for kind in HOW for (name, how), plan in plans.items() if how == kind
    }


def ablation(state: SearchState, measure: Measure, allowed: Allowed) -> list[Worth]:
    """Every choice that the best plan made, in the order of trying. What there is no time for is told."""
    results: dict[tuple[str, str], Result] = {}
    state.missing = {}
    for (name, how), plan in _asked(state, allowed).items():
        if not allowed(plan):
            state.missing.setdefault(f"{how}: no such plan can run for", []).append(name)
            continue
        try:
            results[name, how] = state.timed(plan, measure)
        except OutOfTime:
            state.missing.setdefault(f"{how}: no time was left for", []).append(name)
    best = state.of(state.best)
    doubts = [name for (name, how), each in results.items() if how == "left out" and best and faster(each, best)]
    if doubts:
        state.missing["again, which no time was left for: the best plan looked faster without"] = doubts
    return [
        Worth(choice.name, change, *(results.get((choice.name, how)) for how in ("alone", "added", "left out")))
        for choice, change in choices_made(state.best, state.plain, state.known)
    ]
