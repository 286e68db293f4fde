"""`sameday tune`: trials in fresh processes within the minutes that were given, a verdict, a plan, an ablation."""

from __future__ import annotations

import json
import math
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
from pathlib import Path
from typing import Any

from sameday.spec.errors import BadInput
from sameday.spec.load import dump_yaml, load_plan, load_recipe, split_sets
from sameday.spec.plan import Plan, changed, claims
from sameday.spec.recipe import Recipe
from sameday.spec.record import check_output, write_text
from sameday.tasks.registry import start_of
from sameday.tasks.start import Say
from sameday.tune.search import Found, OutOfTime, Worth, ablation, confirm, gain, middle, search
from sameday.tune.space import choices, differing
from sameday.tune.trial import LOADED, NO_MEMORY, Job, Result, logged

LEAST, MOST = 3, 16
"""Steps that are timed of a plan."""
SHARE = 0.025
"""Of the minutes, for the steps of one trial; what it takes to start is not in it."""
STEPS_TO_VERIFY = 4

_forked, _spawned = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
_forked.set_forkserver_preload(list(LOADED))


@dataclass
class Trials:
    """Times plans, as long as there is time. `start` is what a trial took besides its steps, at the most."""

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

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.plain: Result | None = None

    @property
    def spent(self) -> float:
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        return self.seconds - self.spent

    def reserve(self, seconds: float) -> None:
        """Leave time for what comes after the trials, where that leaves most of it to them."""
        if seconds <= 0.4 * self.seconds:
            self.seconds -= seconds
        else:
            self.say(f"verify comes after these minutes and may take {seconds / 60:.1f} more")

    def measure(self, plan: Plan) -> Result:
        slowest = 0.0 if self.plain is None or self.plain.failed else middle(self.plain)
        if self.count and self.left < self.start + (LEAST + 1) * slowest:
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
        if not result.failed:
            spent = sum(result.seconds.values())
            self.start = max(self.start if self.count > 1 else 0.0, time.monotonic() - began - spent)
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
        early = self.forks and plan.environment == self.environment
        process = (_forked if early else _spawned).Process(target=logged, args=(files, plan.environment))
        process.start()
        try:
            process.join(max(5.0, self.left))
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
        lines = (place / "log").read_text(errors="replace").splitlines() if (place / "log").exists() else []
        said = lines[-1] if lines else "without a word"
        return Result({}, failed=f"exit code {process.exitcode}: {said}", crashed=True)

    def _tell(self, plan: Plan, result: Result) -> None:
        differs = changed(Plan(device=plan.device), plan, False)
        words = ", ".join(f"{name} {_short(new)}" for name, (_, new, _) in differs.items()) or "plain"
        at = f"{self.spent / 60:4.1f} min"
        if result.failed or self.plain is None:
            self.say(f"{at}  {(result.failed or '').splitlines()[0][:100]}  {words}")
        else:
            times = middle(self.plain) / middle(result)
            self.say(f"{at}  {_seconds(result)}  {times:5.2f}×{_memory(result)}  {words}")


