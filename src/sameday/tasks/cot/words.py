"""What a recipe trains, and on what, in plain words."""

from __future__ import annotations

from sameday.spec.cot import CotRecipe
from sameday.spec.words import number
from sameday.tasks.vqa.words import recipe_words as question_words


def recipe_words(recipe: CotRecipe) -> tuple[str, str]:
    what, data = question_words(recipe)
    rank = recipe.heads.rank
    form = "a whole matrix" if rank == "full" else f"rank {rank}"
    what += (
        f" Each of three stages has a head over the vocabulary ({form}, added to the lm_head); stage 2 sees the mean "
        "state of the image's stage-1 questions, stage 3 those of stages 1 and 2. A step takes whole images until it "
        f"has {recipe.effective_batch} questions or more."
    )
    weights = recipe.heads.weights
    if len(set(weights.values())) > 1:
        shown = ", ".join(f"stage {stage} by {number(weight)}" for stage, weight in weights.items())
        data += f" The loss of each question is multiplied: {shown}."
    return what, data
