"""Which micro-batches stand for all that a run will meet: of each kind that compiled layers have a graph of their own
for, the largest and the smallest among the coming steps and the validation. A function of data, recipe and plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

from sameday.data.questions.encode import Encoded
from sameday.data.questions.partition import MicroBatch, size
from sameday.data.questions.shape_choice import fitting
from sameday.data.questions.shapes import Shape, dense_calls
from sameday.hardware.ranks import Ranks
from sameday.kernels.ahead import AttentionLaunch, Launch
from sameday.spec.plan import OF_PIECES
from sameday.spec.words import count
from sameday.tasks.base import WarmUpBatch
from sameday.tasks.vqa.recorded import shape_of_part

if TYPE_CHECKING:
    from sameday.tasks.vqa.task import VqaTask

STEPS, EPOCHS = 32, 3
"""Coming steps that are looked at, and epochs whose last step, which may have fewer questions, is looked at besides.
Encoding a question takes about a millisecond, which workers that are started afterwards need not spend again."""
QUESTIONS = 256
"""Of a validation, as many of the first and of the last are looked at."""
FLEX_BLOCK = 128
"""Tokens of a block of flex attention's mask."""


class Kind(NamedTuple):
    """In what micro-batches differ so that torch.compile makes another graph, whatever sizes it leaves open: sizes of
    none and of one are written into a graph, and so is whether there is a mask and whether gradients are wanted. Or so
    that kernels of our own are compiled again."""

    training: bool
    several_rows: bool
    no_mask: bool
    images: int
    """None, one, or 2 for several."""
    one_block: bool
    calls: int
    """Of fused attention: how many of the dense calls of a row its kernels follow, up to the last with queries."""
    shape: Shape | None
    """To which a micro-batch is padded that is recorded as a CUDA graph."""


@dataclass(frozen=True, eq=False)
class Met:
    """A micro-batch of the run, not yet built. `last`: of an epoch's last step."""

    encoded: Sequence[Encoded]
    part: MicroBatch
    step: int
    training: bool
    last: bool = False
    shapes: Sequence[Shape] = ()

    def kind(self, task: VqaTask) -> Kind:
        plan, kernel = task.plan, task.model.kernel
        alone = all(len(unit.members) == 1 for unit in self.part) and not (plan.packing and len(self.part) > 1)
        return Kind(
            training=self.training,
            several_rows=not plan.packing and len(self.part) > 1,
            no_mask=alone and not (kernel in OF_PIECES and plan.packing),
            images=min(2, self.images(plan.share_images)),
            one_block=kernel == "flex" and self.size(task) <= FLEX_BLOCK,
            calls=dense_calls(self.own_shape(plan.share_text)) if kernel == "fused" else 0,
            shape=fitting(self.own_shape(plan.share_text), self.shapes) if self.shapes else None,
        )

    def own_shape(self, share_text: bool) -> Shape:
        """Before it is padded."""
        return shape_of_part(self.encoded, self.part, share_text)

    def questions(self) -> list[Encoded]:
        return [self.encoded[index] for unit in self.part for index in unit.members]

    def images(self, shared: bool) -> int:
        contents = [image.digest for question in self.questions() for image in question.sample.images]
        return len(set(contents)) if shared else len(contents)

    def size(self, task: VqaTask) -> int:
        return size(self.part, task.plan.packing, task.plan.pad_to_multiple)

    def batch(self, task: VqaTask) -> WarmUpBatch:
        what = "validation" if not self.training else "an epoch's last step" if self.last else "training"
        images = count(self.images(task.plan.share_images), "image")
        kind = self.kind(task)
        recorded = "" if kind.shape is None else ", recorded"
        return WarmUpBatch(
            f"{what} with {count(len(self.questions()), task.recipe.sample)} on {images}{recorded}",
            partial(task._build, self.encoded, self.part, shapes=self.shapes),
            self.step,
            None if self.training else task.score,
            launches(task, kind) if task.device.type == "cuda" else (),
        )


