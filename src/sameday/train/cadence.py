"""When a run saves, validates and stops, as a pure function of the step."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal, NamedTuple

Every = int | Literal["epoch"] | None


class Due(NamedTuple):
    """What is due once a step is done. Whatever it is, the end of all launched steps must be known for it."""

    save: bool
    validate: bool
    stop: bool
    compare: bool = False
    """Whether this validation may find the best weights."""


@dataclass(frozen=True)
class Cadence:
    """`total` steps, the last of which is always saved and validated; `stop_after` ends the process at that step.
    `per_epoch` is how many steps an epoch has, or after which steps epochs end. `compare` is how often a recipe looks
    for the best weights; without it every validation does."""

    total: int
    per_epoch: int | Container[int]
    save: Every
    validate: Every
    stop_after: int | None = None
    compare: Every = None

    def due(self, done: int) -> Due:
        """After `done` steps."""
        last = done == self.total
        asked = last or self._due(self.compare, done)
        validate = asked or self._due(self.validate, done)
        return Due(
            save=last or self._due(self.save, done),
            validate=validate,
            stop=self.stop_after is not None and done >= self.stop_after,
            compare=validate if self.compare is None else asked,
        )

    def _due(self, every: Every, done: int) -> bool:
        if every is None:
            return False
        each = self.per_epoch if every == "epoch" else every
        return done % each == 0 if isinstance(each, int) else done in each
