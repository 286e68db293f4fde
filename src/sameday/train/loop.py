"""The training loop: one page over (recipe, plan, task, run folder), for any task and any number of ranks."""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sameday.data.feed import Feed
from sameday.data.loader import stream, supply
from sameday.hardware.parts import Clock, during
from sameday.hardware.ranks import Ranks
from sameday.spec.errors import EXIT_DIVERGED, EXIT_OUT_OF_MEMORY, EXIT_STOPPED, BadInput, RunStopped
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.spec.record import RunFolder
from sameday.tasks.base import Task
from sameday.train import checkpoint
from sameday.train.ending import Answer, Ending, Moment
from sameday.train.optim import Gradients, learning_rate, make_optimizer, optimizer_tensors, restore_optimizer
from sameday.train.watch import Watch

NO_MEMORY = "out of memory"


def train(
    recipe: Recipe,
    plan: Plan,
    task: Task,
    run: RunFolder,
    ranks: Ranks,
    stop_after: int | None = None,
    clock: Clock | None = None,
) -> dict[str, float]:
    """Train to the end, or raise RunStopped with the code that says why. Returns the last validation scores.
    `stop_after` ends this process at that step, saved, as a signal would. A `clock` that is given times every step;
    otherwise the run times one step of each log interval."""
    per_epoch = task.steps_per_epoch()
    total = recipe.max_steps or recipe.num_epochs * per_epoch
    shown = run if ranks.first else None
    with Watch(shown, total, plan.log_steps, task.device) as watch, _StopRequest() as stop, ExitStack() as held:
        trained = task.trained()
        optimizer = make_optimizer(trained, recipe, plan)
        gradients = Gradients(trained)
        start, best = _resume(recipe, task, run, optimizer, trained, watch)
        starts = ranks.gather(start)
        if len(set(starts)) > 1:
            raise BadInput(f"{run.path}: each rank needs the same folder; they find checkpoints {starts}")
        if ranks.first:
            run.rewind(start)
        if stop_after is not None and stop_after <= start < total:
            raise RunStopped(f"step {start} of {total} is done already; run again without --stop-after", EXIT_STOPPED)
        task.training(True)
        step, scores, budget, asked = start, {}, None, False
        ending = Ending(optimizer, gradients, recipe.max_grad_norm)
        begun: deque[_Begun] = deque()  # steps that the device has and whose end is not known yet
        feed = held.enter_context(closing(batches_of_steps(task, plan, range(step, total), budget, ranks)))
        # Where nothing is begun ahead, the update is part of the step, and the host sees its end.
        where = task.device if ending.ahead else torch.device("cpu")
        mark = Moment(where)

        def known(done: _Begun) -> str | None:
            """The end of a step: written down where it was good; otherwise what is wrong with it."""
            nonlocal step, asked, mark
            loss, out_of_memory, stopping, norm = ending.finish(done.answer)
            if out_of_memory:
                return NO_MEMORY
            if not (math.isfinite(loss) and math.isfinite(norm)):
                return f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm} at loss {loss:.4f}"
            done.stop_clock()  # before the step's own end, which its parts must lie within
            now = done.answer.moment if ending.ahead else Moment(where)
            step, asked = step + 1, asked or bool(stopping)
            with during("log"):
                watch.step(step, loss, now.since(mark), len(done.ids), done.facts(norm))
            mark = now
            return None

        while step < total:
            at = step + len(begun)
            for earlier in begun:
                earlier.stop_clock()
            timed = clock or (Clock(task.device) if (at + 1) % plan.log_steps == 0 else None)
            if timed is not None:
                timed.lap()
            ids = task.step_ids(at)
            try:
                with during("optimizer"):
                    gradients.zero()
                short = accumulate(task, next(feed), gradients, at, 1 / task.count(ids))
            except Exception as error:
                # What was begun before is not lost. Other ranks are not asked: they wait for this one's part of a sum.
                wrong = next(filter(None, map(known, begun)), None)
                if wrong not in (None, NO_MEMORY) and ranks.size == 1:
                    raise RunStopped(_diverged(task, run, gradients, step, wrong, ranks), EXIT_DIVERGED) from error
                raise
            ends_here = stop_after is not None and at + 1 >= stop_after
            # The one exchange of a step: gradients, loss, and what the ranks must decide together.
            with during("exchange"):
                if stop.asked or ends_here:
                    gradients.tail[2] = 1
                ranks.sum_(gradients.buffer)
            rate = learning_rate(recipe, at, total)
            answer = ending.begin(rate)
            feed.look_ahead()  # while a GPU is at work
            begun.append(_Begun(ids, rate, answer, feed.taken(), timed if clock is None else None))

            last, epoch_ends = at + 1 == total, (at + 1) % per_epoch == 0
            save, validate = (last or _due(every, at + 1, epoch_ends) for every in (plan.save_steps, plan.eval_steps))
            # All ranks come to the same: a signal and a shortage are known to one of them alone until the sum.
            settle = save or validate or ends_here or ((stop.asked or short) and ranks.size == 1)
            wrong = None
            while wrong is None and len(begun) > (0 if settle or asked else ending.ahead):
                done = begun.popleft()
                wrong = known(done)
            if wrong is not None:
                for each in begun:
                    each.answer.read()  # so that the device is through with it
                for each in (done, *begun):
                    each.stop_clock()
                begun.clear()
                ending.again()
            if wrong is not None and not asked:
                if wrong != NO_MEMORY:
                    raise RunStopped(_diverged(task, run, gradients, step, wrong, ranks), EXIT_DIVERGED)
                smaller = task.smaller_budget(step, budget, ranks)
                if smaller is None:
                    raise RunStopped(_too_large(recipe, task, done.ids), EXIT_OUT_OF_MEMORY)
                change = _lowered(task, task.budget(step, budget, ranks), smaller)
                watch.say(f"step {step + 1}: out of memory; {change}, the step is done again")
                if clock is not None:
                    clock.again()
                held.close()
                torch.cuda.empty_cache()
                budget, mark = smaller, Moment(where)
                feed = held.enter_context(closing(batches_of_steps(task, plan, range(step, total), budget, ranks)))
                continue
            if begun:
                continue

            # Asked to stop in a step that was good, a run does not try again one that was not: it ends before it.
            if validate and wrong is None:
                scores = task.evaluate("val", ranks, budget)
                if scores:
                    watch.evaluation(step, "val", scores)
                if scores and scores["loss"] < (best["loss"] if best else math.inf):
                    best, save = {"step": step, **scores}, True
            if save or asked:
                if ranks.first:
                    _save(recipe, plan, run, task, optimizer, trained, step, best)
                ranks.wait()
            if asked and step < total:
                raise RunStopped(f"asked to stop: step {step} of {total} is saved; run again to go on", EXIT_STOPPED)
            mark = Moment(where)
        if not scores:  # a run killed between its last checkpoint and its end
            scores = task.evaluate("val", ranks)
        if ranks.first:
            _finish(plan, run, task, scores, total, best)
        return scores


