"""From micro-batches to arrays: rows of shared prefixes and their branches, positions as if each question were alone,
and supervision as a list of (position, target) pairs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from sameday.data.questions.encode import Encoded
from sameday.data.questions.family import QuestionFamily
from sameday.data.questions.pieces import PADDING as PADDING
from sameday.data.questions.pieces import PREFIX, Bounds, Piece, bounds_of, rows_of
from sameday.data.questions.sample import ImageRef
from sameday.data.questions.shapes import Shape, padded_bounds, padded_places


@dataclass(frozen=True, eq=False)
class Layout:
    """A token sees the tokens before it in its group that belong to the prefix, to its own fork or to its own branch.
    The tokens of a fork itself, which some branches share, have branch 0; those of the prefix have fork 0, too.

    tokens, group, branch, fork, keys: (rows, length). positions: (axes, rows, length). `image_slots[i]` is the flat
    place that takes row `image_source[i]` of the tower's output over `images`. `target_at[j]` is the flat place whose
    logits predict `target[j]`, with `weight[j]`, for question `owner[j]`. `bounds` is there for a packed row.

    Padded to a `shape`, `image_slots`, `target_at`, `target` and `weight` are longer than `image_source` and `owner`:
    what is beyond these is of the last place, which is padding, and weighs nothing."""

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
    shape: Shape | None = None


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
    shape: Shape | None = None,
) -> Layout:
    """`units` are groups of questions that share a prefix, which with `share_text` goes on as far as their tokens
    agree, and forks where some agree further. Packed, all stand in one row, piece by piece as `Kind` has them. Else
    each group has its own row. With `share_pixels` an image that several groups hold goes through the tower once.
    `mask_ids` is what `mask_ids_of` says of the step; a prefix that is not in it is keyed by the first question of its
    unit. A packed row may be padded to a `shape` that covers it."""
    rows, questions = rows_of(units, packing, share_text)
    longest = max(sum(piece.count for piece in row) for row in rows)
    length = shape.tokens if shape else -(-longest // pad_to_multiple) * pad_to_multiple
    size = (len(rows), length)
    tokens = np.full(size, pad_token, np.int64)
    positions = np.zeros((family.position_axes, *size), np.int64)
    group = np.full(size, PADDING, np.int32)
    branch, fork = np.zeros(size, np.int32), np.zeros(size, np.int32)
    keys = np.zeros(size, np.uint32)
    pictures = _Pictures(share_pixels)
    targets = _Targets(loss_weight)
    for r, row in enumerate(rows):
        for piece, at in zip(row, _places(row, shape), strict=True):
            here, part = slice(at, at + piece.count), slice(piece.start, piece.stop)
            tokens[r, here] = piece.encoded.tokens[part]
            positions[:, r, here] = family.positions(piece.encoded, merge_size)[:, part]
            group[r, here] = piece.group
            branch[r, here], fork[r, here] = piece.branch, piece.fork
            keys[r, here] = _token_keys(piece, mask_ids or {})
            shift = r * length + at - piece.start  # flat place of the question's own token 0
            pictures.add(piece, shift)
            targets.add(piece, shift)
    return Layout(
        tokens=tokens,
        positions=positions,
        group=group,
        branch=branch,
        fork=fork,
        keys=keys.view(np.int32),
        images=tuple(pictures.images),
        grids=tuple(pictures.grids),
        image_slots=_filled(_joined(pictures.slots), shape and shape.image_tokens, length - 1),
        image_source=_joined(pictures.source),
        target_at=_filled(_joined(targets.at), shape and shape.targets, length - 1),
        target=_filled(_joined(targets.token), shape and shape.targets, 0),
        weight=_filled(_joined(targets.weight).astype(np.float32), shape and shape.targets, 0),
        owner=_joined(targets.owner),
        questions=tuple(questions),
        one_per_row=all(len(row) == 1 for row in rows),
        bounds=None if not packing else padded_bounds(rows[0], shape) if shape else bounds_of(rows[0], length),
        shape=shape,
    )


def _places(row: Sequence[Piece], shape: Shape | None) -> Iterator[int]:
    """Where each piece of a row begins."""
    if shape is not None:
        return padded_places(row, shape)
    return accumulate((piece.count for piece in row[:-1]), initial=0)


def _filled(values: np.ndarray, count: int | None, value: int) -> np.ndarray:
    """Up to a shape's count."""
    return values if count is None else np.pad(values, (0, count - len(values)), constant_values=value)


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


def _token_keys(piece: Piece, mask_ids: MaskIds) -> np.ndarray:
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

    def add(self, piece: Piece, shift: int) -> None:
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

    def add(self, piece: Piece, shift: int) -> None:
        where = np.flatnonzero(piece.encoded.targets)
        if piece.branch == PREFIX or not len(where):  # a prompt has no target
            return
        assert where[0] > piece.start, "what predicts a target is in no prefix and in no fork"
        self.at.append(where - 1 + shift)
        self.token.append(piece.encoded.tokens[where])
        self.weight.append(np.full(len(where), 1 / len(where) if self.by_sample else 1.0))
        self.owner.append(np.full(len(where), piece.owner))
