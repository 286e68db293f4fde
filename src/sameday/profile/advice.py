"""What bounds a step, and what each remedy could give at most. Pure arithmetic over what was measured: a remedy can win
no more than the time it takes away, and no remedy computes faster than the floor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sameday.spec.plan import Plan

WORTH_NAMING = 1.02
"""What could give less than this is not told from noise."""

USUAL = 8192
"""Tokens of a micro-batch that keep a device busy."""

DATA = ("wait", "read", "decode", "resize", "copy")
COMPUTE = ("prepare", "tower", "forward", "loss", "backward")


@dataclass(frozen=True)
class Facts:
    """Of a step on the average, in seconds. `floor` is what the mathematics of the step takes at the machine's measured
    rates, each image once; `executed` what the plan's own products take at those rates; `alone` what those of one
    question at a time take."""

    task: str
    device: str
    plan: Plan
    parts: dict[str, float]
    cores: int
    micro_batches: float = 1.0
    workers: dict[str, float] = field(default_factory=dict)
    floor: float = 0.0
    executed: float = 0.0
    alone: float = 0.0
    bound: str = "arithmetic"
    """The resource that gives the floor."""
    busy: float | None = None
    free_memory: float = 1.0
    """The share of the device's memory that the step does not use."""
    frozen_tower: bool = True
    triton: bool = False
    waits: tuple[tuple[str, int], ...] = ()

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def time(self, *names: str) -> float:
        return sum(self.parts.get(name, 0.0) for name in names)

    @property
    def preparing(self) -> float:
        """Of images, whoever does it."""
        return sum(self.workers.values()) + self.time("read", "decode", "resize")

    @property
    def idle(self) -> float:
        """While a GPU has nothing to do, and not for want of data. A CPU is never told to be idle: what it spends
        beyond the products of many small micro-batches is counted instead."""
        if self.busy is not None:
            return max(0.0, (1 - self.busy) * self.total - self.time(*DATA))
        if self.device == "cpu" and self.micro_batches > 1:
            # Half of it, since what is not a product is not all a matter of size.
            return 0.5 * max(0.0, self.time(*COMPUTE) - self.executed) * (1 - 1 / self.micro_batches)
        return 0.0


@dataclass(frozen=True)
class Remedy:
    """`likely` seconds are what puts remedies in order; `at_most` is what is promised."""

    remedy: str
    at_most: float
    why: str
    likely: float
    change: dict[str, Any] = field(default_factory=dict)
    """The plan's fields with the values that try it, where it is in the plan."""


def bound_by(facts: Facts) -> str:
    """data, launches, or the resource that bounds the floor."""
    data, idle = facts.time(*DATA), facts.idle
    if data >= 0.1 * facts.total and data >= idle:
        return "data"
    return "launches" if idle >= 0.2 * facts.total else facts.bound


def advise(facts: Facts) -> list[Remedy]:
    """Those that could give something, the likeliest gain first."""
    found = [*_data(facts), *_model(facts), *_launches(facts)]
    return sorted((each for each in found if each.at_most >= WORTH_NAMING), key=lambda each: -each.likely)


def _remedy(
    facts: Facts, what: str, saved: float, why: str, likely: float | None = None, change: dict[str, Any] | None = None
) -> Remedy:
    """`saved` is the most that it takes away; never so much that a step would be faster than its floor."""
    least = max(facts.total - saved, facts.floor, facts.total / 1000)
    return Remedy(what, facts.total / min(least, facts.total), why, saved if likely is None else likely, change or {})


def _share(facts: Facts, seconds: float) -> str:
    return f"{seconds / facts.total:.0%} of the step"


def _data(facts: Facts) -> Iterator[Remedy]:
    plan, exposed = facts.plan, facts.time("wait", "read", "decode", "resize")
    preparing = facts.preparing
    # Without workers what is not read, decoded or resized is made from it, whatever keeps the images.
    images = exposed if plan.workers else facts.time("read", "decode", "resize")
    rest = facts.total - exposed
    most = max(1, facts.cores - 1)
    read = facts.workers.get("read", 0.0) + facts.time("read")
    keeps_up = preparing / most <= rest
    who = f"{plan.workers} worker{'s' if plan.workers > 1 else ''}" if plan.workers else "the training process"
    waited = f"{_share(facts, exposed)} is waited for"
    if plan.workers < most:
        why = f"data is prepared by {who}, and {waited}; there are {facts.cores} cores"
        left = max(0.0, preparing / most - rest)
        yield _remedy(facts, f"plan.workers {most}", exposed, why, max(0.0, exposed - left), {"workers": most})
    if facts.task == "vqa" and plan.cache == "none" and preparing:
        why = f"decoding and resizing take {preparing - read:.3f} s of {who} a step, and {waited}"
        # Where more workers would hide it, the disk's space is better kept.
        likely = (0.5 if keeps_up and plan.workers < most else 0.95) * images * (preparing - read) / preparing
        yield _remedy(facts, "plan.cache pixels", images, why, likely, {"cache": "pixels"})
    if read > 0.5 * preparing:
        why = f"reading takes {read:.3f} s a step, decoding and resizing {preparing - read:.3f}"
        yield _remedy(facts, "the images on a faster disk", images, why, images * read / preparing)
    if facts.device == "cuda" and not plan.pin_memory:
        copy = facts.time("copy")
        why = f"copies take {_share(facts, copy)}"
        yield _remedy(facts, "plan.pin_memory true", copy, why, change={"pin_memory": True})


