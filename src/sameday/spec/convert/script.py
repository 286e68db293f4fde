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

_STARTS = ("swift", "megatron", "llamafactory-cli", "axolotl", "trl", "accelerate", "torchrun", "deepspeed")
_SCRIPT = re.compile(rf"^(?:#!.*|\s*(?:\w+=\S*\s+)*(?:{'|'.join(_STARTS)}|python3?)\b[^:\n]*)$", re.MULTILINE)
_SET = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_UNKNOWN = re.compile(r"\$(?:\{[^}]*\}?|\w+|\([^)]*\)?)")
_LAUNCHERS = ("accelerate launch", "torchrun", "deepspeed", "torch.distributed.run", "torch.distributed.launch")
_OF_NO_ACCOUNT = ("output_dir", "logging_dir", "run_name", "deepspeed", "cache_dir", "main_process_port", "master_port")
"""Flags whose values may be variables that nobody knows."""

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
        words = _from_start(words)
        config = next((word for word, _ in words if word.endswith((".yaml", ".yml"))), None)
        flags = [word for word, _ in words if word.startswith("--")]
        if config is not None and (not flags or "--config" in flags):
            raise BadInput(f"{path}:{words[0][1]}: starts a training by {config}: convert that file")
        if flags:
            starts.append([(_filled(word, variables), line) for word, line in words])
    if len(starts) != 1:
        lines = ", ".join(str(words[0][1]) for words in starts)
        what = f"starts {len(starts)} trainings (lines {lines})" if starts else "starts no trainer that is known"
        raise BadInput(f"{path}: {what}; must be one command with --flags, of {', '.join(_STARTS)} or python")
    for name, (value, line) in exported.items():
        document.values[name], document.places[(name,)] = _value(value), f"{path}:{line}"
    command = _flags(starts[0], document)
    _count_processes(path, document)
    return document, command


def _count_processes(path: Path, document: Document) -> None:
    """As accelerate's own config has it, where that is found: together they make an effective batch."""
    launch = document.values.get("launch", {})
    named = launch.get("config_file")
    if not isinstance(named, str) or "num_processes" in launch:
        return
    for file in (path.parent / named, Path(named)):
        try:
            there = yaml.safe_load(read_spec(file))
        except (OSError, yaml.YAMLError, BadInput):
            continue
        if isinstance(there, dict) and isinstance(there.get("num_processes"), int):
            launch["num_processes"] = there["num_processes"]
            document.places["launch", "num_processes"] = str(file)
            return


def _commands(text: str, source: str) -> list[list[Word]]:
    """Words with their lines. A backslash at a line's end goes on; so does a quote that is open. What follows a pipe or
    a redirection is no flag."""
    text = re.sub(r"`#[^`\n]*`", "", text)
    commands: list[list[Word]] = [[]]
    pending, first, goes_on = "", 0, False
    for number, line in enumerate(text.splitlines(), 1):
        first = number if not pending else first
        more = line.rstrip().endswith("\\")
        pending += line.rstrip().removesuffix("\\") if more else line
        try:
            words = _words(pending)
        except ValueError:
            pending += "\n"
            continue
        if not goes_on:
            commands.append([])
        for word in words:
            if word in ("&&", ";", "||"):
                commands.append([])
            else:
                commands[-1].append((word, first))
        # A comment between two flags ends nothing.
        goes_on = more or (goes_on and not words and line.lstrip().startswith("#"))
        pending = ""
    if pending.strip():
        raise BadInput(f"{source}:{first}: a quote is opened here and never closed")
    return [kept for words in commands if (kept := _without_redirections(words))]


def _words(line: str) -> list[str]:
    """Of one line, up to a comment: a word that begins with #, and not one that has it inside."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    words = list(lexer)
    end = next((place for place, word in enumerate(words) if word.startswith("#")), len(words))
    return [word for word in words[:end] if word != "$@"]


def _without_redirections(words: list[Word]) -> list[Word]:
    place = next((i for i, (word, _) in enumerate(words) if re.fullmatch(r"[|&<>]+", word)), len(words))
    if place < len(words) and place and re.fullmatch(r"[012]", words[place - 1][0]) and words[place][0][0] == ">":
        place -= 1  # the 2 of 2>&1
    return words[:place]


def _from_start(words: list[Word]) -> list[Word]:
    """Without what stands before the command itself, such as srun or nohup; nothing where no trainer is started."""
    for place, (word, _) in enumerate(words):
        name = Path(word).name
        if name in _STARTS or re.fullmatch(r"python[\d.]*", name):
            return words[place:]
    return []


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
        for number, each in enumerate(values):
            if (unknown := _UNKNOWN.search(each)) and key[-1] not in _OF_NO_ACCOUNT:
                what = f"{each} stands behind --{name} {values[0]}" if number else f"--{name} is {each}"
                problems.append(
                    f"{document.source}:{line}: {what}; this script does not say what {unknown[0]} is: give it"
                )
        values = [_UNKNOWN.sub("", each) for each in values]
        here = document.values.setdefault("launch", {}) if launching else document.values
        here[key[-1]] = True if not values else _value(values[0]) if len(values) == 1 else [_value(v) for v in values]
        document.places[key] = f"{document.source}:{line}"
    refuse(problems)
    return " ".join(command)


def _filled(word: str, variables: dict[str, str]) -> str:
    """With the variables that the script sets, or the values that it has for those that are not set."""

    def value(found: re.Match[str]) -> str:
        known = variables.get(found[1] or found[3])
        return known if known is not None else found[2] if found[2] is not None else found[0]

    return _VARIABLE.sub(value, word)


def _value(word: str) -> Any:
    """Numbers, true and false as YAML has them, JSON as what it holds; everything else is text."""
    try:
        value = json.loads(word) if word[:1] in ("{", "[") else yaml.safe_load(word)
    except (ValueError, yaml.YAMLError):
        return word
    return value if isinstance(value, bool | int | float | dict | list) else word
