"""Two sets of answers to the same questions: what changed, and whether more than chance. Both are measured on the same
resamples of images, so that what is hard for both does not widen the interval of their difference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from sameday.data.questions.sample import WITHOUT_IMAGE
from sameday.evaluate.bootstrap import LEVEL, RESAMPLES, Floats, bound_of_agreement, draws, interval
from sameday.evaluate.measure import groups_of
from sameday.evaluate.prediction import Prediction
from sameday.evaluate.sums import GRADED, Questions, Sums

SAME = 1e-12
"""A difference that is none but for the order of sums."""


def compare(
    first: Iterable[Prediction], second: Iterable[Prediction], resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Any]:
    """The second's metrics minus the first's, over the questions that both answered; plain data, like `measure`'s."""
    pairs, only_first, only_second = matched(first, second)
    counts = {"only_first": only_first, "only_second": only_second}
    if not pairs:
        return {"questions": 0, "images": 0, **counts, "metrics": {}, "groups": {}}
    sides = [Questions.of(side) for side in zip(*pairs, strict=True)]
    groups = groups_of(sides[0].predictions)
    everything = {"": {"": list(range(len(pairs)))}}
    sums = {
        (by, key): [Sums(side, rows) for side in sides]
        for by, of in (everything | groups).items()
        for key, rows in of.items()
    }
    values = {which: [each.values() for each in both] for which, both in sums.items()}
    spread: dict[tuple[str, str], list[dict[str, Floats]]] = {which: [] for which in sums}
    for weights in draws(int(sides[0].images.max()) + 1, resamples, seed):
        for which, both in sums.items():
            there, here = (each.resampled(weights) for each in both)
            spread[which].append({name: here[name] - there[name] for name in there.keys() & here.keys()})
    compared = {which: _compared(both[0], values[which], spread[which]) for which, both in sums.items()}
    return {
        **compared["", ""],
        **counts,
        "groups": {by: {key: compared[by, key] for key in of} for by, of in groups.items()},
        "interval": {"level": LEVEL, "resamples": resamples, "seed": seed, "over": "images"},
    }


def matched(
    first: Iterable[Prediction], second: Iterable[Prediction]
) -> tuple[list[tuple[Prediction, Prediction]], int, int]:
    """Answers to the same question, and how many of each side have none beside them. A question is the same by the
    content of its images, its text and its right answer. Where one is asked several times, its file and line tell which
    is which, or its line, or the order in which they come. The second of a pair takes all but the answer given from the
    first."""
    there, here = list(first), list(second)
    pairs: list[tuple[Prediction, Prediction]] = []
    for place in _PLACES:
        waiting: dict[Any, list[Prediction]] = {}
        for each in reversed(here):
            waiting.setdefault((_content(each), place(each)), []).append(each)
        alone = []
        for each in there:
            if others := waiting.get((_content(each), place(each))):
                other = others.pop()
                pairs.append((each, replace(each, prediction=other.prediction, tokens=other.tokens)))
            else:
                alone.append(each)
        there, here = alone, [each for others in waiting.values() for each in others]
        here.sort(key=lambda each: each.id)
    return pairs, len(there), len(here)


_PLACES: tuple[Callable[[Prediction], Any], ...] = (lambda p: p.where, lambda p: p.id, lambda p: None)
"""What tells questions of one content apart, the surest first."""


def _content(each: Prediction) -> tuple[str, str, str]:
    return "" if each.image.startswith(WITHOUT_IMAGE) else each.image, each.question, each.answer


def _compared(sums: Sums, values: list[dict[str, float]], spread: list[dict[str, Floats]]) -> dict[str, Any]:
    there, here = values
    metrics = {}
    for name in there:
        if name not in here or np.isnan(there[name]) or np.isnan(here[name]):
            continue
        difference = here[name] - there[name]
        resampled = np.concatenate([each[name] for each in spread]) if name in spread[0] else np.array([])
        ends = interval(difference, resampled)
        low, high = (ends if len(sums.images) > 1 else None) or (None, None)
        if low == high and abs(difference) == 1.0 and name not in GRADED:
            # All right against all wrong, in every image: draws show no spread.
            least = 1.0 - bound_of_agreement(len(sums.images))
            low, high = (least, 1.0) if difference > 0 else (-1.0, -least)
        # Alike in every image: from 0 to 0 would say that they are alike in all others too.
        alike = ends is not None and max(abs(difference), float(np.nanmax(np.abs(resampled)))) < SAME
        metrics[name] = {
            "first": there[name],
            "second": here[name],
            "difference": difference,
            "low": None if alike else low,
            "high": None if alike else high,
            "alike": alike,
            "questions": sums.count(name),
        }
    return {"questions": len(sums.rows), "images": len(sums.images) - sums.without_image, "metrics": metrics}
