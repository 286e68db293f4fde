"""The training loop: one page over (recipe, plan, task, run folder), for any task and any number of ranks."""

from __future__ import annotations

from contextlib import closing

from sameday.hardware.phases import Clock, during
from sameday.hardware.ranks import Ranks
from sameday.hardware.signals import StopRequest
from sameday.spec.errors import EXIT_DIVERGED, EXIT_STOPPED, BadInput, RunStopped
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.spec.record import RunFolder
from sameday.spec.words import first_names
from sameday.tasks.base import Task, lower_budget, total_steps
from sameday.train import checkpoint
from sameday.train.cadence import Cadence
from sameday.train.optim import learning_rate
from sameday.train.state import LoopState, finish_run, restore, save
from sameday.train.steps import Diverged, Failed, Good, OutOfMemory, Steps
from sameday.train.watch import Watch


def train(
    recipe: Recipe, plan: Plan, task: Task, run: RunFolder, ranks: Ranks, stop_after: int | None = None
) -> dict[str, float]:
    """Train to the end, or raise RunStopped with the code that says why. Returns the last validation scores.
    `stop_after` ends this process at that step, saved, as a signal would."""
    total = total_steps(recipe, task)
    cadence = Cadence(total, task.steps_per_epoch(), plan.save_steps, plan.eval_steps, stop_after)
    with (
        Watch(run if ranks.first else None, total, plan.log_steps, task.device) as watch,
        StopRequest() as stop,
        closing(Steps(recipe, plan, task, ranks)) as steps,
    ):
        state = _resumed(recipe, task, run, ranks, steps, watch)
        if stop_after is not None and stop_after <= state.step < total:
            already = f"step {state.step} of {total} is done already; run again without --stop-after"
            raise RunStopped(already, EXIT_STOPPED)
        task.training(True)
        scores, asked = {}, False
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
                    case Failed():
                        raise outcome.error
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
                scores = _validated(recipe, plan, task, run, ranks, steps, state)
                watch.evaluation(state.step, "val", scores)
                state.compare(scores)
            if due.save or asked or state.best is not best:
                if ranks.first:
                    save(recipe, plan, run, task, steps, state)
                ranks.wait()
            if asked and state.step < total:
                saved = f"asked to stop: step {state.step} of {total} is saved; run again to go on"
                raise RunStopped(saved, EXIT_STOPPED)
            steps.restart_timing()
        if not scores:  # a run killed between its last checkpoint and its end
            scores = task.evaluate("val", ranks, state.budget)
        if ranks.first:
            finish_run(plan, run, task, scores, state)
        return scores


def _validated(
    recipe: Recipe, plan: Plan, task: Task, run: RunFolder, ranks: Ranks, steps: Steps, state: LoopState
) -> dict[str, float]:
    """Scores of the validation data, empty where there is none. An evaluation that has no memory loses no training."""
    try:
        return task.evaluate("val", ranks, state.budget)
    except RunStopped:
        if ranks.first:
            save(recipe, plan, run, task, steps, state)
        raise


def _resumed(recipe: Recipe, task: Task, run: RunFolder, ranks: Ranks, steps: Steps, watch: Watch) -> LoopState:
    state = restore(recipe, task, run, steps, watch.say)
    each = ranks.gather(state.step)
    if len(set(each)) > 1:
        raise BadInput(f"{run.path}: each rank needs the same folder; they find checkpoints {each}")
    if ranks.first:
        run.rewind(state.step)
    return state


def _diverged(task: Task, run: RunFolder, steps: Steps, outcome: Diverged, ranks: Ranks) -> str:
    """Which samples are to blame. One that is not finite may spoil others of its micro-batch, so each is computed by
    itself."""
    step, mine = outcome.step, []
    for batch in task.batches(step, 1, ranks):
        batch = batch.to(task.device)
        steps.gradients.zero()
        total, each = task.loss_sum(batch, step)
        total.backward()
        # Zero times a norm that is not finite is NaN: a bad gradient of a finite loss is found too.
        mine += task.culprits(batch, each + 0 * steps.gradients.norm())
    named = sorted({name for part in ranks.gather(mine) for name in part})
    whole = f"in the step of {first_names(task.names(task.step_ids(step)))}"
    who = f"not finite at {first_names(named)}" if named else whole
    kept = "; earlier checkpoints are good" if checkpoint.steps(run.checkpoints) else ""
    return f"step {step + 1}: {outcome}, {who}. The weights were not touched{kept}."
