"""Whether what is installed beside torch fits it."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

import torch

from sameday.spec.errors import BadInput


def check_torchvision() -> None:
    """BadInput where it is there and cannot be loaded, as with a build for another torch: transformers, which takes it
    by itself, would have no class of any model then. Where it is not there, nothing needs it."""
    if find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        why = str(error).strip().splitlines()
        raise BadInput(
            f"torchvision {version('torchvision')} does not fit torch {torch.__version__}: "
            f"{why[0] if why else type(error).__name__}; install the build that fits, or remove torchvision, which "
            "recipe.image_backend pil does not need"
        ) from None
