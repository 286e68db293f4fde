"""FLOPs of a micro-batch of questions through a vision-language model: as the plan executes it, and what is needed at
least. What differs between families is asked of the family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sameday.data.questions.batch import Batch
from sameday.kernels.attention import visible
from sameday.models.flops import (
    FUSED_BACKWARD,
    PIECES_TILE,
    TILE,
    TWO_PASS_BACKWARD,
    Counted,
    Flops,
    Pairs,
    Places,
    Work,
    block_pairs,
    causal_pairs,
    is_fused,
    linear_flops,
    matmul_flops,
    mlp_flops,
    split_pairs,
    tile_pairs,
    triangle,
)
from sameday.models.vlm import VisionLanguageModel
from sameday.spec.plan import OF_PIECES


def count(model: VisionLanguageModel, batch: Batch, at: Tensor | None) -> Counted:
    """Of one micro-batch of training. `at`: the only places where the last layer's MLP is computed; None for all."""
    return Counted(executed(model, batch, at), needed(model, batch))


def executed(model: VisionLanguageModel, batch: Batch, at: Tensor | None) -> Work:
    return _work(model, batch, {kind: executed_extent(model, batch, kind, at) for kind in set(model.kinds)}, True)


def needed(model: VisionLanguageModel, batch: Batch) -> Work:
    """The same for every batch of these questions that shares the same prefixes."""
    batch = batch.to(torch.device("cpu"))
    extent = needed_extent(*(x.numpy() for x in (batch.group, batch.branch, batch.fork, batch.target_at)))
    return _work(model, batch, {kind: _seen(model, batch, kind, extent) for kind in set(model.kinds)}, False)


@dataclass(frozen=True)
class Extent:
    """What passes through the language model: each layer but the last, the last one, its MLP, and the head."""

    each: Places
    last: Places
    last_mlp: int
    logits: int


def executed_extent(model: VisionLanguageModel, batch: Batch, kind: str, at: Tensor | None) -> Extent:
    rows, length = batch.tokens.shape
    tokens = rows * length
    places = Places(tokens, tokens, _text_pairs(model, batch, kind))
    logits = len(batch.target_at) if model.plan.label_only_logits else tokens
    return Extent(places, places, tokens if at is None else len(at), logits)


def needed_extent(group: np.ndarray, branch: np.ndarray, fork: np.ndarray, target_at: np.ndarray) -> Extent:
    """Of rows as a Layout has them, whatever the order of their pieces. A token is needed where the logits that are
    read depend on it: prefixes and forks, and branches up to their last label."""
    rows, length = group.shape
    labels = np.zeros(rows * length, bool)
    labels[target_at] = True
    tokens = pairs = asked_pairs = 0
    for r in range(rows):
        row_labels = labels[r * length : (r + 1) * length]
        for g in np.unique(group[r, group[r] >= 0]):
            pieces = branch[r] * (group[r] == g) - (group[r] != g)
            shared = np.bincount(fork[r, pieces == 0], minlength=1)  # of the prefix, and of each fork
            needed = set()
            for b in np.unique(pieces[pieces > 0]):
                mine = pieces == b
                places = np.flatnonzero(row_labels[mine]) + 1
                if not len(places):
                    continue
                f, own = int(fork[r, mine][0]), int(places.max())
                before = int(shared[0] + (shared[f] if f else 0))
                tokens += own
                pairs += own * before + triangle(own)
                asked_pairs += len(places) * before + int(places.sum())
                needed |= {0, f}
            for f in needed:
                tokens += int(shared[f])
                pairs += triangle(int(shared[f])) + (int(shared[f] * shared[0]) if f else 0)
    count = int(labels.sum())
    return Extent(Places(tokens, tokens, Pairs(pairs)), Places(count, tokens, Pairs(asked_pairs)), count, count)


def _seen(model: VisionLanguageModel, batch: Batch, kind: str, extent: Extent) -> Extent:
    """The same tokens, with the pairs that layers of this kind see, which may be others."""
    if model.family.sight(model.text, batch, kind) is None:
        return extent
    seen = _dense(model, batch, kind).flatten(0, 1)
    usual = visible(batch.group, batch.branch, batch.fork)[:, 0].flatten(0, 1)
    labels = torch.zeros(len(seen), dtype=torch.bool)
    labels[batch.target_at] = True
    rows, length = batch.tokens.shape
    needed = (usual & labels[:, None]).view(rows, length, length).any(1).flatten()
    each, last = (Pairs(int(seen[asking].sum())) for asking in (needed, labels))
    return replace(extent, each=replace(extent.each, pairs=each), last=replace(extent.last, pairs=last))


def _dense(model: VisionLanguageModel, batch: Batch, kind: str) -> Tensor:
    """Who sees whom, (rows, length, length)."""
    mask = model.family.mask(model.text, batch.to(torch.device("cpu")), "sdpa", kind)
    assert isinstance(mask, Tensor)
    return mask[:, 0]


