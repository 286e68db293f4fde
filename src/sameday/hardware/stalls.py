"""Steps that take far longer than those before them. After the first ones nothing should be compiled or waited for: a
run says so itself where it happens."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from sameday.hardware.compiling import graphs
from sameday.hardware.lookout import Lookout

FEWEST, WINDOW = 20, 50
"""Steps without which nothing is called a stall, and those that one is compared with."""
TIMES, WORTH = 3.0, 1.0
"""A stall takes so many times as long as usual, and so many seconds longer at least."""


def usual_before_stall(recent: Sequence[float], seconds: float, fewest: int = FEWEST) -> float | None:
    """The usual seconds of `recent` steps (at most the last WINDOW count) where one of `seconds` is a stall."""
    if len(recent) < fewest:
        return None
    usual = median(recent[-WINDOW:])
    return usual if is_stall(seconds, usual) else None


def is_stall(seconds: float, usual: float) -> bool:
    return seconds > _longest(usual)


def _longest(usual: float) -> float:
    return max(TIMES * usual, usual + WORTH)


class Used(NamedTuple):
    """By this process, until now: graphs that were compiled, times that a GPU's memory ran short and what was kept of
    it was given back, pages that had to be read from a disk."""

    graphs: int
    retries: int
    pages: int

    @classmethod
    def now(cls) -> Used:
        torch = sys.modules.get("torch")  # whoever looks at a run from outside has none
        # One that was used before may be hidden since.
        stats = torch.cuda.memory_stats() if torch and torch.cuda.is_initialized() and torch.cuda.is_available() else {}
        retries = stats.get("num_alloc_retries", 0)
        return cls(graphs().made, retries, resource.getrusage(resource.RUSAGE_SELF).ru_majflt)

    def since(self, before: Used) -> Used:
        return Used(*(now - then for now, then in zip(self, before, strict=True)))

    def why(self, more: float, waited: float, place: str | None = None) -> str:
        """What a step took `more` seconds for than usual, as far as this process knows; `place`: where it was then."""
        if waited > more / 2:
            return f"{waited:.1f} s of it waiting for input"
        if self.graphs:
            return "layers were compiled for a shape that had not come before"
        if self.retries:
            return "the GPU's memory ran short, and what was kept of it was given back: smaller micro-batches help"
        disk = f"; {self.pages} of this process's pages were read from a disk" if self.pages else ""
        host = "" if place is None else f"; the host was in {place}"
        return f"not for compiling, input or short memory{disk}{host}"


class Stalls:
    """Of the steps that one process goes through. Where they are launched `ahead` of what is known of them, the cause
    of one may have come before the last one was looked at."""

    def __init__(self, ahead: bool, fewest: int = FEWEST) -> None:
        self._ahead, self._fewest = ahead, fewest
        self._recent: list[float] = []
        self._lookout = Lookout()
        self.restart()

    def restart(self) -> None:
        """What happened since the last step belongs to no step."""
        self._before = self._last = Used.now()
        self._lookout.forget()

    def found(self, seconds: float, waited: float) -> str | None:
        """Of the step that ended now, of whose `seconds` some were `waited` for input: how it stalled, and why."""
        usual, now = usual_before_stall(self._recent, seconds, self._fewest), Used.now()
        spent, self._before, self._last = now.since(self._before), self._last if self._ahead else now, now
        self._recent = [*self._recent, seconds][-WINDOW:]
        if len(self._recent) >= self._fewest:
            self._lookout.expect(_longest(median(self._recent)))
        if usual is None:
            return None
        self._before = now  # what was the cause of one is not that of the next
        began = time.perf_counter() - seconds - (usual if self._ahead else 0.0)
        why = spent.why(seconds - usual, waited, self._lookout.seen(began))
        return f"stalled: {seconds:.1f} s, usual before it {usual:.3f} s; {why}"
