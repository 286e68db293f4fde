"""Answers for tests of metrics: drawn ones, and generators of any."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from sameday.evaluate.measure import measure
from sameday.evaluate.prediction import Prediction
from sameday.evaluate.scores import question_scores

ANSWERS = ("yes", "no", "polyp", "pink; red", "red; pink; white", "2", "3 polyps", "5-10mm", "ulcerative colitis")


def prediction(answer: str, given: str, n: int = 0, **fields: Any) -> Prediction:
    usual = {"image": f"image {n}", "where": f"val.jsonl:{n + 1}", "question": f"what is {n % 7}?", "tokens": 3}
    rest = {"id": n + 1, "stage": None, "type": None, "prompt": "", "answer": answer, "prediction": given}
    return Prediction(**(usual | rest | fields))


def drawn(images: int, each: int, right: float, seed: int = 0, answers: Sequence[str] = ANSWERS) -> list[Prediction]:
    """Answers of which about so many are right; the questions are the same for every seed."""
    asked, guess = random.Random(0), random.Random(seed)
    predictions = []
    for n in range(images * each):
        answer = asked.choice(answers)
        given = answer if guess.random() < right else guess.choice(answers)
        fields = {"image": f"image {n // each}", "stage": n % 3 + 1, "type": ("colour", "count")[n % 2]}
        predictions.append(prediction(answer, given, n, **fields, tokens=guess.randint(1, 9)))
    return predictions


def line(each: Prediction) -> dict[str, Any]:
    """As predictions.jsonl has it."""
    return {**asdict(each), "scores": question_scores(each)}


def write_answers(run: Path, name: str, predictions: Sequence[Prediction], resamples: int = 100) -> Path:
    """As `sameday eval` leaves them in a run's folder."""
    folder = run / "answers" / name
    folder.mkdir(parents=True)
    (folder / "predictions.jsonl").write_text("".join(json.dumps(line(each)) + "\n" for each in predictions))
    (folder / "metrics.json").write_text(json.dumps(measure(predictions, resamples), indent=2))
    return folder


words = st.sampled_from(["polyp", "Polyp", "a", "the", "red", "pink;", "3", "10mm", "5-10", "é", "ﬁ", "東京", ".", ""])
sentences = st.lists(words, max_size=8).map(" ".join)
texts = st.one_of(sentences, st.text(max_size=20))


@st.composite
def answered(draw: st.DrawFn, most: int = 12) -> list[Prediction]:
    """A few answers to questions about a few images, some right."""
    answers = st.one_of(st.sampled_from(ANSWERS), texts)
    predictions = []
    for n in range(draw(st.integers(1, most))):
        right = draw(answers)
        given = right if draw(st.booleans()) else draw(answers)
        fields = {
            "image": f"image {draw(st.integers(0, 3))}",
            "stage": draw(st.sampled_from([None, 1, 2])),
            "type": draw(st.sampled_from([None, "closed", "colour"])),
        }
        predictions.append(prediction(right, given, n, **fields))
    return predictions
