"""The least time that a step can take on this device: what must be computed and moved, at the rates that were measured.
Everything overlaps with everything, so that the slowest resource alone is the bound."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from sameday.data.questions.batch import Batch
from sameday.data.questions.sample import ImageRef
from sameday.data.questions.source import Look, Picture, Source
from sameday.data.times import Times
from sameday.hardware.choose import attention_kernel
from sameday.hardware.peaks import Peaks
from sameday.hardware.ranks import Ranks
from sameday.models.flops import count_images, executed, needed
from sameday.models.qwen_vl import QwenVL
from sameday.tasks.base import Task
from sameday.tasks.classify import ClassifyTask
from sameday.tasks.vqa import VqaTask

Resource = Literal["arithmetic", "memory", "copy", "disk"]

OPTIMIZER_TRIPS = 8
"""How often AdamW moves as many bytes as are trained: the weights and both moments are read and written, the gradient
is written and read."""
ALONE = {"share_images": False, "packing": False, "max_questions": 1, "pad_to_multiple": 1}


@dataclass(frozen=True)
class Least:
    """What a step must do. Weights are read once forward and once backward in each micro-batch, a frozen tower's only
    forward; each image is read once from disk, unless memory still holds it from an earlier epoch."""

    samples: int
    micro_batches: int
    flop: int
    memory_bytes: int
    copy_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class Bound:
    """`seconds_of` each resource, of those whose rate is known."""

    least: Least
    seconds_of: Mapping[Resource, float]

    @property
    def by(self) -> Resource:
        return max(self.seconds_of, key=lambda resource: self.seconds_of[resource])

    @property
    def seconds(self) -> float:
        return self.seconds_of[self.by]

    @property
    def without_disk(self) -> float:
        """What holds for images that memory has, or a faster disk."""
        return max(seconds for resource, seconds in self.seconds_of.items() if resource != "disk")

    def share(self, measured: float) -> float:
        """Of the floor that a step reaches which took so many seconds: 1 is as fast as can be."""
        if not measured > 0:
            raise ValueError(f"a step cannot have taken {measured} seconds")
        return self.seconds / measured

    def as_dict(self, measured: float | None = None) -> dict[str, Any]:
        reached = {} if measured is None else {"share": self.share(measured)}
        named = {"seconds": self.seconds, "bound_by": self.by, "seconds_of": dict(self.seconds_of)}
        return {**named, **reached, "least": asdict(self.least)}


@dataclass(frozen=True)
class Floor:
    """`plan`: as the plan cuts the step and shares its images. `alone`: the same samples one at a time. `executed_flop`
    is what the plan's kernels do to get what needs `plan.least.flop`."""

    peaks: Peaks
    plan: Bound
    alone: Bound
    executed_flop: int

    def as_dict(self, measured: float | None = None) -> dict[str, Any]:
        """For JSON; with a measured step time in seconds also the share of each floor that it reaches."""
        return {
            "measured_seconds": measured,
            "executed_flop": self.executed_flop,
            "plan": self.plan.as_dict(measured),
            "alone": self.alone.as_dict(measured),
            "peaks": self.peaks.as_dict(),
        }


def floor_of(task: Task, step: int, peaks: Peaks, budget: int | None = None, ranks: Ranks | None = None) -> Floor:
    """Of this rank's part of a step. No image is read; `budget` overrides the plan's, as in training."""
    ranks = ranks or Ranks()
    if isinstance(task, VqaTask):
        precision = task.recipe.precision
        plan, done = _questions(task, step, budget, ranks)
        alone, _ = _questions(_one_by_one(task), step, 1, ranks)
    elif isinstance(task, ClassifyTask):
        precision = task.recipe.precision
        plan, done = _pictures(task, step, budget, ranks)
        alone, _ = _pictures(task, step, 1, ranks)
    else:
        raise TypeError(f"no floor is known for a {type(task).__name__}")
    if precision != peaks.precision:
        raise ValueError(f"the peaks are of {peaks.precision} products, and the recipe's are {precision}")
    return Floor(peaks, bound(plan, peaks), bound(alone, peaks), done)


def recut(task: Task, step: int, change: Mapping[str, Any]) -> tuple[int, int]:
    """Micro-batches of a step, and the FLOPs that are executed, if these fields of the plan were so."""
    changed = copy.copy(task)
    if isinstance(changed, VqaTask):
        changed.plan, changed.model = changed.plan.model_copy(update=dict(change)), copy.copy(changed.model)
        triton = importlib.util.find_spec("triton") is not None
        device, precision = changed.device.type, changed.recipe.precision
        changed.model.kernel, _ = attention_kernel(changed.plan, device, precision, triton)
        least, done = _questions(changed, step, None, Ranks())
    elif isinstance(changed, ClassifyTask):
        changed.plan = changed.plan.model_copy(update=dict(change))
        least, done = _pictures(changed, step, None, Ranks())
    else:
        raise TypeError(f"nothing is known of how a {type(task).__name__} is cut")
    return least.micro_batches, done