def tune(
    recipe_path: Path,
    out: Path,
    sets: Sequence[str],
    minutes: float,
    json_path: Path | None,
    say: Say,
    check: bool = True,
) -> int:
    recipe_sets, plan_sets = split_sets(sets)
    recipe, home = load_recipe(recipe_path, recipe_sets), recipe_path.resolve().parent
    check_output("--out", out)
    check_output("--json", json_path)
    if minutes <= 0:
        raise BadInput(f"--minutes {minutes}: must be more than 0")
    began = time.monotonic()

    from sameday.train.launch import automatic_plan, prepare_environment

    # So that nothing asks the driver how many GPUs there are before a trial has a process of its own.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    asked = load_plan(None, plan_sets, recipe.task)
    prepare_environment(asked)

    from sameday.hardware.machine import device_kind, look
    from sameday.verify.registry import CHECKS

    fixed = {name.split("=", 1)[0].split(".")[1] for name in plan_sets}
    start = start_of(recipe, home)
    audited = start.audit(say)
    start.check_model(say)
    machine = look(device_kind(asked))
    guess, _ = automatic_plan(start, recipe, plan_sets, 1)
    plain = Plan(device=asked.device, **{name: getattr(asked, name) for name in fixed})
    known = [
        choice
        for choice in choices(recipe.task, machine.device, machine.triton, machine.cores, recipe.effective_batch)
        if not fixed & set(choice.fields)
    ]
    known = [differing(choice, start.settle(guess, machine)) for choice in known]
    guess = plain.model_copy(update={name: getattr(guess, name) for choice in known for name in choice.fields})

    def allowed(plan: Plan) -> bool:
        try:
            CHECKS[recipe.task](plan, machine.device, recipe.precision, machine.triton)
        except BadInput:
            return False
        return True

    say(f"{recipe.name} on {machine.name}: {minutes:g} minutes; s/step (least to most), times the plain plan's speed")
    with tempfile.TemporaryDirectory(prefix="sameday-tune-") as folder:
        data = Path(folder) / "data.pickle"
        data.write_bytes(pickle.dumps(audited.parts))
        seconds = 60 * minutes - (time.monotonic() - began)
        trials = Trials(recipe, home, data, Path(folder), seconds, say, plain.environment)
        first = trials.measure(plain)
        if first.failed and start.thrifty(plain) != plain:
            plain = start.thrifty(plain)
            first = trials.measure(plain)
        if first.failed:
            smaller = "; --set plan.micro_batch=… takes less of it" if recipe.task == "classify" else ""
            raise BadInput(f"tune: {first.failed} under the plain plan{smaller}")
        trials.reserve(_to_verify(first, trials.start) if check else 0.0)
        whole = trials.seconds
        # The search may take half of it; what each choice is worth is asked with the rest.
        trials.seconds = (whole - trials.spent) / 2 + trials.spent
        known_first = {plain.model_dump_json(): first}
        found = search(plain, guess if allowed(guess) else None, known, trials.measure, allowed, known_first)
        trials.seconds = whole
        confirm(found, trials.measure)
        worth = ablation(found, known, trials.measure, allowed)
    steps = recipe.max_steps or recipe.num_epochs * -(-audited.sizes["train"] // recipe.effective_batch)
    table = as_json(recipe, machine, minutes, found, worth, steps)
    for line in lines(table):
        print(line)
    verdict = _verified(recipe_path, sets, found.best, say) if check else None
    table["best"]["verdict"] = verdict
    if json_path is not None:
        write_text(json_path, json.dumps(table, indent=1) + "\n")
    if check and verdict not in ("bitwise", "rounding", "statistical"):
        say(f"the plan is not written: verify says {verdict}")
        return 1
    write_text(out, dump_yaml(found.best))
    say(f"{out} is written" + (f"; verify says {verdict}" if check else ""))
    return 0


def _to_verify(plain: Result, start: float) -> float:
    """About how long: arms start four times, and the plain one goes through each of its steps three times."""
    return 4 * start + 3 * STEPS_TO_VERIFY * max(plain.seconds.values())


def _verified(recipe: Path, sets: Sequence[str], plan: Plan, say: Say) -> str:
    say("verify: whether it trains the same model")
    with tempfile.TemporaryDirectory(prefix="sameday-tune-") as folder:
        file, out = Path(folder) / "plan.yaml", Path(folder) / "verdict.json"
        file.write_text(dump_yaml(plan))
        words = ["verify", str(recipe), "--plan", str(file), "--steps", str(STEPS_TO_VERIFY), "--json", str(out)]
        words += [part for each in sets if each.startswith("recipe.") for part in ("--set", each)]
        done = subprocess.run([sys.executable, "-m", "sameday", *words], capture_output=True, text=True, check=False)
        if not out.exists():
            say(done.stderr[-2000:])
            return f"nothing: it ended with exit code {done.returncode}"
        print(done.stdout)
        return str(json.loads(out.read_text())["verdict"])


def as_json(
    recipe: Recipe, machine: Any, minutes: float, found: Found, worth: Sequence[Worth], steps: int
) -> dict[str, Any]:
    plain, best = found.of(found.plain), found.of(found.best)
    assert plain is not None and best is not None
    known = claims(recipe.dropout > 0)
    return {
        "fingerprint": recipe.fingerprint,
        "machine": {"device": machine.device, "name": machine.name, "cores": machine.cores},
        "minutes": minutes,
        "steps": steps,
        "plain": {**(_numbers(plain) or {}), "finish_hours": finish(plain, steps)},
        "best": {
            **(_numbers(best) or {}),
            "finish_hours": finish(best, steps),
            "plan": found.best.model_dump(mode="json"),
        },
        "times": math.exp(gain(best, plain)[0]),
        "ablation": [
            {
                "field": each.name,
                "value": each.change,
                "claim": _weakest([known[name] for name in each.change]),
                "alone": _numbers(each.alone),
                "added": _numbers(each.added),
                "left_out": _numbers(each.left_out),
            }
            for each in worth
        ],
        "not_tried": found.not_tried,
    }


def finish(result: Result, steps: int) -> list[float]:
    """Hours of all steps, from the least to the most that the timed ones allow: their mean and two standard errors."""
    seconds = list(result.seconds.values())
    error = statistics.stdev(seconds) / len(seconds) ** 0.5 if len(seconds) > 1 else statistics.mean(seconds)
    mean = statistics.mean(seconds)
    return [steps * max(0.0, mean - 2 * error) / 3600, steps * (mean + 2 * error) / 3600]


def _weakest(each: Sequence[str]) -> str:
    return max(each, key=("bitwise", "rounding", "statistical").index)


def _numbers(result: Result | None) -> dict[str, Any] | None:
    if result is None:
        return None
    if result.failed:
        return {"seconds": None, "memory_gib": None, "failed": result.failed}
    each = result.seconds.values()
    memory = None if result.memory is None else result.memory / 2**30
    return {"seconds": {"median": middle(result), "least": min(each), "most": max(each)}, "memory_gib": memory}


def lines(table: dict[str, Any]) -> list[str]:
    """The ablation as people read it: how many times faster alone and added, and how many times slower without."""
    plain = table["plain"]["seconds"]["median"]
    best = table["best"]["seconds"]["median"]
    found = [f"{'choice':34s} {'claim':12s} {'alone':>8s} {'added':>8s} {'left out':>9s}"]
    before = plain
    for row in table["ablation"]:
        own = {name: each for name, each in row["value"].items() if name == row["field"]} or row["value"]
        value = ", ".join(f"{name} {_short(each)}" for name, each in own.items())
        cells = []
        for how, over in (("alone", plain), ("added", before), ("left_out", None)):
            seconds = (row[how] or {}).get("seconds")
            if seconds is None:
                cells.append("failed" if row[how] else "-")
            else:
                cells.append(f"{over / seconds['median']:.2f}×" if over else f"{best / seconds['median']:.2f}×")
            if how == "added" and seconds is not None:
                before = seconds["median"]
        found.append(f"{value[:34]:34s} {row['claim']:12s} {cells[0]:>8s} {cells[1]:>8s} {cells[2]:>9s}")
    found += [f"not measured: {text}" for text in table["not_tried"]]
    for name in ("plain", "best"):
        low, high = table[name]["finish_hours"]
        seconds = table[name]["seconds"]
        found.append(
            f"{name:6s}{seconds['median']:9.4f} s/step ({seconds['least']:.4f}-{seconds['most']:.4f}), "
            f"{table['steps']} steps in {low:.2f} to {high:.2f} hours, validation not counted"
        )
    found.append(f"the best plan is {table['times']:.2f} times as fast as the plain one")
    return found


def _seconds(result: Result) -> str:
    each = result.seconds.values()
    return f"{middle(result):8.4f} ({min(each):.4f}-{max(each):.4f})"


def _memory(result: Result) -> str:
    return "" if result.memory is None else f"  {result.memory / 2**30:5.1f} GiB"


def _short(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
