"""Multi-head chain of thought before the loop: as for questions about images, with a stage in every line and room for
the heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sameday.spec.cot import CotRecipe
from sameday.spec.errors import BadInput
from sameday.spec.heads import STAGES
from sameday.spec.plan import Plan
from sameday.tasks.base import Say
from sameday.tasks.cot.words import recipe_words
from sameday.tasks.setup import TRAINING, Audited
from sameday.tasks.vqa.setup import VqaSetup

if TYPE_CHECKING:
    import torch

    from sameday.hardware.machine import Machine
    from sameday.spec.evaluation import Evaluation
    from sameday.tasks.cot.task import CotTask

TRAINED_BYTES = 16
"""Of a trained number: its master, gradient and both moments."""


class CotSetup(VqaSetup):
    recipe_type = CotRecipe
    modules: ClassVar[tuple[str, ...]] = ("transformers", "peft", "sameday.tasks.cot.task")
    false_alarms = ""
    needed_stages: ClassVar[tuple[int, ...] | None] = STAGES

    recipe: CotRecipe

    def audit(self, say: Say, splits: Sequence[str] = TRAINING, few: Mapping[str, int] | None = None) -> Audited:
        """Scores of a stage that no question of the validation data has cannot choose weights."""
        audited = super().audit(say, splits, few)
        best, there = self.recipe.best, {sample.stage for sample in audited.splits.get("val", [])}
        lacking = [stage for stage in STAGES if best and best.metric.endswith(f"stage{stage}") and stage not in there]
        if best and lacking and "val" in audited.splits:
            raise BadInput(f"recipe.best.metric {best.metric}: data.val has no question of stage {lacking[0]}")
        return audited

    def merge(self, weights: Path, out: Path, say: Say) -> None:
        raise BadInput(f"{weights}: its heads are no part of a plain model, so that it cannot be merged into one")

    def not_plain(self) -> list[str]:
        return [f"task {self.recipe.task} (its heads)", *(each for each in super().not_plain() if each != "heads")]

    @cached_property
    def _checked_start(self) -> Path:
        """Heads that lie beside the adapter are taken with it."""
        from sameday.models.heads import has_heads, problems

        folder = super()._checked_start
        if has_heads(folder):
            text = self.config.get_text_config()
            wrong = list(problems(folder, text.hidden_size, text.vocab_size, self.recipe.heads.rank))
            if wrong:
                raise BadInput(f"{self.recipe.adapter_from} {folder}: " + "; ".join(wrong))
        return folder

    def no_cascade(self) -> str:
        return (
            "cascade asks stage by stage, and here all questions of an image are asked together: later stages have "
            "the earlier ones' states as context, not their answers; --no-cascade, or recipe.evaluate.cascade false"
        )

    def check_evaluation(self, asked: Evaluation, splits: Any) -> None:
        if asked.cascade:
            raise BadInput(self.no_cascade())
        super().check_evaluation(asked, splits)

    def epoch_steps(self, audited: Audited) -> list[int]:
        """Steps have whole images, so that epochs may have different numbers of them."""
        from sameday.data.order import Place, whole_image_steps

        recipe = self.recipe
        places = [Place(each.id, each.image_key, each.stage) for each in audited.splits["train"]]
        fixed = (places, recipe.order, recipe.effective_batch, recipe.seed)
        return [len(whole_image_steps(*fixed, epoch)) for epoch in range(recipe.num_epochs)]

    def load(self, plan: Plan, device: torch.device, splits: Any) -> CotTask:
        from sameday.tasks.cot.task import CotTask

        return self._load(CotTask, plan, device, splits)

    def choose_plan(self, machine: Machine, ranks: int) -> tuple[Plan, dict[str, str]]:
        """What the heads take is not there for activations."""
        from sameday.models.heads import shapes

        text = self.config.get_text_config()
        heads = sum(prod(shape) for shape in shapes(text.hidden_size, text.vocab_size, self.recipe.heads.rank).values())
        return super().choose_plan(replace(machine, memory=machine.memory - TRAINED_BYTES * heads), ranks)

    def words(self) -> tuple[str, str]:
        return recipe_words(self.recipe)
