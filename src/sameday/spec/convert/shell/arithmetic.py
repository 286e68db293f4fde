"""Whole numbers that a shell script computes: $((8 * (2 + N))). Never more than one small number at once."""

from __future__ import annotations

import re
from collections.abc import Callable

_TOKEN = re.compile(r"\s*(?:(\d\w*)|\$?\{?([A-Za-z_]\w*)\}?|(\*\*|\+\+|--|<<|>>|[<>=!]=|&&|\|\||[-+*/%()])|(\S))")
_DEEPEST = 40
_LARGEST = 2**63
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "%": 2}


class NotComputed(Exception):
    """Says why there is no number."""


def whole(text: str) -> int:
    """A number as bash writes it: 8, 010 to the base 8, 0x1f."""
    if re.fullmatch(r"0[0-7]{0,21}|[1-9]\d{0,18}", text):
        return int(text, 8 if text.startswith("0") else 10)
    if re.fullmatch(r"0[xX][0-9a-fA-F]{1,16}", text):
        return int(text, 16)
    raise NotComputed(f"{text[:30]} is no whole number of 64 bits")


def compute(text: str, value: Callable[[str], int]) -> int:
    """`value` says what a variable is. NotComputed for everything but + - * / % and parentheses."""
    return _Reader([found.groups() for found in _TOKEN.finditer(text)], value).all()


class _Reader:
    def __init__(self, read: list[tuple[str | None, ...]], value: Callable[[str], int]) -> None:
        self.read, self.value, self.at = read, value, 0

    def now(self) -> str:
        return (self.read[self.at][2] or "") if self.at < len(self.read) else ""

    def all(self) -> int:
        made = self.sum(1, 0)
        if self.at < len(self.read):
            raise NotComputed(f"{next(filter(None, self.read[self.at]))} is not computed here")
        return made

    def sum(self, least: int, depth: int) -> int:
        """Numbers joined by operators of this precedence or a higher one."""
        left = self.number(depth)
        while (precedence := _PRECEDENCE.get(operator := self.now(), 0)) >= least:
            self.at += 1
            left = _joined(left, operator, self.sum(precedence + 1, depth))
        return left

    def number(self, depth: int) -> int:
        sign = 1
        while (said := self.now()) in ("+", "-"):
            sign = -sign if said == "-" else sign
            self.at += 1
        if depth > _DEEPEST:
            raise NotComputed(f"parentheses are nested deeper than {_DEEPEST}")
        digits, name, operator, _ = self.read[self.at] if self.at < len(self.read) else (None,) * 4
        self.at += 1
        if operator == "(":
            made = self.sum(1, depth + 1)
            if self.now() != ")":
                raise NotComputed("a parenthesis is not closed")
            self.at += 1
            return sign * made
        if digits is None and name is None:
            raise NotComputed("only whole numbers, variables, + - * / % and parentheses are computed")
        return sign * (whole(digits) if digits is not None else self.value(name or ""))


def _joined(left: int, operator: str, right: int) -> int:
    if operator in ("/", "%") and right == 0:
        raise NotComputed("it divides by 0")
    quotient = 0 if operator not in ("/", "%") else abs(left) // abs(right) * (1 if left * right >= 0 else -1)
    made = {"+": left + right, "-": left - right, "*": left * right, "/": quotient}.get(
        operator, left - quotient * right
    )
    if not -_LARGEST <= made < _LARGEST:
        raise NotComputed("the number has more than 64 bits")
    return made
