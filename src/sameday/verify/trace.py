"""What one arm of a comparison leaves behind: who was in each step and how they looked, rates and parameter groups,
gradients as they reach the optimizer, weights after it. Everything is watched from outside; the loop knows nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sameday.hardware.ranks import Ranks
from sameday.kernels.dropout import dropouts
from sameday.models.host_table import tables
from sameday.spec.errors import EXIT_OUT_OF_MEMORY, RunStopped

Tensors = Mapping[str, Tensor]
STEPS, STRUCTURE, VALIDATION = "steps.jsonl", "structure.jsonl", "validation.jsonl"
GENERATION = "generation.json"
DRIFT, RESUME, FINAL = "drift.jsonl", "resume.json", "final.safetensors"


class Witness:
    """Passes the loop's calls on to a task and writes down what passes. With `dropout` off it is silent in training,
    where its masks are another draw in one of the plans; validation meets it as training would leave it. `told` keeps
    of each sample what a difference can be told by, and its loss.

    `dies_in` is the step (from 0) in whose first micro-batch `die` is called: a kill comes in the middle of things."""

    def __init__(
        self,
        task: Any,
        folder: Path,
        ranks: Ranks,
        dies_in: int | None = None,
        die: Callable[[], None] | None = None,
        dropout: bool = False,
        told: bool = False,
    ) -> None:
        self._told = told
        self._task, self._folder, self._ranks = task, folder, ranks
        self._dies_in, self._die = dies_in, die
        self._dropouts = dropouts(task.module())
        self._silent = [] if dropout else self._dropouts
        self._names = {id(p): name for name, p in task.trained().items()}
        self._samples: list[dict[str, Any]] = []
        self._recorded: list[bool] = []  # of each micro-batch of a step
        self._step = -1
        self._structure: dict[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def unwatched(self) -> Any:
        """The task itself, for what is computed beside the loop; dropout is as `training` left it."""
        return self._task

    # What the loop calls

    def training(self, on: bool) -> None:
        self._task.training(on)
        self._note_structure()
        self._hush()

    def warm_up_batches(self, *_asked: object) -> tuple[()]:
        """None: an arm's gradients, which come first, have compiled what there is, and what passes is written down."""
        return ()

    def loss_sum(self, batch: Any, step: int) -> tuple[Tensor, Tensor]:
        self._step = step
        seen = list(self._task.seen(batch))
        self._samples += [{"id": each.id, "counts": each.counts, "digests": each.digests} for each in seen]
        if step == self._dies_in and self._die is not None:
            self._die()
        result: tuple[Tensor, Tensor] = self._task.loss_sum(batch, step)
        self._recorded.append(self._task.is_recorded(batch))
        if self._told:
            losses = self._task.sample_losses(batch, result[1])
            for record, each in zip(self._samples[-len(seen) :], seen, strict=True):
                record |= {**each.values, "loss": losses[each.id]}
        return result

    def evaluate(self, split: str, ranks: Ranks, budget: int | None = None) -> dict[str, float]:
        for layer in self._silent:
            layer.train(True)
        with self._switches() as switches:
            scores: dict[str, float] = self._task.evaluate(split, ranks, budget)
        self._note_structure()
        self._hush()
        self._append(VALIDATION, {"step": self._step + 1, "scores": scores, "in training": switches})
        return scores

    def smaller_budget(self, _step: int, _budget: int | None, _ranks: Ranks) -> None:
        raise RunStopped(
            f"out of memory: a comparison does not lower plan.{self._task.budget_field} by itself; set a smaller one",
            EXIT_OUT_OF_MEMORY,
        )

    @contextmanager
    def _switches(self) -> Iterator[list[int]]:
        """How many modules are in training mode after each switch of it: none while a model is evaluated."""
        task, counts = self._task, list[int]()
        switch = task.training

        def watched(on: bool) -> None:
            switch(on)
            counts.append(sum(module.training for module in task.module().modules()))

        before = vars(task).get("training")
        task.training = watched
        try:
            yield counts
        finally:
            del task.training
            if before is not None:
                task.training = before

    # What the optimizer does

    @contextmanager
    def watching(self) -> Iterator[None]:
        hooks = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        # A rank that had nothing to do in this step does not know its number.
        self._step = max(self._ranks.gather(self._step))
        everyone = [seen for part in self._ranks.gather(self._samples) for seen in part]
        recorded = [each for part in self._ranks.gather(self._recorded) for each in part]
        self._samples, self._recorded = [], []
        if not self._ranks.first:
            return
        groups = [
            {**{k: group[k] for k in ("lr", "weight_decay", "betas", "eps")}, "names": self._named(group["params"])}
            for group in optimizer.param_groups
        ]
        ids = self._task.step_ids(self._step)
        record = {
            "step": self._step + 1,
            "order": self._task.names(ids),
            "divided by": self._task.count(ids),
            "samples": sorted(everyone, key=lambda seen: (seen["id"], sorted(seen["digests"].items()))),
            "groups": groups,
            "largest norm": self._task.recipe.max_grad_norm,
            "micro-batches": len(recorded),
            "recorded": sum(recorded),
        }
        self._append(STEPS, record)
        self._save("gradient", {name: p.grad for name, p in self._task.trained().items() if p.grad is not None})

    def _after(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        weights = dict(self._task.trained())
        sums = self._ranks.gather(
            [w.detach().view(torch.int32).sum(dtype=torch.int64).item() for w in weights.values()]
        )
        odd = [rank for rank, each in enumerate(sums) if each != sums[0]]
        if odd:
            self._append(DRIFT, {"step": self._step + 1, "ranks": odd})
        if self._ranks.first:
            self._save("weights", weights)

    # Writing

    def _note_structure(self) -> None:
        module = self._task.module()
        parameters = dict(module.named_parameters()) | tables(module)
        structure = {
            "parameters": {n: [str(p.dtype), p.requires_grad, list(p.shape)] for n, p in parameters.items()},
            "in training": sorted(name for name, m in module.named_modules() if m.training),
            "dropout": {name: _how(m) for name, m in module.named_modules() if m in self._dropouts},
        }
        if structure != self._structure:
            self._append(STRUCTURE, structure)
            self._structure = structure

    def _hush(self) -> None:
        for layer in self._silent:
            layer.train(False)

    def _named(self, parameters: list[Tensor]) -> list[str]:
        return sorted(self._names.get(id(p), "a parameter that is not trained") for p in parameters)

    def _append(self, name: str, record: dict[str, Any]) -> None:
        if self._ranks.first:
            with (self._folder / name).open("a") as file:
                file.write(json.dumps(record) + "\n")

    def _save(self, what: str, tensors: dict[str, Tensor]) -> None:
        save_tensors(self._folder / f"{what}-{self._step + 1:06d}.safetensors", tensors)


def _how(dropout: torch.nn.Module) -> list[Any]:
    return [type(dropout).__name__, dropout.p, getattr(dropout, "threshold", None)]


def save_tensors(path: Path, tensors: dict[str, Any]) -> None:
    save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, path)


