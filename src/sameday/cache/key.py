"""What the entries of a cache depend on besides the image. It names their folder: nothing stale is ever found."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

FORMAT = 1
"""Version of our files. It is part of every name: entries of another version lie in another folder."""

Kind = Literal["pixels", "features"]
Value = str | int | float | list[Any]


@dataclass(frozen=True)
class Settings:
    """Two caches share entries exactly when their settings are equal, to the last field."""

    kind: Kind
    fields: Mapping[str, Value]
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind {self.kind!r} of a cache is not allowed; it is one of {', '.join(get_args(Kind))}")
        for name, value in self.fields.items():
            if not isinstance(name, str) or not _plain(value):
                raise ValueError(
                    f"{self.kind} settings: {name!r} is {value!r} ({type(value).__name__}); a name is text, and "
                    "text, whole numbers, finite numbers and lists of them are allowed"
                )
        # A copy: whoever made the dictionary may go on to change it.
        object.__setattr__(self, "fields", json.loads(_canonical(dict(self.fields))))

    @property
    def text(self) -> str:
        """All of it as one line, the same for equal settings on every machine."""
        return _canonical({"format": self.format, "kind": self.kind, "fields": self.fields})

    @property
    def name(self) -> str:
        return f"{self.kind}-{hashlib.sha256(self.text.encode()).hexdigest()[:12]}"

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        # By their text: 1 and 1.0 are equal to Python, and have different names here.
        return isinstance(other, Settings) and self.text == other.text


def parse(text: str) -> Settings:
    """The settings that wrote this text. ValueError where it is none."""
    try:
        mapping = json.loads(text)
        settings = Settings(mapping["kind"], mapping["fields"], mapping["format"])
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("not the settings of a cache") from error
    if type(settings.format) is not int:
        raise ValueError(f"format {settings.format!r} is not a whole number")
    return settings


def differences(mine: Settings, other: Settings) -> list[str]:
    """Every field that differs, one sentence each; empty exactly where the names are equal."""

    def shown(fields: Mapping[str, Value], name: str) -> str:
        return repr(fields[name]) if name in fields else "nothing"

    pairs = [("format", str(mine.format), str(other.format)), ("kind", mine.kind, other.kind)]
    for name in sorted(mine.fields.keys() | other.fields.keys()):
        pairs.append((name, shown(mine.fields, name), shown(other.fields, name)))
    return [f"{name}: {here} here, {there} there" for name, here, there in pairs if here != there]


def _plain(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_plain, value))
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
