"""Our seconds beside those of other trainers: a table of what `bench/real.py` and `bench/peers.py` left in a folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

OURS, PEERS = "real.json", "peers.json"

Ours = Sequence[Mapping[str, Any]]


def read(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else []
    return found


def table(ours: Ours, peers: Iterable[Mapping[str, Any]]) -> str:
    """A line for each row and trainer, with how many times as long as ours it takes where both were measured on one
    GPU with a model of one size."""
    mine = {each["name"]: each for each in ours}
    lines = [
        f"{'':22s} {'':10s} {'s/step':>7s} {'(least-most)':>16s} {'steps':>5s} {'held':>6s} {'samples/s':>9s} "
        f"{'/ ours':>7s}   setting"
    ]
    for one in peers:
        name = f"{one['row']:22s} {one['peer']:10s}"
        lines.append(f"{name} {_measured(one, mine.get(one['row']))}")
    return "\n".join(lines)


def _measured(one: Mapping[str, Any], ours: Mapping[str, Any] | None) -> str:
    if "median" not in one:
        return f"not measured: {one['why']}"
    spread = f"({one['least']:.3f}-{one['most']:.3f})"
    unlike = "" if ours is None else _unlike(one, ours)
    times = "-" if ours is None or unlike else f"{one['median'] / ours['median']:.2f}"
    words = [one["setting"], unlike, "" if ours is None else _asked(ours)]
    return (
        f"{one['median']:7.3f} {spread:>16s} {one['steps']:5d} {one['held']:6.1f} {one['samples_per_second']:9.1f} "
        f"{times:>7s}   "
        f"{'; '.join(filter(None, words))}"
    )


def _unlike(one: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Why the two cannot be divided, if they cannot."""
    pairs = [(each.get("size", "unknown"), each.get("device", "unknown")) for each in (ours, one)]
    names = [f"size {size} on {device}" for size, device in pairs]
    return "" if pairs[0] == pairs[1] else f"ours is of {names[0]}, this of {names[1]}"


def _asked(ours: Mapping[str, Any]) -> str:
    """What our plan was told, where it is not the automatic one."""
    return f"ours with {' '.join(ours['plan'])}" if ours.get("plan") else ""
