"""The summary of a profile: as JSON, and as one screen."""

from __future__ import annotations

import os
import re
import resource
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sameday.commands.session import Session
from sameday.profile.kinds import kind_words
from sameday.spec.plan import fields_of
from sameday.tasks.base import Task

if TYPE_CHECKING:  # they load torch
    from sameday.hardware.peaks import Peaks
    from sameday.profile.advice import Facts
    from sameday.profile.floor import Bound, Floor
    from sameday.profile.timeline import Timeline

WIDTH = 100


def summed_up(
    session: Session,
    task: Task,
    line: Timeline,
    peaks: Peaks,
    counted: Sequence[int],
    fewer: Sequence[tuple[int, float]] = (),
) -> dict[str, Any]:
    """Everything that was measured, as JSON has it. `fewer` are seconds of a step with fewer threads."""
    from sameday.profile.advice import advise, bound_by
    from sameday.profile.floor import bound, floor_of

    recipe, plan, machine, setup = session.recipe, session.resolved.plan, session.machine, session.setup
    floors = [floor_of(setup, task, step, peaks) for step in counted]
    own = statistics.mean(floor.plan.seconds for floor in floors)
    resources = {
        name: statistics.mean(floor.plan.seconds_of[name] for floor in floors) for name in floors[0].plan.seconds_of
    }
    together = task.with_plan(setup.together)
    shared = [bound(together.cost(step, None, session.ranks), peaks) for step in counted]
    facts = replace(_facts(session, task, line, floors, shared, counted), fewer=tuple(fewer))
    return {
        "fingerprint": recipe.fingerprint,
        "name": recipe.name,
        "sample": recipe.sample,
        "machine": {"device": machine.device, "name": machine.name, "cores": machine.cores},
        "plan": plan.model_dump(mode="json"),
        "steps": len(line.steps),
        "left_out": list(line.left_out),
        "samples": line.samples,
        "micro_batches": facts.micro_batches,
        "seconds": {
            "mean": statistics.mean(line.seconds),
            "median": statistics.median(line.seconds),
            "least": min(line.seconds),
            "most": max(line.seconds),
        },
        "phases": line.phases,
        "workers": line.workers,
        "busy": line.busy,
        "launches": line.launches,
        "kernels": line.kernels,
        "longest_kernels": line.longest,
        "waits": [list(each) for each in facts.waits],
        "threads": {"count": facts.threads, "fewer": [list(each) for each in facts.fewer]},
        "gpu": line.gpu,
        "memory_gib": None if line.memory is None else line.memory / 2**30,
        "floor": {
            "seconds": own,
            "share": own / statistics.mean(line.seconds),
            "bound": max(resources, key=lambda name: resources[name]),
            "resources": resources,
            "executed": facts.executed,
            "shared": {"seconds": statistics.mean(each.seconds for each in shared), "words": setup.together_words},
            "one_at_a_time": {"seconds": statistics.mean(floor.alone.seconds for floor in floors)},
            "fp8_flop": statistics.mean(floor.plan.least.fp8_flop for floor in floors),
            "peaks": peaks.as_dict(),
        },
        "bound_by": bound_by(facts),
        "advice": [
            {
                "remedy": each.remedy,
                "at_most": each.at_most,
                "bound": each.bound,
                "why": each.why,
                "change": each.change,
            }
            for each in advise(facts)
        ],
    }


def _facts(
    session: Session,
    task: Task,
    line: Timeline,
    floors: Sequence[Floor],
    shared: Sequence[Bound],
    counted: Sequence[int],
) -> Facts:
    """What advice is given from. `floors` are of the plan, `shared` of all of a step at once."""
    import torch

    from sameday.profile.advice import Cut, Facts, differing
    from sameday.profile.floor import matmul_seconds

    plan, machine, setup = session.resolved.plan, session.machine, session.setup
    mean, peaks = statistics.mean, floors[0].peaks
    cuts = []
    for change in filter(None, (differing(plan, each) for each in setup.cuts(machine.device, plan))):
        costs = [task.with_plan(change).cost(step, None, session.ranks) for step in counted]
        executed = mean(matmul_seconds(cost.executed_flop, cost.executed_fp8_flop, peaks) for cost in costs)
        cuts.append(Cut(change, mean(cost.micro_batches for cost in costs), executed))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Facts(
        device=machine.device,
        plan=plan,
        fields=frozenset(fields_of(session.recipe)),
        phases=line.phases,
        cores=machine.cores,
        samples=line.samples,
        micro_batches=mean(floor.plan.least.micro_batches for floor in floors),
        workers=line.workers,
        floor=min(mean(each.without_disk for each in shared), mean(floor.plan.without_disk for floor in floors)),
        executed=mean(floor.executed_seconds for floor in floors),
        moved=mean(floor.plan.seconds_of["memory"] for floor in floors),
        alone=mean(floor.alone.without_disk for floor in floors),
        busy=line.busy,
        memory=machine.memory,
        used=peak if line.memory is None else line.memory,
        triton=machine.triton,
        cannot=setup.cannot(machine),
        waits=tuple((short_place(where), count) for where, count in line.waits),
        cuts=tuple(cuts),
        threads=torch.get_num_threads(),
    )


