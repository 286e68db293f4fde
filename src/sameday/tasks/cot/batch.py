"""A micro-batch of whole images, with what the heads must know of its questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sameday.data.questions.batch import Batch
from sameday.data.questions.sample import Sample
from sameday.models.heads import Stages


@dataclass(frozen=True, eq=False)
class CotBatch(Batch):
    """`prompt_at[q]` is the flat place that predicts the first token of question q's answer, the last one where it has
    several turns. `weight` has the stages' weights in it, `plain_weight` has not. The others are those of `Stages`."""

    prompt_at: Tensor
    plain_weight: Tensor
    stage: Tensor
    image: Tensor
    share: Tensor
    images: int

    @property
    def stages(self) -> Stages:
        return Stages(self.stage, self.image, self.share, self.images)


def with_stages(batch: Batch, samples: Sequence[Sample], weights: dict[int, float]) -> CotBatch:
    """`samples` are the batch's questions; all of an image's stand in it."""
    stages = stages_of(samples)
    weight = torch.tensor([weights[stage] for stage in stages.stage.tolist()])[batch.owner]
    more = {"prompt_at": _prompt_ends(batch), "plain_weight": batch.weight, **vars(stages)}
    return CotBatch(**(vars(batch) | {"weight": batch.weight * weight} | more))


def stages_of(samples: Sequence[Sample]) -> Stages:
    """Questions about equal pixels are about one image, whatever its names; one without an image stands alone."""
    stages = [sample.stage for sample in samples]
    assert all(stages), "the audit leaves no question without a stage"
    return Stages.of([stage for stage in stages if stage], [sample.image_key for sample in samples])


def _prompt_ends(batch: Batch) -> Tensor:
    """A question's targets stand together, and those of one answer at places without a gap."""
    at, owner = batch.target_at.numpy(), batch.owner.numpy()
    begins = np.flatnonzero((np.diff(at, prepend=-2) != 1) | (np.diff(owner, prepend=-1) != 0))
    ends = np.zeros(len(batch.sample_ids), np.int64)
    ends[owner[begins]] = at[begins]  # of several answers the last one's stays
    return torch.from_numpy(ends)
