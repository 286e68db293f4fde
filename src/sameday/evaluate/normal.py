"""Answers in the form in which they are compared: as one text, as a set of labels, as a number with its unit."""

from __future__ import annotations

import math
import re
import unicodedata
from functools import lru_cache
from typing import NamedTuple

_OPENING, _CLOSING = "\"'`“”‘’«» ", "\"'`“”‘’«».,;:!? "
_ARTICLES = re.compile(r"(?:(?:a|an|the) )+(?=\S)")
_SEPARATOR = re.compile(r";|,(?![0-9])|(?<![0-9]),")
_NUMBER = re.compile(
    r"([+-]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)) ?([^\W\d_]+(?: [^\W\d_]+)?|[%°])?"
)
_MINUS = "\N{MINUS SIGN}"
"""Which Unicode does not take for the one of keyboards."""
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NO_UNITS = {*_DIGITS, "or", "to", "and", "of", "st", "nd", "rd", "th"}
"""They make a range, a share or an ordinal of a number."""


class Number(NamedTuple):
    value: float
    unit: str


def _fold(text: str) -> str:
    """Unicode's compatibility caseless form: upper and lower case, wide and narrow letters are one. Spaces single."""
    for form in ("NFD", "NFKC"):
        text = unicodedata.normalize(form, text).casefold()
    return " ".join(unicodedata.normalize("NFKC", text).split())


def _strip(text: str) -> str:
    """Without quotes around it, punctuation at its end, articles at its start. An `a` elsewhere may be a name, as in
    "grade A"; a sign at the start is part of a value, as in "<5mm"."""
    while True:
        shorter = text.lstrip(_OPENING).rstrip(_CLOSING)
        articles = _ARTICLES.match(shorter)
        shorter = shorter[articles.end() :] if articles else shorter
        if shorter == text:
            return text
        text = shorter


@lru_cache(maxsize=2**16)
def normalise(text: str) -> str:
    """Two answers match exactly when these are equal. Where nothing would be left, as of "?", it is the text itself."""
    folded = _fold(text)
    return _strip(folded) or folded


@lru_cache(maxsize=2**16)
def labels(text: str) -> frozenset[str]:
    """The labels of a list, which `;` and `,` separate; order and repeats do not matter. A comma between digits
    separates nothing. A text of nothing but punctuation is a label."""
    folded = _fold(text)
    named = frozenset(label for part in _SEPARATOR.split(folded) if (label := _strip(part)))
    return named or frozenset([folded] if folded else ())


@lru_cache(maxsize=2**16)
def number(text: str) -> Number | None:
    """The number that a text is, alone or followed by a unit of one or two words: "3", "3 polyps", ".5cm", "two".
    Ranges ("5-10mm", "one or two"), bounds (">20mm"), codes ("T2", "grade 3") and sentences are none."""
    first, _, rest = normalise(text).replace(_MINUS, "-").partition(" ")
    digits = str(_DIGITS.index(first)) if first in _DIGITS else first
    match = _NUMBER.fullmatch(f"{digits} {rest}".strip())
    if match is None or not _NO_UNITS.isdisjoint((match[2] or "").split()):
        return None
    value = float(match[1].replace(",", ""))
    return Number(value, match[2] or "") if math.isfinite(value) else None
