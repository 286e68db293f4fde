"""Classification of images: labels are learned by models that are trained from scratch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from sameday.data.labelled import augment
from sameday.data.labelled.batch import ImageBatch, read_back
from sameday.data.labelled.pictures import Pictures
from sameday.data.loader import feed
from sameday.data.order import permutation
from sameday.data.seen import Seen
from sameday.hardware.machine import detect_machine, numeric_format
from sameday.hardware.phases import during
from sameday.hardware.ranks import Ranks
from sameday.kernels.dropout import dropouts, mix, name_key
from sameday.models.build import VisionModel, build_model, restore_model, save_model
from sameday.models.compiled import Compiled
from sameday.models.vision_bdh import VisionBDH
from sameday.models.vision_flops import count_images
from sameday.spec.classify import ClassifyRecipe
from sameday.spec.plan import Plan
from sameday.tasks.base import ASKED_TO_STOP, FAILED, NO_MEMORY, StepCost, Task, WarmUpBatch, optimizer_bytes
from sameday.tasks.classify.automatic import images_place
from sameday.tasks.classify.warm import warm_up_batches
from sameday.tasks.setup import DATA


class ClassifyTask(Task):
    """`splits` holds the images by name; `train` is the one that is learned."""

    budget_field = "micro_batch"
    memory_advice = "plan.level_kernel fused, plan.images_on host, a smaller recipe.model or data.image_size"
    evaluation_advice = memory_advice

    def __init__(
        self, recipe: ClassifyRecipe, plan: Plan, model: VisionModel, splits: dict[str, Pictures], device: torch.device
    ) -> None:
        self.recipe, self.plan, self.model, self.splits, self.device = recipe, plan, model, splits, device
        self.notes: Sequence[str] = ()
        size = sum(split.pixels.nbytes for split in splits.values())
        self.place, _ = images_place(plan, device.type, detect_machine(device.type).memory, size)
        self._epoch = lru_cache(maxsize=2)(self._epoch_order)
        self._losses = {name: Losses(recipe, model, self._held(name)) for name in splits}
        self._recorded: dict[tuple[int, bool], Any] = {}

    @classmethod
    def load(
        cls, recipe: ClassifyRecipe, plan: Plan, device: torch.device, splits: dict[str, Pictures]
    ) -> ClassifyTask:
        classes = len(next(iter(splits.values())).classes)
        model = build_model(recipe.model, recipe.data.image_size, classes, recipe.seed)
        model.to(device=device)
        if isinstance(model, VisionBDH):
            model.kernel = plan.level_kernel
        task = cls(recipe, plan, model, splits, device)
        if plan.compile != "none" and "train" in splits:
            task.compile()
        return task

    def compile(self) -> None:
        """Tried with the first step's images, so that what fails is said before the run begins."""
        if isinstance(self.model, VisionBDH) and self.model.kernel == "fused":
            self.notes = ("compile: none, because the levels are fused kernels already",)
            return
        made = Compiled(self.model, self.plan, self.recipe.precision)
        for each in self._losses.values():
            each.run = made
        self.model.train()
        self._losses["train"](*next(iter(self.batches(0, None, Ranks()))).to(self.device).tensors())
        if made.why is not None:
            self.notes = (f"compile: none, because {made.why}",)

    def _held(self, split: str) -> tuple[Tensor, Tensor] | None:
        """A split's images and labels in the device's memory, where the plan has them there."""
        if self.place == "host":
            return None
        pictures = self.splits[split]
        return torch.from_numpy(pictures.pixels).to(self.device), torch.from_numpy(pictures.labels).to(self.device)

    # Order: recipe

    def _epoch_order(self, epoch: int) -> np.ndarray:
        count, seed = len(self.splits["train"]), self.recipe.seed
        return np.arange(count) if self.recipe.order == "listed" else permutation(count, "epoch", seed, epoch)

    def steps_per_epoch(self) -> int:
        return -(-len(self.splits["train"]) // self.recipe.effective_batch)

    def step_ids(self, step: int) -> list[int]:
        epoch, number = divmod(step, self.steps_per_epoch())
        batch = self.recipe.effective_batch
        ids: list[int] = self._epoch(epoch)[number * batch : (number + 1) * batch].tolist()
        return ids

    def names(self, ids: Sequence[int]) -> list[str]:
        return [self.splits["train"].names[i] for i in ids]

    def count(self, ids: Sequence[int]) -> float:
        return float(len(ids))

    # Partition: plan

    def budget(self, step: int, budget: int | None, ranks: Ranks) -> int:
        return budget or self.plan.micro_batch or self._largest(step, ranks)

    def _largest(self, step: int, ranks: Ranks) -> int:
        """Images of the step that one rank has."""
        return -(-len(self.step_ids(step)) // ranks.size)

    def smaller_budget(self, step: int, budget: int | None, ranks: Ranks) -> int | None:
        largest = min(self.budget(step, budget, ranks), self._largest(step, ranks))
        self._recorded.clear()  # graphs hold the memory of their micro-batches
        return largest // 2 if largest > 1 else None

    def batches(self, step: int, budget: int | None, ranks: Ranks) -> Iterable[ImageBatch]:
        turn = self.turn(step)
        return (self._build("train", ids, turn) for ids in self.cut(step, budget, ranks))

    def cut(self, step: int, budget: int | None, ranks: Ranks) -> list[list[int]]:
        """The images of this rank's micro-batches of a step."""
        mine = self.step_ids(step)[ranks.rank :: ranks.size]
        most = self.budget(step, budget, ranks)
        return [mine[i : i + most] for i in range(0, len(mine), most)]

    def turn(self, step: int) -> tuple[int, int]:
        """What augmentation and dropout of a step are keyed by."""
        return step // self.steps_per_epoch(), name_key("dropout", self.recipe.seed, step)

    def warm_up_batches(self, steps: range, budget: int | None, ranks: Ranks) -> list[WarmUpBatch]:
        return warm_up_batches(self, steps, budget, ranks)

    def recorded_sizes(self) -> int:
        return sum(each is not None for each in self._recorded.values())

    def is_recorded(self, batch: ImageBatch) -> bool:
        return self._recorded.get(self._kind(batch)) is not None

    def _build(self, split: str, ids: Sequence[int], turn: tuple[int, int]) -> ImageBatch:
        chosen, at = torch.tensor(ids), torch.tensor(turn)
        if self.place == "device":
            return ImageBatch(chosen, at)
        pictures = self.splits[split]
        pixels = _prepared(self.recipe, torch.from_numpy(pictures.pixels[chosen.numpy()]), chosen, at, split == "train")
        return ImageBatch(chosen, at, pixels, torch.from_numpy(pictures.labels[chosen.numpy()]))

    # Forward and loss

    def loss_sum(self, batch: ImageBatch, step: int) -> tuple[Tensor, Tensor]:
        with during("forward"):
            losses = self._recording(batch)(*batch.tensors())
        with during("loss"):
            # Copied: a recorded graph writes the next micro-batch's losses to the same place.
            return losses.sum(), losses.detach().clone()

    def _recording(self, batch: ImageBatch) -> Callable[..., Tensor]:
        """The losses of a training micro-batch, as recorded graphs where the plan asks for them: from the second of a
        size on, since a first use makes what must not be made while recording."""
        eager = self._losses["train"]
        if not self.plan.cuda_graphs:
            return eager
        key = self._kind(batch)
        if key not in self._recorded:
            self._recorded[key] = None
            return eager
        if self._recorded[key] is None:
            self._recorded[key] = _recorded(eager, batch.tensors())
        return self._recorded[key]

    def _kind(self, batch: ImageBatch) -> tuple[int, bool]:
        """What is written into a graph: its size, and whether dropout drops."""
        return len(batch), any(layer.training for layer in dropouts(self.model))

    def seen(self, batch: ImageBatch) -> Iterator[Seen]:
        images = self._losses["train"].images(*batch.tensors(), augmented=True)
        return read_back(batch.ids, batch.turn, *images)

    def module(self) -> nn.Module:
        return self.model

    def culprits(self, batch: ImageBatch, losses: Tensor) -> list[str]:
        return self.names(batch.ids[~losses.isfinite()].tolist())

    def trained(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def digests(self) -> dict[str, str]:
        return {what: self.splits[split].digest for split, what in DATA.items() if split in self.splits}

    def save(self, folder: Path) -> None:
        recipe, split = self.recipe, next(iter(self.splits.values()))
        about = {
            "image_size": recipe.data.image_size,
            "classes": list(split.classes),
            "normalize_mean": recipe.normalize_mean,
            "normalize_std": recipe.normalize_std,
        }
        save_model(folder, self.model, about)

    def restore(self, folder: Path) -> None:
        restore_model(folder, self.model, next(iter(self.splits.values())).classes)

    def cost(self, step: int, budget: int | None, ranks: Ranks) -> StepCost:
        """Images are in memory before a run begins, so that no disk is read."""
        samples = len(self.step_ids(step)[ranks.rank :: ranks.size])
        micro_batches = -(-samples // self.budget(step, budget, ranks))
        counted = count_images(self.model, samples)
        each = 3 * self.recipe.data.image_size**2 if self.place == "host" else 0
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        return StepCost(
            samples=samples,
            micro_batches=micro_batches,
            flop=counted.needed.total,
            executed_flop=counted.executed.total,
            memory_bytes=2 * micro_batches * weights + optimizer_bytes(self),
            copy_bytes=samples * each,
            disk_bytes=0,
        )

    # Evaluation

    @torch.no_grad()
    def evaluate(self, split: str, ranks: Ranks, budget: int | None = None) -> dict[str, float]:
        """Loss as it is trained, and the share of images whose likeliest class is the right one."""
        if split not in self.splits:
            return {}
        jobs, score = self.eval_parts(split, ranks, budget), self._losses[split]
        self.training(False)
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        short: list[str] = []
        failed: Exception | None = None
        # The other ranks wait for this one's sums, and learn from them what ended it.
        try:
            with closing(feed(self.plan, self.device, jobs, lambda ids: [self._build(split, ids, (0, 0))])) as batches:
                for batch in chain.from_iterable(batches):
                    if self.stop_asked():
                        sums[3] = ASKED_TO_STOP
                        break
                    scores = _score_or_halve(score, batch.tensors())
                    if isinstance(scores, int):
                        short, sums[3] = [self.splits[split].names[scores]], NO_MEMORY
                        break
                    sums[:3] += scores
        except Exception as error:
            failed, sums[3] = error, FAILED
        self.training(True)
        loss, right, samples, flags = ranks.sum_(sums).tolist()
        if flags:
            raise self.evaluation_stopped(self.recipe.sample, short, ranks, flags, failed)
        return {"loss": loss / samples, "accuracy": right / samples, "samples": int(samples)}

    def eval_parts(self, split: str, ranks: Ranks, budget: int | None) -> list[list[int]]:
        """The images of this rank's micro-batches of an evaluation."""
        mine = list(range(ranks.rank, len(self.splits[split]), ranks.size))
        most = self.plan.eval_batch or budget or self.plan.micro_batch or self.recipe.effective_batch
        return [mine[i : i + most] for i in range(0, len(mine), most)]

    def score_val(self, batch: ImageBatch) -> Tensor:
        """What a validation computes of a micro-batch."""
        return _score(self._losses["val"], batch.tensors())


def _score_or_halve(score: Losses, tensors: tuple[Tensor, ...]) -> Tensor | int:
    """A micro-batch's scores, in halves where memory runs out; where a single image is too much, its number."""
    ids, turn, *ready = tensors
    with suppress(torch.OutOfMemoryError):
        return _score(score, tensors)
    if len(ids) == 1:
        return int(ids)
    torch.cuda.empty_cache()
    sums = torch.zeros(3, dtype=torch.float64, device=ids.device)
    for part in zip(*(tensor.tensor_split(2) for tensor in (ids, *ready)), strict=True):
        scores = _score_or_halve(score, (part[0], turn, *part[1:]))
        if isinstance(scores, int):
            return scores
        sums += scores
    return sums


def _score(score: Losses, tensors: tuple[Tensor, ...]) -> Tensor:
    """Sums of the losses, of the right answers and of the images."""
    logits, labels = score.logits(*tensors, augmented=False)
    right = (logits.argmax(-1) == labels).double()
    each = score.cross_entropy(logits, labels).double()
    return torch.stack([each, right, torch.ones_like(each)]).sum(1)


class Losses(nn.Module):
    """From a micro-batch's tensors to each image's loss, in the recipe's numeric format. What is recorded as a graph is
    this, so it asks the host for nothing."""

    def __init__(self, recipe: ClassifyRecipe, model: VisionModel, held: tuple[Tensor, Tensor] | None) -> None:
        super().__init__()
        self.recipe, self.model, self.held = recipe, model, held
        # Not a part besides `model`: a weight found twice is swapped twice for a recording, and not put back.
        self.run: Callable[[Tensor, Tensor], Tensor] = model.__call__

    def forward(self, *tensors: Tensor) -> Tensor:
        logits, labels = self.logits(*tensors, augmented=True)
        with during("loss"):
            return self.cross_entropy(logits, labels)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, reduction="none", label_smoothing=self.recipe.label_smoothing)

    def logits(self, ids: Tensor, turn: Tensor, *ready: Tensor, augmented: bool) -> tuple[Tensor, Tensor]:
        recipe = self.recipe
        with during("prepare"):
            pixels, labels = self.images(ids, turn, *ready, augmented=augmented)
            x = augment.normalise(pixels, _each(recipe.normalize_mean), _each(recipe.normalize_std))
        x = x.to(self.model.positions.dtype)
        keys = mix(ids.to(torch.int32) ^ turn[1].to(torch.int32))
        with numeric_format(recipe.precision, x.device.type):
            return self.run(x, keys), labels

    def images(self, ids: Tensor, turn: Tensor, *ready: Tensor, augmented: bool) -> tuple[Tensor, Tensor]:
        """Pixels as bytes, (n, 3, size, size), and labels."""
        if ready:
            return ready[0], ready[1]
        assert self.held is not None
        pixels, labels = (tensor.index_select(0, ids) for tensor in self.held)
        return _prepared(self.recipe, pixels, ids, turn, augmented), labels


def _recorded(losses: Losses, tensors: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    """Forward and backward as CUDA graphs, with `tensors` as the place of their input."""
    names, weights = zip(*losses.named_parameters(), strict=True)
    # Other leaves on the same memory: a leaf that an earlier step still holds would draw that step's stream into the
    # recording, which ends it.
    leaves = tuple(weight.detach().requires_grad_() for weight in weights)

    def run(*inputs: Tensor) -> Tensor:
        given, used = inputs[: len(tensors)], inputs[len(tensors) :]
        each_loss: Tensor = functional_call(losses, dict(zip(names, used, strict=True)), given)
        return each_loss

    with warnings.catch_warnings():
        # It warms up on a stream of its own, and leaves of that are still alive when it records.
        warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
        graphs: Any = torch.cuda.make_graphed_callables(run, (*tensors, *leaves))
    return lambda *inputs: graphs(*inputs, *weights)


def _prepared(recipe: ClassifyRecipe, pixels: Tensor, ids: Tensor, turn: Tensor, augmented: bool) -> Tensor:
    """(n, size, size, 3) as the recipe has them in this epoch, (n, 3, size, size): the same bits on every device."""
    how = recipe.augment
    if how is None or not augmented:
        return pixels.permute(0, 3, 1, 2).contiguous()
    boxes = augment.draw(recipe.seed, turn[0], ids, pixels.shape[1], how.crop_scale, how.crop_ratio, how.flip)
    return augment.apply(pixels, boxes)


def _each(value: float | tuple[float, float, float]) -> tuple[float, float, float]:
    return value if isinstance(value, tuple) else (value, value, value)
