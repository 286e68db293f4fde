"""Which images a run was trained and validated on, by their content: a score of images that were trained on says less
than it seems to, and by the time of the score the training data may lie elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sameday.record.folder import IMAGES, RunFolder, stage_folders
from sameday.spec.errors import BadInput
from sameday.spec.reading import IMAGES as LARGEST
from sameday.spec.reading import read_file

TRAINED_ON = "trained_on"
"""What a file of scores calls it."""


@dataclass(frozen=True)
class TrainedOn:
    """So many `images` of the `of` that a split has were trained on."""

    images: int
    of: int

    def sentence(self, split: str) -> str:
        which = f"{self.images:,} of the {self.of:,} images" if self.images < self.of else f"all {self.of:,} images"
        which = "the only image" if self.of == 1 else which
        were = "was" if self.images == 1 else "were"
        return f"{which} of {split} {were} trained on: its scores are too good"

    def plain(self) -> dict[str, int]:
        return asdict(self)


def note_images(run: RunFolder, contents: Mapping[str, Set[str]], start: Path | None) -> None:
    """At the beginning of a run, which may `start` from saved weights: what these were trained on, it was too."""
    before = frozenset[str]() if start is None else trained_images(run_of(start))
    every = {**contents, "train": contents.get("train", frozenset()) | before}
    run.write_json(IMAGES, {split: sorted(images) for split, images in every.items()})


def trained_images(run: Path) -> frozenset[str]:
    """Those of a run and of its stages; none where an earlier release, or something else, trained the weights."""
    return frozenset().union(*(_noted(folder).get("train", ()) for folder in (run, *stage_folders(run))))


def noted_images(run: Path) -> frozenset[str]:
    """Those of all splits that a run began with; none where an earlier release began it."""
    return frozenset().union(*_noted(run).values())


def trained_on(run: Path, images: Set[str]) -> TrainedOn | None:
    """How many of these were trained on by a run; None where it is not one."""
    both = len(trained_images(run) & images)
    return TrainedOn(both, len(images)) if both else None


def validated_on_trained(run: Path) -> TrainedOn | None:
    return trained_on(run, _noted(run).get("val", frozenset()))


def scored_on_trained(scores: Path) -> TrainedOn | None:
    """As a file of scores has it."""
    match _read(scores).get(TRAINED_ON):
        case {"images": int(images), "of": int(of)}:
            return TrainedOn(images, of)
    return None


def run_of(weights: Path) -> Path:
    """The folder of the run that saved them, where a run did: its result's, or a checkpoint's."""
    folder = weights.resolve().parent
    return folder.parent if folder.name == "checkpoints" else folder


def _noted(run: Path) -> dict[str, frozenset[str]]:
    noted = _read(run / IMAGES)
    return {split: frozenset(map(str, images)) for split, images in noted.items() if isinstance(images, list)}


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_file(path, LARGEST))
    except (BadInput, OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
