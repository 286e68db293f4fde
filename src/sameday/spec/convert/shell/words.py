"""The words of a shell script, divided as bash divides them: quotes, comments, continued lines, here-documents and
arrays. Each character is read a fixed number of times, however long the script is."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

from sameday.spec.errors import BadInput

_BLANK = re.compile(r"(?:[ \t]|\\\n)+")
_OPERATOR = re.compile(r"&>>|<<<|<<-|;;&|&&|\|\||;;|;&|\|&|<<|>>|<&|>&|<>|>\||&>|[;&|<>()\n]")
_DESCRIPTOR = re.compile(r"(?:\d+|\{\w+\})(?=[<>])")
_PLAIN = re.compile(r"[^ \t\n\\'\"`$;&|<>()]+")
_IN_QUOTES = re.compile(r"[^\"\\$`]+")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!_-]")
_IN_DOCUMENT = re.compile(r"[^\\$`]+")
_CLOSING = re.compile(r"[()'\"`{}\\]|\$\{|(?<![^ \t\n])#")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v"}
_BEFORE_ARITHMETIC = ("for", "if", "elif", "while", "until", "then", "else", "do", "{", "!")


@dataclass(frozen=True)
class Part:
    """Of a word: text itself, or what stands inside of `${...}`, `$((...))`, `$(...)`. `raw` is how it is written."""

    kind: Literal["text", "variable", "arithmetic", "command"]
    text: str
    quoted: bool
    raw: str = ""


@dataclass(frozen=True)
class Word:
    parts: tuple[Part, ...]
    line: int
    elements: tuple[Word, ...] | None = None
    """Of an array: NAME=(a b)."""

    @property
    def plain(self) -> str:
        """Its text, where nothing in it is quoted or a variable; reserved words are such."""
        if len(self.parts) == 1 and self.elements is None and self.parts[0].kind == "text" and not self.parts[0].quoted:
            return self.parts[0].text
        return ""


@dataclass(frozen=True)
class HereDocument:
    """The lines behind << NAME up to NAME. With quotes around NAME bash leaves them as they are."""

    text: str
    quoted: bool


@dataclass(frozen=True)
class Operator:
    text: str
    line: int
    document: HereDocument | None = None


@dataclass(frozen=True)
class Arithmetic:
    """A command ((...))."""

    text: str
    line: int


Token = Word | Operator | Arithmetic


def tokens(text: str, source: str, line: int | None = None) -> list[Token]:
    """`line`, where the text is a word of another script."""
    return _Reader(text.replace("\r\n", "\n"), source, line).tokens()


def parts(text: str, source: str, line: int, quoted: bool) -> tuple[Part, ...]:
    """Of what stands inside of `${NAME:-...}`, where blanks end no word."""
    return _Reader(text, source, line).until_end(quoted)


def document_parts(text: str, source: str, line: int) -> tuple[Part, ...]:
    """Of a here-document without quotes around its name."""
    return _Reader(text, source, line).document()


class _Reader:
    def __init__(self, text: str, source: str, line: int | None) -> None:
        self.text, self.source, self.at = text, source, 0
        self.only_line = line
        self.breaks = [found.start() for found in re.finditer("\n", text)]
        self.bodies: list[tuple[int, Word]] = []
        """Here-documents whose lines are still to come: the places of their operators among the tokens, their names."""

    def line(self, at: int) -> int:
        return bisect_right(self.breaks, at - 1) + 1 if self.only_line is None else self.only_line

    def refuse(self, at: int, what: str) -> BadInput:
        return BadInput(f"{self.source}:{self.line(at)}: {what}")

    def tokens(self) -> list[Token]:
        made: list[Token] = []
        while self.at < len(self.text):
            if blank := _BLANK.match(self.text, self.at):
                self.at = blank.end()
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = end if end >= 0 else len(self.text)
            elif descriptor := _DESCRIPTOR.match(self.text, self.at):
                self.at = descriptor.end()
            elif (
                self.text.startswith("((", self.at)
                and _starts_command(made)
                and (inner := self.arithmetic(start := self.at, "((")) is not None
            ):
                made.append(Arithmetic(inner, self.line(start)))
            elif (operator := _OPERATOR.match(self.text, self.at)) and not self.substitutes_file():
                made.append(Operator(operator[0], self.line(self.at)))
                self.at = operator.end()
                if operator[0] == "\n":
                    self.documents(made)
            else:
                made.append(self.word())
                if len(made) > 1 and isinstance(last := made[-2], Operator) and last.text in ("<<", "<<-"):
                    self.bodies.append((len(made) - 2, self.last_word(made)))
        return made

    @staticmethod
    def last_word(made: list[Token]) -> Word:
        assert isinstance(made[-1], Word)
        return made[-1]

    def substitutes_file(self) -> bool:
        return self.text.startswith(("<(", ">("), self.at)

    def documents(self, made: list[Token]) -> None:
        """Their lines are no commands of this script."""
        for place, name in self.bodies:
            operator, lines = made[place], []
            assert isinstance(operator, Operator)
            delimiter = "".join(part.text for part in name.parts)
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = end if end >= 0 else len(self.text)
                line, self.at = self.text[self.at : end], end + 1
                line = line.lstrip("\t") if operator.text == "<<-" else line
                if line == delimiter:
                    break
                lines.append(line)
            document = HereDocument("\n".join(lines), any(part.quoted for part in name.parts))
            made[place] = Operator(operator.text, operator.line, document)
        self.bodies = []

    def document(self) -> tuple[Part, ...]:
        """Quotes are characters like all others."""
        made: list[Part] = []
        while self.at < len(self.text):
            if found := _IN_DOCUMENT.match(self.text, self.at):
                made.append(Part("text", found[0], True))
                self.at = found.end()
            elif self.text.startswith('\\"', self.at):
                made.append(Part("text", '\\"', True))
                self.at += 2
            else:
                made += self.special(True)
        return _merged(made)

    def word(self, element: bool = False) -> Word:
        start = self.at
        made: list[Part] = []
        if not element and (array := _ARRAY.match(self.text, self.at)):
            self.at = array.end()
            name = Part("text", array[0].removesuffix("("), False)
            return Word((name,), self.line(start), self.elements(start))
        while self.at < len(self.text):
            if self.text[self.at] in " \t\n":
                break
            if self.substitutes_file():
                made.append(self.within("command", 2, ")", False))
            elif self.text[self.at] in ";&|<>()":
                break
            elif plain := _PLAIN.match(self.text, self.at):
                made.append(Part("text", plain[0], False))
                self.at = plain.end()
            else:
                made += self.special(False)
        return Word(_merged(made), self.line(start))

    def elements(self, start: int) -> tuple[Word, ...]:
        made: list[Word] = []
        while self.at < len(self.text):
            if blank := _BLANK.match(self.text, self.at):
                self.at = blank.end()
            elif self.text[self.at] == "\n":
                self.at += 1
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = end if end >= 0 else len(self.text)
            elif self.text[self.at] == ")":
                self.at += 1
                return tuple(made)
            elif self.text[self.at] in ";&|<>(" and not self.substitutes_file():
                raise self.refuse(self.at, f"{self.text[self.at]} stands in an array; bash takes it for an error")
            else:
                made.append(self.word(element=True))
        raise self.refuse(start, "an array is opened here by ( and never closed")

    def until_end(self, quoted: bool) -> tuple[Part, ...]:
        made: list[Part] = []
        usual = re.compile(r"[^\\'\"`$]+") if not quoted else re.compile(r"[^\\\"`$]+")
        while self.at < len(self.text):
            if found := usual.match(self.text, self.at):
                made.append(Part("text", found[0], quoted))
                self.at = found.end()
            elif quoted and self.text[self.at] == '"':  # the quotes of "${NAME:-"a"}"
                self.at += 1
            else:
                made += self.special(quoted)
        return _merged(made)

    def special(self, quoted: bool) -> list[Part]:
        """What begins with one of \\ ' " ` $ here."""
        char, start = self.text[self.at], self.at
        if char == "\\":
            escaped = self.text[self.at + 1 : self.at + 2]
            self.at += 2
            if escaped == "\n":
                return []
            if not escaped or (quoted and escaped not in '$`"\\'):
                return [Part("text", "\\" + escaped, quoted)]
            return [Part("text", escaped, True)]
        if char == "'":
            end = self.text.find("'", self.at + 1)
            if end < 0:
                raise self.refuse(start, "a quote is opened here and never closed")
            self.at = end + 1
            return [Part("text", self.text[start + 1 : end], True)]
        if char == '"':
            return self.in_quotes()
        if char == "`":
            end = start + 1
            while end < len(self.text) and self.text[end] != "`":
                end += 1 + (self.text[end] == "\\")
            if end >= len(self.text):
                raise self.refuse(start, "a ` is opened here and never closed")
            self.at = end + 1
            inner = self.text[start + 1 : end]
            # People write comments between two flags as `# ...`, which is a command that prints nothing.
            return [] if inner.startswith("#") else [Part("command", inner, quoted, self.text[start : self.at])]
        return self.dollar(quoted)

    def in_quotes(self) -> list[Part]:
        start = self.at
        self.at += 1
        made: list[Part] = []
        while self.at < len(self.text):
            if found := _IN_QUOTES.match(self.text, self.at):
                made.append(Part("text", found[0], True))
                self.at = found.end()
            elif self.text[self.at] == '"':
                self.at += 1
                return made or [Part("text", "", True)]
            else:
                made += self.special(True)
        raise self.refuse(start, "a quote is opened here and never closed")

    def dollar(self, quoted: bool) -> list[Part]:
        start, after = self.at, self.text[self.at + 1 : self.at + 3]
        if after == "((" and (inner := self.arithmetic(start, "$((")) is not None:
            return [Part("arithmetic", inner, quoted, self.text[start : self.at])]
        if after[:1] == "(":
            return [self.within("command", 2, ")", quoted)]
        if after[:1] == "{":
            return [self.within("variable", 2, "}", quoted)]
        if after[:1] == '"' and not quoted:
            self.at += 1
            return []
        if after[:1] == "'" and not quoted:
            return [self.escaped()]
        if name := _NAME.match(self.text, start + 1):
            self.at = name.end()
            return [Part("variable", name[0], quoted, self.text[start : self.at])]
        self.at += 1
        return [Part("text", "$", quoted)]

    def arithmetic(self, start: int, opened: str) -> str | None:
        """What stands between two brackets and two that close them together; None where it is a group in a group."""
        self.at = start + len(opened)
        self.close(")", start, opened)
        if self.text.startswith(")", self.at):
            self.at += 1
            return self.text[start + len(opened) : self.at - 2]
        self.at = start
        return None

    def escaped(self) -> Part:
        """$'...', in which \\n is a line break."""
        found = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL).match(self.text, self.at)
        if not found:
            raise self.refuse(self.at, "a quote is opened here and never closed")
        self.at = found.end()
        if numbers := re.search(r"\\[0-9xuUc]", found[1]):
            return Part("command", found[1], True, f"{numbers[0]} in $'...'")
        made = re.sub(r"\\(.)", lambda each: _ESCAPES.get(each[1], each[1]), found[1], flags=re.DOTALL)
        return Part("text", made, True)

    def within(self, kind: Literal["variable", "command"], skip: int, closing: str, quoted: bool) -> Part:
        start = self.at
        self.at += skip
        self.close(closing, start, self.text[start : start + skip], quoted and kind == "variable")
        raw = self.text[start : self.at]
        return Part(kind, raw[skip:-1], quoted, raw)

    def close(self, closing: str, start: int, opened: str, quoted: bool = False) -> None:
        """Move behind the bracket that closes what is open here. Brackets in quotes close nothing."""
        stack, in_quotes = [closing], [quoted]
        while found := _CLOSING.search(self.text, self.at):
            char, self.at = found[0], found.end()
            if char == "\\":
                self.at += 1
            elif char == "'" and not in_quotes[-1]:
                end = self.text.find("'", self.at)
                self.at = end + 1 if end >= 0 else len(self.text)
            elif char == "#" and stack[-1] == ")" and not in_quotes[-1] and opened not in ("$((", "(("):
                end = self.text.find("\n", self.at)
                self.at = end if end >= 0 else len(self.text)
            elif char == stack[-1]:
                stack.pop()
                in_quotes.pop()
                if not stack:
                    return
            elif char == '"':
                stack.append('"')
                in_quotes.append(True)
            elif char == "${":
                stack.append("}")
                in_quotes.append(in_quotes[-1])
            elif char == "(" and (not in_quotes[-1] or self.text[found.start() - 1] == "$"):
                stack.append(")")
                in_quotes.append(False)
        raise self.refuse(start, f"{opened} is opened here and never closed")


def _merged(made: list[Part]) -> tuple[Part, ...]:
    """With neighbours of one kind as one part."""
    joined: list[tuple[Part, list[str]]] = []
    for part in made:
        if joined and part.kind == "text" == joined[-1][0].kind and part.quoted == joined[-1][0].quoted:
            joined[-1][1].append(part.text)
        else:
            joined.append((part, [part.text]))
    return tuple(
        Part(first.kind, "".join(texts), first.quoted, first.raw) if len(texts) > 1 else first
        for first, texts in joined
    )


def _starts_command(made: list[Token]) -> bool:
    last = made[-1] if made else Operator("\n", 0)
    if isinstance(last, Operator):
        return last.text in ("\n", ";", "&", "&&", "||", "|", "|&", ";;", "(", ")")
    return isinstance(last, Word) and last.plain in _BEFORE_ARITHMETIC
