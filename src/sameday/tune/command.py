"""`sameday tune`: trials in fresh processes within the minutes that were given, a verdict, a plan, an ablation."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sameday.commands.batch import check_batch
from sameday.commands.session import Session, Specs
from sameday.hardware.signals import orderly_end
from sameday.spec.document import dump_yaml
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.spec.words import tell
from sameday.spec.writing import OUR_JSON, check_output, same_file, write_text
from sameday.tasks.base import Say
from sameday.tasks.setup import LOADED, TRAINING, Choice
from sameday.tune.search import OutOfTime, SearchState, Worth, explore
from sameday.tune.space import choices, differing
from sameday.tune.table import as_json, lines, trial_line, wrapped
from sameday.tune.trial import NO_MEMORY, THREADS, Job, Result, logged
from sameday.verify.trial import plain_beside

if TYPE_CHECKING:  # it loads torch
    from sameday.hardware.machine import Machine

LEAST, MOST = 3, 16
"""Steps that are timed of a plan."""
SHARE = 0.0125
"""Of the minutes, for the steps of one trial; what it takes to start is not in it."""
SHORTEST = 5.0
"""Seconds that each trial gets, and that one takes as far as is known before the first."""
STEPS_TO_VERIFY = 4
RESERVED = 0.1
"""The share of the minutes that verify may take of them."""
WEEK = 7 * 24 * 60
"""In minutes."""

_forked, _spawned = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
_forked.set_forkserver_preload(list(LOADED))


@dataclass
class Trials:
    """Times plans, as long as there is time, of which so much was `gone` before. `start` is what a trial took besides
    its steps, at the most."""

    recipe: Recipe
    home: Path
    data: Path
    folder: Path
    seconds: float
    say: Say
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that are set already, for all trials."""
    forks: bool = True
    start: float = 10.0
    count: int = 0
    gone: float = 0.0

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.reserved = 0.0
        self.took: list[float] = []
        self.good: list[tuple[float, Result]] = []
        """What those took that gave a result, and the result."""
        self.plain: Result | None = None
        self.search: SearchState | None = None

    @property
    def spent(self) -> float:
        return self.gone + time.monotonic() - self.began

    @property
    def left(self) -> float:
        return self.seconds - self.spent

    @property
    def usual(self) -> float:
        """Seconds that a trial has taken, on the average. The first one loads libraries for all of them."""
        return statistics.mean(self.took[1:] or self.took or [0.0])

    @property
    def room(self) -> float:
        """Seconds in which another trial may begin, since it would end in time if it is like the others."""
        return self.left - self.usual

    def reserve(self, seconds: float) -> None:
        """Leave time for what comes after the trials, where that leaves nearly all of it to them: it is for them that
        minutes are given."""
        if seconds <= RESERVED * self.seconds:
            self.reserved = seconds
            self.seconds -= seconds
        else:
            self.say(f"verify of what is found comes after these minutes and may take {seconds / 60:.1f} more")

    def release(self) -> None:
        """What comes after them is not needed."""
        self.seconds, self.reserved = self.seconds + self.reserved, 0.0

    def measure(self, plan: Plan) -> Result:
        # One that takes longer is ended with the time; the plain plan's trial is the longest as a rule.
        if self.plain is not None and self.left < min(self.took[1:], default=SHORTEST):
            raise OutOfTime
        self.count += 1
        place = self.folder / f"{self.count:03d}"
        place.mkdir()
        job = Job(self.recipe, plan, self.home, self.data, SHARE * self.seconds, LEAST, MOST)
        job.write(place / "job.json")
        began = time.monotonic()
        result = self._run(place, plan)
        if result.crashed and self.plain is None and self.forks:
            self.forks = False  # where a library has taken hold of the GPU while it was loaded
            result = self._run(place, plan)
        self.took.append(time.monotonic() - began)
        if not result.failed:
            self.good.append((self.took[-1], result))
            start = self.took[-1] - sum(result.seconds.values())
            self.start = max(self.start if self.count > 1 else 0.0, start)
        if self.plain is None and result.failed != NO_MEMORY:
            self.plain = result
            if result.failed:
                raise BadInput(f"tune: the plain plan cannot be timed: {result.failed}")
        self._tell(plan, result)
        return result

    def _run(self, place: Path, plan: Plan) -> Result:
        """In a process that begins where torch is loaded and no GPU is in use yet; in one from the very start where
        the plan has variables of its own, since libraries read them as they are loaded."""
        files = [str(place / name) for name in ("job.json", "result.json", "log")]
        process = self._started(files, plan)
        try:
            process.join(max(SHORTEST, self.left))
            if process.is_alive() and self.plain is None:
                raise BadInput(
                    f"tune: to start and to time {LEAST + 1} steps of the plain plan takes longer than all of the "
                    "minutes; give more --minutes"
                )
            if process.is_alive():
                raise OutOfTime
        finally:
            process.kill()
            process.join()
        if (place / "result.json").exists():
            return Result.read(place / "result.json")
        log = (place / "log").read_text(errors="replace").splitlines() if (place / "log").exists() else []
        said = log[-1] if log else "without a word"
        return Result({}, failed=f"exit code {process.exitcode}: {said}", crashed=True)

    def _started(self, files: list[str], plan: Plan) -> BaseProcess:
        work: dict[str, Any] = {"target": logged, "args": (files, plan.environment)}
        if self.forks and _loaded_alike(plan.environment, self.environment):
            try:
                process: BaseProcess = _forked.Process(**work)
                process.start()
                return process
            except OSError:  # where the path for temporary files is too long for a socket's
                self.forks = False
        process = _spawned.Process(**work)
        process.start()
        return process

    def where_it_went(self) -> str:
        """The time of trials: most of it is not for the steps that are timed."""
        count, whole = len(self.good), sum(took for took, _ in self.good)
        each = {
            "to load the model": sum(result.loading for _, result in self.good),
            "for first steps, which may compile": sum(result.warming for _, result in self.good),
            "for the steps that are timed": sum(sum(result.seconds.values()) for _, result in self.good),
        }
        each["to begin and to end"] = whole - sum(each.values())
        parts = ", ".join(f"{seconds / count:.1f} {what}" for what, seconds in each.items())
        each_of = f"{count} trials took {whole / count:.1f} s each" if count > 1 else f"one trial took {whole:.1f} s"
        return f"{each_of}: {parts}"

    def _tell(self, plan: Plan, result: Result) -> None:
        known = self.search
        beside = {"plain": known.plain, "best": known.best} if known else {"plain": plain_beside(plan)}
        self.say(trial_line(self.spent / 60, plan, result, self.plain, beside))


