"""Some steps of trainings, a little of their validation and answers, and one save, timed one training after another in
a process of their own. What they load alike is loaded once; nothing else of one is left when the next begins."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from sameday.commands.environment import prepare_environment
from sameday.commands.session import Session, Specs, silent
from sameday.hardware.compiling import graphs
from sameday.hardware.known import KnownGpu
from sameday.record.times import process_age
from sameday.spec.errors import BadInput, RunStopped, in_short
from sameday.spec.evaluation import Evaluation
from sameday.spec.load import recipe_from
from sameday.spec.plan import Plan
from sameday.spec.words import tell
from sameday.suite.times.pace import LEAST as PACED
from sameday.tasks.registry import setup_of
from sameday.tasks.setup import LOADED, TRAINING
from sameday.verify.arm import die_with_parent

if TYPE_CHECKING:
    import torch

    from sameday.hardware.peaks import Peaks, Precision
    from sameday.models.kept import KeptBase
    from sameday.tasks.base import Task
    from sameday.train.steps import Steps
    from sameday.train.watch import Watch

STEPS, SHORT = 24, 5.0
"""That many are timed, and more where they are done before so many seconds."""
LEAST, LONG = 6, 60.0
"""Fewer where they take longer than this, the first one left out, which may compile."""
FLOORS = 8
"""Steps whose floor is counted."""
FEW = {"val": 64, "test": 64}
"""Samples that stand for all when scores and answers are timed."""
LEFT = 2**29
"""Bytes of a GPU that libraries may hold beside what is kept, such as their workspaces."""


class Asked(NamedTuple):
    """A training to be timed, as a file has it."""

    specs: Specs
    evaluation: Evaluation | None
    instead_of: KnownGpu | None
    steps: bool = True
    """Else the evaluation alone."""
    filled: bool = False
    """With the images of the steps in a cache, which is made for it and removed."""
    scratch: Path | None = None
    """For folders that somebody else removes where this process is killed."""

    def as_json(self) -> dict[str, Any]:
        return {
            "recipe": self.specs.recipe.model_dump(mode="json"),
            "home": str(self.specs.home),
            "plan": self.specs.plan.model_dump(mode="json"),
            "automatic": self.specs.automatic,
            "fixed": self.specs.fixed,
            "evaluation": None if self.evaluation is None else self.evaluation.model_dump(mode="json"),
            "instead_of": None if self.instead_of is None else asdict(self.instead_of),
            "steps": self.steps,
            "filled": self.filled,
        }

    @classmethod
    def from_json(cls, one: Mapping[str, Any]) -> Asked:
        recipe, plan = recipe_from(one["recipe"]), Plan.model_validate(one["plan"])
        evaluation = None if one["evaluation"] is None else Evaluation.model_validate(one["evaluation"])
        specs = Specs(recipe, Path(one["home"]), plan, one["automatic"], tuple(one["fixed"]))
        other = one["instead_of"]
        gpu = None if other is None else KnownGpu(**other | {"capability": tuple(other["capability"])})
        return cls(specs, evaluation, gpu, one["steps"], one["filled"])


def in_turn(every: Sequence[Asked]) -> Iterator[dict[str, Any]]:
    """What `Measured` has of each, besides what it is of and what is not known in this process; and with it how many
    steps there are, and whether something was compiled. It ends early where one left memory behind: those after it need
    a process of their own."""
    libraries = _load_libraries(every[0].specs)
    from sameday.models.kept import KeptBase

    kept, others = KeptBase(), _allocated()
    for number, one in enumerate(every):
        if number and not _cleared(kept.device_bytes + others):
            return
        before = graphs()
        result = run(one, libraries, kept)
        more = graphs().since(before)
        yield result | {"compiled": more.made > more.found}


def _load_libraries(specs: Specs) -> float:
    """Before the first training, so that what only it would load counts for all. Seconds of the process until then."""
    prepare_environment(specs.plan)
    for name in (*LOADED, *setup_of(specs.recipe, specs.home).modules):
        import_module(name)
    import torch

    from sameday.hardware.machine import device_kind

    if device_kind(specs.plan) == "cuda":
        torch.zeros(1, device="cuda")
    return process_age()


def _allocated() -> int:
    """Bytes of a GPU."""
    import torch

    return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0


def _cleared(kept: int) -> bool:
    """Forgets what was compiled, so that the next training reads it from disk as its own process would, and gives
    memory back. Whether no more bytes than are kept are left on a GPU then."""
    from torch._inductor.utils import clear_caches

    from sameday.commands.stages import clear_memory

    clear_memory()
    clear_caches()
    return _allocated() <= kept + LEFT


def run(asked: Asked, libraries: float, kept: KeptBase) -> dict[str, Any]:
    """Of one training, whose process began so many seconds before libraries were loaded."""
    began, evaluation = time.perf_counter(), asked.evaluation
    read = TRAINING if asked.steps or evaluation is None else (evaluation.split,)
    with (
        _own_cache(asked) as specs,
        closing(Session.start(specs, silent, splits=read, instead_of=asked.instead_of)) as session,
    ):
        _check_memory(session, asked.instead_of)
        session.setup.kept = kept
        kept.spared = 0.0
        split = _answered_split(session, evaluation)
        task = session.load(splits=_with_few(session, split))
        # As if it had a process of its own.
        start = libraries + time.perf_counter() - began + kept.spared
        result: dict[str, Any] = {"machine": session.machine.name, "start": start, "steps": [], "total": 0}
        if asked.steps:
            opening, steps = _steps(session, task, asked)
            result |= steps | {"start": start + opening}
        return result | _besides(session, task, asked, split)


@contextmanager
def _own_cache(asked: Asked) -> Iterator[Specs]:
    """What is asked, with a cache that is nobody else's where it is to be filled."""
    if not asked.filled:
        yield asked.specs
        return
    # Entries may still be written behind its back when it is removed.
    how: dict[str, Any] = {"prefix": "sameday-suite-", "dir": asked.scratch, "ignore_cleanup_errors": True}
    with tempfile.TemporaryDirectory(**how) as folder:
        plan = asked.specs.plan.model_copy(update={"cache_dir": folder})
        yield replace(asked.specs, plan=plan, fixed=(*asked.specs.fixed, "cache_dir"))


