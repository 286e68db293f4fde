"""Classification before the loop: labelled images, plan choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sameday.spec.classify import ClassifyRecipe
from sameday.spec.errors import BadInput, refuse
from sameday.spec.load import resolve_path
from sameday.spec.plan import Plan
from sameday.spec.staged import staged
from sameday.tasks.base import Say
from sameday.tasks.classify.words import recipe_words
from sameday.tasks.setup import DATA, TRAINING, Audited, Choice, Needed, Resolved, TaskSetup

if TYPE_CHECKING:
    import torch

    from sameday.data.labelled.pictures import Pictures, Split
    from sameday.hardware.machine import Machine
    from sameday.tasks.classify.task import ClassifyTask


TRAINED = 16
"""Bytes of a parameter, its gradient and its two moments, in float32."""
PICTURES = (256, 64)
"""Images of a micro-batch that the tuner tries, where a step has more."""


class ClassifySetup(TaskSetup):
    recipe_type = ClassifyRecipe
    modules = ("sameday.tasks.classify.task",)
    together: ClassVar[Mapping[str, Any]] = {"micro_batch": None}

    recipe: ClassifyRecipe

    @cached_property
    def path(self) -> Path:
        return Path(staged(resolve_path(self.home, self.recipe.data.path)))

    def lacks(self, split: str) -> str | None:
        if split == "val" and not self.recipe.data.val and not (self.path / "val").is_dir():
            return f"the recipe holds no images out (data.val is 0), and {self.path} has no val folder"
        return None

    def audit(self, say: Say, splits: Sequence[str] = TRAINING, few: Mapping[str, int] | None = None) -> Audited:
        audited: dict[str, Pictures] = {}
        problems: list[str] = []
        for split in splits:
            if self.lacks(split) is not None:
                continue
            try:
                pictures = self._read(split, say)  # type: ignore[arg-type]
            except BadInput as error:
                problems.append(str(error))
                continue
            if len(pictures.classes) < 2:
                problems.append(f"{self.path} has one class, {pictures.classes[0]}: there is nothing to tell apart")
            audited[split] = pictures if few is None else _first(pictures, few[split])
        if few is None:
            self._say_odd(audited, say)
        refuse(dict.fromkeys(problems))
        return Audited(audited, {split: len(pictures) for split, pictures in audited.items()}, [])

    def _say_odd(self, audited: Mapping[str, Pictures], say: Say) -> None:
        from sameday.data.questions.summary import common_images, on_several_sides

        for passed in dict.fromkeys(pictures.passed for pictures in audited.values() if pictures.passed):
            say(passed)
        there = self.image_contents(audited) if len(audited) > 1 else {}
        for (one, other), images in on_several_sides(there).items():
            say(common_images(one, other, images))

    def image_contents(self, splits: Mapping[str, Pictures]) -> dict[str, set[str]]:
        return {split: pictures.contents for split, pictures in splits.items()}

    def hints(self, splits: Mapping[str, Pictures]) -> list[str]:
        """Test images are read for this alone, before the training that they are to judge."""
        from sameday.data.labelled.pictures import has_test
        from sameday.data.questions.summary import common_with, refused_later

        if not has_test(self.path):
            return []
        try:
            test = self._read("test", lambda _: None)
        except BadInput as error:
            return [refused_later("test", "images", error)]
        return common_with("test", self.image_contents({**splits, "test": test}))

    @property
    def loading_advice(self) -> str:
        """Images in the device's memory take more of it than these models."""
        return "plan.images_on host, fewer images, a smaller recipe.data.image_size or recipe.model.width"

    def _read(self, split: Split, say: Say) -> Pictures:
        from sameday.data.labelled.pictures import read_pictures

        data = self.recipe.data

        def progress(done: int, total: int) -> None:
            if total >= 5000:
                say(f"reading {split}: {done} of {total} images")

        return read_pictures(
            self.path, split, data.image_size, data.val, data.split_seed, limit=data.limit, progress=progress
        )

    def data_digests(self, splits: Any) -> dict[str, str]:
        return {DATA[split]: pictures.digest for split, pictures in splits.items() if split in DATA}

    def data_files(self, splits: Any) -> dict[str, dict[Path, str]]:
        return {what: {self.path: ""} for what in self.data_digests(splits)}

    def epoch_flop(self, plan: Plan, splits: Any) -> float:
        from sameday.models.build import build_model
        from sameday.models.vision_flops import count_images

        pictures = splits["train"]
        model = build_model(self.recipe.model, self.recipe.data.image_size, len(pictures.classes), self.recipe.seed)
        return float(count_images(model, len(pictures)).needed.total)

    def parameters(self) -> int:
        return int(self.recipe.model.parameters())

    def least_memory(self, plan: Plan, ranks: int, trains: bool) -> Needed:
        recipe, parameters = self.recipe, self.parameters()
        if not trains:
            return Needed(4 * parameters, f"{4 * parameters / 2**30:.3g} GiB for {parameters:,} parameters")
        share = -(-recipe.effective_batch // ranks)
        images = min(plan.micro_batch or share, share)
        # What compiled layers keep is for the compiler to say.
        kept = recipe.model.kept(recipe.data.image_size) if plan.compile == "none" else 0
        activations = images * kept * (2 if recipe.precision == "bf16" else 4)
        what = f"{parameters * TRAINED / 2**30:.3g} GiB for {parameters:,} parameters, gradients and AdamW's moments"
        if kept:
            what += f", {activations / 2**30:.3g} GiB for activations of {images} images at once"
        left = "what is left to try: a smaller plan.micro_batch, recipe.model or recipe.data.image_size"
        return Needed(parameters * TRAINED + activations, f"{what}; {left}")

    def load(self, plan: Plan, device: torch.device, splits: Any) -> ClassifyTask:
        from sameday.tasks.classify.task import ClassifyTask

        return ClassifyTask.load(self.recipe, plan, device, splits)

    def choose_plan(self, machine: Machine, ranks: int) -> tuple[Plan, dict[str, str]]:
        from sameday.tasks.classify.automatic import choose_plan

        return choose_plan(self.recipe, machine)

    def check_plan(self, plan: Plan, machine: Machine) -> None:
        from sameday.tasks.classify.automatic import problems_of

        refuse(problems_of(plan, machine, self.recipe.precision))

    def resolve_auto(self, plan: Plan, machine: Machine) -> Resolved:
        from sameday.tasks.classify.automatic import level_kernel

        kernel, why = level_kernel(plan, self.recipe, machine)
        if plan.level_kernel != "auto":
            return Resolved(plan)
        return Resolved(plan.model_copy(update={"level_kernel": kernel}), {"level_kernel": why})

    def low_memory(self, plan: Plan) -> Plan:
        less = max(1, self.recipe.effective_batch // 8)
        return plan.model_copy(update={"micro_batch": min(plan.micro_batch or less, less)})

    def fits_two_arms(self, memory: int) -> bool:
        """These models are small beside any GPU."""
        return True

    def for_evaluation(self, plan: Plan) -> Plan:
        anywhere = {"device": "auto", "level_kernel": "auto", "images_on": "auto", "cuda_graphs": False}
        return plan.model_copy(update=anywhere | {"compile": "none"})

    def choices(self, machine: Machine) -> list[Choice]:
        choices = [Choice("images_on", ({"images_on": "device"},))]
        if machine.device == "cuda" and machine.triton:
            choices.insert(0, Choice("level_kernel", ({"level_kernel": "fused", "compile": "none"},)))
            choices.append(Choice("compile", ({"compile": "layers", "level_kernel": "plain"},)))
        if machine.device == "cuda":
            graphs = {"cuda_graphs": True, "images_on": "device", "workers": 0}
            choices.insert(1, Choice("cuda_graphs", (graphs,)))
        smaller = tuple({"micro_batch": count} for count in PICTURES if count < self.recipe.effective_batch)
        return [*choices, Choice("micro_batch", smaller)]

    def cuts(self, device: str, plan: Plan) -> list[dict[str, Any]]:
        return [] if plan.micro_batch is None else [{"micro_batch": None}]

    def cannot(self, machine: Machine) -> frozenset[tuple[str, Any]]:
        from sameday.tasks.classify.automatic import no_fused_levels

        return frozenset({("level_kernel", "fused")} if no_fused_levels(self.recipe, machine) else ())

    def trial_values(self, device: str, size: int) -> dict[str, tuple[Any, ...]]:
        from sameday.kernels.bdh import interpreted

        cuda = device == "cuda"
        return {
            "micro_batch": (None, 5 * size, size),
            "compile": ("none", "layers", "auto"),
            "compile_mode": ("default", *(("reduce-overhead", "max-autotune") if cuda else ())),
            "level_kernel": ("plain", *(("fused", "auto") if cuda or interpreted() else ())),
            "cuda_graphs": (False, *((True,) if cuda else ())),
            "images_on": ("host", "device", "auto"),
            "eval_batch": (None, 3 * size),
        }

    def words(self) -> tuple[str, str]:
        return recipe_words(self.recipe)


def _first(pictures: Pictures, count: int) -> Pictures:
    return replace(
        pictures, pixels=pictures.pixels[:count], labels=pictures.labels[:count], names=pictures.names[:count]
    )
