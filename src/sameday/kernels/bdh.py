"""Vision-BDH's levels with few trips of the latents through memory: the forward pass stores each level's latents before
and after the gate once, and everything else is computed where it is used. The plain version is `models.vision_bdh`;
dropout draws the same mask in both.

Per level the kernels do encode, attend, gate and join; backward unjoin, ungate, pull, unattend, and five products that
the vendor's library does best."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

EPS = 1e-5


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Launch(NamedTuple):
    """How a kernel is launched: rows and columns of its tile, warps, stages of its pipeline, most registers."""

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None

    def over(self, tokens: int) -> Launch:
        """The same for a tile of tokens: more than 64 take twice the warps, and all registers."""
        return self if tokens <= 64 else self._replace(warps=2 * self.warps, registers=None)

    def options(self) -> dict[str, Any]:
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


class Tiles(NamedTuple):
    """Of each kernel. `attend`, `pull` and `unattend` take an image's tokens as their rows; the last of them is given
    the number of shares that a head's units are cut into instead."""

    encode: Launch
    attend: Launch
    gate: Launch
    ungate: Launch
    unattend: Launch
    pull: Launch = Launch(0, 0, 4, 1)
    join: Launch = Launch(8, 0, 4, 1)


TILES = Tiles(
    encode=Launch(128, 128, 8, 2),
    attend=Launch(0, 32, 4, 2, 168),
    gate=Launch(128, 32, 8, 2),
    ungate=Launch(128, 64, 8, 2, 128),
    unattend=Launch(1, 32, 4, 3, 168),
)
WIDE = Tiles(
    encode=Launch(64, 64, 4, 1),
    attend=Launch(0, 32, 4, 1),
    gate=Launch(64, 32, 4, 1),
    ungate=Launch(64, 32, 4, 1),
    unattend=Launch(1, 32, 4, 1),
    join=Launch(32, 0, 4, 1),
)
"""For float32 and float64, whose tiles take two and four times the room."""

SHARED_MEMORY = 227 * 1024
"""Bytes that a multiprocessor must be able to lend to one program: Hopper's, for which the tiles are cut."""

ENOUGH = 128
"""Programs that keep a device busy: with fewer row tiles than this the heads are divided too."""


