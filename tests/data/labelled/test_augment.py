"""Crops are drawn as RandomResizedCrop draws them, by a key alone, and no float has a part in a pixel."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sameday.data.labelled.augment import MAX_RATIO, MAX_SIZE, _ratios, _rounded_root, apply, draw, normalise

MANY = torch.arange(20_000)
HALF = (0.5, 0.5, 0.5)


def noise(count: int, size: int, seed: int = 0) -> Tensor:
    values = np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    return torch.from_numpy(values)


def whole(count: int, size: int, flipped: int = 0) -> Tensor:
    return torch.tensor([[0, 0, size, size, flipped]] * count)


@st.composite
def asked(draw: st.DrawFn) -> dict[str, Any]:
    low = draw(st.floats(0.01, 1))
    first, second = sorted(draw(st.tuples(st.floats(-3, 3), st.floats(-3, 3))))
    return {
        "size": draw(st.integers(1, MAX_SIZE)),
        "scale": (low, draw(st.floats(low, 1))),
        "ratio": (math.exp(first), math.exp(second)),
        "flip": draw(st.booleans()),
    }


def reference_boxes(count: int, size: int, scale: tuple[float, float], ratio: tuple[float, float]) -> np.ndarray:
    """torchvision's rule, written with floats and numpy's stream: height, width, top, left."""
    rng, boxes = np.random.default_rng(0), []
    for _ in range(count):
        height = width = size
        for _ in range(10):
            area = size * size * rng.uniform(*scale)
            aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= size and 0 < h <= size:
                height, width = h, w
                break
        boxes.append((height, width, rng.integers(0, size - height + 1), rng.integers(0, size - width + 1)))
    return np.array(boxes)


def reference_pixels(image: np.ndarray, box: list[int]) -> np.ndarray:
    """One image, pixel by pixel, with Python's integers."""
    size = len(image)
    top, left, height, width, flipped = box
    out = np.empty((3, size, size), np.uint8)

    def sources(o: int, length: int) -> tuple[int, int, int]:
        at = (2 * o + 1) * length - size
        before, weight = at // (2 * size), at % (2 * size)
        return min(max(before, 0), length - 1), min(max(before + 1, 0), length - 1), weight

    for row in range(size):
        upper, lower, down = sources(row, height)
        for column in range(size):
            near, far, across = sources(size - 1 - column if flipped else column, width)
            for channel in range(3):
                total = 0
                for y, a in ((upper, 2 * size - down), (lower, down)):
                    for x, b in ((near, 2 * size - across), (far, across)):
                        total += a * b * int(image[top + y, left + x, channel])
                out[channel, row, column] = (2 * total + (2 * size) ** 2) // (2 * (2 * size) ** 2)
    return out


@given(what=asked(), seed=st.integers(0, 2**40), epoch=st.integers(0, 2**31))
def test_boxes_lie_inside_the_image(what: dict[str, Any], seed: int, epoch: int) -> None:
    top, left, height, width, flipped = draw(seed, epoch, torch.arange(50), **what).unbind(1)
    size = what["size"]
    assert top.min() >= 0 and left.min() >= 0 and height.min() >= 1 and width.min() >= 1
    assert (top + height).max() <= size and (left + width).max() <= size
    assert set(flipped.tolist()) <= ({0, 1} if what["flip"] else {0})


@given(x=st.integers(0, 2**60), size=st.integers(1, MAX_SIZE))
@settings(max_examples=500)
def test_roots_are_exact(x: int, size: int) -> None:
    """floor(sqrt(x / 2^32) + 1/2), by Python's own integer root."""
    expected = (math.isqrt(x * 4) + 2**16) // 2**17
    assert _rounded_root(torch.tensor([[x]]), size).item() == min(expected, size + 1)


def test_roots_are_exact_where_they_turn() -> None:
    turns = torch.tensor([(2 * k - 1) ** 2 << 30 for k in range(1, MAX_SIZE + 1)])
    for off, root in ((-1, 0), (0, 1), (1, 1)):
        assert torch.equal(_rounded_root(turns + off, MAX_SIZE), torch.arange(MAX_SIZE) + root)


