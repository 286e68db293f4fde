"""`sameday eval`: scores of any weights that fit a recipe's data, and answers that they generate. Bad input is found
before a model is loaded."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from sameday.commands.environment import prepare_environment
from sameday.commands.session import Session, Specs, all_of_a_plan, left_to_first, note_stop
from sameday.commands.stages import evaluate_stages, own_models
from sameday.record.folder import RunFolder, default_path, stage_folders
from sameday.record.images import TRAINED_ON, TrainedOn, run_of, scored_on_trained, trained_on
from sameday.record.lock import Lock
from sameday.record.times import Spent, note, process_age
from sameday.spec.errors import EXIT_STOPPED, BadInput, EvaluationGivenUp, RunStopped, refuse
from sameday.spec.evaluation import Evaluation
from sameday.spec.load import load_plan
from sameday.spec.sets import split_sets
from sameday.spec.words import first_names, tell
from sameday.spec.writing import folder_on_trial
from sameday.tasks.base import Say, Task, checked_finite
from sameday.tasks.registry import setup_of
from sameday.tasks.setup import TaskSetup

if TYPE_CHECKING:
    from sameday.evaluate.prediction import Prediction
    from sameday.hardware.ranks import Ranks
    from sameday.spec.recipe import Recipe


LAST, BEST = "last", "best"
"""Checkpoints that have another number at another time."""


@dataclass(frozen=True)
class Request:
    """What was typed. `what` is a run folder or a recipe; None leaves a value to the recipe."""

    what: Path
    split: Any = None
    checkpoint: str | None = None
    adapter: Path | None = None
    base: bool = False
    plan: Path | None = None
    out: Path | None = None
    cascade: bool | None = None
    max_new_tokens: int | None = None
    scores_only: bool = False
    sets: Sequence[str] = ()


@dataclass(frozen=True)
class Target:
    """Where scores and answers of some weights go, and how these are called in sentences."""

    weights: str
    scores: Path
    answers: Path


def evaluate(asked: Request, group: Ranks | None = None, trained: bool = False) -> dict[str, float]:
    """Ranks share the work; the first one says and records the outcome. A `group` of them may have been joined before,
    for all stages of a run. What was `trained` just now on a CPU is evaluated there, however long it takes."""
    run, specs = read_request(asked)
    if run is not None and asked.adapter is None and not asked.base and (own := own_models(run.path)):
        return _evaluate_each(asked, run, specs, own, group, trained)
    setup = setup_of(specs.recipe, specs.home)
    evaluation = _evaluation(asked, setup)
    folder: Path | None = None
    if run is not None and asked.adapter is None and not asked.base:
        folder = weights_of(run, asked.checkpoint)
    recipe = setup.recipe_for_evaluation() if asked.adapter is None else setup.recipe_with_adapter(asked.adapter)
    target = _target(asked, run, setup, folder, evaluation)
    specs = replace(specs, recipe=recipe)
    answered = setup.generates and not asked.scores_only
    with (
        closing(Session.start(specs, tell, join=True, splits=(evaluation.split,), group=group)) as session,
        ExitStack() as alone,
    ):
        ranks = session.ranks
        ranks.from_first(lambda: session.setup.check_evaluation(evaluation, session.audited.splits))
        ranks.from_first(lambda: _check_scores(target.scores))
        if answered:
            ranks.from_first(lambda: _lock(target.answers, alone))
        for choice in session.choices() if run is None else ():
            session.say(choice)
        task = session.load(splits=None if trained else _outlook(session, evaluation.split))
        for line in task.notes:
            session.say(line)
        if folder is not None and run is not None:
            if asked.checkpoint is not None:
                # Asked again: a run that goes on may have removed the checkpoint since, or written a newer one.
                folder = ranks.from_first(lambda: weights_of(run, asked.checkpoint))
                before, target = target, _target(asked, run, setup, folder, evaluation)
                if answered and target.answers != before.answers:
                    alone.close()
                    ranks.from_first(lambda: _lock(target.answers, alone))
                if asked.checkpoint in (LAST, BEST):
                    session.say(which_words(asked.checkpoint, folder, run.recipe))
            task.restore(folder)
        bad = [name for name, parameter in task.trained().items() if not parameter.isfinite().all()]
        if bad:
            raise BadInput(f"{target.weights}: holds weights that are not finite: {first_names(bad, 3)}")
        age, began, spent = process_age(), time.perf_counter(), Spent()
        try:
            seen = _trained_on(session, evaluation.split, folder or asked.adapter)
            scores = _evaluated(session, task, evaluation, target, spent, seen, asked.scores_only)
            if ranks.first and target.answers.is_dir():
                note(target.answers, "start", age, parts=session.spent)
                note(target.answers, "evaluate", time.perf_counter() - began, split=evaluation.split, parts=spent)
            return scores
        except RunStopped as stop:
            note_stop(stop, ranks)
            raise
        except BadInput as error:
            left_to_first(error, ranks)
            raise


def _evaluate_each(
    asked: Request, run: RunFolder, specs: Specs, own: Mapping[str, Path], group: Ranks | None, trained: bool
) -> dict[str, float]:
    """A run whose stages have models of their own: each on its own questions, and all of their answers in one file."""
    from sameday.evaluate.predictions import METRICS, PREDICTIONS, PredictionFile, read_predictions
    from sameday.evaluate.scores import question_scores

    prepare_environment(specs.plan)
    from sameday.hardware.machine import device_kind
    from sameday.hardware.ranks import Ranks

    setup = setup_of(specs.recipe, specs.home)
    evaluation = _evaluation(asked, setup)
    whose = f"{run.path}: each of its stages has a model of its own"
    problems = []
    if evaluation.cascade:
        problems.append(f"{whose}, and a cascade is of one model's answers: use --no-cascade")
    if asked.checkpoint is not None:
        problems.append(f"{whose}; --checkpoint is for the folder of one of them: {next(iter(own.values()))}")
    refuse(problems)
    typed = replace(asked, split=evaluation.split)
    if not asked.scores_only:
        typed = replace(typed, cascade=False, max_new_tokens=evaluation.max_new_tokens)
    joined, alone = group is None, ExitStack()
    group = group or Ranks.join(device_kind(specs.plan))
    try:
        out = asked.out
        together_in = out or _answers(run.path, run.recipe.result, evaluation)
        if setup.generates and not asked.scores_only:
            group.from_first(lambda: _lock(together_in, alone))
        outs = {folder: None if out is None else out / folder.relative_to(run.path) for folder in own.values()}
        each = lambda folder: evaluate(replace(typed, what=folder, out=outs[folder]), group, trained)  # noqa: E731
        made = evaluate_stages(run.path, own, evaluation.split, each, group, out)
        if asked.scores_only or not setup.generates or not group.first:
            return made.scores
        if made.shared:  # an earlier release put them together all the same
            for name in (PREDICTIONS, METRICS):
                (together_in / name).unlink(missing_ok=True)
            return made.scores
        answers = {n: outs[folder] or _answers(folder, run.recipe.result, evaluation) for n, folder in own.items()}
        answers = {name: place for name, place in answers.items() if place.is_dir()}  # others have no questions here
        together = [given for place in answers.values() for given in read_predictions(place / PREDICTIONS)]
        about = {"stages": {name: str(path) for name, path in answers.items()}}
        PredictionFile(together_in, about, question_scores).finish(sorted(together, key=lambda given: given.id))
        seen = {name: scored_on_trained(place / METRICS) for name, place in answers.items()}
        odd = [f"stage {name}: {found.sentence(evaluation.split)}" for name, found in seen.items() if found]
        _measured(together, together_in, tell, notes=[*odd, *made.left])
        return made.scores
    finally:
        alone.close()
        if joined:
            group.leave()


def evaluate_result(session: Session, task: Task, run: RunFolder, evaluation: Evaluation) -> None:
    """The end of a training run whose recipe asks for it: of its finished weights, which may not be the last ones."""
    began, spent = time.perf_counter(), Spent()
    task.restore(run.result)
    scores = run.path / f"eval-{evaluation.split}.json"
    target = Target(str(run.result), scores, _answers(run.path, run.result, evaluation))
    with ExitStack() as alone:
        session.ranks.from_first(lambda: _lock(target.answers, alone))
        seen = _trained_on(session, evaluation.split, run.result)
        _evaluated(session, task, evaluation, target, spent, seen)
    if session.ranks.first:
        note(run.path, "evaluate", time.perf_counter() - began, split=evaluation.split, parts=spent)


def _trained_on(session: Session, split: str, weights: Path | None) -> TrainedOn | None:
    """How many of a split's images saved weights were trained on, as the run that saved them has it. Of the training
    split itself nobody needs to be told."""
    if weights is None or split == "train":
        return None
    images = session.setup.image_contents(session.audited.splits).get(split, set())
    return session.ranks.from_first(lambda: trained_on(run_of(weights), images))


def _outlook(session: Session, split: str) -> Any:
    """Says what an evaluation on a CPU has before it. The data as it was made ready for that, which takes a while."""
    if session.device.type != "cpu":
        return None
    from sameday.commands.outlook import check_scores

    splits = session.ranks.from_first(lambda: session.setup.drop_too_long(session.audited.splits))
    session.ranks.from_first(lambda: check_scores(session, splits, split))
    return splits


def _check_scores(path: Path) -> None:
    """Before they are computed."""
    try:
        with folder_on_trial(path.parent), TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}; choose another --out") from None


def _lock(folder: Path, alone: ExitStack) -> None:
    """For this process, until the stack is closed: two that write answers into one folder would mix them."""
    alone.callback(Lock(folder).release)


def _evaluated(
    session: Session,
    task: Task,
    asked: Evaluation,
    target: Target,
    spent: Spent,
    seen: TrainedOn | None,
    scores_only: bool = False,
) -> dict[str, float]:
    import torch

    from sameday.evaluate.answer import answer_split
    from sameday.evaluate.predictions import write_json
    from sameday.evaluate.scores import question_scores
    from sameday.hardware.signals import StopRequest

    ranks = session.ranks
    with StopRequest() as stop:
        task.stop_asked = lambda: stop.asked
        try:
            with spent.on("scores"):
                scores = checked_finite(task.evaluate(asked.split, ranks), f"{target.weights}: {asked.split}")
        except EvaluationGivenUp as given_up:
            raise RunStopped(str(given_up), EXIT_STOPPED) from None
        except torch.OutOfMemoryError as error:
            raise task.evaluation_error(error) from None
        notes = [] if seen is None else [seen.sentence(asked.split)]
        more: dict[str, Any] = {} if seen is None else {TRAINED_ON: seen.plain()}
        for line in (*notes, _line(scores)):
            session.say(line)
        ranks.from_first(lambda: write_json(target.scores, {**scores, **more}))
        if scores_only or not session.setup.generates:
            return scores
        about = {"precision": session.recipe.precision}
        with spent.on("answers"):
            answered = answer_split(task, asked, target.answers, about, question_scores, ranks, session.say)
        if asked.cascade:
            more["without_earlier_answers"] = answered.lacking
            if answered.lacking:
                session.say(
                    f"{answered.lacking} of {len(answered.predictions)} questions were asked without findings: they "
                    "are of a later stage, and their image has no question of an earlier one"
                )
        with spent.on("metrics"):
            ranks.from_first(lambda: _measured(answered.predictions, target.answers, session.say, more, notes))
    return scores


def _measured(
    predictions: Sequence[Prediction],
    folder: Path,
    say: Say,
    more: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """All metrics of answers, beside them and in words; `notes` says what they are not of."""
    from sameday.evaluate.measure import measure
    from sameday.evaluate.predictions import METRICS, write_json
    from sameday.evaluate.words import told

    metrics = measure(predictions)
    metrics["notes"] = [*notes, *metrics["notes"]]
    write_json(folder / METRICS, metrics | dict(more or {}))
    say(f"answers in {folder}:")
    for line in told(metrics):
        say(f"  {line}")


def which_words(asked: str, folder: Path, recipe: Recipe) -> str:
    """Which checkpoint `last` or `best` is, and why no newer one."""
    if asked == BEST:
        by = "loss" if recipe.best is None else recipe.best.metric
        return f"--checkpoint {asked} is {folder.name}, by its validation {by}"
    from sameday.record import checkpoint

    behind = []
    for _, path in reversed(checkpoint.steps(folder.parent)):
        if path == folder:
            break
        if (why := checkpoint.fault(path)) is not None:
            behind.append(f"{path.name} is left aside: {why}")
    return "; ".join([f"--checkpoint {asked} is {folder.name}", *behind])


def _line(scores: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in scores.items())


# What was asked for


def read_request(asked: Request) -> tuple[RunFolder | None, Specs]:
    """The run, if it is one, and what it or the recipe names."""
    refuse(_contradictions(asked))
    if asked.what.is_dir():
        run = RunFolder.read(asked.what)
        recipe, home = run.recipe, run.recipe_dir
    elif not asked.what.exists():
        raise BadInput(f"{asked.what}: there is no such run folder or recipe")
    else:
        specs = Specs.from_files(asked.what, asked.plan, asked.sets)
        if asked.adapter is not None or asked.base:
            return None, specs
        path = default_path(specs.recipe)
        if not (path / "recipe.yaml").is_file():
            raise BadInput(
                f"{asked.what}: has not been trained: there is no {path}; --base evaluates its base model, --adapter "
                "DIR an adapter of it, and a run elsewhere is named by its folder"
            )
        run = RunFolder.read(path)
        recipe, home = specs.recipe, specs.home  # of one fingerprint, and how to evaluate may be newer
    if asked.plan is not None:
        with all_of_a_plan(home):
            plan = load_plan(asked.plan, recipe=recipe)
    else:
        plan = setup_of(recipe, home).for_evaluation(run.plan)
        cores = len(os.sched_getaffinity(0))  # the machine that trained may have had more
        plan = plan.model_copy(update={"workers": min(plan.workers, cores)})
    own, plan_sets = split_sets(asked.sets)
    refuse(f"--set {each}: {run.path} was trained by its recipe; only plan.KEY may be set" for each in own)
    with all_of_a_plan(home):
        set_ = load_plan(None, plan_sets, recipe)
    fields = {each.partition("=")[0].split(".")[1].strip() for each in plan_sets}
    return run, Specs(recipe, home, plan.model_copy(update={name: getattr(set_, name) for name in fields}))


def _contradictions(asked: Request) -> list[str]:
    problems = []
    if asked.adapter is not None and asked.base:
        problems.append("--adapter and --base: one of them")
    if asked.checkpoint is not None and (asked.adapter is not None or asked.base):
        problems.append(f"--checkpoint {asked.checkpoint} is of a run; --adapter and --base are other weights")
    if asked.checkpoint is not None and not asked.what.is_dir():
        problems.append(f"--checkpoint {asked.checkpoint} is of a run, and {asked.what} is not a folder")
    if asked.scores_only and (asked.cascade or asked.max_new_tokens is not None):
        problems.append("--scores-only generates no answers, so that --cascade and --max-new-tokens mean nothing")
    return problems


def _evaluation(asked: Request, setup: TaskSetup) -> Evaluation:
    """The recipe's values with those that were typed. BadInput where the task cannot."""
    given = getattr(setup.recipe, "evaluate", None) or Evaluation()
    typed = {"split": asked.split, "cascade": asked.cascade, "max_new_tokens": asked.max_new_tokens}
    changes = {name: value for name, value in typed.items() if value is not None}
    try:
        evaluation = Evaluation.model_validate(given.model_dump() | changes)
    except ValidationError as error:
        wrong = [f"{each['loc'][0]} is {each['input']!r}: {each['msg']}" for each in error.errors()]
        raise BadInput("\n".join(wrong)) from None
    problems, task = [], setup.recipe.task
    if not setup.generates and changes.keys() - {"split"}:
        problems.append(f"task {task} generates no answers, so that --cascade and --max-new-tokens mean nothing")
    if asked.base and not setup.has_base:
        problems.append(f"--base: task {task} starts from random weights, and has no base model to evaluate")
    lacking = setup.lacks(evaluation.split)
    if lacking is not None:
        problems.append(f"{asked.what}: {lacking}")
    refuse(problems)
    return evaluation


