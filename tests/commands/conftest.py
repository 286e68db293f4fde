"""What commands do with a model is tested here, not the model."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_qwen3(two_layers: Path) -> Path:
    return two_layers
