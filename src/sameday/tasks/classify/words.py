"""What a recipe trains, and on what, in plain words."""

from __future__ import annotations

from sameday.spec.classify import ClassifyRecipe
from sameday.spec.vision import BdhModel
from sameday.spec.words import number


def recipe_words(recipe: ClassifyRecipe) -> tuple[str, str]:
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
