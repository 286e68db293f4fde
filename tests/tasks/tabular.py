"""A task of another package, in one file: numbers learned from rows of numbers. Nothing in `sameday` knows of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from sameday.data.order import permutation
from sameday.data.seen import Seen, digest
from sameday.spec.errors import BadInput
from sameday.spec.load import resolve_path
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe, Strict
from sameday.tasks.base import Say, Task
from sameday.tasks.setup import Audited, Choice, TaskSetup

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from sameday.hardware.machine import Machine
    from sameday.hardware.ranks import Ranks

Rows = list[tuple[list[float], float]]


class Table(Strict):
    """Rows of numbers."""

    train: str = Field(description="JSONL of {x: [numbers], y: number}.")
    val: str | None = Field(None, description="The same, for validation.")


class TabularRecipe(Recipe):
    """A number learned from a row of numbers."""

    has: ClassVar[frozenset[str]] = frozenset({"equal samples"})
    sample: ClassVar[str] = "row"

    task: Literal["tabular"] = Field("tabular", description="What is learned: a number from a row of numbers.")
    precision: Literal["float32"] = Field("float32", description="Numeric format: this task computes in no other.")
    data: Table = Field(description="Where the rows are.")
    hidden: int = Field(8, ge=1, description="Hidden units.")


class TabularSetup(TaskSetup):
    recipe_type = TabularRecipe
    modules = ("tabular",)
    together: ClassVar[Mapping[str, Any]] = {"micro_batch": None}

    recipe: TabularRecipe

    def audit(
        self, say: Say, splits: Sequence[str] = ("train", "val"), few: Mapping[str, int] | None = None
    ) -> Audited:
        audited: dict[str, Rows] = {}
        for split in splits:
            file = getattr(self.recipe.data, split)
            if file is not None:
                audited[split] = self._read(resolve_path(self.home, file))[: few[split] if few else None]
        return Audited(audited, {split: len(rows) for split, rows in audited.items()}, [])

    def _read(self, path: Path) -> Rows:
        try:
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            return [(line["x"], line["y"]) for line in lines]
        except (OSError, ValueError, KeyError) as error:
            raise BadInput(f"{path}: is not a table: {error}") from None

    def load(self, plan: Plan, device: torch.device, splits: Any) -> Task:
        return TabularTask(self.recipe, plan, device, splits)

    def choices(self, machine: Machine) -> list[Choice]:
        return [Choice("micro_batch", ({"micro_batch": 2}, {"micro_batch": None}))]

    def trial_values(self, device: str, size: int) -> dict[str, tuple[Any, ...]]:
        return {"micro_batch": (None, size), "eval_batch": (None, size)}

    def words(self) -> tuple[str, str]:
        return f"A perceptron of {self.recipe.hidden} units learns numbers.", f"Rows of {self.recipe.data.train}."


@dataclass(frozen=True)
class Batch:
    ids: Tensor
    x: Tensor
    y: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        moved = {name: value.to(device, non_blocking=non_blocking) for name, value in vars(self).items()}
        return replace(self, **moved)

    def pin_memory(self) -> Batch:
        return replace(self, **{name: value.pin_memory() for name, value in vars(self).items()})


class TabularTask(Task):
    budget_field = "micro_batch"
    memory_advice = "a smaller recipe.hidden"

    def __init__(self, recipe: TabularRecipe, plan: Plan, device: torch.device, splits: dict[str, Rows]) -> None:
        import torch

        self.recipe, self.plan, self.device, self.splits = recipe, plan, device, splits
        generator = torch.Generator().manual_seed(recipe.seed)
        width = len(next(iter(splits.values()))[0][0])
        self.model = torch.nn.Sequential(
            torch.nn.Linear(width, recipe.hidden), torch.nn.Tanh(), torch.nn.Linear(recipe.hidden, 1)
        )
        for parameter in self.model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 2
        self.model.to(device)

    def trained(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def module(self) -> nn.Module:
        return self.model

    def steps_per_epoch(self) -> int:
        return -(-len(self.splits["train"]) // self.recipe.effective_batch)

    def step_ids(self, step: int) -> list[int]:
        epoch, number = divmod(step, self.steps_per_epoch())
        order = permutation(len(self.splits["train"]), "epoch", self.recipe.seed, epoch)
        batch = self.recipe.effective_batch
        ids: list[int] = order[number * batch : (number + 1) * batch].tolist()
        return ids

    def count(self, ids: Sequence[int]) -> float:
        return float(len(ids))

    def names(self, ids: Sequence[int]) -> list[str]:
        return [f"{self.recipe.data.train}:{i + 1}" for i in ids]

    def batches(self, step: int, budget: int | None, ranks: Ranks) -> Iterable[Batch]:
        mine, most = self.step_ids(step)[ranks.rank :: ranks.size], self.budget(step, budget, ranks)
        return (self._build("train", mine[i : i + most]) for i in range(0, len(mine), most))

    def _build(self, split: str, ids: Sequence[int]) -> Batch:
        import torch

        rows = [self.splits[split][i] for i in ids]
        return Batch(torch.tensor(ids), torch.tensor([x for x, _ in rows]), torch.tensor([y for _, y in rows]))

    def budget(self, step: int, budget: int | None, ranks: Ranks) -> int:
        return budget or self.plan.micro_batch or self.recipe.effective_batch

    def smaller_budget(self, step: int, budget: int | None, ranks: Ranks) -> int | None:
        largest = min(self.budget(step, budget, ranks), len(self.step_ids(step)))
        return largest // 2 if largest > 1 else None

    def loss_sum(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        losses = (self.model(batch.x)[:, 0] - batch.y) ** 2
        return losses.sum(), losses.detach()

    def seen(self, batch: Batch) -> Iterable[Seen]:
        for i, x, y in zip(batch.ids.tolist(), batch.x.cpu().numpy(), batch.y.cpu().numpy(), strict=True):
            yield Seen(i, {"numbers": len(x)}, {"row": digest(x, y.reshape(1))})

    def culprits(self, batch: Batch, losses: Tensor) -> list[str]:
        return self.names(batch.ids[~losses.isfinite()].tolist())

    def evaluate(self, split: str, ranks: Ranks, budget: int | None = None) -> dict[str, float]:
        import torch

        if not self.splits.get(split):
            return {}
        self.training(False)
        with torch.no_grad():
            batch = self._build(split, range(ranks.rank, len(self.splits[split]), ranks.size)).to(self.device)
            sums = torch.stack([self.loss_sum(batch, 0)[0], torch.tensor(float(len(batch.ids)), device=self.device)])
        self.training(True)
        loss, samples = ranks.sum_(sums).tolist()
        return {"loss": loss / samples, "samples": int(samples)}

    def digests(self) -> dict[str, str]:
        return {"training data": hashlib.sha256(repr(self.splits["train"]).encode()).hexdigest()}

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        save_file(self.model.state_dict(), folder / "model.safetensors")

    def restore(self, folder: Path) -> None:
        from safetensors.torch import load_file

        self.model.load_state_dict(load_file(folder / "model.safetensors"))
