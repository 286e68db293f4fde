"""`sameday train`, `eval` and `cache`: from files to a running loop, in an order in which bad input is found before a
model is loaded."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sameday.data.problems import Problem, grouped
from sameday.spec.errors import BadInput, CompileFailed, RunStopped
from sameday.spec.recipe import differences
from sameday.spec.record import RunFolder, as_begun, default_path
from sameday.spec.words import first_names, tell
from sameday.tasks.base import TRAINING, Caching, Task, checked_finite
from sameday.tasks.registry import setup_of
from sameday.train.session import ASKED_FOR, Session, Specs
from sameday.train.stages import evaluate_stages, own_models

if TYPE_CHECKING:
    from sameday.hardware.ranks import Ranks


def train_from_files(
    recipe_path: Path,
    plan_path: Path | None,
    out: Path | None,
    sets: Sequence[str],
    stop_after: int | None = None,
) -> dict[str, float]:
    """`sameday train`: starts a run, or goes on with it where its folder is there."""
    specs = Specs.from_files(recipe_path, plan_path, sets)
    if specs.recipe.stage_recipes():
        from sameday.train.stages import train_stages

        return train_stages(specs, out, stop_after)
    return train_from_specs(specs, out, stop_after)


def train_from_specs(
    specs: Specs, out: Path | None, stop_after: int | None = None, group: Ranks | None = None
) -> dict[str, float]:
    """A `group` of ranks was joined before for all stages of a run, of which this is one."""
    asked_for, specs = specs.recipe, replace(specs, recipe=as_begun(specs.recipe, out))
    with closing(Session.start(specs, tell, join=True, splits=TRAINING, group=group)) as session:
        from sameday.train.loop import train
        from sameday.train.outlook import check_cpu

        ranks, opened = session.ranks, list[RunFolder]()
        for line in differences(specs.recipe, asked_for):
            session.say(
                f"recipe.{line}: an earlier release began this run, and it goes on as it began; to begin anew, write "
                "the field into the recipe"
            )
        path = out or ranks.from_first(lambda: default_path(session.recipe))
        try:
            # Whatever can be wrong is found before anything is written.
            ranks.from_first(lambda: check_batch(session, whole=group is None))
            splits = ranks.from_first(lambda: session.setup.drop_too_long(session.audited.splits))
            ranks.from_first(lambda: check_cpu(session, splits, stop_after))
            for choice in session.choices():
                session.say(choice)
            asked = (path, session.recipe, session.plan, session.home)
            ranks.from_first(lambda: opened.append(RunFolder.open(*asked)))
            run = opened[0] if opened else RunFolder(*asked)
            if ranks.first:
                _announce(session, run)
            ranks.wait()
            task = session.load(splits=splits)
            if ranks.first:
                _tell_loaded(session, run, task)
            plan = session.resolved.plan
            try:
                return train(session.recipe, plan, task, run, ranks, stop_after)
            except CompileFailed as failed:
                # What was asked for must work, and of several ranks one may have failed alone.
                if session.reasons.get("compile", ASKED_FOR) == ASKED_FOR or ranks.size > 1:
                    raise
                session.say(f"compile: none from here on, because {failed}")
            del task
            plan = plan.model_copy(update={"compile": "none"})
            return train(session.recipe, plan, session.load(plan, splits), run, ranks, stop_after)
        except RunStopped as stop:
            # All ranks stop together and with the same words: the first one says them.
            if not ranks.first:
                if stop.alone:
                    tell(stop, sys.stderr)
                sys.exit(stop.code)
            for folder in opened:
                folder.stopped(str(stop), stop.code)
            raise
        except BadInput:
            for folder in opened:
                folder.discard()  # what only the model's weights could show
            raise
        finally:
            for folder in opened:
                folder.close()


def check_batch(session: Session, whole: bool = True) -> None:
    """Steps of fewer samples than the recipe says would be another recipe's. A stage, which is not the `whole` run, may
    have few samples, and is told of."""
    recipe, there = session.recipe, session.audited.sizes["train"]
    if recipe.effective_batch > there and not whole:
        session.say(
            f"few {recipe.sample}s: each step has {there}, fewer than recipe.effective_batch {recipe.effective_batch}"
        )
    elif recipe.effective_batch > there:
        limit = getattr(getattr(recipe, "data", None), "limit", None)
        more = "" if limit is None else f", or more than recipe.data.limit {limit} leaves"
        raise BadInput(
            f"recipe.effective_batch is {recipe.effective_batch}, and there are {there} {recipe.sample}s to train on, "
            f"so that no step could have as many; allowed: 1 to {there}{more}"
        )


def _announce(session: Session, run: RunFolder) -> None:
    recipe, audited = session.recipe, session.audited
    session.say(f"{recipe.name} {recipe.fingerprint} in {run.path}: {audited.sizes['train']} {recipe.sample}s")
    if not run.begun:
        return
    run.write_json("skipped.json", [asdict(each) for each in audited.left_out])
    if audited.left_out:
        session.say("what was left out is recorded in skipped.json")
    resolved = {name: f"{value}: {why}" for name, (value, why) in session.resolved.values.items()}
    run.write_json("choices.json", {**session.reasons, **resolved})


def _tell_loaded(session: Session, run: RunFolder, task: Task) -> None:
    if task.left_out:
        listed, _ = grouped([Problem(each.where, each.what) for each in task.left_out])
        session.say("\n".join(["left out, and recorded in skipped.json:", *listed]))
        if run.begun:
            run.write_json("skipped.json", [asdict(each) for each in [*session.audited.left_out, *task.left_out]])
    for note in task.notes:
        session.say(note)


def evaluate_run(path: Path, split: str, which: str | None = None, group: Ranks | None = None) -> dict[str, float]:
    """`sameday eval`: a run's finished weights, or `which` of its checkpoints, also while it goes on, on one split of
    its recipe's data. Ranks share the work; the first one says and records the scores."""
    if own := own_models(path):
        return evaluate_stages(path, own, split, lambda folder, ranks: evaluate_run(folder, split, which, ranks))
    run = RunFolder.read(path)
    setup = setup_of(run.recipe, run.recipe_dir)
    lacking = setup.lacks(split)
    if lacking is not None:
        raise BadInput(f"{path}: {lacking}")
    folder = weights_of(run, which)  # bad weights are found before a model is loaded
    plan = setup.for_evaluation(run.plan)
    cores = len(os.sched_getaffinity(0))  # the machine that trained may have had more
    plan = plan.model_copy(update={"workers": min(plan.workers, cores)})
    specs = Specs(setup.recipe_for_evaluation(), run.recipe_dir, plan)
    with closing(Session.start(specs, tell, join=True, splits=(split,), group=group)) as session:
        task, ranks = session.load(), session.ranks
        if which is not None:
            # Asked again: a run that goes on may have removed the checkpoint since, or written a newer one.
            folder = ranks.from_first(lambda: weights_of(run, which))
        task.restore(folder)
        bad = [name for name, parameter in task.trained().items() if not parameter.isfinite().all()]
        if bad:
            raise BadInput(f"{folder}: holds weights that are not finite: {first_names(bad, 3)}")
        scores = checked_finite(task.evaluate(split, ranks), f"{folder}: {split}")
        if ranks.first:
            run.write_json(f"eval-{split}.json" if which is None else f"scores-{folder.name}-{split}.json", scores)
        session.say("  ".join(f"{name} {value:.4g}" for name, value in scores.items()))
    return scores


