"""What is dropped depends on (seed, step, question, place, layer) alone, and looks random in each of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sameday.data.questions.encode import Encoded
from sameday.data.questions.layout import lay_out
from sameday.data.questions.sample import ImageRef, Message, Sample
from sameday.kernels.dropout import DropoutKeys, KeyedDropout, PairDropout, keeps, mix, name_key
from sameday.models.families import family_of

WIDTH = 512
QWEN = family_of("qwen3_vl")
LAYERS = ("layers.0.q_proj", "layers.0.k_proj", "layers.1.q_proj")


def question(id: int, length: int) -> Encoded:
    sample = Sample(id, f"train.jsonl:{id}", (), (Message("user", ("?",)), Message("assistant", ("!",))))
    return Encoded(sample, np.arange(length), np.arange(length) == length - 1, 0, (), ())


def token_keys(*lengths: int, first_id: int = 1, packing: bool = False) -> Tensor:
    """Keys of a batch of questions, as the layout gives them."""
    units = [[question(first_id + i, length)] for i, length in enumerate(lengths)]
    layout = lay_out(units, packing=packing, family=QWEN, merge_size=2, loss_weight="token", pad_token=0)
    return torch.from_numpy(layout.keys)


def kept(
    keys: Tensor, p: float = 0.1, seed: int = 0, step: int = 0, layer: str = LAYERS[0], width: int = WIDTH
) -> Tensor:
    """1 where an element is kept."""
    holder = DropoutKeys()
    holder.set(keys, seed, step)
    return (KeyedDropout(p, layer, width, holder)(torch.ones(*keys.shape, width)) != 0).float()


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_the_rate_is_right_everywhere(p: float) -> None:
    dropped = 1 - kept(token_keys(250, 250, 250), p).flatten(0, 1)
    deviation = (p * (1 - p)) ** 0.5
    assert abs(dropped.mean() - p) < 5 * deviation / dropped.numel() ** 0.5
    # Of 750 rows and 512 columns none strays further than chance lets the furthest one stray.
    assert (dropped.mean(0) - p).abs().max() < 6 * deviation / dropped.shape[0] ** 0.5
    assert (dropped.mean(1) - p).abs().max() < 6 * deviation / dropped.shape[1] ** 0.5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_rows_and_columns_vary_as_independent_draws_do(p: float) -> None:
    """The spread of the rows' and columns' means is that of a binomial: neither too even nor clumped."""
    mask = kept(token_keys(*[300] * 4), p).flatten(0, 1)
    rows, columns = mask.shape
    for means, count in ((mask.mean(0), rows), (mask.mean(1), columns)):
        ratio = float(means.var() / (p * (1 - p) / count))
        assert abs(ratio - 1) < 6 * (2 / len(means)) ** 0.5


def test_expectation_is_preserved() -> None:
    holder = DropoutKeys()
    x = torch.rand(4, 300, WIDTH) + 1
    holder.set(token_keys(*[300] * 4), 0, 0)
    out = KeyedDropout(0.2, LAYERS[0], WIDTH, holder)(x)
    alive = out != 0
    assert torch.allclose(out[alive], x[alive] / 0.8)
    # Each element varies by p / (1 - p) = 0.25, times E[x²] / E[x]², which is below 1.04 for x from 1 to 2.
    assert abs(out.mean() / x.mean() - 1) < 5 * (0.26 / x.numel()) ** 0.5


def test_evaluation_is_the_identity() -> None:
    layer = KeyedDropout(0.5, LAYERS[0], 4, DropoutKeys()).eval()
    x = torch.randn(2, 3, 4)
    assert layer(x) is x


def test_keys_of_another_batch_are_refused() -> None:
    holder = DropoutKeys()
    layer = KeyedDropout(0.5, LAYERS[0], 8, holder)
    with pytest.raises(AssertionError):
        layer(torch.ones(1, 5, 8))
    holder.set(token_keys(5), 0, 0)
    with pytest.raises(AssertionError, match="another micro-batch"):
        layer(torch.ones(1, 6, 8))


def test_neither_row_nor_neighbours_nor_packing_change_a_questions_mask() -> None:
    lengths = (20, 35, 7)
    rows, packed = kept(token_keys(*lengths)), kept(token_keys(*lengths, packing=True))
    start = 0
    for i, length in enumerate(lengths):
        alone = kept(token_keys(length, first_id=1 + i))[0]
        assert torch.equal(rows[i, :length], alone)
        assert torch.equal(packed[0, start : start + length], alone)
        start += length


def test_a_shared_branch_keeps_its_own_mask() -> None:
    """Sharing gives the prefix one mask; what follows it is dropped as if each question were alone."""
    image = ImageRef(Path("a.png"), "digest", 32, 32)

    def about_image(id: int, length: int) -> Encoded:
        alone = question(id, length)
        alone = replace(alone, sample=replace(alone.sample, images=(image,)))
        return replace(alone, prefix=8, grids=((4, 4),), image_spans=((3, 7),))

    group = [about_image(1, 20), about_image(2, 25)]
    layout = lay_out([group], packing=True, family=QWEN, merge_size=2, loss_weight="token", pad_token=0)
    mask = kept(torch.from_numpy(layout.keys))[0]
    branches = torch.from_numpy(layout.branch)[0]
    for encoded in group:
        alone = kept(token_keys(encoded.length, first_id=encoded.sample.id))[0]
        own = [mask[branches == b] for b in branches.unique().tolist() if b != 0]
        assert any(torch.equal(branch, alone[8:]) for branch in own if len(branch) == encoded.length - 8)


CHANGES: dict[str, Callable[[], Tensor]] = {
    "step": lambda: kept(token_keys(300, 300), step=1),
    "seed": lambda: kept(token_keys(300, 300), seed=1),
    "layer of the same block": lambda: kept(token_keys(300, 300), layer=LAYERS[1]),
    "block": lambda: kept(token_keys(300, 300), layer=LAYERS[2]),
    "question": lambda: kept(token_keys(300, 300, first_id=3)),
    "next question": lambda: kept(token_keys(300, 300)).roll(1, 0),
    "next place": lambda: kept(token_keys(300, 300)).roll(1, 1),
    "next column": lambda: kept(token_keys(300, 300)).roll(1, 2),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_key_is_another_draw(what: str) -> None:
    here, there = kept(token_keys(300, 300)), CHANGES[what]()
    assert abs(correlation(here, there)) < 5 / here.numel() ** 0.5


@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_no_two_rows_or_columns_are_alike(axis: str) -> None:
    mask = kept(token_keys(250, 250), p=0.3).flatten(0, 1)
    table = torch.corrcoef(mask if axis == "rows" else mask.T)
    off_diagonal = table - torch.eye(len(table))
    samples = mask.shape[1] if axis == "rows" else mask.shape[0]
    # Among some 130,000 pairs chance gives about 4.5 standard deviations at most.
    assert off_diagonal.abs().max() < 6.5 / samples**0.5


@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_nor_are_those_of_two_layers_or_steps(axis: str) -> None:
    """Rows of all layers draw by one key, and columns of all steps."""
    keys = token_keys(250, 250)
    masks = [kept(keys, p=0.3), kept(keys, p=0.3, layer=LAYERS[1]), kept(keys, p=0.3, step=1)]
    first, *others = (mask.flatten(0, 1) if axis == "rows" else mask.flatten(0, 1).T for mask in masks)
    for other in others:
        table = torch.corrcoef(torch.cat([first, other]))[: len(first), len(first) :]
        assert table.abs().max() < 6.5 / first.shape[1] ** 0.5


def test_three_places_of_a_row_are_independent() -> None:
    """Draws of a row lie on a line. Over the rows, nothing is said of a place whose key is the sum of two others'."""
    keys, count = token_keys(*[300] * 20), 4096
    rows = DropoutKeys()
    rows.set(keys, 0, 0)
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randint(-(2**31), 2**31, (2, count), generator=generator).to(torch.int32)
    drawn = rows.of(keys.shape).view(-1, 1)
    dropped = [~keeps(drawn, each, int(0.3 * 2**32) - 2**31) for each in (first, second, first + second)]
    product = torch.stack([each.float() - 0.3 for each in dropped]).prod(0)
    assert abs(product.mean()) < 5 * 0.21**1.5 / product.numel() ** 0.5
    assert product.mean(0).abs().max() < 6.5 * 0.21**1.5 / len(product) ** 0.5


