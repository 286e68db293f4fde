"""The end of a step: a fused optimizer is told on the device whether it may change anything, every other is told by the
host, and both do the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.train.commit import StepCommit
from sameday.train.optim import Gradients, make_optimizer, optimizer_tensors

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
RECIPE = Recipe.model_construct(weight_decay=0.1, learning_rate=1e-2, betas=(0.9, 0.95), eps=1e-8)


class Training:
    def __init__(self, device: str, implementation: str) -> None:
        draw = torch.Generator().manual_seed(0)
        shapes = {"matrix": (5, 7), "vector": (6,)}
        self.trained = {
            name: nn.Parameter(torch.randn(shape, generator=draw).to(device)) for name, shape in shapes.items()
        }
        self.gradients = Gradients(self.trained)
        self.optimizer = make_optimizer(self.trained, RECIPE, Plan(optimizer_impl=implementation))
        self.draw = draw

    def end(self, rate: float, limit: float | None) -> list[float]:
        commit = StepCommit(self.optimizer, self.gradients, limit)
        return commit.finish(commit.begin(rate))

    def fill(
        self,
        loss: float = 1.0,
        out_of_memory: float = 0.0,
        scale: float = 1.0,
        given_up: float = 0.0,
        failed: float = 0.0,
    ) -> None:
        self.gradients.all.copy_(scale * torch.randn(self.gradients.count, generator=self.draw))
        self.gradients.tail.copy_(torch.tensor([loss, out_of_memory, 0.0, given_up, failed]))

    def state(self) -> dict[str, Tensor]:
        found = {**self.trained, **optimizer_tensors(self.optimizer, self.trained)}
        return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("limit", [None, 0.5, 1e6])
def test_not_waiting_for_the_norm_changes_nothing(device: str, limit: float | None) -> None:
    """The fused optimizer told by a host that has waited for the norm, beside one that has not."""
    told, early = Training(device, "fused"), Training(device, "fused")
    for _ in range(4):
        told.fill()
        early.fill()
        norm = float(told.gradients.norm())
        told.gradients.clip(norm, limit)
        for group in told.optimizer.param_groups:
            group["lr"] = 3e-3
        told.optimizer.step()
        assert early.end(3e-3, limit) == [1.0, 0.0, 0.0, 0.0, 0.0, norm]
        assert same(told.state(), early.state())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", ["loop", "foreach", "fused"])
@pytest.mark.parametrize(
    "bad",
    [
        {"loss": math.nan},
        {"loss": math.inf},
        {"scale": math.inf},
        {"scale": math.nan},
        {"out_of_memory": 1.0},
        {"out_of_memory": 3.0},
        {"given_up": 1.0},
        {"failed": 2.0},
    ],
    ids=str,
)
def test_a_bad_step_leaves_everything_as_it_was(device: str, implementation: str, bad: dict[str, float]) -> None:
    training, other = Training(device, implementation), Training(device, implementation)
    for each in (training, other):
        each.fill()
        each.end(1e-2, 1.0)
    before = training.state()
    training.fill(**bad)
    loss, out_of_memory, _, given_up, failed, norm = training.end(1e-2, 1.0)
    assert out_of_memory or given_up or failed or not (math.isfinite(loss) and math.isfinite(norm))
    assert same(training.state(), before)
    # And nothing of it is left for the next one.
    other.fill()
    training.gradients.all.copy_(other.gradients.all)
    training.gradients.tail.copy_(other.gradients.tail)
    for each in (training, other):
        each.end(1e-2, 1.0)
    assert same(training.state(), other.state()) and not same(training.state(), before)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_changes_after_a_bad_step_until_it_is_reset(device: str) -> None:
    training = Training(device, "fused")
    commit = StepCommit(training.optimizer, training.gradients, 1.0)
    training.fill()
    commit.finish(commit.begin(1e-2))
    before = training.state()
    pending = []
    for out_of_memory in (1.0, 0.0, 0.0):
        training.fill(out_of_memory=out_of_memory)
        pending.append(commit.begin(1e-2))
    assert [commit.finish(scalars)[1] for scalars in pending] == [1.0, 0.0, 0.0]
    assert same(training.state(), before)
    commit.reset()
    training.fill()
    commit.finish(commit.begin(1e-2))
    assert not same(training.state(), before)
