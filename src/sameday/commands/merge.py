"""`sameday merge`: a run's adapter and its base model as one whole model, which plain transformers loads."""

from __future__ import annotations

from pathlib import Path

from sameday.commands.evaluate import weights_of
from sameday.commands.stages import own_models
from sameday.record import checkpoint
from sameday.record.folder import RunFolder
from sameday.spec.errors import BadInput
from sameday.spec.words import tell
from sameday.spec.writing import check_folder
from sameday.tasks.registry import setup_of


def merge(path: Path, out: Path, which: str | None = None) -> None:
    """`which` is a checkpoint, instead of the finished weights. The folder is whole, or not there."""
    run = RunFolder.read(path)
    if own := own_models(path):
        raise BadInput(
            f"{path}: each of its stages has a model of its own: merge one of {', '.join(map(str, own.values()))}"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"-o {out}: is there already, and is not overwritten")
    check_folder(out, "-o")
    weights, setup = weights_of(run, which, "merged"), setup_of(run.recipe, run.recipe_dir)
    checkpoint.write(out.absolute().parent, out.name, lambda folder: setup.merge(weights, folder, tell), None)
    tell(f"written: {out}")
