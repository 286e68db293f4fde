"""`sameday verify RECIPE --plan PLAN`: the arms, each in fresh processes, then the verdict."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sameday.spec.errors import EXIT_OUT_OF_MEMORY, BadInput
from sameday.spec.load import load_plan, load_recipe, split_sets
from sameday.spec.plan import Plan, claims
from sameday.spec.recipe import Recipe
from sameday.train.launch import automatic_plan, model_config
from sameday.verify.arm import DIED, Job
from sameday.verify.report import Report

LEAST_STEPS = 4
Say = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """A recipe cut short, so that a few steps cross an epoch's end, a partial batch, a kill and a resume."""

    recipe: Recipe
    steps: int
    few: dict[str, int]
    dies_in: int

    def plan(self, plan: Plan) -> Plan:
        """A plan that would save after the kill only saves at the epoch's end instead."""
        late = isinstance(plan.save_steps, int) and plan.save_steps > self.dies_in
        return plan.model_copy(update={"save_steps": "epoch"}) if late else plan


def make_trial(recipe: Recipe, steps: int, precision: str | None = None) -> Trial:
    if steps < LEAST_STEPS:
        raise BadInput(f"--steps {steps}: two epochs, a kill and a resume need at least {LEAST_STEPS}")
    per_epoch, batch = steps // 2, recipe.effective_batch
    warm = recipe.warmup_steps or recipe.warmup_ratio
    changes: dict[str, Any] = {"max_steps": steps, "warmup_ratio": 0.0, "warmup_steps": 2 if warm else None}
    if precision is not None:
        changes["precision"] = precision
    few = {"train": per_epoch * batch - batch // 2, "val": min(32, 2 * batch)}
    return Trial(recipe.model_copy(update=changes), steps, few, per_epoch + 1)


def verify_plan(
    recipe_path: Path,
    plan_path: Path | None,
    against_path: Path | None,
    sets: Sequence[str],
    steps: int,
    precision: str | None,
    ranks: int,
    say: Say,
) -> Report:
    recipe_sets, plan_sets = split_sets(sets)
    recipe, home = load_recipe(recipe_path, recipe_sets), recipe_path.resolve().parent
    trial = make_trial(recipe, steps, precision)
    if plan_path is not None:
        plan = load_plan(plan_path, plan_sets)
    else:
        plan, reasons = automatic_plan(recipe, model_config(recipe, home), plan_sets, ranks)
        for name, why in reasons.items():
            say(f"plan.{name}: {getattr(plan, name)}, because {why}")
    against = load_plan(against_path, ()) if against_path is not None else plain_beside(plan)
    names = (str(plan_path or "chosen for this machine"), str(against_path or "plain: one question at a time"))
    folder = Path(tempfile.mkdtemp(prefix="sameday-verify-"))
    began = time.perf_counter()
    arms = {"plan": plan, "against": against}
    jobs = {
        n: Job(trial.recipe, trial.plan(p), home, folder / n, steps, trial.few, trial.dies_in) for n, p in arms.items()
    }
    judged = trial.recipe.precision != "float32"
    if judged:
        jobs = {name: replace(job, rounded=True) for name, job in jobs.items()}
        jobs["reference"] = reference_job(jobs["against"], folder / "reference")
    lanes = [[name for name in jobs if name != "against"], ["against"]]
    if not room_for_two(recipe, home, plan):
        lanes = [list(jobs)]
    with ThreadPoolExecutor(len(lanes)) as pool:
        done = [pool.submit(run_arms, {name: jobs[name] for name in lane}, say, ranks) for lane in lanes]
    for lane_done in done:
        lane_done.result()

    from sameday.verify.compare import Trace, compare

    traces = {name: Trace(job.out) for name, job in jobs.items()}
    found = compare(traces["plan"], traces["against"], traces.get("reference"))
    report = Report(
        recipe=recipe,
        names=names,
        fields=changed_fields(plan, against, dropout_of(recipe) > 0),
        precision=trial.recipe.precision,
        steps=steps,
        sizes=tuple(len(record.facts["order"]) for _, record in sorted(traces["against"].last.items())),
        killed_in=trial.dies_in + 1,
        resumed_from=traces["plan"].resumed_from,
        ranks=ranks,
        found=found,
        seconds=time.perf_counter() - began,
    )
    shutil.rmtree(folder)
    return report


def room_for_two(recipe: Recipe, home: Path, plan: Plan) -> bool:
    """Whether two arms fit on the GPU side by side: the reference takes twice the weights in float32 and about as
    much for activations, another arm the weights and activations. On a CPU they would only wait for each other."""
    from sameday.hardware.choose import language_weights
    from sameday.hardware.machine import device_kind, look

    kind = device_kind(plan)
    return kind == "cuda" and look(kind).memory > 5 * 2 * language_weights(model_config(recipe, home).text_config)


def plain_beside(plan: Plan) -> Plan:
    """The plain plan where this one runs, and as strict about bits."""
    return Plan(device=plan.device, environment=plan.environment, deterministic=plan.deterministic)


def reference_job(plain: Job, out: Path) -> Job:
    """The plain plan in float32, from weights that bf16 holds exactly."""
    half = plain.recipe.precision == "bf16"
    recipe = plain.recipe.model_copy(update={"precision": "float32"})
    return replace(plain, recipe=recipe, plan=plain_beside(plain.plan), out=out, rounded=half, trajectory=False)


def changed_fields(plan: Plan, against: Plan, dropout: bool) -> dict[str, tuple[Any, Any, str]]:
    """Every field in which the plans differ, with its claim."""
    known = claims(dropout)
    pairs = {name: (getattr(against, name), getattr(plan, name)) for name in Plan.model_fields}
    return {name: (*pair, known[name]) for name, pair in pairs.items() if pair[0] != pair[1]}


def dropout_of(recipe: Recipe) -> float:
    return recipe.lora.dropout if recipe.train == "lora" else 0.0


def run_arms(jobs: dict[str, Job], say: Say, ranks: int) -> None:
    for name, job in jobs.items():
        run_arm(job, name, say, ranks if name == "plan" else 1)


def run_arm(job: Job, name: str, say: Say, ranks: int = 1) -> None:
    """Both parts of an arm. The kill is real; any other end before the last step is a failure."""
    job.out.mkdir(parents=True)
    for part in (1, 2) if job.trajectory else (1,):
        began = time.perf_counter()
        code, log = _process(job, part, ranks)
        if name == "reference" and code == EXIT_OUT_OF_MEMORY:
            # Slower and smaller; the same numbers.
            job = replace(job, plan=job.plan.model_copy(update={"checkpointing": "full"}))
            code, log = _process(job, part, ranks)
        killed = part == 1 and job.trajectory
        if (job.out / DIED).exists() != killed or (code != 0) != killed:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
            raise BadInput(f"verify: the arm '{name}' failed with exit code {code}; {log} ends with\n{tail}")
        (job.out / DIED).unlink(missing_ok=True)
        did = (
            "gradients"
            if not job.trajectory
            else "gradients, trained until killed"
            if part == 1
            else "resumed to the end"
        )
        say(f"{name}: {did}, {time.perf_counter() - began:.0f} s")


def _process(job: Job, part: int, ranks: int) -> tuple[int, Path]:
    job.write(job.out / "job.json")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)) if ranks > 1 else ()
    command = [sys.executable, *torchrun, "-m", "sameday.verify.arm", str(job.out / "job.json"), str(part)]
    log = job.out / f"part-{part}.log"
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    return done.returncode, log