def bound(least: Least, peaks: Peaks) -> Bound:
    seconds: dict[Resource, float] = {
        "arithmetic": least.flop / peaks.flop_per_second,
        "memory": least.memory_bytes / peaks.memory_bytes_per_second,
        "copy": least.copy_bytes / peaks.copy_bytes_per_second,
    }
    if peaks.disk_bytes_per_second is not None:
        seconds["disk"] = least.disk_bytes / peaks.disk_bytes_per_second
    return Bound(least, seconds)


# Questions


class _Names(Source):
    """Stands where a task's source stands, and reads nothing: it notes which images are asked for, and from where."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.processor, source.pixels, source.features)
        self.sizes: dict[str, int] = {}

    def look(self, image: ImageRef) -> Picture:
        ready = self.features is not None and self.features.has(image.digest)
        self.sizes[image.digest] = self._size(image)
        empty = torch.empty(0, 0, 0) if ready else torch.empty(0, dtype=torch.uint8)
        return Picture(image.digest, empty, ready, Times())

    def once(self) -> Look:
        return self.look

    def _size(self, image: ImageRef) -> int:
        stores = (store for store in (self.features, self.pixels) if store is not None)
        kept = (store.path(image.digest) for store in stores if store.has(image.digest))
        return next(kept, image.path).stat().st_size


def _one_by_one(task: VqaTask) -> VqaTask:
    single = copy.copy(task)
    single.plan = task.plan.model_copy(update=ALONE)
    return single


def _questions(task: VqaTask, step: int, budget: int | None, ranks: Ranks) -> tuple[Least, int]:
    """And the FLOPs that are executed."""
    names = _Names(task.source)
    named = copy.copy(task)
    named.source = names
    batches = list(named.batches(step, budget, ranks))
    model = task.model
    least = Least(
        samples=sum(len(batch.sample_ids) for batch in batches),
        micro_batches=len(batches),
        flop=sum(needed(model, batch).total for batch in batches),
        memory_bytes=sum(_weights_moved(model, batch) for batch in batches) + _optimizer_moved(task),
        copy_bytes=sum(_image_bytes(model, batch) for batch in batches),
        disk_bytes=sum(names.sizes.values()),
    )
    return least, sum(executed(model, batch).total for batch in batches)


def _weights_moved(model: QwenVL, batch: Batch) -> int:
    """Of a table of embeddings only some rows are read, which is next to nothing."""
    language = sum(_bytes(part.parameters()) for part in (model.text.layers, model.text.norm, model.head))
    tower = 0 if all(batch.ready) else _bytes(model.tower.parameters())
    return 2 * language + (2 if model.tower_trained else 1) * tower


def _image_bytes(model: QwenVL, batch: Batch) -> int:
    """Of pixels, or of features where they are ready."""
    config, side = model.tower.config, model.patching.side
    levels = 1 + len(getattr(config, "deepstack_visual_indexes", None) or [])
    token = levels * config.out_hidden_size * model.levels.dtype.itemsize
    patches = [high * wide for high, wide in batch.grids]
    return sum(
        count // model.patching.merge**2 * token if ready else count * side**2 * 3
        for count, ready in zip(patches, batch.ready, strict=True)
    )


# Labelled images


def _pictures(task: ClassifyTask, step: int, budget: int | None, ranks: Ranks) -> tuple[Least, int]:
    """Images are in memory before a run begins, so that no disk is read."""
    samples = len(task.step_ids(step)[ranks.rank :: ranks.size])
    micro_batches = -(-samples // task.budget(step, budget, ranks))
    counted = count_images(task.model, samples)
    each = 3 * task.recipe.data.image_size**2 if task.place == "host" else 0
    least = Least(
        samples=samples,
        micro_batches=micro_batches,
        flop=counted.needed.total,
        memory_bytes=2 * micro_batches * _bytes(task.model.parameters()) + _optimizer_moved(task),
        copy_bytes=samples * each,
        disk_bytes=0,
    )
    return least, counted.executed.total


def _optimizer_moved(task: Task) -> int:
    return OPTIMIZER_TRIPS * _bytes(task.trained().values())


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)