def test_steps_seen_by_one_element_look_random() -> None:
    keys = token_keys(4)
    history = torch.stack([kept(keys, p=0.3, step=step, width=8).flatten() for step in range(2000)])
    assert (history.mean(0) - 0.7).abs().max() < 5 * (0.21 / 2000) ** 0.5
    lagged = [correlation(history[:-lag], history[lag:]) for lag in (1, 2, 8, 64)]
    assert max(map(abs, lagged)) < 5 / (history.numel() - 64 * 32) ** 0.5


def test_the_hash_is_one_to_one_and_spreads_each_bit() -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    assert len(mix(x).unique()) == len(x)
    for bit in range(32):
        flip = x ^ (1 << bit if bit < 31 else -(2**31))
        changed = mix(x) ^ mix(flip)
        share = torch.stack([(changed >> b) & 1 for b in range(32)]).float().mean(1)
        assert (share - 0.5).abs().max() < 0.15


def test_names_have_keys_of_their_own() -> None:
    names = [f"base_model.model.layers.{i}.{p}_proj" for i in range(64) for p in "qkvo"]
    keys = {name_key(name) for name in names}
    assert len(keys) == len(names)
    assert all(-(2**31) <= key < 2**31 for key in keys)
    assert name_key("dropout", 1, 2) != name_key("dropout", 2, 1)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler here")
def test_compiled_dropout_drops_the_same() -> None:
    """With the backend that writes kernels: it once counted columns in 64 bits, and hashed them to other numbers."""
    torch._dynamo.reset()
    holder = DropoutKeys()
    holder.set(token_keys(40, 30), 0, 0)
    keyed, pairs = KeyedDropout(0.3, LAYERS[0], WIDTH, holder), PairDropout(0.3, WIDTH)
    x, rows = torch.rand(2, 40, WIDTH) + 1, torch.randint(-(2**31), 2**31 - 1, (2, 40), dtype=torch.int32)
    for layer, arguments in ((keyed, (x,)), (pairs, (x, rows))):
        compiled = torch.compile(layer, fullgraph=True)
        assert torch.equal(compiled(*arguments) == 0, layer(*arguments) == 0), type(layer)
    torch._dynamo.reset()
