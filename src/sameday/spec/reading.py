"""Files that may come from anyone: only as much of them as their kind can need, and no pipe that never ends."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import yaml

from sameday.spec.errors import BadInput

SPEC = 2**18
"""Bytes of a recipe or a plan; they have a few thousand."""
JSON = 2**25
"""Of what a command writes beside a run."""
IMAGES = 2**28
"""Of the digests of a run's images: those of some six million."""
VALUES = 20_000
"""Of a document with its aliases written out: a few lines of them could stand for more than memory holds."""
METRICS = 2**28
"""Of a run's records: those of about a million steps."""
ANSWERS = 2**28
"""Of generated answers: those to about half a million questions."""


def read_file(path: Path, most: int | None) -> bytes:
    """The content of a regular file. BadInput where it is a pipe or a device, or larger; OSError as usual."""
    # Without waiting for the other end of a pipe.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise BadInput(f"{path}: cannot be read: it is a pipe or a device, not a file")
        if most is not None and status.st_size > most:
            raise BadInput(f"{path}: has {status.st_size:,} bytes; at most {most:,} are read of such a file")
        return file.read(-1 if most is None else most)


def read_spec(path: Path, what: str = "recipe or plan") -> bytes:
    """A recipe, a plan or a config, which may come through a pipe. `what` it is, for who has given a larger file."""
    with open(path, "rb") as file:
        content = file.read(SPEC + 1)
    if len(content) > SPEC:
        raise BadInput(f"{path}: is larger than {SPEC:,} bytes, which no {what} is")
    return content


def line_of(source: str, line: int) -> str:
    """A place in a file; a setting on the command line is one line."""
    return source if source.startswith("--set ") else f"{source}:{line}"


def check_size(node: yaml.Node, source: str) -> None:
    """Refuses a document that holds itself, or more values than any spec has once aliases are written out."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if isinstance(node, yaml.ScalarNode):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = 0  # open; nothing that is done is empty
            pairs = node.value if isinstance(node, yaml.MappingNode) else [node.value]
            sizes[id(node)] = 1 + sum(size(each) for pair in pairs for each in pair)
        elif sizes[id(node)] == 0:
            raise BadInput(
                f"{line_of(source, node.start_mark.line + 1)}: holds itself by an alias (*name), without end"
            )
        return sizes[id(node)]

    if (count := size(node)) > VALUES:
        shown = f"{count:,}" if count < 10**9 else "more than a billion"
        raise BadInput(f"{source}: is {shown} values with its aliases (*name) written out; at most {VALUES:,}")
