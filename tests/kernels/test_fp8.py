"""Matmuls in fp8: each number rounded as a plain reference rounds it, whoever is beside it, forward and backward, in
every format, compiled or not; on a GPU as on a CPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sameday.kernels import fp8

SIZES = st.integers(1, 4).map(lambda n: 16 * n)
ULP = 2.0**-8
"""Of bf16."""


def rounded(values: np.ndarray) -> np.ndarray:
    """To e4m3, by its definition: three bits after the first, exponents down to -6, below that even steps."""
    exponents = np.floor(np.log2(np.maximum(np.abs(values), 2.0**-6)))
    steps = 2.0 ** (exponents - 3)
    return np.rint(values / steps) * steps


def in_fp8(rows: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of each row, one number at a time as far as scales go."""
    values, scales = rows.double().numpy(), []
    for row in values:
        largest, exponent = max(np.abs(row).max(), 2.0**-100), -200
        while largest > 448 * 2.0**exponent:
            exponent += 1
        scales.append([2.0**exponent])
    return rounded(values / np.array(scales)), np.array(scales)


def drawn(rows: int, width: int, seed: int, spread: float = 1.0) -> Tensor:
    """Rows of very different sizes, in each some large and some tiny numbers, and a row of zeros."""
    made = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(4 * spread * torch.randn(rows, 1, generator=made))
    values = sizes * torch.randn(rows, width, generator=made) * torch.exp2(spread * torch.randn(width, generator=made))
    values[seed % rows] *= seed % 3 != 0
    return values.bfloat16()


def gradients(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, grown: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    out = fp8.fp8_linear(x, codes, scale, bias)
    (back,) = torch.autograd.grad(out, x, grown)
    return out.detach(), back


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 999), st.sampled_from(["bf16", "float32"]))
def test_a_row_is_rounded_once_under_the_least_power_of_two(rows: int, width: int, seed: int, kind: str) -> None:
    x = drawn(rows, width, seed, spread=2.0)
    x = x if kind == "bf16" else x.float() * (1 + 1e-3 * torch.randn(rows, width))
    codes, scale = fp8.quantize(x)
    expected, scales = in_fp8(x)
    assert codes.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32 and scale.shape == (rows, 1)
    np.testing.assert_array_equal(scale.double().numpy(), scales)
    np.testing.assert_array_equal(codes.double().numpy(), expected)


def test_scales_at_the_edge_of_the_format() -> None:
    """448 fits under the scale 1, and the next number does not; the largest and the least numbers have scales too."""
    edge = torch.tensor([[448.0], [448.0 + 2**-15], [224.0], [0.0], [3e38], [1e-38]])
    codes, scale = fp8.quantize(edge)
    assert scale[:4, 0].tolist() == [1.0, 2.0, 0.5, 2.0**-108]
    assert codes.float().isfinite().all() and codes.float().abs().max() <= 448


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_what_is_not_finite_stays_so(value: float, kind: torch.dtype) -> None:
    x = torch.ones(2, 16, dtype=kind)
    x[1, 3] = value
    codes, scale = fp8.quantize(torch.randn(16, 16).bfloat16())
    out, back = gradients(x, codes, scale[:, 0], None, x)
    for made in (out, back):
        assert made[0].isfinite().all() and not made[1].isfinite().any()


@settings(max_examples=30)
@given(st.integers(2, 9), SIZES, SIZES, st.integers(0, 99), st.data())
def test_a_row_does_not_depend_on_those_beside_it(
    rows: int, wide: int, high: int, seed: int, data: st.DataObject
) -> None:
    """To the bit where it is rounded, and to bf16's last place in the sum, whose order is the library's."""
    x, weights = drawn(rows, wide, seed), drawn(high, wide, seed + 1, 0.2)
    codes, scale = fp8.quantize(weights)
    some = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows))
    every, few = fp8.quantize(x), fp8.quantize(x[some])
    for one, other in zip(every, few, strict=True):
        assert torch.equal(one.float()[some], other.float())
    out, back = gradients(x, codes, scale[:, 0], None, grown := drawn(rows, high, seed + 2))
    out_few, back_few = gradients(x[some], codes, scale[:, 0], None, grown[some])
    torch.testing.assert_close(out_few, out[some], rtol=2 * ULP, atol=1e-4 * float(out.abs().max()))
    torch.testing.assert_close(back_few, back[some], rtol=2 * ULP, atol=1e-4 * float(back.abs().max()))


