"""Comparisons in this process: the same code as in `sameday verify`, with an exception for the kill."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.verify.arm import Job, Plant, run_here
from sameday.verify.compare import Comparison, compare, doubtful
from sameday.verify.trace import Trace
from sameday.verify.trial import make_trial, needs_reference, reference_job


def run(job: Job, plant: Plant | None = None) -> Trace:
    run_here(job, plant)
    return Trace(job.out)


class Stage:
    """A recipe and its data, the plain plan's arm and the float32 reference, each run once for all comparisons."""

    def __init__(self, root: Path, home: Path, recipe: Recipe, steps: int = 6) -> None:
        self.root, self.home, self.trial = root, home, make_trial(recipe, steps)

    def job(self, name: str, plan: Plan) -> Job:
        return self.trial.job(plan, self.home, self.root / name)

    @cached_property
    def plain(self) -> Trace:
        return run(self.job("plain", Plan()))

    @cached_property
    def reference(self) -> Trace | None:
        if not needs_reference(self.trial.recipe, "cpu"):
            return None
        return run(reference_job(self.job("plain", Plan()), self.root / "reference"))

    def compare(self, plan: Plan, plant: Plant | None = None) -> Comparison:
        plain = self.plain  # before the other arm, whose plant must not reach it
        reference = self.reference
        return self.judged(run(self.job("plan", plan), plant), plain, reference)

    def judged(self, plan: Trace, plain: Trace, reference: Trace | None) -> Comparison:
        """As `sameday verify` does it: float64 is asked where float32 leaves a doubt."""
        found = compare(plan, plain, reference)
        return compare(plan, plain, self.double, double=True) if doubtful(found) else found

    @cached_property
    def double(self) -> Trace:
        return run(reference_job(self.job("plain", Plan()), self.root / "double", double=True))
