"""What runs were trained and validated on, by the digests in their checkpoints: a recipe names its files, which may
have other contents by the time of the next run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sameday.record import checkpoint
from sameday.spec.recipe import Recipe

SCORED = "validation data"
OF_PLAN = "choice of"


@dataclass(frozen=True)
class Inputs:
    label: str
    recipe: Recipe
    digests: Mapping[str, Any] | None
    """None where no checkpoint tells."""

    @staticmethod
    def of(label: str, recipe: Recipe, checkpoints: Path) -> Inputs:
        known = checkpoint.newest_digests(checkpoints)
        return Inputs(label, recipe, None if known is None else known[1])

    def unlike(self, other: Inputs) -> list[str]:
        """Which inputs have another content. An older release may have recorded fewer, and another plan has others."""
        if self.digests is None or other.digests is None:
            return []
        there = other.digests
        return [
            name
            for name, digest in self.digests.items()
            if there.get(name, digest) != digest and not name.startswith(OF_PLAN)
        ]


def same_scored(runs: Sequence[Inputs]) -> bool:
    """Whether all were validated on one content, as far as their checkpoints tell."""
    known = {(run.digests or {}).get(SCORED) for run in runs}
    return len(known) == 1 and None not in known


def other_inputs(runs: Sequence[Inputs]) -> list[str]:
    """A sentence for each that was trained or validated on something else than the run that it is compared with: the
    first of its recipe, or the first of all."""
    said, firsts = [], dict[str, Inputs]()
    for run in runs:
        same = firsts.setdefault(run.recipe.fingerprint, run)
        first = runs[0] if same is run else same
        odd, two = run.unlike(first), f"{first.label} and {run.label}"
        if same is not run and odd:
            said.append(f"{run.label} has the recipe of {first.label}, but another {' and another '.join(odd)}.")
            continue
        named = [what for what in odd if what in run.recipe.names and _alike(run.recipe, first.recipe, what)]
        said += [f"The recipes of {two} name the same {what}, but it was another for each." for what in named]
        if SCORED in odd:
            said.append(f"{two} were validated on different data: their validation scores are not of one kind.")
    return said


def _alike(one: Recipe, two: Recipe, what: str) -> bool:
    here, there = (recipe.model_dump(mode="json") for recipe in (one, two))
    return all(here.get(field) == there.get(field) for field in one.names[what])