def weights_of(run: RunFolder, which: str | None) -> Path:
    """The folder of a run's finished weights, or of a checkpoint: `last`, `best` or `step-N`. Whole, or BadInput."""
    from sameday.train import checkpoint

    kept = {step: path for step, path in checkpoint.steps(run.checkpoints)}
    listed = f"there are {', '.join(path.name for path in kept.values())}" if kept else "it has none yet"
    number = re.fullmatch(r"step-(\d+)", which or "")
    if which is None:
        folder: Path | None = run.result
        if not run.result.is_dir():
            raise BadInput(
                f"{run.path}: the run is not finished: it has no {run.result.name}/ yet; --checkpoint last, best or "
                f"step-N takes one of its checkpoints: {listed}"
            )
    elif which == "last":
        folder = next((path for path in reversed(kept.values()) if checkpoint.fault(path) is None), None)
    elif which == "best":
        folder = kept.get(checkpoint.best_step(run.checkpoints) or -1)
    elif number is not None:
        folder = kept.get(int(number[1]))
    else:
        raise BadInput(f"--checkpoint {which}: must be last, best or step-N; {listed}")
    if folder is None:
        raise BadInput(f"{run.path}: has no such checkpoint as {which}; {listed}")
    why = checkpoint.fault(folder)
    if why is not None:
        raise BadInput(f"{folder}: cannot be evaluated: {why}")
    return folder


def cache_from_files(recipe_path: Path, plan_path: Path | None, sets: Sequence[str], asked: Caching) -> bool:
    """`sameday cache`: what a run's images become, made ahead of it."""
    specs = Specs.from_files(recipe_path, plan_path, sets)
    if asked.kind == "pixels" and not asked.measure:
        specs = replace(specs, automatic=False)  # no step is computed, and all cores may decode
    with closing(Session.start(specs, tell, splits=(*TRAINING, "test"))) as session:
        return session.setup.fill_cache(session, asked)
