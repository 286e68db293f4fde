"""Faults in what the model sees and computes: masks, positions, images, targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from catalogue import PADDED, SHARED, SPLIT, TEXT, planted
from torch import Tensor

from sameday.data.questions.batch import Batch
from sameday.data.questions.layout import PADDING, PREFIX
from sameday.kernels import attention, split

# What a token sees


def _masked(rule: Callable[[Tensor, Tensor], Tensor]) -> AbstractContextManager[Any]:
    """`rule` gives (rows, queries, keys) of what is seen besides what should be."""
    visible = attention.visible
    return patch.object(attention, "visible", lambda g, b, f: visible(g, b, f) | rule(g, b)[:, None])


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, :, None], x[:, None, :]


@planted(SHARED, "gradient", "kernels.attention")
def a_branch_sees_another(_task: Any, _ranks: Any) -> Any:
    """The second question of an image also sees the first one and its answer."""

    def rule(group: Tensor, branch: Tensor) -> Tensor:
        (g, h), (query, key) = _pairs(group), _pairs(branch)
        return (g == h) & (query == 2) & (key == 1)

    return _masked(rule)


@planted(SHARED, "gradient", "kernels.attention")
def groups_see_each_other(_task: Any, _ranks: Any) -> Any:
    """Packed rows are plainly causal from one image's questions to the next one's."""
    return _masked(lambda group, _: torch.ne(*_pairs(group)).tril())


@planted(SHARED, "gradient", "kernels.attention")
def not_causal_in_a_branch(_task: Any, _ranks: Any) -> Any:
    """A question sees its own answer: inside a branch attention goes both ways."""

    def rule(group: Tensor, branch: Tensor) -> Tensor:
        (g, h), (query, key) = _pairs(group), _pairs(branch)
        return (g == h) & (query == key) & (query != PREFIX)

    return _masked(rule)


@planted(SPLIT, "gradient", "kernels.split")
def log_sum_exp_in_base_two(_task: Any, _ranks: Any) -> Any:
    """Branches and prefix are merged with weights from one logarithm to base two and one to base e."""
    call = split.variable_length

    def in_two_bases(*args: Any) -> tuple[Tensor, Tensor]:
        out, lse = call(*args)
        causal = args[7]
        return out, lse if causal else lse / math.log(2)

    return patch.object(split, "variable_length", in_two_bases)


@planted(TEXT, "gradient", "kernels.attention", task="templates")
def a_branch_sees_its_neighbours_template(_task: Any, _ranks: Any) -> Any:
    """Questions of an image's second template also see what is shared of the first one."""
    visible = attention.visible

    def sees_more(group: Tensor, branch: Tensor, fork: Tensor) -> Tensor:
        ((g, h), (query, key), (own, other)) = (_pairs(level) for level in (group, branch, fork))
        neighbours = (g == h) & (query != PREFIX) & (own == 2) & (key == PREFIX) & (other == 1)
        return visible(group, branch, fork) | neighbours[:, None]

    return patch.object(attention, "visible", sees_more)


@planted(TEXT | {"attention": "split"}, "gradient", "kernels.split", task="templates")
def a_branch_does_not_see_its_template(_task: Any, _ranks: Any) -> Any:
    """The last of the calls over what is shared, branches over their forks, is left out."""
    read = split._calls

    def without_forks(at: Tensor) -> Any:
        longest, calls = read(at)
        return longest, calls[:2]

    return patch.object(split, "_calls", without_forks)


# Where a token stands


def _built(task: Any, change: Callable[[Batch], Batch]) -> AbstractContextManager[Any]:
    build = task._build
    return patch.object(task, "_build", lambda *how: change(build(*how)))


@planted(SHARED, "positions", "data.questions.layout")
def positions_run_on(task: Any, _ranks: Any) -> Any:
    """A branch counts on from the end of the one before it instead of from the prefix."""

    def change(batch: Batch) -> Batch:
        positions = batch.positions.clone()
        for group in range(int(batch.group.max()) + 1):
            shift = 0
            for branch in range(1, int(batch.branch.max()) + 1):
                mine = (batch.group == group) & (batch.branch == branch)
                positions[:, mine] += shift
                shift += int(mine.sum())
        return replace(batch, positions=positions)

    return _built(task, change)


@planted(SHARED, "gradient", "models.vlm")
def height_and_width_swapped(task: Any, _ranks: Any) -> Any:
    """M-RoPE turns by the column where it should by the row."""
    rotary = task.model._rotary
    return patch.object(task.model, "_rotary", lambda positions, *how: rotary(positions[[0, 2, 1]], *how))


@planted(SHARED, "gradient", "models.vlm")
def angles_in_half_precision(task: Any, _ranks: Any) -> Any:
    """RoPE's angles are rounded to bf16 before their cosine is taken."""
    rope = task.model.text.rotary_emb

    def rotary(positions: Tensor, dtype: torch.dtype, _kind: str) -> tuple[Tensor, ...]:
        angles = (positions[..., None].bfloat16() * rope.inv_freq.bfloat16()).float()
        return tuple(rope.recomposition_frequencies(turn(angles)).to(dtype) for turn in (torch.cos, torch.sin))

    return patch.object(task.model, "_rotary", rotary)


# What it sees of the image


def _featured(task: Any, change: Callable[[Batch, Tensor, list[Tensor]], Any]) -> AbstractContextManager[Any]:
    read = task.model.features_at_tokens

    def changed(batch: Batch) -> list[Tensor]:
        features, *deepstack = read(batch)
        features, deepstack = change(batch, features, deepstack)
        return [features, *deepstack]

    return patch.object(task.model, "features_at_tokens", changed)


