"""The vision transformer has the usual size and computes what a plain reading of it gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sameday.models.vit import EPS, ViT, forward_flops
from sameday.spec.vision import VitModel

CLASSES = 7
SMALL = {"width": 12, "heads": 3, "depth": 2, "patch": 2}


def make(dropout: float = 0.0, **shape: Any) -> ViT:
    """In float64, and with no parameter at zero."""
    model = ViT(VitModel(dropout=dropout, **(SMALL | shape)), 6, CLASSES, 0).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def images(batch: int) -> tuple[Tensor, Tensor]:
    pixels = torch.randn(batch, 3, 6, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return pixels, torch.arange(batch, dtype=torch.int32)


def usual_parameters(width: int, depth: int, size: int, patch: int, classes: int) -> int:
    """timm's vision transformer with a class token: biases everywhere, norms with weights, a perceptron of 4 widths."""
    patches = 3 * patch**2 * width + width
    tokens = width + (1 + (size // patch) ** 2) * width
    attention = 3 * width**2 + 3 * width + width**2 + width
    perceptron = 4 * width**2 + 4 * width + 4 * width**2 + width
    return patches + tokens + depth * (attention + perceptron + 4 * width) + 2 * width + classes * (width + 1)


@pytest.mark.slow
def test_it_is_vit_tiny() -> None:
    assert usual_parameters(192, 12, 224, 16, 1000) == 5_717_416  # what timm's vit_tiny_patch16_224 has
    for size, patch, classes in ((32, 4, 10), (224, 16, 1000)):
        model = ViT(VitModel(patch=patch), size, classes, 0)
        assert sum(p.numel() for p in model.parameters()) == usual_parameters(192, 12, size, patch, classes)


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["class", "mean"])
def test_flops_are_those_that_torch_counts(pool: str) -> None:
    shape = VitModel(pool=pool)
    model = ViT(shape, 32, 10, 0)
    # As plain products, which torch counts on every device.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, 32, 32), torch.zeros(1, dtype=torch.int32))
    assert counter.get_total_flops() == pytest.approx(forward_flops(shape, 32, 10), rel=0.01)


def by_hand(model: ViT, image: Tensor) -> Tensor:
    """Logits of one image: pre-norm layers, softmax attention of scaled scores, head by head."""
    p, width = model.shape.patch, model.shape.width
    corners = [(i, j) for i in range(0, image.shape[1], p) for j in range(0, image.shape[2], p)]
    flat = torch.stack([image[:, i : i + p, j : j + p].flatten() for i, j in corners])
    x = flat @ model.patches.weight.flatten(1).T + model.patches.bias
    if model.shape.pool == "class":
        x = torch.cat([model.class_token[0], x])
    x = x + model.positions[0]
    each = width // model.shape.heads
    for layer in model.layers:
        q, k, v = layer.qkv(layer.before(x)).split(width, -1)
        attended = []
        for head in range(model.shape.heads):
            own = slice(head * each, (head + 1) * each)
            attended.append(torch.softmax(q[:, own] @ k[:, own].T / each**0.5, -1) @ v[:, own])
        x = x + layer.out(torch.cat(attended, -1))
        x = x + layer.down(F.gelu(layer.up(layer.between(x))))
    x = F.layer_norm(x, (width,), model.after.weight, model.after.bias, EPS)
    return model.head(x[0] if model.shape.pool == "class" else x.mean(0))


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_it_is_a_vision_transformer(pool: str) -> None:
    model = make(0.5, pool=pool).eval()
    pixels, keys = images(2)
    wanted = torch.stack([by_hand(model, image) for image in pixels])
    assert wanted.isfinite().all()
    torch.testing.assert_close(model(pixels, keys), wanted, rtol=1e-12, atol=1e-12)


def test_the_start_is_the_seeds_alone() -> None:
    def start(seed: int) -> dict[str, Tensor]:
        return ViT(VitModel(**SMALL), 6, CLASSES, seed).state_dict()

    torch.manual_seed(1)
    here = start(0)
    torch.manual_seed(2)
    there, other = start(0), start(1)
    assert all(torch.equal(here[name], there[name]) for name in here)
    drawn = {name for name in here if not torch.equal(here[name], other[name])}
    assert drawn == {n for n in here if here[n].ndim > 1 and n != "class_token"}
    assert all(here[name].abs().max() <= 0.04 for name in drawn)
    assert not any(here[name].any() for name in here if name.endswith("bias"))


def test_dropout_is_keyed() -> None:
    model = make(0.3)
    pixels, keys = images(3)
    torch.manual_seed(1)
    first = model(pixels, keys)
    torch.manual_seed(2)
    assert torch.equal(first, model(pixels, keys))
    assert not torch.equal(first, model(pixels, keys + 3))
    torch.testing.assert_close(model(pixels[1:2], keys[1:2]), first[1:2], rtol=1e-12, atol=1e-12)
    # Layers that are alike drop different units.
    seen: list[Tensor] = []
    for layer in model.layers:
        layer.dropout.register_forward_hook(lambda _module, inputs, _out: seen.append(inputs[1]))
    model(pixels, keys)
    assert len(seen) == 2 and len(torch.stack(seen).unique()) == 2 * 3 * model.tokens
    model.eval()
    assert torch.equal(model(pixels, keys), model(pixels, keys + 3))


@pytest.mark.slow
def test_compiled_in_one_graph() -> None:
    torch._dynamo.reset()
    model = make(0.3)
    pixels, keys = images(2)

    def run(by: Callable[..., Tensor]) -> list[Tensor]:
        model.zero_grad()
        logits = by(pixels, keys)
        (logits * torch.arange(CLASSES)).sum().backward()
        return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    wanted = run(model)
    for found, want in zip(run(torch.compile(model, backend="aot_eager", fullgraph=True)), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
