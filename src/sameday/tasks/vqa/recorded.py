"""Micro-batches whose decoder and loss are recorded: each is padded to one of a few shapes, and what was recorded for
the shape when it first came, in the warm-up, is replayed. The tower goes before it, launched: its images are of any
size."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sameday.data.questions.batch import Batch
from sameday.data.questions.pieces import rows_of
from sameday.data.questions.shape_choice import choose_shapes, fitting
from sameday.data.questions.shapes import Shape, dense_calls, shape_of
from sameday.hardware.graphs import GraphMemory, Inputs, Launched, NotRecorded, Recorded, Run
from sameday.hardware.phases import during
from sameday.hardware.ranks import Ranks, joined_size
from sameday.kernels.dropout import dropouts, step_key
from sameday.spec.plan import OF_PIECES
from sameday.spec.words import tell
from sameday.tasks.base import total_steps

if TYPE_CHECKING:
    from sameday.data.questions.encode import Encoded
    from sameday.data.questions.partition import MicroBatch
    from sameday.tasks.vqa.task import VqaTask

SAMPLED = 128
"""Steps of the first two epochs whose rows stand for all."""
READ = ("tokens", "positions", "keys", "image_slots", "target_at", "target", "weight")
"""What the decoder and the loss read of a batch, besides the bounds of its pieces."""


@dataclass(frozen=True)
class Shapes:
    """Those that a run records: a pure function of recipe, plan, data and GPU, whatever step the run begins with.
    `served` is the share of its micro-batches that they serve, `padded` how many times as many tokens these compute for
    it. `steps` has for each shape a step in which it comes, `launched` those of the largest and the smallest micro-
    batches that none serves. Micro-batches of more than the `most` tokens, `larger` of all, are not worth it."""

    all: tuple[Shape, ...] = ()
    served: float = 0.0
    padded: float = 1.0
    steps: Mapping[Shape, int] = field(default_factory=dict)
    launched: tuple[int, ...] = ()
    most: int | None = None
    larger: float = 0.0

    def words(self) -> str:
        above = f"more than {self.most} tokens, for which kernels take longer than their launches"
        if not self.all:
            rare = "no shape of micro-batch comes often enough"
            why = rare if not self.larger else f"{self.larger:.0%} of micro-batches have {above}"
            return f"cuda_graphs: nothing is recorded, since {why}"
        count = f"{len(self.all)} shape{'s' if len(self.all) > 1 else ''} of micro-batches"
        others = f"; {self.larger:.0%} have {above}" if self.larger else ""
        return (
            f"cuda_graphs: {count} are recorded, for {self.served:.0%} of micro-batches, which are padded by "
            f"{self.padded - 1:.1%}; the others are launched{others}"
        )


def shape_of_part(encoded: Sequence[Encoded], part: MicroBatch, share_text: bool) -> Shape:
    """The sizes of a micro-batch as it is, from the lengths of its questions alone."""
    rows, _ = rows_of([[encoded[i] for i in unit.members] for unit in part], True, share_text)
    return shape_of(rows[0])


def plan_shapes(task: VqaTask, ranks: int) -> Shapes:
    total = total_steps(task.recipe, task)
    span = min(total, 2 * task.steps_per_epoch())
    sampled = sorted({n * span // SAMPLED for n in range(SAMPLED)})
    rows: list[tuple[int, Shape]] = []
    for step in sampled:
        encoded, parts = task._step(step, None, Ranks(size=ranks))
        rows += [(step, shape_of_part(encoded, part, task.plan.share_text)) for rank in parts for part in rank]
    most = task.most_recorded
    limit = math.inf if most is None else most
    shapes = choose_shapes([row for _, row in rows], total / max(1, len(sampled)), limit)
    fits = [(step, row, fitting(row, shapes)) for step, row in rows]
    served = [(step, row, shape) for step, row, shape in fits if shape is not None]
    used = {shape for *_, shape in served}
    tokens = sum(row.tokens for _, row, _ in served)
    return Shapes(
        tuple(shape for shape in shapes if shape in used),
        len(served) / max(1, len(rows)),
        sum(shape.tokens for *_, shape in served) / max(1, tokens),
        {shape: step for step, _, shape in reversed(served)},
        _largest_and_smallest([(step, row) for step, row, shape in fits if shape is None]),
        most,
        sum(row.tokens > limit for _, row in rows) / max(1, len(rows)),
    )


def _largest_and_smallest(rows: Sequence[tuple[int, Shape]]) -> tuple[int, ...]:
    """Steps of those, by the number of dense calls, of which kernels may be compiled for each."""
    of_calls: dict[int, list[tuple[int, int]]] = {}
    for step, row in rows:
        of_calls.setdefault(dense_calls(row), []).append((row.tokens, step))
    return tuple(dict.fromkeys(step for sizes in of_calls.values() for _, step in (max(sizes), min(sizes))))


class Recorder:
    """Forward and backward passes of micro-batches. Those of a shape are recorded when the shape first comes."""

    def __init__(self, task: VqaTask) -> None:
        self._task = task
        self._trained = list(task.trained().values())
        self._dropouts = dropouts(task.module())
        self._made: dict[tuple[Shape, bool], _Program] = {}
        self._gradients: tuple[int, ...] = ()
        self._memory: GraphMemory | None = None
        self._rooms: list[Tensor] = []
        self._too_large = math.inf
        self.records = task.device.type == "cuda"
        """Where not, all goes the same way, and is launched; what is recorded already is replayed."""

    def __call__(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """What a task's `loss_sum` gives."""
        task, model = self._task, self._task.model
        if batch.shape is None or not self._gradients_stay():
            loss, losses = Launched(lambda: task.launched_loss(batch, step))()
            return loss, losses
        with model.numeric_format(), during("tower"), torch.no_grad():
            features = model.features_at_tokens(batch)
        with during("forward"):
            key = torch.full((), step_key(task.recipe.seed, step), dtype=torch.int32, device=task.device)
            # Whether dropout drops is written into a graph.
            name = (batch.shape, any(layer.training for layer in self._dropouts))
            if name in self._made:
                self._made[name].fill(batch, features, key)
            else:
                self._made[name] = self._program(batch, features, key, self._known(*name))
            loss, losses = self._made[name].passes()
        return loss, losses[: len(batch.owner)]

    @property
    def shapes(self) -> frozenset[Shape]:
        """Those that are recorded so far."""
        return frozenset(name[0] for name, program in self._made.items() if isinstance(program.passes, Recorded))

    def _gradients_stay(self) -> bool:
        """Whether there are tensors for gradients, which a recording adds to. Whoever makes others has all recorded
        anew."""
        there = [parameter.grad for parameter in (self._trained[0], self._trained[-1])]
        where = tuple(gradient.data_ptr() for gradient in there if gradient is not None)
        if len(where) < len(there):
            return False
        if where != self._gradients:
            self.forget()
            self._gradients = where
        return True

    def forget(self) -> None:
        """Let go of all that is recorded, and of its memory."""
        self._made.clear()
        self._memory, self._rooms, self._too_large = None, [], math.inf

    def _known(self, shape: Shape, drops: bool) -> bool:
        """Whether another shape was recorded by the same kernels. What of a row there is tells which they are, not how
        much of it, and so does whether dropout drops. Masks of flex attention are compiled for some sizes by
        themselves."""
        return self._task.model.kernel in OF_PIECES and any(
            not isinstance(program.passes, Launched) and (_there(other), dropped) == (_there(shape), drops)
            for (other, dropped), program in self._made.items()
        )

    def _program(self, batch: Batch, features: Sequence[Tensor], key: Tensor, known: bool) -> _Program:
        # Features are large: all shapes read them from one place, which has room for the largest.
        rows = max((shape.image_tokens for shape in self._task.shapes(joined_size()).all), default=0)
        if not self._rooms or any(len(room) < len(each) for room, each in zip(self._rooms, features, strict=False)):
            self._rooms = [each.new_empty(max(rows, len(each)), each.shape[1]) for each in features]
        program = _Program(self._task, batch, features, key, self._rooms)
        tokens = batch.tokens.numel()
        if self.records and tokens < self._too_large:
            program.passes = self._recorded(program.run, tokens, known) or program.passes
        return program

    def _recorded(self, run: Run, tokens: int, known: bool) -> Recorded | None:
        """None where there is no memory for it: the run launches it, and tries smaller ones when they come. Where it
        fails for another reason, nothing more is recorded."""
        for _ in range(2):
            try:
                self._memory = self._memory or GraphMemory()
                return Recorded(run, self._trained, self._memory, known)
            except torch.OutOfMemoryError:
                pass
            except NotRecorded as error:
                self.records = False
                tell(
                    f"cuda_graphs: a micro-batch of {tokens} tokens could not be recorded ({error}): it is launched, "
                    "and so is all that is not recorded yet. plan.cuda_graphs false does not try.",
                    sys.stderr,
                )
                return None
            if not self.shapes:
                self._memory = None  # which holds what was recorded until then
            torch.cuda.empty_cache()  # a recording cannot take what was kept for others
        if self._too_large == math.inf:
            tell(
                f"cuda_graphs: out of memory while a micro-batch of {tokens} tokens was recorded: such ones are "
                "launched, and smaller ones too if there is no room for them. A smaller plan.token_budget leaves more.",
                sys.stderr,
            )
        self._too_large = tokens
        return None