@dataclass(frozen=True)
class _Begun:
    """A step that is given to the device whole."""

    ids: list[int]
    rate: float
    answer: Answer
    taken: dict[str, float]
    """What its data took."""
    clock: Clock | None

    def stop_clock(self) -> None:
        if self.clock is not None:
            self.clock.stop()

    def facts(self, norm: float) -> dict[str, Any]:
        self.stop_clock()
        found: dict[str, Any] = {"lr": self.rate, "grad_norm": norm, **self.taken}
        return found if self.clock is None else {**found, "parts": self.clock.steps()[0]}


def _resume(
    recipe: Recipe,
    task: Task,
    run: RunFolder,
    optimizer: torch.optim.AdamW,
    trained: dict[str, torch.nn.Parameter],
    watch: Watch,
) -> tuple[int, dict[str, Any] | None]:
    """Steps done and best scores of the newest valid checkpoint, its state taken back; zero without one."""
    found = checkpoint.newest(run.checkpoints, recipe, watch.say)
    if found is None:
        return 0, None
    changed = [name for name, digest in task.digests().items() if found.state["digests"].get(name) != digest]
    if changed:
        raise BadInput(
            f"{found.path}: the {' and the '.join(changed)} changed since this checkpoint; choose another --out"
        )
    task.restore(found.path)
    restore_optimizer(optimizer, trained, load_file(found.path / checkpoint.OPTIMIZER))
    watch.say(f"resumed from {found.path.name}")
    return found.step, found.state["best"]


def batches_of_steps(task: Task, plan: Plan, steps: Sequence[int], budget: int | None, ranks: Ranks) -> Feed:
    how = supply(plan, task.device)
    return Feed(
        stream(steps, lambda step: task.batches(step, budget, ranks), **how),
        task.device,
        how["pin_memory"],
    )


