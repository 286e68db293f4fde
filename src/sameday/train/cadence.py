"""When a run saves, validates and stops, as a pure function of the step; and the signal that asks it to stop."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any, Literal

from sameday.spec.errors import RunStopped

Every = int | Literal["epoch"] | None


@dataclass(frozen=True)
class Due:
    """What is due once a step is done. Whatever it is, the end of all launched steps must be known for it."""

    save: bool
    validate: bool
    stop: bool

    @property
    def any(self) -> bool:
        return self.save or self.validate or self.stop


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


class StopRequest:
    """SIGTERM, SIGUSR1 or Ctrl-C: the step is finished and saved, then the run leaves. A second Ctrl-C is at once."""

    asked = False

    def __enter__(self) -> StopRequest:
        self._before = {n: signal.signal(n, self._ask) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
        return self

    def __exit__(self, kind: object, *_more: object) -> None:
        # A run that leaves early stays deaf: a second signal must not change the code it leaves with.
        for number, handler in self._before.items() if kind is not RunStopped else ():
            signal.signal(number, handler)

    def _ask(self, number: int, _frame: Any) -> None:
        if number == signal.SIGINT and self.asked:
            raise KeyboardInterrupt
        self.asked = True
