"""Faults of Vision-BDH, and of how images reach a model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from catalogue import planted
from torch import Tensor

from sameday.models.vision_bdh import norm, rotate
from sameday.tasks.classify import task as classify

ON_DEVICE = {"images_on": "device"}


@planted({}, "gradient", "models.vision_bdh", task="classify")
def residual_before_the_layer_norm(task: Any, _ranks: Any) -> AbstractContextManager[Any]:
    """Vision-BDH adds its residual on the other side of a LayerNorm."""
    model = task.model

    def forward(pixels: Tensor, keys: Tensor) -> Tensor:
        x = model.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([model.class_token.expand(len(x), -1, -1), x], 1) + model.positions
        for row_keys in model.row_keys(keys):
            each = norm(x)[:, None]
            s = F.relu(each @ model.encoder)
            r = rotate(s, *model.rotary(x.device))
            z = s * F.relu(norm(r @ r.transpose(-1, -2) @ each) @ model.encoder_v)
            z = model.dropout(z.transpose(1, 2).flatten(2), row_keys)
            x = norm(x + norm(z @ model.decoder))
        return model.head(norm(x[:, 0])).float()

    model.forward = forward
    return nullcontext()


@planted({}, "gradient", "models.vision_bdh", task="classify")
def softmax_in_linear_attention(task: Any, _ranks: Any) -> AbstractContextManager[Any]:
    """Vision-BDH's attention, which has none, gets a softmax."""
    task.model.shape = task.model.shape.model_copy(update={"attention": "softmax"})
    return nullcontext()


@planted({}, "gradient", "models.vision_bdh", task="classify")
def rotation_by_another_base(task: Any, _ranks: Any) -> AbstractContextManager[Any]:
    """Rotary angles fall by 10,000 over the units, as everywhere else, and not by 65,536."""
    return patch("sameday.models.vision_bdh.THETA", 1e4)


@planted(ON_DEVICE, "pixels", "data.labelled.augment", task="classify")
def crops_by_place_in_the_batch(_task: Any, _ranks: Any) -> AbstractContextManager[Any]:
    """An image's crop depends on where it stands in its micro-batch."""
    draw = classify.augment.draw

    def by_place(seed: int, epoch: Any, ids: Tensor, *more: Any) -> Tensor:
        return draw(seed, epoch, torch.arange(len(ids)), *more)

    return patch.object(classify.augment, "draw", by_place)


@planted(ON_DEVICE, "pixels", "data.labelled.augment", task="classify")
def crops_of_the_next_epoch(_task: Any, _ranks: Any) -> AbstractContextManager[Any]:
    """Epochs are counted from one where images are cropped, and from zero everywhere else."""
    draw = classify.augment.draw
    return patch.object(classify.augment, "draw", lambda seed, epoch, *more: draw(seed, epoch + 1, *more))


@planted(ON_DEVICE, "gradient", "kernels.dropout", task="classify")
def masks_of_another_seed_in_vision_bdh(task: Any, _ranks: Any) -> AbstractContextManager[Any]:
    """Vision-BDH's dropout masks are drawn from a seed that is not the recipe's."""
    row_keys = task.model.row_keys
    return patch.object(task.model, "row_keys", lambda keys: row_keys(keys ^ 1))


@planted(ON_DEVICE, "gradient", "tasks.classify", task="classify")
def pixels_normalised_twice(_task: Any, _ranks: Any) -> AbstractContextManager[Any]:
    """Images are divided by 255 before a normalisation that does it too."""
    normalise = classify.augment.normalise
    return patch.object(classify.augment, "normalise", lambda pixels, *more: normalise(pixels // 255, *more))
