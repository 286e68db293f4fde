"""What was measured here, on another kind of GPU: an estimate with a range, and called one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from sameday.hardware.known import REACHED, KnownGpu
from sameday.spec.errors import BadInput
from sameday.suite.times.measured import Measured
from sameday.suite.times.pace import Pace


class Range(NamedTuple):
    low: float
    high: float

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high)

    @property
    def error(self) -> float:
        """The share by which the middle may be off."""
        return self.high / self.middle - 1


@dataclass(frozen=True)
class Elsewhere:
    """A kind of GPU that is not here. Steps were measured with no more memory than it has, and as if the GPU were
    no newer, so that the plan fits."""

    gpu: KnownGpu

    def factors(self, one: Measured) -> Range | None:
        """How many times as long a step takes there. Either what a step takes beyond its floor is the host's and takes
        as long there, or all of it is the GPU's and is slower as its matmuls or its memory are. None where the floor
        was not measured."""
        pace = one.pace({}, "")
        if pace is None or one.flop is None or not one.flop_per_second or not one.memory_bytes_per_second:
            return None
        slower = one.flop_per_second / (REACHED * self.gpu.flop_per_second)
        floor = min(1.0, (one.floor or 0.0) / pace.step)
        return _sorted(1 - floor + floor * slower, max(slower, self._memory(one)))

    def _memory(self, one: Measured) -> float:
        assert one.memory_bytes_per_second
        return one.memory_bytes_per_second / (REACHED * self.gpu.memory_bytes_per_second)

    def pace(self, one: Measured, sizes: Mapping[str, int]) -> Pace | None:
        factors, here = self.factors(one), one.pace(sizes, "")
        if factors is None or here is None:
            return None
        validate = None if here.validate is None else here.validate * factors.middle
        error = max(here.error, factors.error)
        return replace(
            here,
            step=here.step * factors.middle,
            error=error,
            warm=here.warm + one.compiling,
            validate=validate,
            where=self.words(one),
        )

    def evaluation(self, one: Measured, samples: int) -> Range | None:
        """Generated tokens wait for the memory, or for the host."""
        factors = self.factors(one)
        if factors is None:
            return None
        decoding = _sorted(1.0, self._memory(one))
        scores, answers = samples * (one.score_each or 0.0), samples * (one.answer_each or 0.0)
        return Range(
            scores * factors.low + answers * decoding.low,
            scores * factors.high + answers * decoding.high,
        )

    def words(self, one: Measured) -> str:
        pace = one.pace({}, "")
        assert pace is not None and one.floor is not None
        return (
            f"an estimate for {self.gpu.name}, nothing was measured there: steps on {one.machine} with "
            f"{self.gpu.memory / 2**30:.0f} GB of its memory take {pace.step / one.floor:.1f} times their floor"
        )


def _sorted(one: float, other: float) -> Range:
    return Range(min(one, other), max(one, other))


def known_gpu(name: str) -> KnownGpu:
    from sameday.hardware.known import KNOWN

    if name not in KNOWN:
        raise BadInput(f"--gpu {name}: no figures of it are known; allowed: {', '.join(KNOWN)}")
    return KNOWN[name]
