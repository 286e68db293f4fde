"""A shell script that starts a trainer, read as a config: the flags of its command line, and variables before it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sameday.spec.convert import keys
from sameday.spec.convert.conversion import Note
from sameday.spec.convert.shell import grammar
from sameday.spec.convert.shell.command_line import CommandLine, command_line, put_flags
from sameday.spec.convert.shell.execution import STARTS, Execution, Start
from sameday.spec.convert.shell.outside import Default, defaults
from sameday.spec.convert.shell.variables import Unknown, shown
from sameday.spec.convert.trainers.registry import recognise
from sameday.spec.document import Document
from sameday.spec.errors import BadInput, refuse
from sameday.spec.reading import read_spec

_SCRIPT = re.compile(
    rf"^(?:#!.*|[ \t]*(?:\w+=\S*[ \t]+)*(?:{'|'.join(STARTS)}|python3?)\b[^:\n]*)$",
    re.MULTILINE,
)
_FLAG = re.compile(r"(?<![\w-])--([A-Za-z][\w.-]*)")
_TRAINS_NOTHING = (
    *("export", "infer", "inference", "eval", "evaluate", "deploy", "merge", "merge-lora", "merge_lora", "chat", "api"),
    *("webchat", "web-ui", "web_ui", "webui", "app", "rollout", "sample", "preprocess", "fetch", "quantize", "env"),
    *("version", "help", "vllm-serve", "vllm_serve", "delinearize-llama4", "merge-sharded-fsdp-weights"),
)
"""What the programs of trainers are asked for besides training."""
_OTHER_NAMES = {"eval", "evaluate", "evaluation", "infer", "inference", "test", "merge", "export", "predict"}


@dataclass(frozen=True)
class Script:
    """Its settings; the words of the command: `swift sft`, `accelerate launch train.py`; what is not taken from it."""

    document: Document
    command: str = ""
    notes: list[Note] = field(default_factory=list)
    environment: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Variables that the trainer gets, each with its place; `take_environment` takes the settings among them."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Of them, those whose value is not known, with the sentence that says so."""
    defaults: list[Default] = field(default_factory=list)
    """Variables that may be given from outside, of which the script's own default is taken."""
    by_file: CommandLine | None = None
    """The command line, where it names a config file, from which no setting is taken then."""
    written: dict[Path, int] = field(default_factory=dict)
    """Files whose text stands in the script, with the lines of the commands that write them."""


def is_script(path: Path) -> bool:
    if path.suffix in (".sh", ".bash"):
        return True
    try:
        text = read_spec(path, "config or script of a training").decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False  # `read_document` says what is wrong with it
    return path.suffix not in (".yaml", ".yml", ".json") and _SCRIPT.search(text) is not None


def read_script(path: Path, data: Collection[str] = (), trainer: str | None = None) -> Script:
    """A launcher's own flags stand under `launch`. BadInput where no command, or more than one, trains. `data` are the
    options of sameday's own command line that stand instead of flags, whose values are then not needed."""
    try:
        text = read_spec(path, "config or script of a training").decode("utf-8")
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from None
    execution = _executed(path, text)
    start, line, notes = _training(path, execution)
    made = defaults(execution.expansion, (start, line), lambda name: _training(path, _executed(path, text, name))[:2])
    environment, unknown = _environment(path, start)
    document, command = Document(str(path)), " ".join(line.program)
    if line.config:
        return Script(document, command, notes, environment, by_file=line, written=execution.written)
    for flag in line.flags:
        if not flag.values and (argument := execution.expansion.not_given.get((f"--{flag.name}", flag.line))):
            why = f"its function is called without {argument} here: give it"
            line.problems.append(f"{path}:{flag.line}: --{flag.name} is {argument}; {why}")
    _to_their_lines(line, text)
    notes += put_flags(line, document, _replaced(line, data, trainer))
    for (name, flags), at in execution.variables.left_out.items():
        why = f"line {at} puts it into {name} on a condition; here it is left out: the model does not depend on it"
        notes.append(Note(f"({flags})", None, None, why))
    line.outside |= {each.shown: line.line for each in start.outside}
    for given, at in line.outside.items():
        why = f"line {at} takes it from outside of the script; here it counts as empty"
        notes.append(Note(f"({given})", None, None, why))
    return Script(document, command, notes, environment, unknown, made)


