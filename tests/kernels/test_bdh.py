"""The fused levels against the plain ones: outputs and all gradients, with and without dropout, at shapes that leave
remainders of every tile."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sameday.kernels import bdh
from sameday.kernels.bdh import Launch, even_then_odd, refusal, token_tile, too_many, two_parts, untried
from sameday.kernels.dropout import PairDropout
from sameday.models.vision_bdh import VisionBDH
from sameday.spec.vision import BdhModel

CLASSES = 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Found = dict[str, Tensor]

OutOfResources = pytest.importorskip("triton.runtime.errors").OutOfResources


def make(kind: torch.dtype = torch.float64, size: int = 16, dropout: float = 0.3, **shape: Any) -> VisionBDH:
    """A model with no parameter at zero. Small ones take images of 16 by 16: 16 patches."""
    sizes = {"width": 32, "heads": 2, "latents": 3, "levels": 2, "patch": 4} | shape
    model = VisionBDH(BdhModel(dropout=dropout, **sizes), size, CLASSES, 0).to(DEVICE, kind)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model


def images(model: VisionBDH, batch: int) -> tuple[Tensor, Tensor]:
    size = model.shape.patch * round((model.tokens - (model.shape.pool == "class")) ** 0.5)
    pixels = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(2)).to(model.encoder)
    return pixels, torch.arange(7, 7 + batch, dtype=torch.int32, device=DEVICE)


def run(model: VisionBDH, kernel: str, pixels: Tensor, keys: Tensor) -> Found:
    """Logits, and gradients of every parameter and of the pixels."""
    model.kernel = kernel
    model.zero_grad()
    pixels = pixels.clone().requires_grad_()
    logits = model(pixels, keys)
    # Weighted by class and by image, so that nothing cancels.
    weights = torch.linspace(-1, 2, CLASSES).to(logits) * (1 + keys[:, None] % 5)
    (logits * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()} | {"pixels": pixels.grad}
    found = {"logits": logits.detach()}
    for name, gradient in gradients.items():
        assert gradient is not None and gradient.abs().max() > 0, name
        found[name] = gradient.clone()
    return found


def distances(found: Found, wanted: Found) -> dict[str, float]:
    assert found.keys() == wanted.keys()
    return {name: float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted}


def assert_equal(found: Found, wanted: Found, limit: float) -> None:
    far = {name: distance for name, distance in distances(found, wanted).items() if not distance <= limit}
    assert not far, far


def compare(model: VisionBDH, batch: int) -> None:
    limit = 1e-6 if model.encoder.dtype == torch.float64 else 1e-4
    inputs = images(model, batch)
    assert_equal(run(model, "fused", *inputs), run(model, "plain", *inputs), limit)


CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    # Images in the batch, tokens, the rest of the shape. Units of a head: latents * width / heads.
    "16 tokens": (3, 16, {}),
    "17 tokens": (3, 17, {}),
    "one image, one level": (1, 17, {"levels": 1}),
    "three levels": (1, 17, {"levels": 3, "latents": 1}),
    "one head of 80 units": (1, 17, {"heads": 1, "width": 80, "latents": 1}),
    "40 units": (1, 17, {"heads": 4, "latents": 5, "levels": 1}),
    "46 units in 16 heads": (1, 16, {"heads": 16, "latents": 23, "levels": 1}),
    "36 tokens, width 48": (2, 36, {"width": 48, "heads": 3, "latents": 1, "levels": 1}),
    "37 tokens, width 48, 80 units": (1, 37, {"width": 48, "heads": 3, "latents": 5, "levels": 1}),
    "64 tokens, width 96": (1, 64, {"width": 96, "latents": 1, "levels": 1}),
    "65 tokens, width 96": (2, 65, {"width": 96, "latents": 1, "levels": 1}),
    "65 tokens, width 192, 6 heads": (1, 65, {"width": 192, "heads": 6, "latents": 1}),
    "5 tokens": (5, 5, {"levels": 1}),
    "256 tokens": (1, 256, {"levels": 1, "latents": 1, "heads": 1}),
    "257 tokens": (1, 257, {"levels": 1, "latents": 1}),
    **({"as published": (2, 65, {"width": 192, "heads": 6, "latents": 32})} if DEVICE == "cuda" else {}),
}


def case(name: str, kind: torch.dtype, dropout: float) -> tuple[VisionBDH, int]:
    batch, tokens, shape = CASES[name]
    side = int(tokens**0.5)
    pool = "mean" if side**2 == tokens else "class"
    model = make(kind, side * shape.get("patch", 4), dropout, pool=pool, **shape)
    assert model.tokens == tokens
    return model, batch


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_fused_is_plain_in_float64(name: str) -> None:
    try:
        compare(*case(name, torch.float64, 0.3))
    except OutOfResources:  # no recipe asks for float64: what a multiprocessor has no room for is tried in float32
        model, batch = case(name, torch.float32, 0.3)
        if crowded := too_many(model.shape.width, model.tokens, 4):
            pytest.skip(f"{crowded} in float32, and a recipe that asks for it gets the plain levels")
        compare(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["16 tokens", "40 units"])
def test_fused_is_plain_without_dropout(name: str) -> None:
    compare(*case(name, torch.float64, 0.0))


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", ["40 units", "36 tokens, width 48"])
def test_fused_is_plain_in_float32(name: str, dropout: float) -> None:
    compare(*case(name, torch.float32, dropout))


@pytest.mark.parametrize("name", ["as published"] if DEVICE == "cuda" else ["40 units"])
def test_fused_is_as_near_to_float32_as_plain_is_in_half_precision(name: str) -> None:
    """The tiles of two-byte formats, and products that are summed in a wider one. Triton's interpreter has no products
    of bf16."""
    model, batch = case(name, torch.float32, 0.3)
    inputs = images(model, batch)
    reference = run(model, "plain", *inputs)
    # Where an earlier test met bf16 on a CPU without it, torch turned oneDNN off, and plain rounds otherwise.
    with torch.backends.mkldnn.flags(enabled=True), torch.autocast(DEVICE, torch.float16):
        plain, fused = (run(model, kernel, *inputs) for kernel in ("plain", "fused"))
    by_plain, by_fused = distances(plain, reference), distances(fused, reference)
    assert all(by_fused[name] <= 2 * by_plain[name] for name in reference), (by_fused, by_plain)
    assert by_fused["encoder"] > 1e-4, "this was not half precision"


@pytest.mark.skipif(DEVICE == "cuda", reason="bf16 works on a GPU")
def test_bf16_in_the_interpreter_is_refused() -> None:
    model = make()
    model.kernel = "fused"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="no bf16"):
        model.float()(*images(model, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tiles",
    [
        {"encode": Launch(16, 16, 4, 1), "gate": Launch(16, 16, 4, 1), "join": Launch(1, 0, 4, 1)},
        {"attend": Launch(0, 16, 4, 1), "ungate": Launch(16, 16, 4, 1), "unattend": Launch(1, 16, 4, 1)},
        {"unattend": Launch(3, 16, 4, 1)},
    ],
    ids=["forward", "backward", "a head's units in three shares"],
)
def test_tiles_change_nothing(tiles: dict[str, Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bdh, "WIDE", bdh.WIDE._replace(**tiles))
    compare(*case("40 units", torch.float64, 0.3))


@pytest.mark.slow
@pytest.mark.parametrize("enough, parts", [(128, 4), (1, 1)])
def test_heads_are_divided_where_rows_are_few(enough: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sameday.kernels import bdh_triton

    grids = []

    class Gate:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return gate[grid]

    gate = bdh_triton.gate
    monkeypatch.setattr(bdh_triton, "gate", Gate())
    monkeypatch.setattr(bdh, "ENOUGH", enough)
    model, batch = case("40 units", torch.float64, 0.3)
    compare(model, batch)
    assert grids == [(1, parts)] * model.shape.levels


# Dropout


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """What each level gave to be kept, in the order of _Run.forward."""
    found: list[list[Tensor]] = []
    forward = bdh._Run.forward

    def noted(self: Any, *args: Any) -> list[Any]:
        state = forward(self, *args)
        found.append([tensor for tensor in state if isinstance(tensor, Tensor)])
        return state

    monkeypatch.setattr(bdh._Run, "forward", noted)
    return found


GATED = 7


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.1, 0.9])
def test_the_mask_is_that_of_the_plain_model(dropout: float, states: list[list[Tensor]]) -> None:
    model = make(dropout=dropout, levels=1, heads=4, latents=5)
    model.kernel = "fused"
    pixels, keys = images(model, 2)
    model(pixels, keys)
    model.eval()(pixels, keys)
    dropped, whole = (state[GATED] for state in states)
    shape = (2, model.tokens, model.shape.heads * model.units)
    ones = torch.ones(shape, dtype=torch.float64, device=DEVICE)
    mask = PairDropout(dropout, shape[-1]).to(DEVICE)(ones, model.row_keys(keys)[0])
    assert abs(float((mask == 0).double().mean()) - dropout) < 0.05
    # The kernels have each head's even units before its odd ones.
    mask = even_then_odd(mask.unflatten(-1, (model.shape.heads, -1))).reshape(whole.shape)
    assert torch.equal(dropped == 0, (whole == 0) | (mask == 0))
    # On a GPU the kernels scale what is kept by a number in float32.
    torch.testing.assert_close(dropped, whole * mask, rtol=1e-14 if DEVICE == "cpu" else 1e-7, atol=0)


def test_levels_and_images_have_masks_of_their_own() -> None:
    """Else a wrong key in both versions would go unseen: the keys themselves all differ."""
    model = make()
    keys = model.row_keys(images(model, 3)[1])
    assert keys.shape == (2, 3, 17) and len(keys.unique()) == keys.numel()


@pytest.mark.slow
def test_evaluation_drops_nothing() -> None:
    model, without = make(dropout=0.5).eval(), make(dropout=0.0)
    inputs = images(model, 1)
    wanted = run(without, "plain", *inputs)
    assert_equal(run(model, "fused", *inputs), wanted, 1e-12)
    logits = model.train()(*inputs)
    assert (logits - wanted["logits"]).norm() > 0.01 * wanted["logits"].norm()


# What is kept


@pytest.mark.parametrize("training", [True, False])
def test_without_gradients_the_output_is_the_same(training: bool) -> None:
    model = make(levels=1).train(training)
    model.kernel = "fused"
    inputs = images(model, 1)
    with torch.no_grad():
        alone = model(*inputs)
    assert torch.equal(alone, model(*inputs))


@pytest.mark.slow
def test_without_gradients_nothing_is_kept(states: list[list[Tensor]]) -> None:
    model = make()
    model.kernel = "fused"
    inputs = images(model, 1)

    def given() -> list[weakref.ref[Tensor]]:
        found = {id(tensor): weakref.ref(tensor) for state in states for tensor in state}
        states.clear()
        return list(found.values())

    with torch.no_grad():
        logits = model(*inputs)
    assert logits.grad_fn is None
    assert states[0][GATED] is states[0][2], "without gradients the gated latents need no memory of their own"
    assert all(tensor() is None for tensor in given())
    logits = model(*inputs)
    assert states[0][GATED] is not states[0][2]
    kept = given()
    assert len(kept) >= 8 * model.shape.levels and all(tensor() is not None for tensor in kept)
    logits.sum().backward()
    # Only what came in may live on, in the graph that is not gone yet.
    assert sum(tensor() is not None for tensor in kept) <= 1


# What an image gives


@pytest.mark.slow
def test_an_image_gives_the_same_alone_and_in_a_batch() -> None:
    model = make(levels=1)
    pixels, keys = images(model, 3)
    together = run(model, "fused", pixels, keys)
    alone = [run(model, "fused", pixels[i : i + 1], keys[i : i + 1]) for i in range(3)]
    joined = {name: torch.cat([each[name] for each in alone]) for name in ("logits", "pixels")}
    summed = {name: sum(each[name] for each in alone) for name in together.keys() - joined.keys()}
    assert_equal(together, joined | summed, 1e-12)
    # And with others, in another order.
    model.kernel = "fused"
    again = model(pixels.flip(0)[:2], keys.flip(0)[:2]).detach()
    assert_equal({"logits": again}, {"logits": together["logits"][1:].flip(0)}, 1e-12)


# Shapes


@given(st.integers(1, 5000))
def test_two_parts(size: int) -> None:
    powers = [2**k for k in range(4, 13)]
    possible = {(a, b) for a in powers for b in powers if a + b == size and a >= b}
    assert len(possible) <= 1
    assert two_parts(size) == (possible.pop() if possible else None)


@given(st.integers(1, 5000))
def test_token_tile(tokens: int) -> None:
    tile, extra = token_tile(tokens)
    wanted = min(2**k for k in range(4, 14) if 2**k + 1 >= tokens)
    assert (tile, extra) == (wanted, int(tokens == wanted + 1))


@pytest.mark.parametrize("width", [32, 48, 96, 192, 384, 512])
def test_widths_that_can_run(width: int) -> None:
    assert refusal(width) is None


@pytest.mark.parametrize("width", [8, 16, 24, 56, 100, 112, 193])
def test_widths_that_cannot(width: int) -> None:
    assert refusal(width) == f"width {width} is not the sum of two powers of two of at least 16"


def test_an_image_has_to_fit_into_a_multiprocessor() -> None:
    """Against what the compiler asks for: 147,456 bytes for 128 tokens of width 192 in half precision, 327,680 for 256
    of width 32 in float32, where the scores take most."""
    assert too_many(192, 65, 2) is None and too_many(192, 129, 2) is None and too_many(192, 65, 4) is None
    assert too_many(192, 257, 2) == "257 tokens of width 192 do not fit into one tile of a multiprocessor"
    assert too_many(192, 129, 4) is not None
    assert too_many(32, 256, 4) is not None and too_many(32, 256, 2) is None


def test_shapes_that_no_gpu_was_seen_to_do_right_in_half_precision() -> None:
    assert untried(192, 65, 1024) is None and untried(192, 64, 1024) is None and untried(128, 17, 128) is None
    for width, tokens, units in ((96, 65, 1024), (192, 66, 1024), (192, 257, 1024), (192, 65, 64)):
        assert untried(width, tokens, units) == (
            f"{tokens} tokens of width {width}, {units} units a head: in bf16 they are known to be right from 128 wide "
            "and 128 units, and up to 65 tokens"
        )
