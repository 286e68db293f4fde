"""Copies that a batch script made on the node's own disk. $SAMEDAY_STAGE is a folder with a copy of each path below it,
and `list` has the paths that were copied whole, one a line. Recipes name the originals, and so do records."""

from __future__ import annotations

import os
from pathlib import Path

STAGE = "SAMEDAY_STAGE"


def staged(path: Path | str) -> str:
    """Where to read this: its copy, also within a folder that was copied; itself where there is none."""
    stage = os.environ.get(STAGE)
    if not stage:
        return str(path)
    try:
        copied = Path(stage, "list").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return str(path)
    whole = os.path.abspath(path)
    if any(whole == each or whole.startswith(each.rstrip("/") + "/") for each in copied):
        return stage + whole
    return str(path)
