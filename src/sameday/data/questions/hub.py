"""Sets of questions by their name on the Hub: in its cache, or downloaded into it once size and room are known."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from sameday.data.questions.guess import SUFFIXES, by_split, question_files
from sameday.data.questions.tables import Say
from sameday.spec.dataset import HubName, hub_name
from sameday.spec.errors import BadInput, DiskTooSmall
from sameday.spec.load import resolve_path
from sameday.spec.words import first_names

_IN_CACHE = re.compile(r"/datasets--([^/]+)--([^/]+)/snapshots/([^/]+)/(.+)$")


def located(home: Path, value: str, split: str, say: Say) -> Path:
    """The file, or the pattern of files, that a recipe in `home` names for a split; what the Hub has is brought."""
    name = hub_name(value)
    if name is None:
        return resolve_path(home, value)
    folder = brought(name, say)
    if name.path:
        return folder / name.path
    try:
        splits = by_split(question_files(folder))
    except BadInput as error:
        raise BadInput(f"recipe.data.{split} is {value}: {error}; {value}/FILE names one") from None
    if split not in splits:
        there = ", ".join(f"{each} ({file.name})" for each, file in splits.items())
        raise BadInput(
            f"recipe.data.{split} is {value}, which has no file whose name says {split}; there are {there}; "
            f"{value}/FILE names one"
        )
    return splits[split]


def to_be_brought(value: str) -> bool:
    """Whether a file that a recipe names is on the Hub, and not in the cache."""
    name = hub_name(value)
    if name is None:
        return False
    folder = _cached(name)
    return folder is None or not _has(folder, name)


def brought(name: HubName, say: Say) -> Path:
    """The folder of a set's files. One that is in the cache is taken as it is, and nobody is asked."""
    from huggingface_hub import constants, snapshot_download

    folder, asked = _cached(name), _asked(name)
    there = list[str]()
    if folder is not None:
        if _has(folder, name):
            return folder
        there = sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.suffix in SUFFIXES)
    cached = f"of it the cache has {first_names(there)}" if there else "it is not in the cache"
    try:
        files = snapshot_download(name.repo, dry_run=True, **asked)
        every = (
            snapshot_download(name.repo, dry_run=True, **{**asked, "allow_patterns": _all_kinds()}) if not files else []
        )
    except Exception as error:
        raise BadInput(f"{name}: {cached} ({constants.HF_HUB_CACHE}), and {why_not(error, name)}") from None
    if not files:
        listed = f"; there are {first_names([each.filename for each in every])}" if every else ""
        known = ", ".join(name.patterns or _all_kinds())
        raise BadInput(f"{name}: has no file of questions there; known are {known}{listed}")
    check_room(str(name), sum(file.file_size or 0 for file in files if file.will_download), say)
    try:
        return Path(snapshot_download(name.repo, **asked))
    except Exception as error:
        raise BadInput(f"{name}: the download stopped: {first_line(error)}; the same command goes on with it") from None


def _asked(name: HubName) -> dict[str, Any]:
    return {"repo_type": "dataset", "revision": name.revision, "allow_patterns": name.patterns or _all_kinds()}


def _cached(name: HubName) -> Path | None:
    """The folder of a set in the cache; None where it is not there, or not all of it."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name.repo, local_files_only=True, **_asked(name)))
    except (OSError, ValueError):
        return None


def _has(folder: Path, name: HubName) -> bool:
    return any(folder.glob(name.path or "**/*"))


def why_not(error: Exception, name: HubName) -> str:
    """Why the Hub does not give a set, and what helps. The library wraps the reason in errors of its own."""
    from huggingface_hub import errors

    reasons = _reasons(error)

    def is_one(kind: type[Exception]) -> bool:
        return any(isinstance(each, kind) for each in reasons)

    elsewhere = f"on a machine with a network `hf download {name.repo} --repo-type dataset` brings it"
    if is_one(errors.OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE forbids to ask the Hub: {elsewhere}, and HF_HOME names the cache"
    if is_one(errors.GatedRepoError):
        page = f"https://huggingface.co/datasets/{name.repo}"
        return f"the Hub gives it to those who accepted its terms: do so at {page}, then `hf auth login`"
    if is_one(errors.RevisionNotFoundError):
        return f"the Hub has no version {name.revision!r} of it; without @{name.revision} the newest is taken"
    if is_one(errors.RepositoryNotFoundError):
        return "the Hub has no set of that name; a private one needs `hf auth login`"
    if any(isinstance(each, errors.HfHubHTTPError) for each in reasons):
        return f"the Hub did not give it: {first_line(reasons[-1])}"
    return f"the Hub cannot be reached: {first_line(reasons[-1])}; {elsewhere}, and HF_HOME names the cache"


def _reasons(error: BaseException) -> list[BaseException]:
    """An error, what it was raised from, and so on."""
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
        chain.append(before)
    return chain


def _all_kinds() -> list[str]:
    return [f"*{suffix}" for suffix in SUFFIXES]


def check_room(what: str, size: int, say: Say) -> None:
    """Says how much is to be downloaded; DiskTooSmall where the disk of the cache has no room for it."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(each for each in (cache, *cache.parents) if each.exists())).free
    text = f"{what}: {size / 1e9:.1f} GB to download to {cache}, where {free / 1e9:.1f} GB are free"
    if size > free:
        raise DiskTooSmall(f"{text}. HF_HOME names another place.")
    say(text)


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def name_of(path: Path) -> str | None:
    """A file of the cache as a recipe names it: of the version that it is now, whatever the Hub has later."""
    place = _IN_CACHE.search(str(path.absolute()))
    return None if place is None else f"hf:{place[1]}/{place[2]}@{place[3]}/{place[4]}"
