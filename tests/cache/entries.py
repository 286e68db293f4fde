"""Entries for tests of the cache."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sameday.cache.key import Settings
from sameday.cache.store import (
    BadEntry,
    Store,
)

FIELDS: dict[str, Any] = {"backend": "pil", "max_pixels": 1310720, "mean": [0.5, 0.25], "pillow": "12.0.0"}
SETTINGS = Settings("pixels", FIELDS)
CONTENT = hashlib.blake2b(b"an image", digest_size=16).hexdigest()
OTHER = hashlib.blake2b(b"another", digest_size=16).hexdigest()


def small() -> dict[str, Tensor]:
    return {
        "grid": torch.tensor([2, 3]),
        "pixels": torch.arange(18, dtype=torch.uint8).reshape(2, 3, 3),
        "scale": torch.tensor(0.5, dtype=torch.bfloat16),
    }


def same(found: dict[str, Tensor] | None, expected: dict[str, Tensor]) -> bool:
    """Of one name, type and shape, and of the same bits: a NaN equals itself here."""
    assert found is not None
    return found.keys() == expected.keys() and all(
        t.dtype == expected[name].dtype
        and t.shape == expected[name].shape
        and torch.equal(t.reshape(-1).view(torch.uint8), expected[name].reshape(-1).view(torch.uint8))
        for name, t in found.items()
    )


def written(root: Path, settings: Settings = SETTINGS, content: str = CONTENT) -> tuple[Store, Path]:
    store = Store(root, settings)
    store.write(content, small())
    return store, store.path(content)


def refusal(store: Store, content: str = CONTENT) -> str:
    with pytest.raises(BadEntry) as caught:
        store.read(content)
    assert caught.value.path == store.path(content)
    return caught.value.reason


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
