"""The learning rate is transformers', the optimizers agree, and gradients are views of one flat buffer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainingArguments, get_scheduler

from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.spec.vqa import VqaRecipe
from sameday.train.optim import (
    Gradients,
    learning_rate,
    make_optimizer,
    optimizer_tensors,
    restore_optimizer,
)

IMPLEMENTATIONS = ("loop", "foreach", "fused")


def recipe(**changes: Any) -> VqaRecipe:
    fields = {"model": "tiny", "data": {"train": "train.jsonl"}, "learning_rate": 3e-4}
    return VqaRecipe.model_validate(fields | changes)


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "a.weight": (7, 5),
        "a.bias": (7,),
        "norm.weight": (5,),
        "conv.weight": (4, 3, 2, 2),
        "b": (3, 9),
    }
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def fill(trained: dict[str, nn.Parameter], seed: int, scale: float = 1.0) -> None:
    """Write gradients into the buffers that are there."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in trained.values():
        assert parameter.grad is not None
        parameter.grad.copy_(scale * torch.randn(parameter.shape, generator=generator))


def theirs(schedule: str, warmup: int, total: int, peak: float) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    name = {"constant": "constant_with_warmup" if warmup else "constant"}.get(schedule, schedule)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 37), (1, 37), (10, 37), (36, 37), (37, 37), (50, 37)])
def test_the_rate_is_that_of_transformers(schedule: str, warmup: int, total: int) -> None:
    asked = recipe(schedule=schedule, warmup_steps=warmup)
    ours = [learning_rate(asked, step, total) for step in range(total)]
    assert ours == pytest.approx(theirs(schedule, warmup, total, asked.learning_rate), rel=1e-12, abs=0)


@pytest.mark.parametrize("total", [1, 10, 33, 100, 1001])
@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.03, 0.1, 0.5])
def test_a_warm_up_ratio_gives_as_many_steps_as_in_transformers(total: int, ratio: float, tmp_path: Any) -> None:
    warmup = TrainingArguments(output_dir=str(tmp_path), warmup_steps=ratio).get_warmup_steps(total)
    by_ratio, by_steps = recipe(warmup_ratio=ratio), recipe(warmup_steps=warmup)
    for step in range(total):
        assert learning_rate(by_ratio, step, total) == learning_rate(by_steps, step, total)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decay_is_on_matrices_alone(implementation: str) -> None:
    trained = parameters()
    asked = recipe(weight_decay=0.1, betas=(0.8, 0.95), eps=1e-7)
    optimizer = make_optimizer(trained, asked, Plan(optimizer_impl=implementation))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decays[id(p)] for name, p in trained.items()} == {
        "a.weight": 0.1,
        "a.bias": 0.0,
        "norm.weight": 0.0,
        "conv.weight": 0.1,
        "b": 0.1,
    }
    assert all(group["betas"] == (0.8, 0.95) and group["eps"] == 1e-7 for group in optimizer.param_groups)
    # With a gradient of zero only the decay moves anything.
    before = {name: p.detach().clone() for name, p in trained.items()}
    Gradients(trained)
    optimizer.step()
    for name, parameter in trained.items():
        factor = 1 - asked.learning_rate * 0.1 if parameter.ndim >= 2 else 1.0
        assert torch.allclose(parameter, before[name] * factor, rtol=1e-7, atol=0)


def test_only_vectors_or_only_matrices_make_one_group() -> None:
    both = parameters()
    for keep in (lambda p: p.ndim < 2, lambda p: p.ndim >= 2):
        some = {name: p for name, p in both.items() if keep(p)}
        (group,) = make_optimizer(some, recipe(), Plan()).param_groups
        assert len(group["params"]) == len(some)


def after_steps(implementation: str, steps: int) -> tuple[dict[str, nn.Parameter], torch.optim.AdamW]:
    trained = parameters()
    optimizer = make_optimizer(trained, recipe(weight_decay=0.1), Plan(optimizer_impl=implementation))
    Gradients(trained)
    for step in range(steps):
        fill(trained, seed=step)
        optimizer.step()
    return trained, optimizer


