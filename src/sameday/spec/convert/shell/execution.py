"""A shell script gone through command by command, as far as it can be known without running it: which commands start a
program of training, with which words and variables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from sameday.spec.convert.shell import grammar, nested
from sameday.spec.convert.shell.expansion import ARGUMENTS, Expansion, from_outside
from sameday.spec.convert.shell.grammar import ASSIGNMENT, DECLARATIONS, Chain, Choice, Function, Loop, Node, Pipe
from sameday.spec.convert.shell.variables import Text, Unknown, Value, divided, shown
from sameday.spec.convert.shell.words import Arithmetic, HereDocument, Part, Word, document_parts
from sameday.spec.errors import BadInput

STARTS = ("swift", "megatron", "llamafactory-cli", "axolotl", "trl", "accelerate", "torchrun", "deepspeed")
_SURE = ("cd", "mkdir", "set", "echo", "source", ".", ":", "true", "ulimit", "module", "conda", *DECLARATIONS)
"""Commands behind which && is no condition: where they fail, a script is of no use."""
_MODULES = ("pip", "venv", "ensurepip", "tensorboard.main", "ipykernel", "http.server")
_CALLS, _STEPS = 20, 20_000
"""Functions in functions, and commands in functions: no script needs more."""
_LEAVE = {"exit": "exit", "return": "function", "break": "loop", "continue": "loop"}


@dataclass(frozen=True)
class Start:
    words: list[tuple[Text, int]]
    environment: dict[str, tuple[Text, int]]
    outside: list[Unknown]
    """What may be given from outside."""


@dataclass
class _Frame:
    """A function or a loop that is being run: the layer it began with, and what was set where it was left early."""

    kind: str
    layer: int
    left: list[dict[str, Value | None]] = field(default_factory=list)


class Execution:
    """Each method returns how the commands end a script, a function or a loop: "" where they go on."""

    def __init__(self, source: str, withheld: str = "") -> None:
        self.source = source
        self.expansion = Expansion(source, withheld)
        self.variables = self.expansion.variables
        self.starts: list[Start] = []
        self.undecided: list[str] = []
        """Sentences about what may start a training and is not read: commands that a condition decides, other files."""
        self.written: dict[Path, int] = {}
        """Files whose text the script has, with the lines of the commands that write them."""
        self.functions: dict[str, Node] = {}
        self.exported: dict[str, None] = {}
        self.frames: list[_Frame] = []
        self.local: list[dict[str, Value | None]] = []
        self.steps = 0

    def all(self, nodes: Sequence[Node]) -> str:
        return next(filter(None, map(self.run, nodes)), "")

    def run(self, node: Node) -> str:
        if isinstance(node, grammar.Simple):
            return self.simple(node)
        if isinstance(node, Chain):
            return self.chain(node)
        if isinstance(node, Choice):
            return self.choice(node)
        if isinstance(node, Loop):
            return self.loop(node)
        if isinstance(node, Function):
            self.functions[node.name] = node.body
        elif isinstance(node, Arithmetic):
            for name in grammar.computed(node.text):
                self.variables.unknown(name, f"{name} is computed in line {node.line}: give the number", node.line)
        elif isinstance(node, Pipe):
            for each in nested.with_input(node.commands):
                with self.variables.layer():  # a shell of its own, which ends here
                    self.run(each)
        elif not node.subshell:
            return self.all(node.body)
        else:
            with self.variables.layer():
                self.all(node.body)
        return ""

    def chain(self, node: Chain) -> str:
        """What a failing command leaves out is set in some cases only."""
        ends: list[dict[str, Value | None]] = []
        path: dict[str, Value | None] = {}
        end, sure = self.along(path, node.first), _sure(node.first)
        always = sure
        for operator, each in node.rest:
            if operator == "&&":
                ends += [] if sure else [dict(path)]
                end = end or self.along(path, each)
            elif always:
                continue  # it runs where something failed
            else:
                ends, path = [] if end else [path], {}
                end = self.along(path, each)
            sure = _sure(each)
            always = always and sure
        ends += [] if end else [path]
        self.variables.join(ends)
        return "" if ends else end

    def along(self, path: dict[str, Value | None], node: Node) -> str:
        with self.variables.layer() as layer:
            layer.update(path)
            end = self.run(node)
        path.update(layer)
        return end

    def choice(self, node: Choice) -> str:
        branches: list[dict[str, Value | None]] = [] if node.all else [{}]
        ends = []
        for number, (condition, body) in enumerate(node.branches):
            if not number:
                self.all(condition)
            with self.variables.layer() as layer:
                end = self.all(condition if number else ()) or self.all(body)
            branches += [] if end else [layer]
            ends.append(end)
        self.variables.join(branches)
        return "" if branches else "left" if "left" in ends else "exit"

    def loop(self, node: Loop) -> str:
        words = None if node.words is None else self.expansion.words(node.words)[0]
        if node.name and words == []:
            return ""
        with self.variables.layer() as layer:
            frame = _Frame("loop", len(self.variables.layers) - 1)
            if node.name and words is not None and len(words) == 1 and not _unknown(words[0][0]):
                self.variables.set(node.name, Value((words[0][0],), line=node.line))
            else:
                self.repeated(node, words)
            self.frames.append(frame)
            end = self.all(node.body)
            self.frames.pop()
        runs = any(not _unknown(text) for text, _ in words or ())
        branches = [*([] if runs else [{}]), *frame.left, *([] if end else [layer])]
        self.variables.join(branches)
        return "" if branches else end

    def repeated(self, node: Loop, words: Sequence[tuple[Text, int]] | None) -> None:
        """What the body sets may have been set by the round before."""
        for name in dict.fromkeys(grammar.assigned(node.body)):
            if name == grammar.SHIFTED:
                if self.variables.get(ARGUMENTS) is None:
                    continue  # fewer of what is not known
                name = ARGUMENTS
            why = f"{name} changes in the loop of line {node.line}: leave one value"
            self.variables.unknown(name, why, node.line)
        if node.name:
            values = ", ".join(shown(text) for text, _ in (words or [])[:8]) or "what the script's caller gives"
            why = (
                f"{node.name} is in turn {values} in the loop of line {node.line}, "
                "which would be several trainings: leave one value"
            )
            self.variables.unknown(node.name, why, node.line)

    def simple(self, node: grammar.Simple) -> str:
        if not node.words:
            return ""
        self.steps += bool(self.local)
        line = node.words[0].line
        if self.steps > _STEPS:
            raise BadInput(f"{self.source}:{line}: functions run more than {_STEPS:,} commands up to here")
        own = list(takewhile(_assigns, node.words))
        rest = node.words[len(own) :]
        if not rest:
            for word in own:
                self.assign(word)
            return ""
        if rest[0].plain in DECLARATIONS:
            return self.declare(rest)
        words, outside = self.expansion.words(rest)
        if not words:
            return ""
        prefix = {}
        for word in own:
            name, _, value = self.parts_of(word)
            prefix[name] = (self.expansion.text(value), word.line)
        if node.document is not None:
            files = [self.expansion.text(node.output)] if node.output is not None else []
            files += [text for text, _ in words[1:]] if words[0][0] == ("tee",) else []
            self.written |= {Path(shown(file)): words[0][1] for file in files}
        if node.document is not None and nested.reads_commands([text for text, _ in words]):
            self.input(node.document, prefix, words[0][1])
            return ""
        return self.command(words, prefix, outside)

    def command(
        self, words: list[tuple[Text, int]], prefix: dict[str, tuple[Text, int]], outside: list[Unknown]
    ) -> str:
        said = [shown(text) for text, _ in words]
        first, line = said[0], words[0][1]
        if first in self.functions:
            return self.call(first, tuple(text for text, _ in words[1:]), line)
        if first in _LEAVE:
            return self.leave(_LEAVE[first])
        if first.startswith("--"):
            raise BadInput(
                f"{self.source}:{line}: {' '.join(said[:3])} begins a command of its own, and no program gets it: a "
                "command goes on in the next line only where \\ is the last character, and a comment ends it; join them"
            )
        if first == "eval" and len(words) > 1:
            return self.script([text for text, _ in words[1:]], line)
        if inner := nested.inner_script([text for text, _ in words]):
            self.apart(inner, prefix, line)
            return ""
        self.sets(said, words, line)
        if first not in nested.ONLY_NAMES and (started := _from_start(words)):
            for text, at in words[: len(words) - len(started)]:  # of `env NAME=value program`
                if (found := ASSIGNMENT.match(shown(text))) and isinstance(text[0], str):
                    prefix[found[1]] = ((text[0].partition("=")[2], *text[1:]), at)
            self.starts.append(Start(started, {**self.environment(), **prefix}, outside))
        else:
            self.not_decided(words[0][0], line)
            if why := nested.not_read(said):
                self.undecided.append(f"{self.source}:{line}: {why}")
        return ""

    def environment(self) -> dict[str, tuple[Text, int]]:
        """The variables that are exported, with their lines."""
        made = {}
        for name in self.exported:
            value = self.variables.get(name)
            if value is not None and not value.array:
                made[name] = (value.texts[0], value.line)
        return made

    def not_decided(self, text: Text, line: int) -> None:
        if isinstance(text[0], Unknown) and text[0].choices:
            self.undecided.append(f"{self.source}:{line}: {shown(text)} is run as a command; {text[0].why}")

    def sets(self, said: list[str], words: list[tuple[Text, int]], line: int) -> None:
        """Variables and arguments that a command of the shell itself changes."""
        first = said[0]
        if first == "set" and "--" in said:
            texts = tuple(text for text, _ in words[said.index("--") + 1 :])
            self.variables.set(ARGUMENTS, Value(texts, True, line))
        elif first == "shift" and (given := self.variables.get(ARGUMENTS)) is not None and given.array:
            count = int(said[1]) if len(said) > 1 and re.fullmatch(r"\d{1,4}", said[1]) else 1
            if any(map(from_outside, given.texts[:count])):
                why = f"shift in line {line} may take away what comes from outside of the script: write them out"
                self.variables.unknown(ARGUMENTS, why, line)
            elif count <= len(given.texts):
                self.variables.set(ARGUMENTS, Value(given.texts[count:], True, line))
        elif first == "unset":
            for name in said[1:]:
                self.variables.set(name, None)
        elif first in ("read", "mapfile", "readarray", "getopts") or said[:2] == ["printf", "-v"]:
            for name in said[1 : 3 if first == "printf" else None]:
                if re.fullmatch(r"[A-Za-z_]\w*", name):
                    self.variables.unknown(name, f"{first} sets {name} in line {line}: give the value", line)
        elif first == "let":
            for name in grammar.computed(" ".join(said[1:])):
                self.variables.unknown(name, f"{name} is computed in line {line}: give the number", line)

    def input(self, document: HereDocument, prefix: dict[str, tuple[Text, int]], line: int) -> None:
        """Commands that a here-document holds. Comments, such as #SBATCH, are left out before their variables count."""
        text = re.sub(r"(?m)^[ \t]*#.*$", "", document.text)
        parts = document_parts(text, self.source, line) if not document.quoted else ()
        made = self.expansion.text(Word(parts, line)) if parts else (text,)
        unknown = next((each for each in made if isinstance(each, Unknown)), None)
        if unknown is None:
            self.apart([made], prefix, line)
        else:
            what = f"{unknown.shown} stands in the here-document of this line"
            self.undecided.append(f"{self.source}:{line}: {what}; {unknown.why}")

    def apart(self, texts: Sequence[Text], prefix: dict[str, tuple[Text, int]], line: int) -> None:
        """A script that a shell of its own runs, which sees what is exported, and these variables besides."""
        exported = dict(self.exported)
        with self.variables.layer():
            for name in self.variables.names():
                if name not in (ARGUMENTS, *exported):
                    self.variables.set(name, None)
            for name, (value, at) in prefix.items():
                self.variables.set(name, Value((value,), line=at))
                self.exported[name] = None
            self.script(texts, line)
        self.exported = exported

    def script(self, texts: Sequence[Text], line: int) -> str:
        """Text that is a script itself: of eval, of bash -c, of sbatch --wrap."""
        nodes: tuple[Node, ...] = ()
        if any(map(_unknown, texts)):
            words = [(part, line) for text in texts for part in divided(text)]
            if words and (started := _from_start(words)):
                self.starts.append(Start(started, self.environment(), []))
            for text, _ in words[:1]:
                self.not_decided(text, line)
        else:
            nodes = grammar.commands(" ".join(map(shown, texts)), self.source, line)
        if len(self.local) >= _CALLS:
            raise BadInput(f"{self.source}:{line}: commands run commands deeper than {_CALLS} here")
        self.local.append({})
        end = self.all(nodes)
        self.local.pop()
        return end

    def call(self, name: str, arguments: tuple[Text, ...], line: int) -> str:
        if len(self.local) >= _CALLS:
            raise BadInput(f"{self.source}:{line}: functions call functions deeper than {_CALLS} here")
        self.local.append({})
        with self.variables.layer() as layer:
            frame = _Frame("function", len(self.variables.layers) - 1)
            self.variables.set(ARGUMENTS, Value(arguments, True, line))
            self.frames.append(frame)
            end = self.run(self.functions[name])
            self.frames.pop()
        branches = [*frame.left, *([] if end else [layer])]
        for branch in branches:
            branch.pop(ARGUMENTS, None)
        self.variables.join(branches)
        for local, value in self.local.pop().items():
            self.variables.set(local, value)
        return "" if branches else "exit"

    def leave(self, kind: str) -> str:
        for frame in reversed(self.frames):
            if frame.kind == kind:
                layers = self.variables.layers[frame.layer :]
                frame.left.append({name: value for layer in layers for name, value in layer.items()})
                return "left"
            if frame.kind == "function":
                break
        return "exit" if kind == "exit" else ""

    def declare(self, words: Sequence[Word]) -> str:
        kind, options = words[0].plain, "".join(word.plain for word in words[1:] if word.plain.startswith("-"))
        for word in words[1:]:
            name = self.parts_of(word)[0] if _assigns(word) else word.plain
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                continue
            if self.local and kind in ("local", "declare", "typeset") and "g" not in options:
                self.local[-1].setdefault(name, self.variables.get(name))
            if kind == "export" or "x" in options:
                self.exported[name] = None
            if _assigns(word):
                self.assign(word)
            if "i" in options or "A" in options:
                self.variables.unknown(name, f"{kind} {options} {name} is not computed: give the value", word.line)
        return ""

    def parts_of(self, word: Word) -> tuple[str, bool, Word]:
        """Of NAME=value or NAME+=value: the name, whether it adds, the value."""
        first, *others = word.parts
        found = ASSIGNMENT.match(first.text)
        assert found is not None
        left = Part("text", first.text[found.end() :], False)
        return found[1], bool(found[3]), Word(((left, *others) if left.text else tuple(others)), word.line)

    def assign(self, word: Word) -> None:
        name, adds, rest = self.parts_of(word)
        old = self.variables.get(name) if adds else None
        keyed = any(re.match(r"\[[^\]]*\]=", each.parts[0].text) for each in word.elements or () if each.parts)
        if keyed or word.parts[0].text[len(name)] == "[":
            return self.variables.unknown(name, f"{name} is set by keys in line {word.line}: write it out", word.line)
        if word.elements is not None:
            fields, optional = self.expansion.words(word.elements)
            texts = [*(old.texts if old is not None else ()), *(text for text, _ in fields)]
            optional = [*(old.optional if old is not None else ()), *optional]
            value = Value(tuple(texts), True, word.line, tuple(optional))
        else:
            text = self.expansion.text(rest)
            if old is not None and old.texts:
                text = (*old.texts[0], *text)
                text = ("".join(map(str, text)),) if not _unknown(text) else text
            value = Value((text, *(old.texts[1:] if old is not None else ())), bool(old and old.array), word.line)
        self.variables.count(value.texts, word.line)
        self.variables.set(name, value)


def _assigns(word: Word) -> bool:
    if not word.parts or word.parts[0].kind != "text" or word.parts[0].quoted:
        return False
    return ASSIGNMENT.match(word.parts[0].text) is not None


def _sure(node: Node) -> bool:
    if isinstance(node, grammar.Simple):
        return all(map(_assigns, node.words)) or node.words[0].plain in _SURE
    return isinstance(node, Function)


def _unknown(text: Text) -> bool:
    return any(isinstance(each, Unknown) for each in text)


def _from_start(words: list[tuple[Text, int]]) -> list[tuple[Text, int]]:
    """Without what stands before the program itself, such as srun or nohup; nothing where none is started that may
    train."""
    for place, (text, _) in enumerate(words):
        name = Path(shown(text)).name
        if name in STARTS:
            return words[place:]
        if re.fullmatch(r"python[\d.]*", name):
            after = [shown(text) for text, _ in words[place + 1 : place + 3]]
            return (
                [] if after[:1] in (["-c"], ["-"]) or (after[:1] == ["-m"] and after[-1] in _MODULES) else words[place:]
            )
    return []
