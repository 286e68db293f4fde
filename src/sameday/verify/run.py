"""`sameday verify RECIPE --plan PLAN`: which arms are run, and what their traces say."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sameday.commands.session import Session, Specs, all_of_a_plan, resolve
from sameday.spec.limits import RANKS
from sameday.spec.load import load_plan
from sameday.spec.plan import Claim, Plan, changed
from sameday.verify.peer.run import NAME, verify_against_peer
from sameday.verify.processes import Arms, Say
from sameday.verify.report import Report
from sameday.verify.trial import Trial, check_data, make_trial, needs_reference, plain_beside, reference_job


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
    RANKS.check("--ranks", asked.ranks)
    if asked.against == Path(NAME):
        return verify_against_peer(asked.recipe, asked.plan, asked.sets, asked.steps, asked.precision, asked.ranks, say)
    specs = Specs.from_files(asked.recipe, asked.plan, asked.sets).first_stage(say)
    trial = make_trial(specs.recipe, asked.steps, asked.precision)  # refuses too few steps before anything is loaded
    session = Session.start(specs, ranks=asked.ranks)
    check_data(trial, session, not specs.part, say)
    recipe, plan, home = session.recipe, session.plan, session.home
    for choice in session.choices() if specs.automatic else ():
        say(choice)
    with all_of_a_plan(home):
        against = load_plan(asked.against, (), recipe) if asked.against is not None else plain_beside(plan)
    resolve(against, session.setup, session.machine)  # before an arm has run for minutes
    fields = changed(against, plan, recipe.dropout > 0)
    same_masks = all(claim != "statistical" for *_, claim in fields.values())
    trial = replace(trial, dropout=same_masks)
    # On a CPU two arms would only wait for each other.
    two = session.machine.device == "cuda" and session.setup.fits_two_arms(session.machine.memory)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="sameday-verify-") as folder:
        comparison, plain, resumed_from, recorded = _compared(
            trial, plan, against, home, Path(folder), asked.ranks, two, say
        )
    _keep_bits(comparison, fields, plan, against)
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
        comparison=comparison,
        seconds=time.perf_counter() - began,
        false_alarms=session.setup.false_alarms,
        dropout=same_masks,
        recorded=recorded,
    )


def _compared(
    trial: Trial, plan: Plan, against: Plan, home: Path, folder: Path, ranks: int, two: bool, say: Say
) -> tuple[Any, tuple[int, ...], int, dict[str, tuple[int, int]]]:
    from sameday.hardware.machine import device_kind
    from sameday.verify.compare import compare, doubtful
    from sameday.verify.limits import limits_of
    from sameday.verify.trace import Trace

    jobs = {name: trial.job(p, home, folder / name) for name, p in (("plan", plan), ("against", against))}
    if needs_reference(trial.recipe, device_kind(plan)):
        jobs["reference"] = reference_job(jobs["against"], folder / "reference")
    lanes = [{name: job for name, job in jobs.items() if name != "against"}, {"against": jobs["against"]}]
    Arms(say, ranks).run(lanes if two else [jobs])
    traces = {name: Trace(job.out) for name, job in jobs.items()}
    comparison = compare(traces["plan"], traces["against"], traces.get("reference"), limits=limits_of(trial.recipe))
    if doubtful(comparison):
        say("in float32 the arms are further apart than most: a reference in float64 will tell")
        judge = reference_job(jobs["against"], folder / "reference", double=True)
        Arms(say, ranks).run([{"reference": judge}])
        comparison = compare(traces["plan"], traces["against"], Trace(judge.out), double=True)
    sizes = tuple(len(record.facts["order"]) for _, record in sorted(traces["against"].last.items()))
    recorded = {name: traces[name].recorded for name in ("plan", "against") if jobs[name].plan.cuda_graphs}
    return comparison, sizes, traces["plan"].resumed_from, recorded


def _keep_bits(comparison: Any, fields: dict[str, tuple[Any, Any, Claim]], plan: Plan, against: Plan) -> None:
    """Where only fields differ that claim the same bits, anything less is a broken claim. A GPU gives equal bits only
    to deterministic plans."""
    from sameday.hardware.machine import device_kind
    from sameday.verify.structure import Difference

    exact = device_kind(plan) == "cpu" or (plan.deterministic and against.deterministic)
    if exact and not comparison.bitwise and all(claim == "bitwise" for *_, claim in fields.values()):
        name = ", ".join(fields) or "two equal plans"
        comparison.differences.append(
            Difference(None, "claim", name, "the same bits are claimed, and they are not", True)
        )
