"""One arm of a comparison, in a process of its own: gradients at the starting weights, then some steps of the real
training loop, killed on the way and resumed."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sameday.hardware.signals import ASKING
from sameday.spec.errors import BadInput, DiskTooSmall, RunStopped
from sameday.spec.load import recipe_from
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.spec.words import tell
from sameday.tasks.base import gone_through_before
from sameday.tasks.setup import TRAINING

if TYPE_CHECKING:  # it need not be loaded to start an arm
    from sameday.commands.session import Session

STIR = 0.05
"""Standard deviation given to parameters that start at zero: enough to matter beside its layer."""

DIED = "died"
"""A file that an arm leaves when it is killed as planned."""

START, QUESTIONS = "start", "questions.json"
"""What an arm leaves for another trainer."""
PEER = "peer"
"""Instead of a part: the job is another trainer's."""

ERROR = "error: "
"""How the sentence begins by which an arm refuses what it was given."""

PR_SET_PDEATHSIG = 1

Plant = Callable[[Any, Any], AbstractContextManager[Any]]
"""Called with the task and the ranks before anything is computed; what it returns is held to the end."""


@dataclass(frozen=True)
class Job:
    """What an arm does. `rounded` takes every weight to the nearest bf16 number first: a reference in float32 then
    starts from the weights that bf16 matmuls see. `double` computes in float64 as far as the model's modules do."""

    recipe: Recipe
    plan: Plan
    home: Path
    out: Path
    steps: int
    few: dict[str, int]
    dies_in: int | None
    rounded: bool = False
    trajectory: bool = True
    double: bool = False
    dropout: bool = False
    """Whether masks are the same in all arms, so that dropout may stay on."""
    peer: bool = False
    """Whether another trainer goes the same steps: it is left the questions of each and the starting adapter."""

    def write(self, path: Path) -> None:
        fields = {**self.__dict__, "recipe": self.recipe.model_dump(mode="json"), "home": str(self.home)}
        fields |= {"plan": self.plan.model_dump(mode="json"), "out": str(self.out)}
        path.write_text(json.dumps(fields))

    @classmethod
    def read(cls, path: Path) -> Job:
        fields = json.loads(path.read_text())
        recipe, plan = recipe_from(fields.pop("recipe")), Plan.model_validate(fields.pop("plan"))
        home, out = Path(fields.pop("home")), Path(fields.pop("out"))
        return cls(recipe, plan, home, out, **fields)


def run_part(job: Job, part: int, die: Callable[[], None], plant: Plant | None = None) -> None:
    """Part 1 computes the gradients and trains until `die` is called; part 2 resumes and trains to the end."""
    from sameday.commands.session import Session, Specs
    from sameday.record.folder import RunFolder
    from sameday.train.loop import train
    from sameday.verify.trace import FINAL, Witness, save_tensors

    session = Session.start(Specs(job.recipe, job.home, job.plan), join=True, splits=TRAINING, few=job.few)
    ranks = session.ranks
    opened: list[RunFolder] = []
    folder = job.out / f"part-{part}"
    try:
        task = session.load()
        start_weights(task, job.rounded)
        if job.double:
            task.module().double()
        with nullcontext() if plant is None else plant(task, ranks):

            def killed() -> None:
                (job.out / DIED).touch()
                die()

            dies_in = job.dies_in if part == 1 else None
            witness: Any = Witness(task, folder, ranks, dies_in, killed, job.dropout, told=job.peer)
            if part == 1:
                _check_disk(job, task)
                if job.peer and ranks.first:
                    _hand_over(job, task)
                _fixed_gradients(witness, session, job, folder)
                if session.setup.generates and job.trajectory and not job.peer and ranks.first:
                    _generated(task, folder)
            elif ranks.first:
                _note_resume(job, folder)
            if not job.trajectory:
                return
            ranks.from_first(lambda: opened.append(RunFolder.open(job.out / "run", job.recipe, job.plan, job.home)))
            run = opened[0] if opened else RunFolder(job.out / "run", job.recipe, job.plan, job.home)
            untold = session.resolved.plan.model_copy(update={"track": "none"})  # an arm is nobody's experiment
            with witness.watching():
                train(job.recipe, untold, witness, run, ranks)
            if ranks.first:
                shutil.copy(run.metrics_path, folder)
                task.restore(run.result)
                save_tensors(folder / FINAL, task.trained())
    finally:
        for run in opened:
            run.close()
        session.close()


class Killed(BaseException):
    """Leaves the loop as a kill does: nothing is saved on the way out."""