def _executed(path: Path, text: str, withheld: str = "") -> Execution:
    execution = Execution(str(path), withheld)
    execution.all(grammar.commands(text, str(path)))
    return execution


def _environment(path: Path, start: Start) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """The variables of a command, and sentences about those whose value is not known."""
    environment, unknown = {}, {}
    for name, (value, at) in start.environment.items():
        place = f"{path}:{at}"
        if whose := next((each for each in value if isinstance(each, Unknown)), None):
            unknown[name] = f"{place}: {name} is {shown(value)}; {whose.why}"
        environment[name] = (shown(value), place)
    return environment, unknown


def _to_their_lines(line: CommandLine, text: str) -> None:
    """A flag out of a variable or an array gets the line on which it is written, where that is one line: values of
    variables know no lines."""
    rows = text.split("\n")
    written: dict[str, list[int]] = {}
    for number, row in enumerate(rows, 1):
        for name in {*_FLAG.findall(row)} if not row.lstrip().startswith("#") else ():
            written.setdefault(name, []).append(number)
    for flag in line.flags:
        places = written.get(flag.name, [])
        value = shown(flag.values[0]) if flag.values else ""
        alike = [number for number in places if value in rows[number - 1]]
        if flag.line not in places and len(alike or places) == 1:
            (flag.line,) = alike or places


def _replaced(line: CommandLine, data: Collection[str], trainer: str | None) -> set[str]:
    """Flags that these options stand instead of."""
    names = [each.key[-1] for each in line.flags if not each.launching]
    try:
        whose, _ = recognise(names, " ".join(line.program), trainer)
    except BadInput:  # the caller says it
        return set()
    gone = {each for option in data for each in keys.replaced_by(option, whose.data)}
    aliases = {**keys.ALIASES, **whose.aliases}
    return {each for each in names if aliases.get(each, each) in gone}


def _training(path: Path, execution: Execution) -> tuple[Start, CommandLine, list[Note]]:
    """The one command that trains, and notes about those that do not."""
    read = [(start, command_line(start.words, str(path))) for start in execution.starts]
    asked = [(start, line) for start, line in read if line.flags or line.overrides or line.config]
    others = [line for _, line in asked if _trains_nothing(line.program)]
    found = [(start, line) for start, line in asked if line not in others]
    if len(found) > 1:
        by_name = [line for _, line in found if _named_otherwise(line.program)]
        if len(by_name) == len(found) - 1:
            found = [(start, line) for start, line in found if line not in by_name]
            others += by_name
    if not found:
        training = (line for _, line in read if not _trains_nothing(line.program))
        refuse([*(problem for line in training for problem in line.problems), *execution.undecided])
    if len(found) != 1:
        lines = ", ".join(str(line.line) for _, line in found)
        what = f"starts {len(found)} trainings (lines {lines})" if found else "starts no trainer that is known"
        raise BadInput(f"{path}: {what}; must be one command with --flags, of {', '.join(STARTS)} or python")
    start, line = found[0]
    notes = [Note(f"({' '.join(each.program)})", None, None, f"line {each.line} does not train") for each in others]
    return start, line, notes


def _trains_nothing(program: Sequence[str]) -> bool:
    first, *rest = program
    if Path(first).name in STARTS:
        return bool(rest) and rest[0] in _TRAINS_NOTHING
    return bool(rest) and rest[0].startswith(STARTS) and rest[0].split(".")[-1] in _TRAINS_NOTHING


def _named_otherwise(program: Sequence[str]) -> bool:
    """Whether a program of one's own is called as those are that evaluate or export."""
    name = next((each for each in program if each.endswith(".py")), "")
    words = {*re.split(r"[^a-z]+", Path(name).stem.lower())}
    return bool(words & _OTHER_NAMES) and not words & {"train", "training", "finetune", "sft"}
