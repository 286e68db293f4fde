"""A micro-batch as tensors: built on the CPU (in a worker or not), pinned, copied to the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from sameday.data.questions.layout import Layout
from sameday.data.questions.shapes import Shape
from sameday.data.questions.source import ReadImage
from sameday.data.times import Times
from sameday.kernels.split import Dense, Segments


@dataclass(frozen=True, eq=False)
class Batch:
    """The layout's arrays as tensors (see Layout), its images, and whose questions they are. `grids` and `contents`,
    the digests of their pixels, are of all images. `ready` says of each whether the tower's output for it is in
    `features`, (1 + DeepStack's, tokens, width), or its bytes are in `pixels`, one image after the other."""

    tokens: Tensor
    positions: Tensor
    group: Tensor
    branch: Tensor
    fork: Tensor
    keys: Tensor
    image_slots: Tensor
    image_source: Tensor
    target_at: Tensor
    target: Tensor
    weight: Tensor
    owner: Tensor
    pixels: Tensor
    features: Tensor
    ready: tuple[bool, ...]
    contents: tuple[str, ...]
    grids: tuple[tuple[int, int], ...]
    sample_ids: tuple[int, ...]
    one_per_row: bool
    segments: Segments | None
    shape: Shape | None
    times: Times

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self._mapped(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        return self._mapped(lambda x: x.pin_memory())

    def _mapped(self, change: Callable[[Any], Any]) -> Batch:
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: change(v) for k, v in parts.items() if isinstance(v, Tensor | Segments)})


def _segments(layout: Layout) -> Segments | None:
    bounds = layout.bounds
    if bounds is None:
        return None
    calls = [
        Dense(call.queries, call.keys, torch.from_numpy(call.cu_queries), torch.from_numpy(call.cu_keys), call.longest)
        for call in bounds.dense
    ]
    return Segments.of(torch.from_numpy(bounds.cu), calls, bounds.longest)


def make_batch(layout: Layout, read_image: ReadImage) -> Batch:
    pictures = [read_image(image) for image in layout.images]
    pixels = [picture.tensor.flatten() for picture in pictures if not picture.ready]
    features = [picture.tensor for picture in pictures if picture.ready]
    return Batch(
        tokens=torch.from_numpy(layout.tokens),
        positions=torch.from_numpy(layout.positions),
        group=torch.from_numpy(layout.group),
        branch=torch.from_numpy(layout.branch),
        fork=torch.from_numpy(layout.fork),
        keys=torch.from_numpy(layout.keys),
        image_slots=torch.from_numpy(layout.image_slots),
        image_source=torch.from_numpy(layout.image_source),
        target_at=torch.from_numpy(layout.target_at),
        target=torch.from_numpy(layout.target),
        weight=torch.from_numpy(layout.weight),
        owner=torch.from_numpy(layout.owner),
        pixels=torch.cat(pixels) if pixels else torch.zeros(0, dtype=torch.uint8),
        features=torch.cat(features, 1) if features else torch.zeros(0, 0, 0),
        ready=tuple(picture.ready for picture in pictures),
        contents=tuple(picture.content for picture in pictures),
        grids=layout.grids,
        sample_ids=tuple(q.sample.id for q in layout.questions),
        one_per_row=layout.one_per_row,
        segments=_segments(layout),
        shape=layout.shape,
        times=Times(*map(sum, zip(*(picture.times for picture in pictures), strict=True))) if pictures else Times(),
    )
