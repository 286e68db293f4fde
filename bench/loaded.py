"""One model for all that a bench times: loaded once, and for each recipe, data set and plan a task over it, with new
adapters and nothing left of the task before."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from sameday.commands.session import Session, Specs, silent
from sameday.data.questions.sample import images_of
from sameday.hardware.peaks import Peaks, measure
from sameday.models.host_table import HostTable, embeddings_to_host
from sameday.models.vlm import VisionLanguageModel
from sameday.profile.floor import bound
from sameday.spec.load import load_plan, recipe_from, resolve_path
from sameday.spec.plan import Plan
from sameday.spec.vqa import VqaRecipe
from sameday.tasks.base import Task, total_steps
from sameday.tasks.setup import TRAINING
from sameday.tasks.vqa.cache import open_cache
from sameday.tasks.vqa.loading import drop_too_long, load_encoder, load_processor
from sameday.tasks.vqa.task import VqaTask
from sameday.tasks.warm_up import warm_up
from sameday.train.steps import Steps

FREE_OF_RECIPE = {"name", "data", "order", "effective_batch", "max_pixels"}
FREE_OF_PLAN = {
    "checkpointing",
    "cuda_graphs",
    "token_budget",
    "workers",
    "cache",
    "cache_dir",
    "embeddings_on",
    "keep_features",
}
"""Fields that no model is made of, or none that cannot be changed: read by the task, or by the model when it computes.
Where any other differs, the model is loaded again."""
REST = 3.0
"""Seconds."""


class Loaded:
    """Holds the model that was loaded last, and no other beside it."""

    def __init__(self) -> None:
        self._made_of: Mapping[str, Any] = {}
        self._model: VisionLanguageModel | None = None
        self._start: dict[str, Tensor] = {}
        self._peaks: Peaks | None = None

    def task(self, session: Session, plan: Plan | None = None) -> VqaTask:
        """What `session.load` would give. Whoever had a task of this before is through with it."""
        plan = plan or session.resolved.plan
        made_of = {
            "device": session.device,
            "recipe": session.recipe.model_dump(exclude=FREE_OF_RECIPE),
            "plan": plan.model_dump(exclude=FREE_OF_PLAN),
        }
        back = self._model is not None and _hosted(self._model) and plan.embeddings_on == "device"
        if self._model is None or made_of != self._made_of or back:
            self.drop()
            task = session.load(plan)
            assert type(task) is VqaTask, "a task of another kind is made otherwise"
            self._made_of, self._model = made_of, _bare(task.model)
            self._start = {name: parameter.detach().clone() for name, parameter in task.trained().items()}
            return task
        for name, parameter in self._model.trained().items():
            parameter.data.copy_(self._start[name])
            parameter.grad = None
        _clear()
        return _over(self._model, session, plan)

    def drop(self) -> None:
        """Give its memory back."""
        self._model, self._start = None, {}
        _clear()

    def peaks(self, session: Session) -> Peaks:
        """Of the device that all are timed on, measured once. A GPU that was at work just now is slower, since power is
        what limits it: it rests before."""
        precision = session.recipe.precision
        if self._peaks is None or self._peaks.precision != precision:
            if session.device.type == "cuda":
                torch.cuda.synchronize()
                time.sleep(REST)
            self._peaks = measure(session.device, precision, None)
        return self._peaks

    def peak_words(self) -> str:
        """By what floors were computed."""
        if self._peaks is None:
            return "no floor was computed"
        return f"floors by {self._peaks.flop_per_second / 1e12:.3g} TFLOP/s"


def _hosted(model: VisionLanguageModel) -> bool:
    return isinstance(model.text.embed_tokens, HostTable)


def _bare(model: VisionLanguageModel) -> VisionLanguageModel:
    """Over the same weights, without what a task has it keep of its images."""
    model = copy.copy(model)
    model.keep, model.memory, model._indices = None, None, {}
    return model


def _over(model: VisionLanguageModel, session: Session, plan: Plan) -> VqaTask:
    recipe, home, ranks = session.recipe, session.home, session.ranks
    assert isinstance(recipe, VqaRecipe) and plan.attention != "auto"
    if plan.embeddings_on == "host" and not _hosted(model):
        embeddings_to_host(model.text, model.head, model.device)
    model = _bare(model)
    model.recipe, model.plan, model.kernel = recipe, plan, plan.attention
    processor = load_processor(model.family, recipe, home)
    encoder = load_encoder(recipe, home, processor)
    splits = drop_too_long(recipe, encoder, session.audited.splits)
    contents = {image.digest for image in images_of(splits)}
    opened = open_cache(recipe, plan, resolve_path(home, plan.cache_dir), processor, model, contents)
    task = VqaTask(recipe, plan, model, encoder, processor, splits, splits.left_out, opened)
    task.padded_shapes(ranks)  # which loading finds out too
    return task


def _clear() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def start(out: Path, fields: Mapping[str, Any], asked: Sequence[str], tiny: bool) -> Session:
    """Of a recipe's fields, with the automatic plan but for what was asked for, each as FIELD=VALUE."""
    recipe, given = recipe_from(dict(fields)), [*asked, *(["device=cpu"] if tiny else [])]
    plan = load_plan(None, [f"plan.{each}" for each in given], recipe)
    fixed = tuple(sorted({each.partition("=")[0].strip() for each in given}))
    specs = Specs(recipe, out, plan, True, fixed)
    return Session.start(specs, silent, splits=TRAINING)


class _Nobody:
    """Looks at the warm-up."""

    live = None

    def say(self, text: str) -> None:
        pass


def warmed(session: Session, task: Task, steps: Steps) -> float:
    """Seconds that a run spends before its first step on what is compiled or recorded. The most memory is counted from
    there."""
    total = total_steps(session.recipe, task)
    seconds = sum(warm_up(task, range(total), None, session.ranks, steps.warm_up, _Nobody()).values())
    if task.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return seconds


def floors(session: Session, task: VqaTask, steps: range, peaks: Peaks) -> list[float]:
    """The least seconds of these steps of a run, as the plan cuts them: `floor_of` without that of samples one at a
    time. What the tower made of an image in an earlier step is there if it is now."""

    def seconds(step: int) -> float:
        return bound(task.cost(step, None, session.ranks), peaks).seconds

    memory = task.model.memory
    if memory is None:
        return [seconds(step) for step in steps]
    before = {each for step in range(steps.start) for each in task.contents_of(step) if each in memory}
    least = []
    for step in steps:
        with patch.object(task.model, "memory", before):
            least.append(seconds(step))
        before |= {each for each in task.contents_of(step) if each in memory}
    return least
