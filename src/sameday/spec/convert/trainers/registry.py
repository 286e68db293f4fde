"""Whose config it is, by the keys that it has or the command that it starts."""

from __future__ import annotations

from collections.abc import Iterable

from sameday.spec.convert.trainers import axolotl, llamafactory, swift, trl
from sameday.spec.convert.trainers.trainer import PLAIN, Trainer
from sameday.spec.errors import BadInput

TRAINERS = {each.short: each for each in (PLAIN, llamafactory.TRAINER, swift.TRAINER, trl.TRAINER, axolotl.TRAINER)}
_ENOUGH = 2
"""Keys of a trainer that must be there: a single one may be somebody's own."""


def recognise(keys: Iterable[str], command: str, asked: str | None) -> tuple[Trainer, str]:
    """The trainer, and by what it was recognised. Where no trainer's keys are there, it is any around the Trainer."""
    if asked is not None:
        if asked not in TRAINERS:
            raise BadInput(f"--from {asked}: must be one of {', '.join(TRAINERS)}")
        return TRAINERS[asked], f"--from {asked}"
    for trainer in TRAINERS.values():
        words = next((each for each in trainer.commands if f" {each}" in f" {command}".replace("/", " ")), None)
        if words is not None:
            return trainer, f"the command {words}"
    names = {key.split(".")[-1] for key in keys}
    counts = {short: sorted(names & trainer.marks) for short, trainer in TRAINERS.items()}
    most = max(len(found) for found in counts.values())
    best = [short for short, found in counts.items() if len(found) == most]
    if most < _ENOUGH:
        return PLAIN, "no keys of another trainer"
    if len(best) > 1:
        said = " or ".join(f"{TRAINERS[short].name} ({', '.join(counts[short])})" for short in best)
        raise BadInput(f"the keys are those of {said}: say which with --from {'|'.join(best)}")
    found = counts[best[0]]
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return TRAINERS[best[0]], f"{', '.join(found[:3])}{more}"
