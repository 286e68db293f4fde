"""The face every task shows to the training loop, once it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sameday.data.seen import Seen
from sameday.hardware.ranks import Ranks
from sameday.tasks.start import LeftOut


class Task(Protocol):
    """Order comes from the recipe, partition from the plan, and sums are never averages: the loop divides once."""

    device: torch.device
    left_out: Sequence[LeftOut]
    """Samples that only loading showed to be unfit."""
    notes: Sequence[str]
    """What a user should know about choices that were made while it was loaded."""
    budget_field: str
    """The plan field that bounds a micro-batch: what is lowered when memory runs out."""
    memory_advice: str
    """What is left to try where one sample alone is too much."""

    def trained(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates, by name."""

    def steps_per_epoch(self) -> int: ...

    def step_ids(self, step: int) -> list[int]:
        """The samples of a step, counted over all epochs; pure arithmetic."""

    def count(self, ids: Sequence[int]) -> float:
        """What the step's loss sum is divided by."""

    def batches(self, step: int, budget: int | None, ranks: Ranks) -> Iterable[Any]:
        """This rank's micro-batches of a step, with `to(device, non_blocking)` and `pin_memory()`. `budget` overrides
        the plan's `budget_field`; 1 puts each sample by itself."""

    def budget(self, step: int, budget: int | None, ranks: Ranks) -> int:
        """The bound that holds in this step: the given one, or what the plan comes to."""

    def smaller_budget(self, step: int, budget: int | None, ranks: Ranks) -> int | None:
        """Half of the step's largest micro-batch, or None where none can be cut any more."""

    def loss_sum(self, batch: Any, step: int) -> tuple[Tensor, Tensor]:
        """The weighted sum of the micro-batch's losses, and each loss by itself, detached."""

    def seen(self, batch: Any) -> Iterable[Seen]:
        """The samples of a micro-batch as the model sees them, read back from its tensors."""

    def module(self) -> nn.Module:
        """Everything that computes, trained or frozen."""

    def culprits(self, batch: Any, losses: Tensor) -> list[str]:
        """The samples whose loss is not finite."""

    def names(self, ids: Sequence[int]) -> list[str]:
        """Samples as a user can find them: file and line."""

    def training(self, on: bool) -> None: ...

    def evaluate(self, split: str, ranks: Ranks, budget: int | None = None) -> dict[str, float]:
        """Scores of a split: `loss`, `samples` (how many), and shares of the samples; empty where there is none."""

    def digests(self) -> dict[str, str]:
        """What the outcome depends on besides the recipe's text, by name: changes when its content does."""

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...
