"""How far the questions of a group agree after their image: what they have in common is computed once for all of them,
and a question's own tokens are what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Text = tuple[int, ...]
"""A question's tokens after its image that may be shared."""


@dataclass(frozen=True)
class Tree:
    """Of so many questions, which begin with `root` tokens in common."""

    questions: int
    root: int

    @property
    def saved(self) -> int:
        """Tokens that are not computed again."""
        return (self.questions - 1) * self.root


def agreements(texts: Sequence[Text]) -> list[int]:
    """How many tokens each text and the next one begin with in common. Of texts in order, the least of some neighbours
    is what all of them have in common."""
    return [_common(one, other) for one, other in pairwise(texts)]


def grow(agree: Sequence[int]) -> Tree:
    """Of texts in order, of which these are the agreements."""
    return Tree(len(agree) + 1, min(agree, default=0))


def _common(one: Text, other: Text) -> int:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
