"""Numbers of each question, summed over images, from which every metric of a set of questions is computed: also that
of a resample, which draws some images twice and some not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np

from sameday.data.questions.sample import WITHOUT_IMAGE
from sameday.evaluate.bootstrap import Floats
from sameday.evaluate.normal import labels, normalise
from sameday.evaluate.overlap import (
    BLEU_COUNTS,
    ORDER,
    ROUGE,
    Unavailable,
    bleu,
    bleu_counter,
    meteor_scorer,
    missing,
    rouge_scorer,
)
from sameday.evaluate.prediction import Prediction
from sameday.evaluate.scores import pair_scores

MEANS = (
    *("exact_match", "label_match", "label_precision", "label_recall", "label_f1", "numeric_match", "loose_match"),
    *(*ROUGE, "meteor", "tokens"),
)
"""Metrics that are means over questions."""
GRADED = ("bleu", *ROUGE, "meteor", "tokens")
"""Metrics that are no share of what is right: a zero of BLEU may mean no more than that answers are short."""
MICRO = ("label_micro_precision", "label_micro_recall", "label_micro_f1")
MACRO = ("macro_precision", "macro_recall", "macro_f1")
Known = TypeVar("Known")

MOST_CLASSES = 2000
"""With more different answers macro scores have no interval: they mean little then, and it would take long."""


@cache
def class_scorer() -> Callable[[Any, Any], dict[str, float]]:
    """Accuracy, and macro scores over all right answers as classes. What is no question's answer is no class."""
    try:
        from sklearn.metrics import accuracy_score, precision_recall_fscore_support
    except ImportError:
        raise missing("Accuracy and macro scores over answers are", "scikit-learn") from None

    def score(right: Any, given: Any) -> dict[str, float]:
        classes = np.unique(right)
        macro = precision_recall_fscore_support(right, given, labels=classes, average="macro", zero_division=0)[:3]
        named = {name: float(value) for name, value in zip(MACRO, macro, strict=True)}
        return {"accuracy": float(accuracy_score(right, given)), **named}

    return score


@dataclass(frozen=True)
class Questions:
    """Numbers of every question, by name; NaN where a question has none. What no question has is not there."""

    predictions: list[Prediction]
    images: Any
    """Of each question the number of its image, in the order of their names."""
    numbers: dict[str, Floats]
    labels: Floats
    """Labels that are right, that were given, and both."""
    bleu: Floats | None
    right: Any
    """Answers as numbers, equal where they match exactly."""
    given: Any
    classes: Callable[[Any, Any], dict[str, float]] | None
    notes: list[str]
    """What this machine cannot compute, and what it lacks."""

    @classmethod
    def of(cls, predictions: Iterable[Prediction]) -> Questions:
        """In an order of their own, so that no sum depends on the order in which they come."""
        listed = sorted(predictions, key=lambda p: (p.image, p.where, p.id, p.question, p.answer, p.prediction))
        pairs = list(dict.fromkeys((p.answer, p.prediction) for p in listed))  # few, where answers are short
        places = {pair: n for n, pair in enumerate(pairs)}
        which = np.array([places[p.answer, p.prediction] for p in listed])
        notes: list[str] = []
        scorers: list[Callable[[str, str], dict[str, float]]] = [pair_scores]
        for scorer in (rouge_scorer, meteor_scorer):
            if (known := _or_note(scorer, notes)) is not None:
                scorers.append(known)
        scored = [{name: v for scorer in scorers for name, v in scorer(*pair).items()} for pair in pairs]
        numbers = {name: np.array([each.get(name, np.nan) for each in scored])[which] for name in MEANS}
        numbers["tokens"] = np.array([float(p.tokens) for p in listed])
        counter = _or_note(bleu_counter, notes)
        sets = [(labels(answer), labels(given)) for answer, given in pairs]
        codes: dict[str, int] = {}
        coded = [[codes.setdefault(normalise(text), len(codes)) for text in pair] for pair in pairs]
        right, given = np.array(coded)[which].T
        images = {name: n for n, name in enumerate(sorted({p.image for p in listed}))}
        return cls(
            predictions=listed,
            images=np.array([images[p.image] for p in listed]),
            numbers={name: column for name, column in numbers.items() if not np.isnan(column).all()},
            labels=np.array([(len(a), len(b), len(a & b)) for a, b in sets], dtype=np.float64)[which],
            bleu=np.array([counter(*pair) for pair in pairs], dtype=np.float64)[which] if counter else None,
            right=right,
            given=given,
            classes=_or_note(class_scorer, notes),
            notes=notes,
        )


