"""Visual question answering before the loop: question files and images, the model's configuration, plan choices."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sameday.data.questions.audit import DEFAULT_SPECIAL, check, cores, report
from sameday.data.questions.sample import Sample, images_of
from sameday.spec.errors import BadInput
from sameday.spec.load import resolve_model, resolve_path
from sameday.spec.plan import Plan
from sameday.spec.vqa import VqaRecipe
from sameday.tasks.start import Audited, Caching, LeftOut, Say

if TYPE_CHECKING:
    import torch

    from sameday.hardware.machine import Machine
    from sameday.tasks.vqa import VqaTask


class VqaStart:
    def __init__(self, recipe: VqaRecipe, home: Path) -> None:
        self.recipe, self.home = recipe, home

    def lacks(self, part: str) -> str | None:
        return f"the recipe has no data.{part}" if getattr(self.recipe.data, part) is None else None

    def audit(self, say: Say, parts: Sequence[str] = ("train", "val"), few: Mapping[str, int] | None = None) -> Audited:
        for token in DEFAULT_SPECIAL:
            if token in (self.recipe.system_prompt or ""):
                raise BadInput(f"recipe.system_prompt holds {token}, which would become a real token")
        data = self.recipe.data
        splits: dict[str, list[Sample]] = {}
        skipped: list[Any] = []
        errors: list[str] = []
        for name in parts:
            file = getattr(data, name)
            if file is None:
                continue
            try:
                splits[name], problems = check(
                    resolve_path(self.home, file),
                    resolve_path(self.home, data.image_root),
                    limit=data.limit,
                    on_bad=data.on_bad,
                    progress=_progress(name, say),
                    label=file,
                    few=None if few is None else few[name],
                )
                skipped += problems
            except BadInput as error:
                errors.append(str(error))
        if errors:
            raise BadInput("\n".join(errors))
        if skipped:
            say(f"left out: {report(skipped)}")
        sizes = {name: len(samples) for name, samples in splits.items()}
        return Audited(splits, sizes, [LeftOut(problem.where, problem.what) for problem in skipped])

    def check_model(self, say: Say) -> None:
        from sameday.models.hub import announce_download

        announce_download(resolve_model(self.home, self.recipe.model), self.recipe.revision, say)
        _ = self.config

    @cached_property
    def config(self) -> Any:
        """The model's configuration; what cannot be trained is refused here, before weights are loaded."""
        from transformers import AutoConfig

        from sameday.models.qwen_vl import check_supported

        recipe = self.recipe
        try:
            config = AutoConfig.from_pretrained(resolve_model(self.home, recipe.model), revision=recipe.revision)
        except (OSError, ValueError) as error:
            raise BadInput(f"model {recipe.model!r}: its configuration cannot be read: {error}") from None
        check_supported(config)
        return config

    def choose_plan(self, machine: Machine, ranks: int) -> tuple[Plan, dict[str, str]]:
        from sameday.hardware.choose import choose_plan

        return choose_plan(self.recipe, machine, self.config, ranks)

    def settle(self, plan: Plan, machine: Machine) -> dict[str, tuple[str, str]]:
        from sameday.hardware.choose import attention_kernel

        if plan.cache == "features" and self.recipe.train_vision:
            raise BadInput(
                "plan.cache features keeps what the vision tower makes of an image, and recipe.train_vision trains the "
                "tower; allowed: none, pixels, auto"
            )
        found = attention_kernel(plan, machine.device, self.recipe.precision, machine.triton)
        return {"attention": found} if plan.attention == "auto" else {}

    def thrifty(self, plan: Plan) -> Plan:
        return plan.model_copy(update={"checkpointing": "full"})

    def two_fit(self, memory: int) -> bool:
        """A reference takes twice the weights in float32 and about as much for activations, another arm the weights
        and activations."""
        from sameday.hardware.choose import language_weights

        return self.recipe.train == "lora" and memory > 5 * 2 * language_weights(self.config.text_config)

    def for_evaluation(self, plan: Plan) -> Plan:
        return plan

    def fill_cache(self, asked: Caching, plan: Plan, device: torch.device, say: Say) -> bool:
        from sameday.cache.build import check_room, estimate
        from sameday.tasks.vqa import load_processor
        from sameday.tasks.vqa_cache import found, in_folder
        from sameday.tasks.vqa_fill import Filling

        if asked.kind == "features" and self.recipe.train_vision:
            raise BadInput("features are of no use where recipe.train_vision trains the tower that makes them")
        audited = self.audit(say, ("train", "val", "test"))
        folder = resolve_path(self.home, plan.cache_dir)
        task = None
        if asked.kind == "features" or asked.measure:
            task = self.load(plan.model_copy(update={"cache": "none"}), device, audited.parts)
        processor = load_processor(self.recipe, self.home)
        with in_folder(folder):
            model = None if task is None else task.model
            filling = Filling(asked.kind, processor, images_of(audited.parts), folder, say, model)
            if asked.what == "check":
                return filling.check()
            if asked.what != "fill":
                filling.prune(everything=asked.what == "prune all")
                return True
            say(found(filling.store, [image.digest for image in filling.images]))
            check_room(filling.store, estimate(filling.store, filling.jobs))
            measured = None if task is None else filling.measure(task)
            filling.fill(workers=plan.workers or cores())
            if task is None:
                filling.compare_reading()
            elif measured is not None:
                filling.measure_again(task, measured)
        return True

    def sift(self, parts: Any) -> Any:
        from sameday.tasks.vqa import load_encoder, load_processor, sift

        encoder = load_encoder(self.recipe, self.home, load_processor(self.recipe, self.home))
        return sift(encoder, parts, self.recipe.data.on_bad == "skip")[0]

    def load(self, plan: Plan, device: torch.device, parts: Any) -> VqaTask:
        import transformers

        from sameday.tasks.vqa import VqaTask

        if not sys.stderr.isatty():
            transformers.utils.logging.disable_progress_bar()
        return VqaTask.load(self.recipe, plan, self.home, device, parts)


def _progress(name: str, say: Say) -> Callable[[int, int], None]:
    """A line at each tenth of a long audit; nothing for a short one."""
    shown = 0

    def show(done: int, total: int) -> None:
        nonlocal shown
        if total >= 500 and done * 10 // total > shown:
            shown = done * 10 // total
            say(f"checking {name}: {done} of {total} images decoded")

    return show