def short_place(where: str) -> str:
    """A line of a source file, from the folder on that packages lie in, where that is known."""
    package = str(Path(__file__).resolve().parents[2]) + os.sep
    return re.sub(r"^.*/(site|dist)-packages/", "", where.removeprefix(package))


def steps_of(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def lines(summary: dict[str, Any]) -> list[str]:
    """One screen."""
    from sameday.hardware.phases import PHASES

    seconds, floor, total = summary["seconds"], summary["floor"], sum(summary["phases"].values())
    who = summary["machine"]["name"]
    made = [
        f"{summary['name']} {summary['fingerprint']} on {who}: {1000 * total:.2f} ms a step on the average "
        f"({1000 * seconds['least']:.2f}-{1000 * seconds['most']:.2f}, median {1000 * seconds['median']:.2f}), "
        f"{summary['samples'] / total:.1f} samples/s, {steps_of(summary['steps'])}",
    ]
    if summary["left_out"]:
        slow = ", ".join(f"{each:.2f}" for each in summary["left_out"])
        made.append(f"left out, since far from the others: steps of {slow} s")
    made.append("")
    most = max(summary["phases"].values())
    for name, words in PHASES.items():
        spent = summary["phases"].get(name)
        if spent is not None:
            bar = "█" * round(30 * spent / most)
            made.append(f"  {words:20s} {1000 * spent:10.3f} ms {spent / total:6.1%}  {bar}")
    if summary["workers"]:
        beside = ", ".join(f"{name} {1000 * each:.1f}" for name, each in summary["workers"].items())
        made.append(f"  in worker processes, beside the step, ms: {beside}")
    made.append("")
    if summary["busy"] is not None:
        made.append(
            f"the GPU's kernels fill {summary['busy']:.0%} of the time, {summary['launches']:.0f} of them a step; "
            f"{summary['memory_gib']:.1f} GiB"
        )
    if kernels := summary.get("kernels"):
        made.append(f"their time by what they are for, ms of a step: {kind_words(kernels)}")
    if summary["gpu"]:
        gpu = summary["gpu"]
        made.append(
            f"use {gpu['use_percent']:.0f}% by NVML, "
            f"clock {gpu['clock_mhz']:.0f} of {gpu['highest_clock_mhz']:.0f} MHz, {gpu['power_watts']:.0f} W, "
            f"{gpu['celsius']:.0f} °C"
        )
    each = ", ".join(f"{name} {1000 * value:.2f}" for name, value in floor["resources"].items())
    fp8 = f" ({floor['peaks']['fp8_flop_per_second'] / 1e12:.4g} in fp8)" if floor.get("fp8_flop") else ""
    made += [
        f"floor of this plan {1000 * floor['seconds']:.2f} ms, by {floor['bound']} ({each}); the step reaches "
        f"{floor['share']:.1%} of it",
        f"floor {floor['shared']['words']} {1000 * floor['shared']['seconds']:.2f} ms, "
        f"one {summary['sample']} at a time {1000 * floor['one_at_a_time']['seconds']:.2f} ms; rates measured here: "
        f"{floor['peaks']['flop_per_second'] / 1e12:.3g} TFLOP/s{fp8}, "
        f"{floor['peaks']['memory_bytes_per_second'] / 1e9:.3g} GB/s",
        f"bound by {summary['bound_by']}; at that rate its matmuls take {floor['executed'] / total:.1%} of the step",
        "",
    ]
    for remedy in summary["advice"]:
        made.append(f"  {remedy['remedy']}: at most {remedy['at_most']:.2f}×, {remedy['bound']}; {remedy['why']}")
    if not summary["advice"]:
        made.append("  nothing that is known here would give more than a few hundredths")
    return [part for line in made for part in wrapped(line)]


def wrapped(line: str) -> list[str]:
    if len(line) <= WIDTH:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, drop_whitespace=True)
