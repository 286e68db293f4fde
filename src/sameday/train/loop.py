"""The training loop: one page over (recipe, plan, task, run folder), for any task and any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from functools import partial

from sameday.hardware.compiling import in_words
from sameday.hardware.phases import Clock, during
from sameday.hardware.ranks import Ranks
from sameday.hardware.signals import AskedToStop, StopRequest
from sameday.record import checkpoint
from sameday.record.folder import RunFolder
from sameday.spec.errors import (
    EXIT_BAD_INPUT,
    EXIT_DIVERGED,
    EXIT_STOPPED,
    SAID,
    BadInput,
    EvaluationGivenUp,
    FailedElsewhere,
    RunStopped,
)
from sameday.spec.plan import Plan
from sameday.spec.recipe import Best, Recipe
from sameday.spec.words import first_names
from sameday.tasks.base import Task, checked_finite, lower_budget, total_steps
from sameday.tasks.warm_up import warm_up
from sameday.train.cadence import Cadence
from sameday.train.optim import learning_rate
from sameday.train.state import LoopState, begin_unless_finished, finish_run, restore, save
from sameday.train.steps import Diverged, Failed, GivenUp, Good, OutOfMemory, Steps
from sameday.train.watch import Watch


def train(
    recipe: Recipe, plan: Plan, task: Task, run: RunFolder, ranks: Ranks, stop_after: int | None = None
) -> dict[str, float]:
    """Train to the end, or raise RunStopped with the code that says why. Returns the last scores. `stop_after`
    ends this process at that step, saved, as a signal would; one that a signal ends in the middle is done again."""
    total = total_steps(recipe, task)
    best_every = None if recipe.best is None else recipe.best.every
    cadence = Cadence(total, task.epoch_ends(total), plan.save_steps, plan.eval_steps, stop_after, best_every)
    with (
        StopRequest() as stop,
        _watch(run if ranks.first else None, total, plan, task) as watch,
        closing(Steps(recipe, plan, task, ranks, lambda: stop.asked)) as steps,
    ):
        state = _resumed(recipe, task, run, ranks, steps, watch, cadence)
        if (before := ranks.from_first(lambda: begin_unless_finished(run, state, total, watch.say))) is not None:
            watch.say(f"finished already: all {total} steps are done, and the weights are in {run.result}")
            return checked_finite(before, f"{run.path}: validation")
        keep = partial(_kept, watch, ranks, state, lambda: save(recipe, plan, run, task, steps, state))
        validate = partial(_validated, recipe, run, task, ranks, state, watch, cadence, keep)
        task.stop_asked = lambda: stop.asked
        run.spent |= _warmed(task, ranks, steps, state, total, watch, stop)
        scores, asked = validate() if cadence.due(state.step).validate and state.validated < state.step else {}, False
        watch.starts(state.step, ranks.size)
        steps.open(range(state.step, total), state.budget)
        while state.step < total:
            at = state.step + steps.pending
            due = cadence.due(at + 1)
            timed = Clock(task.device) if (at + 1) % plan.log_steps == 0 else None
            steps.launch(at, learning_rate(recipe, at, total), lambda: stop.asked or due.stop, timed)  # noqa: B023
            settle = any(due) or asked or (stop.asked and ranks.size == 1)
            for outcome in steps.finish(keep=0 if settle else steps.ahead):
                match outcome:
                    case Good():
                        state.step, asked = outcome.step + 1, asked or outcome.stop
                        with during("log"):
                            watch.step(outcome)
                    case GivenUp():
                        asked = True
                    case Failed(error):
                        raise _saved_before(error, ranks, state.step, keep)
                    # Asked to stop in a step that was good, a run does not try again one that was not.
                    case Diverged() if not asked:
                        raise RunStopped(_diverged(task, run, steps, outcome, ranks), EXIT_DIVERGED)
                    case OutOfMemory() if not asked:
                        less = lower_budget(recipe.sample, task, outcome.step, state.budget, ranks, watch.say)
                        steps.open(range(state.step, total), state.lower(task, less))
            if steps.pending or (state.step <= at and not asked):
                continue
            best = state.best
            if due.validate and state.step > at:
                scores = validate()
            if due.save or asked or state.best is not best:
                keep()
            if asked and state.step < total:
                raise _stopped(state.step, total)
            steps.restart_timing()
        if not scores:  # a run killed between its last checkpoint and its end
            scores = task.evaluate("val", ranks, state.budget)
        scores = _finished(watch, ranks, state, lambda: finish_run(plan, run, task, scores, state, watch.say))
        return checked_finite(scores, f"{run.path}: validation")


def _watch(run: RunFolder | None, total: int, plan: Plan, task: Task) -> Watch:
    return Watch(run, total, plan.log_steps, task.device, partial(_names, task), plan.track)


def _warmed(
    task: Task, ranks: Ranks, steps: Steps, state: LoopState, total: int, watch: Watch, stop: StopRequest
) -> dict[str, float]:
    try:
        coming = range(state.step, total)
        return warm_up(task, coming, state.budget, ranks, steps.warm_up, watch, stop.at_once)
    except AskedToStop:
        raise _stopped(state.step, total) from None
    except BadInput as error:
        raise _bad_input(error, state.step) from None


def _names(task: Task, step: int) -> list[str]:
    return task.names(task.step_ids(step))


def _kept(watch: Watch, ranks: Ranks, state: LoopState, save_state: Callable[[], None]) -> None:
    before = state.saved
    with watch.timed("save", state.step, lambda: state.saved != before):
        ranks.from_first(save_state)


def _finished(watch: Watch, ranks: Ranks, state: LoopState, finish: Callable[[], dict[str, float]]) -> dict[str, float]:
    with watch.timed("finish", state.step):
        return ranks.from_first(finish)


def _stopped(step: int, total: int) -> RunStopped:
    saved = f"step {step} of {total} is saved; run again to go on"
    nothing = "no step was done yet, so that there is nothing to save; run again to begin"
    return RunStopped(f"asked to stop: {saved if step else nothing}", EXIT_STOPPED)


def _not_finite(task: Task, scores: dict[str, float]) -> list[str]:
    """Weights that a step has spoiled; looked for where a validation score is not finite."""
    if all(map(math.isfinite, scores.values())):
        return []
    return [name for name, parameter in task.trained().items() if not parameter.isfinite().all()]


def _validated(
    recipe: Recipe,
    run: RunFolder,
    task: Task,
    ranks: Ranks,
    state: LoopState,
    watch: Watch,
    cadence: Cadence,
    keep: Callable[[], None],
) -> dict[str, float]:
    """Scores of the validation data, empty where there is none; said, and compared with the best. An evaluation that
    fails or is given up loses no training: the steps done are saved, and it comes first when the run goes on."""
    try:
        with watch.timed("validate", state.step):
            scores = task.evaluate("val", ranks, state.budget)
    except EvaluationGivenUp:
        keep()
        raise _stopped(state.step, cadence.total) from None
    except Exception as error:
        raise _saved_before(task.evaluation_error(in_words(error)), ranks, state.step, keep) from None
    if bad := _not_finite(task, scores):
        raise RunStopped(
            f"step {state.step}: {first_names(bad, 3)} not finite after it, though its loss was. It is not saved. "
            f"{_ways_out(task, run)}",
            EXIT_DIVERGED,
        )
    watch.evaluation(state.step, "val", scores)
    state.compare(scores if cadence.due(state.step).compare else {}, recipe.best or Best())
    state.validated = state.step
    return scores


def _saved_before(error: Exception, ranks: Ranks, step: int, keep: Callable[[], None]) -> Exception:
    """The error, once the steps done are saved, where it is a sentence that all ranks have. What a rank meets alone the
    others do not know of: they wait for its sum, and could not save with it."""
    if not isinstance(error, SAID) or isinstance(error, FailedElsewhere) or (error.alone and ranks.size > 1):
        return error
    keep()
    return _bad_input(error, step) if isinstance(error, BadInput) else error


def _bad_input(error: BadInput, step: int) -> RunStopped:
    """In a run that has begun, of which so many steps are saved: an image that went away, for one."""
    saved = f"step {step} is saved, and the same command goes on from there"
    nothing = "no step was done yet, and the same command begins again"
    return RunStopped(f"{error}; {saved if step else nothing}", EXIT_BAD_INPUT)


def _resumed(
    recipe: Recipe, task: Task, run: RunFolder, ranks: Ranks, steps: Steps, watch: Watch, cadence: Cadence
) -> LoopState:
    state = restore(recipe, task, run, steps, watch.say)
    each = ranks.gather(state.step)
    if len(set(each)) > 1:
        raise BadInput(f"{run.path}: each rank needs the same folder; they find checkpoints {each}")
    if cadence.stop_after is not None and cadence.stop_after <= state.step < cadence.total:
        already = f"step {state.step} of {cadence.total} is done already; run again without --stop-after"
        raise RunStopped(already, EXIT_STOPPED)
    return state


def _diverged(task: Task, run: RunFolder, steps: Steps, outcome: Diverged, ranks: Ranks) -> str:
    """Which samples are to blame. One that is not finite may spoil others of its micro-batch, so each is computed by
    itself."""
    step, mine = outcome.step, []
    for batch in task.batches(step, 1, ranks):
        batch = batch.to(task.device)
        steps.gradients.zero()
        total, each = task.loss_sum(batch, step)
        if total.requires_grad:
            total.backward()
        # Zero times a norm that is not finite is NaN: a bad gradient of a finite loss is found too.
        mine += task.culprits(batch, each + 0 * steps.gradients.norm())
    named = sorted({name for part in ranks.gather(mine) for name in part})
    whole = f"in the step of {first_names(_names(task, step))}"
    who = f"not finite at {first_names(named)}" if named else whole
    return f"step {step + 1}: {outcome}, {who}. The weights were not touched. {_ways_out(task, run)}"


def _ways_out(task: Task, run: RunFolder) -> str:
    """What can be gone back to, looked at and not assumed, and with which change: the same run would come to the same
    step again."""
    path, broken = checkpoint.usable(run.checkpoints)
    seen, along = broken, ""
    if path is not None:
        seen = [*broken, f"{path.name} is whole and finite"]
        start = task.start_from(path)
        along = f"; --set {start} begins it with the weights of {path.name}" if start else ""
    changes = f"--set recipe.learning_rate={run.recipe.learning_rate / 2:g}"
    if run.recipe.precision != "float32":
        changes += " or --set recipe.precision=float32"
    return (
        f"Checkpoints: {'; '.join(seen) or 'none yet'}. The same command would fail here again: mend or remove a "
        f"sample that is to blame, or try {changes}; either is a run of its own, with another --out{along}."
    )
