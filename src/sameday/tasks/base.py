"""What the loop and the tools ask of a task once it is loaded; before that they ask its `TaskSetup`. They know no task
by name. Importing this loads no torch, since a plan may set variables that torch reads at its start."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sameday.spec.errors import EXIT_DIVERGED, EXIT_OUT_OF_MEMORY, EvaluationGivenUp, RunStopped
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.spec.words import first_names

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from sameday.data.questions.sample import Sample
    from sameday.data.seen import Seen
    from sameday.hardware.ranks import Ranks
    from sameday.kernels.ahead import Launch

Say = Callable[[str], None]

OPTIMIZER_TRIPS = 8
"""How often AdamW moves as many bytes as are trained: the weights and both moments are read and written, the gradient
is written and read."""


@dataclass(frozen=True)
class LeftOut:
    """A sample that is not trained on, and why."""

    where: str
    what: str


@dataclass(frozen=True)
class StepCost:
    """What one rank's part of a step must do at least, and the FLOPs that the plan executes to get there. Weights are
    read once forward and once backward in each micro-batch; each image is read once from disk, unless memory still
    holds it from an earlier epoch. `fp8_flop` and `executed_fp8_flop` are those that the device
    computes in fp8."""

    samples: int
    micro_batches: int
    flop: int
    executed_flop: int
    memory_bytes: int
    copy_bytes: int
    disk_bytes: int
    fp8_flop: int = 0
    executed_fp8_flop: int = 0


@dataclass(frozen=True)
class WarmUpBatch:
    """A micro-batch that stands for others. `make` builds it on the host. It is trained on as one of `step`, or, where
    there is one, given to `score`, which does with it what a validation does. `launches`: kernels of ours that are
    compiled for it, which may be compiled before it."""

    name: str
    make: Callable[[], Any]
    step: int = 0
    score: Callable[[Any], object] | None = None
    launches: Sequence[Launch] = ()


@dataclass(frozen=True)
class Answer:
    """What was generated, and how many tokens it took, the one that ends it included."""

    text: str
    tokens: int


NO_MEMORY, FAILED, ASKED_TO_STOP = 1.0, 2.0**20, 2.0**40
"""What ends a rank's part of an evaluation, as numbers that are summed over ranks with its scores."""