def _text_pairs(model: VisionLanguageModel, batch: Batch, kind: str) -> Pairs:
    rows, length = batch.tokens.shape
    heads, key_heads, width = model.family.heads(model.text)
    dtype = _dtype(model)
    sight = model.family.sight(model.text, batch, kind)
    if model.kernel == "fused" and batch.segments is not None:
        return Pairs(split_pairs(batch.segments, PIECES_TILE), TWO_PASS_BACKWARD)
    if model.kernel == "split" and batch.segments is not None:
        flash = model.device.type == "cuda" and dtype == torch.bfloat16
        return Pairs(split_pairs(batch.segments, TILE if flash else None), FUSED_BACKWARD)
    if batch.one_per_row and sight is None:
        fused = is_fused(model.device, dtype, heads, key_heads, width, masked=False)
        return Pairs(rows * causal_pairs(length), FUSED_BACKWARD) if fused else Pairs(rows * length**2)
    assert model.kernel not in OF_PIECES, "it is for packed rows"
    if model.kernel == "flex" and sight is not None:
        return Pairs(tile_pairs(_dense(model, batch, kind)), TWO_PASS_BACKWARD)
    if model.kernel == "flex":
        return Pairs(block_pairs(batch.group.cpu(), batch.branch.cpu(), batch.fork.cpu()), TWO_PASS_BACKWARD)
    # Keys and values are repeated for it.
    fused = is_fused(model.device, dtype, heads, heads, width, masked=True)
    return Pairs(rows * length**2, FUSED_BACKWARD if fused else None)


def _work(model: VisionLanguageModel, batch: Batch, extents: Mapping[str, Extent], executed: bool) -> Work:
    work, features = _tower(model, batch, executed)
    again = model.plan.checkpointing if executed else "none"
    wanted = model.text.embed_tokens.weight.requires_grad or (bool(features) and features[0])
    layers = list(model.text.layers)
    for number, (layer, kind) in enumerate(zip(layers, model.kinds, strict=True)):
        last = number == len(layers) - 1
        places = extents[kind].last if last else extents[kind].each
        behind = extents[kind].last_mlp if last else places.asking
        wanted = wanted or (executed and number == model.alike_from)
        attended, through = model.family.attention_work(model.text, layer, places, wanted)
        mlp, wanted = mlp_flops(layer.mlp, behind, wanted or through)
        work += attended + mlp
        whole = behind == places.asking  # else the MLP keeps what it needs
        if again == "full" and wanted and whole:
            work += _recomputed_whole(model, layer, attended + mlp, places)
        elif again != "none":
            halves = attended if through else None, mlp if wanted and whole else None
            work += _recomputed_partly(model, layer, *halves, places, keeps=again == "selective")
        wanted = wanted or (number + 1 < len(features) and features[number + 1])
    head, _ = linear_flops(model.head, extents[model.kinds[-1]].logits, wanted)
    return work + Work(head=head.layers + head.adapters)


def _recomputed_whole(model: VisionLanguageModel, layer: Any, work: Work, places: Places) -> Work:
    """Of a layer that keeps its input."""
    *_, behind = model.family.norms(layer)
    return _again(work, Work() if behind is not None else _spared(model, layer.mlp.down_proj, places))


def _recomputed_partly(
    model: VisionLanguageModel, layer: Any, attended: Work | None, mlp: Work | None, places: Places, keeps: bool
) -> Work:
    """Of a layer that `keeps` what fused kernels of attention give, and in any case what o_proj makes of it. Its
    halves, None where nothing of it has a gradient, or all is kept."""
    work = Work()
    if attended is not None:
        # Uncompiled layers call flex attention as a compiled function, into which nobody sees.
        two_passes = places.pairs.backward == TWO_PASS_BACKWARD
        opaque = model.kernel == "flex" and two_passes and model.plan.compile == "none"
        fused = keeps and places.pairs.backward is not None and not opaque
        kept = Work(attention=attended.attention) if fused else Work()
        work += _again(attended, kept + _spared(model, layer.self_attn.o_proj, places))
    if mlp is not None:
        work += _again(mlp, _spared(model, layer.mlp.down_proj, places))
    return work


def _spared(model: VisionLanguageModel, last: Any, places: Places) -> Work:
    """What is not computed again of the linear layer that ends what is: no gradient depends on its result. Uncompiled
    recomputation ends with the last tensor that a gradient depends on, and PEFT computes a layer before its adapter."""
    if not hasattr(last, "base_layer"):
        return Work(layers=matmul_flops(last, places.asking, False)[0])
    if len(last.lora_magnitude_vector):
        return Work()  # DoRA's lengths need what the layer gives for their gradient
    up = Work(adapters=matmul_flops([*last.lora_B.values()][-1], places.asking, False)[0])
    if model.plan.compile == "none":
        return up
    return up + Work(layers=matmul_flops(last.base_layer, places.asking, False)[0])


def _again(work: Work, spared: Work) -> Work:
    parts = {}
    for name, part in work.parts().items():
        again = part.forward - spared.parts()[name].forward
        # Layers in fp8 have the same share of both passes.
        parts[name] = Flops(recomputed=again, fp8=part.fp8 * again // max(1, part.forward + part.backward))
    return Work(**parts)


def _tower(model: VisionLanguageModel, batch: Batch, executed: bool) -> tuple[Work, list[bool]]:
    """And whether each of its tensors needs a gradient, its output and DeepStack's; none without images."""
    if not batch.grids:
        return Work(), []
    grids = [grid for grid, ready in zip(batch.grids, batch.ready, strict=True) if not ready]
    if not grids:
        return Work(), [False] * model.feature_shape[0]

    def backward_matmuls(heads: int, width: int) -> int | None:
        fused = executed and is_fused(model.device, _dtype(model), heads, heads, width, masked=False)
        return FUSED_BACKWARD if fused else None

    work, features = model.family.tower_flops(model.tower, grids, model.patching.merge, backward_matmuls)
    return Work(tower=sum(work.parts().values(), Flops())), features


def _dtype(model: VisionLanguageModel) -> torch.dtype:
    return torch.bfloat16 if model.recipe.precision == "bf16" else torch.float32
