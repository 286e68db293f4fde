"""The least time that a step can take on this device: what must be computed and moved, at the rates that were measured.
Everything overlaps with everything, so that the slowest resource alone is the bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sameday.hardware.peaks import Peaks
from sameday.hardware.ranks import Ranks
from sameday.tasks.base import StepCost, Task
from sameday.tasks.setup import TaskSetup

Resource = Literal["arithmetic", "memory", "copy", "disk"]


@dataclass(frozen=True)
class Bound:
    """`seconds_of` each resource, of those whose rate is known."""

    least: StepCost
    seconds_of: Mapping[Resource, float]

    @property
    def by(self) -> Resource:
        return max(self.seconds_of, key=lambda resource: self.seconds_of[resource])

    @property
    def seconds(self) -> float:
        return self.seconds_of[self.by]

    @property
    def without_disk(self) -> float:
        """What holds for images that memory has, or a faster disk."""
        return max(seconds for resource, seconds in self.seconds_of.items() if resource != "disk")

    def share(self, measured: float) -> float:
        """Of the floor that a step reaches which took so many seconds: 1 is as fast as can be."""
        if not measured > 0:
            raise ValueError(f"a step cannot have taken {measured} seconds")
        return self.seconds / measured

    def as_dict(self, measured: float | None = None) -> dict[str, Any]:
        reached = {} if measured is None else {"share": self.share(measured)}
        named = {"seconds": self.seconds, "bound_by": self.by, "seconds_of": dict(self.seconds_of)}
        return {**named, **reached, "least": asdict(self.least)}


@dataclass(frozen=True)
class Floor:
    """`plan`: as the plan cuts the step and shares its images. `alone`: the same samples one at a time. `executed_flop`
    is what the plan's kernels do to get what needs `plan.least.flop`."""

    peaks: Peaks
    plan: Bound
    alone: Bound
    executed_flop: int

    @property
    def executed_seconds(self) -> float:
        return matmul_seconds(self.executed_flop, self.plan.least.executed_fp8_flop, self.peaks)

    def as_dict(self, measured: float | None = None) -> dict[str, Any]:
        """For JSON; with a measured step time in seconds also the share of each floor that it reaches."""
        return {
            "measured_seconds": measured,
            "executed_flop": self.executed_flop,
            "plan": self.plan.as_dict(measured),
            "alone": self.alone.as_dict(measured),
            "peaks": self.peaks.as_dict(),
        }


def floor_of(
    setup: TaskSetup, task: Task, step: int, peaks: Peaks, budget: int | None = None, ranks: Ranks | None = None
) -> Floor:
    """Of this rank's part of a step. No image is read; `budget` overrides the plan's, as in training."""
    ranks, precision = ranks or Ranks(), setup.recipe.precision
    if precision != peaks.precision:
        raise ValueError(f"the peaks are of {peaks.precision} matmuls, and the recipe's are {precision}")
    plan = task.cost(step, budget, ranks)
    alone = task.with_plan(setup.alone).cost(step, 1, ranks)
    return Floor(peaks, bound(plan, peaks), bound(alone, peaks), plan.executed_flop)


def matmul_seconds(flop: float, in_fp8: float, peaks: Peaks) -> float:
    """Of so many FLOP, of which some are in fp8."""
    return (flop - in_fp8) / peaks.flop_per_second + in_fp8 / (peaks.fp8_flop_per_second or peaks.flop_per_second)


def bound(least: StepCost, peaks: Peaks) -> Bound:
    seconds: dict[Resource, float] = {
        "arithmetic": matmul_seconds(least.flop, least.fp8_flop, peaks),
        "memory": least.memory_bytes / peaks.memory_bytes_per_second,
        "copy": least.copy_bytes / peaks.copy_bytes_per_second,
    }
    if peaks.disk_bytes_per_second is not None:
        seconds["disk"] = least.disk_bytes / peaks.disk_bytes_per_second
    return Bound(least, seconds)
