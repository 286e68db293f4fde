"""`sameday merge`: a run's adapter and its base model as one whole model, which plain transformers loads."""

from __future__ import annotations

import errno
import os
import shutil
from functools import partial
from pathlib import Path

from sameday.commands.evaluate import BEST, LAST, weights_of, which_words
from sameday.commands.stages import own_models
from sameday.record import checkpoint
from sameday.record.folder import RunFolder
from sameday.record.room import room_for
from sameday.spec.errors import BadInput
from sameday.spec.words import tell
from sameday.spec.writing import check_folder
from sameday.tasks.registry import setup_of
from sameday.tasks.setup import TaskSetup


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
    setup, parent = setup_of(run.recipe, run.recipe_dir), out.absolute().parent
    weights, size = weights_of(run, which, "merged"), setup.merged_bytes()
    there = next(folder for folder in (parent, *parent.parents) if folder.is_dir())
    with room_for("the merged model", there, size):
        if shutil.disk_usage(there).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        while True:
            if which in (LAST, BEST):
                tell(which_words(which, weights, run.recipe))
            try:
                checkpoint.write(parent, out.name, partial(_fill, setup, weights), None)
                break
            except (BadInput, OSError):
                if weights.is_dir() or which is None:
                    raise
                # A run under way has removed it, and written a newer one.
                weights = weights_of(run, which, "merged")
    tell(f"written: {out}")


def _fill(setup: TaskSetup, weights: Path, folder: Path) -> None:
    setup.merge(weights, folder, tell)
