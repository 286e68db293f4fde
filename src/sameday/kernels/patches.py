"""From the bytes of resized images to what a vision tower takes. Normalisation is looked up: a byte has 256 values, and
the processor itself said what it makes of each, so the bits are its own on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Patching(NamedTuple):
    """How an image is cut: squares of `side` pixels in blocks of `merge` × `merge`, each repeated `frames` times, since
    the tower takes a still image for so many frames of a film."""

    side: int
    merge: int
    frames: int


def patches(pixels: Tensor, grids: Sequence[tuple[int, int]], how: Patching, byte_table: Tensor) -> Tensor:
    """(patches, 3 · frames · side²) in the type of `byte_table`, (3, 256), from the bytes of images that lie one after
    the other, each (height, width, 3). `grids` are their patches, high and wide."""
    side, merge, frames = how
    sizes = [high * wide * side * side * 3 for high, wide in grids]
    first = 256 * torch.arange(3, device=pixels.device, dtype=torch.int32)
    made = []
    for image, (high, wide) in zip(pixels.split(sizes), grids, strict=True):
        blocks = image.view(high // merge, merge, side, wide // merge, merge, side, 3).permute(0, 3, 1, 4, 6, 2, 5)
        places = blocks.to(torch.int32) + first[:, None, None]
        values = byte_table.flatten().index_select(0, places.flatten()).view(high * wide, 3, 1, side * side)
        made.append(values.expand(-1, -1, frames, -1).reshape(high * wide, -1))
    return torch.cat(made) if made else byte_table.new_zeros(0, 3 * frames * side * side)