def _model(facts: Facts) -> Iterator[Remedy]:
    plan, compute = facts.plan, facts.time(*COMPUTE)
    to_floor = max(0.0, compute - facts.floor)
    if facts.task == "vqa":
        tower, loss, forward = facts.time("tower"), facts.time("loss"), facts.time("forward")
        if facts.alone > 1.02 * facts.floor and not plan.share_images:
            repeated = facts.alone / facts.floor
            why = f"an image is computed for each question about it, {repeated:.1f} times the products that are needed"
            change = {"share_images": True, "packing": True, "max_questions": None}
            yield _remedy(facts, "plan.share_images true", to_floor, why, compute * (1 - 1 / repeated), change)
        if plan.checkpointing == "full" and facts.free_memory > 0.4:
            why = f"layers are computed twice, and {facts.free_memory:.0%} of the memory is free"
            saved = min(1.25 * forward, facts.time("backward"))
            yield _remedy(facts, "plan.checkpointing none", saved, why, forward, {"checkpointing": "none"})
        if not plan.label_only_logits:
            why = f"logits of every place, {_share(facts, loss)} forward and more backward"
            change = {"label_only_logits": True}
            yield _remedy(facts, "plan.label_only_logits true", min(3 * loss, compute), why, 1.5 * loss, change)
        if plan.cache != "features" and facts.frozen_tower and tower:
            saved = tower + facts.time("wait", "read", "decode", "resize", "copy")
            why = f"the frozen tower is {_share(facts, tower)}; `sameday cache` says whether the disk keeps up"
            yield _remedy(facts, "plan.cache features", saved, why, 0.9 * tower, {"cache": "features"})
    elif facts.device == "cuda" and facts.triton and plan.level_kernel == "plain":
        why = "latents pass through memory dozens of times"
        yield _remedy(facts, "plan.level_kernel fused", to_floor, why, 0.7 * compute, {"level_kernel": "fused"})
    if facts.device == "cuda" and plan.optimizer_impl != "fused":
        optimizer = facts.time("optimizer")
        why = f"the optimizer is {_share(facts, optimizer)}"
        yield _remedy(facts, "plan.optimizer_impl fused", optimizer, why, 0.8 * optimizer, {"optimizer_impl": "fused"})


def _launches(facts: Facts) -> Iterator[Remedy]:
    plan, idle = facts.plan, facts.idle
    compute = facts.time(*COMPUTE)
    to_floor = max(0.0, compute - facts.floor)
    for where, count in facts.waits[:1]:
        why = f"the host waits for the GPU {count} times a step there, and the GPU for the host {_share(facts, idle)}"
        yield _remedy(facts, f"no synchronisation at {where}", idle, why, 1.05 * idle)
    if facts.micro_batches > 1 and facts.free_memory > 0.4:
        name = "token_budget" if facts.task == "vqa" else "micro_batch"
        cost = "each costs its calls" if facts.busy is None else f"the GPU has nothing to do {_share(facts, idle)}"
        why = f"{facts.micro_batches:.0f} micro-batches a step, and {cost}"
        change: dict[str, Any] = {"token_budget": max(USUAL, 4 * plan.token_budget), "max_questions": None}
        if facts.task != "vqa":
            change = {"micro_batch": None}
        yield _remedy(facts, f"a larger plan.{name}", to_floor, why, idle, change)
    if facts.device == "cuda" and facts.task == "classify" and not plan.cuda_graphs:
        why = f"the GPU waits for launches {_share(facts, idle)}"
        yield _remedy(facts, "plan.cuda_graphs true", idle, why, 0.95 * idle, {"cuda_graphs": True})
    fused = facts.task == "classify" and plan.level_kernel == "fused"
    if facts.device == "cuda" and facts.triton and plan.compile == "none" and not fused:
        why = f"products need {_share(facts, facts.executed)}; the rest is launches and small kernels"
        likely = 0.5 * max(0.0, compute - facts.executed)
        yield _remedy(facts, "plan.compile layers", to_floor, why, likely, {"compile": "layers"})
