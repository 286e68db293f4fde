"""`sameday suite plan --measure`: some steps of a training, a little of its validation and answers, and one save, timed
in a process of their own: what it leaves on the device, or breaks, ends with it. Where it compiled something and the
training is short, another process follows that finds it on disk, as the suite's jobs will."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sameday.record.times import process_age
from sameday.spec.errors import BadInput, RunStopped, in_short
from sameday.spec.evaluation import Evaluation
from sameday.spec.load import recipe_from
from sameday.spec.plan import Plan
from sameday.suite.times.measured import Measured, planned
from sameday.suite.times.pace import pace_of
from sameday.suite.times.work import Training

if TYPE_CHECKING:
    from sameday.commands.session import Session
    from sameday.tasks.base import Task

STEPS, SHORT = 24, 5.0
"""That many are timed, and more where they are done before so many seconds."""
LEAST, LONG = 6, 60.0
"""Fewer where they take longer than this, the first one left out, which may compile."""
ONCE = 0.01
"""Of the time of all steps: what a process takes once may be less than that and in part be wrong."""
FLOORS = 8
"""Steps whose floor is counted."""
FEW = {"val": 64, "test": 64}
"""Samples that stand for all when scores and answers are timed."""


def measure(training: Training, evaluation: Evaluation | None, memory: int | None = None) -> Measured | str:
    """In processes of their own, with no more than so many bytes of a GPU's `memory`; or why that did not work."""
    asked = {
        "recipe": training.recipe.model_dump(mode="json"),
        "home": str(training.home),
        "plan": training.plan.model_dump(mode="json"),
        "automatic": training.automatic,
        "fixed": training.fixed,
        "evaluation": None if evaluation is None else evaluation.model_dump(mode="json"),
        "memory": memory,
    }
    before = _compiled_files()
    result = _measured_apart(asked)
    if isinstance(result, str):
        return result
    result["start"] += (before_it := _executor())
    total = result.pop("total")
    first = Measured(cost=training.cost, plan=planned(training), memory=memory, **result)
    if _compiled_files() <= before or not matters(first, total):
        return first
    result = _measured_apart(asked)
    if isinstance(result, str):
        return first
    del result["total"]
    result["start"] += before_it
    return replace(first, **result).after(first)


def matters(first: Measured, steps: int) -> bool:
    """Whether what a process takes once is much beside a training of so many steps."""
    pace = pace_of(first.steps)
    return pace is None or first.at_first > ONCE * steps * pace.step


def _executor() -> float:
    """Seconds until whoever runs a job can begin it, in a process of its own."""
    words = [sys.executable, "-m", "sameday.suite.running.execute", "--help"]
    return _seconds(lambda: len(subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True).args))[0]


def _measured_apart(asked: Mapping[str, Any]) -> dict[str, Any] | str:
    with tempfile.TemporaryDirectory(prefix="sameday-suite-") as folder:
        job, out = Path(folder) / "job.json", Path(folder) / "result.json"
        job.write_text(json.dumps(asked))
        words = [sys.executable, "-m", "sameday.suite.times.measure", str(job), str(out)]
        ended = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        gone = time.time()
        if ended.returncode or not out.exists():
            said = ended.stderr.strip().splitlines() or ["without a word"]
            return f"exit code {ended.returncode}: {said[-1]}"
        return json.loads(out.read_text()) | {"end": max(0.0, gone - out.stat().st_mtime)}


