"""`sameday suite status` and `logs`: what files tell about the jobs, from any terminal or machine that sees them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sameday.spec.errors import BadInput, in_short
from sameday.spec.words import clock, first_names, tell, visible, when
from sameday.suite.jobs import OpenSuite
from sameday.suite.running.slurm import current
from sameday.suite.state import ENDED, JobState, SuiteFolder
from sameday.suite.times.expected import Expected, expected

TAIL = 2**16
"""Bytes from the end of a file in which the latest records stand."""
RECENT = 50
"""Steps whose pace counts."""


@dataclass(frozen=True)
class Progress:
    """How far a training job is; None is not known."""

    step: int | None = None
    total: int | None = None
    loss: float | None = None
    samples_per_second: float | None = None
    left: float | None = None


def progress(folder: SuiteFolder, name: str) -> Progress:
    """From the ends of its records and of its log, which alone has the number of steps."""
    # A run in stages has records in the folder of each; the one that was written last is under way.
    files = [folder.run(name) / "metrics.jsonl", *folder.run(name).glob("stages/*/metrics.jsonl")]
    records: list[dict[str, Any]] = []
    for line in _tail(
        max((file for file in files if file.exists()), key=lambda file: file.stat().st_mtime, default=None)
    ):
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and "split" not in record and isinstance(record.get("step"), int):
                records.append(record)
    steps = re.findall(r"^step \d+/(\d+)  ", "\n".join(_tail(folder.log(name))), re.MULTILINE)
    if not records:
        return Progress(total=int(steps[-1]) if steps else None)
    step, recent = int(records[-1]["step"]), records[-RECENT:]
    total = int(steps[-1]) if steps and int(steps[-1]) >= step else None
    seconds = sum(_number(record, "seconds") for record in recent)
    samples = sum(_number(record, "samples") for record in recent)
    loss = records[-1].get("loss")
    return Progress(
        step,
        total,
        float(loss) if isinstance(loss, int | float) else None,
        samples / seconds if seconds > 0 else None,
        None if total is None else (total - step) * seconds / len(recent),
    )


def _number(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _tail(path: Path | None) -> list[str]:
    with contextlib.suppress(OSError):
        if path is not None:
            with path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
                return file.read().decode(errors="replace").splitlines()
    return []


COLUMNS = ("job", "state", "time", "step", "loss", "samples/s", "left", "finish")


def table(opened: OpenSuite, now: float | None = None) -> str:
    """All jobs, and the last lines of those that failed."""
    now = time.time() if now is None else now
    states = current(opened, mend=True)
    ends = _expected(opened, states, now)
    spans = {name: end for name, (_, end) in ends.spans.items()}
    rows = [COLUMNS, *(row(opened.folder, name, state, now, spans.get(name)) for name, state in states.items())]
    widths = [max(len(line[column]) for line in rows) for column in range(len(COLUMNS))]
    left = (0, 1)
    lines = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in rows
    ]
    lines += _finish(opened, states, ends, now)
    if not (opened.folder.path / "jobs").exists():
        lines.append(f"{opened.folder.path}: nothing was run here; --out names another folder")
    if gone := [f"{name} ({opened.folder.seen(name).state})" for name in opened.folder.gone(opened.suite)]:
        made = f"what {'it' if len(gone) == 1 else 'they'} made stays in {opened.folder.path / 'jobs'}"
        lines.append(f"not in the suite's file any more: {first_names(gone)}; {made}")
    for name, state in states.items():
        if state.state == "queued" and state.why:
            lines.append(f"{name}: in SLURM's queue{f', job {state.slurm}' if state.slurm else ''}: {state.why}")
        elif state.state == "blocked":
            lines.append(f"{name}: blocked, because {state.why}")
        elif state.state == "failed":
            first, *more = state.why.splitlines() or [""]
            lines += ["", f"{name}: failed, {first}", *(f"    {line}" for line in more)]
    return "\n".join(lines)


def _expected(opened: OpenSuite, states: Mapping[str, JobState], now: float) -> Expected:
    try:
        return expected(opened, states, now)
    except BadInput as error:  # a job that no machine like this one could run
        return Expected(why=in_short(error))


def _finish(opened: OpenSuite, states: Mapping[str, JobState], ends: Expected, now: float) -> Iterator[str]:
    """When all of it ends, and when it must."""
    began, deadline = opened.folder.began(), opened.suite.deadline
    until = "" if deadline is None or began is None else f"; deadline {when(began + deadline, now)}"
    if all(state.state == "done" for state in states.values()):
        return
    if ends.finish is None:
        rest = "" if ends.rest is None else f"; all that can still run ends at {when(ends.rest, now)}"
        yield f"finish: not known, because {ends.why}{rest}{until}"
        return
    late = deadline is not None and began is not None and ends.finish > began + deadline
    low, high = (when(ends.finish if each is None else each, now) for each in (ends.low, ends.high))
    between = "" if low == high else f" ({low} to {high})"
    yield f"finish: {when(ends.finish, now)}{between}{until}{', which does not hold' if late else ''}"


def row(folder: SuiteFolder, name: str, state: JobState, now: float, end: float | None = None) -> tuple[str, ...]:
    """`end` is when the job is expected to end; without it a running one has the end of its steps."""
    far = progress(folder, name) if state.attempt else Progress()
    running = state.state == "running"
    where = f" on GPU {','.join(map(str, state.gpus))}" if running and state.gpus else ""
    spent = state.spent + (max(0.0, now - state.started) if running and state.started else 0.0)
    if end is None and running and far.left is not None:
        end = now + far.left
    finish = state.ended if state.state == "done" else end
    step = "" if far.step is None else f"{far.step}/{far.total}" if far.total else str(far.step)
    return (
        name,
        state.state + where,
        clock(spent) if spent else "",
        step,
        "" if far.loss is None else f"{far.loss:.4f}",
        "" if far.samples_per_second is None else f"{far.samples_per_second:.1f}",
        clock(max(0.0, end - now)) if running and end is not None else "",
        "" if finish is None else when(finish, now),
    )


def show(opened: OpenSuite, live: bool = False, every: float = 2.0) -> None:
    """Once, or again and again until all jobs have ended."""
    if not live:
        tell(table(opened))
        return
    from rich.live import Live
    from rich.text import Text

    with contextlib.suppress(KeyboardInterrupt), Live(refresh_per_second=4) as screen:
        while True:
            ended = all(state.state in ENDED for state in current(opened, mend=True).values())
            screen.update(Text(visible(table(opened)), no_wrap=True), refresh=True)
            if ended:
                return
            time.sleep(every)


def logs(opened: OpenSuite, name: str, follow: bool = False, every: float = 0.3) -> None:
    """What a job wrote, in all its attempts, also one that is not in the file any more; with `follow` until it has
    ended."""
    if name not in opened.suite.jobs and name not in opened.folder.gone(opened.suite):
        raise BadInput(f"{name!r} is no job of this suite; there are {', '.join(opened.suite.jobs)}")
    with contextlib.suppress(KeyboardInterrupt):
        for line in _lines(opened, name, follow, every):
            tell(line)
        if not opened.folder.log(name).exists():
            tell(f"{name} is {_state(opened, name)}, and wrote nothing yet")


def _state(opened: OpenSuite, name: str) -> str:
    return current(opened)[name].state if name in opened.suite.jobs else opened.folder.seen(name).state


def _lines(opened: OpenSuite, name: str, follow: bool, every: float) -> Iterator[str]:
    """Whole ones, and at the end what is left."""
    rest, position = b"", 0
    while True:
        ended = not follow or _state(opened, name) in (*ENDED, "stopped", "interrupted")
        with contextlib.suppress(FileNotFoundError), opened.folder.log(name).open("rb") as file:
            file.seek(position)
            while piece := file.read(TAIL):
                position += len(piece)
                *whole, rest = (rest + piece).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
        if ended:
            if rest:
                yield rest.decode(errors="replace")
            return
        time.sleep(every)
