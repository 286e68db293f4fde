"""What may be tried: the plan's fields in groups that go together. Nothing here changes what model comes out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sameday.spec.plan import Plan

BUDGETS = tuple(2**n for n in range(8, 18))
"""Tokens of a micro-batch."""

PICTURES = (256, 64)
"""Of a micro-batch, where a step has more."""

GPU_VARIABLES = ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
"""That people copy, and that something reads."""


@dataclass(frozen=True)
class Choice:
    """`values` are tried one after another; with `climb` they are in order, and only neighbours of the best are."""

    name: str
    values: tuple[dict[str, Any], ...]
    climb: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for value in self.values for name in value))


def choices(task: str, device: str, triton: bool, cores: int, batch: int) -> list[Choice]:
    """For this machine and steps of `batch` samples, what gave most elsewhere first."""
    cuda = device == "cuda"
    return [*(_vqa(cuda, triton) if task == "vqa" else _classify(cuda, triton, batch)), *_any(cuda, cores)]


def _vqa(cuda: bool, triton: bool) -> list[Choice]:
    kernels = ("sdpa", "split", *(("flex",) if cuda and triton else ()))
    found = [
        Choice("share_images", ({"share_images": True, "packing": True, "max_questions": None},)),
        Choice("label_only_logits", ({"label_only_logits": True},)),
        Choice("checkpointing", ({"checkpointing": "none"},)),
        Choice("token_budget", tuple({"token_budget": n, "max_questions": None} for n in BUDGETS), climb=True),
    ]
    if cuda and triton:
        padded = tuple({"compile": "layers", "pad_to_multiple": multiple} for multiple in (32, 128))
        found.append(Choice("compile", padded))
    return [*found, Choice("attention", tuple({"attention": kernel} for kernel in kernels))]


def _classify(cuda: bool, triton: bool, batch: int) -> list[Choice]:
    found = [Choice("images_on", ({"images_on": "device"},)), Choice("rotary", ({"rotary": "cached"},))]
    if cuda and triton:
        found.insert(0, Choice("level_kernel", ({"level_kernel": "fused", "compile": "none"},)))
        found.append(Choice("compile", ({"compile": "layers", "level_kernel": "plain"},)))
    if cuda:
        graphs = {"cuda_graphs": True, "images_on": "device", "workers": 0}
        found.insert(1, Choice("cuda_graphs", (graphs,)))
        found.append(Choice("cudnn_benchmark", ({"cudnn_benchmark": True},)))
    smaller = tuple({"micro_batch": n} for n in PICTURES if n < batch)
    return [*found, Choice("channels_last", ({"channels_last": True},)), Choice("micro_batch", smaller)]


def _any(cuda: bool, cores: int) -> list[Choice]:
    counts = sorted({n for n in (1, 2, 4, 8) if n < cores})
    implementations = ("fused", "foreach") if cuda else ("foreach", "fused")
    found = [Choice("optimizer_impl", tuple({"optimizer_impl": name} for name in implementations))]
    if counts:
        found.append(Choice("workers", tuple({"workers": n, "pin_memory": cuda} for n in counts), climb=True))
    variables = GPU_VARIABLES if cuda else tuple({"OMP_NUM_THREADS": str(n)} for n in sorted({1, cores}))
    return [*found, Choice("environment", tuple({"environment": each} for each in variables))]


def differing(choice: Choice, settled: Mapping[str, tuple[str, str]]) -> Choice:
    """Without what automatic fields come to here anyway: it would be the same thing under another name."""
    same = {name: value for name, (value, _) in settled.items()}
    kept = tuple(value for value in choice.values if not all(same.get(name) == each for name, each in value.items()))
    return replace(choice, values=kept)


def without(best: Plan, plain: Plan, fields: Iterable[str]) -> Plan:
    """The best plan with these fields as the plain plan has them."""
    return best.model_copy(update={name: getattr(plain, name) for name in fields})


def choices_made(best: Plan, plain: Plan, known: Sequence[Choice]) -> list[tuple[Choice, dict[str, Any]]]:
    """The choices by which the best plan is another than the plain one, each with what it set. A field that several
    choices share belongs to each of them that is there: a choice is there where a field of its own is."""
    found = []
    for number, choice in enumerate(known):
        change = {name: getattr(best, name) for name in choice.fields if getattr(best, name) != getattr(plain, name)}
        earlier = {name for other in known[:number] for name in other.fields}
        if set(change) - earlier:
            found.append((choice, change))
    return found
