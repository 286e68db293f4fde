"""Faults in how a model is trained: sums over micro-batches and ranks, order, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from catalogue import PADDED, RECOMPUTED, SHARED, UNEVEN, WORKER, planted
from peft.tuners.lora import LoraLayer
from torch import Tensor

from sameday.data.questions.batch import Batch
from sameday.kernels.dropout import mix
from sameday.models import adapters
from sameday.train import loop, steps
from sameday.train.optim import Gradients
from sameday.train.steps import Steps

# How micro-batches add up


def _accumulated(each: Callable[..., None]) -> AbstractContextManager[Any]:
    """`each` is called for a micro-batch with a function that adds its gradient, given what to scale it by."""
    whole = Steps.accumulate

    def accumulate(self: Steps, batches: Iterable[Any], step: int) -> int:
        made, task = list(batches), self._task
        scale = 1 / task.count(task.step_ids(step))
        for number, batch in enumerate(made):

            def add(by: float, batch: Any = batch) -> None:
                with patch.object(task, "count", lambda _: 1 / by):
                    whole(self, [batch], step)

            each(add, batch, number, len(made), self.gradients, scale)
        return len(made)

    return patch.object(Steps, "accumulate", accumulate)


@planted(UNEVEN, "gradient", "train.steps")
def mean_of_means(_task: Any, _ranks: Any) -> Any:
    """Each micro-batch gives its mean and the step takes the mean of them, however many questions each one has."""
    return _accumulated(lambda add, batch, _i, count, _g, _s: add(1 / (float(batch.weight.sum()) * count)))


@planted(UNEVEN, "gradient", "train.steps")
def divided_by_the_micro_batches_again(_task: Any, _ranks: Any) -> Any:
    """The loss, a share of the step already, is divided by the number of micro-batches. AdamW hides most of it."""
    return _accumulated(lambda add, _b, _i, count, _g, scale: add(scale / count))


@planted(UNEVEN, "gradient", "train.steps")
def a_micro_batch_is_lost(_task: Any, _ranks: Any) -> Any:
    """The gradient of a step's second micro-batch is not kept."""

    def each(add: Any, _batch: Batch, number: int, _count: int, gradients: Any, scale: float) -> None:
        before = gradients.all.clone()
        add(scale)
        if number == 1:
            gradients.all.copy_(before)

    return _accumulated(each)


@planted(UNEVEN, "gradient", "train.steps")
def clipped_per_micro_batch(task: Any, _ranks: Any) -> Any:
    """What has been added up is clipped after each micro-batch."""

    def each(add: Any, _batch: Batch, _number: int, _count: int, gradients: Any, scale: float) -> None:
        add(scale)
        gradients.clip(float(gradients.norm()), task.recipe.max_grad_norm)

    return _accumulated(each)


@planted(SHARED, "gradient", "train.optim")
def not_clipped(_task: Any, _ranks: Any) -> Any:
    """The recipe's largest norm is read by nothing. AdamW hides most of it."""
    return patch.object(Gradients, "clip", lambda *_: None)


@planted(SHARED, "gradient", "train.optim")
def gradients_not_zeroed(_task: Any, _ranks: Any) -> Any:
    """A step's gradient is added to that of the step before."""
    return patch.object(Gradients, "zero", lambda gradients: gradients.tail.zero_())


def _summed(ranks: Any, change: Callable[[Tensor], Any]) -> AbstractContextManager[Any]:
    add = ranks.sum_

    def sum_(tensor: Tensor) -> Tensor:
        change(add(tensor))
        return tensor

    return patch.object(ranks, "sum_", sum_)


@planted(PADDED, "gradient", "hardware.ranks", ranks=2)
def averaged_twice_over_ranks(_task: Any, ranks: Any) -> Any:
    """The loss is divided by the whole step already, and the all-reduce averages once more."""
    return _summed(ranks, lambda tensor: tensor.div_(ranks.size))


@planted(PADDED, "weights of the ranks", "hardware.ranks", ranks=2)
def a_rank_keeps_its_own_gradient(_task: Any, ranks: Any) -> Any:
    """The second rank goes on with its own part instead of the sum, and the ranks' weights drift apart."""
    add = ranks.sum_

    def sum_(tensor: Tensor) -> Tensor:
        mine = tensor * ranks.size
        add(tensor)
        if ranks.rank == 1 and tensor.dtype == torch.float32:  # a validation's sums are in float64
            tensor[: -len(Gradients.TAIL)] = mine[: -len(Gradients.TAIL)]
        return tensor

    return patch.object(ranks, "sum_", sum_)


@planted(SHARED, "gradient", "hardware.ranks")
def gradients_sent_in_half_precision(_task: Any, ranks: Any) -> Any:
    """Gradients are rounded to bf16 on their way to the other ranks, to save time."""
    return _summed(ranks, lambda tensor: tensor.copy_(tensor.to(torch.bfloat16)))


# Who is in a step


@planted(SHARED, "samples", "tasks.vqa")
def the_last_partial_batch_is_dropped(task: Any, _ranks: Any) -> Any:
    """An epoch ends with its last full batch."""
    whole = len(task.places) // task.recipe.effective_batch
    return patch.object(task, "steps_per_epoch", lambda: whole)


@planted(SHARED, "samples", "data.order")
def a_sample_twice_in_an_epoch(task: Any, _ranks: Any) -> Any:
    """The last place of an epoch is filled with its first sample."""
    epoch = task._epoch
    return patch.object(task, "_epoch", lambda e: [*epoch(e)[:-1], [*epoch(e)[-1][:-1], epoch(e)[0][0]]])


