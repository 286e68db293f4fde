"""From micro-batches to arrays: rows of shared prefixes and their branches, positions as if each question were alone,
and supervision as a list of (position, target) pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sameday.data.encode import Encoded
from sameday.data.sample import ImageRef

PADDING = -1
PREFIX = 0


@dataclass(frozen=True, eq=False)
class Layout:
    """A token sees the tokens before it in its group that belong to the prefix or to its own branch.

    tokens, group, branch, keys: (rows, length). positions: (3, rows, length). `image_slots[i]` is the flat place
    that takes row `image_source[i]` of the tower's output over `images`. `target_at[j]` is the flat place whose
    logits predict `target[j]`, with `weight[j]`, for question `owner[j]`."""

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


def rope_positions(encoded: Encoded, merge_size: int) -> np.ndarray:
    """M-RoPE positions (time, height, width) of one question alone, (3, length). Text counts on by one; an image
    spans a grid and is followed by 1 + its largest position."""
    positions = np.zeros((3, encoded.length), np.int64)
    at, start = 0, 0
    for (first, end), (high, wide) in zip(encoded.image_spans, encoded.grids, strict=True):
        positions[:, at:first] = start + np.arange(first - at)
        start += first - at
        rows, columns = np.divmod(np.arange(end - first), wide // merge_size)
        positions[:, first:end] = start + np.stack([np.zeros_like(rows), rows, columns])
        start += max(high, wide) // merge_size
        at = end
    positions[:, at:] = start + np.arange(encoded.length - at)
    return positions


def lay_out(
    units: Sequence[Sequence[Encoded]],
    *,
    packing: bool,
    merge_size: int,
    loss_weight: str,
    pad_token: int,
    pad_to_multiple: int = 1,
    share_pixels: bool = True,
) -> Layout:
    """`units` are groups of questions that share a prefix. Packed, all stand in one row; else each has its own.
    With `share_pixels` an image that several groups hold goes through the tower once."""
    rows: list[list[Sequence[Encoded]]] = [list(units)] if packing else [[unit] for unit in units]
    lengths = [sum(_unit_length(unit) for unit in row) for row in rows]
    length = -(-max(lengths) // pad_to_multiple) * pad_to_multiple
    shape = (len(rows), length)
    tokens = np.full(shape, pad_token, np.int64)
    positions = np.zeros((3, *shape), np.int64)
    group = np.full(shape, PADDING, np.int32)
    branch = np.zeros(shape, np.int32)
    keys = np.zeros(shape, np.uint32)
    pictures = _Pictures(merge_size, share_pixels)
    targets = _Targets(loss_weight)
    questions: list[Encoded] = []

    for r, row in enumerate(rows):
        at = 0
        for g, unit in enumerate(row):
            prefix = unit[0].prefix if len(unit) > 1 else 0
            for b, encoded in enumerate(unit):
                start = 0 if b == 0 else prefix  # the first question brings the prefix along
                count = encoded.length - start
                here = slice(at, at + count)
                tokens[r, here] = encoded.tokens[start:]
                positions[:, r, here] = rope_positions(encoded, merge_size)[:, start:]
                group[r, here] = g
                branch[r, here] = b + 1
                branch[r, at : at + prefix - start] = PREFIX
                keys[r, here] = _token_keys(encoded, start)
                shift = r * length + at - start  # flat place of the question's own token 0
                pictures.add(encoded, start, shift)
                targets.add(encoded, shift, len(questions))
                questions.append(encoded)
                at += count
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
        one_per_row=all(len(row) == 1 and len(row[0]) == 1 for row in rows),
    )


def _unit_length(unit: Sequence[Encoded]) -> int:
    prefix = unit[0].prefix if len(unit) > 1 else 0
    assert len(unit) == 1 or len({e.key for e in unit}) == 1, "a group's questions have one prefix"
    return prefix + sum(encoded.length - prefix for encoded in unit)


def _token_keys(encoded: Encoded, start: int) -> np.ndarray:
    """Names each token by its question and its place there, whatever row it stands in: what dropout is keyed by."""
    place = np.arange(start, encoded.length, dtype=np.uint64)
    return ((encoded.sample.id * 0x9E3779B1 + place * 0x85EBCA77) & 0xFFFFFFFF).astype(np.uint32)


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)


class _Pictures:
    """Collects which images go through the tower, and where each one's features belong."""

    def __init__(self, merge_size: int, share: bool) -> None:
        self.merge_size, self.share = merge_size, share
        self.images: list[ImageRef] = []
        self.grids: list[tuple[int, int]] = []
        self.slots: list[np.ndarray] = []
        self.source: list[np.ndarray] = []
        self._known: dict[tuple[str, tuple[int, int]], int] = {}
        self._rows = 0

    def add(self, encoded: Encoded, start: int, shift: int) -> None:
        for image, grid, (first, end) in zip(
            encoded.sample.images, encoded.grids, encoded.image_spans, strict=True
        ):
            if first < start:
                continue  # part of a prefix that is already there
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

    def add(self, encoded: Encoded, shift: int, owner: int) -> None:
        where = np.flatnonzero(encoded.targets)
        self.at.append(where - 1 + shift)
        self.token.append(encoded.tokens[where])
        self.weight.append(np.full(len(where), 1 / len(where) if self.by_sample else 1.0))
        self.owner.append(np.full(len(where), owner))