class Task(ABC):
    """A loaded task. Order comes from the recipe, partition from the plan, and sums are never averages: the loop
    divides once."""

    plan: Plan
    device: torch.device
    left_out: Sequence[LeftOut] = ()
    """Samples that only loading showed to be unfit."""
    notes: Sequence[str] = ()
    """What a user should know about choices that were made while it was loaded."""
    budget_field: str
    """The plan field that bounds a micro-batch: what is lowered when memory runs out."""
    memory_advice: str
    """What is left to try where one sample alone is too much."""
    evaluation_advice: str = "a smaller model or smaller samples"
    """The same for evaluation, which keeps nothing for a backward pass."""
    smallest: str | None = None
    """The least that a micro-batch can hold, in words, where that is more than one sample."""
    loss_parts: tuple[str, ...] = ()
    """Names of parts of the loss that the log shows beside the whole."""
    stop_asked: Callable[[], bool] = staticmethod(lambda: False)
    """Whether somebody waits for this process to leave: an evaluation is then given up between two micro-batches."""

    @abstractmethod
    def trained(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates, by name."""

    def own_rates(self) -> Mapping[str, tuple[float, Collection[str]]]:
        """Parts of the model that have a peak learning rate of their own, by name: the rate, and which of what is
        trained has it."""
        return {}

    @abstractmethod
    def module(self) -> nn.Module:
        """Everything that computes, trained or frozen."""

    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Of the first epoch; unless a task says otherwise, of every epoch."""

    def epoch_start(self, epoch: int) -> int:
        """The first step of an epoch, counted over all epochs."""
        return epoch * self.steps_per_epoch()

    def epoch_ends(self, total: int) -> Container[int]:
        """How many steps are done when an epoch ends, for each end within `total` steps."""
        return range(0, total + 1, self.steps_per_epoch())

    @abstractmethod
    def step_ids(self, step: int) -> list[int]:
        """The samples of a step, counted over all epochs; pure arithmetic."""

    @abstractmethod
    def count(self, ids: Sequence[int]) -> float:
        """What the step's loss sum is divided by."""

    @abstractmethod
    def names(self, ids: Sequence[int]) -> list[str]:
        """Samples as a user can find them: file and line."""

    @abstractmethod
    def batches(self, step: int, budget: int | None, ranks: Ranks) -> Iterable[Any]:
        """This rank's micro-batches of a step, with `to(device, non_blocking)` and `pin_memory()`. `budget` overrides
        the plan's `budget_field`; 1 puts each sample by itself."""

    @abstractmethod
    def budget(self, step: int, budget: int | None, ranks: Ranks) -> int:
        """The bound that holds in this step: the given one, or what the plan comes to."""

    @abstractmethod
    def smaller_budget(self, step: int, budget: int | None, ranks: Ranks) -> int | None:
        """Half of the step's largest micro-batch, or None where none can be cut any more."""

    @abstractmethod
    def loss_sum(self, batch: Any, step: int) -> tuple[Tensor, Tensor]:
        """The weighted sum of the micro-batch's losses, and each loss by itself, detached."""

    def warm_up_batches(self, steps: range, budget: int | None, ranks: Ranks) -> Sequence[WarmUpBatch]:
        """A few micro-batches that stand for all that these steps and their validations will meet, where something is
        compiled or recorded for each kind of them. The same ones on every rank."""
        return ()

    def warmed_up(self) -> str | None:
        """Called before the first step of a run, when it is known what memory steps take. What there is to say then."""
        return None

    def share_made(self, steps: Iterable[int]) -> float | None:
        """Where something of a step is kept for others: the share of it that has to be made in a run that begins with
        these steps; None where nothing is kept."""
        return None

    def let_go(self) -> str | None:
        """Of what is kept in memory for speed alone, where a step ran out of it: what that was, if there was any."""
        return None

    def recorded_sizes(self) -> int:
        """Of micro-batches, whose kernels are recorded so far."""
        return 0

    def is_recorded(self, batch: Any) -> bool:
        """Whether kernels are recorded that this micro-batch of training replays."""
        return False

    def part_sums(self, batch: Any, losses: Tensor) -> Tensor:
        """For each of `loss_parts` its sum of the micro-batch's losses, of which `loss_sum` gave each by itself."""
        raise NotImplementedError

    def part_counts(self, ids: Sequence[int]) -> Sequence[float]:
        """What the sums of each of `loss_parts` are divided by; 0 where the step has nothing of it."""
        return ()

    @abstractmethod
    def seen(self, batch: Any) -> Iterable[Seen]:
        """The samples of a micro-batch as the model sees them, read back from its tensors."""

    def sample_losses(self, batch: Any, losses: Tensor) -> dict[int, float]:
        """The mean loss of each sample of a micro-batch by its id, where `loss_sum` gave each loss by itself."""
        raise NotImplementedError

    def conversations(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """These training samples as any other trainer takes them, where one can."""
        raise NotImplementedError

    @abstractmethod
    def culprits(self, batch: Any, losses: Tensor) -> list[str]:
        """The samples whose loss is not finite."""

    def training(self, on: bool) -> None:
        self.module().train(on)

    @abstractmethod
    def evaluate(self, split: str, ranks: Ranks, budget: int | None = None) -> dict[str, float]:
        """Scores of a split: `loss`, `samples` (how many), and shares of the samples; empty where there is none."""

    def evaluation_stopped(
        self,
        sample: str,
        short: Sequence[str],
        ranks: Ranks,
        flags: float,
        failed: Exception | None = None,
    ) -> Exception:
        """For all ranks alike, where one of them has no memory to evaluate a single `sample`, has failed or was asked
        to stop; `short` names this rank's sample, `failed` is what this rank met, and `flags` is the sum of what the
        ranks ran into."""
        if flags >= ASKED_TO_STOP:
            return EvaluationGivenUp()
        mine = None if failed is None else self.evaluation_error(failed)
        if flags >= FAILED and (error := ranks.failure(mine)) is not None:
            return error
        names = [name for each in ranks.gather(list(short)) for name in each]
        return RunStopped(
            f"out of memory in evaluation with a single {self.smallest or sample}, {first_names(names)}. What is left "
            f"to try: {self.evaluation_advice}.",
            EXIT_OUT_OF_MEMORY,
        )

    def evaluation_error(self, error: Exception) -> Exception:
        """What an evaluation raised, in words where memory ran out and the task itself has none."""
        import torch

        if not isinstance(error, torch.OutOfMemoryError):
            return error
        words = f"out of memory in evaluation. What is left to try: {self.evaluation_advice}."
        return RunStopped(words, EXIT_OUT_OF_MEMORY, alone=True)

    # For tasks whose setup says that they generate

    def questions(self, split: str) -> Sequence[Sample]:
        """Those of a split, to which answers are generated."""
        raise NotImplementedError

    def answers(
        self, questions: Sequence[Sample], max_new_tokens: int, ranks: Ranks, done: Collection[int] = ()
    ) -> Iterator[dict[int, Answer]]:
        """Greedy answers, by a question's number in `questions`, as they come: on every rank those of all ranks. How
        questions are put together depends on nothing but them and the plan, so that an answer is the same whatever was
        `done` before; what is done need not come again. RunStopped, on all ranks, where one of them cannot go on or
        was asked to stop; the answers that are there come first."""
        raise NotImplementedError

    def right_answer(self, question: Sample) -> str:
        """What an answer to this question is compared with."""
        raise NotImplementedError

    def answer_digests(self, split: str) -> dict[str, str]:
        """What generated answers depend on: data, weights, and all that stands between them."""
        raise NotImplementedError

    def generation_gaps(self, ids: Sequence[int]) -> list[float]:
        """For each of these training samples, how far the tokens that are generated for it are at most below those that
        training's forward pass would have chosen, in standard deviations of its logits: nothing but rounding."""
        raise NotImplementedError

    @abstractmethod
    def digests(self) -> dict[str, str]:
        """What the outcome depends on besides the recipe's text, by name: changes when its content does."""

    @abstractmethod
    def save(self, folder: Path) -> None: ...

    def bytes_beside(self) -> int:
        """About how many bytes `save` writes besides the weights."""
        return 0

    @abstractmethod
    def restore(self, folder: Path) -> None: ...

    def start_from(self, folder: Path) -> str | None:
        """The `--set` that begins another run with a checkpoint's weights; None where recipes of the task cannot."""
        return None

    # For the profiler

    def with_plan(self, change: Mapping[str, Any]) -> Task:
        """A copy that cuts and counts its steps as if these plan fields were so. It is counted with, never trained."""
        import copy

        changed = copy.copy(self)
        changed.plan = self.plan.model_copy(update=dict(change))
        return changed

    def cost(self, step: int, budget: int | None, ranks: Ranks) -> StepCost:
        """What this rank's part of a step takes. By default its matmuls are counted while they run, so that what a
        plan executes is taken for what is needed; a task that can count by itself knows better."""
        from torch.utils.flop_counter import FlopCounterMode

        micro_batches, flop, copied = 0, 0, 0
        self.training(True)
        for batch in self.batches(step, budget, ranks):
            on_device = batch.to(self.device)
            with FlopCounterMode(display=False) as counter:
                self.loss_sum(on_device, step)[0].backward()
            micro_batches, flop = micro_batches + 1, flop + counter.get_total_flops()
            copied += tensor_bytes(batch)
        for parameter in self.trained().values():
            if parameter.grad is not None:
                parameter.grad.zero_()
        weights = sum(parameter.nbytes for parameter in self.module().parameters())
        samples = len(self.step_ids(step)[ranks.rank :: ranks.size])
        memory = 2 * micro_batches * weights + optimizer_bytes(self)
        return StepCost(samples, micro_batches, flop, flop, memory, copied, 0)


def checked_finite(scores: dict[str, float], whose: str) -> dict[str, float]:
    """The scores. RunStopped where one of them says nothing."""
    bad = [f"{name} {value}" for name, value in scores.items() if not math.isfinite(value)]
    if bad:
        raise RunStopped(
            f"{whose} {', '.join(bad)}: not finite, though all weights are; a sample's numbers grow too large for "
            "recipe.precision, or its data is to blame",
            EXIT_DIVERGED,
        )
    return scores


def gone_through_before(task: Task, steps: Sequence[int], say: Say = lambda _: None) -> Sequence[int]:
    """These steps, where the task keeps something of one for others: computed again, they are as most of a run's are.
    None of them where it keeps nothing."""
    words = task.warmed_up()
    if words is None:
        return ()
    say(words)
    return steps


def lower_budget(
    sample: str, task: Task, step: int, budget: int | None, ranks: Ranks, say: Say, again: str = "the step is"
) -> int:
    """For a step that ran out of memory; RunStopped where it cannot be cut any more. It stays as it is where something
    was let go of instead."""
    let_go = [what for what in ranks.gather(task.let_go()) if what is not None]
    if let_go:
        say(f"step {step + 1}: out of memory; {' and '.join(let_go)} are let go of, {again} done again")
        return task.budget(step, budget, ranks)
    smaller, was = task.smaller_budget(step, budget, ranks), task.budget(step, budget, ranks)
    if smaller is None:
        raise RunStopped(
            f"out of memory with a single {task.smallest or sample} in a micro-batch, in the step of "
            f"{first_names(task.names(task.step_ids(step)))}. What is left to try: {task.memory_advice}.",
            EXIT_OUT_OF_MEMORY,
        )
    change = f"{task.budget_field.replace('_', ' ')} {was} -> {smaller}"
    assert smaller < was, f"{change} would run out of memory for ever"
    say(f"step {step + 1}: out of memory; {change}, {again} done again")
    return smaller


def total_steps(recipe: Recipe, task: Task) -> int:
    """Of a whole run."""
    return recipe.max_steps or task.epoch_start(recipe.num_epochs)


def optimizer_bytes(task: Task) -> int:
    """What AdamW moves for one update."""
    return OPTIMIZER_TRIPS * sum(parameter.nbytes for parameter in task.trained().values())


def tensor_bytes(batch: Any) -> int:
    """Of all tensors of a micro-batch, however it is put together."""
    from sameday.data.feed import tensors_of

    return sum(tensor.nbytes for tensor in tensors_of(batch))
