"""Random crops and flips as a function of (seed, epoch, sample), in whole numbers from the hash to the pixel: the same
bits on every device, whatever the micro-batch.

Nothing here asks the host for a value, and no shape depends on data: all of it can be captured. The two
tables are made at the first call for a device, which must come before a capture."""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import cache

import torch
from torch import Tensor

from sameday.kernels.dropout import mix, name_key

ATTEMPTS = 10
MAX_SIZE = 256
"""255 * (2 * 256)² is the largest sum of a pixel's products, and fits into 31 bits."""
MAX_RATIO = 256
_BITS = 16
_RATIOS = 1024


def draw(
    seed: int,
    epoch: int | Tensor,
    ids: Tensor,
    size: int,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: bool = True,
) -> Tensor:
    """For each sample of `ids` (n,) int64 a box of the image and whether it is mirrored: (n, 5) int64 of top, left,
    height, width, flipped.

    As torchvision's RandomResizedCrop: ten attempts at an area, uniform in `scale` times the whole, and at a ratio of
    width to height, log-uniform in `ratio`; the first that fits is put at a uniform place. Where none fits, the largest
    centred box of a ratio within bounds."""
    assert 0 < size <= MAX_SIZE, f"images of {size} pixels; 1 to {MAX_SIZE} are allowed"
    assert 0 < scale[0] <= scale[1] <= 1, f"scale {scale} is not within 0 to 1"
    assert 1 / MAX_RATIO <= ratio[0] <= ratio[1] <= MAX_RATIO, f"ratio {ratio}: 1/{MAX_RATIO} to {MAX_RATIO} is allowed"
    random = _random(seed, epoch, ids, ATTEMPTS + 3)

    low, high = (round(bound * 2**_BITS) for bound in scale)
    area = size * size * (low + ((random[:, :ATTEMPTS] >> 16) * (high - low + 1) >> 16))
    wide, tall = _ratios(ratio, ids.device)
    which = random[:, :ATTEMPTS] & (_RATIOS - 1)
    width, height = _rounded_root(area * wide[which], size), _rounded_root(area * tall[which], size)
    fits = (width > 0) & (width <= size) & (height > 0) & (height <= size)
    attempt = torch.arange(ATTEMPTS, device=ids.device)
    first = torch.where(fits, attempt, ATTEMPTS).amin(1, keepdim=True)
    any_fits = first < ATTEMPTS
    chosen = first.clamp(max=ATTEMPTS - 1)
    fallback_height = min(size, max(1, round(size / ratio[0])))
    fallback_width = min(size, max(1, round(size * ratio[1])))
    height = torch.where(any_fits, height.gather(1, chosen), fallback_height)
    width = torch.where(any_fits, width.gather(1, chosen), fallback_width)

    place = random[:, ATTEMPTS : ATTEMPTS + 2]
    free = size - torch.cat([height, width], 1)
    corner = torch.where(any_fits, place * (free + 1) >> 32, free >> 1)
    flipped = random[:, -1:] >> 31 if flip else torch.zeros_like(height)
    return torch.cat([corner, height, width, flipped], 1)


