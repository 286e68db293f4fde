"""`sameday verify RECIPE --plan PLAN`: which arms are run, and what their traces say."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sameday.spec.load import load_plan, load_recipe, split_sets
from sameday.spec.plan import Claim, Plan, changed
from sameday.spec.recipe import Recipe
from sameday.tasks.registry import start_of
from sameday.tasks.start import Start
from sameday.train.launch import automatic_plan
from sameday.verify.processes import Arms, Say
from sameday.verify.report import Report
from sameday.verify.trial import Trial, make_trial, needs_reference, plain_beside, reference_job


@dataclass(frozen=True)
class Asked:
    """What the command line says."""

    recipe: Path
    plan: Path | None
    against: Path | None
    sets: Sequence[str]
    steps: int
    precision: str | None
    ranks: int


def verify_plan(asked: Asked, say: Say) -> Report:
    recipe_sets, plan_sets = split_sets(asked.sets)
    recipe, home = load_recipe(asked.recipe, recipe_sets), asked.recipe.resolve().parent
    trial = make_trial(recipe, asked.steps, asked.precision)
    start = start_of(recipe, home)
    plan = _plan(asked, recipe, start, plan_sets, say)
    against = load_plan(asked.against, (), recipe.task) if asked.against is not None else plain_beside(plan)
    two = room_for_two(start, plan)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="sameday-verify-") as folder:
        found, plain, resumed_from = _compared(trial, plan, against, home, Path(folder), asked.ranks, two, say)
    fields = changed(against, plan, recipe.dropout > 0)
    _keep_bits(found, fields, plan, against)
    return Report(
        recipe=recipe,
        names=(str(asked.plan or "chosen for this machine"), str(asked.against or f"plain: {recipe.plain}")),
        fields=fields,
        precision=trial.recipe.precision,
        steps=asked.steps,
        sizes=plain,
        killed_in=trial.dies_in + 1,
        resumed_from=resumed_from,
        ranks=asked.ranks,
        found=found,
        seconds=time.perf_counter() - began,
    )


def _plan(asked: Asked, recipe: Recipe, start: Start, sets: Sequence[str], say: Say) -> Plan:
    """The plan that is judged: a file's, or the one that `train` would choose."""
    if asked.plan is not None:
        return load_plan(asked.plan, sets, recipe.task)
    plan, reasons = automatic_plan(start, recipe, sets, asked.ranks)
    for name, why in reasons.items():
        say(f"plan.{name}: {getattr(plan, name)}, because {why}")
    return plan


def _compared(
    trial: Trial, plan: Plan, against: Plan, home: Path, folder: Path, ranks: int, two: bool, say: Say
) -> tuple[Any, tuple[int, ...], int]:
    from sameday.hardware.machine import device_kind
    from sameday.verify.compare import compare, doubtful
    from sameday.verify.trace import Trace

    jobs = {name: trial.job(p, home, folder / name) for name, p in (("plan", plan), ("against", against))}
    if needs_reference(trial.recipe, device_kind(plan)):
        jobs["reference"] = reference_job(jobs["against"], folder / "reference")
    lanes = [{name: job for name, job in jobs.items() if name != "against"}, {"against": jobs["against"]}]
    Arms(say, ranks).run(lanes if two else [jobs])
    traces = {name: Trace(job.out) for name, job in jobs.items()}
    found = compare(traces["plan"], traces["against"], traces.get("reference"))
    if doubtful(found):
        say("in float32 the arms are further apart than most: a reference in float64 will tell")
        judge = reference_job(jobs["against"], folder / "reference", double=True)
        Arms(say, ranks).run([{"reference": judge}])
        found = compare(traces["plan"], traces["against"], Trace(judge.out), double=True)
    sizes = tuple(len(record.facts["order"]) for _, record in sorted(traces["against"].last.items()))
    return found, sizes, traces["plan"].resumed_from


def room_for_two(start: Start, plan: Plan) -> bool:
    """Whether two arms fit on the GPU side by side. On a CPU they would only wait for each other."""
    from sameday.hardware.machine import device_kind, look

    kind = device_kind(plan)
    return kind == "cuda" and start.two_fit(look(kind).memory)


def _keep_bits(found: Any, fields: dict[str, tuple[Any, Any, Claim]], plan: Plan, against: Plan) -> None:
    """Where only fields differ that claim the same bits, anything less is a broken claim. A GPU gives equal bits only
    to deterministic plans."""
    from sameday.hardware.machine import device_kind
    from sameday.verify.structure import Difference

    exact = device_kind(plan) == "cpu" or (plan.deterministic and against.deterministic)
    if exact and not found.bitwise and all(claim == "bitwise" for *_, claim in fields.values()):
        name = ", ".join(fields) or "two equal plans"
        found.differences.append(Difference(None, "claim", name, "the same bits are claimed, and they are not", True))
