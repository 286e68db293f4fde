"""What the loop must remember between two processes, as one record that is saved whole; and the files of a run that are
made of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.spec.record import RunFolder
from sameday.spec.room import room_for
from sameday.tasks.base import Task
from sameday.train import checkpoint
from sameday.train.optim import optimizer_tensors, restore_optimizer
from sameday.train.steps import Steps


@dataclass
class LoopState:
    """`step` counts the steps done, `saved` those in the newest checkpoint. `best` has the lowest validation loss so
    far, with its step and other scores. `budget` is what the plan's, `lowered_from`, was lowered to when memory ran
    out."""

    step: int = 0
    best: dict[str, Any] | None = None
    budget: int | None = None
    lowered_from: int | None = None
    saved: int = 0

    def lower(self, task: Task, budget: int) -> int:
        self.budget, self.lowered_from = budget, getattr(task.plan, task.budget_field)
        return budget

    def compare(self, scores: dict[str, float]) -> None:
        if scores and scores["loss"] < (self.best["loss"] if self.best else math.inf):
            self.best = {"step": self.step, **scores}


def restore(recipe: Recipe, task: Task, run: RunFolder, steps: Steps, say: Callable[[str], None]) -> LoopState:
    """The newest valid checkpoint's, weights and optimizer taken back; a new one where there is none."""
    newest = checkpoint.newest(run.checkpoints, recipe, say)
    if newest is None:
        return LoopState()
    recorded = newest.state["digests"]
    # An older release may have recorded fewer of them.
    changed = [name for name, digest in task.digests().items() if recorded.get(name, digest) != digest]
    if changed:
        raise BadInput(
            f"{newest.path}: the {' and the '.join(changed)} changed since this checkpoint; choose another --out"
        )
    task.restore(newest.path)
    restore_optimizer(steps.optimizer, steps.trained, load_file(newest.path / checkpoint.OPTIMIZER))
    say(f"resumed from {newest.path.name}")
    known = {field.name: newest.state[field.name] for field in fields(LoopState) if field.name in newest.state}
    state, asked = LoopState(**{**known, "saved": newest.step}), getattr(task.plan, task.budget_field)
    if state.budget is not None and state.lowered_from != asked:
        state.budget = None  # whoever resumes asks for another one
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
    tensors = (*steps.trained.values(), *optimizer_tensors(steps.optimizer, steps.trained).values())
    need = max([sum(tensor.nbytes for tensor in tensors), *map(checkpoint.size, earlier)])
    then = f"Make room and run again: it goes on from step {kept}." if kept else "Make room and run again."
    with room_for(f"checkpoint step-{state.step:06d}", run.path, need, then):
        checkpoint.write(run.checkpoints, f"step-{state.step:06d}", fill, {**asdict(state), **about})
        _tidy(plan, run, state)


def finished_before(run: RunFolder, state: LoopState, total: int) -> dict[str, float] | None:
    """The scores of a run that has its weights already, whole; None where something is left to do."""
    if state.step < total or checkpoint.fault(run.result) is not None:
        return None
    try:
        scores: dict[str, float] = json.loads((run.path / "eval.json").read_text())["val"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return scores


def finish_run(plan: Plan, run: RunFolder, task: Task, scores: dict[str, float], state: LoopState) -> None:
    """The finished weights and scores."""
    need = sum(parameter.nbytes for parameter in task.trained().values())
    then = "Make room and run again: all steps are saved."
    with room_for(f"the finished {run.result.name}", run.path, need, then):
        _tidy(plan, run, state)  # once more, for a run killed before it could
        checkpoint.write(run.path, run.result.name, task.save, None)
        run.write_json("eval.json", {"val": scores, "best": state.best})


def _tidy(plan: Plan, run: RunFolder, state: LoopState) -> None:
    if state.best is not None:
        run.write_json("checkpoints/best.json", state.best)
    checkpoint.prune(run.checkpoints, plan.save_total_limit, state.step, state.best["step"] if state.best else None)
