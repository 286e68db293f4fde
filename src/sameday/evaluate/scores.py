"""What one answer is worth beside the right one. A score is 0 to 1; one that a question cannot have is left out."""

from __future__ import annotations

from difflib import SequenceMatcher

from sameday.evaluate.normal import labels, normalise, number
from sameday.evaluate.prediction import Prediction

TOLERANCE = 0.05
"""How far a number may be from the right one, as a share of it."""
SIMILAR = 0.7
"""From which similarity on the loose match counts two strings as one."""


def question_scores(prediction: Prediction) -> dict[str, float]:
    """`numeric_match` is there only where the right answer is a number."""
    return pair_scores(prediction.answer, prediction.prediction)


def pair_scores(answer: str, given: str) -> dict[str, float]:
    right, told = labels(answer), labels(given)
    shared = len(right & told)
    both = len(right) + len(told)
    scores = {
        "exact_match": float(normalise(answer) == normalise(given)),
        "label_match": float(right == told),
        "label_precision": shared / len(told) if told else float(not right),
        "label_recall": shared / len(right) if right else float(not told),
        "label_f1": 2 * shared / both if both else 1.0,
        "loose_match": float(loose_match(answer, given)),
    }
    if number(answer) is not None:
        scores["numeric_match"] = float(numeric_match(answer, given))
    return scores


def numeric_match(answer: str, given: str, tolerance: float = TOLERANCE) -> bool:
    """Two numbers that differ by at most this share of the right one. Where both have a unit, it must be the same: 3 mm
    are not 3 cm."""
    right, told = number(answer), number(given)
    if right is None or told is None or (right.unit and told.unit and right.unit != told.unit):
        return False
    return abs(told.value - right.value) <= tolerance * abs(right.value)


def loose_match(answer: str, given: str) -> bool:
    """The prediction contains the answer, or the two are 70% similar as strings. Lenient: "no" is in "unknown"."""
    right, told = answer.strip().lower(), given.strip().lower()
    if not right or not told:
        return right == told
    return right in told or SequenceMatcher(None, right, told).ratio() >= SIMILAR
