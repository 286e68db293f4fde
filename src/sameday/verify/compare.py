"""Two traces side by side: structure exactly, then gradients, losses and updates by measured limits. Pure reading:
nothing is computed on a device."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from sameday.verify.limits import LIMITS, Limits
from sameday.verify.replay import clipping, replay
from sameday.verify.structure import Difference, structure
from sameday.verify.trace import Record, Tensors, Trace

LEAST_ERROR = 1e-6
"""Relative error below which a plan is not told from float32's own rounding."""


@dataclass
class Comparison:
    """What was found, and by which limits. `differences` are in the order in which a run would meet them."""

    precision: str
    limits: Limits = LIMITS
    differences: list[Difference] = field(default_factory=list)
    bitwise: bool = True
    worst: dict[str, float] = field(default_factory=dict)
    groups: dict[str, dict[str, float]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    """The limits of those in `worst` whose limits depend on how many numbers they are of."""
    seen: list[str] = field(default_factory=list)
    """What was compared of each sample."""

    def note(self, measure: str, value: float, name: str = "", limit: float | None = None) -> None:
        """Keep the largest value of a measure, and whose it was. Where each has a limit of its own, the one that is the
        largest over its limit is kept, and the limit with it."""
        before = self.worst.get(measure, -math.inf) / self.bounds.get(measure, 1.0)
        # What is not a number is beyond everything, and stays.
        if not value / (limit or 1.0) <= before and not math.isnan(before):
            self.worst[measure], self.names[measure] = value, name
            if limit is not None:
                self.bounds[measure] = limit

    @property
    def same(self) -> bool:
        return not self.differences


def compare(
    plan: Trace,
    plain: Trace,
    reference: Trace | None = None,
    double: bool = False,
    limits: Limits = LIMITS,
    differ: Callable[[Trace, Trace], Iterator[Difference]] = structure,
) -> Comparison:
    """Without a reference the gradients are judged by each other, with one by their distance from it: bf16 against
    float32, or, where `double` says so, float32 against float64. `differ` finds what must be equal to the letter."""
    comparison = Comparison("float32" if reference is None or double else "bf16", limits)
    comparison.seen = [what for what in plain.seen if what in plan.seen]
    comparison.differences += differ(plan, plain)
    if reference is None:
        _fixed(comparison, plan, plain, limits)
    else:
        _against_reference(comparison, plan, plain, reference, limits)
        error = comparison.groups["all"]["error"]
        comparison.limits = limits = limits.looser(error) if double else limits.noisier(error)
    _trajectory(comparison, plan, plain, limits)
    _validation(comparison, plan, plain, limits)
    for arm, trace in (("the plan", plan), ("the other plan", plain)):
        _replayed(comparison, trace, arm, limits)
    if comparison.same:  # where training differs, what is generated does
        _generation(comparison, plan, limits)
    # As a run would meet them. Of gradients over all steps another step's samples may be the reason, where they differ.
    over_all = math.inf if any(difference.exact for difference in comparison.differences) else 1
    comparison.differences.sort(key=lambda difference: over_all if difference.step is None else difference.step)
    return comparison


def doubtful(comparison: Comparison) -> bool:
    """Whether float32 arms are further apart than most equivalent ones, yet not so far that it cannot be rounding: a
    deep model, or one that has learned its data, rounds more. A reference in float64 then tells."""
    direct = comparison.precision == "float32" and not comparison.groups
    rounding = not any(difference.exact for difference in comparison.differences)
    return direct and not comparison.same and rounding and comparison.worst["gradient"] < LIMITS.doubtful


# Gradients at the starting weights


def _fixed(comparison: Comparison, plan: Trace, plain: Trace, limits: Limits) -> None:
    for step in range(1, len(plain.fixed_losses) + 1):
        a, b = plan.fixed(step), plain.fixed(step)
        whole, each = apart(a, b)
        comparison.bitwise = comparison.bitwise and equal(a, b)
        comparison.note("gradient", whole)
        worst = max(each, key=each.__getitem__)
        comparison.note("tensor", each[worst], worst)
        if not (whole <= limits.gradient and each[worst] <= limits.tensor):
            beyond = [name for name in each if not each[name] < 0.1 * each[worst]]
            text = f"relative difference {each[beyond[0]]:.1e}, of all {whole:.1e} (limit {limits.gradient:.0e})"
            comparison.differences.append(Difference(step, "gradient", beyond[0], text))
        loss = relative(plan.fixed_losses[step - 1], plain.fixed_losses[step - 1])
        comparison.note("starting loss", loss)
        comparison.bitwise = comparison.bitwise and loss == 0


def _against_reference(comparison: Comparison, plan: Trace, plain: Trace, reference: Trace, limits: Limits) -> None:
    """R = √(Σ‖plan − ref‖² / Σ‖plain − ref‖²) and the slopes on the reference, per tensor, kind of tensor and all."""
    sums: dict[str, Tensor] = {}
    steps = len(plain.fixed_losses)
    for step in range(1, steps + 1):
        a, b, r = plan.fixed(step), plain.fixed(step), reference.fixed(step)
        comparison.bitwise = comparison.bitwise and equal(a, b)
        for name in r.keys() & a.keys() & b.keys():  # what only one of them trains is told by the structure
            x, y, z = a[name].double(), b[name].double(), r[name].double()
            products = ((x - z).square(), (y - z).square(), x * z, y * z, z * z, (z != 0).double())
            sums.setdefault(name, torch.zeros(steps, 6, dtype=torch.float64))[step - 1] = torch.stack(
                [p.sum() for p in products]
            )
    kinds: dict[str, list[str]] = {}
    for name in sorted(sums, key=in_model_order):
        kinds.setdefault(kind_of(name), []).append(name)
    whole = _judge(torch.stack(list(sums.values())).sum(0))
    comparison.groups["all"] = whole
    comparison.note("ratio_all", whole["R"])
    if not whole["R"] <= limits.ratio_all:
        text = f"R {whole['R']:.2f} (limit {limits.ratio_all})"
        worst = max(sums, key=lambda name: _judge(sums[name])["R"])
        first = _first(torch.stack(list(sums.values())).sum(0), limits.ratio_all)
        comparison.differences.append(Difference(first, "gradient", worst, "all tensors: " + text))
    for kind, members in kinds.items():
        together = torch.stack([sums[name] for name in members]).sum(0)
        group = _judge(together)
        limit, allowed = limits.ratio("ratio_group", group["numbers"]), limits.slope_of(group["numbers"])
        comparison.groups[kind] = {**group, "limit": limit}
        comparison.note("ratio_group", group["R"], kind, limit)
        comparison.note("slope", group["off"], kind, allowed)
        if not group["R"] <= limit:
            text = f"R {group['R']:.2f} (limit {limit:.2f})"
            first = _first(together, limit)
            comparison.differences.append(Difference(first, "gradient", members[0], f"{kind}: {text}"))
        if not group["off"] <= allowed:
            text = f"slope {group['slope']:.4f}, the other plan's {group['plain slope']:.4f}"
            text += f": {group['off']:.2f} of its error (limit {allowed:.2f})"
            comparison.differences.append(Difference(None, "slope of the gradient", members[0], f"{kind}: {text}"))
        for name in members:
            one = _judge(sums[name])
            limit = limits.ratio("ratio_tensor", one["numbers"])
            comparison.note("ratio_tensor", one["R"], name, limit)
            if not one["R"] <= limit:
                text = f"R {one['R']:.2f} (limit {limit:.2f})"
                comparison.differences.append(Difference(_first(sums[name], limit), "gradient", name, text))


def _first(sums: Tensor, limit: float) -> int | None:
    """The first step that is beyond the limit by itself."""
    return next((i for i, step in enumerate(sums, start=1) if not _judge(step[None])["R"] <= limit), None)


def _judge(sums: Tensor) -> dict[str, float]:
    """Over all steps, (steps, 6)."""
    off_plan, off_plain, on_plan, on_plain, size, numbers = sums.sum(0).tolist()
    if not size:  # a tensor that takes no part
        nothing = {"slope": 1.0, "plain slope": 1.0, "error": 0.0, "off": 0.0, "numbers": 0.0}
        return {"R": math.inf if off_plan else 1.0, **nothing}
    # An arm that computes in the reference's own format may be equal to it: its rounding is the measure then.
    off_plain = max(off_plain, LEAST_ERROR**2 * size)
    error = math.sqrt(off_plain / size)
    slopes = on_plan / size, on_plain / size
    return {
        "R": math.sqrt(off_plan / off_plain),
        "slope": slopes[0],
        "plain slope": slopes[1],
        "error": error,
        "off": (abs(slopes[0] - 1) - abs(slopes[1] - 1)) / error,
        "numbers": numbers,
    }


def kind_of(name: str) -> str:
    """What a tensor is, whichever layer it stands in: q_proj.lora_A for thirty-six of them."""
    words = [w for w in name.split(".") if not re.fullmatch(r"\d+|base_model|model|layers|default|weight", w)]
    return ".".join(words[-2:]) or name


# Once the arms have trained


def _trajectory(comparison: Comparison, plan: Trace, plain: Trace, limits: Limits) -> None:
    allowed = limits.trained(comparison.precision == "bf16")
    for record in plan.records:
        other = plain.last.get(record.step)
        if other is None:
            continue
        again = " (after the resume)" if record.part == 2 else ""
        if not record.cut or plan.last[record.step] is record:  # otherwise it is known from when it was done again
            _told(comparison, record, other, again, allowed)
        for what in ("gradient", "update"):
            limit = allowed[f"trained {what}"]
            files = (record.gradient, other.gradient) if what == "gradient" else (record.weights, other.weights)
            a: Tensors
            b: Tensors
            a, b = (load_file(file) for file in files)
            comparison.bitwise = comparison.bitwise and equal(a, b)
            if what == "update":
                a, b = _less(a, plan.start), _less(b, plain.start)
            whole, each = apart(a, b)
            comparison.note(f"trained {what}", whole)
            idle = [n for n in sorted(a.keys() & b.keys(), key=in_model_order) if a[n].any() != b[n].any()]
            if idle:
                text = "zero in only one of the arms"
                comparison.differences.append(Difference(record.step, f"{what} in training{again}", idle[0], text))
            if not whole <= limit:
                name = next(n for n in each if each[n] >= min(limit, max(each.values())))
                text = f"relative difference {each[name]:.1e}, of all {whole:.1e} (limit {limit:.0e})"
                comparison.differences.append(Difference(record.step, f"{what} in training{again}", name, text))


def _told(comparison: Comparison, record: Record, other: Record, again: str, allowed: Mapping[str, float]) -> None:
    """What the loop said of a step."""
    loss = relative(record.loss, other.loss)
    comparison.note("loss", loss)
    comparison.bitwise = comparison.bitwise and record.loss == other.loss
    if not loss <= allowed["loss"]:
        text = f"{record.loss:.6f}, not {other.loss:.6f} (limit {allowed['loss']:.0e} relative)"
        comparison.differences.append(Difference(record.step, "loss" + again, "training loss", text))
    norm = relative(record.norm, other.norm)
    comparison.note("norm", norm)
    if not norm <= allowed["norm"]:
        text = f"{record.norm:.6f}, not {other.norm:.6f} (limit {allowed['norm']:.0e} relative)"
        comparison.differences.append(Difference(record.step, "gradient in training" + again, "its norm", text))


def _validation(comparison: Comparison, plan: Trace, plain: Trace, limits: Limits) -> None:
    """The loss by its limit, how many samples were asked exactly, and other scores but for a few samples, since
    rounding may turn an answer that hangs in the balance."""
    limit = limits.trained(comparison.precision == "bf16")["validation"]
    for step in sorted(plan.validation.keys() & plain.validation.keys()):
        here, there = plan.validation[step], plain.validation[step]
        comparison.bitwise = comparison.bitwise and here == there
        for what, a, b in (("scores", sorted(here["scores"]), sorted(there["scores"])), *_exact_parts(here, there)):
            if a != b:
                comparison.differences.append(Difference(step, "validation", what, f"{a}, not {b}", exact=True))
        if here["scores"].keys() != there["scores"].keys() or not there["scores"]:
            continue
        asked = there["scores"]["samples"]
        turned = 1 if comparison.precision == "float32" else 1 + limits.bf16_turned * asked
        for name, b in there["scores"].items():
            a = here["scores"][name]
            if name == "loss":
                comparison.note("validation", relative(a, b))
            beyond = not relative(a, b) <= limit if name == "loss" else not abs(a - b) * asked <= turned
            if beyond and name != "samples":
                allowed = f"{limit:.0e} relative" if name == "loss" else f"{turned:.0f} samples"
                text = f"{a:.6f}, not {b:.6f} (limit {allowed})"
                comparison.differences.append(Difference(step, "validation", f"validation {name}", text))


def _generation(comparison: Comparison, plan: Trace, limits: Limits) -> None:
    """Generated answers are judged by the arm's own training, which is judged by the other arm's."""
    limit = limits.bf16_generation if comparison.precision == "bf16" else limits.generation
    if failed := plan.generation["failed"]:
        comparison.differences.append(Difference(0, "generated answers", "the first step's", failed, exact=True))
    for name, gap in plan.generation["gaps"].items():
        comparison.note("generation", gap, name, limit)
        if not gap <= limit:
            text = f"its likeliest token in training is {gap:.2g} standard deviations above it (limit {limit:.2g})"
            comparison.differences.append(Difference(0, "generated answer", name, text, exact=True))
            return


def _exact_parts(here: dict[str, Any], there: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    yield "samples", here["scores"].get("samples"), there["scores"].get("samples")
    yield "modules in training mode", here["in training"], there["in training"]


def _replayed(comparison: Comparison, trace: Trace, arm: str, limits: Limits) -> None:
    """An arm against itself: its gradients are clipped as the recipe says, and its weights are what AdamW makes of
    them, the resume included."""
    records = [trace.last[s] for s in sorted(trace.last)]
    for step, off in clipping(records):
        if not off <= limits.replay:
            text = f"{off:.1e} away from what {arm} told, clipped as the recipe says (limit {limits.replay:.0e})"
            comparison.differences.append(Difference(step, "gradient in training", "its norm", text))
            break
    for step, name, off in replay(trace.start, records):
        comparison.note("replay", off, name)
        if not off <= limits.replay:
            text = f"{off:.1e} away from AdamW on {arm}'s own gradients (limit {limits.replay:.0e})"
            comparison.differences.append(Difference(step, "update", name, text))
            return


# Arithmetic


def relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b) if b else math.inf if a else 0.0


def in_model_order(name: str) -> list[Any]:
    """Layer 2 before layer 10."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split(".")]


def equal(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def apart(a: Tensors, b: Tensors) -> tuple[float, dict[str, float]]:
    """Relative difference of all tensors together and of each. A tensor that is next to nothing beside the others is
    measured by what it would be if it were a thousandth of them."""
    names = sorted(a.keys() | b.keys(), key=in_model_order)
    pairs = {n: (a.get(n), b.get(n)) for n in names}
    off, size, count = {}, {}, {}
    for name, (x, y) in pairs.items():
        there = x if x is not None else y
        assert there is not None
        left, right = (there.new_zeros(there.shape) if t is None else t for t in (x, y))
        off[name] = float((left.double() - right.double()).square().sum())
        size[name] = float(right.double().square().sum())
        count[name] = there.numel()
    everything = sum(size.values())
    if not everything:
        return (math.inf if any(off.values()) else 0.0), {n: math.inf if off[n] else 0.0 for n in names}
    share = everything / sum(count.values()) * 1e-6
    each = {n: math.sqrt(off[n] / max(size[n], share * count[n])) for n in names}
    return math.sqrt(sum(off.values()) / everything), each


def _less(a: Tensors, b: Tensors) -> Tensors:
    return {name: a[name].double() - b[name].double() for name in a if name in b}
