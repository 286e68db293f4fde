"""A micro-batch read back: what each of its questions looks like to the model, wherever in the tensors it stands."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from sameday.data.questions.batch import Batch
from sameday.data.questions.layout import PREFIX
from sameday.data.seen import Seen, digest


def read_back(batch: Batch, merge_size: int) -> Iterator[Seen]:
    """The questions of a micro-batch. A question's tokens are its own branch behind the prefix of its group."""
    batch = batch.to(torch.device("cpu"))
    length = batch.tokens.shape[1]
    group, branch, tokens = (x.numpy().reshape(-1) for x in (batch.group, batch.branch, batch.tokens))
    positions = batch.positions.numpy().reshape(3, -1)
    owner, at = batch.owner.numpy(), batch.target_at.numpy()
    target, weight = batch.target.numpy(), batch.weight.numpy()
    pictures = _Pictures(batch, merge_size)
    for number, sample in enumerate(batch.sample_ids):
        mine = owner == number
        last = at[mine][-1]
        row = slice(last // length * length, (last // length + 1) * length)
        reachable = (branch[row] == PREFIX) | (branch[row] == branch[last])
        own = np.flatnonzero((group[row] == group[last]) & reachable) + row.start
        yield Seen(
            sample,
            {"tokens": len(own), "targets": int(mine.sum())},
            {
                "tokens": digest(tokens[own]),
                "positions": digest(positions[:, own]),
                "images": pictures.digest(own),
                "targets": digest(np.searchsorted(own, at[mine]), target[mine]),
                "weights": digest(weight[mine]),
            },
        )


class _Pictures:
    """Which pixels stand behind each place of a row. An image that several questions share is digested once."""

    def __init__(self, batch: Batch, merge_size: int) -> None:
        self.patches, self.pixels = merge_size**2, batch.pixels.numpy()
        self.source = dict(zip(batch.image_slots.tolist(), batch.image_source.tolist(), strict=True))
        ends = np.cumsum([high * wide // self.patches for high, wide in batch.grids])
        self.ends, self.grids = ends, batch.grids
        self.known: dict[tuple[int, ...], str] = {}

    def digest(self, places: np.ndarray) -> str:
        sources = tuple(self.source[place] for place in places.tolist() if place in self.source)
        if sources not in self.known:
            rows = np.asarray(sources, np.int64)
            images = np.unique(np.searchsorted(self.ends, rows, side="right"))
            grids = np.asarray([self.grids[i] for i in images.tolist()], np.int64)
            patches = (rows[:, None] * self.patches + np.arange(self.patches)).reshape(-1)
            # Relative: where an image stands among a micro-batch's images is no part of the question.
            self.known[sources] = digest(self.pixels[patches], grids) if sources else "none"
        return self.known[sources]