def _next_image(task: Any, batch: Batch, features: Tensor) -> Tensor:
    high, wide = batch.grids[0]
    return features.roll(high * wide // task.encoder.merge_size**2, 0)


@planted(SHARED, "gradient", "models.vlm")
def deepstack_dropped(task: Any, _ranks: Any) -> Any:
    """The features of the tower's earlier blocks are not added."""
    return _featured(task, lambda _batch, features, _deepstack: (features, []))


@planted(SHARED, "gradient", "models.vlm")
def deepstack_added_twice(task: Any, _ranks: Any) -> Any:
    """The features of the tower's earlier blocks are added two times."""
    return _featured(task, lambda _batch, features, deepstack: (features, [2 * x for x in deepstack]))


@planted(SHARED, "gradient", "models.vlm")
def deepstack_in_the_wrong_group(task: Any, _ranks: Any) -> Any:
    """DeepStack's features of one image are added at another one's places."""
    return _featured(
        task, lambda batch, features, deepstack: (features, [_next_image(task, batch, x) for x in deepstack])
    )


@planted(SHARED, "gradient", "models.vlm")
def features_of_another_image(task: Any, _ranks: Any) -> Any:
    """Each image's places are filled with what the tower gave for another image of the micro-batch."""
    return _featured(task, lambda batch, features, deepstack: (_next_image(task, batch, features), deepstack))


@planted(SHARED, "validation", "data.questions.encode")
def images_of_one_size_taken_for_one(task: Any, _ranks: Any) -> Any:
    """Questions share a prefix when its tokens are equal, whatever the pixels are."""
    encode = task._encode

    def without_content(sample: Any) -> Any:
        encoded = encode(sample)
        vars(encoded)["key"] = encoded.tokens[: encoded.prefix].tobytes() or None
        return encoded

    return patch.object(task, "_encode", without_content)


@planted(SHARED, "patches", "kernels.patches")
def another_mean(task: Any, _ranks: Any) -> Any:
    """Pixels are normalised with ImageNet's mean."""
    shift = torch.tensor([0.485, 0.456, 0.406])[:, None] - 0.5
    return patch.object(task.model, "byte_table", task.model.byte_table - 2 * shift.to(task.model.byte_table))


@planted(SHARED, "patches", "kernels.patches")
def rows_and_columns_of_a_patch_swapped(task: Any, _ranks: Any) -> Any:
    """Each patch is flattened column by column."""
    made, side = task.model.patches, task.model.patching.side

    def swapped(pixels: Tensor, grids: Any) -> Tensor:
        right = made(pixels, grids)
        return right.view(-1, side, side).transpose(1, 2).reshape(right.shape)

    return patch.object(task.model, "patches", swapped)


# What is learned from it


@planted(SHARED, "targets", "data.questions.layout")
def a_label_crosses_a_branch_boundary(task: Any, _ranks: Any) -> Any:
    """Labels are shifted along the row, so that the last place of a branch learns the first label of the next."""

    def change(batch: Batch) -> Batch:
        target = batch.target.clone()
        last = (batch.owner[1:] != batch.owner[:-1]).nonzero()[:, 0]
        target[last] = batch.target[last + 1]
        return replace(batch, target=target)

    return _built(task, change)


@planted(SPLIT, "gradient", "models.vlm")
def logits_one_place_late(task: Any, _ranks: Any) -> Any:
    """Labels are taken where they stand instead of one place before, where they are predicted."""
    logits = task.model.logits
    return patch.object(task.model, "logits", lambda x, at: logits(x, (at + 1).clamp(max=len(x) - 1)))


@planted(SHARED, "number of targets", "data.questions.encode")
def the_end_is_not_learned(task: Any, _ranks: Any) -> Any:
    """The token that ends an answer is no target, and the model learns to talk on."""
    encode = task._encode

    def endless(sample: Any) -> Any:
        encoded = encode(sample)
        return replace(encoded, targets=encoded.targets & (encoded.tokens != task.encoder.end_token))

    return patch.object(task, "_encode", endless)


@planted(PADDED, "number of", "data.questions.layout")
def padding_is_learned(task: Any, _ranks: Any) -> Any:
    """Padding has the end token's number, so it is learned as an end is."""

    def change(batch: Batch) -> Batch:
        length = batch.tokens.shape[1]
        at = (batch.group.flatten() == PADDING).nonzero()[:, 0]
        rows = batch.target_at // length
        owner = torch.stack([batch.owner[rows == row][0] for row in at // length]) if len(at) else at
        return replace(
            batch,
            target_at=torch.cat([batch.target_at, at - 1]),
            target=torch.cat([batch.target, batch.tokens.flatten()[at]]),
            weight=torch.cat([batch.weight, torch.full(at.shape, float(batch.weight.min()))]),
            owner=torch.cat([batch.owner, owner]),
        )

    return _built(task, change)


@planted(SHARED, "weights", "tasks.vqa")
def each_token_weighs_the_same(task: Any, _ranks: Any) -> Any:
    """The recipe asks that each question weighs the same; long answers weigh more."""
    return patch.object(task, "recipe", task.recipe.model_copy(update={"loss_weight": "token"}))


@planted(SHARED, "generated answer", "models.vlm")
def answers_one_position_late(task: Any, _ranks: Any) -> Any:
    """Every token after an answer's first is generated one position too far on."""
    following = task.model.next_hidden
    return patch.object(task.model, "next_hidden", lambda tokens, at, keys: following(tokens, at + 1, keys))
