"""What tests of chain of thought share."""

from __future__ import annotations

from collections.abc import Callable

from sameday.data.order import Place
from sameday.data.questions.sample import Sample
from sameday.tasks.cot.task import CotTask

Make = Callable[..., CotTask]
SHARED = {"share_images": True, "max_questions": None, "packing": True, "label_only_logits": True}


def choose(task: CotTask, samples: list[Sample]) -> None:
    """Train on these alone."""
    task.splits = {"train": samples, "val": samples}
    task.places = [Place(s.id, s.image_key, s.stage) for s in samples]
    task._epoch.cache_clear()
    task._starts = [0]
