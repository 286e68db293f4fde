"""What must be equal between a plan of ours and another trainer over the same steps: the starting adapter, questions,
images, tokens, labels, rates; and each question's loss by a limit. Differences are told by the text around them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from sameday.verify.limits import LIMITS
from sameday.verify.structure import Difference
from sameday.verify.trace import Record, Trace

Decode = Callable[[Sequence[int]], str]

SEEN = ("starting adapter", "images", "tokens", "labels")
"""What is compared to the letter besides samples, rates and groups."""
RATE = 1e-12
"""Relative difference of learning rates: two formulas of one curve, in float64."""
ALIKE = ("RGB", "L", "1")
"""Modes of images that everybody turns to RGB in one way."""
AROUND = 8
"""Tokens shown on each side of a difference."""


class Differ:
    """Gives differences as `structure` does, with text by the tokenizer's `decode`; and then knows the largest relative
    difference of a question's loss."""

    def __init__(self, decode: Decode, bf16: bool = False) -> None:
        self._decode, self._limit = decode, LIMITS.trained(bf16)["question"]
        self.largest = 0.0

    def __call__(self, plan: Trace, peer: Trace) -> Iterator[Difference]:
        for name in sorted(plan.start.keys() ^ peer.start.keys()):
            where = "here" if name in plan.start else "there"
            yield _exact(0, "trained parameters", name, f"trained {where} alone")
            break
        for name in sorted(plan.start.keys() & peer.start.keys()):
            if not torch.equal(plan.start[name], peer.start[name]):
                yield _exact(0, "starting adapter", name, "not the same")
                break
        for record in plan.records:
            if record.step in peer.last:
                yield from self._step(record, peer.last[record.step].facts)
        for step in sorted(plan.last.keys() ^ peer.last.keys()):
            yield _exact(step, "steps", f"step {step}", "done by only one of the arms")

    def _step(self, record: Record, there: Mapping[str, Any]) -> Iterator[Difference]:
        here, step = record.facts, record.step
        again = " (after the resume)" if record.part == 2 else ""
        names = dict(zip((each["id"] for each in there["samples"]), there["order"], strict=True))
        ids = sorted(each["id"] for each in here["samples"])
        if ids != sorted(names):
            missing = [names[each] for each in names if each not in ids]
            text = f"{len(ids)} in the micro-batches here, {len(names)} there"
            yield _exact(step, "questions" + again, missing[0] if missing else "the step", text)
            return
        mine = {each["id"]: each for each in here["samples"]}
        for theirs in there["samples"]:
            for what, text in self._question(mine[theirs["id"]], theirs):
                yield _exact(step, what + again, names[theirs["id"]], text)
                return  # losses and gradients follow from it
        yield from _rates(step, here["groups"], there["groups"], again)
        for theirs in there["samples"]:
            a, b = mine[theirs["id"]]["loss"], theirs["loss"]
            off = abs(a - b) / max(abs(b), 1e-30)
            self.largest = max(self.largest, off)
            if not off <= self._limit:
                text = f"{a:.6f}, not {b:.6f} (limit {self._limit:.0e} relative)"
                yield Difference(step, "loss of a question" + again, names[theirs["id"]], text)
                return

    def _question(self, here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """The first thing in which a question is not the same, and how."""
        a, b = here.get("grids", []), there.get("grids", [])
        if a != b:
            yield "images", _other_grids(a, b, there["images"])
        elif here["tokens"] != there["tokens"]:
            yield "tokens", self._other_tokens(here["tokens"], there["tokens"])
        elif here["labels"] != there["labels"]:
            yield "labels", self._other_labels(here["labels"], there["labels"], there["tokens"])
        elif "pixels" in here and here["pixels"] != there["pixels"]:
            yield "pixel values", _other_pixels(here["some pixels"], there["some pixels"], there)

    def _other_tokens(self, here: Sequence[int], there: Sequence[int]) -> str:
        at = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there)))
        before = self._text(there[max(0, at - AROUND) : at])
        a, b = (self._text(each[at : at + AROUND]) for each in (here, there))
        return f"behind {before} comes {a} here, {b} there (token {at} of {len(here)} here, of {len(there)} there)"

    def _other_labels(self, here: Sequence[Any], there: Sequence[Any], tokens: Sequence[int]) -> str:
        a, b = dict(map(tuple, here)), dict(map(tuple, there))
        counts = f"({len(a)} labels here, {len(b)} there)"
        for place in sorted(a.keys() | b.keys()):
            behind = f"behind {self._text(tokens[max(0, place - AROUND) : place])}"
            if place not in a:
                return f"{self._text([b[place]])} {behind} is not learned here, and is there {counts}"
            if place not in b:
                return f"{self._text([a[place]])} {behind} is learned here, and is not there {counts}"
            if a[place] != b[place]:
                return f"{behind} {self._text([a[place]])} is learned here, {self._text([b[place]])} there {counts}"
        raise AssertionError("the labels are equal")

    def _text(self, tokens: Sequence[int]) -> str:
        return json.dumps(self._decode(tokens), ensure_ascii=False) if tokens else "nothing"


def _exact(step: int, what: str, name: str, text: str) -> Difference:
    return Difference(step, what, name, text, exact=True)


def _other_grids(here: Sequence[Any], there: Sequence[Any], images: Sequence[str]) -> str:
    for a, b, image in zip(here, there, images, strict=False):
        if a != b:
            return f"{image} is resized to {a[0]}×{a[1]} patches here, {b[0]}×{b[1]} there"
    return f"{len(here)} here, {len(there)} there"


def _other_pixels(here: Sequence[float], there: Sequence[float], question: Mapping[str, Any]) -> str:
    a, b = torch.tensor(here).double(), torch.tensor(there).double()
    said = [f"mean {x.mean():.4f} and standard deviation {x.std():.4f}" for x in (a, b)]
    modes = zip(question["images"], question["modes"], strict=True)
    odd = [f"{image} has mode {mode}" for image, mode in modes if mode not in ALIKE]
    note = f"; {', '.join(odd)}, which the two may turn to RGB in different ways" if odd else ""
    return (
        f"pixel_values of {', '.join(question['images'])}: up to {(a - b).abs().max():.3g} apart, {said[0]} here, "
        f"{said[1]} there{note}"
    )


def _rates(step: int, here: Sequence[Any], there: Sequence[Any], again: str) -> Iterator[Difference]:
    a, b = ({name: group for group in groups for name in group["names"]} for groups in (here, there))
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            yield _exact(step, "parameter groups" + again, name, "updated by only one of the arms")
            return
        if not math.isclose(a[name]["lr"], b[name]["lr"], rel_tol=RATE):
            yield _exact(step, "learning rate" + again, name, f"{a[name]['lr']}, not {b[name]['lr']}")
            return
        for what in ("weight_decay", "betas", "eps"):
            if a[name][what] != b[name][what]:
                yield _exact(step, f"AdamW's {what}" + again, name, f"{a[name][what]}, not {b[name][what]}")
                return
