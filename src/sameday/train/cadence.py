"""When a run saves, validates and stops, as a pure function of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Every = int | Literal["epoch"] | None


class Due(NamedTuple):
    """What is due once a step is done. Whatever it is, the end of all launched steps must be known for it."""

    save: bool
    validate: bool
    stop: bool


@dataclass(frozen=True)
class Cadence:
    """`total` steps, the last of which is always saved and validated; `stop_after` ends the process at that step."""

    total: int
    per_epoch: int
    save: Every
    validate: Every
    stop_after: int | None = None

    def due(self, done: int) -> Due:
        """After `done` steps."""
        last = done == self.total
        return Due(
            save=last or self._due(self.save, done),
            validate=last or self._due(self.validate, done),
            stop=self.stop_after is not None and done >= self.stop_after,
        )

    def _due(self, every: Every, done: int) -> bool:
        if every is None:
            return False
        return done % (self.per_epoch if every == "epoch" else every) == 0