def apply(pixels: Tensor, boxes: Tensor) -> Tensor:
    """Each box scaled to the whole image, bilinear between pixels' centres: (n, s, s, 3) uint8 -> (n, 3, s, s) uint8.

    The source of output o lies at ((2o + 1) * h - s) / 2s, so weights are whole numbers over 2s in each direction; the
    sum of products is divided once, halves rounded up. A box never looks beyond its edges."""
    n, size = pixels.shape[:2]
    assert pixels.dtype == torch.uint8 and pixels.shape == (n, size, size, 3) and size <= MAX_SIZE, (
        f"pixels are {pixels.dtype} of shape {tuple(pixels.shape)}"
    )
    top, left, height, width, flipped = boxes[:, :, None].unbind(1)
    out = torch.arange(size, device=pixels.device)
    upper, lower, down = _sources(out, top, height, size)
    right_to_left = torch.where(flipped > 0, size - 1 - out, out)
    nearer, further, across = _sources(right_to_left, left, width, size)

    # Rows first, of all columns: whole rows lie together in memory.
    image = torch.arange(n, device=pixels.device)[:, None] * size
    lines = pixels.reshape(n * size, size * 3)
    rows = _between(lines, image + upper, image + lower, down, 2 * size)
    # Then columns, of rows turned into columns, so that what lies together is again what moves together.
    columns = rows.view(n, size, size, 3).transpose(1, 2).reshape(n * size, size * 3)
    sums = _between(columns, image + nearer, image + further, across, 2 * size)
    whole = (2 * size) ** 2
    rounded = sums.add_(whole // 2)
    values = rounded >> whole.bit_length() - 1 if whole & (whole - 1) == 0 else rounded // whole
    return values.to(torch.uint8).view(n, size, size, 3).permute(0, 3, 2, 1).contiguous()


def normalise(pixels: Tensor, mean: tuple[float, float, float], std: tuple[float, float, float]) -> Tensor:
    """(value / 255 - mean) / std of uint8 images (n, 3, s, s), as float32. Looked up, not computed: each of the 768
    values is rounded once, on the host."""
    table = _byte_table(mean, std, pixels.device)
    channel = torch.arange(0, 3 * 256, 256, device=pixels.device, dtype=torch.int32)[:, None, None]
    return table.index_select(0, (pixels.to(torch.int32) + channel).flatten()).view(pixels.shape)


def _random(seed: int, epoch: int | Tensor, ids: Tensor, count: int) -> Tensor:
    """(n, count) random numbers of 32 bits, from 0 on, in int64."""
    # Filled on the device: a number sent there would have to be waited for.
    turn = epoch if isinstance(epoch, Tensor) else torch.full((), epoch, dtype=torch.int64, device=ids.device)
    of_seed, of_epochs, of_columns = _keys(seed)
    key = mix(_low_half(ids) ^ of_seed)
    key = mix(key ^ _low_half(ids >> 32))
    key = mix(key ^ mix(_low_half(turn) ^ of_epochs))
    columns = torch.arange(count, device=ids.device, dtype=torch.int32)
    return mix(key[:, None] ^ mix(columns ^ of_columns)).to(torch.int64) & 0xFFFFFFFF


@cache
def _keys(seed: int) -> tuple[int, int, int]:
    return name_key("augment", seed), name_key("augment epoch"), name_key("augment column")


def _low_half(x: Tensor) -> Tensor:
    return (x.to(torch.int64) << 32 >> 32).to(torch.int32)


def _rounded_root(x: Tensor, size: int) -> Tensor:
    """The square root of x / 2^32, halves rounded up; what exceeds `size` is size + 1. Roots are not computed but
    looked up among the squares of k - 1/2, so that no float has a part in them."""
    odd = torch.arange(1, 2 * size + 2, 2, device=x.device)
    return torch.searchsorted(odd * odd, x >> 2 * _BITS - 2, right=True)


def _sources(out: Tensor, start: Tensor, length: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The two source places of each output place, and the second one's weight over 2 * size."""
    at = (2 * out + 1) * length - size
    before = at.div(2 * size, rounding_mode="floor")
    weight = (at - before * 2 * size).to(torch.int32)
    last = length - 1
    return start + before.clamp(min=0).minimum(last), start + (before + 1).minimum(last), weight


def _between(lines: Tensor, first: Tensor, second: Tensor, weight: Tensor, whole: int) -> Tensor:
    """`whole` times what lies between two lines each, as int32."""
    a = lines.index_select(0, first.view(-1)).to(torch.int32)
    b = lines.index_select(0, second.view(-1)).to(torch.int32)
    return (b - a).mul_(weight.view(-1, 1)).add_(a, alpha=whole)


@cache
def _ratios(ratio: tuple[float, float], device: torch.device) -> Tensor:
    """Ratios of width to height, evenly spaced in their logarithm, and their inverses, in units of 2^-16."""
    # Decimal rounds correctly; the C library's exp() differs between machines.
    with localcontext(prec=30):
        low, high = (Decimal(bound).ln() for bound in ratio)
        logs = [low + (high - low) * (2 * i + 1) / (2 * _RATIOS) for i in range(_RATIOS)]
        both = [[round((sign * log).exp() * 2**_BITS) for log in logs] for sign in (1, -1)]
    return torch.tensor(both, device=device)


@cache
def _byte_table(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> Tensor:
    values = [(value / 255 - m) / s for m, s in zip(mean, std, strict=True) for value in range(256)]
    return torch.tensor(values, dtype=torch.float64).to(torch.float32).to(device)
