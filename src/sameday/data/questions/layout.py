"""From micro-batches to arrays: rows of shared prefixes and their branches, positions as if each question were alone,
and supervision as a list of (position, target) pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate

import numpy as np

from sameday.data.questions.encode import Encoded
from sameday.data.questions.family import QuestionFamily
from sameday.data.questions.sample import ImageRef
from sameday.data.questions.tree import agreements, grow

PADDING = -1
PREFIX = 0


class Kind(IntEnum):
    """Of a piece of a row, in the order in which they stand in a packed one."""

    PREFIX, FORK, ALONE, BRANCH = range(4)


@dataclass(frozen=True, eq=False)
class Dense:
    """Runs of queries, the first of which begins at `queries`, each of which sees the whole of one run of keys, the
    first of which begins at `keys`. Runs follow each other without a gap; `cu` are their bounds from there on."""

    queries: int
    keys: int
    cu_queries: np.ndarray
    cu_keys: np.ndarray


@dataclass(frozen=True, eq=False)
class Bounds:
    """Where the pieces of one packed row begin and end, in each of which attention is causal, and what they see besides
    of pieces before them: branches of prefixes, forks of prefixes, branches of forks."""

    cu: np.ndarray
    dense: tuple[Dense, Dense, Dense]


@dataclass(frozen=True, eq=False)
class Layout:
    """A token sees the tokens before it in its group that belong to the prefix, to its own fork or to its own branch.
    The tokens of a fork itself, which some branches share, have branch 0; those of the prefix have fork 0, too.

    tokens, group, branch, fork, keys: (rows, length). positions: (axes, rows, length). `image_slots[i]` is the flat
    place that takes row `image_source[i]` of the tower's output over `images`. `target_at[j]` is the flat place whose
    logits predict `target[j]`, with `weight[j]`, for question `owner[j]`. `bounds` is there for a packed row."""

    tokens: np.ndarray
    positions: np.ndarray
    group: np.ndarray
    branch: np.ndarray
    fork: np.ndarray
    keys: np.ndarray
    images: tuple[ImageRef, ...]
    grids: tuple[tuple[int, int], ...]
    image_slots: np.ndarray
    image_source: np.ndarray
    target_at: np.ndarray
    target: np.ndarray
    weight: np.ndarray
    owner: np.ndarray
    questions: tuple[Encoded, ...]
    one_per_row: bool
    bounds: Bounds | None


@dataclass(frozen=True)
class _Piece:
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


def lay_out(
    units: Sequence[Sequence[Encoded]],
    *,
    packing: bool,
    family: QuestionFamily,
    merge_size: int,
    loss_weight: str,
    pad_token: int,
    pad_to_multiple: int = 1,
    share_pixels: bool = True,
    share_text: bool = False,
    mask_ids: MaskIds | None = None,
) -> Layout:
    """`units` are groups of questions that share a prefix, which with `share_text` goes on as far as their tokens
    agree, and forks where some agree further. Packed, all stand in one row, piece by piece as `Kind` has them. Else
    each group has its own row. With `share_pixels` an image that several groups hold goes through the tower once.
    `mask_ids` is what `mask_ids_of` says of the step; a prefix that is not in it is keyed by the first question of its
    unit."""
    rows, questions = _rows(units, packing, share_text)
    longest = max(sum(piece.count for piece in row) for row in rows)
    length = -(-longest // pad_to_multiple) * pad_to_multiple
    shape = (len(rows), length)
    tokens = np.full(shape, pad_token, np.int64)
    positions = np.zeros((family.position_axes, *shape), np.int64)
    group = np.full(shape, PADDING, np.int32)
    branch, fork = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    keys = np.zeros(shape, np.uint32)
    pictures = _Pictures(share_pixels)
    targets = _Targets(loss_weight)
    for r, row in enumerate(rows):
        at = 0
        for piece in row:
            here, part = slice(at, at + piece.count), slice(piece.start, piece.stop)
            tokens[r, here] = piece.encoded.tokens[part]
            positions[:, r, here] = family.positions(piece.encoded, merge_size)[:, part]
            group[r, here] = piece.group
            branch[r, here], fork[r, here] = piece.branch, piece.fork
            keys[r, here] = _token_keys(piece, mask_ids or {})
            shift = r * length + at - piece.start  # flat place of the question's own token 0
            pictures.add(piece, shift)
            targets.add(piece, shift)
            at += piece.count
    return Layout(
        tokens=tokens,
        positions=positions,
        group=group,
        branch=branch,
        fork=fork,
        keys=keys.view(np.int32),
        images=tuple(pictures.images),
        grids=tuple(pictures.grids),
        image_slots=_joined(pictures.slots),
        image_source=_joined(pictures.source),
        target_at=_joined(targets.at),
        target=_joined(targets.token),
        weight=_joined(targets.weight).astype(np.float32),
        owner=_joined(targets.owner),
        questions=tuple(questions),
        one_per_row=all(len(row) == 1 for row in rows),
        bounds=_bounds(rows[0], length) if packing else None,
    )


def _rows(
    units: Sequence[Sequence[Encoded]], packing: bool, share_text: bool
) -> tuple[list[list[_Piece]], list[Encoded]]:
    questions: list[Encoded] = []
    rows: list[list[_Piece]] = []
    for g, unit in enumerate(units):
        assert len(unit) == 1 or len({e.key for e in unit} - {None}) == 1, "a group's questions have one prefix"
        tree = grow(agreements([encoded.text if share_text else () for encoded in unit]))
        image, own = unit[0].prefix, len(questions)
        starts, forks = [image + tree.root if len(unit) > 1 else 0] * len(unit), [0] * len(unit)
        row = [_Piece(unit[0], 0, starts[0], g, PREFIX, 0, own)] if starts[0] else []
        for f, fork in enumerate(tree.forks, 1):
            row.append(
                _Piece(unit[fork.first], starts[fork.first], image + fork.tokens, g, PREFIX, f, own + fork.first)
            )
            for b in range(fork.first, fork.last):
                starts[b], forks[b] = image + fork.tokens, f
        for b, encoded in enumerate(unit):
            row.append(_Piece(encoded, starts[b], encoded.length, g, b + 1, forks[b], own + b))
        questions += unit
        rows.append(row)
    if packing:
        pieces = [piece for row in rows for piece in row]
        forked = {piece.group for piece in pieces if piece.fork}
        # Stable. Groups with forks come last, so that no run of what they see or are seen by has a gap.
        rows = [sorted(pieces, key=lambda piece: (piece.kind, piece.group in forked))]
    return rows, questions


def _bounds(row: Sequence[_Piece], length: int) -> Bounds:
    of_kind = {kind: [piece for piece in row if piece.kind == kind] for kind in Kind}
    forked = {piece.group for piece in of_kind[Kind.FORK]}
    at = dict(zip(map(id, row), accumulate((piece.count for piece in row), initial=0), strict=False))

    def dense(queries: list[_Piece], keys: list[_Piece], run: Callable[[_Piece], Hashable]) -> Dense:
        asking: Counter[Hashable] = Counter()
        for piece in queries:
            asking[run(piece)] += piece.count
        first, first_key = (at[id(pieces[0])] if pieces else 0 for pieces in (queries, keys))
        counts = [asking[run(piece)] for piece in keys]
        return Dense(first, first_key, _cumulative(counts), _cumulative([piece.count for piece in keys]))

    def of_forked(kind: Kind) -> list[_Piece]:
        return [piece for piece in of_kind[kind] if piece.group in forked]

    taken = sum(piece.count for piece in row)
    padding = [length - taken] if length > taken else []
    return Bounds(
        cu=_cumulative([piece.count for piece in row] + padding),
        dense=(
            dense(of_kind[Kind.BRANCH], of_kind[Kind.PREFIX], lambda piece: piece.group),
            dense(of_kind[Kind.FORK], of_forked(Kind.PREFIX), lambda piece: piece.group),
            dense(of_forked(Kind.BRANCH), of_kind[Kind.FORK], lambda piece: (piece.group, piece.fork)),
        ),
    )


def _cumulative(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


MaskIds = Mapping[int, np.ndarray]
"""For each question, by its id, the questions by which its first tokens are keyed for dropout."""


def mask_ids_of(questions: Iterable[Encoded], share_text: bool) -> MaskIds:
    """A token that several questions could share is keyed by the first of them that has it and all before it. Taken of
    a whole step, it does not depend on how the step is split into units, micro-batches and ranks."""
    ids: dict[int, np.ndarray] = {}
    nodes: dict[Hashable, tuple[int, int]] = {}
    for encoded in questions:
        if encoded.key is None:
            continue
        own = encoded.sample.id
        node, whose = nodes.setdefault(encoded.key, (len(nodes), own))
        text = []
        for token in encoded.text if share_text else ():
            node, first = nodes.setdefault((node, token), (len(nodes), own))
            text.append(first)
        ids[own] = np.asarray([whose] * encoded.prefix + text, np.uint64)
    return ids


def _token_keys(piece: _Piece, mask_ids: MaskIds) -> np.ndarray:
    """Names each token by a question and its place there, whatever row it stands in: what dropout is keyed by. A token
    that could be shared has one name in all questions, also where one of them stands alone."""
    own = piece.encoded.sample.id
    ids = np.full(piece.encoded.length, own, np.uint64)
    shared = mask_ids.get(own, ids[:0])
    ids[: len(shared)] = shared
    place = np.arange(piece.start, piece.stop, dtype=np.uint64)
    names = ids[piece.start : piece.stop] * np.uint64(0x9E3779B1) + place * np.uint64(0x85EBCA77)
    return (names & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)


class _Pictures:
    """Collects which images go through the tower, and where each one's features belong."""

    def __init__(self, share: bool) -> None:
        self.share = share
        self.images: list[ImageRef] = []
        self.grids: list[tuple[int, int]] = []
        self.slots: list[np.ndarray] = []
        self.source: list[np.ndarray] = []
        self._known: dict[tuple[str, tuple[int, int]], int] = {}
        self._rows = 0

    def add(self, piece: _Piece, shift: int) -> None:
        encoded = piece.encoded
        for image, grid, (first, end) in zip(encoded.sample.images, encoded.grids, encoded.image_spans, strict=True):
            if not piece.start <= first < piece.stop:
                continue
            known = self._known.get((image.digest, grid)) if self.share else None
            if known is None:
                known = self._rows
                self._known[image.digest, grid] = known
                self.images.append(image)
                self.grids.append(grid)
                self._rows += end - first
            self.slots.append(np.arange(first, end) + shift)
            self.source.append(np.arange(end - first) + known)


class _Targets:
    """Collects (position, target) pairs. The logits of token t-1 predict token t, within one question only."""

    def __init__(self, loss_weight: str) -> None:
        self.by_sample = loss_weight == "sample"
        self.at: list[np.ndarray] = []
        self.token: list[np.ndarray] = []
        self.weight: list[np.ndarray] = []
        self.owner: list[np.ndarray] = []

    def add(self, piece: _Piece, shift: int) -> None:
        where = np.flatnonzero(piece.encoded.targets)
        if piece.branch == PREFIX or not len(where):  # a prompt has no target
            return
        assert where[0] > piece.start, "what predicts a target is in no prefix and in no fork"
        self.at.append(where - 1 + shift)
        self.token.append(piece.encoded.tokens[where])
        self.weight.append(np.full(len(where), 1 / len(where) if self.by_sample else 1.0))
        self.owner.append(np.full(len(where), piece.owner))
