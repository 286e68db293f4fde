"""What a recipe trains, and on what, in plain words."""

from __future__ import annotations

from sameday.spec.lora import OF_IMAGES
from sameday.spec.questions import where_words
from sameday.spec.vlm import VlmRecipe
from sameday.spec.words import number

ORDERS = {
    "shuffle": "all questions at random",
    "listed": "questions as listed in the file",
    "by_image": "images at random, an image's questions together",
    "curriculum": "stage by stage, the lowest first",
}


def image_parts_words(recipe: VlmRecipe) -> str:
    """Which field trains what an image goes through."""
    if recipe.train_vision:
        return "recipe.train_vision trains the tower"
    parts = [part for part in OF_IMAGES if part in recipe.trained_parts]
    return f"recipe.lora.target_modules trains the {' and the '.join(parts)}"


def recipe_words(recipe: VlmRecipe) -> tuple[str, str]:
    what = f"The model “{recipe.model}” learns answers to questions about images. "
    if recipe.train == "lora":
        lora = recipe.lora
        dropout = f", dropout {number(lora.dropout)}" if lora.dropout else ""
        kind = "DoRA" if lora.dora else "LoRA"
        scaled = " over the root of the rank" if lora.rslora else ""
        what += f"Trained are adapters ({kind}) of rank {lora.r}, alpha {number(lora.alpha)}{scaled}{dropout}, on "
        what += f"{', '.join(lora.target_modules)}"
        what += f", starting from {recipe.start_adapter}. " if recipe.start_adapter else ". "
    else:
        what += "Trained are all weights of the language model. "
    what += f"The base model's weights are stored as {recipe.base_words}. " if recipe.base_format != "precision" else ""
    if recipe.train_vision:
        what += "The vision tower is trained too."
    elif recipe.trains_image_parts:
        tower, projector = ("trained" if part in recipe.trained_parts else "frozen" for part in OF_IMAGES)
        what += f"The vision tower is {tower}, the projector behind it is {projector}."
    else:
        what += "The vision tower is frozen."
    for part, rate in recipe.learning_rates.items():
        what += f" The {part} has a peak learning rate of its own, {number(rate)}."
    data = f"Questions come from {recipe.data.train}, {ORDERS[recipe.order.kind]}"
    if recipe.data.mix:
        mixed = [f"{part.train} (weight {number(part.weight)})" for part in recipe.data.mix]
        data += f", mixed with {', '.join(mixed)}"
    if recipe.order.max_per_image:
        data += f", at most {recipe.order.max_per_image} of one image in a step"
    data += f"; validated on {_judged_by(recipe)}. " if _judged_by(recipe) else "; there is no validation set. "
    data += f"Only questions {where_words(recipe.data.where)} are used. " if recipe.data.where else ""
    data += f"Lines {where_words(recipe.data.skip).replace(' and ', ' or ')} are skipped. " if recipe.data.skip else ""
    data += f"Only the first {recipe.data.limit:,} of each file are used. " if recipe.data.limit else ""
    backend = "Pillow" if recipe.image_backend == "pil" else "torchvision"
    most = f", to at most {recipe.max_pixels:,} pixels" if recipe.max_pixels else ""
    data += f"Images are resized by {backend}{most}. "
    if recipe.categories is not None:
        how = [name for name in ("table", "rules") if getattr(recipe.categories, name)]
        data += f"Questions without a stage or type get it from {' and '.join(how)}. "
    if recipe.prompt is not None:
        others = f", or one of {len(recipe.prompt.templates)} by {recipe.prompt.by}" if recipe.prompt.by else ""
        data += f"A question is asked as “{recipe.prompt.default}”{others}. "
    data += f"System prompt: “{recipe.system_prompt}”. " if recipe.system_prompt else ""
    if recipe.answer_end == "turn":
        data += "An answer is learned with what the model's chat template puts behind its end. "
    each = "answer token" if recipe.loss_weight == "token" else "question"
    return what, data + f"In the loss each {each} weighs the same."


def _judged_by(recipe: VlmRecipe) -> str | None:
    """The validation file, or the share of images that is held out for it, by content."""
    split = recipe.data.split
    return f"{split.val:.0%} of its images, by their content" if split is not None and split.val else recipe.data.val
