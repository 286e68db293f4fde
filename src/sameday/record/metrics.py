"""The lines of a metrics.jsonl: which are records, and a sentence for each that is none. Training, reports and verify
all ask here, so that each leaves out the same lines, and names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sameday.spec.limits import RUN_STEPS
from sameday.spec.reading import read_file
from sameday.spec.words import count, in_one_line, visible

MOST = 1e100
"""No loss, norm or duration is larger: what is was damaged, and its sums might not be finite."""
SHOWN = 5
"""Lines of one file that are named; of more there is the count."""
MAPPINGS = frozenset({"phases", "parts", "spike"})
"""What of a record is no number; `parts` is what earlier releases called the phases of a step."""


def is_number(value: Any) -> bool:
    """NaN, infinities, and what is so large that a sum of it would be one, are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -MOST <= value <= MOST


def is_step(value: Any) -> bool:
    return isinstance(value, int) and is_number(value) and 0 <= value <= RUN_STEPS.most


def sound_metrics(path: Path, most: int | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """The records, and a sentence for each line that is none. `most` so many bytes are read. A last line that a kill
    left unfinished is passed over."""
    if not path.exists():
        return [], []
    records, problems = [], []
    *lines, last = read_file(path, most).split(b"\n")
    if _json(last) is not None:
        # Whole, and only its newline is missing: an editor's doing, since records are written with theirs.
        lines.append(last)
    for number, line in enumerate(lines, start=1):
        record = _json(line)
        if not isinstance(record, dict):
            why: str | None = f"is not a JSON object: {line[:60].decode(errors='replace')}"
        else:
            why = _fault(record)
        if why is None:
            records.append(record)
        else:
            problems.append(f"{path}:{number}: {visible(why)}")
    return records, problems


def told(path: Path, problems: list[str]) -> list[str]:
    """The sentences that are shown of what is wrong with a file, the last with the count of those that are not."""
    more = len(problems) - SHOWN
    return [*problems[:SHOWN], *([f"and {count(more, 'more such line')} in {path}"] if more > 0 else [])]


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _fault(record: dict[str, Any]) -> str | None:
    """A record has a step, may have a split, and else numbers, which are null where they were not finite."""
    if "step" not in record:
        return "has no step"
    for name, value in record.items():
        if name == "step":
            good, allowed = is_step(value), "the number of a step"
        elif name == "split":
            good, allowed = value is None or isinstance(value, str), "the name of a split"
        else:
            mapping = name in MAPPINGS and isinstance(value, dict)
            good, allowed = value is None or is_number(value) or mapping, "a number, or null"
        if not good:
            return f"{in_one_line(name)} is {in_one_line(repr(value))}; must be {allowed}"
    return None
