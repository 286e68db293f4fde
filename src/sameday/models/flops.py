"""FLOPs of a micro-batch's matrix products, forward and backward, counted from the modules and the batch: what a plan's
kernels execute, and what the mathematics needs at least. A multiply-add is two; elementwise work is not counted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sameday.data.labelled.batch import ImageBatch
from sameday.data.questions.batch import Batch
from sameday.kernels.split import Segments
from sameday.models import vision_bdh, vit
from sameday.models.qwen_vl import QwenVL
from sameday.models.vision_bdh import VisionBDH
from sameday.models.vit import ViT

TILE = 128
"""Tokens in a tile of the fused attention kernels, flex's exactly and the others' about: what is masked is left out by
whole tiles."""
FUSED_BACKWARD, FLEX_BACKWARD = 5, 7
"""Products in the backward pass of kernels that keep no scores. Flex computes scores and their gradients twice."""


@dataclass(frozen=True)
class Flops:
    """`backward` is for gradients alone; `recomputed` is what the backward pass does of the forward pass again."""

    forward: int = 0
    backward: int = 0
    recomputed: int = 0

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.recomputed

    def __add__(self, other: Flops) -> Flops:
        return Flops(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Work:
    """By part. `tower` has its own attention and adapters in it, `layers` are the linear layers, or all of a vision
    model but its attention."""

    tower: Flops = Flops()
    layers: Flops = Flops()
    adapters: Flops = Flops()
    attention: Flops = Flops()
    head: Flops = Flops()

    @property
    def total(self) -> int:
        return sum(part.total for part in self.parts().values())

    def parts(self) -> dict[str, Flops]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __add__(self, other: Work) -> Work:
        return Work(**{name: part + getattr(other, name) for name, part in self.parts().items()})


@dataclass(frozen=True)
class Counted:
    """`executed`: recomputation, padding, masked pairs, unused logits and all. `needed`: each token that the loss
    depends on, once; pairs that see each other; the last layer only at places whose logits are read."""

    executed: Work
    needed: Work

    def __add__(self, other: Counted) -> Counted:
        return Counted(self.executed + other.executed, self.needed + other.needed)


def count(model: QwenVL | VisionBDH | ViT, batch: Batch | ImageBatch) -> Counted:
    """Of one micro-batch of training."""
    if isinstance(model, QwenVL):
        assert isinstance(batch, Batch)
        return Counted(executed(model, batch), needed(model, batch))
    assert isinstance(batch, ImageBatch)
    return count_images(model, len(batch))


def executed(model: QwenVL, batch: Batch) -> Work:
    return _qwen_vl(model, batch, executed_extent(model, batch), True)


def needed(model: QwenVL, batch: Batch) -> Work:
    """The same for every batch of these questions that shares the same prefixes."""
    extent = needed_extent(*(x.cpu().numpy() for x in (batch.group, batch.branch, batch.target_at)))
    return _qwen_vl(model, batch, extent, False)


# Attention


@dataclass(frozen=True)
class Pairs:
    """How many query-key pairs a kernel computes for one head, and its products in the backward pass; None where plain
    products compute only the gradients that are asked for."""

    count: int
    backward: int | None = None


def causal_pairs(length: int, tile: int = TILE) -> int:
    """Of a row in which each token sees those before it, computed in tiles."""
    ends = range(tile, length + tile, tile)
    return sum((min(end, length) - (end - tile)) * min(end, length) for end in ends)


def block_pairs(group: Tensor, branch: Tensor, tile: int = TILE) -> int:
    """Of flex attention: whole tiles in which some token sees some other."""
    rows, length = group.shape
    found = 0
    for first in range(0, length, tile):
        asking, keys = slice(first, first + tile), slice(0, first + tile)
        same_group = group[:, asking, None] == group[:, None, keys]
        reachable = (branch[:, None, keys] == 0) | (branch[:, asking, None] == branch[:, None, keys])
        seen = (same_group & reachable).tril(first).any(1)
        found += int(nn.functional.pad(seen, (0, -seen.shape[1] % tile)).view(rows, -1, tile).any(2).sum())
    return found * tile**2


def split_pairs(pieces: Segments, tile: int | None) -> int:
    """Of both calls. Without a tile, as in plain PyTorch, a piece is a whole square."""
    lengths = [cu.diff().tolist() for cu in (pieces.cu, pieces.cu_branch, pieces.cu_prefix)]
    near = sum(n**2 if tile is None else causal_pairs(n, tile) for n in lengths[0])
    return near + sum(branch * prefix for branch, prefix in zip(*lengths[1:], strict=True))


def is_fused(device: torch.device, kind: torch.dtype, heads: int, key_heads: int, width: int, masked: bool) -> bool:
    """Whether torch's scaled_dot_product_attention takes a fused kernel here, or plain products."""
    q, k = (torch.empty(1, n, 64, width, device=device, dtype=kind, requires_grad=True) for n in (heads, key_heads))
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool, device=device) if masked else None
    chosen = torch._fused_sdp_choice(q, k, k, mask, 0.0, not masked, enable_gqa=heads != key_heads)
    return bool(chosen != torch.nn.attention.SDPBackend.MATH.value)


