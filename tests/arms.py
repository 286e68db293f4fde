"""Comparisons in this process: the same code as in `sameday verify`, with an exception for the kill."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.verify.arm import Job, Plant, run_here
from sameday.verify.compare import Comparison, compare
from sameday.verify.run import make_trial, reference_job
from sameday.verify.trace import Trace


def run(job: Job, plant: Plant | None = None) -> Trace:
    run_here(job, plant)
    return Trace(job.out)


class Stage:
    """A recipe and its data, the plain plan's arm and the float32 reference, each run once for all comparisons."""

    def __init__(self, root: Path, home: Path, recipe: Recipe, steps: int = 6) -> None:
        self.root, self.home, self.trial = root, home, make_trial(recipe, steps)
        self.precision = recipe.precision

    def job(self, name: str, plan: Plan) -> Job:
        trial = self.trial
        rounded = self.precision == "bf16"
        few, dies_in = trial.few, trial.dies_in
        return Job(trial.recipe, trial.plan(plan), self.home, self.root / name, trial.steps, few, dies_in, rounded)

    @cached_property
    def plain(self) -> Trace:
        return run(self.job("plain", Plan()))

    @cached_property
    def reference(self) -> Trace | None:
        if self.precision == "float32":
            return None
        return run(reference_job(self.job("plain", Plan()), self.root / "reference"))

    def compare(self, plan: Plan, plant: Plant | None = None) -> Comparison:
        plain = self.plain  # before the other arm, whose plant must not reach it
        reference = self.reference
        return compare(run(self.job("plan", plan), plant), plain, reference)