class Sums:
    """Of some of the questions, by image."""

    def __init__(self, questions: Questions, rows: Sequence[int] | Any) -> None:
        self.rows = np.asarray(rows)
        self.images, self._place = np.unique(questions.images[self.rows], return_inverse=True)
        self.without_image = sum(questions.predictions[row].image.startswith(WITHOUT_IMAGE) for row in self.rows)
        self.names = [name for name, all_ in questions.numbers.items() if not np.isnan(all_[self.rows]).all()]
        columns = []
        for name in self.names:
            values = questions.numbers[name][self.rows]
            columns += [np.nan_to_num(values), ~np.isnan(values)]
        columns += [*questions.labels[self.rows].T]
        if questions.bleu is not None:
            columns += [*questions.bleu[self.rows].T]
        self._has_bleu = questions.bleu is not None
        self._matrix = np.stack([self._by_image(column) for column in columns], axis=1)
        self._right, self._given = questions.right[self.rows], questions.given[self.rows]
        self._classes, self._code = np.unique(self._right, return_inverse=True)
        self._scorer = questions.classes
        self._counts: Any = None

    def _by_image(self, column: Any) -> Floats:
        return np.bincount(self._place, weights=column, minlength=len(self.images)).astype(np.float64)

    def count(self, name: str) -> int:
        """How many questions have it."""
        if name not in self.names:
            return len(self.rows)
        return int(self._matrix[:, 2 * self.names.index(name) + 1].sum())

    def values(self) -> dict[str, float]:
        """Of the questions as they are."""
        every = np.ones((1, len(self.images)))
        values = {name: float(value[0]) for name, value in self._of(every).items()}
        if self._has_bleu:
            values["bleu"] = bleu(self._matrix[:, -BLEU_COUNTS:].sum(axis=0))
        return values | (self._scorer(self._right, self._given) if self._scorer else {})

    @property
    def many_classes(self) -> bool:
        return len(self._classes) > MOST_CLASSES

    def resampled(self, weights: Floats) -> dict[str, Floats]:
        """Of resamples: how often each image is drawn, of all images, in each row."""
        drawn = weights[:, self.images]
        values = self._of(drawn)
        if self._scorer is not None:
            values["accuracy"] = values["exact_match"]
            values |= {} if self.many_classes else self._macro(drawn)
        return values

    def _of(self, drawn: Floats) -> dict[str, Floats]:
        sums = drawn @ self._matrix
        values = {name: _ratio(sums[:, 2 * n], sums[:, 2 * n + 1]) for n, name in enumerate(self.names)}
        right, given, shared = sums[:, 2 * len(self.names) :][:, :3].T
        micro = (_ratio(shared, given, 0.0), _ratio(shared, right, 0.0), _ratio(2 * shared, right + given, 0.0))
        some = right + given > 0
        values |= {name: np.where(some, value, np.nan) for name, value in zip(MICRO, micro, strict=True)}
        if self._has_bleu:
            values["bleu"] = np.where(drawn.sum(axis=1) > 0, _bleu(sums[:, -BLEU_COUNTS:]), np.nan)
        return values

    def _macro(self, drawn: Floats) -> dict[str, Floats]:
        """Over the classes that a resample has, as scikit-learn would compute them of it."""
        if self._counts is None:
            from scipy.sparse import csr_array

            known = np.isin(self._given, self._classes)
            told = np.searchsorted(self._classes, self._given[known])
            hits = self._right == self._given
            size = (len(self._classes), len(self.images))
            self._counts = [
                csr_array((np.ones(len(codes)), (codes, self._place[which])), shape=size)
                for codes, which in ((self._code, slice(None)), (told, known), (self._code[hits], hits))
            ]
        right, given, shared = (each @ drawn.T for each in self._counts)
        there = right > 0
        each = (_ratio(shared, given, 0.0), _ratio(shared, right, 0.0), _ratio(2 * shared, right + given, 0.0))
        mean = [_ratio((value * there).sum(axis=0), there.sum(axis=0)) for value in each]
        return dict(zip(MACRO, mean, strict=True))


def _bleu(counts: Floats) -> Floats:
    """`bleu` of many resamples at once; the library takes them one by one."""
    precision = _ratio(counts[:, :ORDER], counts[:, ORDER : 2 * ORDER], 0.0)
    tokens, right = counts[:, -2:].T
    brevity = np.exp(np.minimum(0.0, 1.0 - _ratio(right, tokens, np.inf)))
    return np.asarray(precision.prod(axis=1) ** (1 / ORDER) * brevity, dtype=np.float64)


def _ratio(above: Any, below: Any, otherwise: float = float("nan")) -> Floats:
    return np.divide(above, below, out=np.full(np.shape(above), otherwise), where=np.asarray(below) > 0)


def _or_note(scorer: Callable[[], Known], notes: list[str]) -> Known | None:
    try:
        return scorer()
    except Unavailable as why:
        notes.append(str(why))
        return None
