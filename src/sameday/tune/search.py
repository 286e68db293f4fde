"""A search over plans that are timed one by one. It knows nothing of how they are timed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sameday.spec.plan import Plan
from sameday.tune.space import Choice, choices_made, without
from sameday.tune.trial import Result

SURE = 3.0
"""Standard errors by which a plan must be faster: less is noise. A search makes a dozen comparisons."""
WORTH = 0.03
"""And by what share at least: two processes with the same plan differ by a few hundredths, however steady each is."""
CLEAR = 0.1
"""A share that needs no second pair of processes."""
FLAT = 2
"""Values in a row that change nothing, after which none further on is tried."""


class OutOfTime(Exception):
    """There is not enough left for another trial."""


Measure = Callable[[Plan], Result]
"""Times a plan, or raises OutOfTime."""


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
class Found:
    plain: Plan
    best: Plan
    results: dict[str, Result] = field(default_factory=dict)
    """By the plan's text."""
    not_tried: list[str] = field(default_factory=list)

    def of(self, plan: Plan) -> Result | None:
        return self.results.get(plan.model_dump_json())


def search(
    plain: Plan,
    guess: Plan | None,
    known: Sequence[Choice],
    measure: Measure,
    allowed: Allowed,
    results: dict[str, Result] | None = None,
) -> Found:
    """From the better of the plain plan and a guess, choice by choice, as long as one of them is faster for sure.
    `results` has plans that were timed already, by their text."""
    found = Found(plain, plain, dict(results or {}))

    def timed(plan: Plan) -> Result:
        key = plan.model_dump_json()
        if key not in found.results:
            found.results[key] = measure(plan)
        return found.results[key]

    timed(plain)
    pending: list[str] = []
    try:
        if guess is not None and guess != plain:
            pending = [choice.name for choice in known]
            if faster(timed(guess), timed(plain)):
                found.best = guess
        for _ in range(2):  # what came later may change what an earlier choice is worth
            before = found.best
            for number, choice in enumerate(known):
                pending = [later.name for later in known[number:]]
                for plan in _steps(found, choice, timed, allowed):
                    if _beats(plan, found.best, timed, measure):
                        found.best = plan
            if found.best == before:
                break
        pending = []
    except OutOfTime:
        found.not_tried += [f"the search ended before {name}" for name in pending]
    return found


def _beats(plan: Plan, best: Plan, timed: Measure, measure: Measure) -> bool:
    """Faster for sure; where it is not by far, in another pair of processes too."""
    new, old = timed(plan), timed(best)
    return faster(new, old) and (gain(new, old)[0] > CLEAR or faster(measure(plan), measure(best)))


def confirm(found: Found, measure: Measure) -> None:
    """The best plan once more: who is picked as the fastest of many was lucky too, and a fresh measurement was not."""
    plain = found.of(found.plain)
    if found.best == found.plain or plain is None:
        return
    try:
        again = measure(found.best)
    except OutOfTime:
        found.not_tried.append("the best plan a second time, which would leave its luck out")
        return
    found.results[found.best.model_dump_json()] = again
    if not faster(again, plain):
        found.not_tried.append("a plan that looked faster was not, when it was timed again")
        found.best = found.plain


Allowed = Callable[[Plan], bool]


def _steps(found: Found, choice: Choice, timed: Measure, allowed: Allowed) -> Iterator[Plan]:
    """Plans to try. Where values are in order, from the present one upwards, then downwards, as long as it gets
    better."""

    def changed(value: dict[str, Any]) -> Plan | None:
        plan = found.best.model_copy(update=value)
        return plan if plan != found.best and allowed(plan) else None

    if not choice.climb:
        for value in choice.values:
            plan = changed(value)
            if plan is not None:
                yield plan
        return
    place = next((i for i, value in enumerate(choice.values) if _holds(found.best, value)), None)
    if place is None:
        name = choice.fields[0]
        place = sum(value[name] < getattr(found.best, name) for value in choice.values) - 1
    for way in (1, -1):
        if way == 1 and choice.name == "token_budget" and timed(found.best).pieces == 1 and found.best != found.plain:
            continue  # whole steps have room already
        start, flat = found.best, 0
        here = place
        while 0 <= here + way < len(choice.values) and flat < FLAT:
            here += way
            plan, before = changed(choice.values[here]), found.best
            if plan is None:
                continue
            yield plan
            flat = 0 if found.best != before else flat + 1
            if faster(timed(before), timed(plan)):
                break
        if found.best != start:
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


def ablation(found: Found, known: Sequence[Choice], measure: Measure, allowed: Allowed) -> list[Worth]:
    """Every choice that the best plan made, in the order of trying. What there is no time for is told."""
    made = choices_made(found.best, found.plain, known)
    sums = [found.plain]
    for _, change in made:
        sums.append(sums[-1].model_copy(update=change))
    wanted: dict[tuple[str, str], Plan] = {}
    for number, (choice, change) in enumerate(made):
        others = {name for other, more in made if other is not choice for name in more}
        wanted[choice.name, "left out"] = without(found.best, found.plain, set(change) - others)
        wanted[choice.name, "added"] = sums[number + 1]
        wanted[choice.name, "alone"] = found.plain.model_copy(update=change)
    results: dict[tuple[str, str], Result] = {}
    for kind in ("left out", "added", "alone"):
        for (name, how), plan in wanted.items():
            if how != kind:
                continue
            plan = _that_runs(plan, found.plain, allowed)
            key = plan.model_dump_json()
            if key not in found.results:
                if not allowed(plan):
                    found.not_tried.append(f"{name} {how}: such a plan cannot run")
                    continue
                try:
                    found.results[key] = measure(plan)
                except OutOfTime:
                    found.not_tried.append(f"{name} {how}: no time was left")
                    continue
            results[name, how] = found.results[key]
    return [
        Worth(choice.name, change, *(results.get((choice.name, how)) for how in ("alone", "added", "left out")))
        for choice, change in made
    ]
