"""`sameday suite plan --measure`: trainings timed in processes of their own: what they leave on the device, or break,
ends with them. Those that load the same model share a process. Where one compiled something and is short, it is timed
in another process too, which finds it on disk as the suite's jobs will."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from sameday.commands.session import Specs
from sameday.hardware.known import KnownGpu
from sameday.spec.evaluation import Evaluation
from sameday.spec.identity import as_text
from sameday.suite.times.measured import Measured, planned
from sameday.suite.times.pace import pace_of
from sameday.suite.times.trial import Asked, seconds_of
from sameday.suite.times.work import Training, Work
from sameday.tasks.registry import setup_of

ONCE = 0.01
"""Of the time of all steps: what a process takes once may be less than that and in part be wrong."""
LOOK = 0.2
"""Seconds between two looks at what a process has written."""


@dataclass(frozen=True)
class Event:
    """Of the training with this number: it begins; or what was measured, and in how many seconds; or why that did not
    work. A measurement without seconds is one that was told before, of which more is known by now."""

    number: int
    measured: Measured | None = None
    seconds: float | None = None
    failed: str | None = None
    again: bool = False
    """It is timed once more, with graphs that are on disk."""


Ask = tuple[Training, Evaluation | None]


def measure(every: Sequence[Ask], instead_of: KnownGpu | None = None) -> Generator[Event, None, None]:
    """With no more of a GPU than another has, where it is used `instead_of` that one."""
    if not every:
        return
    before_it = _executor()
    for numbers in shared([training for training, _ in every]):
        first: dict[int, Measured] = {}
        again: list[int] = []
        group = [(number, *every[number]) for number in numbers]
        for event, result in _timed(group, instead_of, before_it):
            if event.measured is not None and result is not None:
                first[event.number] = event.measured
                if event.seconds is not None and result["compiled"] and matters(event.measured, result["total"]):
                    again.append(event.number)
            yield event
        for event, _ in _timed([each for each in group if each[0] in again], instead_of, before_it):
            if event.failed is None:
                measured = None if event.measured is None else event.measured.after(first[event.number])
                yield replace(event, measured=measured, again=True)


def shared(trainings: Sequence[Training]) -> list[list[int]]:
    """Their numbers, those together that may share a process: they load the same weights and change none of them, and
    libraries were told the same when they were loaded."""
    groups: dict[Hashable, list[int]] = {}
    for number, training in enumerate(trainings):
        frozen, plan = setup_of(training.recipe, training.home).frozen(), training.plan
        told = as_text([plan.device, plan.deterministic, plan.environment])
        groups.setdefault(number if frozen is None else (frozen, told), []).append(number)
    return list(groups.values())


def matters(first: Measured, steps: int) -> bool:
    """Whether what a process takes once is much beside a training of so many steps."""
    pace = pace_of(first.steps)
    return pace is None or first.at_first > ONCE * steps * pace.step


def _executor() -> float:
    """Seconds until whoever runs a job can begin it, in a process of its own."""
    words = [sys.executable, "-m", "sameday.suite.running.execute", "--help"]
    return seconds_of(lambda: len(subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True).args))[0]


def _timed(
    group: Sequence[tuple[int, Training, Evaluation | None]], instead_of: KnownGpu | None, before_it: float
) -> Iterator[tuple[Event, dict[str, Any] | None]]:
    """Each with what its process said of it. One that fails behind others may have failed for what they left: it is
    tried again as the first of a process, and those after it follow there."""
    begun, at = -1, 0
    ending: list[tuple[int, Ask, dict[str, Any]]] = []
    while at < len(group):
        done = 0
        asked = [
            Asked(_specs(training), evaluation, instead_of, not training.evaluated, training.filled)
            for _, training, evaluation in group[at:]
        ]
        with Apart(asked) as apart:
            began, results = time.monotonic(), apart.results()
            for place, (number, training, evaluation) in enumerate(group[at:], at):
                if place > begun:
                    begun = place
                    yield Event(number), None
                if (result := next(results, None)) is None:
                    break
                done += 1
                ending.append((number, (training, evaluation), result))
                measured = _measured((training, evaluation), result, instead_of, before_it)
                yield Event(number, measured, time.monotonic() - began), result
                began = time.monotonic()
            end, failed = apart.ended()
        if not done:
            yield Event(group[at][0], failed=failed), None
        if end is not None:
            for number, ask, result in ending:
                yield Event(number, _measured(ask, result | {"end": end}, instead_of, before_it)), result
            ending = []
        at += max(1, done)


def _specs(training: Training) -> Specs:
    return Specs(training.recipe, training.home, training.plan, training.automatic, training.fixed)


def _measured(ask: Ask, result: dict[str, Any], instead_of: KnownGpu | None, before_it: float) -> Measured:
    training, evaluation = ask
    known = {name: value for name, value in result.items() if name in Measured.__dataclass_fields__}
    known["start"] += before_it
    timed = "answer_each" if setup_of(training.recipe, training.home).generates else "score_each"
    if evaluation is not None and known.get(timed) is not None:
        known["answered"] = Work([], evaluation, training.recipe).answered
    known |= {} if instead_of is None else {"memory": instead_of.memory, "stands_for": instead_of.name}
    return Measured(**known, cost=training.cost, plan=planned(training), files=training.files)


class Apart:
    """A process that times trainings, which ends with its context."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sameday-suite-")
        path = Path(self._folder.name)
        self._out, self._said, self._last = path / "results", path / "said", 0.0
        (path / "asked.json").write_text(json.dumps([each.as_json() for each in asked]))
        self._out.touch()
        words = [sys.executable, "-m", "sameday.suite.times.trial", str(path / "asked.json"), str(self._out)]
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said)

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def results(self) -> Iterator[dict[str, Any]]:
        """Each as soon as it is there, until the process ends."""
        with self._out.open("rb") as file:
            ended = False
            while not ended:
                ended = self._gone(LOOK)
                yield from self._written(file)

    def _written(self, file: IO[bytes]) -> Iterator[dict[str, Any]]:
        while (line := file.readline()).endswith(b"\n"):
            result: dict[str, Any] = json.loads(line)
            self._last = result.pop("time")
            yield result
        file.seek(-len(line), os.SEEK_CUR)  # it is not whole yet

    def _gone(self, seconds: float | None) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def ended(self) -> tuple[float | None, str]:
        """Seconds from its last word until it was gone, where it ended well; and how it ended."""
        self._gone(None)
        end = max(0.0, time.time() - self._last) if self._last and not self._process.returncode else None
        said = self._said.read_text(errors="replace").strip().splitlines() or ["without a word"]
        return end, f"exit code {self._process.returncode}: {said[-1]}"
