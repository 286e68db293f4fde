"""Multi-head chain of thought over the questions of whole images. The backbone knows nothing of it: stages meet only in
the heads, so that all questions of an image go through one forward pass, in whatever layout the plan has."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from sameday.data.order import whole_image_steps
from sameday.data.questions.batch import Batch
from sameday.data.questions.encode import Encoded
from sameday.data.questions.layout import MaskIds
from sameday.data.questions.partition import Cut, MicroBatch, whole_micro_batches
from sameday.data.questions.sample import Sample
from sameday.data.questions.shapes import Shape
from sameday.data.questions.source import ReadImage
from sameday.data.seen import Seen, digest
from sameday.models.flops import Counted, Work
from sameday.models.heads import StageHeads, has_heads
from sameday.spec.cot import CotRecipe
from sameday.spec.heads import STAGES
from sameday.spec.load import resolve_path
from sameday.spec.plan import Plan
from sameday.tasks.cot.batch import CotBatch, stages_of, with_stages
from sameday.tasks.cot.handover import save_readme
from sameday.tasks.vqa.digests import tensors_digest
from sameday.tasks.vqa.task import ReadOnce, VqaTask, items_of

NAMES = tuple(f"stage{stage}" for stage in STAGES)


class CotTask(VqaTask):
    smallest = "image with all of its questions"
    memory_advice = "plan.checkpointing full or selective, plan.share_images true, recipe.max_pixels, max_length"
    loss_parts = tuple(f"loss_{name}" for name in NAMES)
    score_groups = NAMES
    whole_images = True

    recipe: CotRecipe

    def __init__(self, recipe: CotRecipe, *rest: Any, **more: Any) -> None:
        super().__init__(recipe, *rest, **more)
        head = self.model.head
        self.heads = StageHeads(head.in_features, head.out_features, recipe.heads.rank, recipe.seed, self.device)
        self._whole = nn.ModuleDict({"model": self.model.module, "heads": self.heads})
        self._starts = [0]

    @classmethod
    def load(
        cls,
        recipe: Any,
        plan: Plan,
        recipe_dir: Path,
        device: torch.device,
        splits: dict[str, list[Sample]],
        kept: ReadOnce | None = None,
    ) -> Self:
        task = super().load(recipe, plan, recipe_dir, device, splits, kept)
        if recipe.start_adapter is not None:
            start = resolve_path(recipe_dir, recipe.start_adapter)
            if has_heads(start):
                task.heads.restore(start)
            task._start_digest = tensors_digest(task.trained())
        return task

    def module(self) -> nn.Module:
        return self._whole

    def trained(self) -> dict[str, nn.Parameter]:
        return super().trained() | {f"heads.{name}": p for name, p in self.heads.named_parameters()}

    # Order: whole images, so that epochs may have different numbers of steps

    def _epoch_steps(self, epoch: int) -> list[list[int]]:
        recipe = self.recipe
        return whole_image_steps(self.places, recipe.order, recipe.effective_batch, recipe.seed, epoch)

    def start_notes(self, start: Path) -> Iterator[str]:
        if not has_heads(start):
            yield f"{start}: has no heads for stages: theirs start at zero, as on the base model"

    def epoch_start(self, epoch: int) -> int:
        while len(self._starts) <= epoch:
            self._starts.append(self._starts[-1] + len(self._epoch(len(self._starts) - 1)))
        return self._starts[epoch]

    def epoch_ends(self, total: int) -> Container[int]:
        while self._starts[-1] < total:
            self.epoch_start(len(self._starts))
        return frozenset(self._starts)

    def steps_per_epoch(self) -> int:
        return self.epoch_start(1)

    def step_ids(self, step: int) -> list[int]:
        self.epoch_ends(step + 1)
        epoch = bisect_right(self._starts, step) - 1
        return self._epoch(epoch)[step - self._starts[epoch]]

    # Partition: an image's questions stand in one micro-batch

    def _partition(self, encoded: Sequence[Encoded], cut: Cut, ranks: int) -> list[list[MicroBatch]]:
        images: dict[str, list[Any]] = {}
        for item in items_of(encoded, self.plan.share_text):
            images.setdefault(encoded[item.index].sample.image_key, []).append(item)
        return whole_micro_batches(list(images.values()), cut, ranks)

    def halves(self, encoded: Sequence[Encoded], part: MicroBatch) -> tuple[MicroBatch, MicroBatch] | None:
        images: dict[str, MicroBatch] = {}
        for unit in part:
            key = encoded[unit.members[0]].sample.image_key
            images[key] = (*images.get(key, ()), unit)
        middle = len(images) // 2
        if not middle:
            return None
        whole = list(images.values())
        first, second = (tuple(unit for each in half for unit in each) for half in (whole[:middle], whole[middle:]))
        return first, second

    def _build(
        self,
        encoded: Sequence[Encoded],
        part: MicroBatch,
        read_image: ReadImage | None = None,
        mask_ids: MaskIds | None = None,
        shapes: Sequence[Shape] = (),
    ) -> CotBatch:
        batch = super()._build(encoded, part, read_image, mask_ids, shapes)
        samples = [encoded[i].sample for unit in part for i in unit.members]
        return with_stages(batch, samples, self.recipe.heads.weights)

    # Forward and loss

    def logits(self, batch: Batch, hidden: Tensor) -> Tensor:
        assert isinstance(batch, CotBatch)
        shifts = self.heads.shifts(hidden[batch.prompt_at], batch.stages)
        z = hidden[batch.target_at] + shifts[batch.owner].to(hidden.dtype)
        if self.plan.label_only_logits:
            base = self.model.head(z).float()
        else:
            base = self.model.logits(hidden.index_copy(0, batch.target_at, z), batch.target_at)
        return base + self.heads.added(z, batch.stage[batch.owner])

    def seen(self, batch: Batch) -> Iterator[Seen]:
        """And of each question its stage, and whose states are in its image's contexts, by how much."""
        assert isinstance(batch, CotBatch)
        ids = np.array(batch.sample_ids)
        stage, image, share = (tensor.cpu().numpy() for tensor in (batch.stage, batch.image, batch.share))
        for number, question in enumerate(super().seen(batch)):
            of_image = np.flatnonzero((image == image[number]) & share.any(1))
            averaged = of_image[np.argsort(ids[of_image])]
            more = {"stage": digest(stage[number : number + 1]), "context": digest(ids[averaged], share[averaged])}
            yield replace(question, digests=question.digests | more)

    def part_sums(self, batch: CotBatch, losses: Tensor) -> Tensor:
        return _by_stage(batch.stage[batch.owner], (losses * batch.plain_weight)[:, None])[:, 0]

    def part_counts(self, ids: Sequence[int]) -> list[float]:
        samples = self.splits["train"]
        return [self.count([i for i in ids if samples[i].stage == stage]) for stage in STAGES]

    def score(self, batch: Batch) -> Tensor:
        assert isinstance(batch, CotBatch)
        losses, right = self.judged(batch)
        sums = torch.zeros(len(batch.sample_ids), 4, dtype=torch.float64, device=self.device)
        of_targets = torch.stack([losses * batch.weight, batch.plain_weight], 1)
        sums[:, :2].index_add_(0, batch.owner, of_targets.double())
        sums[:, 2], sums[:, 3] = right, 1
        return torch.cat([sums.sum(0, keepdim=True), _by_stage(batch.stage, sums)])

    # Generation

    @torch.no_grad()
    def answer_logits(self, states: Tensor, samples: Sequence[Sample]) -> Callable[[Tensor, Tensor], Tensor]:
        """For answers to `samples`, among them all questions of each image that is asked about. `states` are the last
        hidden states at the ends of their prompts: nothing depends on answers. What it returns gives float32 logits of
        hidden states and, for each, the number of the sample that it belongs to."""
        stages = stages_of(samples).to(states.device)
        with self.model.numeric_format():
            shifts = self.heads.shifts(states, stages)

        @torch.no_grad()
        def logits(hidden: Tensor, rows: Tensor) -> Tensor:
            with self.model.numeric_format():
                z = hidden + shifts[rows].to(hidden.dtype)
                added: Tensor = self.heads.added(z, stages.stage[rows])
                return self.model.head(z).float() + added

        return logits

    def answer_digests(self, split: str) -> dict[str, str]:
        return super().answer_digests(split) | {"heads": tensors_digest(dict(self.heads.named_parameters()))}

    # Files

    def save(self, folder: Path) -> None:
        super().save(folder)
        self.heads.save(folder)
        save_readme(folder, self.model.family, self.encoder, self.recipe, self.model.name, self.asked)

    def restore(self, folder: Path) -> None:
        super().restore(folder)
        self.heads.restore(folder)

    # For the profiler

    def flops(self, batch: Batch) -> Counted:
        assert isinstance(batch, CotBatch)
        executed, needed = self.heads.flops(len(batch.target_at), batch.images)
        return super().flops(batch) + Counted(Work(head=executed), Work(head=needed))


def _by_stage(stage: Tensor, values: Tensor) -> Tensor:
    """Sums of the rows of each stage, (stages, columns)."""
    return torch.zeros(len(STAGES), values.shape[1], dtype=values.dtype, device=values.device).index_add(
        0, stage - 1, values
    )
