"""A micro-batch read back: what each of its questions looks like to the model, wherever in the tensors it stands."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sameday.data.questions.batch import Batch
from sameday.data.questions.layout import PREFIX
from sameday.data.seen import Seen, digest

SAMPLED = 512
"""Numbers of a question's pixel values that are told, evenly spread."""


def read_back(batch: Batch, patches: Tensor, merge_size: int) -> Iterator[Seen]:
    """The questions of a micro-batch. A question's tokens are its own branch behind its fork and its prefix. `patches`
    are what the tower takes, of the images that come as pixels; of the others there is only their content's name."""
    batch = batch.to(torch.device("cpu"))
    length = batch.tokens.shape[1]
    group, branch, fork, tokens = (x.numpy().reshape(-1) for x in (batch.group, batch.branch, batch.fork, batch.tokens))
    positions = batch.positions.numpy().reshape(len(batch.positions), -1)
    owner = batch.owner.numpy()
    # A batch that is padded to a shape has more, of no question.
    at, target, weight = (x.numpy()[: len(owner)] for x in (batch.target_at, batch.target, batch.weight))
    pictures = _Pictures(batch, patches, merge_size)
    for number, sample in enumerate(batch.sample_ids):
        mine = owner == number
        last = at[mine][-1]
        row = slice(last // length * length, (last // length + 1) * length)
        levels = ((level[row] == PREFIX) | (level[row] == level[last]) for level in (branch, fork))
        own = np.flatnonzero(np.logical_and.reduce([group[row] == group[last], *levels])) + row.start
        places = np.searchsorted(own, at[mine])
        digests, values = pictures.of(own)
        yield Seen(
            sample,
            {"tokens": len(own), "targets": int(mine.sum())},
            {
                "tokens": digest(tokens[own]),
                "positions": digest(positions[:, own]),
                **digests,
                "targets": digest(places, target[mine]),
                "weights": digest(weight[mine]),
            },
            {
                "tokens": tokens[own].tolist(),
                # A place predicts the token behind it.
                "labels": [
                    [place + 1, token] for place, token in zip(places.tolist(), target[mine].tolist(), strict=True)
                ],
                **values,
            },
        )


class _Pictures:
    """Which image stands behind each place of a row. One that several questions share is digested once."""

    def __init__(self, batch: Batch, patches: Tensor, merge_size: int) -> None:
        self.source = dict(zip(batch.image_slots.tolist(), batch.image_source.tolist(), strict=False))
        counts = [high * wide for high, wide in batch.grids]
        self.ends = np.cumsum(counts) // merge_size**2
        self.grids, self.contents, self.ready = batch.grids, batch.contents, batch.ready
        cuts = np.cumsum([count for count, ready in zip(counts, batch.ready, strict=True) if not ready])
        given = iter(np.split(patches.float().cpu().numpy(), cuts))
        self.patches: list[Any] = [
            None if ready else next(given).reshape(-1, merge_size**2, patches.shape[1]) for ready in batch.ready
        ]
        self.known: dict[tuple[int, ...], tuple[dict[str, str], dict[str, Any]]] = {}

    def of(self, places: np.ndarray) -> tuple[dict[str, str], dict[str, Any]]:
        """Digests of the images at these places; and their grids and pixel values as an image processor gives them, all
        of these as a digest and some as they are."""
        sources = tuple(self.source[place] for place in places.tolist() if place in self.source)
        if sources not in self.known:
            none: tuple[dict[str, str], dict[str, Any]] = {"images": "none", "patches": "none"}, {}
            self.known[sources] = self._made(np.asarray(sources, np.int64)) if sources else none
        return self.known[sources]

    def _made(self, rows: np.ndarray) -> tuple[dict[str, str], dict[str, Any]]:
        # Relative: where an image stands among a micro-batch's images is no part of the question, nor whether an image
        # that stands in it twice is there twice.
        images = np.searchsorted(self.ends, rows, side="right")
        places = rows - np.concatenate([[0], self.ends])[images]
        begins = np.union1d([0], np.flatnonzero((places == 0) | (np.diff(images, prepend=images[:1]) != 0)))
        chosen = images[begins].tolist()
        which = " ".join(f"{self.contents[i]} {self.grids[i]}" for i in chosen)
        digests = {"images": digest(np.frombuffer(which.encode(), np.uint8), places)}
        values: dict[str, Any] = {"grids": [list(self.grids[i]) for i in chosen]}
        if not any(self.ready[i] for i in chosen):
            pieces = zip(chosen, np.split(places, begins[1:]), strict=True)
            pixels = np.concatenate([self.patches[i][piece] for i, piece in pieces])
            digests["patches"] = digest(pixels)
            values["pixels"] = hashlib.blake2b(pixels.tobytes(), digest_size=8).hexdigest()
            values["some pixels"] = pixels.reshape(-1)[:: max(1, pixels.size // SAMPLED)].tolist()
        return digests, values
