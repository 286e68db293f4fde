"""Values that the old program fills in when it starts: ${oc.env:DATA}, ${model.name}, as OmegaConf has them."""

from __future__ import annotations

import re
from typing import Any

from sameday.spec.convert.settings import Settings

_INTERPOLATION = re.compile(r"\$\{[^{}]*\}?")
_RUNNING = (
    "save_",
    "logging_",
    "output_dir",
    "run_name",
    "gradient_checkpointing",
    "torch_compile",
    "full_determinism",
)
_WITHOUT = ("model_name_or_path", "train_file")
"""Kept, since a second sentence would say that they are missing."""


def refuse_interpolations(work: Settings) -> None:
    """Where the model depends on the value; what is dropped anyway stays dropped."""
    for name, (_, value) in list(work.old.items()):
        unknown = _interpolation(value)
        dropped = name in work.dropped or any(name.startswith(each) for each in work.starts)
        if unknown is None or (dropped and name not in work.handled):
            continue
        filled = f"the old program fills in {unknown}"
        if name.startswith(_RUNNING):
            work.drop(name, f"{filled}; the model does not depend on it")
        else:
            work.refuse(name, f"{filled}, and this file does not say with what: give the value")
        if name not in _WITHOUT:
            work.done(name)


def _interpolation(value: Any) -> str | None:
    if isinstance(value, list | tuple):
        return next((found for each in value if (found := _interpolation(each)) is not None), None)
    if isinstance(value, dict):
        return next((found for each in value.values() if (found := _interpolation(each)) is not None), None)
    match = _INTERPOLATION.search(value) if isinstance(value, str) else None
    return match[0] if match is not None else None
