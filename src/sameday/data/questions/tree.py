"""How far the questions of a group agree after their image: what all of them have in common, and forks of it, in which
some agree further, such as those that are asked in one template. What is in common is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Text = tuple[int, ...]
"""A question's tokens after its image that may be shared."""

LEAST = 16
"""Tokens that a fork has in common at least: two more attention calls in each layer are not worth a few."""


@dataclass(frozen=True)
class Fork:
    """Questions `first` to before `last` of a group begin with so many `tokens` in common, those of the root
    included."""

    first: int
    last: int
    tokens: int


@dataclass(frozen=True)
class Tree:
    """Of so many questions, which begin with `root` tokens in common. Either all of them are in forks or none: one that
    agrees with no other has a fork of its own, which holds one token."""

    questions: int
    root: int
    forks: tuple[Fork, ...] = ()

    @property
    def saved(self) -> int:
        """Tokens that are not computed again."""
        return (self.questions - 1) * self.root + _saved(self.forks, self.root)


def agreements(texts: Sequence[Text]) -> list[int]:
    """How many tokens each text and the next one begin with in common. Of sorted texts the least of some neighbours is
    what all of them have in common."""
    return [_common(one, other) for one, other in pairwise(texts)]


def grow(agree: Sequence[int]) -> Tree:
    """Of sorted texts, of which these are the agreements: the tree of two levels that saves the most, of those
    whose forks hold neighbours."""
    questions, root = len(agree) + 1, min(agree, default=0)
    forks = _forks(agree, root)
    if forks:
        inside = {number for fork in forks for number in range(fork.first, fork.last)}
        forks += [Fork(number, number + 1, root + 1) for number in range(questions) if number not in inside]
    return Tree(questions, root, tuple(sorted(forks, key=lambda fork: fork.first)))


def _forks(agree: Sequence[int], root: int) -> list[Fork]:
    """Those that save the most: for the first questions of one more each time, with the last of them alone, or in a
    fork with some before it."""
    best: list[tuple[int, list[Fork]]] = [(0, [])]
    for last in range(1, len(agree) + 2):
        found, tokens = best[-1], max(agree, default=0)
        for first in range(last - 2, -1, -1):
            tokens = min(tokens, agree[first])
            if tokens - root < LEAST:
                break
            saved, before = best[first]
            saved += (last - first - 1) * (tokens - root)
            if saved > found[0]:
                found = saved, [*before, Fork(first, last, tokens)]
        best.append(found)
    return best[-1][1]


def _saved(forks: Sequence[Fork], root: int) -> int:
    return sum((fork.last - fork.first - 1) * (fork.tokens - root) for fork in forks)


def _common(one: Text, other: Text) -> int:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
