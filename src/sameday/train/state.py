"""What the loop must remember between two processes, as one record that is saved whole; and the files of a run that are
made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sameday.record import checkpoint
from sameday.record.folder import RunFolder
from sameday.record.metrics import sound_metrics
from sameday.record.room import on_disk, room_for
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.spec.recipe import Best, Recipe
from sameday.tasks.base import Task
from sameday.train.optim import optimizer_tensors, restore_optimizer
from sameday.train.steps import Steps


@dataclass
class LoopState:
    """`step` counts the steps done, `saved` those in the newest checkpoint, `validated` those at the last validation.
    `best` has the best validation scores so far, with their step. `budget` is what the plan's, `lowered_from`, was
    lowered to when memory ran out."""

    step: int = 0
    best: dict[str, Any] | None = None
    budget: int | None = None
    lowered_from: int | None = None
    saved: int = 0
    validated: int = 0

    def lower(self, task: Task, budget: int) -> int:
        asked = getattr(task.plan, task.budget_field)
        self.budget, self.lowered_from = (None, None) if budget == asked else (budget, asked)
        return budget

    def compare(self, scores: dict[str, float], by: Best) -> None:
        if scores and by.beats(scores, self.best):
            self.best = {"step": self.step, **scores}


ABOUT = ("fingerprint", "recipe", "digests")
"""What a checkpoint records besides the loop's state."""


def restore(recipe: Recipe, task: Task, run: RunFolder, steps: Steps, say: Callable[[str], None]) -> LoopState:
    """The newest usable checkpoint's, weights and optimizer taken back; a new one where there is none."""
    failed = None
    for newest in checkpoint.candidates(run.checkpoints, recipe, say):
        known = {field.name for field in fields(LoopState)}
        unknown = sorted(newest.state.keys() - known - {*ABOUT})
        if unknown:
            raise checkpoint.newer(newest.path, unknown)
        recorded = newest.state["digests"]
        # An older release may have recorded fewer of them.
        changed = [name for name, digest in task.digests().items() if recorded.get(name, digest) != digest]
        if changed:
            raise BadInput(
                f"{newest.path}: the {' and the '.join(changed)} changed since this checkpoint; choose another --out"
            )
        if recipe.best is not None and (lost := _best_lost(run, newest.state.get("best"))):
            say(f"checkpoint {newest.path.name} is left aside: {lost}")
            continue
        try:
            task.restore(newest.path)
            restore_optimizer(steps.optimizer, steps.trained, load_file(newest.path / checkpoint.OPTIMIZER))
            # An earlier release saved no step before its validation.
            kept = {"validated": newest.step} | {name: newest.state[name] for name in known & newest.state.keys()}
            state = LoopState(**kept | {"saved": newest.step})
        except (BadInput, OSError, SafetensorError, RuntimeError) as error:
            failed = error
            say(f"checkpoint {newest.path.name} is left aside: {error}")
            continue
        say(f"resumed from {newest.path.name}")
        return _lowered(state, task, say)
    if run.resumed and run.finished_scores() is not None:
        say(f"no checkpoint can be gone on from, and none is needed: {run.result} is whole")
        return LoopState()
    if failed is not None:  # some weights may have been taken from it: this is no start any more
        raise BadInput(f"{run.path}: no checkpoint can be gone on from: {failed}; choose another --out")
    if there := len(checkpoint.steps(run.checkpoints)):
        which = "the only checkpoint cannot" if there == 1 else f"none of {there} checkpoints can"
        say(f"{which} be gone on from: the run begins again at its first step")
    elif run.resumed and any("split" not in record for record in sound_metrics(run.metrics_path)[0]):
        lost = checkpoint.fault(run.result) if run.result.is_dir() else None
        why = "" if lost is None else f"{run.result}: {lost}; "
        say(f"{why}there is no checkpoint to go on from: the run begins again at its first step")
    return LoopState()


def _best_lost(run: RunFolder, best: Any) -> str | None:
    """Why the best weights so far cannot be the result, or None: what was before them can find them again."""
    path = None if best is None else run.checkpoints / checkpoint.name_of(best["step"])
    why = None if path is None else checkpoint.fault(path)
    return None if path is None or why is None else f"the best weights so far, of {path.name}, cannot be used: {why}"


