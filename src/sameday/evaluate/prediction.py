"""What a model answered to one question, beside the right answer. Knows no torch: metrics and reports read it too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prediction:
    """`id` is the sample's (its line in the file), `where` its file and line, `image` the same text for all questions
    of one image's content. `prompt` is the last user turn as the model read it: with its line breaks, and `<image>` for
    images that do not stand at its beginning. `tokens` is how many tokens were generated, the one that ends an answer
    included."""

    id: int
    where: str
    image: str
    stage: int | None
    type: str | None
    question: str
    prompt: str
    answer: str
    prediction: str
    tokens: int