@settings(max_examples=30)
@given(st.integers(1, 5), SIZES, SIZES, st.booleans(), st.booleans(), st.integers(0, 99))
def test_in_bf16_both_passes_are_the_reference(
    rows: int, wide: int, high: int, biased: bool, autocast: bool, seed: int
) -> None:
    x, grown, weights = drawn(rows, wide, seed), drawn(rows, high, seed + 1), drawn(high, wide, seed + 2, 0.2)
    bias = drawn(1, high, seed + 3)[0] if biased else None
    codes, scale = fp8.quantize(weights)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        given = x.float()[None] if autocast else x[None]
        out, back = gradients(given, codes, scale[:, 0], bias, grown[None])
    assert out.dtype == torch.bfloat16 and out.shape == (1, rows, high) and back.dtype == given.dtype
    (x_codes, x_scale), (w_codes, w_scale) = in_fp8(x), in_fp8(weights)
    expected = (x_codes * x_scale) @ (w_codes * w_scale).T
    expected = torch.from_numpy(expected).bfloat16() + (0 if bias is None else bias)
    near = {"rtol": 2 * ULP, "atol": 1e-5 * float(expected.double().abs().max()) + 1e-30}
    torch.testing.assert_close(out[0], expected, **near)
    # The scales of the weights lie along the sum: they are in the gradient before it is rounded.
    g_codes, g_scale = in_fp8((grown.double() * torch.from_numpy(w_scale[:, 0])).bfloat16())
    wanted = torch.from_numpy(g_codes * g_scale @ w_codes).bfloat16()
    near["atol"] = 1e-5 * float(wanted.double().abs().max()) + 1e-30
    torch.testing.assert_close(back[0].bfloat16(), wanted, **near)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_in_float32_only_the_weights_are_rounded(kind: torch.dtype) -> None:
    x, grown, weights = torch.randn(5, 48, dtype=kind), torch.randn(5, 32, dtype=kind), drawn(32, 48, 1, 0.2)
    codes, scale = fp8.quantize(weights)
    plain = fp8.dequantize(codes, scale[:, 0], kind)
    w_codes, w_scale = in_fp8(weights)
    np.testing.assert_array_equal(plain.double().numpy(), w_codes * w_scale)
    assert torch.equal(fp8.dequantize(codes, scale[:, 0], torch.bfloat16).to(kind), plain), "exact in bf16 too"
    out, back = gradients(x, codes, scale[:, 0], None, grown)
    torch.testing.assert_close(out, x @ plain.T)
    torch.testing.assert_close(back, grown @ plain)
    assert (plain - weights.to(kind)).norm() / weights.to(kind).norm() < 0.04, "three bits"


def run_with(compiled: str | None) -> Any:
    if compiled is None:
        return fp8.fp8_linear
    torch._dynamo.reset()
    return torch.compile(fp8.fp8_linear, backend=compiled, fullgraph=True, dynamic=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_compiled_it_is_the_same_in_one_graph(kind: torch.dtype) -> None:
    x, grown, weights = drawn(7, 64, 1).to(kind), drawn(7, 32, 2).to(kind), drawn(32, 64, 3, 0.2)
    codes, scale = fp8.quantize(weights)
    expected = gradients(x, codes, scale[:, 0], None, grown)
    leaf = x.clone().requires_grad_()
    out = run_with("aot_eager")(leaf, codes, scale[:, 0], None)
    (back,) = torch.autograd.grad(out, leaf, grown)
    # The rounding has the same bits, and sums of the same numbers the same order.
    assert torch.equal(out, expected[0]) and torch.equal(back, expected[1])


@pytest.mark.slow
def test_compiled_code_rounds_to_the_same_bits() -> None:
    torch._dynamo.reset()
    x = drawn(9, 48, 1)
    x[3, 4] = torch.inf
    for one, other in zip(torch.compile(fp8.quantize)(x), fp8.quantize(x), strict=True):
        one, other = one.float(), other.float()
        finite = torch.arange(9) != 3
        assert torch.equal(one[finite], other[finite])
    assert not fp8.quantize(x)[1][3].isfinite()


def test_the_operator_is_registered_as_torch_wants_it() -> None:
    codes, _ = fp8.quantize(drawn(32, 64, 1))
    tests = ("test_autograd_registration", "test_faketensor")  # the others do arithmetic with codes
    torch.library.opcheck(fp8._product, (torch.randn(3, 64), codes.t()), test_utils=tests)


MULTIPLIES = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.skipif(not MULTIPLIES, reason="needs a GPU with fp8 matmuls")
@pytest.mark.parametrize("compiled", [None, "inductor"])
@pytest.mark.parametrize(("rows", "wide", "high"), [(1, 64, 32), (77, 1152, 4304), (512, 4096, 1024)])
def test_a_gpu_gives_what_a_cpu_emulates(compiled: str | None, rows: int, wide: int, high: int) -> None:
    x, grown, weights = drawn(rows, wide, 1), drawn(rows, high, 2), drawn(high, wide, 3, 0.2)
    codes, scale = fp8.quantize(weights)
    bias = drawn(1, high, 4)[0]
    expected = gradients(x, codes, scale[:, 0], bias, grown)
    moved = [each.cuda() for each in (x, codes, scale[:, 0], bias, grown)]
    assert all(
        torch.equal(one.cpu().float(), other.float())
        for one, other in zip(fp8.quantize(moved[0]), fp8.quantize(x), strict=True)
    )
    leaf = moved[0].requires_grad_()
    out = run_with(compiled)(leaf, *moved[1:4])
    (back,) = torch.autograd.grad(out, leaf, moved[4])
    for made, wanted in ((out, expected[0]), (back, expected[1])):
        # Row by row: their sizes differ much.
        off = (made.cpu().double() - wanted.double()).norm(dim=-1)
        assert (off <= ULP * wanted.double().norm(dim=-1) + 1e-30).all()
