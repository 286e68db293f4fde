"""How fast a run went, by its own records: a step, and all that is besides steps."""

from __future__ import annotations

import contextlib
import json
import shlex
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from sameday.hardware.stalls import is_stall
from sameday.record.folder import RunFolder
from sameday.record.metrics import sound_metrics
from sameday.record.times import TIMES, read_times
from sameday.spec.errors import BadInput
from sameday.suite.state import SuiteFolder
from sameday.suite.times.work import CPU, Training, Work, plan_cost, stamp, step_cost, step_kind

WARM = 5
"""First steps, which may compile and fill caches."""
LEAST = 3
"""Steps without which there is no pace."""
FEW = 6
"""Steps without which none of them is called a stall."""


@dataclass(frozen=True)
class Pace:
    """Seconds of a step, with the share by which their mean may be off; of what is besides steps, None where it was not
    recorded. `warm` is what the first steps took more than others."""

    step: float
    error: float
    steps: int
    warm: float = 0.0
    start: float | None = None
    validate: float | None = None
    save: float | None = None
    finish: float | None = None
    where: str = ""
    alike: bool = True
    """Whether its plan is the one that is asked about."""
    same: bool = True
    """Whether its samples are."""


def pace_of(steps: Sequence[float], times: Iterable[dict[str, Any]] = (), recent: bool = False) -> Pace | None:
    """Of the seconds of steps in order. With `recent` their later half counts, since a machine's pace may change."""
    if len(steps) < LEAST:
        return None
    warm = WARM if len(steps) >= 3 * WARM else 1
    usual = _without_stall(steps[warm:])
    mean = statistics.fmean(usual)
    more = max(0.0, sum(steps[:warm]) - warm * mean)
    if recent:
        usual = usual[-max(20, len(usual) // 2) :]
        mean = statistics.fmean(usual)
    error = 2 * statistics.stdev(usual) / len(usual) ** 0.5 / mean if len(usual) > 1 and mean else 1.0
    times = list(times)
    start, finish = (_mean(_each(times, what)) for what in ("start", "finish"))
    validations, saves = _each(times, "validate"), _each(times, "save")
    # The first of several, too, may compile and fill caches: what it takes longer comes once.
    validate, save = (_mean(each[1:] or each) for each in (validations, saves))
    more += max(0.0, validations[0] - (validate or 0.0)) if validations else 0.0
    return Pace(mean, error, len(steps), more, start, validate, save, finish)


def _without_stall(steps: Sequence[float]) -> Sequence[float]:
    """One that came once is not a part of every step to come. Where several came, that is how this machine goes."""
    usual = statistics.median(steps)
    others = [each for each in steps if not is_stall(each, usual)]
    return others if len(steps) >= FEW and len(others) == len(steps) - 1 else steps


def _each(times: Iterable[dict[str, Any]], what: str) -> list[float]:
    return [float(record["seconds"]) for record in times if record.get("what") == what]


def _mean(each: Sequence[float]) -> float | None:
    return statistics.fmean(each) if each else None


@dataclass(frozen=True)
class Recorded:
    """A run folder, read: seconds of its steps, of the rest, and the last step that is done."""

    seconds: list[float]
    times: list[dict[str, Any]]
    done: int = 0

    @property
    def total(self) -> int | None:
        """Steps of the whole run, as its process said."""
        each = [record["total"] for record in self.times if isinstance(record.get("total"), int)]
        return each[-1] if each else None

    @property
    def ranks(self) -> int:
        """Processes that it ran on; an earlier release did not say."""
        each = [record["ranks"] for record in self.times if isinstance(record.get("ranks"), int)]
        return each[-1] if each else 1

    @property
    def device(self) -> str | None:
        """What its last process ran on; an earlier release did not say."""
        each = [record["device"] for record in self.times if isinstance(record.get("device"), str)]
        return each[-1] if each else None

    def fits(self, device: str | None) -> bool:
        """Whether times of this run are such a device's, as far as that is known."""
        return device is None or self.device in (None, device)

    @property
    def evaluation(self) -> float | None:
        """One that was asked for again takes no time: the longest counts."""
        each = [float(record["seconds"]) for record in self.times if record.get("what") == "evaluate"]
        return max(each, default=None)


def recorded(folder: Path) -> Recorded:
    """Of a run that may go on; nothing where nothing can be read."""
    return _recorded(folder, *(stamp(folder / name) for name in ("metrics.jsonl", TIMES)))


@lru_cache(maxsize=256)
def _recorded(folder: Path, *_stamps: tuple[int, int]) -> Recorded:
    try:
        metrics, _ = sound_metrics(folder / "metrics.jsonl")  # whoever reports the run names the other lines
    except (BadInput, OSError):
        metrics = []
    steps = [each for each in metrics if "split" not in each and isinstance(each.get("seconds"), int | float)]
    done = max((each["step"] for each in steps), default=0)
    times = read_times(folder)
    first = _on_this_device(times)
    here = [each for each in steps if each["step"] > first]
    return Recorded([float(each["seconds"]) for each in here], times, done)


def _on_this_device(times: Iterable[dict[str, Any]]) -> int:
    """Steps up to this one were done on another GPU than the last ones, where a run went on elsewhere."""
    starts = [each for each in times if isinstance(each.get("device"), str) and isinstance(each.get("step"), int)]
    first = 0
    for before, start in pairwise(starts):
        first = start["step"] if start["device"] != before["device"] else first
    return first


@dataclass(frozen=True)
class Earlier:
    """A run that was recorded: what its step costs depends on."""

    folder: Path
    cost: str
    kind: str
    plan: str
    plan_fields: dict[str, Any]
    automatic: bool
    host: str
    answered: tuple[str, str] | None
    """What its evaluation asks, and of which split, where it ends with one."""
    epochs: float | None = None
    """That all of its steps make; None where it was cut short."""

    @property
    def per_epoch(self) -> float | None:
        total = recorded(self.folder).total
        return total / self.epochs if total and self.epochs else None


def earlier_runs(folder: SuiteFolder) -> list[Earlier]:
    """Of the suite's own jobs, those that were put aside, and all below `runs`."""
    roots = {folder.path, Path("runs").absolute(), *([folder.path.parent] if folder.path.parent.name == "runs" else [])}
    inside = ("jobs/*/run", "jobs/*/run/stages/*", "earlier/*/run", "earlier/*/run/stages/*")
    patterns = ["*", "*/stages/*", *inside, *(f"*/{each}" for each in inside)]
    folders = {path.parent for root in roots for pattern in patterns for path in root.glob(f"{pattern}/metrics.jsonl")}
    runs = (_earlier(path, stamp(path / "environment.json")) for path in sorted(folders))
    return [run for run in runs if run is not None]


def earlier_requests(folder: SuiteFolder) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folders of jobs of this suite, of those put aside, and of other suites, with what each was asked for."""
    inside = ("jobs/*/request.json", "earlier/*/request.json")
    roots = [(folder.path, inside), (folder.path.parent, [f"*/{each}" for each in inside])]
    for path in dict.fromkeys(path for root, each in roots for pattern in each for path in sorted(root.glob(pattern))):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            asked = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(asked, dict):
                yield path.parent, asked


@lru_cache(maxsize=1024)
def _earlier(path: Path, _stamp: tuple[int, int]) -> Earlier | None:
    try:
        run = RunFolder.read(path)
        about = json.loads((path / "environment.json").read_text(encoding="utf-8"))
        words = shlex.split(str(about.get("command", "")))
    except (BadInput, OSError, ValueError, RecursionError):
        return None
    fields = run.plan.model_dump(mode="json")
    host = str(about.get("hostname", "an unknown machine"))
    evaluation = getattr(run.recipe, "evaluate", None)
    asked = None if evaluation is None else (Work([], evaluation, run.recipe).answered, str(evaluation.split))
    costs = (step_cost(run.recipe), step_kind(run.recipe), plan_cost(run.plan))
    epochs = run.recipe.num_epochs if run.recipe.max_steps is None else None
    return Earlier(path, *costs, fields, "--plan" not in words, host, asked, epochs)


def borrowed(training: Training, runs: Iterable[Earlier], device: str | None = None) -> Pace | None:
    """The pace of another run whose steps are of the kind: best under the same plan, then of the same samples, then of
    the most steps. None where there is none. Where the `device` is known, runs on another one tell nothing."""
    paces = sorted(_candidates(training, runs, device), key=lambda pace: (pace.alike, pace.same, pace.steps))
    return paces[-1] if paces else None


def _candidates(training: Training, runs: Iterable[Earlier], device: str | None) -> Iterator[Pace]:
    cost, kind, plan = training.cost, step_kind(training.recipe), plan_cost(training.plan)
    asked = {name: training.plan.model_dump(mode="json")[name] for name in training.fixed}
    for run in runs:
        if run.kind != kind or run.folder == training.folder:
            continue
        fixed = all(run.plan_fields[name] == value for name, value in asked.items())
        alike = training.planned and (run.automatic and fixed if training.automatic else run.plan == plan)
        read = recorded(run.folder)
        alike = alike and read.ranks == training.ranks
        pace = pace_of(read.seconds, read.times)
        if pace is not None and read.fits(device):
            on = f"{run.host}, {read.device}" if read.device not in (None, CPU) else run.host
            yield replace(pace, where=f"{shown(run.folder)} on {on}", alike=alike, same=run.cost == cost)


def shown(folder: Path) -> str:
    """As short as it can be told from where the user stands."""
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:
        return str(folder)
