"""A vision transformer of the usual shape (width 192, 12 layers, 3 heads is ViT-Tiny): what people compare with."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sameday.kernels.dropout import PairDropout, keys_of, mix, name_key
from sameday.spec.vision import VitModel

EPS = 1e-6


class Layer(nn.Module):
    def __init__(self, shape: VitModel) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.before, self.between = nn.LayerNorm(width, EPS), nn.LayerNorm(width, EPS)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, shape.mlp * width), nn.Linear(shape.mlp * width, width)
        self.dropout = PairDropout(shape.dropout, shape.mlp * width)

    def forward(self, x: Tensor, row_keys: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        hidden = self.dropout(F.gelu(self.up(self.between(x))), row_keys)
        return x + self.down(hidden)


def through(layer: Layer, x: Tensor, row_keys: Tensor) -> Tensor:
    output: Tensor = layer(x, row_keys)
    return output


class ViT(nn.Module):
    token_keys: Tensor
    layer_keys: Tensor

    def __init__(self, shape: VitModel, image_size: int, classes: int, seed: int) -> None:
        super().__init__()
        self.shape, width = shape, shape.width
        self.tokens = shape.tokens(image_size)
        self.patches = nn.Conv2d(3, width, shape.patch, stride=shape.patch)
        if shape.pool == "class":
            self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, self.tokens, width))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.depth))
        self.register_buffer("token_keys", keys_of(self.tokens, "token"), persistent=False)
        self.register_buffer("layer_keys", keys_of(shape.depth, "layer"), persistent=False)
        self.after = nn.LayerNorm(width, EPS)
        self.head = nn.Linear(width, classes)
        self.run_layer: Callable[..., Tensor] = through  # what a plan may compile
        self._start(seed)

    @torch.no_grad()
    def _start(self, seed: int) -> None:
        """Matrices and positions from a normal distribution cut at two deviations, each from a key of its own."""
        for name, parameter in self.named_parameters():
            generator = torch.Generator().manual_seed(name_key("start", seed, name) & 0xFFFFFFFF)
            if name.endswith("bias") or name == "class_token":
                parameter.zero_()
            elif parameter.ndim > 1:
                nn.init.trunc_normal_(parameter, std=0.02, a=-0.04, b=0.04, generator=generator)

    def forward(self, pixels: Tensor, keys: Tensor | None = None) -> Tensor:
        """Logits of normalised pixels, (images, 3, size, size); `keys` (images,) int32 are for dropout."""
        if keys is None:
            keys = torch.zeros(len(pixels), dtype=torch.int32, device=pixels.device)
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        if self.shape.pool == "class":
            x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1)
        x = x + self.positions
        row_keys = mix(keys[:, None] ^ self.token_keys)
        for layer, key in zip(self.layers, self.layer_keys, strict=True):
            x = self.run_layer(layer, x, mix(row_keys ^ key))
        x = self.after(x)
        logits: Tensor = self.head(x[:, 0] if self.shape.pool == "class" else x.mean(1))
        return logits.float() if logits.dtype == torch.bfloat16 else logits


def forward_flops(shape: VitModel, image_size: int, classes: int) -> int:
    """Of the matmuls of one image; training takes three times as many."""
    patches = (image_size // shape.patch) ** 2
    tokens, width = shape.tokens(image_size), shape.width
    layer = tokens * width**2 * (4 + 2 * shape.mlp) + 2 * tokens**2 * width
    return 2 * (patches * 3 * shape.patch**2 * width + shape.depth * layer + width * classes)