def _attend(pairs: Pairs, heads: int, width: int, wanted: Sequence[bool]) -> Flops:
    """`wanted` says of queries, keys and values whether they need a gradient."""
    one = 2 * pairs.count * heads * width
    q, k, v = wanted
    plain = q + k + v + (q or k)
    return Flops(2 * one, one * (plain if pairs.backward is None or not plain else pairs.backward))


# Qwen-VL


@dataclass(frozen=True)
class Places:
    """Of one decoder layer: tokens that ask, through everything but keys and values; tokens that are seen; pairs."""

    asking: int
    seen: int
    pairs: Pairs


@dataclass(frozen=True)
class Extent:
    """What passes through the language model: each layer but the last, the last one, and the head."""

    each: Places
    last: Places
    logits: int


def executed_extent(model: QwenVL, batch: Batch) -> Extent:
    rows, length = batch.tokens.shape
    tokens = rows * length
    places = Places(tokens, tokens, _text_pairs(model, batch))
    return Extent(places, places, len(batch.target_at) if model.plan.label_only_logits else tokens)


def needed_extent(group: np.ndarray, branch: np.ndarray, target_at: np.ndarray) -> Extent:
    """Of rows as a Layout has them, whatever the order of their pieces. A token is needed where the logits that are
    read depend on it: prefixes, and branches up to their last label."""
    rows, length = group.shape
    labels = np.zeros(rows * length, bool)
    labels[target_at] = True
    tokens = pairs = asked_pairs = 0
    for r in range(rows):
        row_labels = labels[r * length : (r + 1) * length]
        for g in np.unique(group[r, group[r] >= 0]):
            pieces = branch[r] * (group[r] == g) - (group[r] != g)
            prefix = int((pieces == 0).sum())
            asked = [np.flatnonzero(row_labels[pieces == b]) + 1 for b in np.unique(pieces[pieces > 0])]
            lengths = [int(places.max(initial=0)) for places in asked]
            if not any(lengths):
                continue
            tokens += prefix + sum(lengths)
            pairs += _triangle(prefix) + sum(n * prefix + _triangle(n) for n in lengths)
            asked_pairs += sum(len(places) * prefix + int(places.sum()) for places in asked)
    count = int(labels.sum())
    return Extent(Places(tokens, tokens, Pairs(pairs)), Places(count, tokens, Pairs(asked_pairs)), count)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


def _text_pairs(model: QwenVL, batch: Batch) -> Pairs:
    rows, length = batch.tokens.shape
    config = model.text.config
    shape = (config.num_attention_heads, config.num_key_value_heads, _head_width(model))
    if batch.one_per_row:
        fused = is_fused(model.device, _kind(model), *shape, masked=False)
        return Pairs(rows * causal_pairs(length), FUSED_BACKWARD) if fused else Pairs(rows * length**2)
    if model.kernel == "split":
        assert batch.segments is not None
        flash = model.device.type == "cuda" and _kind(model) == torch.bfloat16
        return Pairs(split_pairs(batch.segments, TILE if flash else None), FUSED_BACKWARD)
    if model.kernel == "flex":
        return Pairs(block_pairs(batch.group.cpu(), batch.branch.cpu()), FLEX_BACKWARD)
    # Keys and values are repeated for it.
    fused = is_fused(model.device, _kind(model), shape[0], shape[0], shape[2], masked=True)
    return Pairs(rows * length**2, FUSED_BACKWARD if fused else None)


def _qwen_vl(model: QwenVL, batch: Batch, extent: Extent, executed: bool) -> Work:
    work, levels = _tower(model, batch, executed)
    again = executed and model.plan.checkpointing == "full"
    wanted = model.text.embed_tokens.weight.requires_grad or (bool(levels) and levels[0])
    layers = list(model.text.layers)
    for number, layer in enumerate(layers):
        places = extent.last if number == len(layers) - 1 else extent.each
        found, wanted = _decoder_layer(model, layer, places, wanted)
        if again and wanted:
            found = _with_recomputation(found, layer, places.asking, model.plan.compile != "none")
        work += found
        wanted = wanted or (number + 1 < len(levels) and levels[number + 1])
    head, _ = _linear(model.head, extent.logits, wanted)
    return work + Work(head=head.layers + head.adapters)