def _target(
    asked: Request, run: RunFolder | None, setup: TaskSetup, folder: Path | None, evaluation: Evaluation
) -> Target:
    weights = "base" if asked.base else _adapter_name(asked.adapter) if asked.adapter is not None else ""
    split = evaluation.split
    if folder is not None and run is not None:
        scores = f"eval-{split}.json" if asked.checkpoint is None else f"scores-{folder.name}-{split}.json"
        usual = Target(str(folder), run.path / scores, _answers(run.path, folder, evaluation))
    elif run is not None:
        usual = Target(weights, run.path / f"scores-{weights}-{split}.json", _answers(run.path, weights, evaluation))
    else:
        path = Path("runs") / f"{setup.recipe.name}-{setup.recipe.fingerprint}-{_named(weights, evaluation)}"
        usual = Target(weights, path / "scores.json", path)
    return usual if asked.out is None else Target(usual.weights, asked.out / "scores.json", asked.out)


def _answers(run: Path, weights: Path | str, evaluation: Evaluation) -> Path:
    return run / "answers" / _named(weights if isinstance(weights, str) else weights.name, evaluation)


def _named(weights: str, evaluation: Evaluation) -> str:
    return f"{weights}-{evaluation.split}{'-cascade' if evaluation.cascade else ''}"


