"""Faults in what a cache serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from catalogue import SHARED, planted
from torch import Tensor

PIXELS, FEATURES = (SHARED | {"cache": kind} for kind in ("pixels", "features"))
MEMORY = SHARED | {"keep_features": True}


def _served(task: Any, change: Callable[[Tensor], Tensor]) -> Any:
    kept, spoiled = task.source._kept, sorted(image.digest for s in task.splits["train"] for image in s.images)[0]

    def other(store: Any, content: str) -> Tensor | None:
        found = kept(store, content)
        return change(found) if found is not None and content == spoiled else found

    return patch.object(task.source, "_kept", other)


@planted(PIXELS, "patches", "cache.store")
def a_stale_cache_entry(task: Any, _ranks: Any) -> Any:
    """An image was changed, and what the cache holds for it was not."""
    return _served(task, lambda pixels: 255 - pixels)


@planted(FEATURES, "gradient", "cache.store")
def deepstack_of_cached_features_in_another_order(task: Any, _ranks: Any) -> Any:
    """DeepStack's features come back from the cache last first."""
    return _served(task, lambda features: features.flip(0))


@planted(MEMORY, "gradient", "models.features")
def kept_features_in_another_order(task: Any, _ranks: Any) -> Any:
    """What stays in memory of an image has its tokens last first: it is right when the image first comes."""
    kept = task.model.memory._keep
    return patch.object(task.model.memory, "_keep", lambda content, features: kept(content, features.flip(1)))