def _decoder_layer(model: QwenVL, layer: Any, places: Places, wanted: bool) -> tuple[Work, bool]:
    """The layer's products, and whether what comes out needs a gradient."""
    attention = layer.self_attn
    q, ask = _linear(attention.q_proj, places.asking, wanted)
    k, key = _linear(attention.k_proj, places.seen, wanted)
    v, value = _linear(attention.v_proj, places.seen, wanted)
    heads = model.text.config.num_attention_heads
    seen = Work(attention=_attend(places.pairs, heads, _head_width(model), (ask, key, value)))
    out, attended = _linear(attention.o_proj, places.asking, ask or key or value)
    mlp, through = _perceptron(layer.mlp, places.asking, wanted or attended)
    return q + k + v + seen + out + mlp, through


def _with_recomputation(work: Work, layer: Any, tokens: int, compiled: bool) -> Work:
    """Under full checkpointing. Uncompiled it ends with the last tensor that the backward pass asks for, which the
    layer's last product has as an input: that one is not computed again."""
    last = layer.mlp.down_proj
    where, product = ("adapters", [*last.lora_B.values()][-1]) if hasattr(last, "base_layer") else ("layers", last)
    parts = {name: replace(part, recomputed=part.forward) for name, part in work.parts().items()}
    if not compiled:
        spared, _ = _product(product, tokens, False)
        parts[where] = replace(parts[where], recomputed=parts[where].forward - spared.forward)
    return Work(**parts)


def _tower(model: QwenVL, batch: Batch, executed: bool) -> tuple[Work, list[bool]]:
    """And whether each of its levels needs a gradient, its output's first; no levels without images."""
    if not batch.grids:
        return Work(), []
    grids = [grid for grid, ready in zip(batch.grids, batch.ready, strict=True) if not ready]
    tower: Any = model.tower
    deep: Sequence[int] = getattr(tower, "deepstack_visual_indexes", ())
    if not grids:
        return Work(), [False] * (1 + len(deep))
    patches = sum(high * wide for high, wide in grids)
    merged = patches // model.patching.merge**2
    cut = tower.patch_embed.proj.weight
    embedding = 2 * patches * cut.numel()
    work = Work(layers=Flops(embedding, embedding * cut.requires_grad))
    wanted = cut.requires_grad
    heads = tower.blocks[0].attn.num_heads
    width = tower.config.hidden_size // heads
    fused = executed and is_fused(model.device, _kind(model), heads, heads, width, masked=False)
    levels: list[bool] = []
    for number, block in enumerate(tower.blocks):
        qkv, ask = _linear(block.attn.qkv, patches, wanted)
        pairs = Pairs(_image_pairs(tower, grids, number), FUSED_BACKWARD if fused else None)
        seen = Work(attention=_attend(pairs, heads, width, (ask, ask, ask)))
        out, attended = _linear(block.attn.proj, patches, ask)
        mlp, wanted = _perceptron(block.mlp, patches, wanted or attended)
        work += qkv + seen + out + mlp
        if number in deep:
            level, grows = _perceptron(tower.deepstack_merger_list[list(deep).index(number)], merged, wanted)
            work += level
            levels.append(grows)
    merger, grows = _perceptron(tower.merger, merged, wanted)
    work += merger
    return Work(tower=sum(work.parts().values(), Flops())), [grows, *levels]


def _image_pairs(tower: Any, grids: Sequence[tuple[int, int]], block: int) -> int:
    """Patches see all of their image, or all of their window in a block that has windows."""
    if block in getattr(tower, "fullatt_block_indexes", range(len(tower.blocks))):
        return sum((high * wide) ** 2 for high, wide in grids)
    from transformers.vision_utils import get_vision_window_index

    _, bounds = get_vision_window_index(
        torch.tensor([(1, high, wide) for high, wide in grids]),
        spatial_merge_size=tower.spatial_merge_size,
        window_size=tower.window_size,
        patch_size=tower.patch_size,
    )
    return int((bounds.diff() ** 2).sum())


def _perceptron(module: nn.Module, rows: int, wanted: bool) -> tuple[Work, bool]:
    """Linear layers of which all but the last take the input."""
    *first, last = _linears(module)
    work, grows = Work(), False
    for each in first:
        found, through = _linear(each, rows, wanted)
        work, grows = work + found, grows or through
    found, through = _linear(last, rows, grows)
    return work + found, wanted or through


