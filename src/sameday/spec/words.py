"""Numbers, durations and lists as people read them, and the one way in which anything is printed."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from typing import IO, Any

# What a terminal would obey instead of show: control characters, changes of direction, halves of characters.
_COMMANDS = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")


def visible(text: str) -> str:
    """Text out of a file may hold what a terminal obeys: it is shown as in Python's strings, \\x1b."""
    return _COMMANDS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def in_one_line(text: str, most: int = 60) -> str:
    """Text out of a file as a name in a sentence: without line breaks, and cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def tell(text: object = "", file: IO[str] | None = None) -> None:
    """To standard output, or a file that is open."""
    print(visible(str(text)), file=file, flush=True)


def number(value: float) -> str:
    """A number for people: up to four digits that matter, thousands apart, small ones with an exponent."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "not finite"
    size = abs(value)
    if size >= 1e7 or size < 1e-3:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if size >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.4g}"


def count(given: int, what: str) -> str:
    return f"{given:,} {what}" if given == 1 else f"{given:,} {what}s"


def clock(seconds: float) -> str:
    """1:02:03, or 2:03."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def when(moment: float, now: float) -> str:
    """A time of today as 13:05, of another day with its date."""
    day, today = time.localtime(moment), time.localtime(now)
    return time.strftime("%H:%M" if day[:3] == today[:3] else "%Y-%m-%d %H:%M", day)


def first_names(names: Sequence[str], most: int = 32) -> str:
    """A step may have thousands of samples; nobody reads that many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def in_yaml(value: Any) -> str:
    """As a recipe or a plan has it in its file."""
    return value if isinstance(value, str) else json.dumps(value)