def _lowered(state: LoopState, task: Task, say: Callable[[str], None]) -> LoopState:
    """A budget that memory forced holds, unless whoever resumes asks for another one."""
    if state.budget is not None and state.lowered_from != getattr(task.plan, task.budget_field):
        state.budget = None
    if state.budget is not None:
        say(f"{task.budget_field.replace('_', ' ')} {state.budget}: it was lowered when memory ran out")
    return state


def save(recipe: Recipe, plan: Plan, run: RunFolder, task: Task, steps: Steps, state: LoopState) -> None:
    """A checkpoint of the steps done, unless there is one of them already."""
    if state.saved == state.step:
        return

    def fill(folder: Path) -> None:
        task.save(folder)
        save_file(optimizer_tensors(steps.optimizer, steps.trained), folder / checkpoint.OPTIMIZER)

    about = {
        "fingerprint": recipe.fingerprint,
        "recipe": recipe.model_dump(mode="json"),
        "digests": task.digests(),
    }
    kept, state.saved = state.saved, state.step
    earlier = [path for step, path in checkpoint.steps(run.checkpoints) if step == kept]
    tensors = steps.trained, optimizer_tensors(steps.optimizer, steps.trained)
    need = checkpoint.size_on_disk(earlier[0]) if earlier else _on_disk(run, tensors, task)
    then = f"Make room and run again: it goes on from step {kept}." if kept else "Make room and run again."
    name = checkpoint.name_of(state.step)
    with room_for(f"checkpoint {name}", run.path, need, then):
        checkpoint.write(run.checkpoints, name, fill, {**asdict(state), **about})
    _tidy(plan, run, state)


def _on_disk(run: RunFolder, tensors: Sequence[Mapping[str, Tensor]], task: Task) -> int:
    """About how many bytes a folder with these files of tensors takes, where none like it was written yet."""
    files = [sum(tensor.nbytes for tensor in each.values()) for each in tensors]
    return on_disk(run.path, [*files, task.bytes_beside(), *[1] * checkpoint.SMALL_FILES])


def begin_unless_finished(
    run: RunFolder, state: LoopState, total: int, say: Callable[[str], None]
) -> dict[str, float] | None:
    """The scores of a run that has its weights already, whole, whatever became of its checkpoints: they are written
    last. Where something is left to do, None, and its folder is ready for the steps after `state.step`."""
    scores = run.finished_scores() if run.resumed else None
    if scores is None:
        why = checkpoint.fault(run.result) if state.step == total and run.result.is_dir() else None
        if why is not None:
            say(f"{run.result}: {why}; it is written again from step {total}, which is whole")
        run.begin()
        run.rewind(state.step, say)
    return scores


def finish_run(
    plan: Plan,
    run: RunFolder,
    task: Task,
    scores: dict[str, float],
    state: LoopState,
    say: Callable[[str], None],
) -> dict[str, float]:
    """The finished weights, the last or the best, with a record of which; returns their scores."""
    need = _on_disk(run, [task.trained()], task)
    then = "Make room and run again: all steps are saved."
    by, best = run.recipe.best, state.best
    result: dict[str, Any] = {"weights": "last", "step": state.step}
    if by is not None and best is not None:
        scores = {name: score for name, score in best.items() if name != "step"}
        result = {"weights": "best", "step": best["step"], "metric": by.metric, "value": best[by.metric]}
    _tidy(plan, run, state)  # once more, for a run killed before it could
    with room_for(f"the finished {run.result.name}", run.path, need, then):
        if result["step"] != state.step:
            _take_back(task, run, result["step"])
        checkpoint.write(run.path, run.result.name, task.save, None)
        run.write_json("eval.json", {"val": scores, "best": best, "result": result}, then)
    if by is not None:
        value = f", {result['metric']} {result['value']:.4g}" if "metric" in result else ""
        say(f"{run.result.name}/ has the {result['weights']} weights: step {result['step']}{value}")
    return scores


def _take_back(task: Task, run: RunFolder, step: int) -> None:
    if lost := _best_lost(run, {"step": step}):
        raise BadInput(f"{run.path}: {lost}; run again: it goes on from before them, and finds them again")
    task.restore(run.checkpoints / checkpoint.name_of(step))


def _tidy(plan: Plan, run: RunFolder, state: LoopState) -> None:
    if state.best is not None:
        then = f"Make room and run again: it goes on from step {state.step}."
        run.write_json(f"checkpoints/{checkpoint.BEST}", state.best, then)
    checkpoint.prune(run.checkpoints, plan.save_total_limit, state.step, state.best["step"] if state.best else None)
