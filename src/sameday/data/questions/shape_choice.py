"""Which few shapes serve the rows of a run: a pure function of the sizes of its rows, so that a run that goes on later
comes to the same ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sameday.data.questions.shapes import Section, Shape

MOST_SHAPES = 16
"""Each takes a second or so to be recorded."""
MOST_PADDED = 1.25
"""Tokens of a shape over those of a row: what is padded beyond that costs more than its launches did."""
LEAST_USES = 8
"""In a run: a shape that comes more rarely is not worth its recording."""
STEP = 32
"""Tokens to which sections are rounded at first."""
TILE = 128
"""Tokens that a matmul computes at once: up to a multiple of it padding is free."""
MOST_COMPARED = 64
"""Different shapes from which fewer are made; where there are more, sections are rounded more coarsely."""
FREE = 0.005
"""Of all tokens: two shapes whose rows would be padded by no more than that become one."""


@dataclass(frozen=True)
class _Cluster:
    """Rows that one shape serves: how many, and the tokens of the smallest of them."""

    shape: Shape
    rows: int
    smallest: int

    def joined(self, other: _Cluster) -> _Cluster:
        shape = Shape(*map(max, self.shape, other.shape))
        return _Cluster(shape, self.rows + other.rows, min(self.smallest, other.smallest))

    @property
    def tokens(self) -> int:
        return self.rows * self.shape.tokens

    @property
    def wasteful(self) -> bool:
        return not _worth(self.shape.tokens, self.smallest)


def choose_shapes(rows: Sequence[Shape], times: float) -> tuple[Shape, ...]:
    """For rows of these sizes, each of which comes about so many `times` in a run. The most used first."""
    step = STEP
    while len({_rounded(row, step) for row in rows}) > MOST_COMPARED:
        step *= 2
    smallest: dict[Shape, int] = {}
    for row in rows:
        shape = _rounded(row, step)
        smallest[shape] = min(row.tokens, smallest.get(shape, row.tokens))
    counts = Counter(_rounded(row, step) for row in rows)
    clusters = [_Cluster(shape, count, smallest[shape]) for shape, count in sorted(counts.items())]
    clusters = _fewer([each for each in clusters if not each.wasteful])
    used = sorted((each for each in clusters if each.rows * times >= LEAST_USES), key=lambda each: -each.rows)
    return tuple(dict.fromkeys(each.shape for each in map(_tiled, used[:MOST_SHAPES])))


def fitting(row: Shape, shapes: Sequence[Shape]) -> Shape | None:
    """The smallest shape that a row can be padded to without much waste, or None."""
    able = [shape for shape in shapes if shape.covers(row) and _worth(shape.tokens, row.tokens)]
    return min(able, key=lambda shape: (shape.tokens, shape), default=None)


def _worth(padded: int, tokens: int) -> bool:
    return padded <= MOST_PADDED * tokens + TILE


def _fewer(clusters: list[_Cluster]) -> list[_Cluster]:
    """Joined two by two, those first whose rows are then padded the least."""
    free = FREE * sum(each.tokens for each in clusters)
    while len(clusters) > 1:
        pairs = [(a, b) for n, a in enumerate(clusters) for b in clusters[n + 1 :]]
        made = [
            (joined.tokens - a.tokens - b.tokens, n)
            for n, (a, b) in enumerate(pairs)
            if not (joined := a.joined(b)).wasteful
        ]
        if not made:
            return clusters
        cost, best = min(made)
        if cost > free and len(clusters) <= MOST_SHAPES:
            return clusters
        a, b = pairs[best]
        clusters = [*(each for each in clusters if each is not a and each is not b), a.joined(b)]
    return clusters


def _rounded(row: Shape, step: int) -> Shape:
    """With room for a token of padding in each section that is there."""
    sections = (-(-(tokens + 1) // step) * step if tokens else 0 for tokens in row.sections)
    few = (-(-count // 4) * 4 for count in (row.prefixes, row.forked_prefixes, row.forks))
    return Shape(
        *sections,
        -(-row.pieces // 8) * 8,
        *few,
        longest=-(-row.longest // 64) * 64,
        image_tokens=-(-row.image_tokens // step) * step,
        targets=-(-row.targets // 32) * 32,
    )


def _tiled(cluster: _Cluster) -> _Cluster:
    """Its last section is padded further, to whole tiles."""
    shape = cluster.shape
    last = max(section for section in Section if shape[section])
    more = -shape.tokens % TILE
    return replace(cluster, shape=shape._replace(**{shape._fields[last]: shape[last] + more}))
