"""`sameday push`: a run's weights to the Hub, with a model card written from its record."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from sameday.commands.card import card, split_readme, without_folders
from sameday.commands.evaluate import weights_of
from sameday.commands.stages import own_models
from sameday.record.checkpoint import OPTIMIZER, STATE
from sameday.record.folder import RunFolder
from sameday.record.manifest import MANIFEST, write_manifest
from sameday.spec.document import dump_yaml
from sameday.spec.errors import BadInput
from sameday.spec.words import count, tell
from sameday.spec.writing import check_folder

TOLD = ("README.md", "adapter_config.json")
"""Files that name the base model."""


def push(
    path: Path,
    repo: str,
    checkpoint: str | None = None,
    private: bool = False,
    base: str | None = None,
    license: str | None = None,
    dry_run: bool = False,
    out: Path | None = None,
) -> Path | None:
    """To the Hub; or, with `dry_run` and where the Hub is switched off, into a folder that is left for you to look at,
    which is returned. Whatever can be wrong is found before anything is written or sent."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    run = RunFolder.read(path)
    if own := own_models(path):
        raise BadInput(
            f"{path}: each of its stages has a model of its own: push one of {', '.join(map(str, own.values()))}"
        )
    weights = weights_of(run, checkpoint, "pushed")
    for option, name in (("", repo), ("--base ", base)):
        try:
            validate_repo_id(name or "a/b")
        except HFValidationError as error:
            raise BadInput(f"{option}{name}: is no name on the Hub: {error}") from None
    _check_base(run, weights, base)
    offline = constants.is_offline_mode() if hasattr(constants, "is_offline_mode") else constants.HF_HUB_OFFLINE
    if dry_run or offline:
        folder = out or path / "push"
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadInput(f"{folder}: is there already, and is not overwritten; choose another --out")
        check_folder(folder, "--out")
        folder.mkdir(parents=True, exist_ok=True)
        files = _fill(folder, run, weights, base, license)
        why = "--dry-run" if dry_run else "HF_HUB_OFFLINE is set"
        tell(f"{why}: nothing was pushed; {count(files, 'file')} for {repo} are in {folder}")
        return folder
    if out is not None:
        raise BadInput("--out belongs to --dry-run: a push leaves nothing here")
    if get_token() is None:
        raise BadInput(
            f"{repo}: the Hub wants a token, and there is none: `hf auth login`, or HF_TOKEN; --dry-run writes the "
            "folder that would be pushed"
        )
    with tempfile.TemporaryDirectory(dir=run.path, prefix=".push-") as made:
        files = _fill(Path(made), run, weights, base, license)
        url = _send(Path(made), repo, private, run)
    tell(f"pushed: {count(files, 'file')} to {url}")
    return None


def _check_base(run: RunFolder, weights: Path, base: str | None) -> None:
    """BadInput where --base names a model of another kind than the one that was trained, where both are known here."""
    from sameday.models.hub import known_type

    named = _base_in(weights)
    trained = known_type(str(weights)) or (
        known_type(str(run.recipe_dir / named)) or known_type(named) if named else None
    )
    told = known_type(base) if base else None
    if trained and told and trained != told:
        raise BadInput(
            f"--base {base}: is of model_type {told}, and the model that was trained is of model_type {trained}"
        )


def _base_in(weights: Path) -> str:
    """The base model as the README beside the weights names it."""
    readme = weights / "README.md"
    header, _ = split_readme(readme.read_text(encoding="utf-8")) if readme.is_file() else ({}, "")
    return str(header.get("base_model", ""))


def _fill(folder: Path, run: RunFolder, weights: Path, base: str | None, license: str | None) -> int:
    """All that is pushed; weights as links to the same bytes where the disk can."""
    named = _base_in(weights)
    here = bool(named) and (Path(named).is_absolute() or (run.recipe_dir / named).is_dir())
    if here and base is None:
        tell(f"the base model {named} is a folder of this machine: --base NAME gives its name on the Hub")
    known = base or (None if here else named or None)
    for file in sorted(weights.iterdir()):
        if file.name not in (MANIFEST, STATE, OPTIMIZER, *TOLD) and file.is_file():
            _link(file, folder / file.name)
    texts = {name: (weights / name).read_text(encoding="utf-8") for name in TOLD[1:] if (weights / name).is_file()}
    texts |= {
        "README.md": card(run, weights, known, license, by_hand=base not in (None, named)),
        "recipe.yaml": dump_yaml(run.recipe),
    }
    for name, text in texts.items():
        said = text.replace(named, known or Path(named).name) if here else text
        (folder / name).write_text(without_folders(run, said), encoding="utf-8")
    files = sorted(folder.iterdir())
    write_manifest(folder, files)
    return len(files) + 1


def _link(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except OSError:
        shutil.copyfile(file, to)


def _send(folder: Path, repo: str, private: bool, run: RunFolder) -> Any:
    from huggingface_hub import HfApi

    message = f"{run.recipe.name} (recipe {run.recipe.fingerprint})"
    try:
        api = HfApi()
        whole = api.create_repo(repo, private=private, exist_ok=True).repo_id
        api.upload_folder(repo_id=whole, folder_path=folder, commit_message=message)
    except Exception as error:  # the library's own, and those of whatever speaks HTTP for it
        said = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise BadInput(
            f"{repo}: the Hub did not take it: {said[0]}; --dry-run writes the folder that would be pushed"
        ) from None
    return f"{api.endpoint}/{whole}"
