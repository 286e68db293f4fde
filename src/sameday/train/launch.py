"""From files to a running loop: specs, audit, run folder, model, in this order, so that bad input is found before a
model is loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sameday.data.audit import DEFAULT_SPECIAL, check, report
from sameday.data.sample import Sample
from sameday.spec.errors import BadInput, RunStopped
from sameday.spec.load import load_plan, load_recipe, resolve_model, resolve_path, split_sets
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.spec.record import RunFolder, default_path

Say = Callable[[str], None]


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
    plan = load_plan(plan_path, plan_sets)
    prepare_environment(plan)

    import torch

    from sameday.hardware.choose import attention_kernel
    from sameday.hardware.machine import device_kind, look, pick_device
    from sameday.hardware.ranks import Ranks
    from sameday.models.hub import announce_download
    from sameday.train.loop import train

    ranks = Ranks.join(device_kind(plan))
    opened: list[RunFolder] = []
    try:
        say: Say = partial(print, flush=True) if ranks.first else _silent
        path = out or default_path(recipe)
        splits, skipped = ranks.from_first(lambda: audit_splits(recipe, home, say))
        left_out = [{"where": p.where, "what": p.what} for p in skipped]
        ranks.from_first(lambda: announce_download(resolve_model(home, recipe.model), recipe.revision, say))
        config = ranks.from_first(lambda: model_config(recipe, home))
        # The first rank's plan is everyone's: ranks that cut a step differently would drop questions.
        plan, reasons = ranks.from_first(
            lambda: automatic_plan(recipe, config, plan_sets, ranks.size) if plan_path is None else (plan, {})
        )
        if plan_path is None:
            for name, why in reasons.items():
                say(f"plan.{name}: {getattr(plan, name)}, because {why}")
        machine = look(device_kind(plan))
        kernel, why = ranks.from_first(lambda: attention_kernel(plan, machine.device, recipe.precision, machine.triton))
        if plan.attention == "auto":
            say(f"attention: {kernel}, because {why}")
            reasons["attention"] = f"{kernel}: {why}"
        ranks.from_first(lambda: opened.append(RunFolder.open(path, recipe, plan, home)))
        run = opened[0] if opened else RunFolder(path, recipe, plan, home)
        if ranks.first:
            say(f"{recipe.name} {recipe.fingerprint} in {path}: {len(splits['train'])} questions")
            run.write_json("skipped.json", left_out)
            run.write_json("choices.json", reasons)
        ranks.wait()
        torch.use_deterministic_algorithms(plan.deterministic)
        task = load_task(recipe, plan, home, pick_device(plan, ranks), splits)
        if task.skipped and ranks.first:
            say("left out, and recorded in skipped.json:\n" + "\n".join(task.skipped))
            more = [{"where": line.split(": ")[0], "what": line.split(": ", 1)[1]} for line in task.skipped]
            run.write_json("skipped.json", left_out + more)
        return train(recipe, plan, task, run, ranks, stop_after)
    except RunStopped as stop:
        # All ranks stop together and with the same words: the first one says them.
        if not ranks.first:
            sys.exit(stop.code)
        raise
    finally:
        for folder in opened:
            folder.close()
        ranks.leave()


def evaluate_run(path: Path, split: str) -> dict[str, float]:
    """`sameday eval`: the finished weights of a run, on one of its recipe's splits."""
    run = RunFolder.read(path)
    prepare_environment(run.plan)

    from sameday.hardware.machine import pick_device
    from sameday.hardware.ranks import Ranks

    if getattr(run.recipe.data, split) is None:
        raise BadInput(f"{path}: the recipe has no data.{split}")
    if not run.adapter.is_dir():
        raise BadInput(f"{path}: the run is not finished: it has no adapter/ yet")
    splits, _ = audit_splits(run.recipe, run.recipe_dir, print, names=(split,))
    ranks = Ranks()
    task = load_task(run.recipe, run.plan, run.recipe_dir, pick_device(run.plan, ranks), splits)
    task.restore(run.adapter)
    scores = task.evaluate(split, ranks)
    run.write_json(f"eval-{split}.json", scores)
    return scores


def prepare_environment(plan: Plan) -> None:
    """Before torch is loaded: variables that it and the tokenizers read once, at their start."""
    os.environ.update(plan.environment)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # worker processes are forked
    if plan.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def model_config(recipe: Recipe, home: Path) -> Any:
    """The model's configuration; what cannot be trained is refused here, before weights are loaded."""
    from transformers import AutoConfig

    from sameday.models.qwen_vl import check_supported

    try:
        config = AutoConfig.from_pretrained(resolve_model(home, recipe.model), revision=recipe.revision)
    except (OSError, ValueError) as error:
        raise BadInput(f"model {recipe.model!r}: its configuration cannot be read: {error}") from None
    check_supported(config)
    return config


def automatic_plan(recipe: Recipe, config: Any, sets: Sequence[str], ranks: int) -> tuple[Plan, dict[str, str]]:
    """Choices for this machine; what `--set plan.x=…` says stands."""
    from sameday.hardware.choose import choose_plan
    from sameday.hardware.machine import device_kind, look

    asked = load_plan(None, sets)
    plan, reasons = choose_plan(recipe, look(device_kind(asked)), config, ranks)
    named = {s.split("=", 1)[0].split(".")[1] for s in sets}
    plan = Plan.model_validate(plan.model_dump() | {name: getattr(asked, name) for name in named})
    return plan, {k: v for k, v in reasons.items() if k not in named} | {name: "asked for" for name in sorted(named)}


def audit_splits(
    recipe: Recipe,
    home: Path,
    say: Say,
    names: Sequence[str] = ("train", "val"),
    few: Mapping[str, int] | None = None,
) -> tuple[dict[str, list[Sample]], list[Any]]:
    """Every question file that is needed, checked to its last image; all problems of all files in one error. `few`
    takes only so many questions of a file."""
    for token in DEFAULT_SPECIAL:
        if token in (recipe.system_prompt or ""):
            raise BadInput(f"recipe.system_prompt holds {token}, which would become a real token")
    splits: dict[str, list[Sample]] = {}
    skipped: list[Any] = []
    errors: list[str] = []
    for name in names:
        file = getattr(recipe.data, name)
        if file is None:
            continue
        try:
            splits[name], problems = check(
                resolve_path(home, file),
                resolve_path(home, recipe.data.image_root),
                limit=recipe.data.limit,
                on_bad=recipe.data.on_bad,
                progress=_progress(name, say),
                label=file,
                few=None if few is None else few[name],
            )
            skipped += problems
        except BadInput as error:
            errors.append(str(error))
    if errors:
        raise BadInput("\n".join(errors))
    if skipped:
        say(f"left out, and recorded in skipped.json: {report(skipped)}")
    return splits, skipped


def load_task(recipe: Recipe, plan: Plan, home: Path, device: Any, splits: dict[str, list[Sample]]) -> Any:
    """The task that the recipe names."""
    import transformers

    from sameday.tasks.vqa import VqaTask

    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()

    tasks = {"vqa": VqaTask}
    return tasks[recipe.task].load(recipe, plan, home, device, splits)


def _progress(name: str, say: Say) -> Callable[[int, int], None]:
    """A line at each tenth of a long audit; nothing for a short one."""
    shown = 0

    def show(done: int, total: int) -> None:
        nonlocal shown
        if total >= 500 and done * 10 // total > shown:
            shown = done * 10 // total
            say(f"checking {name}: {done} of {total} images decoded")

    return show


def _silent(_text: str) -> None:
    pass
