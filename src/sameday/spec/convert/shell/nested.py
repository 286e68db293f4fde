"""Commands that run other commands: of a text (bash -c, sbatch --wrap, tmux), of a here-document, of another file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sameday.spec.convert.shell.grammar import Node, Simple
from sameday.spec.convert.shell.variables import Text, shown

ONLY_NAMES = (
    *("echo", "printf", "which", "type", "pip", "pip3", "kill", "pkill", "killall", "grep", "cat", "cp", "mv", "rm"),
    *("ls", "mkdir", "cd", "tail", "git", "wget", "curl", "test", "[", "[[", "command", "trap", "alias"),
)
"""Commands whose words may be the name of a program that they do not start."""
_SHELLS = ("bash", "sh", "zsh")
_OF_INPUT = (*_SHELLS, "sbatch")
"""What runs the commands that it reads."""
_FILES = (".sh", ".bash", ".slurm", ".sbatch")
_OF_FILES = (*_OF_INPUT, "source", ".", "srun", "nohup")
_ELSEWHERE = ("sbatch", "tmux", "screen", "ssh")
_TMUX = (
    *("new", "new-session", "neww", "new-window", "splitw", "split-window", "send", "send-keys", "run", "run-shell"),
    *("respawnp", "respawn-pane", "respawnw", "respawn-window"),
)
"""What tmux is asked for with a command as its last text."""


def inner_script(words: Sequence[Text]) -> list[Text]:
    """The text that a command is given to run; empty where there is none."""
    said = [shown(text) for text in words]
    program = Path(said[0]).name
    for place, word in enumerate(said):
        if re.fullmatch(r"-\w*c", word) and place and Path(said[place - 1]).name in _SHELLS:
            return [*words[place + 1 : place + 2]]
        if program == "sbatch" and word == "--wrap":
            return [*words[place + 1 : place + 2]]
        first, *rest = words[place] or ("",)
        if program == "sbatch" and isinstance(first, str) and first.startswith("--wrap="):
            return [(first.removeprefix("--wrap="), *rest)]
    several = [text for text, word in zip(words, said, strict=True) if re.search(r"\s", word)]
    return several[-1:] if program == "tmux" and {*said} & {*_TMUX} else []


def reads_commands(words: Sequence[Text]) -> bool:
    """Whether a command runs what is given to it as a here-document or through a pipe."""
    programs = [Path(shown(text)).name for text in words]
    return programs[0] not in ONLY_NAMES and not {*programs}.isdisjoint(_OF_INPUT) and "-c" not in programs


def with_input(commands: Sequence[Node]) -> Sequence[Node]:
    """Of `cat <<END | bash`, bash gets the here-document."""
    first, last = commands[0], commands[-1]
    if not isinstance(first, Simple) or not isinstance(last, Simple) or first.document is None:
        return commands
    return [*commands[:-1], replace(last, document=last.document or first.document)]


def not_read(said: Sequence[str]) -> str:
    """What to do about a command that runs others which cannot be read here; empty for all other commands."""
    program, file = Path(said[0]).name, next((each for each in said if each.endswith(_FILES)), None)
    if file is not None and (said[0] == file or program in _OF_FILES):
        return f"runs {file}: if that starts the training, convert that file"
    if program in _ELSEWHERE:
        return f"what {program} runs is not read here: paste the command that trains into a file, and convert that"
    return ""
