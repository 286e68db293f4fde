"""One plan timed in a process of its own: what it leaves on the device, or breaks, ends with it."""

from __future__ import annotations

import json
import math
import os
import pickle
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from sameday.spec.errors import EXIT_OUT_OF_MEMORY, BadInput, RunStopped
from sameday.spec.load import recipe_from
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.tasks.base import gone_through_before, total_steps
from sameday.verify.arm import die_with_parent

FIRST = 4
"""The first step that is timed: the same one in every trial, so that steps can be compared one by one."""

NO_MEMORY = "out of memory"
THREADS = "OMP_NUM_THREADS"
"""The one variable that a process can follow after it has loaded torch."""


@dataclass(frozen=True)
class Job:
    """`seconds` are for the steps alone; at least `least` of them are timed, at most `most`. `data` is a file with what
    was audited, once for all trials: a part of it would have other steps than the recipe's."""

    recipe: Recipe
    plan: Plan
    home: Path
    data: Path
    seconds: float
    least: int
    most: int

    def write(self, path: Path) -> None:
        more = {"recipe": self.recipe.model_dump(mode="json"), "plan": self.plan.model_dump(mode="json")}
        path.write_text(json.dumps({**self.__dict__, **more, "home": str(self.home), "data": str(self.data)}))

    @classmethod
    def read(cls, path: Path) -> Job:
        fields = json.loads(path.read_text())
        recipe, plan = recipe_from(fields.pop("recipe")), Plan.model_validate(fields.pop("plan"))
        return cls(recipe, plan, Path(fields.pop("home")), Path(fields.pop("data")), **fields)


@dataclass(frozen=True)
class Result:
    """Seconds of steps, by number; or why there are none."""

    seconds: dict[int, float]
    pieces: float = 1.0
    """Micro-batches of a step."""
    memory: int | None = None
    failed: str | None = None
    crashed: bool = False
    """Without a result of its own."""
    loading: float = 0.0
    """Seconds until the model was there."""
    warming: float = 0.0
    """And from then until steps were timed."""
    whole: int = 0
    """Steps that the recipe has."""

    @classmethod
    def read(cls, path: Path) -> Result:
        fields = json.loads(path.read_text())
        return cls({int(step): seconds for step, seconds in fields.pop("seconds").items()}, **fields)


def run(job: Job) -> Result:
    from sameday.commands.session import Session, Specs

    started = time.perf_counter()
    session = Session.start(Specs(job.recipe, job.home, job.plan))

    import torch

    if job.plan.environment.get(THREADS, "").isdecimal():
        torch.set_num_threads(int(job.plan.environment[THREADS]))
    with job.data.open("rb") as file:
        task = session.load(splits=pickle.load(file))
    loading = (loaded := time.perf_counter()) - started
    compiled = job.plan.compile != "none" or job.plan.cuda_graphs
    # One more than are timed: the last is not followed by another, which is no usual step.
    timed = range(FIRST, FIRST + job.most + 1)
    # Sizes that were not met before are compiled or recorded first.
    first = [*range(FIRST if compiled else 1), *gone_through_before(task, timed)]
    seconds: dict[int, float] = {}
    pieces: list[int] = []
    ends, warmed = math.inf, loaded
    try:
        with closing(session.steps(task)) as stepped, closing(stepped.run([*first, *timed])) as done:
            began = time.perf_counter()
            for number, good in enumerate(done, 1):
                now = time.perf_counter()
                if number <= len(first):
                    warmed = now
                elif good.step < FIRST + job.most:
                    seconds[good.step] = now - began
                    pieces.append(good.micro_batches)
                ends, began = min(ends, now + job.seconds), now
                if len(seconds) >= job.least and now >= ends:
                    break
    except torch.OutOfMemoryError:
        return Result({}, failed=NO_MEMORY)
    memory = torch.cuda.max_memory_reserved() if session.device.type == "cuda" else None
    whole, mean = total_steps(job.recipe, task), statistics.mean(pieces)
    return Result(seconds, mean, memory, loading=loading, warming=warmed - loaded, whole=whole)


def logged(files: Sequence[str], environment: Mapping[str, str]) -> None:
    """The whole of a trial's process: job, result and log are files. One whose parent is gone goes too."""
    die_with_parent()
    os.environ.update(environment)
    job, out, log = map(Path, files)
    if not log.parent.is_dir():  # told to end while this one was on its way
        return
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    try:
        result = run(Job.read(job))
    except (BadInput, RunStopped) as error:
        failed = NO_MEMORY if getattr(error, "code", None) == EXIT_OUT_OF_MEMORY else str(error)
        result = Result({}, failed=failed)
    out.write_text(json.dumps(asdict(result)))
