"""Recipes, claims and parts of a step in plain words."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from sameday.report.charts import number
from sameday.spec.classify import BdhModel, ClassifyRecipe
from sameday.spec.recipe import Recipe
from sameday.spec.vqa import VqaRecipe

CLAIMS = {
    "bitwise": "the same bits",
    "rounding": "the same mathematics, rounded in another order",
    "statistical": "another draw of the randomness",
}
VERDICTS = {
    **CLAIMS,
    "statistical": "the same mathematics with dropout off; with it on, another draw of its masks",
    "different": "not the same model",
}
PARTS = {
    "wait": "waiting for data",
    "read": "reading images",
    "decode": "decoding images",
    "resize": "resizing images",
    "copy": "copying to the device",
    "prepare": "preparing images on the device",
    "tower": "vision tower",
    "forward": "forward pass",
    "loss": "loss",
    "backward": "backward pass",
    "exchange": "exchange between ranks",
    "optimizer": "optimizer",
    "check": "reading loss and norm",
    "log": "logging",
    "other": "everything else",
}
"""Of a step, in the order in which they come."""
SCHEDULES = {
    "linear": "falls linearly to zero",
    "cosine": "falls to zero as a cosine",
    "constant": "stays there",
}
ORDERS = {
    "shuffle": "all questions at random",
    "listed": "questions as listed in the file",
    "by_image": "images at random, an image's questions together",
    "curriculum": "stage by stage, the lowest first",
}


def recipe_words(recipe: Recipe) -> list[str]:
    """What is trained, on what, and how: one paragraph each."""
    if isinstance(recipe, VqaRecipe):
        what, data = _vqa(recipe)
    elif isinstance(recipe, ClassifyRecipe):
        what, data = _classify(recipe)
    else:
        what, data = f"Task {recipe.task}.", "The recipe below has all of its fields."
    return [what, data, _optimization(recipe)]


def _vqa(recipe: VqaRecipe) -> tuple[str, str]:
    what = f"The model “{recipe.model}” learns answers to questions about images. "
    if recipe.train == "lora":
        lora = recipe.lora
        dropout = f", dropout {number(lora.dropout)}" if lora.dropout else ""
        what += f"Trained are adapters (LoRA) of rank {lora.r}, alpha {number(lora.alpha)}{dropout}, on "
        what += f"{', '.join(lora.target_modules)}"
        what += f", starting from {recipe.start_adapter}. " if recipe.start_adapter else ". "
    else:
        what += "Trained are all weights of the language model. "
    what += "The vision tower is trained too." if recipe.train_vision else "The vision tower is frozen."
    data = f"Questions come from {recipe.data.train}, {ORDERS[recipe.order.kind]}"
    if recipe.order.max_per_image:
        data += f", at most {recipe.order.max_per_image} of one image in a step"
    data += f"; validated on {recipe.data.val}. " if recipe.data.val else "; there is no validation set. "
    data += f"Only the first {recipe.data.limit:,} of each file are used. " if recipe.data.limit else ""
    data += f"Images have at most {recipe.max_pixels:,} pixels. " if recipe.max_pixels else ""
    data += f"System prompt: “{recipe.system_prompt}”. " if recipe.system_prompt else ""
    each = "answer token" if recipe.loss_weight == "token" else "question"
    return what, data + f"In the loss each {each} weighs the same."


def _classify(recipe: ClassifyRecipe) -> tuple[str, str]:
    model = recipe.model
    if isinstance(model, BdhModel):
        shape = f"Vision-BDH with {model.levels} levels, {model.latents} latents and {model.attention} attention"
    else:
        shape = f"A vision transformer with {model.depth} layers"
    pool = "a class token" if model.pool == "class" else "the mean of all patches"
    size, patch = (f"{side}×{side}" for side in (recipe.data.image_size, model.patch))
    what = (
        f"{shape}, {model.heads} heads, width {model.width}, learns labels of images from scratch. Images of "
        f"{size} pixels are cut into patches of {patch}; {pool} is classified. "
        + (f"Dropout {number(model.dropout)}." if model.dropout else "No dropout.")
    )
    held = f"{recipe.data.val:,} of them held out for validation" if recipe.data.val else "none held out for validation"
    data = f"Images come from {recipe.data.path}, {held}, "
    data += "at random. " if recipe.order == "shuffle" else "as listed. "
    data += f"Only the first {recipe.data.limit:,} of each part are used. " if recipe.data.limit else ""
    if recipe.augment is None:
        data += "They are not varied."
    else:
        low, high = (number(100 * value) for value in recipe.augment.crop_scale)
        data += f"Each is cropped anew in every epoch to {low}–{high}% of its area"
        data += " and mirrored half of the time." if recipe.augment.flip else "."
    if recipe.label_smoothing:
        data += f" Labels are smoothed by {number(recipe.label_smoothing)}."
    return what, data


def _optimization(recipe: Recipe) -> str:
    if recipe.warmup_steps is not None:
        warm = f" after {recipe.warmup_steps:,} steps of warm-up" if recipe.warmup_steps else ""
    else:
        warm = f" after a warm-up of {number(100 * recipe.warmup_ratio)}% of all steps" if recipe.warmup_ratio else ""
    clip = f", gradients clipped to norm {number(recipe.max_grad_norm)}" if recipe.max_grad_norm else ""
    decay = f", weight decay {number(recipe.weight_decay)}" if recipe.weight_decay else ""
    each = count(recipe.effective_batch, recipe.sample)
    if recipe.max_steps:
        long = f"{count(recipe.max_steps, 'step')} of {each} each"
    else:
        long = f"{count(recipe.num_epochs, 'epoch')} in steps of {each}"
    rate = f"the learning rate peaks at {number(recipe.learning_rate)} and {SCHEDULES[recipe.schedule]}{warm}"
    return f"{long}, in {recipe.precision}, seed {recipe.seed}. AdamW{decay}{clip}; {rate}."


def value(given: Any) -> str:
    """A setting as its YAML file has it."""
    if given is None or isinstance(given, bool):
        return {None: "null", True: "true", False: "false"}[given]
    if isinstance(given, dict):
        return ", ".join(f"{k}={v}" for k, v in given.items()) or "none"
    if isinstance(given, list | tuple):
        return ", ".join(map(str, given)) or "none"
    return str(given)


def seconds(given: float | None) -> str:
    """A duration with a unit that fits it."""
    if given is None:
        return "–"
    size = abs(given)
    if 0 < size < 1e-3:
        return f"{1e6 * given:.3g} µs"
    if 0 < size < 1:
        return f"{1e3 * given:.3g} ms"
    if size < 120:
        return f"{given:.3g} s"
    minutes, rest = divmod(round(given), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def between(low: float, high: float) -> str:
    """Two durations in the unit that fits the longer, with as many digits as tell them apart, three at least."""
    unit, size = ("s", 1) if high < 120 else ("min", 60) if high < 7200 else ("h", 3600)
    ends = low / size, high / size
    places = max(0, 2 - math.floor(math.log10(ends[1]))) if ends[1] > 0 else 0
    said = [f"{end:,.{places}f}" for end in ends]
    while said[0] == said[1] and ends[0] != ends[1]:
        places += 1
        said = [f"{end:,.{places}f}" for end in ends]
    first, last = (each.rstrip("0").rstrip(".") if places else each for each in said)
    return f"{first} to {last} {unit}" if first != last else f"{last} {unit}"


def in_order(names: Iterable[str]) -> list[str]:
    """Parts in their order; those that are not known, as they came, at the end."""
    given = dict.fromkeys(names)
    return [name for name in PARTS if name in given] + [name for name in given if name not in PARTS]


def count(given: int, what: str) -> str:
    return f"{given:,} {what}" if given == 1 else f"{given:,} {what}s"


def percent(share: float) -> str:
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def score(name: str, given: float | None) -> str:
    """A score: those that are shares of right answers in percent."""
    if given is None:
        return "–"
    if is_share(name):
        return f"{100 * given:.1f}%"
    return f"{given:,}" if isinstance(given, int) else f"{given:.4f}" if 1e-3 <= abs(given) < 1e3 else number(given)


def is_share(name: str) -> bool:
    return name in ("exact_match", "accuracy")


def plain_name(name: str) -> str:
    return name.replace("_", " ")
