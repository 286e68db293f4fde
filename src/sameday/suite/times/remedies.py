"""What would make a deadline hold, each with its price. A remedy is the suite changed as a user would change it, and
its end is predicted as the suite's own is."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.spec.suite import Suite
from sameday.spec.words import clock, count

MORE_GPUS = 8
"""So many more are looked at."""
SHARING = {"share_images": "true", "packing": "true", "max_questions": "null"}
"""Plan fields that make use of questions of one image that stand together."""


@dataclass(frozen=True)
class Changeable:
    """A training that has not begun, and so could be another."""

    recipe: Recipe
    plan: Plan
    automatic: bool
    expected: bool = False
    """Its time is the user's: no change of it is known."""


@dataclass(frozen=True)
class Remedy:
    """`seconds` until the end with it; None where that is not known, and `holds` then is too."""

    what: str
    price: str
    seconds: float | None
    holds: bool | None


End = Callable[[Suite, int], float | None]
"""Seconds until the end of a suite on so many GPUs; None where a job's time is not known."""


def remedies(suite: Suite, gpus: int, left: float, trainings: Mapping[str, Changeable], end: End) -> Iterator[Remedy]:
    """For `left` seconds until the deadline."""
    yield from _gpus(suite, gpus, left, end)
    yield from _epochs(suite, gpus, left, trainings, end)
    yield from _order(suite, gpus, left, trainings, end)
    yield from _cache(suite, gpus, left, trainings, end)


def changed(suite: Suite, names: Sequence[str], sets: Sequence[str]) -> Suite:
    """The suite with settings more in some jobs."""
    jobs = {
        name: job.model_copy(update={"set": (*job.set, *sets)}) if name in names else job
        for name, job in suite.jobs.items()
    }
    return suite.model_copy(update={"jobs": jobs})


def by_image(suite: Suite, trainings: Mapping[str, Changeable]) -> Suite | None:
    """With the questions of an image together, where they are at random; None where no training has such questions."""
    chosen = [
        name
        for name, each in trainings.items()
        if "shared prefixes" in each.recipe.has and _order_of(each.recipe) == "shuffle"
    ]
    if not chosen:
        return None
    sharing = [name for name in chosen if not trainings[name].automatic and not trainings[name].plan.share_images]
    plain = changed(suite, chosen, ["recipe.order=by_image"])
    return changed(plain, sharing, [f"plan.{name}={value}" for name, value in SHARING.items()])


def _order_of(recipe: Recipe) -> str | None:
    return getattr(getattr(recipe, "order", None), "kind", None)


def cached(suite: Suite, trainings: Mapping[str, Changeable]) -> tuple[Suite, list[str]] | None:
    chosen = [
        name
        for name, each in trainings.items()
        if "image cache" in each.recipe.has and each.plan.cache == "none" and not each.expected
    ]
    sets = ["plan.cache=features", "plan.keep_features=false"]  # what a disk has is not kept besides
    return (changed(suite, chosen, sets), chosen) if chosen else None


def _gpus(suite: Suite, gpus: int, left: float, end: End) -> Iterator[Remedy]:
    if not gpus or not any(job.gpus for job in suite.jobs.values()):
        return
    ends = [(more, end(suite, gpus + more)) for more in range(1, MORE_GPUS + 1)]
    enough = next(((more, seconds) for more, seconds in ends if seconds is not None and seconds <= left), None)
    if enough is not None:
        more, seconds = enough
        price = f"{count(more, 'GPU')} for {clock(seconds or 0.0)}"
        yield Remedy(f"{count(more, 'more GPU')}", price, seconds, True)
    elif (most := ends[-1][1]) is not None:
        what = f"more GPUs: {MORE_GPUS} more are not enough, since none makes a job or a chain of jobs shorter"
        yield Remedy(what, "", most, False)


def _epochs(suite: Suite, gpus: int, left: float, trainings: Mapping[str, Changeable], end: End) -> Iterator[Remedy]:
    epochs = {
        name: each.recipe.num_epochs
        for name, each in trainings.items()
        if each.recipe.max_steps is None and not each.expected
    }
    price = "another model: it sees its data fewer times, and its scores may be lower"
    most = max(epochs.values(), default=1)
    if most == 1:
        return

    def more_than(number: int) -> list[str]:
        return [name for name, before in epochs.items() if before > number]

    def with_epochs(number: int) -> float | None:
        return end(changed(suite, more_than(number), [f"recipe.num_epochs={number}"]), gpus)

    def seconds(number: int) -> float:
        known = with_epochs(number)
        return math.inf if known is None else known

    # The most that hold, by halving: there may be thousands, and each takes a whole schedule.
    number = max(1, bisect_right(range(1, most), left, key=seconds))
    end_then = with_epochs(number)
    if end_then is not None and end_then > left:
        yield Remedy("fewer epochs: a single one is not enough", price, end_then, False)
    else:
        what = f"{count(number, 'epoch')} instead of {most} in {', '.join(more_than(number))}"
        yield _tried(what, price, end_then, left)


def _order(suite: Suite, gpus: int, left: float, trainings: Mapping[str, Changeable], end: End) -> Iterator[Remedy]:
    other = by_image(suite, {name: each for name, each in trainings.items() if not each.expected})
    if other is not None:
        names = [name for name in suite.jobs if other.jobs[name] != suite.jobs[name]]
        what = f"order by_image in {', '.join(names)}: each image is computed once for all of its questions in a step"
        price = "another recipe, with a fingerprint of its own: the same questions in another order"
        yield _tried(what, price, end(other, gpus), left)


def _cache(suite: Suite, gpus: int, left: float, trainings: Mapping[str, Changeable], end: End) -> Iterator[Remedy]:
    change = cached(suite, trainings)
    if change is not None:
        other, names = change
        what = f"a cache of features for {', '.join(names)} (`sameday cache` fills it ahead, once for all of them)"
        yield _tried(what, "disk, and the time to fill it; the same model", end(other, gpus), left)


def _tried(what: str, price: str, seconds: float | None, left: float) -> Remedy:
    return Remedy(what, price, seconds, None if seconds is None else seconds <= left)
