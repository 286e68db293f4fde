"""A shell script that starts a trainer, read as a config: the flags of its command line, and variables before it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from sameday.spec.document import Document
from sameday.spec.errors import BadInput, refuse
from sameday.spec.reading import read_spec

_COMMANDS = (
    r"swift|megatron|llamafactory-cli|axolotl|trl|accelerate|torchrun|deepspeed|srun|python3?|CUDA_VISIBLE_DEVICES"
)
_SCRIPT = re.compile(rf"^(?:#!.*|\s*(?:\w+=\S*\s+)*(?:{_COMMANDS})\b[^:\n]*)$", re.MULTILINE)
_SET = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_LAUNCHERS = ("accelerate launch", "torchrun", "deepspeed", "torch.distributed.run", "torch.distributed.launch")

Word = tuple[str, int]


def is_script(path: Path) -> bool:
    if path.suffix in (".sh", ".bash"):
        return True
    try:
        text = read_spec(path).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False  # `read_document` says what is wrong with it
    return path.suffix not in (".yaml", ".yml", ".json") and _SCRIPT.search(text) is not None


def read_script(path: Path) -> tuple[Document, str]:
    """Its settings, and the words of the command: `swift sft`, `accelerate launch train.py`. A launcher's own flags
    stand under `launch`. BadInput where no command, or more than one, has flags."""
    try:
        text = read_spec(path).decode("utf-8")
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from None
    document = Document(str(path))
    variables: dict[str, str] = {}
    exported: dict[str, tuple[str, int]] = {}
    starts = []
    for words in _commands(text, str(path)):
        export = words[0][0] == "export"
        while words and (export or _SET.fullmatch(words[0][0])):
            word, line = words.pop(0)
            if given := _SET.fullmatch(word):
                variables[given[1]] = _filled(given[2], variables)
                if export or words:
                    exported[given[1]] = (variables[given[1]], line)
        if any(word.startswith("--") for word, _ in words):
            starts.append([(_filled(word, variables), line) for word, line in words])
    if len(starts) != 1:
        lines = ", ".join(str(words[0][1]) for words in starts)
        found = f"has {len(starts)} commands with flags (lines {lines})" if starts else "has no command with --flags"
        raise BadInput(f"{path}: {found}; must have one that starts a training")
    for name, (value, line) in exported.items():
        document.values[name], document.places[(name,)] = _value(value), f"{path}:{line}"
    return document, _flags(starts[0], document)


def _commands(text: str, source: str) -> list[list[Word]]:
    """Words with their lines. A backslash at a line's end goes on; so does a quote that is open."""
    text = re.sub(r"`#[^`\n]*`", "", text)
    commands: list[list[Word]] = []
    pending, first, goes_on = "", 0, False
    for number, line in enumerate(text.splitlines(), 1):
        first = number if not pending else first
        more = line.rstrip().endswith("\\")
        pending += line.rstrip().removesuffix("\\") if more else line
        try:
            words = [(word, first) for word in shlex.split(pending, comments=True) if word not in ("$@", ";", "&")]
        except ValueError:
            pending += "\n"
            continue
        if words:
            commands = commands if goes_on and commands else [*commands, []]
            commands[-1] += words
        # A comment between two flags ends nothing.
        goes_on = more or (goes_on and not words and line.lstrip().startswith("#"))
        pending = ""
    if pending.strip():
        raise BadInput(f"{source}:{first}: a quote is opened here and never closed")
    return [words for words in commands if words]


def _flags(words: list[Word], document: Document) -> str:
    """Put into the document; the words of the command are left. Until a launcher's own script is named, flags are the
    launcher's."""
    command: list[str] = []
    problems = []
    while words:
        word, line = words.pop(0)
        if not word.startswith("-") or word == "-m":
            command.append(words.pop(0)[0] if word == "-m" and words else word)
            continue
        said = " ".join(command)
        launching = any(each in said for each in _LAUNCHERS) and not any(each.endswith(".py") for each in command)
        name, _, value = word.lstrip("-").partition("=")
        key = ("launch",) * launching + (name.replace("-", "_"),)
        values = [value] if "=" in word else []
        while "=" not in word and words and not words[0][0].startswith("--"):
            if launching and (values or words[0][0].endswith(".py")):
                break
            values.append(words.pop(0)[0].rstrip(","))
        if key in document.places:
            problems.append(f"{document.source}:{line}: --{name} is given twice, first at {document.places[key]}")
        problems += [
            f"{document.source}:{line}: --{name} is {each}; this script does not say what {unknown[0]} is: give it"
            for each in values
            if (unknown := _VARIABLE.search(each))
        ]
        here = document.values.setdefault("launch", {}) if launching else document.values
        here[key[-1]] = True if not values else _value(values[0]) if len(values) == 1 else [_value(v) for v in values]
        document.places[key] = f"{document.source}:{line}"
    refuse(problems)
    return " ".join(command)


def _filled(word: str, variables: dict[str, str]) -> str:
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], found[0]), word)


def _value(word: str) -> Any:
    """Numbers, true and false as YAML has them, JSON as what it holds; everything else is text."""
    try:
        value = json.loads(word) if word[:1] in ("{", "[") else yaml.safe_load(word)
    except (ValueError, yaml.YAMLError):
        return word
    return value if isinstance(value, bool | int | float | dict | list) else word