def _loaded_alike(one: dict[str, str], other: dict[str, str]) -> bool:
    """Whether libraries that were loaded under the other environment serve this one: a number of threads can be changed
    later."""
    first, second = ({name: text for name, text in each.items() if name != THREADS} for each in (one, other))
    return one == other or (first == second and one.get(THREADS, "").isdecimal())


@dataclass(frozen=True)
class Ground:
    """What there is to tune, and where: the plain plan, the one chosen for the machine, and what may be tried."""

    session: Session
    splits: Any
    """Its data, made ready once for all trials."""
    plain: Plan
    guess: Plan
    known: list[Choice]

    @property
    def recipe(self) -> Recipe:
        return self.session.recipe

    @property
    def machine(self) -> Machine:
        return self.session.machine

    def allowed(self, plan: Plan) -> bool:
        try:
            self.session.setup.check_plan(plan, self.machine)
        except BadInput:
            return False
        return True


def tune(
    recipe_path: Path,
    out: Path,
    sets: Sequence[str],
    minutes: float,
    json_path: Path | None,
    say: Say,
    check: bool = True,
) -> int:
    began = time.monotonic()
    specs = Specs.from_files(recipe_path, None, sets).first_stage(say)
    recipe = specs.recipe
    if not 0 < minutes <= WEEK:
        raise BadInput(f"--minutes {minutes:g}: must be more than 0 and at most {WEEK}, a week")
    _check_outputs(recipe_path, out, json_path, say)
    with orderly_end():
        ground = _ground(specs, say)
        name = ground.machine.name
        long = f"{minutes:g} minute{'' if minutes == 1 else 's'}"
        say(f"{recipe.name} on {name}: {long}; s/step (least to most), times the plain plan's speed")
        state, worth = _explored(ground, 60 * minutes, time.monotonic() - began, check, say)
        table = as_json(recipe, ground.machine, minutes, state, worth)
        tell("\n".join(lines(table)))
        verdict = _verdict(recipe_path, sets, state.best, say) if check else None
    table["best"]["verdict"] = verdict
    good = verdict in (None, "bitwise", "rounding", "statistical")
    if good:
        _write("--out", out, dump_yaml(state.best))
        say(f"{out} is written" + (f"; verdict: {verdict}" if verdict else ""))
    else:
        say(f"the plan is not written: verify says {verdict}")
    if json_path is not None:
        _write("--json", json_path, json.dumps(table, indent=1) + "\n")
    return 0 if good else 1


