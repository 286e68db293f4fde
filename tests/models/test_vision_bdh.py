"""The plain Vision-BDH against its definition, written again with loops; its start, its size, its dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sameday.kernels.dropout import PairDropout, name_key
from sameday.models.vision_bdh import VisionBDH, forward_flops
from sameday.spec.vision import BdhModel

CLASSES = 7
SMALL = {"width": 12, "heads": 3, "latents": 4, "levels": 3, "patch": 2}


def make(size: int = 6, seed: int = 0, **shape: Any) -> VisionBDH:
    """In float64, and with no parameter at zero."""
    model = VisionBDH(BdhModel(**(SMALL | shape)), size, CLASSES, seed).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def images(batch: int, size: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randn(batch, 3, size, size, generator=generator, dtype=torch.float64)
    return pixels, torch.arange(batch, dtype=torch.int32)


# The definition


def normed(row: np.ndarray) -> np.ndarray:
    return (row - row.mean()) / np.sqrt(((row - row.mean()) ** 2).mean() + 1e-5)


def normed_rows(x: np.ndarray) -> np.ndarray:
    return np.array([normed(row) for row in x])


def turned(s: np.ndarray) -> np.ndarray:
    """Each pair of units (2k, 2k + 1) of token t, by the angle t * 65536^(-2k / N)."""
    out = np.empty_like(s)
    tokens, units = s.shape
    for t in range(tokens):
        for j in range(0, units, 2):
            angle = t * 65536.0 ** (-2 * (j // 2) / units)
            a, b = s[t, j], s[t, j + 1]
            out[t, j] = a * np.cos(angle) - b * np.sin(angle)
            out[t, j + 1] = b * np.cos(angle) + a * np.sin(angle)
    return out


def by_definition(model: VisionBDH, pixels: Tensor, fault: str | None = None) -> np.ndarray:
    """Logits, image by image, level by level and head by head."""
    w = {name: value.detach().numpy() for name, value in model.named_parameters()}
    shape, units = model.shape, model.units
    p = shape.patch
    logits = []
    for image in pixels.numpy():
        patches = [
            np.einsum("cij,dcij->d", image[:, i : i + p, j : j + p], w["patches.weight"]) + w["patches.bias"]
            for i in range(0, image.shape[1], p)
            for j in range(0, image.shape[2], p)
        ]
        if shape.pool == "class":
            patches = [w["class_token"][0, 0], *patches]
        x = np.array(patches) + w["positions"][0]
        for _level in range(shape.levels):
            before = x
            x = normed_rows(x)
            laid_out = np.zeros((len(x), shape.heads * units))
            for head in range(shape.heads):
                s = np.maximum(x @ w["encoder"][head], 0)
                r = s if fault == "no rotation" else turned(s)
                scores = r @ r.T
                if shape.attention == "softmax":
                    scores = np.exp(scores / np.sqrt(units))
                    scores /= scores.sum(1, keepdims=True)
                y = normed_rows(scores @ x)
                z = s * np.maximum(y @ w["encoder_v"][head], 0)
                laid_out[:, head * units : (head + 1) * units] = z
            residual = before if fault == "residual before the norm" else x
            x = normed_rows(residual + normed_rows(laid_out @ w["decoder"]))
        pooled = x[0] if shape.pool == "class" else x.mean(0)
        logits.append(normed(pooled) @ w["head.weight"].T + w["head.bias"])
    return np.array(logits)


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "mean of the patches": {"pool": "mean"},
    "softmax": {"attention": "softmax"},
    "softmax and mean": {"attention": "softmax", "pool": "mean"},
    "one level, one head": {"levels": 1, "heads": 1},
    "as wide as it is trained": {"width": 192, "heads": 6, "latents": 2, "levels": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_what_the_definition_says(variant: str) -> None:
    model = make(**VARIANTS[variant]).eval()
    pixels, keys = images(2)
    assert distance(model(pixels, keys).detach().numpy(), by_definition(model, pixels)) < 1e-12


@pytest.mark.parametrize("variant", ["mean of the patches", "softmax"])
def test_variants_differ(variant: str) -> None:
    pixels, keys = images(2)
    a, b = (make(**shape).eval()(pixels, keys).detach().numpy() for shape in ({}, VARIANTS[variant]))
    assert distance(a, b) > 0.01


@pytest.mark.parametrize("fault", ["residual before the norm", "no rotation"])
def test_another_definition_differs(fault: str) -> None:
    model = make().eval()
    pixels, _ = images(2)
    assert distance(by_definition(model, pixels, fault), by_definition(model, pixels)) > 0.01


def test_tables_are_kept_and_follow_the_format() -> None:
    model = make()
    device = torch.device("cpu")
    first = model.rotary(device)
    assert model.rotary(device)[0] is first[0] and first[0].dtype == torch.float64
    assert model.float().rotary(device)[0].dtype == torch.float32
    assert torch.equal(model.rotary(device)[0], first[0].float())


# Size


def test_parameters() -> None:
    model = VisionBDH(BdhModel(), 32, 10, 0)
    patches, positions, levels, head = 3 * 4 * 4 * 192 + 192, (1 + 65) * 192, 3 * 192 * 6 * 1024, 192 * 10 + 10
    assert sum(p.numel() for p in model.parameters()) == patches + positions + levels + head == 3_562_954


@pytest.mark.parametrize("shape", [{}, {"pool": "mean", "levels": 2}, {"attention": "softmax", "heads": 3}])
def test_flops_are_those_that_torch_counts(shape: dict[str, Any]) -> None:
    asked = BdhModel(**shape)
    model = VisionBDH(asked, 32, 10, 0)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, 32, 32), torch.zeros(1, dtype=torch.int32))
    assert counter.get_total_flops() == pytest.approx(forward_flops(asked, 32, 10), rel=0.01)


# Start


def start(seed: int = 0, **shape: Any) -> dict[str, Tensor]:
    return VisionBDH(BdhModel(**(SMALL | shape)), 6, CLASSES, seed).state_dict()


@pytest.mark.parametrize("kind", ["xavier", "fan_in"])
def test_the_start_is_the_seeds_alone(kind: str) -> None:
    torch.manual_seed(1)
    here = start(start=kind)
    torch.manual_seed(2)
    there, other = start(start=kind), start(seed=1, start=kind)
    assert all(torch.equal(here[name], there[name]) for name in here)
    zero = ["class_token", *(("patches.bias", "head.bias") if kind == "xavier" else ())]
    assert [name for name in here if torch.equal(here[name], other[name])] == zero
    assert not any(here[name].any() for name in zero)


def test_a_parameters_start_is_its_names_alone() -> None:
    """What else the model has does not matter."""
    here, there = start(), start(pool="mean", levels=5, attention="softmax")
    assert here.keys() - there.keys() == {"class_token"}
    assert [name for name in there if not torch.equal(here[name], there[name])] == ["positions"]  # of another shape
    assert not torch.equal(here["encoder"], here["encoder_v"])


def test_the_start_is_spread_as_published() -> None:
    model = VisionBDH(BdhModel(), 32, 10, 0)
    fans = {"encoder": (192 * 1024, 6 * 1024), "encoder_v": (192 * 1024, 6 * 1024), "decoder": (6 * 1024, 192)}
    for name, fan in fans.items():
        parameter, bound = getattr(model, name).detach(), (6 / sum(fan)) ** 0.5
        assert float(parameter.abs().max()) == pytest.approx(bound, rel=0.01)
        assert float(parameter.std()) == pytest.approx(bound / 3**0.5, rel=0.01)
    assert float(model.positions.detach().std()) == pytest.approx(0.02, rel=0.05)


def test_patches_and_head_start_as_published() -> None:
    """As layers that are made as the author makes them, each weight from its own key; over many seeds uniform between
    the bounds; no bias at all."""
    shape = BdhModel(width=64, heads=2, latents=2, levels=1, patch=4)
    layers = {"patches": torch.nn.Conv2d(3, 64, 4, stride=4), "head": torch.nn.Linear(64, CLASSES)}
    bounds = {"patches": (6 / (3 * 16 + 64 * 16)) ** 0.5, "head": (6 / (64 + CLASSES)) ** 0.5}
    at = torch.linspace(0.05, 0.95, 10)
    for name, layer in layers.items():
        weights = []
        for seed in range(20):
            made = getattr(VisionBDH(shape, 8, CLASSES, seed), name)
            key = name_key("start", seed, f"{name}.weight") & 0xFFFFFFFF
            torch.nn.init.xavier_uniform_(layer.weight, generator=torch.Generator().manual_seed(key))
            assert torch.equal(made.weight, layer.weight) and not made.bias.any()
            weights.append(made.weight.detach().flatten())
        drawn, bound = torch.cat(weights), bounds[name]
        assert 0.99 * bound < float(drawn.abs().max()) <= bound
        assert torch.allclose(drawn.quantile(at), bound * (2 * at - 1), atol=0.05 * bound)


def test_the_start_that_there_was_before() -> None:
    model = VisionBDH(BdhModel(start="fan_in"), 32, 10, 0)
    for layer, inputs in ((model.patches, 48), (model.head, 192)):
        for parameter in layer.parameters():
            assert 0.5 * inputs**-0.5 < float(parameter.detach().abs().max()) <= inputs**-0.5
    published = VisionBDH(BdhModel(), 32, 10, 0)
    assert torch.equal(model.encoder, published.encoder) and torch.equal(model.positions, published.positions)


# Dropout


UNITS = 512


def kept(model: VisionBDH, keys: Tensor, level: int = 0, p: float = 0.3) -> Tensor:
    """1 where a unit is kept, (images, tokens, units)."""
    row_keys = model.row_keys(keys)[level]
    return (PairDropout(p, UNITS)(torch.ones(*row_keys.shape, UNITS), row_keys) != 0).float()


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


@pytest.fixture(scope="module")
def wide() -> VisionBDH:
    return make(size=32)  # 257 tokens


KEYS = torch.tensor([5, 1 << 20, -3, 77], dtype=torch.int32)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped(p: float, wide: VisionBDH) -> None:
    dropped = 1 - kept(wide, KEYS, p=p).flatten(0, 1)
    deviation = (p * (1 - p)) ** 0.5
    assert abs(dropped.mean() - p) < 5 * deviation / dropped.numel() ** 0.5
    assert (dropped.mean(0) - p).abs().max() < 6 * deviation / dropped.shape[0] ** 0.5
    assert (dropped.mean(1) - p).abs().max() < 6 * deviation / dropped.shape[1] ** 0.5


def test_what_is_kept_is_scaled() -> None:
    """The expectation is exact: the scale is that of the threshold, which is p to 16 bits."""
    dropout = PairDropout(0.3, UNITS)
    out = dropout(torch.ones(1, 100, UNITS, dtype=torch.float64), torch.arange(100, dtype=torch.int32)[None])
    assert out.unique().tolist() == [0, 1 / (1 - round(0.3 * 2**16) / 2**16)]
    x = torch.ones(1, 2, 4)
    assert dropout.eval()(x, torch.zeros(1, 2, dtype=torch.int32)) is x


CHANGES: dict[str, Callable[[VisionBDH], Tensor]] = {
    "sample or step": lambda model: kept(model, KEYS ^ 1),
    "next sample": lambda model: kept(model, KEYS).roll(1, 0),
    "level": lambda model: kept(model, KEYS, level=1),
    "next token": lambda model: kept(model, KEYS).roll(1, 1),
    "other unit of the pair": lambda model: kept(model, KEYS).unflatten(-1, (-1, 2)).flip(-1).flatten(-2),
    "next pair": lambda model: kept(model, KEYS).roll(2, 2),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_key_is_another_draw(what: str, wide: VisionBDH) -> None:
    here, there = kept(wide, KEYS), CHANGES[what](wide)
    assert torch.equal(here, kept(wide, KEYS))
    # Of the pair's two units every draw is met twice.
    assert abs(correlation(here, there)) < 5 * (2 / here.numel()) ** 0.5


def test_training_drops_by_key_and_evaluation_does_not() -> None:
    model = make(dropout=0.3)
    pixels, keys = images(2)
    torch.manual_seed(1)
    first = model(pixels, keys)
    torch.manual_seed(2)
    assert torch.equal(first, model(pixels, keys))
    assert not torch.equal(first, model(pixels, keys + 2))
    alone = model(pixels[1:], keys[1:])
    torch.testing.assert_close(alone, first[1:], rtol=1e-12, atol=1e-12)
    model.eval()
    assert torch.equal(model(pixels, keys), model(pixels, keys + 2))


# Compiled


@pytest.mark.slow
def test_compiled_in_one_graph() -> None:
    torch._dynamo.reset()
    model = make(dropout=0.3)
    pixels, keys = images(2)

    def run(by: Callable[..., Tensor]) -> list[Tensor]:
        model.zero_grad()
        logits = by(pixels, keys)
        (logits * torch.arange(CLASSES)).sum().backward()
        return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    wanted = run(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for found, want in zip(run(compiled), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    model.eval()
    torch.testing.assert_close(compiled(pixels, keys), model(pixels, keys), rtol=1e-12, atol=1e-12)
