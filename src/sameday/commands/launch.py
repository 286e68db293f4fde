"""`sameday train` and `cache`: from files to a running loop, in an order in which bad input is found before a
model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sameday.commands.batch import check_batch
from sameday.commands.changed import refuse_changed
from sameday.commands.evaluate import evaluate_result
from sameday.commands.final import check_evaluation, splits_of
from sameday.commands.hints import say_hints
from sameday.commands.session import ASKED_FOR, Session, Specs, left_to_first, note_stop
from sameday.data.problems import Problem, grouped
from sameday.hardware.signals import AskedToStop, nothing_left_to_stop, stopped_early
from sameday.record import checkpoint
from sameday.record.folder import RunFolder, as_begun, default_path, refuse_other_recipe
from sameday.record.images import note_images
from sameday.spec.errors import BadInput, CompileFailed, RunStopped
from sameday.spec.evaluation import Evaluation
from sameday.spec.plan import Plan
from sameday.spec.recipe import differences
from sameday.spec.words import count, tell
from sameday.tasks.base import Task
from sameday.tasks.setup import TRAINING, Caching

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
    if specs.plan.track != "none":
        from sameday.record.track import check_tracker

        check_tracker(specs.plan)
    if specs.recipe.stage_recipes():
        from sameday.commands.stages import train_stages

        return train_stages(specs, out, stop_after)
    return train_from_specs(specs, out, stop_after)


PLAIN = {"lora_kernel": ("triton", "plain"), "attention": ("fused", "split")}
"""Plan fields with Triton kernels of our own, and what computes the same without."""


def train_from_specs(
    specs: Specs, out: Path | None, stop_after: int | None = None, group: Ranks | None = None
) -> dict[str, float]:
    """A `group` of ranks was joined before for all stages of a run, of which this is one."""
    asked_for, specs = specs.recipe, replace(specs, recipe=as_begun(specs.recipe, out))
    evaluation: Evaluation | None = getattr(specs.recipe, "evaluate", None)
    needed = splits_of(specs, evaluation)
    with closing(Session.start(specs, tell, join=True, splits=needed, group=group)) as session:
        from sameday.commands.outlook import check_cpu
        from sameday.train.loop import train

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
            if evaluation is not None:
                ranks.from_first(lambda: check_evaluation(evaluation, session.setup, session.audited))
            splits = ranks.from_first(lambda: session.setup.drop_too_long(session.audited.splits))
            ranks.from_first(lambda: _check_data(session, path, splits))
            ranks.from_first(lambda: say_hints(session, splits))
            ranks.from_first(lambda: check_cpu(session, splits, stop_after))
            for choice in session.choices():
                session.say(choice)
            asked = (path, session.recipe, session.plan, session.home)
            ranks.from_first(lambda: opened.append(RunFolder.open(*asked)))
            run = opened[0] if opened else RunFolder(*asked)
            ranks.from_first(lambda: _announce(session, run))
            task, run.spent = session.load(splits=splits), session.spent
            ranks.from_first(lambda: _tell_loaded(session, run, task))
            plan = session.resolved.plan
            try:
                scores = train(session.recipe, plan, task, run, ranks, stop_after)
            except CompileFailed as failed:
                # What was asked for must work, and of several ranks one may have failed alone.
                if session.reasons.get("compile", ASKED_FOR) == ASKED_FOR or ranks.size > 1:
                    raise
                session.say(f"compile: none from here on, because {failed}")
                del task
                plan = plan.model_copy(update={"compile": "none"} | _without_triton(session, plan))
                task = session.load(plan, splits)
                scores = train(session.recipe, plan, task, run, ranks, stop_after)
            if evaluation is not None:
                task.let_go()  # answers may need the memory
                evaluate_result(session, task, run, evaluation)
            if group is None:
                nothing_left_to_stop()
            return scores
        except RunStopped as stop:
            note_stop(stop, ranks, opened)
            raise
        except AskedToStop:
            note_stop(early := stopped_early(), ranks, opened)
            raise early from None
        except BadInput as error:
            for folder in opened:
                folder.discard()  # what only the model's weights could show
            left_to_first(error, ranks)
            raise
        finally:
            for folder in opened:
                folder.close()


def _without_triton(session: Session, plan: Plan) -> dict[str, str]:
    """Of kernels that were chosen for the machine the ones that need no Triton: it may be what failed."""
    asked = {name for name in PLAIN if session.reasons.get(name, ASKED_FOR) == ASKED_FOR} - set(session.resolved.why)
    instead = {name: to for name, (kernel, to) in PLAIN.items() if getattr(plan, name) == kernel and name not in asked}
    for name, to in instead.items():
        session.say(f"{name}: {to} from here on, because it may be Triton that failed")
    return instead


def _check_data(session: Session, path: Path, splits: Any) -> None:
    """What can only be compared with a loaded model is compared when the run goes on."""
    if (known := checkpoint.newest_digests(path / "checkpoints")) is not None:
        refuse_other_recipe(path, session.recipe)
        record, digests = known
        files, began = session.setup.data_files(splits), f"{record.parent.name} was saved"
        refuse_changed(path, digests, session.setup.data_digests(splits), files, record, began)


def _announce(session: Session, run: RunFolder) -> None:
    recipe, audited = session.recipe, session.audited
    session.say(f"{recipe.name} {recipe.fingerprint} in {run.path}: {count(audited.sizes['train'], recipe.sample)}")
    if not run.begun:
        return
    run.write_json("skipped.json", [asdict(each) for each in audited.left_out])
    if audited.counts:
        run.write_json("data.json", audited.counts)
    if images := session.setup.image_contents(audited.splits):
        note_images(run, images, session.setup.starts_from())
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


def cache_from_files(recipe_path: Path, plan_path: Path | None, sets: Sequence[str], asked: Caching) -> bool:
    """`sameday cache`: what a run's images become, made ahead of it."""
    specs = Specs.from_files(recipe_path, plan_path, sets)
    if asked.kind == "pixels" and not asked.measure:
        specs = replace(specs, automatic=False)  # no step is computed, and all cores may decode
    with closing(Session.start(specs, tell, splits=(*TRAINING, "test"))) as session:
        if asked.times_steps:
            check_batch(session, whole=not specs.recipe.stage_recipes())
        if asked.loads_model:
            from sameday.commands.outlook import check_steps

            check_steps(session, session.audited.splits, 0, trains=asked.times_steps)
        return session.setup.fill_cache(session, asked)
