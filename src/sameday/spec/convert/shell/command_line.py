"""The command line of a trainer: its program, the flags of a launcher and of the program, settings of another kind."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sameday.spec.convert.conversion import Note
from sameday.spec.convert.settings import SECRET
from sameday.spec.convert.shell.expansion import CALLER
from sameday.spec.convert.shell.variables import Text, Unknown, known, shown
from sameday.spec.document import Document
from sameday.spec.errors import BadInput, refuse

_LAUNCHERS = (
    *("accelerate launch", "torchrun", "deepspeed", "torch.distributed.run", "torch.distributed.launch"),
    *("accelerate.commands.launch", "accelerate.commands.accelerate_cli launch"),
    "deepspeed.launcher.runner",
)
_OF_NO_ACCOUNT = (
    *("output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "deepspeed", "hostfile"),
    *("cache_dir", "main_process_port", "master_port"),
    *("master_addr", "main_process_ip", "node_rank", "machine_rank", "rdzv_id", "rdzv_endpoint"),
)
"""Flags whose values may be variables that nobody knows."""
_CONFIG = re.compile(r".*\.(?:ya?ml|json)")
_CONFIG_FLAGS = ("config", "cfg", "config_file", "cfg_file")
_OF_LAUNCHING = (*_CONFIG_FLAGS, "launcher")
"""Flags beside a config file that are no settings."""
_MODULE = ("-m", "--module")
_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@-]*=.*", re.DOTALL)
_DEEPEST = 20


@dataclass
class Flag:
    name: str
    line: int
    launching: bool
    values: list[Text] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, ...]:
        return ("launch",) * self.launching + (self.name.replace("-", "_"),)

    @property
    def shown(self) -> str:
        values = ["***"] if SECRET.search(self.name) else map(shown, self.values)
        return " ".join([f"--{self.name}", *values])


@dataclass
class CommandLine:
    line: int
    program: list[str] = field(default_factory=list)
    flags: list[Flag] = field(default_factory=list)
    overrides: list[tuple[str, int]] = field(default_factory=list)
    """Settings such as lr=1e-4, which change a config file."""
    config: str = ""
    """The file that it reads its settings from."""
    problems: list[str] = field(default_factory=list)
    outside: dict[str, int] = field(default_factory=dict)
    """What may be given from outside, with its line."""

    def changes(self) -> list[str]:
        flags = [each.shown for each in self.flags if not each.launching and each.name not in _OF_LAUNCHING]
        return [*(text for text, _ in self.overrides), *flags]


def command_line(words: Sequence[tuple[Text, int]], source: str) -> CommandLine:
    """Until a launcher's program is named, flags are the launcher's."""
    made = CommandLine(words[0][1])
    launching, flag, skip = False, None, False
    for place, (text, line) in enumerate(words):
        word, then = shown(text), shown(words[place + 1][0]) if place + 1 < len(words) else ""
        module = word in _MODULE[: 1 + launching] and (launching or _is_python(made.program))
        if skip:
            skip = False
        elif word == "--" and made.program:
            launching, flag = launching or "axolotl" in made.program, None  # what follows is its launcher's
        elif module:
            flag = None
        elif text == (CALLER,) and (flag is None or flag.values or place + 1 == len(words)):
            made.outside[word] = line
        elif word.startswith("--") or (word.startswith("-") and flag is None and not _of_python(made.program, word)):
            name, value = _named(text)
            made.problems += [] if value is not None else _not_known(text, line, source)
            flag = Flag(name, line, launching, [value] if value is not None else [])
            made.flags.append(flag)
            if value is not None or (launching and (then.endswith(".py") or then in _MODULE)):
                flag = None if launching else flag
        elif flag is not None:
            if flag.values and _OVERRIDE.fullmatch(word):
                made.overrides.append((word, line))
            else:
                flag.values.append(text)
            flag = None if launching else flag
        elif _of_python(made.program, word):
            skip = word in ("-W", "-X")
        else:
            _positional(made, text, line, launching, source)
            launching = not launching and _launches(made.program)
            flag = None
    for each in made.flags:
        if not each.launching and each.key[-1] in _CONFIG_FLAGS and each.values:
            given = shown(each.values[0])
            made.config = given if _CONFIG.fullmatch(given) and not made.config else made.config
    return made


def _named(text: Text) -> tuple[str, Text | None]:
    """--name=value, of which the value may be a variable."""
    first = text[0] if isinstance(text[0], str) else text[0].shown
    name, equals, value = first.lstrip("-").partition("=")
    if not equals:
        return shown(text).lstrip("-"), None
    return name, (*([value] if value or len(text) == 1 else []), *text[1:])


def _not_known(text: Text, line: int, source: str) -> list[str]:
    unknown = next((each for each in text if isinstance(each, Unknown)), None)
    return [] if unknown is None else [f"{source}:{line}: {shown(text)} stands in the command; {unknown.why}"]


def _is_python(program: Sequence[str]) -> bool:
    return len(program) == 1 and Path(program[0]).name.startswith("python")


def _of_python(program: Sequence[str], word: str) -> bool:
    """Options of python itself, such as -u."""
    return _is_python(program) and re.fullmatch(r"-[^m-].*", word) is not None


def _launches(program: Sequence[str]) -> bool:
    said = " ".join([*program[-2:-1], Path(program[-1]).name])
    return any(said == each or said.endswith(f" {each}") for each in _LAUNCHERS)


def _positional(made: CommandLine, text: Text, line: int, launching: bool, source: str) -> None:
    word = shown(text)
    made.problems += [] if word.endswith(".py") else _not_known(text, line, source)
    if _OVERRIDE.fullmatch(word):
        made.overrides.append((word, line))
    elif _CONFIG.fullmatch(word) and made.program and not launching:
        made.config = made.config or word
    made.program.append(word)


def put_flags(line: CommandLine, document: Document, replaced: Collection[str] = ()) -> list[Note]:
    """As settings of the document; returns notes about flags that are given twice, of which argparse takes the last.
    BadInput for all that is not known, but in flags that the caller replaces."""
    source, problems = document.source, list(line.problems)
    if line.overrides:
        said = ", ".join(text for text, _ in line.overrides[:8])
        problems.append(
            f"{source}:{line.overrides[0][1]}: {said} changes a config file, and no such file is named here: convert "
            "the program's own config file, after putting that into it"
        )
    last = {flag.key: flag for flag in line.flags}
    notes = []
    for flag in line.flags:
        if flag is not (counts := last[flag.key]):
            why = f"line {flag.line}; given again as {counts.shown} in line {counts.line}: the last one counts"
            notes.append(Note(f"({flag.shown})", None, None, why))
            continue
        gone = flag.key[-1] in replaced and not flag.launching
        problems += _unknown_values(flag, line, source, gone)
        words = [shown(text) if gone else known(text).rstrip(",") for text in flag.values]
        place = f"{source}:{flag.line}: --{flag.name}"
        here = document.values.setdefault("launch", {}) if flag.launching else document.values
        made = [read_value(word, place) for word in words]
        here[flag.key[-1]] = True if not made else made[0] if len(made) == 1 else made
        document.places[flag.key] = f"{source}:{flag.line}"
    refuse(problems)
    return notes


def _unknown_values(flag: Flag, line: CommandLine, source: str, gone: bool) -> list[str]:
    """Sentences about values that are not known, where the model depends on them. What stands behind the first value
    may be a flag, whatever the flag before it is about."""
    problems = []
    for number, text in enumerate(flag.values):
        unknown = next((each for each in text if isinstance(each, Unknown) and not _empty(each)), None)
        line.outside |= {each.shown: flag.line for each in text if isinstance(each, Unknown) and _empty(each)}
        no_account = (flag.key[-1] in _OF_NO_ACCOUNT and not number) or (gone and (not number or len(text) > 1))
        if unknown is not None and not no_account and not _counted_otherwise(flag, line):
            first = shown(flag.values[0])
            what = f"{shown(text)} stands behind --{flag.name} {first}" if number else f"--{flag.name} is {first}"
            problems.append(f"{source}:{flag.line}: {what}; {unknown.why}")
    return problems


def _counted_otherwise(flag: Flag, line: CommandLine) -> bool:
    """Machines, where accelerate is given the processes of all of them."""
    asked = {each.key for each in line.flags}
    return flag.key == ("launch", "num_machines") and ("launch", "num_processes") in asked


def _empty(unknown: Unknown) -> bool:
    return unknown.optional and unknown is not CALLER


def read_value(word: str, place: str) -> Any:
    """Numbers, true and false as YAML has them, JSON as what it holds; everything else is text."""
    if word[:1] in ("{", "["):
        depth = deepest = 0
        for bracket in re.findall(r"[\[\]{}]", word):
            depth += 1 if bracket in "[{" else -1
            deepest = max(deepest, depth)
        if deepest > _DEEPEST:
            raise BadInput(f"{place} has brackets in brackets deeper than {_DEEPEST}")
        try:
            return json.loads(word)
        except ValueError:
            return word
    if not re.fullmatch(r"[-+.\w]{1,100}", word) or re.fullmatch(r"[-+]?0\d+", word):
        return word
    try:
        value = yaml.safe_load(word)
    except (ValueError, yaml.YAMLError):
        return word
    return value if isinstance(value, bool | int | float) else word
