"""What may be tried: the plan's fields in groups that go together. Nothing here changes what model comes out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sameday.spec.plan import Plan
from sameday.tasks.setup import Choice, Resolved, TaskSetup
from sameday.tune.trial import THREADS

if TYPE_CHECKING:  # it loads torch
    from sameday.hardware.machine import Machine

GPU_VARIABLES = ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
"""That people copy, and that something reads."""


def choices(setup: TaskSetup, machine: Machine) -> list[Choice]:
    """For this machine, what gave most elsewhere first: a CPU's threads, which decide what all else gives; the task's
    own fields; those of all tasks."""
    own, everywhere = setup.choices(machine), _any(machine.device == "cuda", machine.cores)
    if machine.device == "cuda":
        return [*own, *everywhere, _environment(GPU_VARIABLES)]
    counts = sorted({1, machine.cores // 2, machine.cores} - {0})
    return [_environment([{THREADS: str(count)} for count in counts]), *own, *everywhere]


def _environment(variables: Iterable[dict[str, str]]) -> Choice:
    return Choice("environment", tuple({"environment": each} for each in variables))


def _any(cuda: bool, cores: int) -> list[Choice]:
    counts = sorted({n for n in (1, 2, 4, 8) if n < cores})
    implementations = ("fused", "foreach") if cuda else ("foreach", "fused")
    options = [Choice("optimizer_impl", tuple({"optimizer_impl": name} for name in implementations))]
    if counts:
        options.append(Choice("workers", tuple({"workers": n, "pin_memory": cuda} for n in counts), climb=True))
    return options


def differing(choice: Choice, resolved: Resolved) -> Choice:
    """Without what automatic fields come to here anyway: it would be the same thing under another name."""
    same = {name: value for name, (value, _) in resolved.values.items()}
    kept = tuple(value for value in choice.values if not all(same.get(name) == each for name, each in value.items()))
    return replace(choice, values=kept)


def without(best: Plan, plain: Plan, fields: Iterable[str]) -> Plan:
    """The best plan with these fields as the plain plan has them."""
    return best.model_copy(update={name: getattr(plain, name) for name in fields})


def choices_made(best: Plan, plain: Plan, known: Sequence[Choice]) -> list[tuple[Choice, dict[str, Any]]]:
    """The choices by which the best plan is another than the plain one, each with what it set. A field that several
    choices share belongs to each of them that is there: a choice is there where a field of its own is."""
    made = []
    for number, choice in enumerate(known):
        change = {name: getattr(best, name) for name in choice.fields if getattr(best, name) != getattr(plain, name)}
        earlier = {name for other in known[:number] for name in other.fields}
        if set(change) - earlier:
            made.append((choice, change))
    return made
