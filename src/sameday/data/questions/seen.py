"""A micro-batch read back: what each of its questions looks like to the model, wherever in the tensors it stands."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from sameday.data.questions.batch import Batch
from sameday.data.questions.layout import PREFIX
from sameday.data.seen import Seen, digest


def read_back(batch: Batch, patches: Tensor, merge_size: int) -> Iterator[Seen]:
    """The questions of a micro-batch. A question's tokens are its own branch behind its fork and its prefix. `patches`
    are what the tower takes, of the images that come as pixels; of the others there is only their content's name."""
    batch = batch.to(torch.device("cpu"))
    length = batch.tokens.shape[1]
    group, branch, fork, tokens = (x.numpy().reshape(-1) for x in (batch.group, batch.branch, batch.fork, batch.tokens))
    positions = batch.positions.numpy().reshape(len(batch.positions), -1)
    owner, at = batch.owner.numpy(), batch.target_at.numpy()
    target, weight = batch.target.numpy(), batch.weight.numpy()
    pictures = _Pictures(batch, patches, merge_size)
    for number, sample in enumerate(batch.sample_ids):
        mine = owner == number
        last = at[mine][-1]
        row = slice(last // length * length, (last // length + 1) * length)
        levels = ((level[row] == PREFIX) | (level[row] == level[last]) for level in (branch, fork))
        own = np.flatnonzero(np.logical_and.reduce([group[row] == group[last], *levels])) + row.start
        yield Seen(
            sample,
            {"tokens": len(own), "targets": int(mine.sum())},
            {
                "tokens": digest(tokens[own]),
                "positions": digest(positions[:, own]),
                **pictures.digests(own),
                "targets": digest(np.searchsorted(own, at[mine]), target[mine]),
                "weights": digest(weight[mine]),
            },
        )


class _Pictures:
    """Which image stands behind each place of a row. One that several questions share is digested once."""

    def __init__(self, batch: Batch, patches: Tensor, merge_size: int) -> None:
        self.source = dict(zip(batch.image_slots.tolist(), batch.image_source.tolist(), strict=True))
        counts = [high * wide for high, wide in batch.grids]
        self.ends = np.cumsum(counts) // merge_size**2
        self.grids, self.contents, self.ready = batch.grids, batch.contents, batch.ready
        cuts = np.cumsum([count for count, ready in zip(counts, batch.ready, strict=True) if not ready])
        given = iter(np.split(patches.float().cpu().numpy(), cuts))
        self.patches = [
            None if ready else next(given).reshape(-1, merge_size**2, patches.shape[1]) for ready in batch.ready
        ]
        self.known: dict[tuple[int, ...], dict[str, str]] = {}

    def digests(self, places: np.ndarray) -> dict[str, str]:
        sources = tuple(self.source[place] for place in places.tolist() if place in self.source)
        if sources not in self.known:
            none = {"images": "none", "patches": "none"}
            self.known[sources] = self._made(np.asarray(sources, np.int64)) if sources else none
        return self.known[sources]

    def _made(self, rows: np.ndarray) -> dict[str, str]:
        # Relative: where an image stands among a micro-batch's images is no part of the question.
        images = np.searchsorted(self.ends, rows, side="right")
        starts = np.concatenate([[0], self.ends])[images]
        chosen = list(dict.fromkeys(images.tolist()))
        which = " ".join(f"{self.contents[i]} {self.grids[i]}" for i in chosen)
        made = {"images": digest(np.frombuffer(which.encode(), np.uint8), rows - starts)}
        if not any(self.ready[i] for i in chosen):
            parts = [self.patches[i][(rows - starts)[images == i]] for i in chosen]
            made["patches"] = digest(np.concatenate(parts))
        return made
