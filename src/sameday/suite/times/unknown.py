"""What `sameday suite plan --measure` times: trainings and evaluations of which no record tells the time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from sameday.spec.evaluation import Evaluation
from sameday.suite.times.measured import planned
from sameday.suite.times.predict import Predictor
from sameday.suite.times.work import Training, Work

Key = tuple[str, str]
"""Equal for two trainings of which one measurement tells all."""


class Unknown(NamedTuple):
    """A training to be timed, by a job that has it, with an evaluation of which nobody knows the time."""

    job: str
    training: Training
    evaluation: Evaluation | None = None

    @property
    def answers(self) -> int | None:
        """The most tokens of an answer that is timed; None where none is."""
        return None if self.evaluation is None else self.evaluation.max_new_tokens


def key_of(training: Training) -> Key:
    return training.cost, planned(training)


def unknown(predictor: Predictor) -> list[Unknown]:
    """Of all that is still to be done."""
    works = {name: predictor.work(name) for name, state in predictor.states.items() if state.state != "done"}
    todo = {name: work for name, work in works.items() if isinstance(work, Work)}
    return list(_with_evaluations(predictor, todo, _trainings(predictor, todo)).values())


def _trainings(predictor: Predictor, todo: Mapping[str, Work]) -> dict[Key, Unknown]:
    """Whose steps nobody went through under their plan. Of those that cost the same the one with the most steps:
    another may have too few for a good pace."""
    every: dict[Key, Unknown] = {}
    longest: dict[Key, float] = {}
    for name, training in ((name, training) for name, work in todo.items() for training in work.trainings):
        counted = predictor.counts.of(training.recipe, training.home).total(training.recipe)
        key, steps = key_of(training), math.inf if counted is None else counted
        alone = training.ranks == 1 and training.planned
        if alone and steps > longest.get(key, 0) and not predictor.knows(training):
            every[key], longest[key] = Unknown(name, training), steps
    return every


def _with_evaluations(predictor: Predictor, todo: Mapping[str, Work], every: dict[Key, Unknown]) -> dict[Key, Unknown]:
    """Each evaluation, of whatever job, is timed with the first training of such a model, or by itself where there is
    none. For another GPU it is never by itself: what it takes there is known from steps."""
    every = dict(every)
    for name, work in todo.items():
        expected = predictor.suite.jobs[name].expected is not None
        if work.evaluation is None or expected or predictor.knows_evaluation(name, work):
            continue
        alike = {key: each for key, each in every.items() if work.answers_like(each.training)}
        if any(each.answers == work.evaluation.max_new_tokens for each in alike.values()):
            continue
        alone = work.only_evaluated
        alone = alone if predictor.elsewhere is None else replace(alone, evaluated="")
        key = next((key for key, each in alike.items() if each.evaluation is None), key_of(alone))
        every[key] = every.get(key, Unknown(name, alone))._replace(evaluation=work.evaluation)
    return every
