"""LLaMA-Factory's list of data, dataset_info.json: which file a name stands for, and what would be read otherwise."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sameday.spec.convert.conversion import show
from sameday.spec.errors import BadInput
from sameday.spec.reading import JSON, read_file

LIST = "dataset_info.json"
_HUBS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_KNOWN = ("file_name", "formatting", "ranking", "columns", "tags", "file_sha1", "revision")
_ALPACA = ("prompt", "query", "response", "history")
_DEFAULT_TAGS = {"observation_tag": "observation", "function_tag": "function_call", "system_tag": "system"}
_FORMS = {
    "messages": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    "conversations": {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"},
}
"""The column of the conversation, with the tags of its turns."""
_SYSTEMS = ("system", "system_prompt")
"""Columns of system prompts that are read beside the turns."""


def listed(folder: Path, name: str, option: str) -> tuple[Path, str]:
    """The file of a name, or what is wrong with it. `option` gives a file instead."""
    nowhere, instead = Path(), f"give {option} FILE"
    try:
        known = json.loads(read_file(folder / LIST, JSON))
    except (OSError, ValueError, RecursionError, BadInput) as error:
        return nowhere, f"{folder / LIST} cannot be read: {error}"
    entry = known.get(name) if isinstance(known, dict) else None
    if not isinstance(entry, dict):
        return nowhere, f"{folder / LIST} has no such name"
    why = next(_wrong(entry, instead), None)
    if why is not None:
        return nowhere, why
    return Path(os.path.normpath(folder / entry["file_name"])), ""


def _wrong(entry: dict[Any, Any], instead: str) -> Iterator[str]:
    """Why its questions would be others, or be read otherwise."""
    given = {key: value for key, value in entry.items() if value not in (None, "", False)}
    for name in _HUBS:
        if name in given or (name in entry and not isinstance(entry.get("file_name"), str)):
            yield f"it is fetched from a hub ({name} {show(entry[name])}): fetch it, and {instead}"
    if not isinstance(entry.get("file_name"), str):
        yield f"it is fetched from a hub: {instead}"
    if entry.get("formatting", "alpaca") != "sharegpt" or given.get("ranking"):
        yield f"its lines are no conversations (formatting sharegpt): {instead} in a form that is read"
    if "num_samples" in given:
        count = show(given["num_samples"])
        yield f"num_samples is {count}: so many are drawn at random: write them to a file, and {instead}"
    if given.get("split", "train") != "train":
        yield f"split is {show(given['split'])}: only a part of the questions: write it to a file, and {instead}"
    for name in ("subset", "folder"):
        if name in given:
            yield f"{name} is {show(given[name])}: only a part of the questions: write it to a file, and {instead}"
    for name in given:
        if name not in (*_KNOWN, "num_samples", "split"):
            yield f"{show(name)} is not known, and it may change the questions: {instead}"
    yield from _named_otherwise(entry, instead)


def _named_otherwise(entry: dict[Any, Any], instead: str) -> Iterator[str]:
    columns, tags = entry.get("columns"), entry.get("tags")
    odd = "its columns have names that are not read here: rename them in the data"
    for name, value in (("columns", columns), ("tags", tags)):
        if value is not None and not isinstance(value, dict):
            yield f"{name} is {show(value)}, and must be names: {instead}"
    columns, tags = columns or {}, tags or {}
    column = columns.get("messages") or "conversations"
    form = _FORMS.get(column) if isinstance(column, str) else None
    if form is None or columns.get("images") not in (None, "images", "image"):
        yield f"{odd}, and {instead}"
        return
    for name, value in columns.items():
        if value and name == "system":
            if value not in _SYSTEMS:
                named = f"{' and '.join(_SYSTEMS)} are read here: rename it in the data"
                yield f"columns.system is {show(value)}; {named}, and {instead}"
        elif value and name not in ("messages", "images", *_ALPACA):
            yield f"columns.{name} is {show(value)}, which is not read here: leave it out of the data, and {instead}"
    expected = {**_DEFAULT_TAGS, **form}
    if (tags.get("role_tag") or _FORMS["conversations"]["role_tag"]) != form["role_tag"]:
        yield f"{odd}, and {instead}"
    for name, value in tags.items():
        if value not in (None, expected.get(name)):
            allowed = f" (read: {expected[name]})" if name in expected else ""
            yield f"tags.{name} is {show(value)}, which is not read here{allowed}: rename it in the data, and {instead}"
