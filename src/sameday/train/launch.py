"""`sameday train`, `eval` and `cache`: from files to a running loop, in an order in which bad input is found before a
model is loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

from sameday.spec.errors import BadInput, RunStopped
from sameday.spec.recipe import differences
from sameday.spec.record import RunFolder, as_begun, default_path
from sameday.spec.words import tell
from sameday.tasks.base import TRAINING, Caching, Task
from sameday.tasks.registry import setup_of
from sameday.train.session import Session, Specs


def train_from_files(
    recipe_path: Path,
    plan_path: Path | None,
    out: Path | None,
    sets: Sequence[str],
    stop_after: int | None = None,
) -> dict[str, float]:
    """`sameday train`: starts a run, or goes on with it where its folder is there."""
    specs = Specs.from_files(recipe_path, plan_path, sets)
    asked_for, specs = specs.recipe, replace(specs, recipe=as_begun(specs.recipe, out))
    with closing(Session.start(specs, tell, join=True, splits=TRAINING)) as session:
        from sameday.train.loop import train

        ranks, opened = session.ranks, list[RunFolder]()
        for line in differences(specs.recipe, asked_for):
            session.say(
                f"recipe.{line}: an earlier release began this run, and it goes on as it began; to begin anew, write "
                "the field into the recipe"
            )
        path = out or ranks.from_first(lambda: default_path(session.recipe))
        try:
            for choice in session.choices():
                session.say(choice)
            asked = (path, session.recipe, session.plan, session.home)
            ranks.from_first(lambda: opened.append(RunFolder.open(*asked)))
            run = opened[0] if opened else RunFolder(*asked)
            if ranks.first:
                _announce(session, run)
            ranks.wait()
            task = session.load()
            if ranks.first:
                _tell_loaded(session, run, task)
            return train(session.recipe, session.resolved.plan, task, run, ranks, stop_after)
        except RunStopped as stop:
            # All ranks stop together and with the same words: the first one says them.
            if not ranks.first:
                if stop.alone:
                    tell(stop, sys.stderr)
                sys.exit(stop.code)
            for folder in opened:
                folder.stopped(str(stop), stop.code)
            raise
        finally:
            for folder in opened:
                folder.close()


def _announce(session: Session, run: RunFolder) -> None:
    recipe, audited = session.recipe, session.audited
    session.say(f"{recipe.name} {recipe.fingerprint} in {run.path}: {audited.sizes['train']} {recipe.sample}s")
    run.write_json("skipped.json", [asdict(each) for each in audited.left_out])
    if audited.left_out:
        session.say("what was left out is recorded in skipped.json")
    resolved = {name: f"{value}: {why}" for name, (value, why) in session.resolved.values.items()}
    run.write_json("choices.json", {**session.reasons, **resolved})


def _tell_loaded(session: Session, run: RunFolder, task: Task) -> None:
    if task.left_out:
        listed = "\n".join(f"{each.where}: {each.what}" for each in task.left_out)
        session.say(f"left out, and recorded in skipped.json:\n{listed}")
        run.write_json("skipped.json", [asdict(each) for each in [*session.audited.left_out, *task.left_out]])
    for note in task.notes:
        session.say(note)


def evaluate_run(path: Path, split: str) -> dict[str, float]:
    """`sameday eval`: the finished weights of a run, on one split of its recipe's data."""
    run = RunFolder.read(path)
    setup = setup_of(run.recipe, run.recipe_dir)
    lacking = setup.lacks(split)
    if lacking is not None:
        raise BadInput(f"{path}: {lacking}")
    if not run.result.is_dir():
        raise BadInput(f"{path}: the run is not finished: it has no {run.result.name}/ yet")
    plan = setup.for_evaluation(run.plan)
    cores = len(os.sched_getaffinity(0))  # the machine that trained may have had more
    specs = Specs(run.recipe, run.recipe_dir, plan.model_copy(update={"workers": min(plan.workers, cores)}))
    with closing(Session.start(specs, tell, splits=(split,))) as session:
        task = session.load()
        task.restore(run.result)
        scores = task.evaluate(split, session.ranks)
    run.write_json(f"eval-{split}.json", scores)
    return scores


def cache_from_files(recipe_path: Path, plan_path: Path | None, sets: Sequence[str], asked: Caching) -> bool:
    """`sameday cache`: what a run's images become, made ahead of it."""
    specs = Specs.from_files(recipe_path, plan_path, sets)
    if asked.kind == "pixels" and not asked.measure:
        specs = replace(specs, automatic=False)  # no step is computed, and all cores may decode
    with closing(Session.start(specs, tell, splits=(*TRAINING, "test"))) as session:
        return session.setup.fill_cache(session, asked)