def test_the_three_implementations_agree() -> None:
    start = parameters()
    plain, _ = after_steps("loop", 5)
    assert all((plain[name] - start[name]).abs().max() > 1e-4 for name in plain)
    for implementation in IMPLEMENTATIONS[1:]:
        other, optimizer = after_steps(implementation, 5)
        assert optimizer.defaults[implementation]
        for name in plain:
            distance = torch.linalg.vector_norm(other[name] - plain[name])
            moved = torch.linalg.vector_norm(plain[name] - start[name])
            assert distance <= 1e-6 * torch.linalg.vector_norm(plain[name])
            assert distance <= 1e-3 * moved  # small beside the update too, not only beside the weights


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_restored_state_goes_on_to_the_same_bits(implementation: str) -> None:
    whole, _ = after_steps(implementation, 6)
    half, optimizer = after_steps(implementation, 3)
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, half).items()}
    fresh = {name: nn.Parameter(p.detach().clone()) for name, p in half.items()}
    again = make_optimizer(fresh, recipe(weight_decay=0.1), Plan(optimizer_impl=implementation))
    restore_optimizer(again, fresh, saved)
    Gradients(fresh)
    for step in range(3, 6):
        fill(fresh, seed=step)
        again.step()
    assert all(torch.equal(fresh[name], whole[name]) for name in whole)


def test_the_buffer_is_the_parameters_gradients() -> None:
    trained = parameters()
    gradients = Gradients(trained)
    views = [p.grad for p in trained.values()]
    sum((p**2).sum() for p in trained.values()).backward()
    assert all(p.grad is view for p, view in zip(trained.values(), views, strict=True))
    expected = torch.cat([2 * p.detach().flatten() for p in trained.values()])
    assert torch.equal(gradients.all, expected)
    assert gradients.count == len(expected) and len(gradients.buffer) == len(expected) + len(Gradients.TAIL)
    # A second backward pass adds; the numbers at the end are apart from the gradients.
    gradients.tail.fill_(9.0)
    sum((p**2).sum() for p in trained.values()).backward()
    assert torch.equal(gradients.all, 2 * expected)
    assert float(gradients.norm()) == pytest.approx(float(torch.linalg.vector_norm(2 * expected)))
    gradients.zero()
    assert not gradients.buffer.any()
    assert not any(p.grad.any() for p in trained.values() if p.grad is not None)


@pytest.mark.parametrize("scale", [1e-3, 0.05, 0.2, 30.0])
@pytest.mark.parametrize("limit", [0.5, 1.0])
def test_clipping_is_torchs(scale: float, limit: float) -> None:
    ours, reference = parameters(), parameters()
    gradients, other = Gradients(ours), Gradients(reference)
    fill(ours, 3, scale)
    fill(reference, 3, scale)
    gradients.tail.fill_(7.0)
    norm = float(gradients.norm())
    gradients.clip(norm, limit)
    assert float(nn.utils.clip_grad_norm_(reference.values(), limit)) == pytest.approx(norm, rel=1e-6)
    assert torch.allclose(gradients.all, other.all, rtol=1e-6, atol=0)
    assert gradients.tail.tolist() == [7.0] * len(Gradients.TAIL)
    assert float(gradients.norm()) == pytest.approx(min(norm, limit), rel=1e-4)


@pytest.mark.parametrize("scale", [1e-3, 0.2, 3.0, 30.0, 1e15, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_that_is_not_waited_for_clips_to_the_same_bits(scale: float, dtype: torch.dtype) -> None:
    both = [Gradients({name: nn.Parameter(p.detach().to(dtype)) for name, p in parameters().items()}) for _ in range(2)]
    for each in both:
        each.all.copy_(scale * torch.randn(each.count, generator=torch.Generator().manual_seed(1)))
    both[0].clip(float(both[0].norm()), 0.7)
    both[1].clip(both[1].norm(), 0.7)
    assert both[0].all.numpy().tobytes() == both[1].all.numpy().tobytes()


def test_no_limit_leaves_the_gradient_alone() -> None:
    trained = parameters()
    gradients = Gradients(trained)
    fill(trained, 0, 100.0)
    before = gradients.buffer.clone()
    gradients.clip(math.inf, None)
    assert torch.equal(gradients.buffer, before)


def test_nothing_trained_is_refused() -> None:
    with pytest.raises(BadInput, match="nothing is trained"):
        Gradients({})
