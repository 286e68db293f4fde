"""Words of a shell script with the values of their variables, divided into several words where bash divides them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from sameday.spec.convert.shell import words as shell
from sameday.spec.convert.shell.arithmetic import NotComputed, compute, whole
from sameday.spec.convert.shell.variables import Text, Unknown, Value, Variables, known, shown
from sameday.spec.convert.shell.words import Part, Word
from sameday.spec.errors import BadInput

ARGUMENTS = "@"
"""Of a function, or as `set` leaves them; those of the script itself are not known."""
CALLER = Unknown('"$@"', "this script does not say what its caller gives", optional=True)
_PARAMETER = re.compile(
    r"([A-Za-z_]\w*|\d{1,4}|[@*])(?:\[([^\]]*)\])?(:?[-=+?])?(.*)",
    re.DOTALL,
)
_BRACES = re.compile(r"\{[^{} ]*(?:,|\.\.)[^{} ]*\}")
_BLANKS = re.compile(r"[ \t\n]+")
_DEEPEST = 20
_EMPTY = Value(((),))


class Expansion:
    def __init__(self, source: str, withheld: str = "") -> None:
        self.source = source
        self.withheld = withheld
        """A variable whose default is not taken, as if its value came from outside and were not known."""
        self.defaults: dict[str, tuple[int, str]] = {}
        """Variables that may be given from outside, with the line of the default that was taken, and the default."""
        self.variables = Variables(source)
        self.depth = 0
        self.not_given: dict[tuple[str, int], str] = {}
        """Flags, with their lines, behind which an argument such as $1 stands that a function is called without."""

    def text(self, word: Word) -> Text:
        """As one text, which is what an assignment takes."""
        made: list[str | Unknown] = []
        for value in self.values(word.parts, word.line):
            for number, each in enumerate(value.texts):
                made += [" "] * bool(number) + [*each]
        text = _joined(made)
        self.variables.count([text], word.line)
        return text

    def values(self, parts: Sequence[Part], line: int) -> Iterator[Value]:
        for part in parts:
            value = self.value(part, line)
            if isinstance(value, Value):
                yield value
            else:
                with self.deeper(line):
                    yield from self.values(value, line)

    def words(self, words: Sequence[Word]) -> tuple[list[tuple[Text, int]], list[Unknown]]:
        """As a command has them, with their lines, and what may be given from outside but is empty here."""
        made: list[tuple[Text, int]] = []
        optional: list[Unknown] = []
        for word in words:
            split = _Split()
            self.split(split, word.parts, word.line, False)
            optional += split.optional
            texts = [_joined(each) for each in split.made]
            self.variables.count(texts, word.line)
            if not texts and made and (argument := _argument(word)) and (flag := shown(made[-1][0])).startswith("--"):
                self.not_given[flag, made[-1][1]] = argument
            made += [(text, word.line) for text in texts]
        return made, optional

    def split(self, split: _Split, parts: Sequence[Part], line: int, inner: bool) -> None:
        """`inner`: of a default, whose blanks divide it too."""
        for part in parts:
            value = self.value(part, line)
            if not isinstance(value, Value):
                with self.deeper(line):
                    self.split(split, value, line, True)
                continue
            split.optional += value.optional
            if part.quoted:
                split.fields(value.texts)
            elif part.kind == "text" and not inner:
                split.add(_with_braces(part.text), False)
            else:
                for number, each in enumerate(value.texts):
                    split.end(bool(number))
                    split.add(self.divided(each, part), True)

    @contextmanager
    def deeper(self, line: int) -> Iterator[None]:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise BadInput(f"{self.source}:{line}: variables are nested deeper than {_DEEPEST} here")
        yield
        self.depth -= 1

    def divided(self, text: Text, part: Part) -> Text:
        """As it is where blanks divide it; a script may have set other characters."""
        marks = self.variables.get("IFS")
        if marks is None or not re.search(rf"[ \t\n{re.escape(known(marks.texts[0]))}]", known(text)):
            return text
        return (Unknown(part.raw, f"IFS, set in line {marks.line}, divides it: write it out"),)

    def value(self, part: Part, line: int) -> Value | tuple[Part, ...]:
        """Of a part; or the parts of the default that stands instead. "${A[@]}" are several texts, all else is one."""
        if part.kind == "text":
            return Value(((part.text,),))
        if part.kind == "command":
            why = "what it gives is not known before the script runs: give the value"
            return Value(((Unknown(part.raw, why),),))
        if part.kind == "arithmetic":
            return Value(((self.number(part),),))
        return self.parameter(part, line)

    def number(self, part: Part) -> str | Unknown:
        try:
            return str(compute(part.text, self.whole))
        except NotComputed as error:
            return Unknown(part.raw, f"{error}: give the number")

    def whole(self, name: str) -> int:
        value = self.variables.get(name)
        if value is None:
            raise NotComputed(f"this script does not say what {name} is")
        if unknown := next((each for each in value.texts[0] if isinstance(each, Unknown)), None):
            raise NotComputed(unknown.why.partition(": ")[0])
        text = known(value.texts[0]).strip()
        return -whole(text[1:]) if text.startswith("-") else whole(text) if text else 0

    def parameter(self, part: Part, line: int) -> Value | tuple[Part, ...]:
        found = _PARAMETER.fullmatch(part.text)
        if found and found[1] in ("@", "*") and self.variables.get(ARGUMENTS) is None:
            return Value(((CALLER,),))
        if not found or (found[4] and not found[3]):
            return Value(((Unknown(part.raw, "this form of a variable is not computed: give the value"),),))
        name, index, operator, other = found[1], found[2], found[3] or "", found[4]
        value = self.named(name, index, part.quoted)
        empty = value is None
        if value is not None and operator.startswith(":"):
            empty = not any(map(shown, value.texts)) or all(map(from_outside, value.texts))
        if operator[-1:] == "+" and not empty and (doubt := _in_doubt(value)):
            return Value(((replace(doubt, shown=part.raw),),))
        if operator[-1:] == "+":
            return _EMPTY if empty else self.default(other, line, part)
        if value is not None and not empty:
            return value
        if operator[-1:] in ("-", "=") and other and not self.is_unset(name):
            self.defaults.setdefault(name, (line, other))
            if name == self.withheld:
                return Value(((Unknown(part.raw, f"{name} comes from outside of the script"),),))
        if operator[-1:] == "-":
            return self.default(other, line, part) if other else _outside_value(part)
        if operator[-1:] == "=":
            text = self.text(Word(self.default(other, line, part), line)) if other else _outside_value(part).texts[0]
            self.variables.set(name, Value((text,), line=line))
            return Value((text,))
        if not operator and self.is_unset(name):
            return Value((), array=True) if index in ("@", "*") else _EMPTY
        return Value(((Unknown(part.raw, f"this script does not say what {part.raw} is: give it"),),))

    def default(self, text: str, line: int, part: Part) -> tuple[Part, ...]:
        return shell.parts(text, self.source, line, part.quoted)

    def is_unset(self, name: str) -> bool:
        """Whether the script itself leaves it without a value."""
        return self.variables.is_set_here(ARGUMENTS if name.isdigit() else name)

    def named(self, name: str, index: str | None, quoted: bool) -> Value | None:
        """None where nothing has set it."""
        given = self.variables.get(ARGUMENTS)
        if given is not None and not given.array and (name in ("@", "*") or name.isdigit()):
            return Value(
                tuple((replace(each, shown=f"${name}"),) for each in given.texts[0] if isinstance(each, Unknown))
            )
        if name in ("@", "*"):
            return self.several(given or Value(((CALLER,),)), name, quoted)
        if name.isdigit():
            texts = given.texts if given is not None else ()
            return Value((texts[int(name) - 1],)) if 0 < int(name) <= len(texts) else None
        value = self.variables.get(name)
        if value is None or (index is None and not value.array):
            return value
        if index in ("@", "*"):
            return self.several(value, index, quoted)
        place = int(index) if index and re.fullmatch(r"-?\d{1,4}", index) else 0 if index is None else None
        if place is None:
            return Value(
                ((Unknown(f"${{{name}[{index}]}}", "this form of a variable is not computed: give the value"),),)
            )
        return Value((value.texts[place],)) if -len(value.texts) <= place < len(value.texts) else None

    def several(self, value: Value, sign: str, quoted: bool) -> Value:
        if sign == "*" and len(value.texts) > 1 and (marks := self.variables.get("IFS")) is not None:
            return Value(((Unknown("${...[*]}", f"IFS, set in line {marks.line}, joins it: write it out"),),))
        if sign == "*" and quoted:
            spaced = [piece for number, text in enumerate(value.texts) for piece in ([" "] * bool(number) + [*text])]
            return Value((_joined(spaced),), optional=value.optional)
        return Value(value.texts, array=True, optional=value.optional)


class _Split:
    """The words that one word becomes."""

    def __init__(self) -> None:
        self.made: list[list[str | Unknown]] = []
        self.open = False
        self.optional: list[Unknown] = []

    def end(self, now: bool = True) -> None:
        self.open = self.open and not now

    def put(self, piece: str | Unknown) -> None:
        if not self.open:
            self.made.append([])
            self.open = True
        self.made[-1].append(piece)

    def fields(self, texts: Sequence[Text]) -> None:
        for number, text in enumerate(texts):
            self.end(bool(number))
            if not text:
                self.put("")
            for piece in text:
                self.put(piece)

    def add(self, text: Text, blanks: bool) -> None:
        for piece in text:
            if isinstance(piece, Unknown):
                if piece.optional and piece is not CALLER:
                    self.optional.append(piece)
                else:
                    self.put(piece)
                continue
            for number, each in enumerate(_BLANKS.split(piece) if blanks else [piece]):
                self.end(bool(number))
                if each:
                    self.put(each)


def _argument(word: Word) -> str:
    """$1 or another of a function's arguments, as the word is written; empty where it is anything else."""
    only = word.parts[0] if len(word.parts) == 1 else None
    return only.raw if only is not None and only.kind == "variable" and only.text.isdigit() else ""


def _outside_value(part: Part) -> Value:
    """Of a default that is empty."""
    return Value(((Unknown(part.raw, "", optional=True),),))


def _in_doubt(value: Value | None) -> Unknown | None:
    """What decides whether it is empty, where nothing in it is known."""
    pieces = [piece for text in value.texts for piece in text] if value is not None else []
    unknown = [piece for piece in pieces if isinstance(piece, Unknown) and not piece.optional]
    return unknown[0] if unknown and not any(piece for piece in pieces if isinstance(piece, str)) else None


def from_outside(text: Text) -> bool:
    return bool(text) and all(isinstance(each, Unknown) and each.optional for each in text)


def _with_braces(text: str) -> Text:
    """{a,b} is several words, which are not made here."""
    found = _BRACES.search(text)
    why = "bash makes several words of it: write them out"
    return (text,) if not found else (text[: found.start()], Unknown(found[0], why), text[found.end() :])


def _joined(pieces: Sequence[str | Unknown]) -> Text:
    made: list[str | Unknown] = []
    waiting: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            waiting.append(piece)
            continue
        if waiting:
            made.append("".join(waiting))
            waiting = []
        made.append(piece)
    return (*made, *(["".join(waiting)] if any(waiting) or not made else []))
