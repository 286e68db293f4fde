"""How good the answers to a set of questions are: every metric with its interval and its count, of all questions, of
open and closed ones, by stage and by type; and which answers are taken for which. Plain data, written as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sameday.evaluate.bootstrap import LEVEL, RESAMPLES, Floats, bound_of_agreement, draws, interval
from sameday.evaluate.normal import labels, normalise
from sameday.evaluate.overlap import unread_by_rouge
from sameday.evaluate.prediction import Prediction
from sameday.evaluate.sums import GRADED, MOST_CLASSES, Questions, Sums
from sameday.record.folder import versions

COMMONEST = 12
"""Answers in the table of confusion."""
LIBRARIES = ("sameday", "scikit-learn", "sacrebleu", "rouge-score", "nltk")
"""Packages that count, whose versions a published number should name."""

Groups = dict[str, dict[str, list[int]]]


def measure(predictions: Iterable[Prediction], resamples: int = RESAMPLES, seed: int = 0) -> dict[str, Any]:
    """The order of the predictions does not matter, and the same predictions give the same intervals."""
    listed = list(predictions)
    if not listed:
        return {"questions": 0, "images": 0, "metrics": {}, "groups": {}, "notes": ["no question was answered"]}
    questions = Questions.of(listed)
    groups = groups_of(questions.predictions)
    everything = {("", ""): Sums(questions, range(len(listed)))}
    sums = everything | {(by, key): Sums(questions, rows) for by, of in groups.items() for key, rows in of.items()}
    values = {which: each.values() for which, each in sums.items()}
    images = int(questions.images.max()) + 1
    spread: dict[tuple[str, str], list[dict[str, Floats]]] = {which: [] for which in sums}
    for weights in draws(images, resamples, seed):
        for which, each in sums.items():
            spread[which].append(each.resampled(weights))
    measured = {which: _measured(each, values[which], spread[which]) for which, each in sums.items()}
    return {
        **measured["", ""],
        "groups": {by: {key: measured[by, key] for key in of} for by, of in groups.items()},
        "confusion": confusion(questions.predictions),
        "interval": {"level": LEVEL, "resamples": resamples, "seed": seed, "over": "images"},
        "versions": versions(LIBRARIES),
        "notes": [*questions.notes, *_notes(sums["", ""], groups, [each.answer for each in listed])],
    }


def groups_of(predictions: Sequence[Prediction]) -> Groups:
    """Which questions are closed, open, or have a list as their answer; which are of each stage and of each type."""
    kinds: dict[str, list[int]] = {}
    stages: dict[int, list[int]] = {}
    types: dict[str, list[int]] = {}
    for n, each in enumerate(predictions):
        kinds.setdefault("closed" if is_closed(each) else "open", []).append(n)
        if len(labels(each.answer)) > 1:
            kinds.setdefault("list", []).append(n)
        if each.stage is not None:
            stages.setdefault(each.stage, []).append(n)
        if each.type is not None:
            types.setdefault(each.type, []).append(n)
    return {
        "answer": {kind: kinds[kind] for kind in ("closed", "open", "list") if kind in kinds},
        "stage": {str(stage): stages[stage] for stage in sorted(stages)},
        "type": {kind: types[kind] for kind in sorted(types)},
    }


def is_closed(prediction: Prediction) -> bool:
    """The right answer is yes or no, or the type says so, as "closed" or "yes/no"."""
    kind = normalise(prediction.type or "").replace(" ", "").replace("_", "").replace("-", "")
    return normalise(prediction.answer) in ("yes", "no") or kind in ("closed", "closedended", "yes/no", "yesno")


def _measured(sums: Sums, values: dict[str, float], spread: list[dict[str, Floats]]) -> dict[str, Any]:
    metrics = {}
    for name, value in values.items():
        if np.isnan(value):
            continue
        resampled = np.concatenate([each[name] for each in spread]) if spread and name in spread[0] else np.array([])
        low, high = spread_of(value, resampled, len(sums.images), name not in GRADED)
        metrics[name] = {"value": value, "low": low, "high": high, "questions": sums.count(name)}
    without = {"without_image": sums.without_image} if sums.without_image else {}
    return {"questions": len(sums.rows), "images": len(sums.images) - sums.without_image, **without, "metrics": metrics}


def spread_of(value: float, resampled: Floats, images: int, share: bool) -> tuple[float | None, float | None]:
    """The interval of a metric; none where one image cannot say how much images differ."""
    ends = interval(value, resampled)
    if ends is None:
        return None, None
    if share and ends == (0.0, 0.0):
        return 0.0, bound_of_agreement(images)
    if share and ends == (1.0, 1.0):
        return 1.0 - bound_of_agreement(images), 1.0
    return ends if images > 1 else (None, None)


def _notes(whole: Sums, groups: Groups, answers: Sequence[str]) -> list[str]:
    many = f"macro scores have no interval: there are more than {MOST_CLASSES:,} different answers"
    notes = [many] if whole.many_classes else []
    notes += [f"no {kind} question: left out" for kind in ("closed", "open") if kind not in groups["answer"]]
    if "list" not in groups["answer"]:
        notes.append("no answer is a list of several labels: lists have no line of their own")
    if "numeric_match" not in whole.names:
        notes.append("no answer is a number: numeric match is left out")
    if "rougeL" in whole.names and (unread := sum(unread_by_rouge(answer) for answer in answers)):
        notes.append(
            f"{unread:,} of {len(answers):,} right answers have letters that ROUGE does not read (rouge-score knows a "
            "to z and digits alone): a word of such letters counts for nothing, even where it is right"
        )
    return notes + [f"no question has a {by}: left out" for by in ("stage", "type") if not groups[by]]


def confusion(predictions: Sequence[Prediction], most: int = COMMONEST) -> dict[str, Any]:
    """Of the commonest right answers, how often each was given for each; `other` counts all other answers."""
    pairs = Counter((normalise(each.answer), normalise(each.prediction)) for each in predictions)
    asked: Counter[str] = Counter()
    for (right, _), times in pairs.items():
        asked[right] += times
    answers = sorted(asked, key=lambda answer: (-asked[answer], answer))[:most]
    counts = [[pairs[right, given] for given in answers] for right in answers]
    return {
        "answers": answers,
        "counts": counts,
        "other": [asked[right] - sum(row) for right, row in zip(answers, counts, strict=True)],
        "rest": sum(asked.values()) - sum(asked[answer] for answer in answers),
    }
