"""The evaluation that a recipe asks for at the end of training. What cannot be evaluated is known, and refused, before
the first step."""

from __future__ import annotations

from collections.abc import Sequence

from sameday.commands.session import Specs, silent
from sameday.spec.errors import BadInput, NothingToLearn
from sameday.spec.evaluation import Evaluation
from sameday.spec.recipe import StageRecipe
from sameday.tasks.registry import setup_of
from sameday.tasks.setup import TRAINING, Audited, TaskSetup


def splits_of(specs: Specs, evaluation: Evaluation | None) -> tuple[str, ...]:
    """What training reads, and where it ends with an evaluation, what that does."""
    if evaluation is None:
        return TRAINING
    if (lacking := setup_of(specs.recipe, specs.home).lacks(evaluation.split)) is not None:
        raise BadInput(f"recipe.evaluate.split is {evaluation.split}, and {lacking}")
    return tuple(dict.fromkeys((*TRAINING, evaluation.split)))


def check_evaluation(evaluation: Evaluation, setup: TaskSetup, audited: Audited) -> None:
    if evaluation.split in audited.empty:
        raise BadInput(f"recipe.evaluate.split is {evaluation.split}, and {audited.empty[evaluation.split]}")
    setup.check_evaluation(evaluation, audited.splits)


def separate_models(stages: Sequence[StageRecipe]) -> bool:
    """Whether each stage has a model of its own at the end: not all of them go on with the one before."""
    return not all(each.follows for each in stages[1:])


def check_evaluation_of_stages(specs: Specs, evaluation: Evaluation, sizes: Sequence[dict[str, int]]) -> None:
    """`sizes` has how many samples each stage has of each split."""
    stages, split = specs.recipe.stage_recipes(), evaluation.split
    setup = setup_of(specs.recipe, specs.home)
    if not separate_models(stages):
        try:
            audited = setup.audit(silent, (split,))
        except NothingToLearn as error:
            raise BadInput(f"recipe.evaluate.split is {split}, and {error}") from None
        check_evaluation(evaluation, setup, audited)
        return
    if evaluation.cascade and (why := setup.no_cascade()) is not None:
        raise BadInput(f"recipe.evaluate.cascade is true, and {why}")
    if not any(each.get(split) for each in sizes):
        raise BadInput(f"recipe.evaluate.split is {split}, and no stage has a {specs.recipe.sample} of it")
