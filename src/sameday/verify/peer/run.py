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
from sameday.tasks.base import TaskSetup
from sameday.tasks.registry import setup_of
from sameday.verify.arm import QUESTIONS, START, Job
from sameday.verify.processes import Arms, Say
from sameday.verify.report import Report
from sameday.verify.trial import make_trial

NAME = "transformers"
PRECISION = "float32"
OPTIMIZER = ("learning_rate", "betas", "eps", "weight_decay", "max_grad_norm", "schedule")


def verify_against_peer(
    recipe: Path, plan: Path | None, sets: Sequence[str], steps: int, ranks: int, say: Say
) -> Report:
    asked = Specs.from_files(recipe, plan, sets)
    trial = make_trial(asked.recipe, steps, PRECISION)
    refuse(setup_of(asked.recipe, asked.home))
    # Chosen and checked for the format that is compared in.
    specs = replace(asked, recipe=asked.recipe.model_copy(update={"precision": PRECISION}))
    session = Session.start(specs, ranks=ranks)
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
    return Report(
        recipe=asked.recipe,
        names=(str(plan or "chosen for this machine"), f"{NAME} {version(NAME)} and peft {version('peft')}"),
        fields={},
        precision=PRECISION,
        steps=steps,
        sizes=sizes,
        killed_in=trial.dies_in + 1,
        resumed_from=resumed_from,
        ranks=ranks,
        comparison=comparison,
        seconds=time.perf_counter() - began,
        false_alarms="those of equivalent plans of ours",
        dropout=False,
        peer=True,
    )


def refuse(setup: TaskSetup) -> None:
    if lost := setup.not_plain():
        raise BadInput(f"--against {NAME}: a plain loop of {NAME} and PEFT cannot do {', '.join(lost)}")


def peer_job(ours: Job, settings: dict[str, Any], out: Path, double: bool = False) -> dict[str, Any]:
    """What the other trainer does, once our arm has left the questions and the starting adapter. `double` is for its
    gradients in float64."""
    from sameday.hardware.machine import device_kind

    recipe: Recipe = ours.recipe
    return {
        **settings,
        **{name: getattr(recipe, name) for name in OPTIMIZER},
        "warmup_steps": recipe.warmup_steps or 0,
        "steps": json.loads((ours.out / QUESTIONS).read_text()),
        "start": str(ours.out / START),
        "stored": recipe.precision,
        "format": "float64" if double else recipe.precision,
        "trajectory": not double,
        "device": device_kind(ours.plan),
        "out": str(out),
    }


def judge(
    ours: Job, settings: dict[str, Any], folder: Path, arms: Arms | None, say: Say
) -> tuple[Any, tuple[int, ...], int]:
    """Both arms have run. Where float32 leaves a doubt, the other trainer's float64 is asked."""
    from transformers import AutoTokenizer

    from sameday.verify.compare import compare, doubtful
    from sameday.verify.peer.differ import SEEN, Differ
    from sameday.verify.trace import Trace

    tokenizer = AutoTokenizer.from_pretrained(settings["model"], revision=settings["revision"])
    plan, peer, differ = Trace(ours.out), Trace(folder / NAME), Differ(tokenizer.decode)
    comparison = compare(plan, peer, differ=differ)
    if doubtful(comparison) and arms is not None:
        say("in float32 the arms are further apart than most: a reference in float64 will tell")
        arms.peer("reference", peer_job(ours, settings, folder / "reference", double=True))
        comparison = compare(plan, peer, Trace(folder / "reference"), double=True, differ=differ)
    comparison.seen = list(SEEN)
    return comparison, tuple(len(record.facts["order"]) for _, record in sorted(peer.last.items())), plan.resumed_from
