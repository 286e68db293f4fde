"""What is read of a model without its weights: family, image processor and tokenizer; and which questions fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sameday.data.problems import Problem, in_lines, report
from sameday.data.questions.audit import SKIP
from sameday.data.questions.encode import Encoder
from sameday.data.questions.processor import ImageProcessor
from sameday.data.questions.sample import Sample
from sameday.models.families import family_of
from sameday.models.families.base import Family
from sameday.models.hub import processor_template
from sameday.spec.errors import BadInput
from sameday.spec.load import resolve_model
from sameday.spec.vlm import VlmRecipe
from sameday.tasks.base import LeftOut


def load_family(recipe: VlmRecipe, recipe_dir: Path) -> Family:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(resolve_model(recipe_dir, recipe.model), revision=recipe.revision)
    return family_of(config.model_type)


def load_processor(family: Family, recipe: VlmRecipe, recipe_dir: Path) -> ImageProcessor:
    name, limits = resolve_model(recipe_dir, recipe.model), (recipe.min_pixels, recipe.max_pixels)
    return ImageProcessor.load(family, name, recipe.revision, recipe.image_backend, *limits)


def _check_stages(recipe: VlmRecipe, samples: Sequence[Sample]) -> None:
    if recipe.order.kind == "curriculum" or recipe.order.within_image == "stage":
        without = [s.where for s in samples if s.stage is None]
        if without:
            raise BadInput(
                f"order {recipe.order.kind} needs a stage in every line; {len(without)} have none: {without[0]}"
            )


def load_encoder(recipe: VlmRecipe, recipe_dir: Path, processor: ImageProcessor) -> Encoder:
    from transformers import AutoTokenizer

    name = resolve_model(recipe_dir, recipe.model)
    tokenizer = AutoTokenizer.from_pretrained(name, revision=recipe.revision)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = processor_template(name, recipe.revision)
    return Encoder(tokenizer, processor, recipe.system_prompt, recipe.max_length, recipe.answer_end)


class Checked(dict[str, list[Sample]]):
    """Splits of which each question has been through the encoder, and those that are not among them for it."""

    left_out: Sequence[LeftOut] = ()

    def __init__(self) -> None:
        super().__init__()
        self.lengths: dict[str, list[int]] = {}
        """Of the questions of each split, in tokens."""


def beyond_positions(splits: Checked, positions: int | None) -> list[str]:
    """A line for each split that has questions longer than a model's positions go. The model computes positions for any
    length, and its pretraining has seen none of those."""
    lines = []
    for name, lengths in splits.lengths.items():
        if positions is not None and (long := sum(length > positions for length in lengths)):
            place = lengths.index(max(lengths))
            lines.append(
                f"{name}: {long} of {len(lengths)} questions have more tokens than the model has positions "
                f"(max_position_embeddings {positions}); the longest is {splits[name][place].where} with "
                f"{lengths[place]}; recipe.max_length and recipe.max_pixels make questions shorter"
            )
    return lines


def drop_too_long(recipe: VlmRecipe, encoder: Encoder, splits: dict[str, list[Sample]]) -> Checked:
    """Every question once through the encoder, before the model is loaded: what max_length has no room for, all in
    one list, or left out."""
    _check_stages(recipe, splits.get("train", []))
    good, skip = Checked(), recipe.data.on_bad == "skip"
    problems: list[Problem] = []
    for name, samples in splits.items():
        good[name], good.lengths[name] = [], []
        for sample in samples:
            try:
                length = encoder.encode(sample).length
                good[name].append(sample)
                good.lengths[name].append(length)
            except BadInput as error:
                problems.append(Problem(sample.where, str(error).removeprefix(f"{sample.where}: ")))
    if problems and (not skip or not all(good.values())):
        listed = report(problems, in_lines(problems), Path(problems[0].where.partition(":")[0]))
        raise BadInput(listed if skip or not any(good.values()) else f"{listed}\n{SKIP}")
    good.left_out = [LeftOut(problem.where, problem.what) for problem in problems]
    return good
