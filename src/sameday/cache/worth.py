"""Whether a cache pays: what a step needs, what the disk gives, and what that frees. Pure arithmetic over what was
measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Choice = Literal["none", "pixels", "features"]
WORTH_IT = 1.02
"""A gain below this is not told from noise, and a cache has its price."""
SPARE = 1.25
"""Disks are shared: so many times what is needed must be there."""


@dataclass(frozen=True)
class Measured:
    """Of a step on the average, images decoded ahead of it. `decode` is what one process takes for one image from its
    file to its bytes; `workers` is how many of them work beside the training, none meaning that it decodes itself."""

    step: float
    tower: float
    images: float
    decode: float
    workers: int
    disk: float
    pixel_bytes: float
    feature_bytes: float

    @property
    def without(self) -> float:
        """Seconds of a step without a cache."""
        decoding = self.images * self.decode
        return max(self.step, decoding / self.workers) if self.workers else self.step + decoding


@dataclass(frozen=True)
class Judgement:
    gain: float
    sentence: str


def judge(m: Measured) -> dict[Choice, Judgement]:
    """What each kind of cache would give here, in a sentence."""
    return {"pixels": _pixels(m), "features": _features(m)}


def choose(m: Measured) -> tuple[Choice, str]:
    """The best kind, and why."""
    found = judge(m)
    best: Choice = max(found, key=lambda kind: found[kind].gain)
    if found[best].gain < WORTH_IT:
        return "none", "; ".join(each.sentence for each in found.values())
    return best, found[best].sentence


def _pixels(m: Measured) -> Judgement:
    after = max(m.step, m.pixel_bytes / m.disk)
    gain = m.without / after
    who = f"{m.workers} worker{'s' if m.workers != 1 else ''}" if m.workers else "the training process"
    able = f"{who} decode{'' if m.workers > 1 else 's'} {max(m.workers, 1) / m.decode:.0f} images/s"
    needed = f"{m.images / m.step:.1f} needed"
    if m.workers and gain < WORTH_IT:
        return Judgement(gain, f"pixels: decoding keeps up ({able}, {needed}), no gain")
    return Judgement(gain, f"pixels: {able}, {needed}; {_disk(m.pixel_bytes / m.step, m)}: {gain:.2f}×")


def _features(m: Measured) -> Judgement:
    rest = m.step - m.tower
    after = max(rest, m.feature_bytes / m.disk)
    gain = m.without / after
    freed = (
        f"frees {1000 * (m.without - after):.0f} of {1000 * m.without:.0f} ms" if after < m.without else "frees nothing"
    )
    if m.disk * rest < SPARE * m.feature_bytes:
        return Judgement(min(gain, 1.0), f"features: {_disk(m.feature_bytes / rest, m)}, too little: no gain")
    return Judgement(gain, f"features: {_disk(m.feature_bytes / rest, m)}, {freed}: {gain:.2f}×")


def _disk(needed: float, m: Measured) -> str:
    return f"{needed / 1e9:.2f} GB/s needed, {m.disk / 1e9:.1f} GB/s here"