@dataclass(frozen=True)
class Record:
    """One step as one process did it."""

    part: int
    step: int
    facts: dict[str, Any]
    loss: float
    norm: float
    gradient: Path
    weights: Path
    cut: bool = False
    """The process was killed before the step's loss was known: it had begun the next one ahead."""


class Trace:
    """An arm's folder, read back."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def start(self) -> Tensors:
        return load_file(self.path / "part-1" / "start.safetensors")

    @cached_property
    def fixed_losses(self) -> list[float]:
        return list(json.loads((self.path / "part-1" / "fixed.json").read_text()))

    def fixed(self, step: int) -> Tensors:
        return load_file(self.path / "part-1" / f"fixed-{step:06d}.safetensors")

    @cached_property
    def records(self) -> list[Record]:
        """In the order they were done: a resumed process may go through a step again."""
        records = []
        for part in (1, 2):
            folder = self.path / f"part-{part}"
            metrics = {r["step"]: r for r in _lines(folder / "metrics.jsonl") if "split" not in r}
            done = _lines(folder / STEPS)
            for facts in done:
                step = facts["step"]
                kept = metrics.get(step, {"loss": math.nan, "grad_norm": math.nan})
                cut = part == 1 and facts is done[-1] and step not in metrics
                gradient, weights = (folder / f"{what}-{step:06d}.safetensors" for what in ("gradient", "weights"))
                records.append(Record(part, step, facts, kept["loss"], kept["grad_norm"], gradient, weights, cut))
        return records

    @cached_property
    def last(self) -> dict[int, Record]:
        """What stands at the end: each step as it was done last."""
        return {record.step: record for record in self.records}

    @property
    def recorded(self) -> tuple[int, int]:
        """Micro-batches of training that ran as recorded CUDA graphs, and all of them."""
        each = [record.facts for record in self.records]
        return sum(facts["recorded"] for facts in each), sum(facts["micro-batches"] for facts in each)

    @property
    def seen(self) -> list[str]:
        """What is known of each sample, by name."""
        samples = [seen for record in self.records for seen in record.facts["samples"]]
        return list(samples[0].get("digests", ())) if samples else []

    @cached_property
    def generation(self) -> dict[str, Any]:
        """`gaps`: of samples by name, how far generated tokens are from what training computes; `failed`: why there are
        none."""
        path = self.path / "part-1" / GENERATION
        return dict(json.loads(path.read_text())) if path.is_file() else {"gaps": {}, "failed": ""}

    @cached_property
    def validation(self) -> dict[int, dict[str, Any]]:
        return {r["step"]: r for part in (1, 2) for r in _lines(self.path / f"part-{part}" / VALIDATION)}

    def structures(self, part: int) -> list[dict[str, Any]]:
        """The model as it stood when training began, and as it stood later where that was not the same."""
        return _lines(self.path / f"part-{part}" / STRUCTURE)

    @cached_property
    def resumed_from(self) -> int:
        """The newest checkpoint that the second process found."""
        return int(json.loads((self.path / "part-2" / RESUME).read_text()))

    @cached_property
    def drift(self) -> list[dict[str, Any]]:
        """Steps after which ranks had different weights."""
        return [r for part in (1, 2) for r in _lines(self.path / f"part-{part}" / DRIFT)]

    @cached_property
    def final(self) -> Tensors:
        """What the finished run's files hold, as a task takes them back."""
        return load_file(self.path / "part-2" / FINAL)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