def _steps(session: Session, task: Task, asked: Asked) -> tuple[float, dict[str, Any]]:
    """What it takes until the first one can begin, and the steps."""
    from sameday.record.folder import RunFolder
    from sameday.tasks.base import total_steps
    from sameday.tasks.warm_up import warm_up
    from sameday.train.watch import Watch

    began = time.perf_counter()
    total, last = total_steps(session.recipe, task), task.steps_per_epoch() - 1
    with (
        tempfile.TemporaryDirectory(prefix="sameday-suite-", dir=asked.scratch) as folder,
        closing(RunFolder.open(Path(folder) / "run", session.recipe, session.plan, session.home)) as record,
        Watch(record, total, session.plan.log_steps, task.device) as watch,
        closing(session.steps(task)) as stepped,
    ):
        watch.starts(0, session.ranks.size)
        opening = time.perf_counter() - began
        # Compiled before the first step, as a run does it: a graph that is made meanwhile is no step's time.
        compiled = sum(warm_up(task, range(total), None, session.ranks, stepped.warm_up, watch).values())
        stalls: list[str] = []
        steps, in_all = _until_enough(stepped, timed_steps(total), watch, stalls), 0.0
        if asked.filled:
            compiled += max(0.0, steps[0] - median(steps))
            # Their images are there by now.
            steps = _until_enough(stepped, timed_steps(total)[: len(steps)], watch, stalls)
        elif task.share_made(()) is not None:
            order = timed_steps(total)[: len(steps)]
            kept = _until_enough(stepped, order, watch, stalls)
            made, in_all = (task.share_made(some) or 0.0 for some in (order, range(total)))
            steps = with_share(steps, kept, made, in_all)
        steps[:1] = [steps[0] + compiled]
        # An epoch's last step has fewer samples, for which a graph of its own may have to be made.
        odd, again = [good.seconds for good in stepped.run([last, last])] if len(steps) <= last < total else (0, 0)
    about = {"steps": steps, "total": total, "last_step": max(0.0, odd - again), "stalls": stalls}
    return opening, about | _floor(session, task, min(total, len(steps)), in_all)


def _until_enough(stepped: Steps, order: Sequence[int], watch: Watch, stalls: list[str]) -> list[float]:
    """Their seconds. Those that stalled are added to `stalls`, in words."""
    from sameday.hardware.stalls import Stalls

    steps: list[float] = []
    looked = Stalls(stepped.ahead > 0, LEAST)
    with closing(stepped.run(order)) as done:
        for good in done:
            watch.step(good)  # what a run notes and charts takes its time too
            steps.append(good.seconds)
            if (how := looked.found(good.seconds, good.input.get("wait", 0.0))) is not None:
                stalls.append(f"step {good.step + 1} {how}")
            if enough(steps):
                break
    return steps


def with_share(first: Sequence[float], kept: Sequence[float], made: float, in_all: float) -> list[float]:
    """Seconds of steps in a run in which the share `in_all` of what steps keep for each other has to be made. They were
    timed when the share `made` of it was, and `kept` are those of the same steps when all of it was there."""
    ratios = [after / before for before, after in zip(first, kept, strict=False)][1:]  # the first one may have compiled
    if not made or not ratios:
        return list(first)
    there = min(1.0, median(ratios))  # few steps of a machine that others use too are far off
    return [each * (there + (1 - there) * in_all / made) for each in first]