def run_here(job: Job, plant: Plant | None = None) -> None:
    """Both parts in this process, with an exception for the kill: where many comparisons are made in a row."""

    def die() -> None:
        raise Killed

    shutil.rmtree(job.out, ignore_errors=True)
    job.out.mkdir(parents=True)
    # A run that leaves early keeps its signal handlers, which is right for a process that ends with it.
    handlers = {number: signal.getsignal(number) for number in ASKING}
    try:
        run_part(job, 1, die, plant)
    except Killed:
        (job.out / DIED).unlink()
        run_part(job, 2, die, plant)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def start_weights(task: Any, rounded: bool) -> None:
    """The same in every arm, and none at zero: where one factor is zero, the other's gradient is zero too, and a
    comparison there would prove half."""
    import torch

    from sameday.kernels.dropout import name_key

    for name, parameter in task.trained().items():
        if not parameter.any():
            generator = torch.Generator().manual_seed(name_key("stir", name) & 0xFFFFFFFF)
            noise = STIR * torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(noise)
    if rounded:
        # Weights in four bits are rounded where they are dequantised, not by their codes and scales.
        packed = [module for module in task.module().modules() if hasattr(module, "weight_dtype")]
        stored = {id(parameter) for module in packed for parameter in module.parameters()}
        for module in packed:
            module.weight_dtype = torch.bfloat16
        for parameter in task.module().parameters():
            if id(parameter) not in stored:
                parameter.data.copy_(parameter.data.bfloat16())


def _fixed_gradients(witness: Any, session: Session, job: Job, folder: Path) -> None:
    """Each step's gradient, before clipping, with the weights left as they are."""
    from sameday.verify.trace import save_tensors

    ranks, losses, numbers = session.ranks, [], range(job.steps)
    witness.training(True)
    first = gone_through_before(witness, numbers)
    with closing(session.steps(witness.unwatched())) as steps:
        if ranks.first:
            save_tensors(folder / "start.safetensors", steps.trained)
        steps.open([*first, *numbers])
        for step in first:
            steps.gradient(step)
        for step in numbers:
            steps.gradient(step)
            loss, out_of_memory, _, _, failed, *_ = steps.gradients.tail.tolist()
            if failed:
                raise steps.failure()
            if out_of_memory:
                witness.smaller_budget(step, None, ranks)
            losses.append(loss)
            if ranks.first:
                gradients = {name: parameter.grad for name, parameter in steps.trained.items()}
                save_tensors(folder / f"fixed-{step + 1:06d}.safetensors", gradients)
    if ranks.first:
        (folder / "fixed.json").write_text(json.dumps(losses))


def _generated(task: Any, folder: Path) -> None:
    """Whether the answers that this arm generates are those of the model that it trains. What fails here is told with
    the comparison, unless memory does."""
    import torch

    from sameday.verify.trace import GENERATION

    ids, failed = task.step_ids(0), ""
    gaps: list[float] = []
    try:
        gaps = task.generation_gaps(ids)
    except torch.OutOfMemoryError:
        pass
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    known = dict(zip(task.names(ids), gaps, strict=False))
    (folder / GENERATION).write_text(json.dumps({"gaps": known, "failed": failed}))


def _hand_over(job: Job, task: Any) -> None:
    """For another trainer: who is in each step, and the adapter as PEFT reads it."""
    (job.out / START).mkdir()
    task.save(job.out / START)
    steps = [task.conversations(task.step_ids(step)) for step in range(job.steps)]
    (job.out / QUESTIONS).write_text(json.dumps(steps))


def _note_resume(job: Job, folder: Path) -> None:
    """Before the run folder takes back what will be gone through again: what was logged, and where to go on from."""
    from sameday.record import checkpoint
    from sameday.verify.trace import RESUME

    shutil.copy(job.out / "run" / "metrics.jsonl", job.out / "part-1")
    newest = max((step for step, _ in checkpoint.steps(job.out / "run" / "checkpoints")), default=0)
    (folder / RESUME).write_text(json.dumps(newest))


def _check_disk(job: Job, task: Any) -> None:
    """Every step's gradient and weights are kept, and those of the other arms beside them."""
    each = 4 * sum(parameter.numel() for parameter in task.trained().values())
    need, free = each * job.steps * 4, shutil.disk_usage(job.out).free
    if need > free:
        raise DiskTooSmall(
            f"{job.out}: an arm of {job.steps} steps keeps about {need:,} bytes here, and {free:,} are free: "
            f"{need - free:,} are missing; set TMPDIR to a larger disk, or ask for fewer --steps (at least 4)"
        )


def _run_peer(path: Path) -> None:
    from sameday.verify.peer.loop import CannotFollow, run

    try:
        run(json.loads(path.read_text()))
    except CannotFollow as error:
        raise BadInput(str(error)) from None


def die_with_parent() -> None:
    """Whatever ends the process that started this one ends this one too, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """`python -m sameday.verify.arm JOB PART`; a kill is a real one. An arm whose parent is gone goes too."""
    die_with_parent()
    path, part = Path(arguments[0]), arguments[1]
    try:
        if part == PEER:
            _run_peer(path)
        else:
            run_part(Job.read(path), int(part), partial(os.kill, os.getpid(), signal.SIGKILL))
    except BadInput as error:
        tell(f"{ERROR}{error}", sys.stderr)
        return error.code
    except RunStopped as stop:
        tell(stop, sys.stderr)
        return stop.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
