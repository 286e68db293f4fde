"""Whether a cache pays: what a step needs, what the disk gives, and what that frees. Pure arithmetic over what was
measured."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import get_args

from sameday.cache.key import Kind

WORTH_IT = 1.02
"""A gain below this is not told from noise, and a cache has its price."""
SPARE = 1.25
"""Disks are shared: so many times what is needed must be there."""


@dataclass(frozen=True)
class Measured:
    """Of a step on the average, images decoded ahead of it. `decode` is what one process takes for one image from its
    file to its bytes; `workers` is how many of them work beside the training, none meaning that it decodes itself.
    `disk` is bytes per second, read and checked."""

    step: float
    tower: float
    images: float
    decode: float
    workers: int
    disk: float
    pixel_bytes: float
    feature_bytes: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 1e-12 if name in ("step", "disk") else 0
            if not isinstance(value, int | float) or not least <= value < math.inf:
                raise ValueError(f"{name} {value!r} is no number that can have been measured")

    @property
    def without(self) -> float:
        """Seconds of a step without a cache."""
        return self.beside(self.images * self.decode / max(1, self.workers))

    @property
    def rest(self) -> float:
        """Seconds of a step without its tower, which two clocks may have as longer than the step."""
        return max(self.step - self.tower, self.step / 100)

    def beside(self, preparing: float, step: float | None = None) -> float:
        """Seconds of a step whose images take so long to prepare: workers do it meanwhile."""
        step = self.step if step is None else step
        return max(step, preparing) if self.workers else step + preparing


@dataclass(frozen=True)
class Judgement:
    gain: float
    sentence: str


def judge(m: Measured) -> dict[Kind, Judgement]:
    """What each kind of cache would give here, in a sentence."""
    if not m.images:
        return {kind: Judgement(1.0, f"{kind}: no images, no gain") for kind in get_args(Kind)}
    return {"pixels": _pixels(m), "features": _features(m)}


def paying(m: Measured) -> set[Kind]:
    """The kinds that give something here."""
    return {kind for kind, judgement in judge(m).items() if judgement.gain >= WORTH_IT}


def _pixels(m: Measured) -> Judgement:
    gain = m.without / m.beside(m.pixel_bytes / m.disk)
    who = f"{m.workers} worker{'s' if m.workers != 1 else ''}" if m.workers else "the training process"
    able = f"{who} decode{'' if m.workers > 1 else 's'} {max(m.workers, 1) / max(m.decode, 1e-9):.0f} images/s"
    needed = f"{m.images / m.step:.1f} needed"
    if m.workers and gain < WORTH_IT:
        return Judgement(gain, f"pixels: decoding keeps up ({able}, {needed}), no gain")
    return Judgement(gain, f"pixels: {able}, {needed}; {_disk(m.pixel_bytes / m.step, m)}: {gain:.2f}×")


def _features(m: Measured) -> Judgement:
    needed = _disk(m.feature_bytes / m.rest, m)
    if m.workers and m.disk * m.rest < SPARE * m.feature_bytes:
        return Judgement(0.0, f"features: {needed}, too little: no gain")
    after = m.beside(m.feature_bytes / m.disk, m.rest)
    freed = 1000 * (m.without - after)
    if freed <= 0:
        return Judgement(m.without / after, f"features: {needed}, frees nothing: no gain")
    return Judgement(
        m.without / after,
        f"features: {needed}, frees {freed:.0f} of {1000 * m.without:.0f} ms: {m.without / after:.2f}×",
    )


def _disk(needed: float, m: Measured) -> str:
    return f"{needed / 1e9:.2f} GB/s needed, {m.disk / 1e9:.1f} GB/s here"
