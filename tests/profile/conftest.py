"""The device is as fast in each profile as it was in the first one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import worlds

from sameday.hardware import peaks


@pytest.fixture(scope="module", autouse=True)
def measured_once() -> Iterator[None]:
    """What its matmuls, its memory and its copies reach; a disk is asked each time."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("best_product_rate", "memory_rate", "copy_rate"):
            patch.setattr(peaks, name, worlds.once(getattr(peaks, name)))
        yield
