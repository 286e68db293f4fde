"""Visual question answering: answers are learned token by token, each image computed as often as the plan says."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sameday.data.order import Place, epoch_steps, mixed_epoch_steps
from sameday.data.questions.batch import Batch, make_batch
from sameday.data.questions.encode import Encoded, Encoder
from sameday.data.questions.layout import Layout, MaskIds, lay_out, mask_ids_of
from sameday.data.questions.partition import Cut, Item, MicroBatch, halve, micro_batches, size
from sameday.data.questions.processor import ImageProcessor
from sameday.data.questions.sample import Sample, images_of
from sameday.data.questions.seen import read_back
from sameday.data.questions.sets import seen_in_epoch
from sameday.data.questions.shape_choice import fitting
from sameday.data.questions.shapes import Shape
from sameday.data.questions.source import ReadImage, Source
from sameday.data.questions.turns import Asked
from sameday.data.seen import Seen
from sameday.hardware.machine import detect_machine
from sameday.hardware.phases import during
from sameday.hardware.ranks import Ranks, joined_size
from sameday.models.features import share_made
from sameday.models.flops import Counted
from sameday.models.generate import Logits
from sameday.models.handover import save_asked, save_readme, save_settings, settings_size
from sameday.models.heads import WEIGHTS as HEADS
from sameday.models.heads import has_heads
from sameday.models.load import load_base
from sameday.models.vlm import VisionLanguageModel
from sameday.models.vlm_flops import count as count_flops
from sameday.spec.load import resolve_model, resolve_path
from sameday.spec.plan import Plan
from sameday.spec.staged import staged
from sameday.spec.vlm import VlmRecipe
from sameday.tasks.base import Answer, LeftOut, StepCost, Task, WarmUpBatch
from sameday.tasks.vqa.answers import answers, generation_gaps
from sameday.tasks.vqa.automatic import attention_kernel
from sameday.tasks.vqa.cache import Opened, open_cache
from sameday.tasks.vqa.cost import step_cost
from sameday.tasks.vqa.digests import (
    data_digest,
    data_digests,
    numbers_digest,
    processor_digest,
    template_digest,
    tensors_digest,
    tokenizer_digest,
)
from sameday.tasks.vqa.launches import most_recorded
from sameday.tasks.vqa.loading import Checked, drop_too_long, load_encoder, load_family, load_processor
from sameday.tasks.vqa.plain import conversation
from sameday.tasks.vqa.problems import Decoder
from sameday.tasks.vqa.recorded import Recorder, Shapes, plan_shapes, shape_of_part
from sameday.tasks.vqa.scores import evaluate, judged
from sameday.tasks.vqa.warm import warm_up_batches

ReadOnce = Callable[[Callable[[], Any]], Any]


class VqaTask(Task):
    """`splits` holds audited samples by name; `train` is the one that is learned."""

    budget_field = "token_budget"
    memory_advice = "plan.checkpointing full or selective, recipe.max_pixels, max_length"
    evaluation_advice = "recipe.max_pixels, max_length"
    score_groups: tuple[str, ...] = ()
    """Names of groups of questions that evaluation also scores by themselves."""

    def __init__(
        self,
        recipe: VlmRecipe,
        plan: Plan,
        model: VisionLanguageModel,
        encoder: Encoder,
        processor: ImageProcessor,
        splits: dict[str, list[Sample]],
        left_out: Sequence[LeftOut] = (),
        cache: Opened | None = None,
        start_digest: str | None = None,
    ) -> None:
        self.recipe, self.plan, self.model, self.left_out = recipe, plan, model, left_out
        self.encoder, self.processor, self.splits = encoder, processor, splits
        self.cache = cache or Opened(Source(processor), "none", [])
        self.source = self.cache.source
        resizing = processor.note(find_spec("torchvision") is not None)
        alone = plan.share_images and plan.max_questions == 1 and not self.whole_images
        one = "plan.share_images shares nothing, because plan.max_questions is 1; null leaves it to plan.token_budget"
        said = (resizing, encoder.note, encoder.opening_note, encoder.end_note, one if alone else None)
        self.notes: Sequence[str] = [*model.notes, *self.cache.notes, *(each for each in said if each)]
        self.device, self._start_digest = model.device, start_digest
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        self.most_recorded = most_recorded(model.text.config, recipe.train, gpu)
        """Tokens of the largest micro-batch that is worth recording; None where that is not known."""
        self.places = [Place(s.id, s.image_key, s.stage) for s in splits.get("train", [])]
        self._epoch = lru_cache(maxsize=2)(self._epoch_steps)
        self._encode = lru_cache(maxsize=4096)(self.encoder.encode)
        self.shapes = lru_cache(maxsize=2)(self._shapes)

    @classmethod
    def load(
        cls,
        recipe: VlmRecipe,
        plan: Plan,
        recipe_dir: Path,
        device: torch.device,
        splits: dict[str, list[Sample]],
        kept: ReadOnce | None = None,
    ) -> Self:
        """Tokenizer, image processor and model as the recipe names them, for samples that were audited. `kept` has the
        base model, where others before it were loaded with the same."""
        name = resolve_model(recipe_dir, recipe.model)
        family = load_family(recipe, recipe_dir)
        processor = load_processor(family, recipe, recipe_dir)
        encoder = load_encoder(recipe, recipe_dir, processor)
        if not isinstance(splits, Checked):
            splits = drop_too_long(recipe, encoder, splits)
        start = None if recipe.start_adapter is None else resolve_path(recipe_dir, recipe.start_adapter)
        read = partial(load_base, name, recipe, device)
        base = read() if kept is None else kept(read)
        model = VisionLanguageModel(base, family, recipe, plan, device, processor.byte_table, start)
        start_digest = None if start is None else tensors_digest(model.trained())
        contents = {image.digest for image in images_of(splits)}
        folder = Path(staged(resolve_path(recipe_dir, plan.cache_dir)))
        cache = open_cache(recipe, plan, folder, processor, model, contents)
        task = cls(recipe, plan, model, encoder, processor, splits, splits.left_out, cache, start_digest)
        task.notes = [*task.notes, *([] if start is None else task.start_notes(start))]
        if plan.cuda_graphs and "train" in splits:
            # Here, so that workers that prepare batches need not find them out by themselves.
            task.notes = [*task.notes, task.shapes(joined_size()).words()]
        return task

    def start_notes(self, start: Path) -> Iterator[str]:
        """What there is to say about an adapter that this one starts from."""
        if has_heads(start):
            yield (
                f"{start}: was trained with heads for stages ({HEADS}), which task {self.recipe.task} does not have: "
                "the adapter alone is another model than the one that was trained"
            )

    # Order: recipe

    def _epoch_steps(self, epoch: int) -> list[list[int]]:
        recipe, weights = self.recipe, self._weights
        how = (recipe.order, recipe.effective_batch, recipe.seed, epoch)
        if all(weight == 1 for weight in weights):
            return epoch_steps(self.places, *how)
        return mixed_epoch_steps(self.places, [s.set for s in self.splits["train"]], weights, *how)

    @property
    def _weights(self) -> list[float]:
        return [part.weight for part in self.recipe.data.sets]

    def steps_per_epoch(self) -> int:
        return -(-seen_in_epoch(self.splits.get("train", []), self._weights) // self.recipe.effective_batch)

    def step_ids(self, step: int) -> list[int]:
        epoch, number = divmod(step, self.steps_per_epoch())
        return self._epoch(epoch)[number]

    def names(self, ids: Sequence[int]) -> list[str]:
        return [self.splits["train"][i].where for i in ids]

    def count(self, ids: Sequence[int]) -> float:
        if self.recipe.loss_weight == "sample":
            return float(len(ids))
        return float(sum(self._encode(self.splits["train"][i]).target_count for i in ids))

    # Partition: plan

    def _cut(self, budget: int | None) -> Cut:
        plan = self.plan
        return Cut(
            plan.share_images, plan.packing, budget or plan.token_budget, plan.max_questions, plan.pad_to_multiple
        )

    def _partition(self, encoded: Sequence[Encoded], cut: Cut, ranks: int) -> list[list[MicroBatch]]:
        return micro_batches(items_of(encoded, self.plan.share_text), cut, ranks)

    def _step(self, step: int, budget: int | None, ranks: Ranks) -> tuple[list[Encoded], list[list[MicroBatch]]]:
        """A step's questions, and each rank's micro-batches of them."""
        encoded = [self._encode(self.splits["train"][i]) for i in self.step_ids(step)]
        return encoded, self._partition(encoded, self._cut(budget), ranks.size)

    def batches(self, step: int, budget: int | None, ranks: Ranks) -> Iterable[Batch]:
        encoded, parts = self._step(step, budget, ranks)
        read_image = self.source.once()
        # Of the whole step: which micro-batch or rank a question is in changes no dropout mask.
        mask_ids = mask_ids_of(encoded, self.plan.share_text) if self.plan.share_images else {}
        shapes = self.padded_shapes(ranks).all
        return (self._build(encoded, part, read_image, mask_ids, shapes) for part in parts[ranks.rank])

    def padded_shapes(self, ranks: Ranks) -> Shapes:
        """Of this plan: none where nothing is recorded."""
        return self.shapes(ranks.size) if self.plan.cuda_graphs and self.plan.packing else Shapes()

    def _shapes(self, ranks: int) -> Shapes:
        """To which micro-batches of training are padded where the plan has them recorded."""
        return plan_shapes(self, ranks)

    def budget(self, step: int, budget: int | None, ranks: Ranks) -> int:
        return budget or self.plan.token_budget

    def smaller_budget(self, step: int, budget: int | None, ranks: Ranks) -> int | None:
        if self.plan.cuda_graphs:
            self.recorder.forget()  # graphs hold the memory of their micro-batches
        encoded, parts = self._step(step, budget, ranks)
        flat = [part for rank in parts for part in rank]
        can_be_cut = [part for part in flat if self.halves(encoded, part) is not None]
        return max(1, max(size(part, self.plan.packing) for part in can_be_cut) // 2) if can_be_cut else None

    def _build(
        self,
        encoded: Sequence[Encoded],
        part: MicroBatch,
        read_image: ReadImage | None = None,
        mask_ids: MaskIds | None = None,
        shapes: Sequence[Shape] = (),
    ) -> Batch:
        shape = fitting(shape_of_part(encoded, part, self.plan.share_text), shapes) if shapes else None
        return make_batch(self.lay_out(encoded, part, mask_ids, shape), read_image or self.source.read_image)

    def lay_out(
        self,
        encoded: Sequence[Encoded],
        part: MicroBatch,
        mask_ids: MaskIds | None = None,
        shape: Shape | None = None,
    ) -> Layout:
        return lay_out(
            [[encoded[i] for i in unit.members] for unit in part],
            packing=self.plan.packing,
            family=self.encoder.family,
            merge_size=self.encoder.merge_size,
            loss_weight=self.recipe.loss_weight,
            pad_token=self.encoder.end_token,
            pad_to_multiple=self.plan.pad_to_multiple,
            share_pixels=self.plan.share_images,
            share_text=self.plan.share_text,
            mask_ids=mask_ids,
            shape=shape,
        )

    # Forward and loss

    def loss_sum(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        if self.plan.cuda_graphs and torch.is_grad_enabled():
            return self.recorder(batch, step)
        return self.launched_loss(batch, step)

    @cached_property
    def recorder(self) -> Recorder:
        return Recorder(self)

    def launched_loss(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        with self.model.numeric_format():
            at = self.read_at(batch) if torch.is_grad_enabled() else None
            with during("forward"):
                hidden = self.model.hidden(batch, step, at=at)
            with during("loss"):
                logits = self.target_logits(batch, hidden, at)
        with during("loss"):
            loss, losses = self.weighted(batch, logits)
            return loss, losses[: len(batch.owner)]

    def weighted(self, batch: Batch, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of a micro-batch's losses by their weights, and each by itself, that of padding included."""
        losses = F.cross_entropy(logits, batch.target, reduction="none")
        return (losses * batch.weight).sum(), losses.detach()

    def warm_up_batches(self, steps: range, budget: int | None, ranks: Ranks) -> list[WarmUpBatch]:
        return warm_up_batches(self, steps, budget, ranks)

    def warmed_up(self) -> str | None:
        return None if self.model.memory is None else self.model.memory.open()

    def share_made(self, steps: Iterable[int]) -> float | None:
        memory = self.model.memory
        if memory is None:
            return None
        return share_made(map(self.contents_of, steps), memory.most())

    def contents_of(self, step: int) -> set[str]:
        """Of its images."""
        return {image.digest for i in self.step_ids(step) for image in self.splits["train"][i].images}

    def let_go(self) -> str | None:
        return None if self.model.memory is None else self.model.memory.let_go()

    def recorded_sizes(self) -> int:
        return len(self.recorder.shapes) if self.plan.cuda_graphs else 0

    def is_recorded(self, batch: Batch) -> bool:
        return self.plan.cuda_graphs and batch.shape in self.recorder.shapes

    def read_at(self, batch: Batch) -> Tensor | None:
        """Of the last hidden states the places that training reads, where it computes no others; None where logits are
        made of others too. For a single target torch.compile would make a graph of its own."""
        plain = type(self).logits is VqaTask.logits and self.plan.label_only_logits
        return batch.target_at if plain and self.model.ends_at_places and len(batch.target_at) > 1 else None

    def target_logits(self, batch: Batch, hidden: Tensor, at: Tensor | None) -> Tensor:
        """The same as `logits`, also where there are last hidden states `at` targets alone."""
        return self.logits(batch, hidden) if at is None else self.model.head(hidden).float()

    def logits(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Of every target of a micro-batch, whose last hidden states these are."""
        return self.model.logits(hidden, batch.target_at)

    def seen(self, batch: Batch) -> Iterable[Seen]:
        missing = [grid for grid, ready in zip(batch.grids, batch.ready, strict=True) if not ready]
        return read_back(batch, self.model.patches(batch.pixels, missing), self.encoder.merge_size)

    def sample_losses(self, batch: Batch, losses: Tensor) -> dict[int, float]:
        owners, count = batch.owner.cpu(), len(batch.sample_ids)
        sums = torch.zeros(count, dtype=torch.float64).index_add_(0, owners, losses.double().cpu())
        return dict(zip(batch.sample_ids, (sums / owners.bincount(minlength=count)).tolist(), strict=True))

    def conversations(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        return [conversation(self.splits["train"][i]) for i in ids]

    def module(self) -> nn.Module:
        module: nn.Module = self.model.module
        return module

    def culprits(self, batch: Batch, losses: Tensor) -> list[str]:
        owners = batch.owner[~losses.isfinite()].unique().tolist()
        where = {s.id: s.where for s in self.splits["train"]}
        return [where[batch.sample_ids[i]] for i in owners]

    def trained(self) -> dict[str, nn.Parameter]:
        return self.model.trained()

    def own_rates(self) -> dict[str, tuple[float, list[str]]]:
        return self.model.own_rates()

    def digests(self) -> dict[str, str]:
        # A run goes on with what it began with; whoever wants another says which.
        return self._inputs | ({"choice of plan.cache auto": self.cache.kind} if self.plan.cache == "auto" else {})

    @cached_property
    def _inputs(self) -> dict[str, str]:
        return {
            **data_digests(self.recipe, self.splits),
            "base model": self.model.base_digest,
            "tokenizer": tokenizer_digest(self.encoder.tokenizer),
            "chat template": template_digest(self.encoder.tokenizer),
            "image processor": processor_digest(self.processor),
            **({"start adapter": self._start_digest} if self._start_digest is not None else {}),
        }

    def save(self, folder: Path) -> None:
        self.model.save(folder)
        save_settings(folder, self.model.family, self.encoder)
        if self.recipe.train == "lora":
            save_asked(folder, self.asked)
        save_readme(folder, self.model.family, self.encoder, self.recipe, self.model.name, self.asked)

    @cached_property
    def asked(self) -> Asked:
        """The layouts of the training questions."""
        return Asked.of(self.splits.get("train", []), self.recipe.prompt, self.encoder.user_turn)

    def bytes_beside(self) -> int:
        return settings_size(self.encoder)

    def restore(self, folder: Path) -> None:
        self.model.restore(folder)

    def start_from(self, folder: Path) -> str | None:
        return f"recipe.start_adapter={folder.absolute()}" if self.recipe.train == "lora" else None

    # For the profiler

    def with_plan(self, change: Mapping[str, Any]) -> Self:
        # Shapes are those of this plan's own micro-batches, and take long to be chosen for others.
        changed = super().with_plan({"cuda_graphs": False} | dict(change))
        assert isinstance(changed, type(self))
        changed.model = copy.copy(self.model)
        changed.model.plan = changed.plan
        changed.shapes = lru_cache(maxsize=2)(changed._shapes)
        if set(change) & {"share_images", "packing", "attention"}:
            automatic = changed.plan.model_copy(update={"attention": change.get("attention", "auto")})
            machine = detect_machine(self.device.type)
            family, text = self.model.family, self.model.text
            decoder = Decoder("split" in family.kernels(text.config), family.heads(text)[2])
            kernel: Any = attention_kernel(automatic, machine, self.recipe.precision, lambda: decoder)[0]
            changed.model.kernel = kernel
        return changed

    def flops(self, batch: Batch) -> Counted:
        """Of a micro-batch of training."""
        return count_flops(self.model, batch, self.read_at(batch))

    def cost(self, step: int, budget: int | None, ranks: Ranks) -> StepCost:
        return step_cost(self, step, budget, ranks)

    def training(self, on: bool) -> None:
        """What is frozen computes the same in both; compiled layers of it would be compiled for each."""
        super().training(on)
        if not self.model.tower_trained:
            self.model.tower.eval()

    # Generation

    whole_images: ClassVar[bool] = False
    """Whether all questions of an image must be answered in one batch, however large."""

    def questions(self, split: str) -> Sequence[Sample]:
        return self.splits.get(split, [])

    def answers(
        self, questions: Sequence[Sample], max_new_tokens: int, ranks: Ranks, done: Collection[int] = ()
    ) -> Iterator[dict[int, Answer]]:
        return answers(self, questions, max_new_tokens, ranks, done)

    def answer_logits(self, states: Tensor, samples: Sequence[Sample]) -> Logits:
        """How the answers of one generation batch are read out of last hidden states. `states` (n, width) are those at
        the ends of the prompts of `samples`."""
        return lambda hidden, rows: self.model.head(hidden).float()

    @property
    def end_tokens(self) -> frozenset[int]:
        """Any of them ends an answer: the template's end of a turn, and what the model's own settings name."""
        return self.model.end_tokens | {self.encoder.end_token}

    def answer(self, tokens: Sequence[int]) -> Answer:
        """Without special tokens, also where their letters were generated one by one: in another prompt these would
        become real tokens."""
        text = self.encoder.tokenizer.decode(tokens, skip_special_tokens=True)
        for special in self.encoder.family.markers.special:
            text = text.replace(special, "")
        return Answer(self.encoder.own_text(text), len(tokens))

    def right_answer(self, question: Sample) -> str:
        return self.encoder.own_text(question.answer)

    def generation_gaps(self, ids: Sequence[int]) -> list[float]:
        return generation_gaps(self, [self.splits["train"][i] for i in ids])

    def answer_digests(self, split: str) -> dict[str, str]:
        """Of the plan nothing: it may round otherwise, and in bf16 a token may turn out another for it."""
        named = ("base model", "tokenizer", "chat template", "image processor")
        return {
            "weights": self.model.weights_digest(),
            "adapter scale": numbers_digest(self.model.adapter_scales()),
            "base format": self.recipe.base_words,
            "model config": self.model.config_digest,
            "end tokens": " ".join(map(str, sorted(self.end_tokens))),
            "system prompt": self.recipe.system_prompt or "",
            "data": data_digest(self.splits[split]),
            **{name: self._inputs[name] for name in named},
        }

    # Evaluation

    def evaluate(self, split: str, ranks: Ranks, budget: int | None = None) -> dict[str, float]:
        return evaluate(self, split, ranks, budget)

    def halves(self, _encoded: Sequence[Encoded], part: MicroBatch) -> tuple[MicroBatch, MicroBatch] | None:
        """Of a micro-batch for which memory ran out; None where it is a single question."""
        return halve(part)

    def score(self, batch: Batch) -> Tensor:
        """The `SUMS` of a micro-batch; in a task with `score_groups` a row of them for all and one for each group."""
        losses, right = self.judged(batch)
        # Counted on the device: a number sent there would have to be waited for.
        values = [(losses * batch.weight).sum(), batch.weight.sum(), right.sum(), torch.ones_like(right).sum()]
        return torch.stack([v.to(device=self.device, dtype=torch.float64) for v in values])

    def judged(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of each target, and whether each question's answer is right."""
        return judged(self, batch)


def items_of(encoded: Iterable[Encoded], share_text: bool) -> list[Item]:
    """What the partition may know of questions, numbered as they come."""
    return [Item(i, e.length, e.prefix, e.key, e.text if share_text else ()) for i, e in enumerate(encoded)]
