"""The loop around a step is tested here, not what is in it."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_qwen3(two_layers: Path) -> Path:
    return two_layers