def test_no_product_leaves_64_bits() -> None:
    largest = MAX_SIZE**2 * 2**16
    wide, tall = _ratios((1 / MAX_RATIO, MAX_RATIO), torch.device("cpu"))
    assert largest * max(int(wide.max()), int(tall.max())) < 2**63
    assert 255 * (2 * MAX_SIZE) ** 2 + (2 * MAX_SIZE) ** 2 // 2 < 2**31


def test_ratios_are_evenly_spaced_in_their_logarithm() -> None:
    wide, tall = (side.double() / 2**16 for side in _ratios((3 / 4, 4 / 3), torch.device("cpu")))
    steps = wide.log().diff()
    assert wide.min() > 0.75 and wide.max() < 4 / 3
    assert (steps - math.log(16 / 9) / len(wide)).abs().max() < 2**-15
    assert (wide * tall - 1).abs().max() < 2**-15


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 224])
@pytest.mark.parametrize("scale", [(0.8, 1.0), (0.08, 1.0)])
def test_boxes_are_distributed_as_torchvisions(size: int, scale: tuple[float, float]) -> None:
    boxes = draw(7, 0, MANY, size, scale)
    ours = boxes[:, [2, 3, 0, 1]].double().numpy()
    theirs = reference_boxes(len(MANY), size, scale, (3 / 4, 4 / 3))

    def views(b: np.ndarray) -> dict[str, np.ndarray]:
        area, ratio = b[:, 0] * b[:, 1] / size**2, np.log(b[:, 1] / b[:, 0])
        return {"area": area, "ratio": ratio, "height": b[:, 0], "width": b[:, 1], "top": b[:, 2], "left": b[:, 3]}

    for name, mine in views(ours).items():
        other = views(theirs)[name]
        values = np.union1d(mine, other)
        distance = np.abs(
            np.searchsorted(np.sort(mine), values, "right") - np.searchsorted(np.sort(other), values, "right")
        ).max() / len(mine)
        # Kolmogorov and Smirnov: two samples of 20,000 lie further apart than this once in a million times.
        assert distance < 2.7 * (2 / len(mine)) ** 0.5, (name, distance)
    # Rounding of both sides moves an area by about 1 / size, and a ratio by about 2 / size.
    area = ours[:, 0] * ours[:, 1] / size**2
    assert area.min() > scale[0] * (1 - 2 / size / scale[0] ** 0.5) and area.max() <= 1
    assert abs(area.mean() - views(theirs)["area"].mean()) < 0.005
    limit = 4 / 3 * (1 + 2 / size / scale[0] ** 0.5)
    assert (ours[:, 1] / ours[:, 0]).max() < limit and (ours[:, 0] / ours[:, 1]).max() < limit


def test_corners_are_uniform_and_flips_are_half() -> None:
    top, left, height, width, flipped = draw(0, 0, MANY, 32, (0.25, 0.25), (1.0, 1.0)).unbind(1)
    assert set(height.tolist()) == set(width.tolist()) == {16}
    for corner in (top, left):
        counts = torch.bincount(corner, minlength=17).double()
        expected = len(MANY) / 17
        assert len(counts) == 17 and (counts - expected).abs().max() < 5 * expected**0.5
    pairs = torch.stack([top, left, flipped]).double()
    assert torch.corrcoef(pairs).fill_diagonal_(0).abs().max() < 5 / len(MANY) ** 0.5
    assert abs(flipped.double().mean() - 0.5) < 5 * 0.5 / len(MANY) ** 0.5
    assert not draw(0, 0, MANY, 32, flip=False)[:, 4].any()


def test_where_nothing_fits_the_largest_centred_box_is_taken() -> None:
    """All of an image at another ratio than its own cannot fit."""
    assert draw(0, 0, MANY[:9], 32, (1.0, 1.0), (2.0, 3.0))[:, :4].tolist() == [[8, 0, 16, 32]] * 9
    assert draw(0, 0, MANY[:9], 32, (1.0, 1.0), (0.25, 0.5))[:, :4].tolist() == [[0, 8, 32, 16]] * 9
    assert draw(0, 0, MANY[:9], 32, (1.0, 1.0), (1.0, 1.0))[:, :4].tolist() == [[0, 0, 32, 32]] * 9


