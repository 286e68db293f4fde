"""Steps that take far longer than those before them. After the first ones nothing should be compiled or waited for: a
run says so itself where it happens."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from sameday.hardware.compiling import graphs

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
    return seconds > max(TIMES * usual, usual + WORTH)


class Stalls:
    """Of the steps that one process goes through."""

    def __init__(self, fewest: int = FEWEST) -> None:
        self._fewest = fewest
        self._recent: list[float] = []
        self._graphs = graphs().made

    def found(self, seconds: float, waited: float) -> str | None:
        """Of the step that ended now, of whose `seconds` some were `waited` for input: how it stalled, and why."""
        usual, made = usual_before_stall(self._recent, seconds, self._fewest), graphs().made
        more, self._graphs = made - self._graphs, made
        self._recent = [*self._recent, seconds][-WINDOW:]
        if usual is None:
            return None
        if more:
            why = "layers were compiled for a shape that had not come before"
        elif waited > (seconds - usual) / 2:
            why = f"{waited:.1f} s of it waiting for input"
        else:
            why = "neither compiling nor input; the machine was busy with something else"
        return f"stalled: {seconds:.1f} s, usual before it {usual:.3f} s; {why}"
