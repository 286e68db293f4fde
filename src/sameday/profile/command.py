"""`sameday profile`: where each millisecond of a step goes, the floor under it, what a remedy could give at most."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from sameday.commands.batch import check_batch
from sameday.commands.session import Session, Specs
from sameday.profile import quiet
from sameday.profile.summary import lines, steps_of, summed_up, wrapped
from sameday.spec.errors import BadInput
from sameday.spec.words import tell
from sameday.spec.writing import check_output, write_text
from sameday.tasks.base import Say
from sameday.tasks.setup import TRAINING

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
    trace: Path | None = None,
) -> None:
    quiet()
    check_output("--json", json_path, (recipe_path, plan_path))
    if trace is not None:
        _check_trace(trace, (recipe_path, plan_path, json_path))
    specs = Specs.from_files(recipe_path, plan_path, sets).first_stage(say)
    with closing(Session.start(specs, say, splits=TRAINING)) as session:
        from sameday.commands.outlook import check_steps
        from sameday.hardware.peaks import measure
        from sameday.profile.timeline import record, with_fewer_threads

        check_batch(session, whole=not specs.part)
        for choice in session.choices():
            say("\n".join(wrapped(choice)))
        splits = session.setup.drop_too_long(session.audited.splits)
        check_steps(session, splits, warmup + steps)
        task = session.load(splits=splits)
        for note in task.notes:
            say(note)
        say(f"{steps_of(warmup)} to warm up, {steps} to time")
        timed = record(session, task, steps, warmup, progress=progress(warmup + steps, say))
        if trace is not None:
            from sameday.profile.trace import TRACED, write_trace

            write_trace(session, task, trace, warmup, timed.budget)
            say(f"{steps_of(TRACED)} traced in {trace}: ui.perfetto.dev or chrome://tracing opens it")
        fewer = with_fewer_threads(session, task, timed) if task.device.type == "cpu" else ()
        say("the machine's rates: matmuls, memory, copies, disk")
        folder = session.setup.images_folder(session.plan)
        peaks = measure(task.device, session.recipe.precision, folder)
        profiled = summed_up(session, task, timed, peaks, range(warmup, warmup + COUNTED), fewer)
    tell("\n".join(lines(profiled)))
    if json_path is not None:
        write_text(json_path, json.dumps(profiled, indent=1) + "\n")


def _check_trace(path: Path, inputs: Sequence[Path | None]) -> None:
    begins = {".json": b"{\n", ".gz": b"\x1f\x8b"}
    if path.suffix not in begins:
        raise BadInput(f"--trace {path}: must end with .json, or with .json.gz for a compressed one")
    check_output("--trace", path, inputs, begins[path.suffix])


def hardware(recipe_path: Path, plan_path: Path | None, sets: Sequence[str], say: Say) -> None:
    """What this machine has for the recipe, and what a plan would take of it; nothing is trained."""
    specs = Specs.from_files(recipe_path, plan_path, sets).first_stage(say)
    # Before anything that is loaded sets some of its own.
    environment = {**os.environ, **specs.plan.environment}
    with closing(Session.start(specs, say)) as session:
        from sameday.hardware.kernels import kernels
        from sameday.hardware.peaks import measure
        from sameday.hardware.variables import installed_files, judged, of_libraries

        machine, precision = session.machine, session.recipe.precision
        tell(f"{machine.name}, {machine.memory / 2**30:.0f} GiB, {machine.cores} cores")
        say("measuring its rates")
        made = [_rates(measure(session.device, precision, session.setup.images_folder(session.plan)))]
        for kernel in kernels(machine, precision):
            made.append(f"  {'yes' if kernel.there else 'no ':3s}  {kernel.name:22s} {kernel.why}")
        made += [f"  {line}" for line in session.choices()]
    variables = of_libraries(environment)
    made.append(
        "environment variables of libraries:" if variables else "environment variables of libraries: none is set"
    )
    made += [f"  {each}" for each in judged(variables, installed_files())]
    tell("\n".join(part for line in made for part in wrapped(line)))


def _rates(peaks: Any) -> str:
    rates = {
        "memory": peaks.memory_bytes_per_second,
        "copies to the device": peaks.copy_bytes_per_second,
        "disk": peaks.disk_bytes_per_second,
    }
    moved = [
        f"{name} " + ("not measured" if each is None else f"{each / 1e9:.4g} GB/s") for name, each in rates.items()
    ]
    fp8 = "" if peaks.fp8_flop_per_second is None else f", in fp8 {peaks.fp8_flop_per_second / 1e12:.4g}"
    return f"{peaks.precision} matmuls {peaks.flop_per_second / 1e12:.4g} TFLOP/s{fp8}, {', '.join(moved)}"


def progress(count: int, say: Say, now: Callable[[], float] = time.perf_counter) -> Callable[[int], None]:
    """Says every few seconds how many of the steps are done."""
    began = said = now()

    def show(done: int) -> None:
        nonlocal said
        if now() - said >= PATIENCE:
            said = now()
            say(f"{min(done, count)} of {steps_of(count)}, {said - began:.0f} s")

    return show
