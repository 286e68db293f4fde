"""Metrics as people read them: names, figures with their intervals, and what `sameday eval` says at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sameday.spec.words import count, in_one_line

NAMES = {
    "exact_match": "exact match (accuracy)",
    "label_match": "labels: all right",
    "label_precision": "labels: precision",
    "label_recall": "labels: recall",
    "label_f1": "labels: F1",
    "label_micro_precision": "labels, micro: precision",
    "label_micro_recall": "labels, micro: recall",
    "label_micro_f1": "labels, micro: F1",
    "numeric_match": "numbers within 5%",
    "macro_precision": "macro precision over answers",
    "macro_recall": "macro recall over answers",
    "macro_f1": "macro F1 over answers",
    "bleu": "BLEU",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "meteor": "METEOR",
    "loose_match": "loose match (contains, or 70% similar)",
    "tokens": "tokens of an answer",
}
"""In the order of the page. Accuracy is the exact match by another name."""
PLAIN = ("bleu", "rouge1", "rouge2", "rougeL", "meteor", "tokens")
"""Metrics that are no percentages: papers print BLEU and its like as 0 to 1."""
GROUPS = {"answer": "", "stage": "stage ", "type": "type "}
MAIN = ("exact_match", "label_f1", "bleu", "rougeL", "meteor", "loose_match")
"""Those that a terminal has room for."""


def name_of(metric: str) -> str:
    return NAMES.get(metric, metric.replace("_", " "))


def shown(name: str, given: float, sign: str = "") -> str:
    """A percentage, or a plain number; a difference, with its sign, has no unit."""
    given, places = (given, 2 if name == "tokens" else 3) if name in PLAIN else (100 * given, 1)
    said = f"{round(given, places) + 0.0:{sign}.{places}f}"  # the sum makes a zero of a negative one
    return said if sign or name in PLAIN else f"{said}%"


def between(name: str, low: float | None, high: float | None, sign: str = "") -> str:
    if low is None or high is None:
        return "no interval"
    return f"{shown(name, low, sign).removesuffix('%')} to {shown(name, high, sign)}"


def apart(name: str, compared: Mapping[str, Any]) -> str:
    """How sure a metric's difference is, of what `compare` found of all questions or of a group of them."""
    each = compared["metrics"][name]
    if not each["alike"]:
        return between(name, each["low"], each["high"], "+")
    some = each["questions"] != compared["questions"] or not compared["images"]
    where = count(each["questions"], "question") if some else count(compared["images"], "image")
    return f"no difference on {where}, which gives no interval"


def counted(questions: int, images: int, without: int = 0) -> str:
    """`without` of the questions have no image: each is drawn by itself, and is none."""
    asked = count(questions, "question")
    if without == questions:
        return f"{asked} without an image"
    return f"{asked} on {count(images, 'image')}" + (f", {without:,} of them without an image" if without else "")


def told(measured: Mapping[str, Any]) -> Iterator[str]:
    """What `measure` found, a line each: all questions, then each group of them by its exact match."""
    if not measured["questions"]:
        yield from measured["notes"]
        return
    figures = [_figure(name, measured["metrics"][name]) for name in MAIN if name in measured["metrics"]]
    yield f"{_asked(measured)}: {'; '.join(figures)}"
    for by, word in GROUPS.items():
        for key, group in measured["groups"][by].items():
            figure = _figure("exact_match", group["metrics"]["exact_match"])
            yield f"{word}{in_one_line(key)}, {_asked(group)}: {figure}"
    yield from measured["notes"]


def _asked(group: Mapping[str, Any]) -> str:
    return counted(group["questions"], group["images"], group.get("without_image", 0))


def _figure(name: str, each: Mapping[str, Any]) -> str:
    return f"{name_of(name)} {shown(name, each['value'])} ({between(name, each['low'], each['high'])})"