class _Program:
    """What is computed for a shape, from tensors that stay where they are."""

    def __init__(
        self, task: VqaTask, batch: Batch, features: Sequence[Tensor], key: Tensor, rooms: Sequence[Tensor]
    ) -> None:
        assert batch.segments is not None, "only packed rows have shapes"
        self._task = task
        given = _read(batch, features, key)
        first = len(given) - 1 - len(features)
        self._inputs = Inputs(
            given, {first + n: room for n, (room, _) in enumerate(zip(rooms, features, strict=False))}
        )
        kept = iter(self._inputs.tensors)
        fields: dict[str, Any] = {name: next(kept) for name in READ}
        bounds = batch.segments._replace(cu=next(kept), cu_queries=next(kept), cu_keys=next(kept))
        # Of the first batch nothing is kept that is large, and nothing that is read.
        empty = {name: getattr(batch, name).new_empty(0) for name in ("pixels", "features", "image_source", "owner")}
        self._batch = replace(batch, segments=bounds, **fields, **empty)
        self._features, self._key = [next(kept) for _ in features], next(kept)
        self.passes: Launched | Recorded = Launched(self.run)

    def fill(self, batch: Batch, features: Sequence[Tensor], key: Tensor) -> None:
        assert batch.segments is not None and self._batch.segments is not None
        assert torch.equal(batch.segments.at, self._batch.segments.at), "offsets are those of the shape"
        self._inputs.fill(_read(batch, features, key))

    def run(self) -> tuple[Tensor, Tensor]:
        model = self._task.model
        model.key_tokens(self._batch, self._key)
        with model.numeric_format():
            at = self._task.read_at(self._batch)
            hidden = model.decoded(self._batch, self._features, at=at)
            logits = self._task.target_logits(self._batch, hidden, at)
        return self._task.weighted(self._batch, logits)


def _there(shape: Shape) -> tuple[bool, ...]:
    """Which sections a shape has, and whether it has images and more than one target."""
    return (*map(bool, shape.sections), shape.image_tokens > 0, shape.targets > 1)


def _read(batch: Batch, features: Sequence[Tensor], key: Tensor) -> list[Tensor]:
    assert batch.segments is not None
    return [*(getattr(batch, name) for name in READ), *batch.segments[:3], *features, key]
