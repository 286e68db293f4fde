"""Comparisons in this process: the same code as in `sameday verify`, with an exception for the kill."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch

from sameday.spec.plan import Plan, changed
from sameday.spec.recipe import Recipe
from sameday.verify.arm import Job, Plant, run_here
from sameday.verify.compare import Comparison, compare, doubtful
from sameday.verify.trace import Trace
from sameday.verify.trial import Trial, make_trial, needs_reference, reference_job


def run(job: Job, plant: Plant | None = None) -> Trace:
    run_here(job, plant)
    return Trace(job.out)


def on_cpu(plan: Plan) -> Plan:
    """Tests in float32 hold a plan against the CPU's own kernels; where there is a GPU, the CPU must be asked for."""
    return plan.model_copy(update={"device": "cpu"}) if torch.cuda.is_available() else plan


class Plain:
    """What a trial's arms are compared with: the plain plan's arm and the references, each run once for all of them."""

    def __init__(self, root: Path, home: Path, trial: Trial, device: str) -> None:
        self.root, self.home, self.trial, self.device = root, home, trial, device

    def job(self, name: str, plan: Plan) -> Job:
        return self.trial.job(plan if self.device == "cuda" else on_cpu(plan), self.home, self.root / name)

    @cached_property
    def arm(self) -> Trace:
        return run(self.job("plain", Plan()))

    @cached_property
    def reference(self) -> Trace | None:
        if not needs_reference(self.trial.recipe, self.device):
            return None
        return run(reference_job(self.job("plain", Plan()), self.root / "reference"))

    @cached_property
    def double(self) -> Trace:
        return run(reference_job(self.job("plain", Plan()), self.root / "double", double=True))

    def judged(self, plan: Trace) -> Comparison:
        """As `sameday verify` does it: float64 is asked where float32 leaves a doubt."""
        found = compare(plan, self.arm, self.reference)
        return compare(plan, self.arm, self.double, double=True) if doubtful(found) else found


class Stage:
    """A recipe and its data. Dropout is on in a comparison unless the plan draws other masks, as in `sameday
    verify`."""

    def __init__(self, root: Path, home: Path, recipe: Recipe, steps: int = 6, device: str = "cpu") -> None:
        self.home, self.recipe = home, recipe
        self._plain = {
            on: Plain(where, home, make_trial(recipe, steps, dropout=on), device)
            for on, where in ((True, root), (False, root / "without dropout"))
        }

    def plain(self, plan: Plan) -> Plain:
        """What this plan is compared with."""
        fields = changed(Plan(), plan, self.recipe.dropout > 0)
        return self._plain[all(claim != "statistical" for *_, claim in fields.values())]

    def job(self, name: str, plan: Plan) -> Job:
        return self.plain(plan).job(name, plan)

    def compare(self, plan: Plan, plant: Plant | None = None) -> Comparison:
        plain = self.plain(plan)
        _ = plain.arm, plain.reference  # before the other arm, whose plant must not reach them
        return plain.judged(run(self.job("plan", plan), plant))
