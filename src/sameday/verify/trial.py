"""A recipe cut short, so that a few steps cross an epoch's end, a partial batch, a kill and a resume; and the arms that
are needed to judge a plan by it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sameday.commands.batch import refuse_few
from sameday.commands.session import Session, silent
from sameday.spec.errors import BadInput
from sameday.spec.limits import VERIFIED_STEPS
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.tasks.base import Say
from sameday.verify.arm import Job

LEAST_STEPS = 4


@dataclass(frozen=True)
class Trial:
    recipe: Recipe
    steps: int
    few: dict[str, int]
    dies_in: int
    dropout: bool = False

    def plan(self, plan: Plan) -> Plan:
        """A plan that would save after the kill only saves at the epoch's end instead."""
        late = isinstance(plan.save_steps, int) and plan.save_steps > self.dies_in
        return plan.model_copy(update={"save_steps": "epoch"}) if late else plan

    def job(self, plan: Plan, home: Path, out: Path) -> Job:
        rounded = self.recipe.precision == "bf16"
        return Job(
            self.recipe, self.plan(plan), home, out, self.steps, self.few, self.dies_in, rounded, dropout=self.dropout
        )


def make_trial(recipe: Recipe, steps: int, precision: str | None = None, dropout: bool = False) -> Trial:
    """`dropout` stays on where all arms draw the same masks."""
    if steps < LEAST_STEPS:
        raise BadInput(f"--steps {steps}: must be at least {LEAST_STEPS}, for two epochs, a kill and a resume")
    VERIFIED_STEPS.check("--steps", steps)
    per_epoch, batch = steps // 2, recipe.effective_batch
    warm = recipe.warmup_ratio if recipe.warmup_steps is None else recipe.warmup_steps
    changes: dict[str, Any] = {"max_steps": steps, "warmup_ratio": 0.0, "warmup_steps": 2 if warm else None}
    changes["best"] = None  # arms are compared at the same step
    if precision is not None:
        changes["precision"] = precision
    few = {"train": per_epoch * batch - batch // 2, "val": min(32, 2 * batch)}
    return Trial(recipe.model_copy(update=changes), steps, few, per_epoch + 1, dropout)


def check_data(trial: Trial, session: Session, whole: bool, say: Say) -> None:
    """Before an arm is started: whether a step can have as many samples as it says, and what its steps take on a CPU.
    No more samples are looked at than an arm would read. Of several sets so few may leave out what others have, so that
    all are counted before a recipe is refused."""
    from sameday.commands.outlook import check_steps

    setup, batch = session.setup, trial.recipe.effective_batch
    audited = setup.audit(silent, ("train",), trial.few)
    if audited.sizes["train"] < batch:
        refuse_few(trial.recipe, setup.audit(silent, ("train",)).sizes["train"], whole, say)
    if session.device.type == "cpu":
        few = replace(session, recipe=trial.recipe, audited=audited)
        # Two arms; a third one is for some formats alone.
        check_steps(few, setup.drop_too_long(audited.splits), 2 * trial.steps, say)


def plain_beside(plan: Plan) -> Plan:
    """The plain plan where this one runs."""
    return Plan(device=plan.device)


def needs_reference(recipe: Recipe, device: str) -> bool:
    """Whether a format is too coarse to compare two arms in it directly. A CPU computes tf32 as float32."""
    return recipe.precision == "bf16" or (recipe.precision == "tf32" and device == "cuda")


def reference_job(plain: Job, out: Path, double: bool = False) -> Job:
    """The plain plan's gradients in float32, or in float64, from the weights that the arms start from."""
    recipe = plain.recipe.model_copy(update={"precision": "float32"})
    return replace(plain, recipe=recipe, plan=plain_beside(plain.plan), out=out, trajectory=False, double=double)
