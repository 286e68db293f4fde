"""LLaMA-Factory's list of data, dataset_info.json: which file a name stands for, and what would be read otherwise."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sameday.spec.convert.columns import renamed
from sameday.spec.convert.conversion import show
from sameday.spec.errors import BadInput
from sameday.spec.reading import JSON, read_file

LIST = "dataset_info.json"
_HUBS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_KNOWN = ("file_name", "formatting", "ranking", "columns", "tags", "file_sha1", "revision")
_ALPACA = ("prompt", "query", "response", "history")
_INSTRUCTION = "instruction"
_OWN = "a line's own instruction stands instead of its question"
_ABSENT = {"prompt": _INSTRUCTION, "query": "input", "response": "output"}
"""Columns of alpaca's form where an entry has none; where it has some, only those."""
_DEFAULT_TAGS = {"observation_tag": "observation", "function_tag": "function_call", "system_tag": "system"}
_FORMS = {
    "messages": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    "conversations": {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"},
}
"""The column of the conversation, with the tags of its turns."""
_IMAGES = ("images", "image")
"""Columns of images that are read beside the turns."""
_OTHER_NAMES = "with data.fields in recipe.yaml where its keys have other names than image, question and answer"
_PLAIN = "take <image> out of questions: here an image stands before them, as it does where they begin with <image>"
_SYSTEMS = ("system", "system_prompt")
"""Columns of system prompts that are read beside the turns."""
_OWN_SYSTEM = f"a line's own {' or '.join(_SYSTEMS)} stands before its question, though no column names it"


@dataclass(frozen=True)
class Listed:
    """What a name stands for, or what is wrong with it."""

    file: Path = Path()
    fields: dict[str, str] = field(default_factory=dict)
    """What its lines call our keys, where that is something else."""
    note: str = ""
    wrong: str = ""


def listed(folder: Path, name: str, option: str) -> Listed:
    """`option` gives a file instead."""
    instead = f"give {option} FILE"
    try:
        known = json.loads(read_file(folder / LIST, JSON))
    except (OSError, ValueError, RecursionError, BadInput) as error:
        return Listed(wrong=f"{folder / LIST} cannot be read: {error}")
    entry = known.get(name) if isinstance(known, dict) else None
    if not isinstance(entry, dict):
        return Listed(wrong=f"{folder / LIST} has no such name")
    why = next(_wrong(entry, instead), None)
    if why is not None:
        return Listed(wrong=why)
    file, columns = Path(os.path.normpath(folder / entry["file_name"])), _columns(entry)
    if not _is_alpaca(entry):
        images = columns.get("images")
        return Listed(file, {} if images in (None, "", *_IMAGES) else {"image": images})
    question = columns.get("prompt") or columns["query"]
    fields = renamed({"image": columns["images"], "question": question, "answer": columns["response"]})
    own = [_OWN] * (question != _INSTRUCTION) + [_OWN_SYSTEM] * (not columns.get("system"))
    return Listed(file, fields, "; ".join((_PLAIN, *own)))


def _is_alpaca(entry: dict[Any, Any]) -> bool:
    return (entry.get("formatting") or "alpaca") == "alpaca"


def _columns(entry: dict[Any, Any]) -> dict[Any, Any]:
    absent = _ABSENT if _is_alpaca(entry) else {}
    return absent if entry.get("columns") is None else entry["columns"]


def _wrong(entry: dict[Any, Any], instead: str) -> Iterator[str]:
    """Why its questions would be others, or be read otherwise."""
    given = {key: value for key, value in entry.items() if value not in (None, "", False)}
    for name in _HUBS:
        if name in given or (name in entry and not isinstance(entry.get("file_name"), str)):
            yield f"it is fetched from a hub ({name} {show(entry[name])}): fetch it, and {instead}"
    if not isinstance(entry.get("file_name"), str):
        yield f"it is fetched from a hub: {instead}"
    if given.get("formatting", "alpaca") not in ("alpaca", "sharegpt"):
        yield f"formatting is {show(given['formatting'])}, and alpaca and sharegpt are read here: {instead}"
    if "ranking" in given:
        yield f"ranking is {show(given['ranking'])}: answers are compared, and no recipe learns that: {instead}"
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
    for name in ("columns", "tags"):
        if entry.get(name) is not None and not isinstance(entry[name], dict):
            yield f"{name} is {show(entry[name])}, and must be names: {instead}"
    columns = _columns(entry)
    for name, value in columns.items():
        if value and not isinstance(value, str):
            yield f"columns.{name} is {show(value)}, and must be a name: {instead}"
    yield from _not_plain(columns, instead) if _is_alpaca(entry) else _named_otherwise(entry, columns, instead)


def _not_plain(columns: dict[Any, Any], instead: str) -> Iterator[str]:
    """Why lines of alpaca's form are no single question with an image and an answer. Their keys may have any names."""
    instead += f", {_OTHER_NAMES}"
    prompt, query = columns.get("prompt"), columns.get("query")
    if not columns.get("images"):
        yield f"columns has no images, and here each line names its images ([] for none): write them, and {instead}"
    if prompt and query:
        yield (
            f"a question is {prompt}, a line break and {query} (columns prompt and query), and no recipe joins two "
            f"keys: leave columns.query out if {query} is always empty, or write one text and {instead}"
        )
    for name, there in (("prompt", prompt or query), ("response", columns.get("response"))):
        if not there:
            yield f"columns has no {name}: {instead}"
    if columns.get("history"):
        yield (
            f"columns.history is {show(columns['history'])}, and earlier turns are read in conversations alone: write "
            f"all turns as messages, and {instead}"
        )
    yield from _unread(columns, ("prompt", "query", "response", "history", "images", "messages"), instead)


def _unread(columns: dict[Any, Any], read: Collection[str], instead: str) -> Iterator[str]:
    for name, value in columns.items():
        if value and name == "system":
            if value not in _SYSTEMS:
                named = f"{' and '.join(_SYSTEMS)} are read here: rename it in the data"
                yield f"columns.system is {show(value)}; {named}, and {instead}"
        elif value and name not in read:
            yield f"columns.{name} is {show(value)}, which is not read here: leave it out of the data, and {instead}"


def _named_otherwise(entry: dict[Any, Any], columns: dict[Any, Any], instead: str) -> Iterator[str]:
    tags = entry.get("tags") or {}
    odd = "its columns have names that are not read here: rename them in the data"
    column = columns.get("messages") or "conversations"
    form = _FORMS.get(column)
    if form is None:
        yield f"{odd}, and {instead}"
        return
    yield from _unread(columns, ("messages", "images", *_ALPACA), instead)
    expected = {**_DEFAULT_TAGS, **form}
    if (tags.get("role_tag") or _FORMS["conversations"]["role_tag"]) != form["role_tag"]:
        yield f"{odd}, and {instead}"
    for name, value in tags.items():
        if value not in (None, expected.get(name)):
            allowed = f" (read: {expected[name]})" if name in expected else ""
            yield f"tags.{name} is {show(value)}, which is not read here{allowed}: rename it in the data, and {instead}"
