"""The face every task shows before the loop: data, model and plan are checked here, so that bad input is found before
weights are loaded. Importing it loads no torch, since a plan may set variables that torch reads at its start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sameday.spec.plan import Plan

if TYPE_CHECKING:
    import torch

    from sameday.hardware.machine import Machine
    from sameday.tasks.base import Task

Say = Callable[[str], None]


@dataclass(frozen=True)
class LeftOut:
    """A sample that is not trained on, and why."""

    where: str
    what: str


@dataclass(frozen=True)
class Audited:
    """Data that was checked. `parts` goes from the first rank to the others, and into `load`; only the task knows what
    it is. `sizes` counts the samples of each part."""

    parts: Any
    sizes: dict[str, int]
    left_out: list[LeftOut]


@dataclass(frozen=True)
class Caching:
    """What `sameday cache` was asked for: to make entries, or to read all of them, or to remove those of no use to the
    recipe; and with `measure` to time some steps, so as to say what a cache gives."""

    kind: Literal["pixels", "features"]
    what: Literal["fill", "check", "prune", "prune all"] = "fill"
    measure: bool = False


class Start(Protocol):
    """Made of a recipe and the folder that its paths start at. Methods that need torch import it themselves."""

    def lacks(self, part: str) -> str | None:
        """Why the recipe has no such part of the data (train, val or test); None where it has one."""

    def audit(self, say: Say, parts: Sequence[str] = ("train", "val"), few: Mapping[str, int] | None = None) -> Audited:
        """Those of the parts that there are, checked to the last sample; all problems in one BadInput. `few` takes
        only so many samples of a part."""

    def check_model(self, say: Say) -> None:
        """Refuses a model that cannot be trained, and says what will be downloaded."""

    def choose_plan(self, machine: Machine, ranks: int) -> tuple[Plan, dict[str, str]]:
        """A safe plan for this machine, each of its fields with the reason."""

    def settle(self, plan: Plan, machine: Machine) -> dict[str, tuple[str, str]]:
        """What the plan leaves to the machine: field, what it comes to, and why. BadInput where it cannot run here."""

    def thrifty(self, plan: Plan) -> Plan:
        """The same numbers with less memory, however slow."""

    def two_fit(self, memory: int) -> bool:
        """Whether two arms of a comparison and a float32 reference's activations fit in so many bytes of a GPU."""

    def for_evaluation(self, plan: Plan) -> Plan:
        """A recorded plan without what only its training's machine may have."""

    def sift(self, parts: Any) -> Any:
        """Data that was audited, as `load` would make it ready: whoever loads it several times saves that."""

    def load(self, plan: Plan, device: torch.device, parts: Any) -> Task:
        """The task, its model ready on the device, for data that was audited."""

    def fill_cache(self, asked: Caching, plan: Plan, device: torch.device, say: Say) -> bool:
        """What `sameday cache` was asked for; whether all is well."""