def _compiled_files() -> int:
    """In the folders where compilers keep what they made."""
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    folders = [Path(inductor)] if inductor else list(Path(tempfile.gettempdir()).glob("torchinductor_*"))
    folders.append(Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"))
    return sum(len(files) for folder in folders for _, _, files in os.walk(folder))


def run(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What `Measured` has besides what it is of."""
    from sameday.commands.session import Session, Specs, silent
    from sameday.record.folder import RunFolder
    from sameday.tasks.base import total_steps
    from sameday.tasks.setup import TRAINING
    from sameday.tasks.warm_up import warm_up
    from sameday.train.watch import Watch

    recipe, plan = recipe_from(asked["recipe"]), Plan.model_validate(asked["plan"])
    evaluation = None if asked["evaluation"] is None else Evaluation.model_validate(asked["evaluation"])
    specs = Specs(recipe, Path(asked["home"]), plan, asked["automatic"], tuple(asked["fixed"]))
    with closing(Session.start(specs, silent, splits=TRAINING, memory=asked["memory"])) as session:
        _check_memory(session, asked["memory"])
        setup, splits = session.setup, session.audited.splits
        split = None if evaluation is None or setup.lacks(evaluation.split) is not None else evaluation.split
        few = [each for each in {"val", split} - {None, "train"} if setup.lacks(str(each)) is None]
        if few and isinstance(splits, dict):
            splits = splits | setup.audit(silent, [str(each) for each in few], FEW).splits
        task = session.load(splits=splits)
        steps: list[float] = []
        total, last = total_steps(recipe, task), task.steps_per_epoch() - 1
        with (
            tempfile.TemporaryDirectory(prefix="sameday-suite-") as folder,
            closing(RunFolder.open(Path(folder) / "run", recipe, session.plan, session.home)) as record,
            Watch(record, total, session.plan.log_steps, task.device) as watch,
            closing(session.steps(task)) as stepped,
        ):
            start = process_age()
            # Compiled before the first step, as a run does it: a graph that is made meanwhile is no step's time.
            compiled = sum(warm_up(task, range(total), None, session.ranks, stepped.warm_up, watch).values())
            with closing(stepped.run(range(total))) as done:
                for good in done:
                    watch.step(good)  # what a run notes and charts takes its time too
                    steps.append(good.seconds)
                    if enough(steps):
                        break
            steps[:1] = [steps[0] + compiled]
            # An epoch's last step has fewer samples, for which a graph of its own may have to be made.
            odd, again = [good.seconds for good in stepped.run([last, last])] if len(steps) <= last < total else (0, 0)
        result: dict[str, Any] = {"machine": session.machine.name, "steps": steps, "start": start, "total": total}
        result["last_step"] = max(0.0, odd - again)
        result |= _floor(session, task, len(steps))
        scores = _each(lambda: int(task.evaluate("val", session.ranks).get("samples", 0)))
        result |= {"first_scores": scores.first, "score_each": scores.each}
        if split is not None and evaluation is not None and setup.generates:
            questions = task.questions(split)[: FEW["test"]]
            longest = evaluation.max_new_tokens
            answers = _each(lambda: sum(map(len, task.answers(questions, longest, session.ranks))))
            result |= {"first_answers": answers.first, "answer_each": answers.each}
        with tempfile.TemporaryDirectory(prefix="sameday-suite-") as folder:
            result["save"] = _seconds(lambda: task.save(Path(folder)) or 1)[0]
        return result


def _check_memory(session: Session, memory: int | None) -> None:
    if memory is None:
        return
    if session.device.type != "cuda":
        raise BadInput("what a step would take on another GPU is estimated from one, and here it runs on the CPU")
    if session.machine.memory < 0.95 * memory:
        has, asked = (f"{size / 2**30:.0f} GiB" for size in (session.machine.memory, memory))
        raise BadInput(f"{session.machine.name} has {has}, and a plan for {asked} cannot be tried on it")


def _floor(session: Session, task: Task, steps: int) -> dict[str, float]:
    """What a step needs at least, and the device's rates; nothing of a CPU."""
    if session.device.type != "cuda":
        return {}
    from sameday.hardware import peaks

    costs = [task.cost(step, None, session.ranks).flop for step in range(min(steps, FLOORS))]
    best = peaks.measure(session.device, session.recipe.precision, None)
    return {
        "flop": sum(costs) / len(costs),
        "flop_per_second": best.flop_per_second,
        "memory_bytes_per_second": best.memory_bytes_per_second,
    }


def enough(steps: Sequence[float]) -> bool:
    """Whether their pace is known well enough."""
    spent = sum(steps[1:])
    return (len(steps) > STEPS and spent > SHORT) or (len(steps) >= LEAST and spent > LONG)


class _Each(NamedTuple):
    """Seconds for each of what was done, None where nothing was, and by how much the first time took longer."""

    each: float | None
    first: float


def _each(do: Callable[[], int]) -> _Each:
    (first, number), (again, _) = _seconds(do), _seconds(do)
    return _Each(again / number, max(0.0, first - again)) if number else _Each(None, 0.0)


def _seconds(do: Callable[[], int]) -> tuple[float, int]:
    began = time.perf_counter()
    number = do()
    return time.perf_counter() - began, number


def main() -> None:
    job, out = map(Path, sys.argv[1:])
    try:
        out.write_text(json.dumps(run(json.loads(job.read_text()))))
    except (BadInput, RunStopped) as error:
        sys.exit(in_short(error))


if __name__ == "__main__":
    main()