@given(ids=st.lists(st.integers(0, 2**62), min_size=1, max_size=20), epoch=st.integers(0, 1000))
def test_a_samples_box_does_not_depend_on_its_company(ids: list[int], epoch: int) -> None:
    together = draw(1, epoch, torch.tensor(ids), 32)
    backwards = draw(1, epoch, torch.tensor(ids[::-1]), 32).flip(0)
    alone = torch.cat([draw(1, epoch, torch.tensor([i]), 32) for i in ids])
    assert torch.equal(together, backwards) and torch.equal(together, alone)
    assert torch.equal(together, draw(1, torch.tensor(epoch), torch.tensor(ids), 32))
    assert torch.equal(together, draw(1, torch.tensor(epoch, dtype=torch.int32), torch.tensor(ids), 32))


def test_epoch_seed_and_sample_change_the_draw() -> None:
    def corners(seed: int, epoch: int, first: int = 0) -> Tensor:
        return draw(seed, epoch, MANY + first, 224, (0.2, 0.5))[:, [0, 1, 4]].double()

    here = corners(0, 0)
    others = [corners(0, 1), corners(1, 0), corners(1, 1), corners(0, 2), corners(0, 0, 1), corners(0, 0, 2**32)]
    for there in others:
        for column in range(3):
            together = torch.corrcoef(torch.stack([here[:, column], there[:, column]]))
            assert abs(float(together[0, 1])) < 5 / len(MANY) ** 0.5


def test_a_samples_epochs_look_random() -> None:
    boxes = torch.cat([draw(0, epoch, torch.tensor([17]), 224, (0.2, 0.5)) for epoch in range(1000)]).double()
    for lag in (1, 2, 16):
        for column in (0, 1, 4):
            together = torch.corrcoef(torch.stack([boxes[:-lag, column], boxes[lag:, column]]))
            assert abs(float(together[0, 1])) < 5 / 1000**0.5


@pytest.mark.parametrize("size", [1, 5, 32, 256])
def test_the_whole_image_stays_as_it_is(size: int) -> None:
    pixels = noise(3, size)
    assert torch.equal(apply(pixels, whole(3, size)), pixels.permute(0, 3, 1, 2))
    assert torch.equal(apply(pixels, whole(3, size, 1)), pixels.permute(0, 3, 1, 2).flip(3))
    assert apply(pixels, whole(3, size)).is_contiguous()


@given(size=st.integers(1, 12), seed=st.integers(0, 1000), data=st.data())
@settings(max_examples=40)
def test_pixels_equal_the_plain_rule(size: int, seed: int, data: st.DataObject) -> None:
    boxes = []
    for _ in range(2):
        height, width = data.draw(st.integers(1, size)), data.draw(st.integers(1, size))
        top, left = data.draw(st.integers(0, size - height)), data.draw(st.integers(0, size - width))
        boxes.append([top, left, height, width, data.draw(st.integers(0, 1))])
    pixels = noise(2, size, seed)
    expected = [reference_pixels(image.numpy(), box) for image, box in zip(pixels, boxes, strict=True)]
    assert np.array_equal(apply(pixels, torch.tensor(boxes)).numpy(), np.stack(expected))


def test_drawn_boxes_equal_the_plain_rule_at_full_size() -> None:
    for size, count in ((32, 6), (100, 1)):
        pixels, boxes = noise(count, size), draw(0, 0, MANY[:count], size)
        expected = [reference_pixels(image.numpy(), box) for image, box in zip(pixels, boxes.tolist(), strict=True)]
        assert np.array_equal(apply(pixels, boxes).numpy(), np.stack(expected))


