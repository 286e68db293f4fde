"""What must be equal to the letter in two arms: who is in each step and how they look, rates, parameter groups, dtypes,
what requires gradients, train flags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file

from sameday.verify.trace import Record, Trace


@dataclass(frozen=True)
class Difference:
    """Where the arms part: in which step, at what, and how far. An `exact` one is no matter of rounding."""

    step: int | None
    what: str
    name: str
    text: str
    exact: bool = False

    def __str__(self) -> str:
        when = "before the first step" if self.step == 0 else f"step {self.step}" if self.step else "over all steps"
        return f"{when}, {self.what}: {self.name}: {self.text}"


def _exact(step: int, what: str, name: str, text: str) -> Difference:
    return Difference(step, what, name, text, exact=True)


def structure(plan: Trace, plain: Trace) -> Iterator[Difference]:
    """Everything that must be equal to the letter."""
    for name in sorted(plan.start.keys() ^ plain.start.keys()):
        yield _exact(0, "trained parameters", name, "trained in only one of the arms")
        break
    for name in sorted(plan.start.keys() & plain.start.keys()):
        if not torch.equal(plan.start[name], plain.start[name]):
            yield _exact(0, "starting weights", name, "not the same")
            break
    for part, step in ((1, 0), (2, plan.resumed_from)):
        here, there = plan.structures(part), plain.structures(part)
        for number in range(max(len(here), len(there))):
            # Where one of them changed no more, it stayed as it was.
            pair = here[min(number, len(here) - 1)], there[min(number, len(there) - 1)]
            if pair[0] != pair[1]:
                yield from _model(step, *pair)
                break
    for record in plan.records:
        yield from _step(record, plain)
    for step in sorted(plain.last.keys() ^ plan.last.keys()):
        yield _exact(step, "steps", f"step {step}", "only one of the arms did it")
    for trace in (plan, plain):
        yield from _itself(trace)


def _model(step: int, here: dict[str, Any], there: dict[str, Any]) -> Iterator[Difference]:
    for name in sorted(here["parameters"].keys() | there["parameters"].keys()):
        a, b = here["parameters"].get(name), there["parameters"].get(name)
        if a != b:
            words = ("dtype", "requires a gradient", "shape")
            pairs = zip(words, a or ("none",) * 3, b or ("none",) * 3, strict=True)
            yield _exact(step, "parameters", name, ", ".join(f"{word}: {x}, not {y}" for word, x, y in pairs if x != y))
            break
    odd = sorted(set(here["in training"]) ^ set(there["in training"]))
    if odd:
        yield _exact(step, "train flags", odd[0] or "the model", f"{len(odd)} modules differ")
    names = sorted(here["dropout"].keys() | there["dropout"].keys())
    odd = [name for name in names if here["dropout"].get(name) != there["dropout"].get(name)]
    if odd:
        pair = here["dropout"].get(odd[0]), there["dropout"].get(odd[0])
        yield _exact(step, "dropout", odd[0], f"{pair[0]}, not {pair[1]}")


def _itself(trace: Trace) -> Iterator[Difference]:
    """What an arm must agree on with itself: resume, ranks, and the files it leaves."""
    first = min(record.step for record in trace.records if record.part == 2)
    if first != trace.resumed_from + 1:
        yield _exact(first, "resume", "the first step after it", f"{first}, not {trace.resumed_from + 1}")
    for drift in trace.drift:
        yield _exact(drift["step"], "weights of the ranks", f"rank {drift['ranks'][0]}", "not those of the first rank")
        break
    last = trace.last[max(trace.last)]
    weights = load_file(last.weights)
    for name in sorted(weights.keys() | trace.final.keys()):
        if name not in weights or name not in trace.final or not torch.equal(weights[name], trace.final[name]):
            yield _exact(last.step, "saved weights", name, "not what training ended with")
            break


def _step(record: Record, plain: Trace) -> Iterator[Difference]:
    if record.step not in plain.last:
        return
    here, there = record.facts, plain.last[record.step].facts
    again = " (after the resume)" if record.part == 2 else ""
    if here["order"] != there["order"]:
        yield _exact(record.step, "samples" + again, *_odd(here["order"], there["order"]))
        return
    a, b = ({seen["id"]: seen for seen in facts["samples"]} for facts in (here, there))
    counts = [len(facts["samples"]) for facts in (here, there)]
    if counts[0] != counts[1] or a.keys() != b.keys():
        ids = [[f"sample {seen['id']}" for seen in facts["samples"]] for facts in (here, there)]
        yield _exact(record.step, "samples in the micro-batches" + again, *_odd(*ids))
        return
    for key in a:
        for what in a[key]["counts"]:
            here_of, there_of = a[key]["counts"][what], b[key]["counts"][what]
            if here_of != there_of:
                text = f"{here_of}, not {there_of}"
                yield _exact(record.step, f"number of {what}" + again, f"sample {key}", text)
                return
        mine, other = a[key]["digests"], b[key]["digests"]
        # Of an image that comes as features there are no patches to compare; its features show in the gradient.
        names = [what for what in mine.keys() | other.keys() if what != "patches" or what in mine.keys() & other.keys()]
        odd = [what for what in sorted(names) if mine.get(what) != other.get(what)]
        if odd:
            yield _exact(record.step, " and ".join(odd) + again, f"sample {key}", "not the same")
            return
    if here["divided by"] != there["divided by"]:
        text = f"{here['divided by']}, not {there['divided by']}"
        yield _exact(record.step, "loss divided by" + again, "the step", text)
    yield from _groups(record.step, here["groups"], there["groups"], again)


def _odd(here: list[str], there: list[str]) -> tuple[str, str]:
    for i in range(max(len(here), len(there))):
        a = here[i] if i < len(here) else "nothing"
        b = there[i] if i < len(there) else "nothing"
        if a != b:
            return a, f"where {b} is expected ({len(here)} samples, expected {len(there)})"
    raise AssertionError("the lists are equal")


def _groups(step: int, here: list[Any], there: list[Any], again: str) -> Iterator[Difference]:
    a, b = ({name: group for group in groups for name in group["names"]} for groups in (here, there))
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            yield _exact(step, "parameter groups" + again, name, "only one of the arms updates it")
            return
        for what in ("lr", "weight_decay", "betas", "eps"):
            if a[name][what] != b[name][what]:
                label = "learning rate" if what == "lr" else f"parameter groups, {what}"
                yield _exact(step, label + again, name, f"{a[name][what]}, not {b[name][what]}")
                return