@planted(WORKER, "samples in the micro-batches", "data.loader")
def order_changed_by_workers(_task: Any, _ranks: Any) -> Any:
    """With worker processes a step gets what is ready first: the first two steps change places."""
    feed = steps.feed

    def as_ready(plan: Any, device: Any, jobs: Any, build: Any) -> Any:
        return feed(plan, device, [jobs[1], jobs[0], *jobs[2:]] if plan.workers else jobs, build)

    return patch.object(steps, "feed", as_ready)


# What the weights are, and how they move


@planted(SHARED, "starting weights", "models.adapters")
def adapters_of_another_seed(task: Any, _ranks: Any) -> Any:
    """New adapters start from numbers that the recipe's seed does not give."""
    for name, parameter in adapters.adapter_parameters(task.model.module):
        if ".lora_A." in name:
            bound = parameter.shape[1] ** -0.5
            parameter.data.copy_(adapters.uniform(parameter, bound, task.recipe.seed + 1, name))
    return nullcontext()


@planted(SHARED, "gradient", "models.adapters")
def adapters_scaled_wrongly(task: Any, _ranks: Any) -> Any:
    """What an adapter gives is multiplied by 1.05 alpha / r."""
    for module in task.module().modules():
        if isinstance(module, LoraLayer):
            module.scaling["default"] *= 1.05
    return nullcontext()


@planted(SHARED, "visual", "models.vlm")
def the_tower_is_trained(task: Any, _ranks: Any) -> Any:
    """The vision tower is not frozen, though the recipe says so."""
    task.model.tower.float().requires_grad_(True)
    task.model.tower_trained = True
    return nullcontext()


@planted(SHARED, "gradient", "models.vlm", only_float32=True)
@contextmanager
def autocast_left_on(task: Any, _ranks: Any) -> Iterator[None]:
    """Logits are products in bf16, though the recipe asks for float32."""
    logits, enabled = task.model.logits, torch.backends.mkldnn.enabled

    def half(hidden: Tensor, at: Tensor) -> Tensor:
        with torch.autocast(task.device.type, torch.bfloat16):
            return logits(hidden, at)

    try:
        with patch.object(task.model, "logits", half):
            yield
    finally:
        # On a CPU without bf16 the first such product turns oneDNN off, and all later arms would round otherwise.
        torch.backends.mkldnn.enabled = enabled


def _masked(task: Any, keys_of: Callable[[Tensor], Tensor], seed: int = 0) -> AbstractContextManager[Any]:
    """`keys_of` changes what the tokens' masks are drawn by, `seed` is added to the recipe's."""
    keys = task.model.keys
    draw = keys.set
    return patch.object(keys, "set", lambda tokens, own, step: draw(keys_of(tokens), own + seed, step))


@planted(PADDED, "gradient", "kernels.dropout")
def masks_of_another_seed(task: Any, _ranks: Any) -> Any:
    """Dropout's masks are drawn from a seed that is not the recipe's."""
    return _masked(task, lambda tokens: tokens, seed=1)


@planted(PADDED, "gradient", "kernels.dropout")
def masks_by_place_in_the_micro_batch(task: Any, _ranks: Any) -> Any:
    """What is dropped depends on where a question stands in its micro-batch."""
    return _masked(task, lambda tokens: torch.arange(tokens.numel(), dtype=tokens.dtype).view_as(tokens))


@planted(RECOMPUTED, "gradient", "models.vlm")
def other_masks_when_layers_are_recomputed(task: Any, _ranks: Any) -> Any:
    """The backward pass drops something else than the forward pass did."""
    hidden, keys = task.model.hidden, task.model.keys

    def then_other(batch: Batch, *step: int, **more: Any) -> Tensor:
        x = hidden(batch, *step, **more)
        if keys.tokens is not None:
            keys.tokens = mix(keys.tokens)
        return x

    return patch.object(task.model, "hidden", then_other)


def _optimized(change: Callable[[Any, dict[str, Any]], None]) -> AbstractContextManager[Any]:
    make = steps.make_optimizer

    def made(trained: dict[str, Any], *more: Any) -> Any:
        optimizer = make(trained, *more)
        change(optimizer, trained)
        return optimizer

    return patch.object(steps, "make_optimizer", made)


@planted(SHARED, "weight_decay", "train.optim")
def some_matrices_do_not_decay(_task: Any, _ranks: Any) -> Any:
    """Weight decay is kept from an adapter's second matrix as if it were a bias."""

    def change(optimizer: Any, trained: dict[str, Any]) -> None:
        spared = [p for name, p in trained.items() if ".lora_B." in name]
        (group,) = optimizer.param_groups
        group["params"] = [p for p in group["params"] if all(p is not other for other in spared)]
        optimizer.add_param_group({"params": spared, "weight_decay": 0.0})

    return _optimized(change)


@planted(SHARED, "update", "train.optim")
def decay_added_to_the_gradient(_task: Any, _ranks: Any) -> Any:
    """Weight decay is part of the gradient, as in Adam, instead of a step of its own, as in AdamW."""

    def change(optimizer: Any, _trained: dict[str, Any]) -> None:
        for group in optimizer.param_groups:
            group["decoupled_weight_decay"] = False

    return _optimized(change)


@planted(UNEVEN, "learning rate", "train.loop")
def schedule_stepped_per_micro_batch(task: Any, ranks: Any) -> Any:
    """The learning rate goes on with every micro-batch."""
    rate = loop.learning_rate

    def counted(recipe: Any, step: int, total: int) -> float:
        done = sum(len(task._step(earlier, None, ranks)[1][ranks.rank]) for earlier in range(step))
        return rate(recipe, done, total)

    return patch.object(loop, "learning_rate", counted)
