"""A run's charts for TensorBoard. A thread writes them, so that no step waits for the disk."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path

from sameday.record.room import AGAIN, no_room, room_for


class Board:
    """Charts in the folder `tensorboard` of a run."""

    def __init__(self, run: Path, step: int) -> None:
        """A resumed run goes through some steps again: what was charted of them, from `step` on, is taken back."""
        from torch.utils.tensorboard import SummaryWriter

        _leave_a_full_disk_to_the_run()
        self._run = run
        with self._room():
            # Where its queue is full, a step would wait for it.
            self._writer = SummaryWriter(str(run / "tensorboard"), max_queue=1000, purge_step=step)

    def add(self, group: str, values: Mapping[str, float], step: int) -> None:
        with self._room():
            for name, value in values.items():
                self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: the records have said so, or will at their next step
            self._writer.close()

    def _room(self) -> contextlib.AbstractContextManager[None]:
        return room_for("a chart", self._run, 100, AGAIN)


def _leave_a_full_disk_to_the_run() -> None:
    """The writer raises what its thread met, at the next chart, and a sentence is made of it there; the thread itself
    would print a traceback before."""
    before = threading.excepthook
    if getattr(before, "leaves_a_full_disk", False):
        return

    def hook(args: threading.ExceptHookArgs) -> None:
        of_the_writer = type(args.thread).__module__.startswith("tensorboard.")
        if not (of_the_writer and args.exc_value is not None and no_room(args.exc_value)):
            before(args)

    hook.leaves_a_full_disk = True  # type: ignore[attr-defined]
    threading.excepthook = hook
