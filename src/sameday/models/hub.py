"""Before a model is downloaded for the first time: how large it is, and whether the disk has room."""

from __future__ import annotations

import json
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

from sameday.data.questions.hub import check_room, first_line
from sameday.spec.errors import BadInput

OLD_TEMPLATE = "chat_template.json"
"""Where processors of earlier releases kept their chat template."""
CONFIG = "config.json"
WANTED = ("*.safetensors", "*.json", "*.txt", "*.jinja", "*.model")


def announce_download(model: str, revision: str | None, say: Callable[[str], None]) -> None:
    """Says nothing where the model is a folder or already in the cache."""
    if Path(model).is_dir():
        return
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    try:
        if isinstance(try_to_load_from_cache(model, CONFIG, revision=revision), str):
            return
        info = HfApi().model_info(model, revision=revision, files_metadata=True)
    except Exception as error:
        raise BadInput(
            f"model {model!r} is neither a folder nor in the cache ({constants.HF_HUB_CACHE}), "
            f"and the hub did not give it: {first_line(error)}"
        ) from None
    files = [f for f in info.siblings or [] if any(fnmatch(f.rfilename, pattern) for pattern in WANTED)]
    size = sum(f.size or 0 for f in files)
    check_room(model, size, say)


def known_type(model: str) -> str | None:
    """The model_type of a folder, or of a name on the hub whose configuration is in the cache; None where it is not
    known here. Nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(model)
    try:
        file = folder / CONFIG if folder.is_dir() else try_to_load_from_cache(model, CONFIG)
        if not isinstance(file, str | Path):
            return None
        kind = json.loads(Path(file).read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):  # no name on the hub, no file, no JSON object
        return None
    return kind if isinstance(kind, str) else None


def processor_template(model: str, revision: str | None) -> str:
    """The chat template of a model whose tokenizer has none, but whose processor has one, as many on the hub do."""
    from transformers.utils import cached_file

    try:
        file = cached_file(model, OLD_TEMPLATE, revision=revision, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            return str(json.loads(Path(file).read_text(encoding="utf-8"))["chat_template"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"model {model!r}: its {OLD_TEMPLATE} cannot be read: {error}") from None
    raise BadInput(f"model {model!r} has no chat template, neither its tokenizer nor a {OLD_TEMPLATE}")
