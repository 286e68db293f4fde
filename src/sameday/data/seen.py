"""One sample as the model sees it. No plan may change any of it, so two plans are compared by it exactly."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Seen:
    """How many there are of the things a sample is made of, and a digest of each thing that must not change."""

    id: int
    counts: dict[str, int]
    digests: dict[str, str]
    values: dict[str, Any] = field(default_factory=dict)
    """What a difference from another trainer is told by, as plain data."""


def digest(*arrays: np.ndarray) -> str:
    """The same for equal numbers of equal type and shape."""
    made = hashlib.blake2b(digest_size=8)
    for array in arrays:
        made.update(f"{array.dtype} {array.shape}".encode())
        made.update(np.ascontiguousarray(array).data)
    return made.hexdigest()