def _check_outputs(recipe: Path, out: Path, json_path: Path | None, say: Say) -> None:
    outputs = {"--out": out} | ({"--json": json_path} if json_path is not None else {})
    for option, path in outputs.items():
        check_output(option, path, (recipe,), OUR_JSON if option == "--json" else b"")
    if json_path is not None and same_file(out, json_path):
        raise BadInput(f"--json {json_path}: is the file of --out too; choose another one")
    for path in outputs.values():
        if path.is_file():
            say(f"{path} is there already and will be replaced")


def _write(option: str, path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise BadInput(f"{option} {path}: cannot be written: {error.strerror}") from None


def _ground(specs: Specs, say: Say) -> Ground:
    from sameday.commands.outlook import check_steps

    # So that nothing asks the driver how many GPUs there are before a trial has a process of its own.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    session = Session.start(specs, say, splits=TRAINING)
    check_batch(session, whole=not specs.part)
    setup, asked = session.setup, specs.plan
    _forked.set_forkserver_preload([*LOADED, *setup.modules])
    splits = setup.drop_too_long(session.audited.splits)
    check_steps(session, splits, LEAST + 1)  # of the plain plan alone
    every = choices(setup, session.machine)
    known = [differing(choice, session.resolved) for choice in every if not set(specs.fixed) & set(choice.fields)]
    chosen = {name: getattr(session.plan, name) for choice in known for name in choice.fields}
    return Ground(session, splits, asked, asked.model_copy(update=chosen), known)


def _explored(ground: Ground, seconds: float, gone: float, check: bool, say: Say) -> tuple[SearchState, list[Worth]]:
    with tempfile.TemporaryDirectory(prefix="sameday-tune-") as folder:
        data = Path(folder) / "data.pickle"
        data.write_bytes(pickle.dumps(ground.splits))
        environment = ground.plain.environment
        trials = Trials(ground.recipe, ground.session.home, data, Path(folder), seconds, say, environment, gone=gone)
        state = _begun(ground, trials)
        if check:
            trials.reserve(_to_verify(state.results[state.plain.model_dump_json()], trials.start))
        worth = explore(state, trials, ground.allowed)
        if state.best == state.plain and trials.reserved:
            trials.release()
            worth = explore(state, trials, ground.allowed)
        say(wrapped(trials.where_it_went()))
        return state, worth


def _begun(ground: Ground, trials: Trials) -> SearchState:
    """With the plain plan timed, or one that takes less memory where there is too little for it."""
    plain, low_memory = ground.plain, ground.session.setup.low_memory(ground.plain)
    first, tried = trials.measure(plain), ""
    if first.failed and low_memory != plain:
        plain, first, tried = low_memory, trials.measure(low_memory), ", and with less memory too"
    if first.failed:
        raise BadInput(f"tune: {first.failed} under the plain plan{tried}")
    guess = ground.guess if ground.allowed(ground.guess) else None
    trials.search = SearchState(plain, ground.known, guess, {plain.model_dump_json(): first})
    return trials.search


def _to_verify(plain: Result, start: float) -> float:
    """About how long: arms start four times, and the plain one goes through each of its steps three times."""
    return 4 * start + 3 * STEPS_TO_VERIFY * max(plain.seconds.values())


def _verdict(recipe: Path, sets: Sequence[str], plan: Plan, say: Say) -> str:
    if plan == plain_beside(plan):
        say("verify is not needed: it is the plain plan itself")
        return "bitwise"
    say("verify: whether it trains the same model")
    with tempfile.TemporaryDirectory(prefix="sameday-tune-") as folder:
        file, out, said = (Path(folder) / name for name in ("plan.yaml", "verdict.json", "said"))
        file.write_text(dump_yaml(plan))
        words = ["verify", str(recipe), "--plan", str(file), "--steps", str(STEPS_TO_VERIFY), "--json", str(out)]
        words += [part for each in sets if each.startswith("recipe.") for part in ("--set", each)]
        with said.open("w") as log:
            code = _passed_on(words, log, say)
        if not out.exists():
            return f"nothing: it ended with exit code {code}"
        tell(said.read_text())
        return str(json.loads(out.read_text())["verdict"])


def _passed_on(words: Sequence[str], log: IO[str], say: Say) -> int:
    """A command of this package, whose progress is said as it comes. It ends when this process is told to."""
    command = [sys.executable, "-m", "sameday", *words]
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.PIPE, text=True, errors="replace")
    assert process.stderr is not None
    try:
        for line in process.stderr:
            say(f"  {line.rstrip()}")
        return process.wait()
    finally:
        process.terminate()  # which clears its own folders
        process.wait()
        process.stderr.close()
