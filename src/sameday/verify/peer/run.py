"""`sameday verify RECIPE --against transformers`: a plan of ours beside a plain loop of transformers and PEFT."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sameday.commands.session import Session, Specs
from sameday.spec.errors import BadInput
from sameday.spec.recipe import Recipe
from sameday.tasks.registry import setup_of
from sameday.tasks.setup import TaskSetup
from sameday.verify.arm import QUESTIONS, START, Job
from sameday.verify.processes import Arms, Say
from sameday.verify.report import Report
from sameday.verify.trial import check_data, make_trial

NAME = "transformers"
PRECISION = "float32"
MEASURED = {
    "float32": "the limits were measured on equivalent plans of ours, not across trainers",
    "bf16": "above the furthest of 37 comparisons with tiny models on a CPU; no more is known",
}
"""Where the limits come from."""
OPTIMIZER = ("learning_rate", "betas", "eps", "weight_decay", "max_grad_norm", "schedule")


def verify_against_peer(
    recipe: Path, plan: Path | None, sets: Sequence[str], steps: int, precision: str | None, ranks: int, say: Say
) -> Report:
    """In float32, where nothing hides behind rounding, unless another format is asked for."""
    from sameday.verify.trace import Trace

    asked = Specs.from_files(recipe, plan, sets)
    trial = make_trial(asked.recipe, steps, precision or PRECISION)
    refuse(setup_of(asked.recipe, asked.home))
    # Chosen and checked for the format that is compared in.
    specs = replace(asked, recipe=asked.recipe.model_copy(update={"precision": trial.recipe.precision}))
    session = Session.start(specs, ranks=ranks)
    check_data(trial, session, True, say)
    for choice in session.choices() if specs.automatic else ():
        say(choice)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="sameday-verify-") as folder:
        job = replace(trial.job(session.plan, session.home, Path(folder) / "plan"), peer=True)
        settings = session.setup.plain_settings()
        arms = Arms(say, ranks)
        arms.run([{"plan": job}])
        arms.peer(NAME, peer_job(job, settings, Path(folder) / NAME))
        comparison, sizes, resumed_from = judge(job, settings, Path(folder), arms, say)
        recorded = {"plan": Trace(job.out).recorded} if job.plan.cuda_graphs else {}
    return Report(
        recipe=asked.recipe,
        names=(str(plan or "chosen for this machine"), f"{NAME} {version(NAME)} and peft {version('peft')}"),
        fields={},
        precision=trial.recipe.precision,
        steps=steps,
        sizes=sizes,
        killed_in=trial.dies_in + 1,
        resumed_from=resumed_from,
        ranks=ranks,
        comparison=comparison,
        seconds=time.perf_counter() - began,
        false_alarms=MEASURED[trial.recipe.precision],
        dropout=False,
        peer=True,
        recorded=recorded,
    )


def refuse(setup: TaskSetup) -> None:
    if lost := setup.not_plain():
        raise BadInput(f"--against {NAME}: a plain loop of {NAME} and PEFT cannot do {', '.join(lost)}")


def peer_job(ours: Job, settings: dict[str, Any], out: Path, reference: str | None = None) -> dict[str, Any]:
    """What the other trainer does, once our arm has left the questions and the starting adapter. As a `reference` it
    only computes gradients, in that format."""
    from sameday.hardware.machine import device_kind

    recipe: Recipe = ours.recipe
    return {
        **settings,
        **{name: getattr(recipe, name) for name in OPTIMIZER},
        "warmup_steps": recipe.warmup_steps or 0,
        "steps": json.loads((ours.out / QUESTIONS).read_text()),
        "start": str(ours.out / START),
        "stored": recipe.precision,
        "format": reference or recipe.precision,
        "trajectory": reference is None,
        "device": device_kind(ours.plan),
        "out": str(out),
    }


def judge(ours: Job, settings: dict[str, Any], folder: Path, arms: Arms, say: Say) -> tuple[Any, tuple[int, ...], int]:
    """Both arms have run. bf16 is judged by the other trainer's float32, and where float32 leaves a doubt, its float64
    is asked."""
    from transformers import AutoTokenizer

    from sameday.verify.compare import compare, doubtful
    from sameday.verify.limits import ACROSS, LIMITS
    from sameday.verify.peer.differ import SEEN, Differ
    from sameday.verify.trace import Trace

    def reference(precision: str) -> Trace:
        out = folder / f"reference in {precision}"
        arms.peer("reference", peer_job(ours, settings, out, precision))
        return Trace(out)

    tokenizer = AutoTokenizer.from_pretrained(settings["model"], revision=settings["revision"])
    half = ours.recipe.precision == "bf16"
    plan, peer, differ = Trace(ours.out), Trace(folder / NAME), Differ(tokenizer.decode, half)
    limits = ACROSS if half else LIMITS
    comparison = compare(plan, peer, reference("float32") if half else None, limits=limits, differ=differ)
    if doubtful(comparison):
        say("in float32 the arms are further apart than most: a reference in float64 will tell")
        comparison = compare(plan, peer, reference("float64"), double=True, differ=differ)
    comparison.seen = list(SEEN)
    comparison.note("question", differ.largest)
    return comparison, tuple(len(record.facts["order"]) for _, record in sorted(peer.last.items())), plan.resumed_from
