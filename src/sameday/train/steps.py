"""Optimizer steps, launched on the device and finished in order. The loop, the profiler, the verifier and
`sameday cache --measure` all step through this."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from sameday.data.feed import Feed
from sameday.data.loader import feed
from sameday.hardware import garbage
from sameday.hardware.compiling import in_words
from sameday.hardware.phases import Clock, during
from sameday.hardware.ranks import Ranks
from sameday.spec.errors import EXIT_DIVERGED, EXIT_OUT_OF_MEMORY, RunStopped
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.tasks.base import Task
from sameday.train.commit import DeviceTime, PendingScalars, StepCommit
from sameday.train.optim import Gradients, allocate_state, make_optimizer


@dataclass(frozen=True)
class Good:
    """A step that changed the weights. `step` counts from 0; `stop` says that a rank was asked to stop; `input` is what
    its data took, `phases` where its time went, if it was timed."""

    step: int
    loss: float
    norm: float
    seconds: float
    stop: bool
    phases: dict[str, float] | None
    rate: float
    samples: int
    micro_batches: int
    input: dict[str, float]
    parts: dict[str, float] = field(default_factory=dict)
    """Parts of the loss by name, each divided by what there is of it."""
    own_rates: dict[str, float] = field(default_factory=dict)
    """Learning rates of parts of the model that have one of their own, by name."""


@dataclass(frozen=True)
class OutOfMemory:
    """A step in which a rank ran out of memory; the weights are as before it."""

    step: int


@dataclass(frozen=True)
class GivenUp:
    """A step that a rank left between two micro-batches because it was asked to stop; the weights are as before it."""

    step: int


@dataclass(frozen=True)
class Diverged:
    """A step whose loss or gradient is not finite; the weights are as before it."""

    step: int
    loss: float
    norm: float

    def __str__(self) -> str:
        if not math.isfinite(self.loss):
            return f"loss {self.loss}"
        return f"gradient norm {self.norm} at loss {self.loss:.4f}"


@dataclass(frozen=True)
class Failed:
    """An exception that ended a step, after the end of those before it; the weights are as before it. Of several ranks
    all have it, unless it is `alone`; of a bug the others have the words."""

    error: Exception


Outcome = Good | OutOfMemory | GivenUp | Diverged | Failed


@dataclass(frozen=True)
class _Launched:
    step: int
    scalars: PendingScalars
    clock: Clock | None
    data: tuple[float, int, int, dict[str, float]]
    """Rate, samples, micro-batches and input, as `Good` has them."""

    def stop_clock(self) -> None:
        if self.clock is not None:
            self.clock.stop()


class Steps:
    """`launch` gives a step to the device whole, `finish` tells how earlier ones ended. Between the two a device may
    have `ahead` steps more than are known: whoever saves or evaluates finishes all of them first. `give_up` is asked
    before each micro-batch: where one takes minutes, a batch system would not wait for the end of the step."""

    def __init__(
        self, recipe: Recipe, plan: Plan, task: Task, ranks: Ranks, give_up: Callable[[], bool] = lambda: False
    ) -> None:
        self._recipe, self._plan, self._task, self._ranks, self._give_up = recipe, plan, task, ranks, give_up
        self.trained = task.trained()
        own = task.own_rates()
        self._scales = {part: rate / recipe.learning_rate for part, (rate, _) in own.items()}
        fits = False
        with suppress(torch.OutOfMemoryError):
            self.gradients = Gradients(self.trained, len(task.loss_parts))
            self.optimizer = make_optimizer(self.trained, recipe, plan, own)
            allocate_state(self.optimizer)
            fits = True
        if not all(ranks.gather(fits)):  # all ranks stop together
            raise RunStopped(
                "out of memory: gradients and optimizer state do not fit beside the model. What is left to try: "
                f"{task.memory_advice}.",
                EXIT_OUT_OF_MEMORY,
            )
        self._commit = StepCommit(self.optimizer, self.gradients, recipe.max_grad_norm)
        self.ahead = self._commit.ahead
        # Where nothing is launched ahead, the update is part of the step, and the host sees its end.
        self._where = task.device if self.ahead else torch.device("cpu")
        self._launched: deque[_Launched] = deque()
        self._failed: Exception | None = None
        self._failed_here: Exception | None = None
        self._short = False
        self._feed: Feed | None = None
        self.restart_timing()

    def open(self, steps: Sequence[int], budget: int | None = None) -> None:
        """The data of these steps, in this order, in micro-batches of at most `budget`."""
        self.close()
        garbage.collect(self._task.device)
        task, ranks = self._task, self._ranks
        self._feed = feed(self._plan, task.device, steps, lambda step: task.batches(step, budget, ranks))
        garbage.freeze(task.device)
        self.restart_timing()

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None
        garbage.unfreeze(self._task.device)  # also what a warm-up froze that was the end of a run

    def restart_timing(self) -> None:
        """What happened since the last step belongs to no step."""
        self._mark = DeviceTime(self._where)

    @property
    def pending(self) -> int:
        """Steps that were launched and whose end is not known yet."""
        return len(self._launched)

    def gradient(self, step: int, stop: Callable[[], bool] = lambda: False) -> int:
        """The step's whole gradient over all ranks, in place. How many micro-batches this rank had. `stop` is asked
        once they are computed: whoever is told to stop meanwhile need not go through another step. Nothing of it is of
        use where a rank failed, which its tail says and `failure` tells."""
        with during("optimizer"):
            self.gradients.zero()
        count = self._part(step)
        # The one all-reduce of a step: gradients, loss, and what the ranks must decide together.
        with during("exchange"):
            if stop():
                self.gradients.tail[2] = 1
            self._ranks.sum_(self.gradients.buffer)
        return count

    def _part(self, step: int) -> int:
        """This rank's part of the gradient, and how many micro-batches it had. Of several ranks one that fails is
        missed by the others only once they have its part of the sum, which is nothing from then on."""
        assert self._feed is not None, "open comes first"
        if self._failed_here is None:
            try:
                return self.accumulate(next(self._feed), step)
            except Exception as error:
                if self._ranks.size == 1:
                    raise
                self._failed_here = in_words(error)
                self.gradients.zero()
        self.gradients.tail[4] = 1
        return 0

    def failure(self) -> Exception:
        """Where a rank failed, on every rank: why."""
        failed = self._ranks.failure(self._failed_here)
        assert failed is not None, "the sum says that a rank has failed"
        return failed

    def accumulate(self, batches: Iterable[Any], step: int) -> int:
        """Forward and backward of micro-batches that are on the device. Running out of memory is noted, not raised: the
        other ranks wait for this one's part of the sum."""
        gradients, count = self.gradients, 0
        scale = 1 / self._task.count(self._task.step_ids(step))
        try:
            for batch in batches:
                if self._give_up():
                    gradients.tail[3] = 1
                    break
                loss, losses = self._task.loss_sum(batch, step)
                # Where the tower alone is trained, nothing of it has a part in a question without an image.
                if loss.requires_grad:
                    with during("backward"):
                        (loss * scale).backward()
                with during("loss"):
                    gradients.tail[0] += loss.detach() * scale
                    if self._task.loss_parts:
                        gradients.parts += self._task.part_sums(batch, losses)
                count += 1
        except torch.OutOfMemoryError:
            gradients.zero()
            gradients.tail[1] = 1
            self._short = True
        return count

    def warm_up(self, batch: Any, step: int) -> bool:
        """Forward and backward of a micro-batch, for what is compiled or recorded on the way: the gradient is thrown
        away. Whether there was memory for it."""
        self.accumulate([batch], step)
        fits, self._short = not self._short, False
        self.gradients.zero()
        return fits

    def launch(
        self,
        step: int,
        rate: float,
        stop: Callable[[], bool] = lambda: False,
        clock: Clock | None = None,
        laps: bool = False,
    ) -> None:
        """Where `stop` says so, all ranks are told that this one was asked to. `clock` times the step; one that `laps`
        goes on with the next."""
        for earlier in self._launched:
            earlier.stop_clock()
        if clock is not None:
            clock.lap()
        try:
            count = self.gradient(step, stop)
        except Exception as error:
            self._failed = in_words(error)  # after what was launched before
            return
        scalars = self._commit.begin(rate)
        assert self._feed is not None
        self._feed.look_ahead()  # while a GPU is at work
        data = (rate, len(self._task.step_ids(step)), count, self._feed.taken())
        self._launched.append(_Launched(step, scalars, None if laps else clock, data))

    def finish(self, keep: int) -> Iterator[Outcome]:
        """How launched steps ended, in order, until at most `keep` are pending. A bad one is the last: nothing that was
        launched after it changed the weights."""
        # Until the all-reduce only one rank knows of a signal or of running out of memory, so none may branch on it.
        if self._failed is not None or (self._short and self._ranks.size == 1):
            keep = 0
        while len(self._launched) > keep:
            launched = self._launched.popleft()
            outcome = self._ended(launched)
            if not isinstance(outcome, Good):
                self._discard(launched)
                # Other ranks still wait for the step that failed here: they cannot be asked about this one.
                error = self._failed if self._ranks.size > 1 else None
                self._failed = None
                yield Failed(error) if error is not None else outcome
                return
            keep = 0 if outcome.stop else keep
            yield outcome
        if self._failed is not None:
            error, self._failed = self._failed, None
            yield Failed(error)

    def run(
        self, steps: Sequence[int], clock: Clock | None = None, budget: int | None = None
    ) -> Generator[Good, None, None]:
        """These steps at a learning rate of zero, each when its end is known: what the loop does, without its records.
        OutOfMemoryError or RunStopped where one is bad."""
        self._task.training(True)
        self.open(steps, budget)
        try:
            for number, step in enumerate(steps, 1):
                self.launch(step, 0.0, clock=clock, laps=True)
                for outcome in self.finish(self.ahead if number < len(steps) else 0):
                    if isinstance(outcome, Failed):
                        raise outcome.error
                    if isinstance(outcome, OutOfMemory):
                        raise torch.OutOfMemoryError(f"in step {outcome.step + 1}")
                    if isinstance(outcome, Diverged):
                        raise RunStopped(f"step {outcome.step + 1}: {outcome}", EXIT_DIVERGED)
                    assert isinstance(outcome, Good), "whoever asks for steps without training gives none up"
                    yield outcome
        finally:
            deque(self.finish(0), maxlen=0)  # of whoever wants no more of them, none is found by the next

    def _ended(self, launched: _Launched) -> Outcome:
        loss, out_of_memory, stop, given_up, failed, *sums, norm = self._commit.finish(launched.scalars)
        if given_up:
            return GivenUp(launched.step)
        if failed:
            return Failed(self.failure())
        if out_of_memory:
            return OutOfMemory(launched.step)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return Diverged(launched.step, loss, norm)
        launched.stop_clock()  # before the step's own end, which its phases must lie within
        now = launched.scalars.time if self.ahead else DeviceTime(self._where)
        seconds, self._mark = now.since(self._mark), now
        phases = None if launched.clock is None else launched.clock.steps()[0]
        parts = self._parts(launched.step, sums)
        own_rates = {part: launched.data[0] * scale for part, scale in self._scales.items()}
        return Good(launched.step, loss, norm, seconds, bool(stop), phases, *launched.data, parts, own_rates)

    def _parts(self, step: int, sums: Sequence[float]) -> dict[str, float]:
        task = self._task
        if not task.loss_parts:
            return {}
        counts = task.part_counts(task.step_ids(step))
        return {name: part / n for name, part, n in zip(task.loss_parts, sums, counts, strict=True) if n}

    def _discard(self, bad: _Launched) -> None:
        """What was launched after a bad step."""
        for each in self._launched:
            each.scalars.read()  # so that the device is through with it
        for each in (bad, *self._launched):
            each.stop_clock()
        self._launched.clear()
        self._short, self._failed_here = False, None
        self._commit.reset()
