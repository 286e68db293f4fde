"""From micro-batches to arrays: rows of shared prefixes and their branches, positions as if each question were alone,
and supervision as a list of (position, target) pairs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sameday.data.questions.encode import Encoded
from sameday.data.questions.family import QuestionFamily
from sameday.data.questions.sample import ImageRef
from sameday.data.questions.tree import agreements, grow

PADDING = -1
PREFIX = 0


@dataclass(frozen=True, eq=False)
class Bounds:
    """Where the pieces of one packed row begin and end; see kernels.split.Segments."""

    cu: np.ndarray
    cu_branch: np.ndarray
    cu_prefix: np.ndarray
    prefix_end: int
    branch_start: int
    branch_end: int


@dataclass(frozen=True, eq=False)
class Layout:
    """A token sees the tokens before it in its group that belong to the prefix or to its own branch.

    tokens, group, branch, keys: (rows, length). positions: (axes, rows, length). `image_slots[i]` is the flat place
    that takes row `image_source[i]` of the tower's output over `images`. `target_at[j]` is the flat place whose
    logits predict `target[j]`, with `weight[j]`, for question `owner[j]`. `bounds` is there for a packed row."""

    tokens: np.ndarray
    positions: np.ndarray
    group: np.ndarray
    branch: np.ndarray
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
    """Tokens `start` to `stop` of a question, as a prefix (branch 0), a branch, or a question alone."""

    encoded: Encoded
    start: int
    stop: int
    group: int
    branch: int
    owner: int

    @property
    def count(self) -> int:
        return self.stop - self.start


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
    agree. Packed, all stand in one row: prefixes, then questions alone, then branches. Else each group has its own row.
    With `share_pixels` an image that several groups hold goes through the tower once. `mask_ids` is what `mask_ids_of`
    says of the step; a prefix that is not in it is keyed by the first question of its unit."""
    rows, questions = _rows(units, packing, share_text)
    longest = max(sum(piece.count for piece in row) for row in rows)
    length = -(-longest // pad_to_multiple) * pad_to_multiple
    shape = (len(rows), length)
    tokens = np.full(shape, pad_token, np.int64)
    positions = np.zeros((family.position_axes, *shape), np.int64)
    group = np.full(shape, PADDING, np.int32)
    branch = np.zeros(shape, np.int32)
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
            branch[r, here] = piece.branch
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
        prefix = unit[0].prefix + tree.root if len(unit) > 1 else 0
        row = [_Piece(unit[0], 0, prefix, g, PREFIX, len(questions))] if prefix else []
        for b, encoded in enumerate(unit):
            row.append(_Piece(encoded, prefix, encoded.length, g, b + 1, len(questions)))
            questions.append(encoded)
        rows.append(row)
    if packing:
        pieces = [piece for row in rows for piece in row]
        # Stable: prefixes, whole questions, branches, each in the order of the groups.
        rows = [sorted(pieces, key=lambda piece: (piece.branch != PREFIX) + (piece.start > 0))]
    return rows, questions


def _bounds(row: Sequence[_Piece], length: int) -> Bounds:
    prefixes = [piece for piece in row if piece.branch == PREFIX]
    branches = [piece for piece in row if piece.start > 0]
    ends = np.cumsum([piece.count for piece in row])
    taken, branch_tokens = int(ends[-1]), sum(piece.count for piece in branches)
    per_group = [sum(piece.count for piece in branches if piece.group == p.group) for p in prefixes]

    def cumulative(counts: list[int]) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)

    padding = [length - taken] if length > taken else []
    return Bounds(
        cu=cumulative([piece.count for piece in row] + padding),
        cu_branch=cumulative(per_group),
        cu_prefix=cumulative([piece.count for piece in prefixes]),
        prefix_end=sum(piece.count for piece in prefixes),
        branch_start=taken - branch_tokens,
        branch_end=taken,
    )


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
        assert where[0] > piece.start, "what predicts a target is not in the prefix"
        self.at.append(where - 1 + shift)
        self.token.append(piece.encoded.tokens[where])
        self.weight.append(np.full(len(where), 1 / len(where) if self.by_sample else 1.0))
        self.owner.append(np.full(len(where), piece.owner))
