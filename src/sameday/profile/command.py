"""`sameday profile`: where each millisecond of a step goes, the floor under it, what a remedy could give at most."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sameday.profile.found import lines, steps_of, summed_up, wrapped
from sameday.spec.load import load_plan, load_recipe, resolve_path, split_sets
from sameday.spec.plan import Plan
from sameday.spec.record import check_output, write_text
from sameday.tasks.registry import start_of
from sameday.tasks.start import Say

COUNTED = 4
"""Steps whose floor is counted."""
PATIENCE = 5.0
"""Seconds between two words on how far it is."""


def profile(
    recipe_path: Path,
    plan_path: Path | None,
    sets: Sequence[str],
    steps: int,
    warmup: int,
    json_path: Path | None,
    say: Say,
) -> None:
    check_output("--json", json_path, (recipe_path, plan_path))
    recipe_sets, plan_sets = split_sets(sets)
    recipe, home = load_recipe(recipe_path, recipe_sets), recipe_path.resolve().parent
    plan = load_plan(plan_path, plan_sets, recipe.task)

    from sameday.train.launch import automatic_plan, prepare_environment

    prepare_environment(plan)

    from sameday.hardware.machine import device_kind, look, pick_device, set_deterministic
    from sameday.hardware.peaks import measure
    from sameday.hardware.ranks import Ranks
    from sameday.profile.timeline import record

    start = start_of(recipe, home)
    audited = start.audit(say)
    start.check_model(say)
    reasons: dict[str, str] = {}
    if plan_path is None:
        plan, reasons = automatic_plan(start, recipe, plan_sets, 1)
    machine = look(device_kind(plan))
    settled = start.settle(plan, machine)
    for choice in choices(plan, reasons, settled):
        say("\n".join(wrapped(choice)))
    set_deterministic(plan.deterministic)
    task = start.load(plan, pick_device(plan, Ranks()), audited.parts)
    for note in task.notes:
        say(note)
    say(f"{steps_of(warmup)} to warm up, {steps} to time")
    timed = record(recipe, plan, task, home, steps, warmup, progress=progress(warmup + steps, say))
    say("the machine's rates: products, memory, copies, disk")
    peaks = measure(task.device, recipe.precision, images_folder(recipe, plan, home) if recipe.task == "vqa" else None)
    plan = plan.model_copy(update={name: value for name, (value, _) in settled.items() if name in Plan.model_fields})
    found = summed_up(recipe, plan, task, machine, timed, peaks, range(warmup, warmup + COUNTED))
    print("\n".join(lines(found)))
    if json_path is not None:
        write_text(json_path, json.dumps(found, indent=1) + "\n")


def hardware(recipe_path: Path, plan_path: Path | None, sets: Sequence[str], say: Say) -> None:
    """What this machine has for the recipe, and what a plan would take of it; nothing is trained."""
    recipe_sets, plan_sets = split_sets(sets)
    recipe, home = load_recipe(recipe_path, recipe_sets), recipe_path.resolve().parent
    plan = load_plan(plan_path, plan_sets, recipe.task)
    # Before anything that is loaded sets some of its own.
    environment = {**os.environ, **plan.environment}

    from sameday.train.launch import automatic_plan, prepare_environment

    prepare_environment(plan)

    from sameday.hardware.kernels import kernels
    from sameday.hardware.machine import device_kind, look, pick_device
    from sameday.hardware.peaks import measure
    from sameday.hardware.ranks import Ranks
    from sameday.hardware.variables import installed_files, judged, of_libraries

    machine = look(device_kind(plan))
    start = start_of(recipe, home)
    reasons: dict[str, str] = {}
    if plan_path is None:
        plan, reasons = automatic_plan(start, recipe, plan_sets, 1)
    print(f"{machine.name}, {machine.memory / 2**30:.0f} GiB, {machine.cores} cores")
    say("measuring its rates")
    made = [_rates(measure(pick_device(plan, Ranks()), recipe.precision, images_folder(recipe, plan, home)))]
    for kernel in kernels(machine, recipe.precision):
        made.append(f"  {'yes' if kernel.there else 'no ':3s}  {kernel.name:22s} {kernel.why}")
    made += [f"  {line}" for line in choices(plan, reasons, start.settle(plan, machine))]
    variables = of_libraries(environment)
    made.append(
        "environment variables of libraries:" if variables else "environment variables of libraries: none is set"
    )
    made += [f"  {each}" for each in judged(variables, installed_files())]
    print("\n".join(part for line in made for part in wrapped(line)))


def _rates(peaks: Any) -> str:
    rates = {
        "memory": peaks.memory_bytes_per_second,
        "copies to the device": peaks.copy_bytes_per_second,
        "disk": peaks.disk_bytes_per_second,
    }
    moved = [
        f"{name} " + ("not measured" if each is None else f"{each / 1e9:.4g} GB/s") for name, each in rates.items()
    ]
    return f"{peaks.precision} products {peaks.flop_per_second / 1e12:.4g} TFLOP/s, {', '.join(moved)}"


def choices(plan: Plan, reasons: Mapping[str, str], settled: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """What was chosen for the machine, and what the plan left to it, each with its reason, as `sameday train` says."""
    from sameday.profile.advice import shown

    chosen = {f"plan.{name}": (shown(getattr(plan, name)), why) for name, why in reasons.items()}
    for name, (value, why) in (chosen | dict(settled)).items():
        yield f"{name}: {value}, because {why}"


def progress(count: int, say: Say, now: Callable[[], float] = time.perf_counter) -> Callable[[int], None]:
    """Says every few seconds how many of the steps are done."""
    began = said = now()

    def show(done: int) -> None:
        nonlocal said
        if now() - said >= PATIENCE:
            said = now()
            say(f"{min(done, count)} of {steps_of(count)}, {said - began:.0f} s")

    return show


def images_folder(recipe: Any, plan: Plan, home: Path) -> Path:
    """A folder on the disk that a step's images are read from; what a cache will make need not be there yet."""
    where = recipe.data.path if recipe.task == "classify" else recipe.data.image_root
    path = resolve_path(home, plan.cache_dir if plan.cache in ("pixels", "features") else where).resolve()
    return next(each for each in (path, *path.parents) if each.is_dir())
