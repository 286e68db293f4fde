"""What a step of questions must compute and move at least, and what its plan executes. No image is read."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from sameday.data.questions.batch import Batch
from sameday.data.questions.sample import ImageRef
from sameday.data.questions.source import Picture, ReadImage, Source
from sameday.data.times import Times
from sameday.hardware.ranks import Ranks
from sameday.models.vlm import VisionLanguageModel
from sameday.tasks.base import StepCost, optimizer_bytes

if TYPE_CHECKING:
    from sameday.tasks.vqa.task import VqaTask


def step_cost(task: VqaTask, step: int, budget: int | None, ranks: Ranks) -> StepCost:
    kept: Container[str] = task.model.memory or ()
    names = _Names(task.source, kept)
    named = copy.copy(task)
    named.source = names
    batches = list(named.batches(step, budget, ranks))
    model, flops = task.model, [task.flops(batch) for batch in batches]
    in_fp8 = flops if _in_fp8(model) else []
    return StepCost(
        samples=sum(len(batch.sample_ids) for batch in batches),
        micro_batches=len(batches),
        flop=sum(each.needed.total for each in flops),
        executed_flop=sum(each.executed.total for each in flops),
        memory_bytes=sum(_weights_moved(model, batch) for batch in batches) + optimizer_bytes(task),
        copy_bytes=sum(_image_bytes(model, batch, kept) for batch in batches),
        disk_bytes=sum(names.sizes.values()),
        fp8_flop=sum(each.needed.fp8 for each in in_fp8),
        executed_fp8_flop=sum(each.executed.fp8 for each in in_fp8),
    )


def _in_fp8(model: VisionLanguageModel) -> bool:
    """Whether layers that are stored in fp8 are computed in it too."""
    return model.device.type == "cuda" and model.recipe.precision == "bf16"


class _Names(Source):
    """Stands where a task's source stands, and reads nothing: it notes which images are asked for, and from where.
    Features of those that are `kept` are on the device already."""

    def __init__(self, source: Source, kept: Container[str]) -> None:
        super().__init__(source.processor, source.pixels, source.features)
        self.kept = kept
        self.sizes: dict[str, int] = {}

    def read_image(self, image: ImageRef) -> Picture:
        cached = self.features is not None and self.features.has(image.digest)
        ready = cached or image.digest in self.kept
        self.sizes[image.digest] = self._size(image)
        empty = torch.empty(0, 0, 0) if ready else torch.empty(0, dtype=torch.uint8)
        return Picture(image.digest, empty, ready, Times())

    def once(self) -> ReadImage:
        return self.read_image

    def _size(self, image: ImageRef) -> int:
        stores = (store for store in (self.features, self.pixels) if store is not None)
        kept = (store.path(image.digest) for store in stores if store.has(image.digest))
        return next(kept, image.path).stat().st_size


def _weights_moved(model: VisionLanguageModel, batch: Batch) -> int:
    """Of a table of embeddings only some rows are read, which is next to nothing."""
    language = sum(_bytes(part.parameters()) for part in (model.text.layers, model.text.norm, model.head))
    tower = 0 if all(batch.ready) else _bytes(model.tower.parameters())
    return 2 * language + (2 if model.tower_trained else 1) * tower


def _image_bytes(model: VisionLanguageModel, batch: Batch, kept: Container[str]) -> int:
    """Of pixels, or of features where they come ready from a disk."""
    side, merge, _ = model.patching
    tensors, width = model.feature_shape
    token = tensors * width * model.byte_table.dtype.itemsize
    return sum(
        model.family.image_tokens(grid, merge) * token
        if ready and content not in kept
        else grid[0] * grid[1] * side**2 * 3
        for content, grid, ready in zip(batch.contents, batch.grids, batch.ready, strict=True)
    )


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)
