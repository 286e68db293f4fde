"""The commands of a shell script, and what decides whether and how often each of them runs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sameday.spec.convert.shell.words import Arithmetic, HereDocument, Operator, Token, Word, tokens
from sameday.spec.errors import BadInput

_DEEPEST = 40
"""Commands in commands. No script is nested deeper."""
_REDIRECTIONS = ("<", ">", ">>", "<<", "<<-", "<<<", "<&", ">&", "<>", ">|", "&>", "&>>")
_CLOSING = ("then", "elif", "else", "fi", "do", "done", "esac", "}")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=")
SHIFTED = "@ after shift"
DECLARATIONS = ("export", "declare", "typeset", "local", "readonly")


@dataclass(frozen=True)
class Simple:
    """Words up to the end of a command; redirections are left out, but for a here-document."""

    words: tuple[Word, ...]
    document: HereDocument | None = None
    output: Word | None = None
    """The file that its output is written to."""


@dataclass(frozen=True)
class Chain:
    """first && second || third"""

    first: Node
    rest: tuple[tuple[str, Node], ...]


@dataclass(frozen=True)
class Pipe:
    commands: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    """The branches of an `if` or a `case`, each behind what is run to choose it. `all`: one of them is taken."""

    branches: tuple[tuple[tuple[Node, ...], tuple[Node, ...]], ...]
    all: bool


@dataclass(frozen=True)
class Loop:
    """`names` takes each of `words`; a loop with a condition has neither. None as words: what the caller gives."""

    name: str
    words: tuple[Word, ...] | None
    body: tuple[Node, ...]
    line: int


@dataclass(frozen=True)
class Group:
    body: tuple[Node, ...]
    subshell: bool


@dataclass(frozen=True)
class Function:
    name: str
    body: Node


Node = Simple | Chain | Pipe | Choice | Loop | Group | Function | Arithmetic


def commands(text: str, source: str, line: int | None = None) -> tuple[Node, ...]:
    """BadInput where bash itself would not read it. `line`, where the text is a word of another script."""
    reader = _Parser(tokens(text, source, line), source)
    return reader.sequence((), "")


def assigned(nodes: Collection[Node]) -> Iterator[str]:
    """The names of all variables that these commands may set."""
    waiting = [*nodes]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Simple):
            if node.words and node.words[0].plain in ("set", "shift"):
                yield {"set": "@", "shift": SHIFTED}[node.words[0].plain]
            for word in node.words:
                found = ASSIGNMENT.match(word.parts[0].text) if word.parts else None
                if found:
                    yield found[1]
                elif node.words[0].plain in ("read", "mapfile", "readarray", "printf", "unset", "getopts", "let"):
                    yield from re.findall(r"^\w+", word.plain)
        elif isinstance(node, Arithmetic):
            yield from computed(node.text)
        elif isinstance(node, Chain):
            waiting += [node.first, *(each for _, each in node.rest)]
        elif isinstance(node, Pipe):
            waiting += node.commands
        elif isinstance(node, Choice):
            waiting += [each for pair in node.branches for part in pair for each in part]
        elif isinstance(node, Function):
            waiting.append(node.body)
        else:
            waiting += node.body
            if isinstance(node, Loop) and node.name:
                yield node.name


def computed(text: str) -> list[str]:
    """Names that arithmetic such as ((N++)) sets."""
    set_there = re.findall(r"([A-Za-z_]\w*)\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))", text)
    return set_there + re.findall(r"(?:\+\+|--)\s*([A-Za-z_]\w*)", text)


class _Parser:
    def __init__(self, read: list[Token], source: str) -> None:
        self.read, self.source, self.at, self.depth = read, source, 0, 0
        self.document: HereDocument | None = None
        self.output: Word | None = None
        """Of the words that were read last."""

    def now(self) -> Token | None:
        return self.read[self.at] if self.at < len(self.read) else None

    def said(self) -> str:
        """The operator or the plain word that comes now."""
        token = self.now()
        return token.text if isinstance(token, Operator) else token.plain if isinstance(token, Word) else ""

    def line(self) -> int:
        token = self.now() or self.read[-1]
        return token.line

    def skip(self, *texts: str) -> None:
        while self.now() is not None and self.said() in texts:
            self.at += 1

    def expect(self, text: str, opened: str, line: int) -> None:
        self.skip("\n", *(";" if text == "do" else ""))
        if self.now() is None:
            raise BadInput(f"{self.source}:{line}: {opened} begins here and has no {text}")
        if self.said() != text:
            raise self.unexpected()
        self.at += 1

    def unexpected(self) -> BadInput:
        shown = {"\n": "the end of the line"}.get(self.said(), self.said() or "a word")
        return BadInput(f"{self.source}:{self.line()}: {shown} is not allowed here; bash would not read this script")

    def sequence(self, ends: tuple[str, ...], opened: str, line: int = 0) -> tuple[Node, ...]:
        made: list[Node] = []
        while True:
            self.skip("\n", ";", "&")
            if self.now() is None and ends:
                raise BadInput(f"{self.source}:{line}: {opened} begins here and has no {ends[-1]}")
            if self.now() is None or self.said() in ends:
                return tuple(made)
            made.append(self.chain())

    def chain(self) -> Node:
        self.deeper()
        first, rest = self.pipe(), []
        while isinstance(self.now(), Operator) and self.said() in ("&&", "||"):
            operator = self.said()
            self.at += 1
            self.skip("\n")
            rest.append((operator, self.pipe()))
        self.depth -= 1
        return Chain(first, tuple(rest)) if rest else first

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise BadInput(f"{self.source}:{self.line()}: commands are nested deeper than {_DEEPEST} here")

    def pipe(self) -> Node:
        self.skip("!", "time")
        made = [self.command()]
        while isinstance(self.now(), Operator) and self.said() in ("|", "|&"):
            self.at += 1
            self.skip("\n", "!", "time")
            made.append(self.command())
        return Pipe(tuple(made)) if len(made) > 1 else made[0]

    def command(self) -> Node:
        token, line = self.now(), self.line() if self.read else 0
        if token is None:
            raise BadInput(f"{self.source}:{line}: a command is expected behind the last word of this script")
        node: Node
        if isinstance(token, Arithmetic):
            self.at += 1
            node = token
        elif self.said() in ("(", "{"):
            opened = self.said()
            self.at += 1
            closing = ")" if opened == "(" else "}"
            node = Group(self.sequence((closing,), opened, line), opened == "(")
            self.at += 1
        elif self.said() == "if":
            node = self.choice(line)
        elif self.said() == "case":
            node = self.case(line)
        elif self.said() in ("for", "select", "while", "until"):
            node = self.loop(line)
        elif self.said() == "function" or self.names_function():
            self.skip("function")
            name = self.said()
            self.at += 1
            self.skip("(")
            self.skip(")")
            self.skip("\n")
            self.deeper()
            node = Function(name, self.command())
            self.depth -= 1
            return node
        elif self.said() == "[[":
            while self.now() is not None and self.said() != "]]":
                self.at += 1
            self.expect("]]", "[[", line)
            assert isinstance(token, Word)
            return Simple((token,))
        elif (isinstance(token, Operator) and token.text not in _REDIRECTIONS) or self.said() in _CLOSING:
            raise self.unexpected()
        else:
            return Simple(self.words(), self.document, self.output)
        self.words()  # redirections of all of it
        return node

    def names_function(self) -> bool:
        after = [each.text for each in self.read[self.at + 1 : self.at + 3] if isinstance(each, Operator)]
        return isinstance(self.now(), Word) and after == ["(", ")"]

    def words(self) -> tuple[Word, ...]:
        made = []
        self.document = self.output = None
        while (token := self.now()) is not None:
            if isinstance(token, Word):
                made.append(token)
            elif isinstance(token, Operator) and token.text in _REDIRECTIONS:
                self.document = token.document or self.document
                self.at += 1
                file = self.now()
                if not isinstance(file, Word):
                    raise self.unexpected() if file else BadInput(f"{self.source}:{token.line}: names no file")
                self.output = file if token.text in (">", ">>", ">|") else self.output
            elif isinstance(token, Operator) and token.text == "(":
                raise self.unexpected()
            else:
                break
            self.at += 1
        return tuple(made)

    def choice(self, line: int) -> Choice:
        branches, everything = [], False
        while self.said() in ("if", "elif"):
            self.at += 1
            condition = self.sequence(("then",), "if", line)
            self.at += 1
            branches.append((condition, self.sequence(("elif", "else", "fi"), "if", line)))
        if self.said() == "else":
            self.at += 1
            branches.append(((), self.sequence(("fi",), "if", line)))
            everything = True
        self.expect("fi", "if", line)
        return Choice(tuple(branches), everything)

    def case(self, line: int) -> Choice:
        self.at += 2  # with the word that decides
        self.expect("in", "case", line)
        branches, everything = [], False
        while True:
            self.skip("\n")
            if self.said() == "esac":
                break
            self.skip("(")
            pattern = []
            while self.now() is not None and self.said() not in (")", "\n"):
                pattern.append(self.said())
                self.at += 1
            everything = everything or "*" in pattern
            self.expect(")", "case", line)
            branches.append(((), self.sequence((";;", ";&", ";;&", "esac"), "case", line)))
            self.skip(";;", ";&", ";;&")
        self.at += 1
        return Choice(tuple(branches), everything)

    def loop(self, line: int) -> Node:
        kind, name, items = self.said(), "", ()
        self.at += 1
        words: tuple[Word, ...] | None = ()
        condition: tuple[Node, ...] = items
        if kind in ("while", "until"):
            condition = self.sequence(("do",), kind, line)
        elif isinstance(token := self.now(), Arithmetic):
            condition = (token,)
            self.at += 1
            self.skip(";", "\n")
        else:
            name, words = self.said(), None
            self.at += 1
            self.skip("\n")
            if self.said() == "in":
                self.at += 1
                words = self.words()
            self.skip(";", "\n")
        self.expect("do", kind, line)
        body = self.sequence(("done",), kind, line)
        self.at += 1
        return Loop(name, words, (*condition, *body), line)
