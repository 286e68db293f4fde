"""A micro-batch of labelled images, prepared on the host or only named where the device holds them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sameday.data.seen import Seen, digest


@dataclass(frozen=True)
class ImageBatch:
    """`ids` (n,) are places in the training or evaluated part. `turn` (2,) is the epoch and the step's dropout key, as
    a tensor: a recorded graph reads it anew. `pixels` (n, 3, size, size) uint8 and `labels` (n,) are None where the
    device holds the images."""

    ids: Tensor
    turn: Tensor
    pixels: Tensor | None = None
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(value for field in fields(self) if (value := getattr(self, field.name)) is not None)

    def to(self, device: torch.device, non_blocking: bool = False) -> ImageBatch:
        return ImageBatch(*(tensor.to(device, non_blocking=non_blocking) for tensor in self.tensors()))

    def pin_memory(self) -> ImageBatch:
        return ImageBatch(*(tensor.pin_memory() for tensor in self.tensors()))


def read_back(ids: Tensor, turn: Tensor, pixels: Tensor, labels: Tensor) -> Iterator[Seen]:
    """Each image as the model sees it before it is normalised."""
    turn_digest = digest(turn.cpu().numpy())
    for i, (image, label) in enumerate(zip(pixels.cpu().numpy(), labels.cpu().numpy(), strict=True)):
        digests = {"pixels": digest(image), "label": digest(label), "epoch and dropout key": turn_digest}
        yield Seen(int(ids[i]), {"pixels": image.size}, digests)
