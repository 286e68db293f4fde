"""Classification before the loop: labelled images, plan choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sameday.data.labelled.pictures import Pictures, Split, read_pictures
from sameday.spec.classify import ClassifyRecipe
from sameday.spec.errors import BadInput
from sameday.spec.load import resolve_path
from sameday.spec.plan import Plan
from sameday.tasks.start import Audited, Caching, Say

if TYPE_CHECKING:
    import torch

    from sameday.hardware.machine import Machine
    from sameday.tasks.classify import ClassifyTask


class ClassifyStart:
    def __init__(self, recipe: ClassifyRecipe, home: Path) -> None:
        self.recipe, self.path = recipe, resolve_path(home, recipe.data.path)

    def lacks(self, part: str) -> str | None:
        if part == "val" and not self.recipe.data.val and not (self.path / "val").is_dir():
            return f"the recipe holds no images out (data.val is 0), and {self.path} has no val folder"
        return None

    def audit(self, say: Say, parts: Sequence[str] = ("train", "val"), few: Mapping[str, int] | None = None) -> Audited:
        found: dict[str, Pictures] = {}
        problems: list[str] = []
        for part in parts:
            if self.lacks(part) is not None:
                continue
            try:
                pictures = self._read(part, say)  # type: ignore[arg-type]
            except BadInput as error:
                problems.append(str(error))
                continue
            if len(pictures.classes) < 2:
                problems.append(f"{self.path} has one class, {pictures.classes[0]}: there is nothing to tell apart")
            found[part] = pictures if few is None else _first(pictures, few[part])
        if problems:
            raise BadInput("\n".join(dict.fromkeys(problems)))
        return Audited(found, {part: len(pictures) for part, pictures in found.items()}, [])

    def _read(self, part: Split, say: Say) -> Pictures:
        data = self.recipe.data

        def progress(done: int, total: int) -> None:
            if total >= 5000:
                say(f"reading {part}: {done} of {total} images")

        return read_pictures(
            self.path, part, data.image_size, data.val, data.split_seed, limit=data.limit, progress=progress
        )

    def check_model(self, say: Say) -> None:
        """Whatever the recipe can say can be built, and nothing is downloaded."""

    def choose_plan(self, machine: Machine, ranks: int) -> tuple[Plan, dict[str, str]]:
        from sameday.hardware.choose_classify import choose_plan

        return choose_plan(self.recipe, machine)

    def settle(self, plan: Plan, machine: Machine) -> dict[str, tuple[str, str]]:
        from sameday.hardware.choose_classify import level_kernel
        from sameday.models.build import no_fused_levels

        kernel = level_kernel(plan, self.recipe, machine, no_fused_levels(self.recipe, machine))
        return {"level_kernel": kernel} if plan.level_kernel == "auto" else {}

    def thrifty(self, plan: Plan) -> Plan:
        return plan

    def two_fit(self, memory: int) -> bool:
        """These models are small beside any GPU."""
        return True

    def for_evaluation(self, plan: Plan) -> Plan:
        anywhere = {"device": "auto", "level_kernel": "auto", "images_on": "auto", "cuda_graphs": False}
        return plan.model_copy(update=anywhere | {"compile": "none"})

    def sift(self, parts: Any) -> Any:
        return parts

    def load(self, plan: Plan, device: torch.device, parts: Any) -> ClassifyTask:
        from sameday.tasks.classify import ClassifyTask

        return ClassifyTask.load(self.recipe, plan, device, parts)

    def fill_cache(self, asked: Caching, plan: Plan, device: torch.device, say: Say) -> bool:
        raise BadInput(
            "task classify keeps its images in memory, in bytes, and has no use for a cache: `sameday cache` is for "
            "task vqa"
        )


def _first(pictures: Pictures, count: int) -> Pictures:
    keep = np.s_[:count]
    return Pictures(pictures.pixels[keep], pictures.labels[keep], pictures.classes, pictures.names[keep])