def _adapter_name(folder: Path) -> str:
    """A folder that a run made is named by its run too: all of them are called alike."""
    folder = folder.resolve()
    ours = re.fullmatch(r"adapter|step-\d+", folder.name) is not None
    name = f"{run_of(folder).name}-{folder.name}" if ours else folder.name
    return "adapter-" + re.sub(r"[^A-Za-z0-9._-]", "_", name)


def weights_of(run: RunFolder, which: str | None, to_be: str = "evaluated") -> Path:
    """The folder of a run's finished weights, or of a checkpoint: `last`, `best` or `step-N`. Whole, or BadInput, which
    says what they cannot be: `to_be` is the command's word."""
    from sameday.record import checkpoint

    kept = {step: path for step, path in checkpoint.steps(run.checkpoints)}
    listed = f"there are {', '.join(path.name for path in kept.values())}" if kept else "it has none yet"
    if not kept and (stages := stage_folders(run.path)):
        listed = f"it is a run in stages, which have checkpoints of their own; the last that was begun is {stages[-1]}"
    number = re.fullmatch(r"step-(\d+)", which or "")
    if which is None:
        folder: Path | None = run.result
        if not run.result.is_dir():
            raise BadInput(
                f"{run.path}: the run is not finished: it has no {run.result.name}/ yet; --checkpoint last, best or "
                f"step-N takes one of its checkpoints: {listed}"
            )
    elif which == LAST:
        folder = next((path for path in reversed(kept.values()) if checkpoint.fault(path) is None), None)
    elif which == BEST:
        folder = kept.get(checkpoint.best_step(run.checkpoints) or -1)
    elif number is not None:
        folder = kept.get(int(number[1]))
    else:
        raise BadInput(f"--checkpoint {which}: must be last, best or step-N; {listed}")
    if folder is None:
        raise BadInput(f"{run.path}: has no such checkpoint as {which}; {listed}")
    why = checkpoint.fault(folder)
    if why is not None:
        mend = "; the command that trained it writes it again from its last checkpoint" if folder == run.result else ""
        raise BadInput(f"{folder}: cannot be {to_be}: {why}{mend}")
    return folder
