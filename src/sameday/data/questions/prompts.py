"""Prompts whose answers are to be generated: a layout's rows as tensors, and where in them each question stands."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sameday.data.questions.batch import Batch, make_batch
from sameday.data.questions.layout import PADDING, PREFIX, Layout
from sameday.data.questions.source import ReadImage
from sameday.data.times import Times
from sameday.kernels.decode import Places


@dataclass(frozen=True, eq=False)
class Prompts:
    batch: Batch
    places: Places

    @property
    def times(self) -> Times:
        return self.batch.times

    def to(self, device: torch.device, non_blocking: bool = False) -> Prompts:
        return Prompts(self.batch.to(device, non_blocking), self.places.to(device, non_blocking))

    def pin_memory(self) -> Prompts:
        return Prompts(self.batch.pin_memory(), self.places.pin_memory())


def make_prompts(layout: Layout, read_image: ReadImage) -> Prompts:
    return Prompts(make_batch(layout, read_image), places_of(layout))


def places_of(layout: Layout) -> Places:
    """Questions in the layout's order; their groups are numbered as the layout numbers them."""
    assert not layout.fork.any(), "prompts share their images alone"
    group, branch = layout.group.reshape(-1), layout.branch.reshape(-1)
    there = np.unique(np.stack([group, branch])[:, group != PADDING], axis=1).T.tolist()
    pieces = {(g, b): np.flatnonzero((group == g) & (branch == b)) for g, b in there}
    asked = [key for key in pieces if key[1] != PREFIX]
    shared = [pieces.get((g, PREFIX), pieces[g, b]) for g, b in asked if b == 1]
    own = [pieces[key] if (key[0], PREFIX) in pieces else np.zeros(0, np.int64) for key in asked]
    lengths, own_lengths = [len(each) for each in shared], [len(each) for each in own]
    padded = np.zeros((len(own), max(own_lengths)), np.int64)
    for row, each in zip(padded, own, strict=True):
        row[: len(each)] = each
    last = np.asarray([pieces[key][-1] for key in asked])
    # After the largest position of the prompt, on all axes, as if the answer stood there.
    positions = layout.positions.reshape(len(layout.positions), -1)
    return Places(
        shared=torch.from_numpy(np.concatenate(shared)),
        shared_group=torch.arange(len(shared)).repeat_interleave(torch.tensor(lengths)),
        cu=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
        group=torch.tensor([g for g, _ in asked]),
        own=torch.from_numpy(padded),
        own_length=torch.tensor(own_lengths),
        last=torch.from_numpy(last),
        position=torch.from_numpy(positions[:, last].max(0) + 1),
        longest_shared=max(lengths),
        shared_position=torch.from_numpy(positions[0, np.concatenate(shared)]),
    )
