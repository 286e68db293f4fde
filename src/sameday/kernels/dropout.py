"""Dropout as a function of a key instead of a stream: what is dropped depends on (seed, step, question, place, layer)
and on nothing else, so neither micro-batches, ranks, recomputation nor a resume change it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash (two rounds of shift, xor and odd multiplication), elementwise on int32."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x21F0AAAD
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * 0x735A2D97
    return x ^ ((x >> 15) & 0x1FFFF)


def keeps(rows: Tensor, columns: Tensor, threshold: int) -> Tensor:
    """Where elements of these rows and columns are kept. Their keys are hashes already, so that the pair need not be
    hashed: a row draws for a column by one multiplication, with an odd number, modulo 2³²."""
    return columns * (rows | 1) + rows >= threshold


def name_key(*what: object) -> int:
    """A signed 32-bit key for a name, the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, what)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def keys_of(count: int, *what: object) -> Tensor:
    """A key for each of `count` places, made on the CPU and to be kept as a buffer: where torch.compile meets the
    counting itself, it counts in 64 bits, and the hash of a number comes out as another one."""
    return mix(torch.arange(count, dtype=torch.int32) ^ name_key(*what))


def step_key(seed: int, step: int) -> int:
    """By which a step's masks differ from another's."""
    return name_key("dropout", seed, step)


class DropoutKeys:
    """Where the running micro-batch's token keys are kept for all dropout layers of a model."""

    def __init__(self) -> None:
        self.tokens: Tensor | None = None

    def set(self, keys: Tensor, seed: int, step: int) -> None:
        """`keys` name each token of the batch, (rows, length), int32."""
        self.set_by(keys, step_key(seed, step))

    def set_by(self, keys: Tensor, step: int | Tensor) -> None:
        """The same with what `step_key` gives, which may be a tensor on the device."""
        self.tokens = mix(keys ^ step)

    def of(self, shape: torch.Size) -> Tensor:
        assert self.tokens is not None and self.tokens.shape == shape, "dropout keys are of another micro-batch"
        return self.tokens


class ImageKeys:
    """The same for layers that an image goes through. A key names a place in an image of some content: the same for
    every question about it, so that it does not matter whether the image is computed for each or once for all."""

    def __init__(self) -> None:
        self._images: list[tuple[int, int]] = []
        self._device = torch.device("cpu")
        self._made: dict[int, Tensor] = {}

    def set(self, contents: Sequence[str], sizes: Sequence[int], seed: int, step: int, device: torch.device) -> None:
        """Of the images of a micro-batch, one after the other: what names their content, and their patches."""
        keys = (name_key("image dropout", seed, step, content) for content in contents)
        self._images, self._device, self._made = list(zip(keys, sizes, strict=True)), device, {}

    def of(self, shape: torch.Size) -> Tensor:
        """Layers have as many rows of each image as it has patches, or a share of them where patches are merged."""
        rows, patches = math.prod(shape), sum(size for _, size in self._images)
        if rows not in self._made:
            each = [mix(torch.arange(n * rows // patches, dtype=torch.int32) ^ key) for key, n in self._images]
            self._made[rows] = torch.cat(each).to(self._device)
        return self._made[rows].view(shape)


class KeyedDropout(nn.Module):
    """Drops the same elements whenever the same tokens come by in the same step."""

    columns: Tensor

    def __init__(self, p: float, layer: str, width: int, keys: DropoutKeys | ImageKeys) -> None:
        super().__init__()
        self.p, self.keys = p, keys
        self.register_buffer("columns", keys_of(width, layer), persistent=False)
        # Elements that draw less than this are dropped.
        self.threshold = int(p * 2**32) - 2**31

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = keeps(self.keys.of(x.shape[:-1])[..., None], self.columns, self.threshold)
        return x * kept * (1 / (1 - self.p))


class PairDropout(nn.Module):
    """Dropout of units that come in pairs: one hash of a row's key and a pair's key decides for both, its low 16 bits
    for the even unit and its high 16 for the odd one. A fused kernel draws the same mask at half the price."""

    columns: Tensor

    def __init__(self, p: float, width: int) -> None:
        super().__init__()
        self.p = p
        self.threshold = round(p * 2**16)
        self.register_buffer("columns", keys_of(width // 2, "pair"), persistent=False)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """`rows` has a key for each row of x."""
        if not self.training or not self.threshold:
            return x
        hashed = mix(rows[..., None] ^ self.columns)
        halves = torch.stack([hashed & 0xFFFF, (hashed >> 16) & 0xFFFF], -1).flatten(-2)
        return x * (halves >= self.threshold) * (1 / (1 - self.threshold / 2**16))


def dropouts(module: nn.Module) -> list[nn.Module]:
    """The layers of a model that drop something while it trains."""
    return [m for m in module.modules() if isinstance(m, KeyedDropout | PairDropout | nn.Dropout) and m.p > 0]