def test_the_largest_sums_fit() -> None:
    pixels = torch.full((2, 256, 256, 3), 255, dtype=torch.uint8)
    boxes = torch.tensor([[3, 200, 77, 19, 0], [0, 0, 1, 1, 1]])
    assert (apply(pixels, boxes) == 255).all()


@pytest.mark.parametrize("size", [32, 96])
def test_pillow_agrees_within_its_own_rounding(size: int) -> None:
    pixels, boxes = noise(40, size), draw(3, 1, MANY[:40], size)
    ours = apply(pixels, boxes).permute(0, 2, 3, 1).numpy().astype(int)
    for image, (top, left, height, width, flipped), out in zip(pixels.numpy(), boxes.tolist(), ours, strict=True):
        crop = Image.fromarray(image).crop((left, top, left + width, top + height))
        theirs = np.asarray(crop.resize((size, size), Image.Resampling.BILINEAR), int)
        # Pillow rounds between its two passes.
        assert np.abs(out - (theirs[:, ::-1] if flipped else theirs)).max() <= 1


class Floats(TorchDispatchMode):
    """Collects the operations that give or take a float."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += 1
        leaves = torch.utils._pytree.tree_leaves((args, kwargs, out))
        if any(isinstance(x, float) or (isinstance(x, Tensor) and x.is_floating_point()) for x in leaves):
            self.seen.append(str(func))
        return out


def test_no_float_has_a_part_in_a_pixel() -> None:
    pixels = noise(4, 32)
    with Floats() as floats:
        out = apply(pixels, draw(0, torch.tensor(3), MANY[:4], 32, (0.8, 1.0)))
    assert floats.count > 40 and floats.seen == []
    with Floats() as floats:
        normalise(out, HALF, HALF)
    assert floats.seen  # the instrument works


def test_normalised_values_are_rounded_once() -> None:
    mean, std = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16).contiguous()
    values = normalise(pixels, mean, std)
    assert values.dtype == torch.float32 and values.shape == pixels.shape
    exact = (pixels.double() / 255 - torch.tensor(mean).double().view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert torch.allclose(values.double(), exact, rtol=1e-6, atol=1e-6)
    for channel in range(3):
        expected = [np.float32((v / 255 - mean[channel]) / std[channel]) for v in range(256)]
        assert values[1, channel].flatten().tolist() == expected
    # Whatever the layout in memory.
    last = pixels.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert torch.equal(normalise(last, mean, std), values)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"size": 257}, "257 pixels"),
        ({"scale": (0.0, 1.0)}, "scale"),
        ({"scale": (0.9, 0.8)}, "scale"),
        ({"ratio": (0.001, 1.0)}, "ratio"),
    ],
)
def test_what_whole_numbers_cannot_hold_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        draw(0, 0, MANY[:2], **{"size": 32, **changed})


def all_of_it(pixels: Tensor, ids: Tensor, epoch: Tensor) -> Tensor:
    return normalise(apply(pixels, draw(5, epoch, ids, 32, (0.8, 1.0))), HALF, HALF)


class Unasked(TorchDispatchMode):
    """Forbids what would wait for a value, or give a result whose shape depends on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "masked_select", "unique"), func
        return func(*args, **(kwargs or {}))


def test_nothing_asks_for_a_value() -> None:
    pixels, ids, turn = noise(8, 32), torch.arange(100, 108), torch.tensor(3)
    expected = all_of_it(pixels, ids, turn)
    with Unasked():
        assert torch.equal(all_of_it(pixels, ids, turn), expected)
    with Unasked(), pytest.raises(AssertionError):
        turn.item()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_bits_captured_too() -> None:
    pixels, ids, turn = noise(256, 32), torch.arange(256) * 977, torch.tensor(4)
    expected = all_of_it(pixels, ids, turn)
    there = [x.cuda() for x in (pixels, ids, turn)]
    assert torch.equal(all_of_it(*there).cpu(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = all_of_it(*there)
    for epoch in (4, 9):
        there[2].fill_(epoch)
        graph.replay()
        assert torch.equal(out.cpu(), all_of_it(pixels, ids, torch.tensor(epoch)))
