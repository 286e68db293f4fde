"""times.jsonl: what a run took besides its steps, whose seconds are in metrics.jsonl. Who plans a run like it needs
both. A process that goes through steps again notes what it took again: all of it was spent."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

TIMES = "times.jsonl"
What = Literal["start", "validate", "save", "finish", "evaluate", "stall"]
"""start: from the process's begin, or from the end of the run before in it, to the first step, or to the first question
of `sameday eval`; its `parts` are what it consists of, and the rest of it was smaller things. stall: a step that took
far longer than those before it, whose seconds are in metrics.jsonl too."""
MOST = 2**24
"""Bytes that are read."""
_LOADED = time.time()


def process_age() -> float:
    """Seconds since this process began; where the system does not say, since this module was loaded."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    return time.time() - _LOADED


class Spent(dict[str, float]):
    """Seconds by what they were spent on."""

    @contextlib.contextmanager
    def on(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self[what] = round(self.get(what, 0.0) + time.perf_counter() - began, 4)


def note(folder: Path, what: What, seconds: float, **more: Any) -> None:
    """One line more. A disk that is full is told by whoever needs it."""
    record = {"what": what, "seconds": round(seconds, 4), "time": round(time.time(), 2), **more}
    with contextlib.suppress(OSError), (folder / TIMES).open("ab", buffering=0) as file:
        file.write(json.dumps(record).encode() + b"\n")


def read_times(folder: Path) -> list[dict[str, Any]]:
    """Every whole record; others are passed over, since nothing depends on them but a guess."""
    records = []
    with contextlib.suppress(OSError):
        with (folder / TIMES).open("rb") as file:
            lines = file.read(MOST).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict) and isinstance(record.get("seconds"), int | float):
                    records.append(record)
    return records
