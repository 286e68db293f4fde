"""Problems of data as people read them: one sentence per kind, with a count and the first places. The whole list goes
to a file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sameday.data.questions.audit_cache import cache_home
from sameday.spec.words import first_names
from sameday.spec.writing import write_text

SHOWN = 3
"""Problems of one kind that are shown with their places."""
KINDS = 20
"""Kinds that are shown."""
KEPT = 100
"""Lists that are kept, the newest ones."""
# What differs between problems of one kind: an image's name, a value, a number.
_VARIES = re.compile(r"""(?<=image )(?:'[^']*'|"[^"]*")|(?<=is )(?:'[^']*'|"[^"]*")|\d+""")


@dataclass(frozen=True)
class Problem:
    """`where` is the file's name with the line; `what` is a sentence about it."""

    where: str
    what: str


def report(problems: Sequence[Problem], heading: str, of: Path) -> str:
    """The heading, the problems by kind, and where all of them are listed, if not here. `of` is what was checked."""
    lines, whole = grouped(problems)
    return "\n".join([heading, *lines, *([] if whole else [_write_list(problems, of)])])


def in_lines(problems: Sequence[Problem]) -> str:
    """How many problems in how many lines, or items of arrays."""
    places = {problem.where for problem in problems}
    unit = "item" if all("(item " in place for place in places) else "line"
    return f"{_count(len(problems), 'problem')} in {_count(len(places), unit)}:"


def grouped(problems: Sequence[Problem]) -> tuple[list[str], bool]:
    """The problems by kind, in the order in which kinds appear, and whether that is all of them. Of a kind of more than
    a few only the first is told, with the count and the first places."""
    kinds: dict[str, list[Problem]] = {}
    for problem in problems:
        kinds.setdefault(_VARIES.sub("…", problem.what), []).append(problem)
    lines = []
    for same in list(kinds.values())[:KINDS]:
        few = len(same) <= SHOWN
        lines += [f"{problem.where}: {problem.what}" for problem in (same if few else same[:1])]
        if not few:
            lines.append(f"    {len(same)} of this kind: {first_names([each.where for each in same], SHOWN)}")
    if len(kinds) > KINDS:
        lines.append(f"and {len(kinds) - KINDS} more kinds of problems")
    return lines, len(kinds) <= KINDS and all(len(same) <= SHOWN for same in kinds.values())


def _write_list(problems: Sequence[Problem], of: Path) -> str:
    """In the user's cache folder: a folder of data belongs to the user, and may be read-only. Lists that differ have
    files of their own: one command may check a file for several splits or stages, or several at once."""
    home, lost = cache_home(), "the whole list could not be written"
    if home is None:
        return f"{lost}: there is no cache folder; SAMEDAY_CACHE_HOME may name one"
    # Half a surrogate may stand in what is told.
    text = "".join(f"{problem.where}: {problem.what}\n" for problem in problems).encode(errors="backslashreplace")
    about = os.fsencode(of.absolute()) + b"\0" + text
    path = home / "problems" / f"{of.name[:50]}-{hashlib.blake2b(about, digest_size=6).hexdigest()}.txt"
    try:
        write_text(path, text.decode())
        _remove_old(path.parent)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        return f"{lost} to {path}: {reason}"
    return f"all {len(problems)} are listed in {path}"


def _remove_old(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another command removes one that is old too
        for path in sorted(folder.glob("*.txt"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            path.unlink(missing_ok=True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
