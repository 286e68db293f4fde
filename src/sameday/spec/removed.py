"""Plan fields that there were once. What an earlier release recorded may have them; nobody can ask for them anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")

_NO_GAIN = "steps were 0.95 to 1.03 times as fast with it"
REMOVED: dict[str, str] = {
    "rotary": _NO_GAIN,
    "channels_last": _NO_GAIN,
    "cudnn_benchmark": _NO_GAIN,
    "compile_backend": _NO_GAIN,
    "keep_workers": _NO_GAIN,
}
"""Each with why it is gone. None of them changed the model."""


def refusal(name: str) -> str:
    """What is said of a removed field to whoever sets it."""
    return f"was removed, since {REMOVED[name]}: leave it out"


def without_removed(recorded: Mapping[str, Value]) -> dict[str, Value]:
    """A recorded plan, or what else is kept by the names of plan fields, in the fields of this release."""
    return {name: value for name, value in recorded.items() if name not in REMOVED}
