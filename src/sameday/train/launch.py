"""From files to a running loop: specs, audit, run folder, model, in this order, so that bad input is found before a
model is loaded. What each of them means is for the recipe's task to say."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from sameday.spec.errors import BadInput, RunStopped
from sameday.spec.load import load_plan, load_recipe, split_sets
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.spec.record import RunFolder, default_path
from sameday.tasks.registry import start_of
from sameday.tasks.start import Caching, Say, Start


def train_from_files(
    recipe_path: Path,
    plan_path: Path | None,
    out: Path | None,
    sets: Sequence[str],
    stop_after: int | None = None,
) -> dict[str, float]:
    """`sameday train`: starts a run, or goes on with it where its folder is there."""
    recipe_sets, plan_sets = split_sets(sets)
    recipe, home = load_recipe(recipe_path, recipe_sets), recipe_path.resolve().parent
    plan = load_plan(plan_path, plan_sets, recipe.task)
    prepare_environment(plan)

    from sameday.hardware.machine import device_kind, look, pick_device, set_deterministic
    from sameday.hardware.ranks import Ranks
    from sameday.train.loop import train

    ranks = Ranks.join(device_kind(plan))
    opened: list[RunFolder] = []
    try:
        say: Say = partial(print, flush=True) if ranks.first else _silent
        path = out or default_path(recipe)
        start = start_of(recipe, home)
        audited = ranks.from_first(lambda: start.audit(say))
        ranks.from_first(lambda: start.check_model(say))
        # The first rank's plan is everyone's: ranks that cut a step differently would drop samples.
        plan, reasons = ranks.from_first(
            lambda: automatic_plan(start, recipe, plan_sets, ranks.size) if plan_path is None else (plan, {})
        )
        for name, why in reasons.items():
            say(f"plan.{name}: {getattr(plan, name)}, because {why}")
        machine = look(device_kind(plan))
        for name, (value, why) in ranks.from_first(lambda: start.settle(plan, machine)).items():
            say(f"{name}: {value}, because {why}")
            reasons[name] = f"{value}: {why}"
        ranks.from_first(lambda: opened.append(RunFolder.open(path, recipe, plan, home)))
        run = opened[0] if opened else RunFolder(path, recipe, plan, home)
        if ranks.first:
            say(f"{recipe.name} {recipe.fingerprint} in {path}: {audited.sizes['train']} {recipe.sample}s")
            run.write_json("skipped.json", [asdict(each) for each in audited.left_out])
            if audited.left_out:
                say("what was left out is recorded in skipped.json")
            run.write_json("choices.json", reasons)
        ranks.wait()
        set_deterministic(plan.deterministic)
        task = start.load(plan, pick_device(plan, ranks), audited.parts)
        if task.left_out and ranks.first:
            listed = "\n".join(f"{each.where}: {each.what}" for each in task.left_out)
            say(f"left out, and recorded in skipped.json:\n{listed}")
            run.write_json("skipped.json", [asdict(each) for each in [*audited.left_out, *task.left_out]])
        for note in task.notes:
            say(note)
        return train(recipe, plan, task, run, ranks, stop_after)
    except RunStopped as stop:
        # All ranks stop together and with the same words: the first one says them.
        if not ranks.first:
            sys.exit(stop.code)
        for folder in opened:
            folder.stopped(str(stop), stop.code)
        raise
    finally:
        for folder in opened:
            folder.close()
        ranks.leave()


def evaluate_run(path: Path, split: str) -> dict[str, float]:
    """`sameday eval`: the finished weights of a run, on one part of its recipe's data."""
    run = RunFolder.read(path)
    prepare_environment(run.plan)

    from sameday.hardware.machine import pick_device
    from sameday.hardware.ranks import Ranks

    start = start_of(run.recipe, run.recipe_dir)
    plan = start.for_evaluation(run.plan)
    lacking = start.lacks(split)
    if lacking is not None:
        raise BadInput(f"{path}: {lacking}")
    if not run.result.is_dir():
        raise BadInput(f"{path}: the run is not finished: it has no {run.result.name}/ yet")
    audited = start.audit(print, (split,))
    ranks = Ranks()
    task = start.load(plan, pick_device(plan, ranks), audited.parts)
    task.restore(run.result)
    scores = task.evaluate(split, ranks)
    run.write_json(f"eval-{split}.json", scores)
    return scores


def cache_from_files(recipe_path: Path, plan_path: Path | None, sets: Sequence[str], asked: Caching) -> bool:
    """`sameday cache`: what a run's images become, made ahead of it."""
    recipe_sets, plan_sets = split_sets(sets)
    recipe, home = load_recipe(recipe_path, recipe_sets), recipe_path.resolve().parent
    plan = load_plan(plan_path, plan_sets, recipe.task)
    prepare_environment(plan)

    from sameday.hardware.machine import look, pick_device, set_deterministic
    from sameday.hardware.ranks import Ranks

    set_deterministic(plan.deterministic)
    start = start_of(recipe, home)
    say: Say = partial(print, flush=True)
    device = pick_device(plan, Ranks())
    if plan_path is None and (asked.measure or asked.kind == "features"):
        plan, _ = automatic_plan(start, recipe, plan_sets, 1)
        start.settle(plan, look(device.type))
    return start.fill_cache(asked, plan, device, say)


def prepare_environment(plan: Plan) -> None:
    """Before torch is loaded: variables that it and the tokenizers read once, at their start."""
    os.environ.update(plan.environment)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # worker processes are forked
    if plan.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def automatic_plan(start: Start, recipe: Recipe, sets: Sequence[str], ranks: int) -> tuple[Plan, dict[str, str]]:
    """Choices for this machine; what `--set plan.x=…` says stands."""
    from sameday.hardware.machine import device_kind, look

    asked = load_plan(None, sets, recipe.task)
    plan, reasons = start.choose_plan(look(device_kind(asked)), ranks)
    named = {s.split("=", 1)[0].split(".")[1] for s in sets}
    plan = Plan.model_validate(plan.model_dump() | {name: getattr(asked, name) for name in named})
    return plan, {k: v for k, v in reasons.items() if k not in named} | {name: "asked for" for name in sorted(named)}


def _silent(_text: str) -> None:
    pass