def warm_up_batches(task: VqaTask, steps: range, budget: int | None, ranks: Ranks) -> list[WarmUpBatch]:
    if not compiles(task) or not steps:
        return []
    met = chain(_trained(task, steps, budget, ranks), _validated(task, budget, ranks))
    return [each.batch(task) for each in chosen(task, met)]


def launches(task: VqaTask, kind: Kind) -> list[Launch]:
    """Of kernels of ours that are compiled for micro-batches of a kind."""
    given: list[Launch] = []
    number = torch.bfloat16 if task.recipe.precision == "bf16" else torch.float32
    if task.model.kernel == "fused":
        sizes = task.model.family.heads(task.model.text)
        given += [AttentionLaunch(*sizes, number, kind.calls, back) for back in (False, True)[: 1 + kind.training]]
    if kind.training and task.plan.lora_kernel == "triton":
        from sameday.models import lora_kernel  # which loads Triton

        alike = task.model.alike_from is not None and not task.model.tower_trained
        given += lora_kernel.launches(task.module(), number, alike)
    return given


def compiles(task: VqaTask) -> bool:
    """Whether something is compiled or recorded for a kind of micro-batch when it comes first."""
    plan = task.plan
    kernels = task.model.kernel in ("flex", "fused") and task.device.type == "cuda"
    return plan.compile != "none" or plan.cuda_graphs or kernels


def chosen(task: VqaTask, met: Iterable[Met]) -> list[Met]:
    """Of each kind the largest, which shows first whether memory is enough for it, and the smallest. A graph is made
    for the first, and any size that is written into it after all shows with the other. What is recorded has the size of
    its shape, and one is enough. It comes before the rest, from the largest shape on: the others then fit into its
    memory, and what is launched shows whether there is enough beside it."""
    of_kind: dict[Kind, tuple[Met, Met]] = {}
    for each in met:
        kind, tokens = each.kind(task), each.size(task)
        largest, smallest = of_kind.get(kind, (each, each))
        of_kind[kind] = (
            each if tokens > largest.size(task) else largest,
            each if tokens < smallest.size(task) else smallest,
        )
    kinds = sorted(of_kind, key=lambda kind: -1 if kind.shape is None else kind.shape.tokens, reverse=True)
    return [each for kind in kinds for each in dict.fromkeys(of_kind[kind][: 2 if kind.shape is None else 1])]


def _trained(task: VqaTask, steps: range, budget: int | None, ranks: Ranks) -> Iterator[Met]:
    """Of all ranks: each is prepared for what any of them meets. A shape may come again in any epoch, also where the
    step that is known to have it is past."""
    ends, shapes = _epoch_ends(task, steps), task.padded_shapes(ranks)
    for step in dict.fromkeys((*steps[:STEPS], *ends, *shapes.steps.values(), *shapes.launched, steps[-1])):
        encoded, parts = task._step(step, budget, ranks)
        yield from (Met(encoded, part, step, True, step in ends, shapes.all) for rank in parts for part in rank)


def _epoch_ends(task: VqaTask, steps: range) -> list[int]:
    """The last steps of the first epochs that end among these steps."""
    ends, epoch = list[int](), 1
    while len(ends) < EPOCHS and (end := task.epoch_start(epoch) - 1) < steps.stop:
        ends += [end] if end in steps else []
        epoch += 1
    return ends


def _validated(task: VqaTask, budget: int | None, ranks: Ranks) -> Iterator[Met]:
    samples = task.splits.get("val", [])
    few = samples if len(samples) <= 2 * QUESTIONS else [*samples[:QUESTIONS], *samples[-QUESTIONS:]]
    if not few:
        return
    encoded = [task._encode(sample) for sample in few]
    parts = task._partition(encoded, task._cut(task.plan.eval_token_budget or budget), ranks.size)
    yield from (Met(encoded, part, 0, False) for rank in parts for part in rank)