def two_parts(size: int) -> tuple[int, int] | None:
    """A width as two powers of two, each at least 16, or None."""
    high = 1 << (size.bit_length() - 1)
    parts = (high // 2, high // 2) if high == size else (high, size - high)
    low = parts[1]
    return parts if low >= 16 and low & (low - 1) == 0 else None


def token_tile(tokens: int) -> tuple[int, int]:
    """A power of two of at least 16, and whether one token stands beside it: 65 is 64 and 1, 66 is padded to 128."""
    high = 1 << (tokens.bit_length() - 1)
    if high >= 16 and tokens - high <= 1:
        return high, tokens - high
    return max(16, 1 << (tokens - 1).bit_length()), 0


def refusal(width: int) -> str | None:
    """Why the kernels cannot do a model of this width, or None."""
    if two_parts(width) is None:
        return f"width {width} is not the sum of two powers of two of at least 16"
    return None


def too_many(width: int, tokens: int, itemsize: int) -> str | None:
    """Why an image of so many tokens has no room in a GPU's multiprocessor, or None. An image's tokens are one tile;
    beside them in shared memory lie the gradients of as many, or their scores."""
    tile, _ = token_tile(tokens)
    if max(3 * tile * width, tile * (tile + 2 * width)) * itemsize > SHARED_MEMORY:
        return f"{tokens} tokens of width {width} do not fit into one tile of a multiprocessor"
    return None


def untried(width: int, tokens: int, units: int) -> str | None:
    """Why a GPU is not given a shape in half precision, or None. 192 wide, with 64 or 65 tokens and 1,024 units a head,
    it agrees with plain levels. 32 wide it gave wrong results for 256 tokens, and an illegal access for 64, where
    Triton's interpreter finds nothing wrong: what is far from the first is left to plain levels."""
    if min(width, units) < 128 or token_tile(tokens)[0] > 64:
        shape = f"{tokens} tokens of width {width}, {units} units a head"
        return f"{shape}: in bf16 they are known to be right from 128 wide and 128 units, and up to 65 tokens"
    return None


def fused_levels(
    x: Tensor,
    encoder: Tensor,
    encoder_v: Tensor,
    decoder: Tensor,
    rotary: tuple[Tensor, Tensor],
    row_keys: Tensor,
    column_keys: Tensor,
    drop: float,
    levels: int,
    kind: torch.dtype,
) -> Tensor:
    """All levels. `x` is (images, tokens, width), normalised; the result is what the last level gives. `rotary` holds
    cosines and sines, (tokens, units / 2). `row_keys` (levels, images, tokens) and `column_keys` (heads * units / 2)
    are the keys of dropout. Products are in `kind`."""
    if kind == torch.bfloat16 and not x.is_cuda:
        raise ValueError("Triton's interpreter has no bf16: it would multiply the bits as whole numbers")
    heads, width, units = encoder.shape
    sides = [even_then_odd(w).permute(1, 0, 2).reshape(width, heads * units) for w in (encoder, encoder_v)]
    down = even_then_odd(decoder.view(heads, units, width).transpose(1, 2)).transpose(1, 2).reshape(-1, width)
    result: Tensor = _Levels.apply(
        x,
        *(w.to(kind) for w in (*sides, down)),
        rotary,
        row_keys,
        column_keys,
        drop,
        levels,
        heads,
        torch.is_grad_enabled(),
    )
    return result


def even_then_odd(weight: Tensor) -> Tensor:
    """The last axis in another order. Not by an index: its backward would be a scattered sum."""
    return weight.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


class _Levels(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        encoder: Tensor,
        encoder_v: Tensor,
        decoder: Tensor,
        rotary: tuple[Tensor, Tensor],
        row_keys: Tensor,
        column_keys: Tensor,
        drop: float,
        levels: int,
        heads: int,
        keep: bool,
    ) -> Tensor:
        run = _Run(x, encoder, encoder_v, decoder, rotary, row_keys, column_keys, drop, heads)
        flat = x.reshape(-1, x.shape[-1]).to(run.sums).contiguous()
        low = flat.to(run.kind)
        kept = []
        for level in range(levels):
            state = run.forward(flat, low, level, level == levels - 1, keep)
            flat, low = state.pop()
            if keep:
                kept.append(state)
        ctx.run, ctx.kept, ctx.like = run, kept, x
        return flat.view_as(x).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        run: _Run = ctx.run
        d_encoder, d_encoder_v, d_decoder = run.zeros()
        total = [grad.reshape(-1, grad.shape[-1]).to(run.sums).contiguous()]
        levels = len(ctx.kept)
        for level in reversed(range(levels)):
            # Popped: a level's latents are given back before those of the one below are used.
            last = level == levels - 1
            total = run.backward(ctx.kept.pop(), total, last, d_encoder, d_encoder_v, d_decoder)
        residual, by_head, by_encoder = total
        d_x = residual + by_head.to(run.sums).sum(0) + by_encoder.to(run.sums)
        joined = d_encoder_v.transpose(0, 1).reshape(d_encoder.shape)
        return d_x.view_as(ctx.like).to(ctx.like.dtype), d_encoder, joined, d_decoder, *[None] * 7


class _Run:
    """One pass over a batch: shapes, weights, and the launches of a level."""

    def __init__(
        self,
        x: Tensor,
        encoder: Tensor,
        encoder_v: Tensor,
        decoder: Tensor,
        rotary: tuple[Tensor, Tensor],
        row_keys: Tensor,
        column_keys: Tensor,
        drop: float,
        heads: int,
    ) -> None:
        import triton.language as tl

        self.images, self.tokens, self.width = x.shape
        self.encoder, self.encoder_v, self.decoder = (w.contiguous() for w in (encoder, encoder_v, decoder))
        self.kind, self.device = encoder.dtype, x.device
        self.tiles = TILES if self.kind.itemsize == 2 else WIDE
        self.sums = torch.float64 if self.kind == torch.float64 else torch.float32
        self.heads, self.half = heads, encoder.shape[1] // heads // 2
        self.rows, self.columns = self.images * self.tokens, encoder.shape[1]
        # float16 is eight times finer than the bf16 that a rotated latent is rounded to, and half of float32's bytes.
        table_type = torch.float16 if self.kind == torch.bfloat16 else self.sums
        self.cos, self.sin = (table.to(table_type).contiguous() for table in rotary)
        self.row_keys, self.column_keys = row_keys, column_keys
        self.threshold = round(drop * 2**16)
        self.scale = 1 / (1 - self.threshold / 2**16)
        widths = two_parts(self.width)
        assert widths is not None, refusal(self.width)
        self.sum = {"SUM": tl.float64 if self.kind == torch.float64 else tl.float32}
        self.part = {"D1": widths[0], "D2": widths[1]}
        self.tile, self.extra = token_tile(self.tokens)
        self.by_image = {"TILE": self.tile, "EXTRA": self.extra}
        self.shape = {"H": heads, "HALF": self.half}

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.kind, device=self.device)

    def zeros(self) -> list[Tensor]:
        shapes = ((self.width, self.columns), (self.heads, self.width, 2 * self.half), (self.columns, self.width))
        return [torch.zeros(shape, dtype=self.sums, device=self.device) for shape in shapes]

    def forward(self, x: Tensor, low: Tensor, level: int, last: bool, keep: bool) -> list[Any]:
        """What backward needs, and behind it the next level's x in both formats."""
        from sameday.kernels import bdh_triton as kernels

        M, tokens = self.rows, self.tokens
        s = self.empty(M, self.columns)
        how = self.tiles.encode
        grid: tuple[int, ...] = (-(-self.columns // how.columns), -(-M // how.rows))
        kernels.encode[grid](
            low,
            self.encoder,
            s,
            M,
            self.columns,
            **self.part,
            BM=how.rows,
            BN=how.columns,
            **self.sum,
            **how.options(),
        )
        y = self.empty(self.heads, M, self.width)
        programs = self.images * self.heads
        inverse, own = self.empty(self.heads, M, dtype=self.sums), self.empty(programs, dtype=self.sums)
        scores = self.empty(programs, self.tile + self.extra, self.tile)
        how = self.tiles.attend.over(self.tile)
        kernels.attend[(programs,)](
            s, low, self.cos, self.sin, y, inverse, scores, own, M, tokens,
            **self.shape, **self.part, **self.by_image, BN=how.columns, EPS=EPS, **self.sum, **how.options(),
        )  # fmt: skip
        how = self.tiles.gate
        row_tiles = -(-M // how.rows)
        parts = self.heads if row_tiles < ENOUGH else 1
        sums = self.empty(parts, M, self.width, dtype=self.sums)
        z = torch.empty_like(s) if keep else s
        kernels.gate[(row_tiles, parts)](
            y, s, self.encoder_v, self.decoder, sums, z, self.row_keys[level], self.column_keys,
            self.threshold, self.scale, M, **self.shape, HEADS=self.heads // parts, **self.part,
            BM=how.rows, BN=how.columns, DROP=self.threshold > 0, KEEP=keep, **self.sum, **how.options(),
        )  # fmt: skip
        out, following, following_low = torch.empty_like(x), torch.empty_like(x), torch.empty_like(low)
        how = self.tiles.join
        kernels.join[(-(-M // how.rows),)](
            x, sums, out, following, following_low, M,
            PARTS=parts, LAST=last, **self.part, BM=how.rows, EPS=EPS, **how.options(),
        )  # fmt: skip
        return [x, low, s, y, inverse, scores, own, z, out, (following, following_low)]

    def backward(
        self,
        kept: list[Tensor],
        incoming: Sequence[Tensor],
        last: bool,
        d_encoder: Tensor,
        d_encoder_v: Tensor,
        d_decoder: Tensor,
    ) -> list[Tensor]:
        """The gradient of the level's x in three parts that are still to be summed; the weights' are added up."""
        from sameday.kernels import bdh_triton as kernels

        x, low, s, y, inverse, scores, own, z, out = kept
        M, heads = self.rows, self.heads
        residual, d_out = torch.empty_like(x), torch.empty_like(low)
        parts = incoming if not last else (incoming[0], incoming[0], incoming[0])
        how = self.tiles.join
        kernels.unjoin[(-(-M // how.rows),)](
            x, out, *parts, residual, d_out, M,
            HEADS=heads, LAST=last, **self.part, BM=how.rows, EPS=EPS, **how.options(),
        )  # fmt: skip
        d_v, d_s = torch.empty_like(s), torch.empty_like(s)
        how = self.tiles.ungate
        kernels.ungate[(-(-M // how.rows), heads)](
            s, z, self.decoder, d_out, d_v, d_s, self.scale, M, self.columns,
            SHARE=2 * self.half, **self.part, BM=how.rows, BN=how.columns, **self.sum, **how.options(),
        )  # fmt: skip
        _add_product(d_decoder, z.t(), d_out)
        del z
        by_head = d_v.view(M, heads, -1).transpose(0, 1)
        _add_product(d_encoder_v, y.transpose(1, 2), by_head)
        weight = self.encoder_v.view(self.width, heads, -1).permute(1, 2, 0)
        d_y = torch.bmm(by_head, weight)
        del d_v, by_head
        d_value, d_scores, d_own = (torch.empty_like(tensor) for tensor in (y, scores, own))
        kernels.pull[(self.images * heads,)](
            low, y, inverse, scores, own, d_y, d_value, d_scores, d_own, M, self.tokens,
            H=heads, **self.part, **self.by_image, **self.sum, **self.tiles.pull.over(self.tile).options(),
        )  # fmt: skip
        how = self.tiles.unattend.over(self.tile)
        shares = how.rows or 1
        kernels.unattend[(self.images * heads, shares)](
            s, self.cos, self.sin, d_scores, d_own, d_s, self.tokens,
            **self.shape, SHARE=-(-self.half // shares), **self.by_image, BN=how.columns, **self.sum, **how.options(),
        )  # fmt: skip
        _add_product(d_encoder, low.t(), d_s)
        return [residual, d_value, d_s @ self.encoder.t()]


def _add_product(onto: Tensor, a: Tensor, b: Tensor) -> None:
    """onto += a @ b, summed in the wider format."""
    multiply = torch.mm if a.ndim == 2 else torch.bmm
    if a.dtype == onto.dtype:
        onto += multiply(a, b)
    elif a.is_cuda:
        add = torch.addmm if a.ndim == 2 else torch.baddbmm
        add(onto, a, b, out_dtype=onto.dtype, out=onto)
    else:
        onto += multiply(a.to(onto.dtype), b.to(onto.dtype))