def accumulate(task: Task, batches: Iterable[Any], gradients: Gradients, step: int, scale: float) -> bool:
    """Forward and backward of this rank's micro-batches, on the device already. Memory running out is a result, which
    is returned, and not an end: the other ranks wait for this one's part of the sum."""
    try:
        for batch in batches:
            loss, _ = task.loss_sum(batch, step)
            with during("backward"):
                (loss * scale).backward()
            with during("loss"):
                gradients.tail[0] += loss.detach() * scale
    except torch.OutOfMemoryError:
        gradients.zero()
        gradients.tail[1] = 1
        return True
    return False


def _due(every: int | str | None, step: int, epoch_ends: bool) -> bool:
    return epoch_ends if every == "epoch" else every is not None and step % int(every) == 0


def _save(
    recipe: Recipe,
    plan: Plan,
    run: RunFolder,
    task: Task,
    optimizer: torch.optim.AdamW,
    trained: dict[str, torch.nn.Parameter],
    step: int,
    best: dict[str, Any] | None,
) -> None:
    def fill(folder: Path) -> None:
        task.save(folder)
        save_file(optimizer_tensors(optimizer, trained), folder / checkpoint.OPTIMIZER)

    state = {
        "fingerprint": recipe.fingerprint,
        "recipe": recipe.model_dump(mode="json"),
        "digests": task.digests(),
        "best": best,
    }
    checkpoint.write(run.checkpoints, f"step-{step:06d}", fill, {"step": step, **state})
    _tidy(plan, run, step, best)


def _tidy(plan: Plan, run: RunFolder, step: int, best: dict[str, Any] | None) -> None:
    if best is not None:
        run.write_json("checkpoints/best.json", best)
    checkpoint.prune(run.checkpoints, plan.save_total_limit, step, best["step"] if best else None)


def _finish(
    plan: Plan, run: RunFolder, task: Task, scores: dict[str, float], step: int, best: dict[str, Any] | None
) -> None:
    _tidy(plan, run, step, best)  # once more, for a run killed before it could
    checkpoint.write(run.path, run.result.name, task.save, None)
    run.write_json("eval.json", {"val": scores, "best": best})


def _diverged(task: Task, run: RunFolder, gradients: Gradients, step: int, what: str, ranks: Ranks) -> str:
    mine: list[str] = []
    # One sample that is not finite may spoil others of its micro-batch: look at each by itself.
    for batch in task.batches(step, 1, ranks):
        batch = batch.to(task.device)
        gradients.zero()
        total, each = task.loss_sum(batch, step)
        total.backward()
        # Zero times a norm that is not finite is NaN: a bad gradient of a finite loss is found too.
        mine += task.culprits(batch, each + 0 * gradients.norm())
    named = sorted({name for part in ranks.gather(mine) for name in part})
    whole = f"in the step of {_listed(task.names(task.step_ids(step)))}"
    who = f"not finite at {_listed(named)}" if named else whole
    kept = "; earlier checkpoints are good" if checkpoint.steps(run.checkpoints) else ""
    return f"step {step + 1}: {what}, {who}. The weights were not touched{kept}."


def _lowered(task: Task, was: int, smaller: int) -> str:
    change = f"{task.budget_field.replace('_', ' ')} {was} -> {smaller}"
    assert smaller < was, f"{change} would run out of memory for ever"
    return change


def _too_large(recipe: Recipe, task: Task, ids: list[int]) -> str:
    return (
        f"out of memory with a single {recipe.sample} in a micro-batch, in the step of {_listed(task.names(ids))}. "
        f"What is left to try: {task.memory_advice}."
    )


def _listed(names: list[str], most: int = 32) -> str:
    """A step may have thousands of samples; nobody reads that many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class _StopRequest:
    """SIGTERM, SIGUSR1 or Ctrl-C: the step is finished and saved, then the run leaves. A second Ctrl-C is at once."""

    asked = False

    def __enter__(self) -> _StopRequest:
        self._before = {n: signal.signal(n, self._ask) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
        return self

    def __exit__(self, kind: object, *_more: object) -> None:
        # A run that leaves early stays deaf: a second signal must not change the code it leaves with.
        for number, handler in self._before.items() if kind is not RunStopped else ():
            signal.signal(number, handler)

    def _ask(self, number: int, _frame: Any) -> None:
        if number == signal.SIGINT and self.asked:
            raise KeyboardInterrupt
        self.asked = True
