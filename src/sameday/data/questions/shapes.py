"""Few shapes for many packed rows: a row is padded to one of them, so that all that a device is told about it has sizes
and offsets that are the shape's own. What is recorded for a shape as a CUDA graph then serves every row of it.

A row is cut into sections, and each is padded at its end. Padding is in pieces of its own, which see each other and are
seen by nobody else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from sameday.data.questions.pieces import PREFIX, Bounds, Dense, Kind, Piece, cumulative


class Section(IntEnum):
    """Of a packed row, in its order. Groups with forks come last in their kind, and have sections of their own: what
    only their pieces ask or are asked begins at a place that the shape knows."""

    PREFIX, FORKED_PREFIX, FORK, ALONE, BRANCH, FORKED_BRANCH = range(6)


class Shape(NamedTuple):
    """Sizes of a packed row as it is, or of what it is padded to: tokens of each section; all pieces, prefixes of both
    sections, forks; the longest piece; image tokens and targets."""

    prefix: int
    forked_prefix: int
    fork: int
    alone: int
    branch: int
    forked_branch: int
    pieces: int
    prefixes: int
    forked_prefixes: int
    forks: int
    longest: int
    image_tokens: int
    targets: int

    @property
    def sections(self) -> tuple[int, ...]:
        return self[: len(Section)]

    @property
    def tokens(self) -> int:
        return sum(self.sections)

    @property
    def starts(self) -> list[int]:
        """The first place of each section."""
        return list(accumulate(self.sections, initial=0))[: len(Section)]

    def covers(self, row: Shape) -> bool:
        """Whether a row can be padded to this. A section that is there has room for one token more: padding that asks
        must have padding to see."""
        room = all(mine > its or mine == its == 0 for mine, its in zip(self.sections, row.sections, strict=True))
        return room and all(mine >= its for mine, its in zip(self[len(Section) :], row[len(Section) :], strict=True))

    def chunks(self, *sections: Section) -> int:
        """The most pieces of padding that these sections may have."""
        return sum(-(-self[section] // self.longest) for section in sections)


def sections_of(row: Sequence[Piece]) -> list[Section]:
    """The section of each piece of a packed row."""
    forked = {piece.group for piece in row if piece.kind == Kind.FORK}
    others = {Kind.FORK: Section.FORK, Kind.ALONE: Section.ALONE}
    pairs = {
        Kind.PREFIX: (Section.PREFIX, Section.FORKED_PREFIX),
        Kind.BRANCH: (Section.BRANCH, Section.FORKED_BRANCH),
    }
    return [others.get(piece.kind) or pairs[piece.kind][piece.group in forked] for piece in row]


def shape_of(row: Sequence[Piece]) -> Shape:
    """Of a packed row as it is."""
    tokens, pieces = [0] * len(Section), [0] * len(Section)
    for piece, section in zip(row, sections_of(row), strict=True):
        tokens[section] += piece.count
        pieces[section] += 1
    spans = ((piece, span) for piece in row for span in piece.encoded.image_spans)
    images = sum(end - first for piece, (first, end) in spans if piece.start <= first < piece.stop)
    targets = sum(piece.encoded.target_count for piece in row if piece.branch != PREFIX)
    counts = (len(row), *(pieces[section] for section in (Section.PREFIX, Section.FORKED_PREFIX, Section.FORK)))
    return Shape._make([*tokens, *counts, max(piece.count for piece in row), images, targets])


def dense_calls(shape: Shape) -> int:
    """The last dense call of `Bounds.dense` that has queries, by number; 0 where all pieces are seen by none."""
    return 3 if shape.fork else 1 if shape.branch else 0


def padded_places(row: Sequence[Piece], shape: Shape) -> Iterator[int]:
    """Where each piece begins in a row of this shape."""
    at = shape.starts
    for piece, section in zip(row, sections_of(row), strict=True):
        yield at[section]
        at[section] += piece.count


def padded_bounds(row: Sequence[Piece], shape: Shape) -> Bounds:
    """The bounds of a row's pieces and of its padding, as many as the shape has whatever the row is."""
    own: dict[Section, list[Piece]] = {section: [] for section in Section}
    for piece, section in zip(row, sections_of(row), strict=True):
        own[section].append(piece)
    padding = {section: shape[section] - sum(piece.count for piece in own[section]) for section in Section}
    assert shape.covers(shape_of(row)), (shape, shape_of(row))

    def call(pairs: Sequence[tuple[Section, Section]], forks: bool, room: int) -> Dense:
        """Sections of queries with those of the keys that they see."""
        counts: list[tuple[int, int]] = []
        for asking, seen in pairs:
            for key in own[seen]:
                of_key = (p for p in own[asking] if p.group == key.group and (not forks or p.fork == key.fork))
                counts.append((sum(piece.count for piece in of_key), key.count))
            # Padding asks padding, at first in one run with all that asks.
            left = padding[asking]
            for chunk in _chunks(padding[seen], shape.longest):
                counts.append((left, chunk))
                left = 0
            assert not left, "padding that asks has padding to see"
        queries, keys = zip(*counts, strict=True) if counts else ((), ())
        (first, _), (_, first_key) = (min(pairs), min(pairs, key=lambda pair: pair[1]))
        longest = max(shape[asking] for asking, _ in pairs)
        cu_queries, cu_keys = (_padded(cumulative(each), room) for each in (queries, keys))
        starts = shape.starts[first], shape.starts[first_key]
        return Dense(*starts, cu_queries, cu_keys, (max(1, longest), shape.longest))

    causal = [
        count
        for section in Section
        for count in (*(piece.count for piece in own[section]), *_chunks(padding[section], shape.longest))
    ]
    plain, forked = (Section.BRANCH, Section.PREFIX), (Section.FORKED_BRANCH, Section.FORKED_PREFIX)
    of_forked = shape.chunks(Section.FORKED_PREFIX) + shape.forked_prefixes
    of_all = shape.chunks(Section.PREFIX) + shape.prefixes + of_forked
    return Bounds(
        cu=_padded(cumulative(causal), shape.pieces + shape.chunks(*Section)),
        dense=(
            call((plain, forked), False, of_all),
            call(((Section.FORK, Section.FORKED_PREFIX),), False, of_forked),
            call(((Section.FORKED_BRANCH, Section.FORK),), True, shape.chunks(Section.FORK) + shape.forks),
        ),
        longest=shape.longest,
    )


def _chunks(tokens: int, longest: int) -> list[int]:
    """Padding in pieces that are no longer than the longest one of the shape."""
    return [min(longest, tokens - at) for at in range(0, tokens, longest)]


def _padded(cu: np.ndarray, count: int) -> np.ndarray:
    """With empty pieces at the end."""
    assert len(cu) <= count + 1, (len(cu), count)
    return np.pad(cu, (0, count + 1 - len(cu)), mode="edge")