def _answered_split(session: Session, evaluation: Evaluation | None) -> str | None:
    return None if evaluation is None or session.setup.lacks(evaluation.split) is not None else evaluation.split


def _with_few(session: Session, split: str | None) -> Any:
    """The session's data, with a few samples of what scores and answers are timed of."""
    setup, splits = session.setup, session.audited.splits
    few = [each for each in {"val", split} - {None, "train"} if setup.lacks(str(each)) is None]
    if few and isinstance(splits, dict):
        splits = splits | setup.audit(silent, [str(each) for each in few], FEW).splits
    return splits


def _besides(session: Session, task: Task, asked: Asked, split: str | None) -> dict[str, Any]:
    """Scores, answers, and saving."""
    evaluation = asked.evaluation
    scored = "test" if split == "test" and session.setup.lacks("val") is not None else "val"
    scores = _each(lambda: int(task.evaluate(scored, session.ranks).get("samples", 0)))
    result: dict[str, Any] = {"first_scores": scores.first, "score_each": scores.each}
    if split is not None and evaluation is not None and session.setup.generates:
        questions = task.questions(split)[: FEW["test"]]
        longest = evaluation.max_new_tokens
        answers = _each(lambda: sum(map(len, task.answers(questions, longest, session.ranks))))
        result |= {"first_answers": answers.first, "answer_each": answers.each}
    if asked.steps:
        with tempfile.TemporaryDirectory(prefix="sameday-suite-", dir=asked.scratch) as folder:
            result["save"] = seconds_of(lambda: task.save(Path(folder)) or 1)[0]
    return result


def _check_memory(session: Session, instead_of: KnownGpu | None) -> None:
    if instead_of is None:
        return
    if session.device.type != "cuda":
        raise BadInput("what a step would take on another GPU is estimated from one, and here it runs on the CPU")
    if session.machine.memory < 0.95 * instead_of.memory:
        has, asked = (f"{size / 2**30:.0f} GiB" for size in (session.machine.memory, instead_of.memory))
        raise BadInput(f"{session.machine.name} has {has}, and a plan for {asked} cannot be tried on it")


def _floor(session: Session, task: Task, steps: int, made: float) -> dict[str, float]:
    """What a step needs at least, and the device's rates; nothing of a CPU. Of what steps keep for each other the share
    `made` has to be made."""
    if session.device.type != "cuda":
        return {}
    flop = least_flop(session, task, steps)
    if made and task.let_go() is not None:
        flop += made * (least_flop(session, task, steps) - flop)
    best = _peaks(session.device, session.recipe.precision)
    return {
        "flop": flop,
        "flop_per_second": best.flop_per_second,
        "memory_bytes_per_second": best.memory_bytes_per_second,
    }


def least_flop(session: Session, task: Task, steps: int) -> float:
    """Of a step, on the average of the first ones."""
    return fmean(task.cost(step, None, session.ranks).flop for step in range(min(steps, FLOORS)))


@cache
def _peaks(device: torch.device, precision: Precision) -> Peaks:
    from sameday.hardware.peaks import measure

    return measure(device, precision, None)


def timed_steps(total: int) -> list[int]:
    """Those of a training, and again where they are too few for a pace."""
    return [*range(total), *(number % total for number in range(total, PACED))]


def enough(steps: Sequence[float]) -> bool:
    """Whether their pace is known well enough."""
    spent = sum(steps[1:])
    return (len(steps) > STEPS and spent > SHORT) or (len(steps) >= LEAST and spent > LONG)


class _Each(NamedTuple):
    """Seconds for each of what was done, None where nothing was, and by how much the first time took longer."""

    each: float | None
    first: float


def _each(do: Callable[[], int]) -> _Each:
    (first, number), (again, _) = seconds_of(do), seconds_of(do)
    return _Each(again / number, max(0.0, first - again)) if number else _Each(None, 0.0)


def seconds_of(do: Callable[[], int]) -> tuple[float, int]:
    began = time.perf_counter()
    number = do()
    return time.perf_counter() - began, number


def main() -> None:
    """`python -m sameday.suite.times.trial ASKED RESULTS`: a line for each result, as soon as it is there."""
    die_with_parent()
    asked, out = map(Path, sys.argv[1:])
    with out.open("a") as file:
        try:
            every = [Asked.from_json(each)._replace(scratch=out.parent) for each in json.loads(asked.read_text())]
            for result in in_turn(every):
                tell(json.dumps(result | {"time": time.time()}), file)
        except (BadInput, RunStopped) as error:
            sys.exit(in_short(error))


if __name__ == "__main__":
    main()
