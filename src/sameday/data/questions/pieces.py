"""The pieces that rows are made of: prefixes, forks and branches of questions, in the order of a packed row, and where
in it they begin and end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate

import numpy as np

from sameday.data.questions.encode import Encoded
from sameday.data.questions.tree import agreements, grow

PADDING = -1
PREFIX = 0


class Kind(IntEnum):
    """Of a piece of a row, in the order in which they stand in a packed one."""

    PREFIX, FORK, ALONE, BRANCH = range(4)


@dataclass(frozen=True, eq=False)
class Dense:
    """Runs of queries, the first of which begins at `queries`, each of which sees the whole of one run of keys, the
    first of which begins at `keys`. Runs follow each other without a gap; `cu` are their bounds from there on.
    `longest`, of queries and of keys: what no run exceeds, where that is more than what is there."""

    queries: int
    keys: int
    cu_queries: np.ndarray
    cu_keys: np.ndarray
    longest: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class Bounds:
    """Where the pieces of one packed row begin and end, in each of which attention is causal, and what they see besides
    of pieces before them: branches of prefixes, forks of prefixes, branches of forks. `longest` is what no piece
    exceeds, where that is more than what is there."""

    cu: np.ndarray
    dense: tuple[Dense, Dense, Dense]
    longest: int | None = None


@dataclass(frozen=True)
class Piece:
    """Tokens `start` to `stop` of a question, as a prefix, a fork or a branch of it, or a question alone."""

    encoded: Encoded
    start: int
    stop: int
    group: int
    branch: int
    fork: int
    owner: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def kind(self) -> Kind:
        if self.branch == PREFIX:
            return Kind.FORK if self.fork else Kind.PREFIX
        return Kind.BRANCH if self.start else Kind.ALONE


def rows_of(
    units: Sequence[Sequence[Encoded]], packing: bool, share_text: bool
) -> tuple[list[list[Piece]], list[Encoded]]:
    """A packed row has its questions alone as all others are where some share a prefix: rows of as many tokens are then
    of the same sections, whatever their groups."""
    questions: list[Encoded] = []
    rows: list[list[Piece]] = []
    shared = packing and any(len(unit) > 1 for unit in units)
    for g, unit in enumerate(units):
        assert len(unit) == 1 or len({e.key for e in unit} - {None}) == 1, "a group's questions have one prefix"
        tree = grow(agreements([encoded.text if share_text else () for encoded in unit]))
        image, own = unit[0].prefix, len(questions)
        starts = [image + tree.root if len(unit) > 1 or shared else 0] * len(unit)
        forks = [0] * len(unit)
        row = [Piece(unit[0], 0, starts[0], g, PREFIX, 0, own)] if starts[0] else []
        for f, fork in enumerate(tree.forks, 1):
            row.append(Piece(unit[fork.first], starts[fork.first], image + fork.tokens, g, PREFIX, f, own + fork.first))
            for b in range(fork.first, fork.last):
                starts[b], forks[b] = image + fork.tokens, f
        for b, encoded in enumerate(unit):
            row.append(Piece(encoded, starts[b], encoded.length, g, b + 1, forks[b], own + b))
        questions += unit
        rows.append(row)
    if packing:
        pieces = [piece for row in rows for piece in row]
        forked = {piece.group for piece in pieces if piece.fork}
        # Stable. Groups with forks come last, so that no run of what they see or are seen by has a gap.
        rows = [sorted(pieces, key=lambda piece: (piece.kind, piece.group in forked))]
    return rows, questions


def bounds_of(row: Sequence[Piece], length: int) -> Bounds:
    of_kind = {kind: [piece for piece in row if piece.kind == kind] for kind in Kind}
    forked = {piece.group for piece in of_kind[Kind.FORK]}
    at = dict(zip(map(id, row), accumulate((piece.count for piece in row), initial=0), strict=False))

    def dense(queries: list[Piece], keys: list[Piece], run: Callable[[Piece], Hashable]) -> Dense:
        asking: Counter[Hashable] = Counter()
        for piece in queries:
            asking[run(piece)] += piece.count
        first, first_key = (at[id(pieces[0])] if pieces else 0 for pieces in (queries, keys))
        counts = [asking[run(piece)] for piece in keys]
        return Dense(first, first_key, cumulative(counts), cumulative([piece.count for piece in keys]))

    def of_forked(kind: Kind) -> list[Piece]:
        return [piece for piece in of_kind[kind] if piece.group in forked]

    taken = sum(piece.count for piece in row)
    padding = [length - taken] if length > taken else []
    return Bounds(
        cu=cumulative([piece.count for piece in row] + padding),
        dense=(
            dense(of_kind[Kind.BRANCH], of_kind[Kind.PREFIX], lambda piece: piece.group),
            dense(of_kind[Kind.FORK], of_forked(Kind.PREFIX), lambda piece: piece.group),
            dense(of_forked(Kind.BRANCH), of_kind[Kind.FORK], lambda piece: (piece.group, piece.fork)),
        ),
    )


def cumulative(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