def _linears(module: nn.Module) -> Iterator[Any]:
    for child in module.children():
        if isinstance(child, nn.Linear) or hasattr(child, "base_layer"):
            yield child
        else:
            yield from _linears(child)


def _linear(module: Any, rows: int, wanted: bool) -> tuple[Work, bool]:
    """A layer and its adapters, for an input that needs a gradient or not; and whether its output does."""
    base, grows = _product(getattr(module, "base_layer", module), rows, wanted)
    adapters = Flops()
    for name in module.lora_A if hasattr(module, "base_layer") else ():
        down, narrow = _product(module.lora_A[name], rows, wanted)
        up, wide = _product(module.lora_B[name], rows, narrow)
        adapters, grows = adapters + down + up, grows or wide
    return Work(layers=base, adapters=adapters), grows


def _product(linear: Any, rows: int, wanted: bool) -> tuple[Flops, bool]:
    """One product forward, one for the input's gradient and one for the weight's, where they are needed."""
    trained = linear.weight.requires_grad
    one = 2 * rows * linear.in_features * linear.out_features
    return Flops(one, one * (wanted + trained)), wanted or trained


def _head_width(model: QwenVL) -> int:
    return int(model.text.layers[0].self_attn.head_dim)


def _kind(model: QwenVL) -> torch.dtype:
    return torch.bfloat16 if model.recipe.precision == "bf16" else torch.float32


# Vision models


def count_images(model: VisionBDH | ViT, images: int) -> Counted:
    """Everything is trained: each product has two in the backward pass, but the patches', since pixels need none."""
    shape, tokens = model.shape, model.tokens
    patches = tokens - (shape.pool == "class")
    size, classes = math.isqrt(patches) * shape.patch, model.head.out_features
    embedding = 2 * patches * 3 * shape.patch**2 * shape.width
    head = 2 * shape.width * classes
    kernels = _bdh(model) if isinstance(model, VisionBDH) else _vit(model)
    forward = (vision_bdh if isinstance(model, VisionBDH) else vit).forward_flops(shape, size, classes)
    linear = forward - embedding - head - kernels.attention
    executed = Work(
        layers=Flops(images * (linear + embedding), images * (2 * linear + embedding)),
        attention=Flops(images * kernels.attention, images * kernels.backward),
        head=Flops(images * head, images * 2 * head),
    )
    needed = Work(
        layers=Flops(images * (kernels.linear + embedding), images * (2 * kernels.linear + embedding)),
        attention=Flops(images * kernels.least_attention, images * kernels.least_backward),
        head=executed.head,
    )
    return Counted(executed, needed)


@dataclass(frozen=True)
class _Vision:
    """Of one image: its attention as it is computed, and what is needed at least of its linear layers and attention."""

    attention: int
    backward: int
    linear: int
    least_attention: int
    least_backward: int


def _bdh(model: VisionBDH) -> _Vision:
    shape, T, D = model.shape, model.tokens, model.shape.width
    units, values = shape.latents * D, shape.heads * D
    # Scores are of latents with themselves: half of them are the other half, and one product gives their gradient.
    scores, fused = T**2 * units, model.kernel == "fused"
    asking = 1 if shape.pool == "class" else T
    below = shape.levels - 1
    last_scores, last_back = (T * units, 2 * T * units) if asking == 1 else (_triangle(T) * units, scores)
    return _Vision(
        attention=2 * shape.levels * (scores + T**2 * values),
        backward=2 * shape.levels * ((1 if fused else 2) * scores + 2 * T**2 * values),
        linear=2 * D * units * (below * 3 * T + T + 2 * asking),
        least_attention=2 * (below * (_triangle(T) * units + T**2 * values) + last_scores + asking * T * values),
        least_backward=2 * (below * (scores + 2 * T**2 * values) + last_back + 2 * asking * T * values),
    )


def _vit(model: ViT) -> _Vision:
    shape, T, D = model.shape, model.tokens, model.shape.width
    weight = model.head.weight
    fused = is_fused(weight.device, weight.dtype, shape.heads, shape.heads, D // shape.heads, masked=False)
    asking = 1 if shape.pool == "class" else T
    below = shape.depth - 1
    least = 4 * T * D * (below * T + asking)
    return _Vision(
        attention=4 * shape.depth * T**2 * D,
        backward=2 * (FUSED_BACKWARD if fused else 4) * shape.depth * T**2 * D,
        linear=2 * D**2 * (below * T * (4 + 2 * shape.mlp) + 2 * T + (2 + 2 * shape.mlp) * asking),
        least_attention=least,
        least_backward=2 * least,
    )
