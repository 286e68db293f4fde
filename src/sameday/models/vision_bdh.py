"""Vision-BDH: levels that share one set of weights, sparse non-negative latents, attention without softmax.

Written to be read; `kernels.bdh` computes the same levels fast, and is compared with this."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sameday.kernels.bdh import EPS, fused_levels
from sameday.kernels.dropout import PairDropout, keys_of, mix, name_key
from sameday.spec.vision import BdhModel

THETA = 2.0**16


class VisionBDH(nn.Module):
    """`shape` is recipe; `kernel` (plain or fused) is plan and changes rounding at most."""

    token_keys: Tensor
    level_keys: Tensor
    encoder: nn.Parameter
    encoder_v: nn.Parameter
    decoder: nn.Parameter

    def __init__(self, shape: BdhModel, image_size: int, classes: int, seed: int) -> None:
        super().__init__()
        self.shape, self.kernel = shape, "plain"
        width, heads = shape.width, shape.heads
        self.units = shape.units
        self.tokens = shape.tokens(image_size)
        self.patches = nn.Conv2d(3, width, shape.patch, stride=shape.patch)
        if shape.pool == "class":
            self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, self.tokens, width))
        self.encoder = nn.Parameter(torch.empty(heads, width, self.units))
        self.encoder_v = nn.Parameter(torch.empty(heads, width, self.units))
        self.decoder = nn.Parameter(torch.empty(heads * self.units, width))
        self.dropout = PairDropout(shape.dropout, heads * self.units)
        self.register_buffer("token_keys", keys_of(self.tokens, "token"), persistent=False)
        self.register_buffer("level_keys", keys_of(shape.levels, "level"), persistent=False)
        self.head = nn.Linear(width, classes)
        self._tables: tuple[Tensor, Tensor] | None = None
        self.run_layer: Callable[..., Tensor] = type(self).level  # what a plan may compile
        self._start(seed)

    @torch.no_grad()
    def _start(self, seed: int) -> None:
        """Each parameter from a key of its own: (seed, name)."""
        for name, parameter in self.named_parameters():
            generator = torch.Generator().manual_seed(name_key("start", seed, name) & 0xFFFFFFFF)
            published = self.shape.start == "xavier"
            if name in ("encoder", "encoder_v", "decoder") or (published and name.endswith(".weight")):
                nn.init.xavier_uniform_(parameter, generator=generator)
            elif name == "positions":
                parameter.normal_(0, 0.02, generator=generator)
            elif published or name == "class_token":
                parameter.zero_()
            else:
                inputs = 3 * self.shape.patch**2 if name.startswith("patches") else self.shape.width
                parameter.uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)

    def forward(self, pixels: Tensor, keys: Tensor | None = None) -> Tensor:
        """Logits of normalised pixels, (images, 3, size, size). `keys` (images,) int32 name each image in this step,
        for dropout; evaluation needs none."""
        if keys is None:
            keys = torch.zeros(len(pixels), dtype=torch.int32, device=pixels.device)
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        if self.shape.pool == "class":
            x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1)
        x = self.levels(norm(x + self.positions), self.row_keys(keys))
        pooled = x[:, 0] if self.shape.pool == "class" else x.mean(1)
        logits: Tensor = self.head(norm(pooled))
        return logits.float() if logits.dtype == torch.bfloat16 else logits

    def levels(self, x: Tensor, row_keys: Tensor) -> Tensor:
        if self.kernel == "fused":
            drop = self.dropout.p if self.dropout.training else 0.0
            kind = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
            weights = (self.encoder, self.encoder_v, self.decoder)
            return fused_levels(
                x, *weights, self.rotary(x.device), row_keys, self.dropout.columns, drop, self.shape.levels, kind
            )
        for level in range(self.shape.levels):
            x = self.run_layer(self, x if level == 0 else norm(x), row_keys[level], *self.rotary(x.device))
        return x

    def level(self, x: Tensor, row_keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One level of normalised x, (images, tokens, width)."""
        each = x[:, None]
        s = F.relu(each @ self.encoder)
        r = rotate(s, cos, sin)
        scores = r @ r.transpose(-1, -2)
        if self.shape.attention == "softmax":
            scores = F.softmax(scores.to(torch.promote_types(scores.dtype, torch.float32)) / math.sqrt(self.units), -1)
        y = norm(scores @ each)
        z = s * F.relu(y @ self.encoder_v)
        z = self.dropout(z.transpose(1, 2).flatten(2), row_keys)
        return norm(x + norm(z @ self.decoder))

    def rotary(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each token and pair of units."""
        kind = torch.promote_types(self.encoder.dtype, torch.float32)
        if self._tables is None or self._tables[0].device != device or self._tables[0].dtype != kind:
            self._tables = rotary_tables(self.tokens, self.units, device, kind)
        return self._tables

    def row_keys(self, keys: Tensor) -> Tensor:
        """A key for each level, image and token, (levels, images, tokens)."""
        return mix(mix(keys[:, None] ^ self.token_keys)[None] ^ self.level_keys[:, None, None])


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


def rotary_tables(tokens: int, units: int, device: torch.device, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Angles grow with the token and fall with the unit: token * 65536^(-2k / units) for pair k."""
    # In float64: at token 64 a float32 angle would be off by as much as the table's own rounding.
    pairs = torch.arange(units // 2, dtype=torch.float64, device=device)
    angles = torch.arange(tokens, dtype=torch.float64, device=device)[:, None] * THETA ** (-2 * pairs / units)
    return angles.cos().to(kind), angles.sin().to(kind)


def rotate(s: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair of neighbouring units turned by its angle."""
    even, odd = s.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def forward_flops(shape: BdhModel, image_size: int, classes: int) -> int:
    """Of the matmuls of one image; training takes three times as many."""
    patches = (image_size // shape.patch) ** 2
    tokens, width = shape.tokens(image_size), shape.width
    units = shape.latents * width
    level = 3 * tokens * width * units + tokens**2 * (units + shape.heads * width)
    return 2 * (patches * 3 * shape.patch**2 * width + shape.levels * level + width * classes)
