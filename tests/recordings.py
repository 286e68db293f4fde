"""What tests of recorded micro-batches have in common: a plan whose rows can be recorded, a recipe whose questions have
forks, and steps that are computed without an update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sameday.hardware.ranks import Ranks
from sameday.tasks.vqa.task import VqaTask
from sameday.train.steps import Steps

PLAN: dict[str, Any] = {
    "share_images": True,
    "share_text": True,
    "packing": True,
    "max_questions": None,
    "attention": "split",
    "label_only_logits": True,
}
TEMPLATES = {
    "by": "stage",
    "templates": {
        "1": "what is there, what size, what shape, what colour near the left wall, a red polyp: {question}",
        "2": "what size, how many instruments can you see here near the red polyp, left wall: {question}",
        "3": "what shape, how many red instruments can you see here near the left wall, what size: {question}",
    },
}
"""They agree in a word, and questions of one template in more than sixteen."""
LORA = {"r": 4, "alpha": 8, "dropout": 0.1}
RECIPE: dict[str, Any] = {"order": "by_image", "effective_batch": 6, "max_pixels": 48 * 48, "lora": LORA}
LONG = RECIPE | {"num_epochs": 40, "prompt": TEMPLATES}
"""Long enough for each shape to come often."""
SIZES = ((48, 32), (32, 48))


def computed(
    task: VqaTask, steps: Iterable[int], stepped: Steps | None = None, budget: int | None = None
) -> Iterator[Steps]:
    """After each step its gradients and its loss, until the next."""
    stepped = stepped or Steps(task.recipe, task.plan, task, Ranks())
    for step in steps:
        stepped.gradients.zero()
        stepped.accumulate((batch.to(task.device) for batch in task.batches(step, budget, Ranks())), step)
        assert not stepped.gradients.tail[1], "out of memory"
        yield stepped
