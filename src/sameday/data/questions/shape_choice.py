"""Which few shapes serve the rows of a run: a pure function of the sizes of its rows, so that a run that goes on later
comes to the same ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sameday.data.questions.shapes import Section, Shape

MOST_SHAPES = 16
"""Each takes a second or so to be recorded."""
MOST_PADDED = 1.25
MOST_MORE = 256
"""Tokens of a shape over those of a row, and beyond them: what is padded further costs more than its launches did,
which take the same time whatever a row has."""
LEAST_USES = 2
"""In a run: a shape that comes more rarely is not worth its recording."""
STEP = 32
"""Tokens to which sections are rounded at first."""
TILE = 128
"""Tokens that a matmul computes at once: up to a multiple of it padding is free."""
MOST_COMPARED = 256
"""Different shapes from which fewer are made; where there are more, those are one at first that differ little."""
FREE = 0.005
"""Of all tokens: two shapes whose rows would be padded by no more than that become one."""


@dataclass(frozen=True, eq=False)
class _Cluster:
    """Rows that one shape serves: how many, and the tokens of the smallest of them."""

    shape: Shape
    rows: int
    smallest: int

    def joined(self, other: _Cluster) -> _Cluster:
        shape = Shape(*map(max, self.shape, other.shape))
        return _Cluster(shape, self.rows + other.rows, min(self.smallest, other.smallest))

    @property
    def padded(self) -> int:
        """Tokens of a row, in whole tiles."""
        return _up(self.shape.tokens, TILE)

    @property
    def tokens(self) -> int:
        return self.rows * self.padded

    @property
    def wasteful(self) -> bool:
        return not _worth(self.padded, self.smallest)


def choose_shapes(rows: Sequence[Shape], times: float, most: float = math.inf) -> tuple[Shape, ...]:
    """For rows of these sizes, each of which comes about so many `times` in a run: shapes of at most the `most` tokens,
    those first that are used most. Longer rows count for nothing, as if they did not come."""
    least = LEAST_USES / times
    clusters = _clusters([row for row in rows if row.tokens <= most])
    clusters = _fewer([each for each in clusters if not each.wasteful and each.padded <= most], least, most)
    used = sorted((each for each in clusters if each.rows >= least), key=lambda each: -each.rows)
    return tuple(dict.fromkeys(each.shape for each in map(_tiled, used[:MOST_SHAPES])))


def fitting(row: Shape, shapes: Sequence[Shape]) -> Shape | None:
    """The smallest shape that a row can be padded to without much waste, or None."""
    able = [shape for shape in shapes if shape.covers(row) and _worth(shape.tokens, row.tokens)]
    return min(able, key=lambda shape: (shape.tokens, shape), default=None)


def _worth(padded: int, tokens: int) -> bool:
    return padded <= min(MOST_PADDED * tokens, tokens + MOST_MORE) + TILE


def _clusters(rows: Sequence[Shape]) -> list[_Cluster]:
    """Rows that are alike, together. The shape of each cluster has no more room than its rows need, however coarsely
    they were compared."""
    step = STEP
    while len({_rounded(row, step) for row in rows}) > MOST_COMPARED:
        step *= 2
    clusters: dict[Shape, _Cluster] = {}
    for row in rows:
        one, like = _Cluster(_rounded(row, STEP), 1, row.tokens), _rounded(row, step)
        clusters[like] = clusters[like].joined(one) if like in clusters else one
    return [clusters[like] for like in sorted(clusters)]


class _Pair(NamedTuple):
    """Two clusters that could be one, and the tokens by which their rows would be padded further."""

    cost: int
    joined: _Cluster
    one: _Cluster
    other: _Cluster

    @classmethod
    def of(cls, one: _Cluster, other: _Cluster) -> _Pair:
        joined = one.joined(other)
        return cls(joined.tokens - one.tokens - other.tokens, joined, one, other)


def _fewer(clusters: list[_Cluster], least: float, most: float) -> list[_Cluster]:
    """Joined two by two, those first whose rows are then padded the least: where there are too many, where that costs
    next to nothing, and where one of the two has fewer than the `least` rows. None has more than the `most` tokens."""
    free = FREE * sum(each.tokens for each in clusters)
    pairs = [_Pair.of(one, other) for n, one in enumerate(clusters) for other in clusters[n + 1 :]]
    while True:
        pairs = [pair for pair in pairs if not pair.joined.wasteful and pair.joined.padded <= most]
        wanted = [
            pair
            for pair in pairs
            if len(clusters) > MOST_SHAPES or pair.cost <= free or min(pair.one.rows, pair.other.rows) < least
        ]
        if not wanted:
            return clusters
        best = min(wanted, key=lambda pair: (pair.cost, pair.joined.shape))
        gone = (best.one, best.other)
        clusters = [each for each in clusters if each is not gone[0] and each is not gone[1]]
        pairs = [pair for pair in pairs if pair.one not in gone and pair.other not in gone]
        pairs += [_Pair.of(each, best.joined) for each in clusters]
        clusters.append(best.joined)


def _rounded(row: Shape, step: int) -> Shape:
    """With room for a token of padding in each section that is there. All is rounded the more coarsely the larger the
    step is: in the end rows differ only in what is there at all."""
    times = step // STEP
    sections = (_up(tokens + 1, step) if tokens else 0 for tokens in row.sections)
    few = (_up(count, 4 * times) for count in (row.prefixes, row.forked_prefixes, row.forks))
    rest = (_up(row.longest, 64 * times), _up(row.image_tokens, step), _up(row.targets, 32 * times))
    return Shape._make([*sections, _up(row.pieces, 8 * times), *few, *rest])


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _tiled(cluster: _Cluster) -> _Cluster:
    """Its last section is padded further, to whole tiles."""
    shape = cluster.shape
    last = max(section for section in Section if shape[section])
    more = -shape.tokens % TILE
    return replace(cluster, shape=shape._replace(**{shape._fields[last]: shape[last] + more}))
