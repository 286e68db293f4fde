"""A YAML file as a mapping that knows where each of its keys stands, and specs written back as YAML."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sameday.spec.errors import BadInput, refuse
from sameday.spec.misread import misread
from sameday.spec.reading import check_size, line_of, read_spec
from sameday.spec.recipe import Strict

KeyPath = tuple[Any, ...]

# No spec is nested deeper.
_MAX_DEPTH = 4
# Of brackets within brackets, before which the reader stops: its time grows with the square of it.
_MAX_BRACKETS = 100


_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?")
COLON = "YAML wants a space behind the colon"


class _Loader(yaml.SafeLoader):
    """YAML 1.1, in which 5e-5 is a number too, and 1:30 is none: YAML's own 90, to the base 60, is nobody's."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0] and _BASE_60.fullmatch(value):
            return "tag:yaml.org,2002:str"
        return super().resolve(kind, value, implicit)

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level >= _MAX_BRACKETS:
            raise RecursionError
        super().fetch_flow_collection_start(token)


class _Dumper(yaml.SafeDumper):
    """Writes what _Loader reads back unchanged."""


# YAML 1.1 wants a dot and a signed exponent. The dumper has to know the same numbers, so that it quotes a
# string that looks like one.
_EXPONENT = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
# Line breaks other than \\n are lost unless they are escaped, which only double quotes do.
_ODD_BREAKS = re.compile("[\\r\\x85\\u2028\\u2029]")
_Dumper.add_representer(
    str,
    lambda d, value: d.represent_scalar(
        "tag:yaml.org,2002:str", value, style='"' if _ODD_BREAKS.search(value) else None
    ),
)
_Dumper.add_representer(list, lambda d, value: d.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True))


@dataclass
class Document:
    """A mapping read from a file, and where each of its keys stands."""

    source: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """Where this key stands, or the nearest key around it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return self.source


def read_document(path: Path) -> Document:
    """A YAML file whose top is a mapping. BadInput for everything else."""
    try:
        text = read_spec(path).decode("utf-8")
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 text ({error.reason})"
        raise BadInput(f"{path}: cannot be read: {reason}") from None
    document = Document(str(path))
    node, values = parsed(text, str(path))
    if node is None:
        raise BadInput(f"{path}: the file is empty")
    if not isinstance(node, yaml.MappingNode):
        raise BadInput(f"{path}:{node.start_mark.line + 1}: must be a mapping of keys to values")
    document.values = values
    _find_places(node, (), document)
    return document


def parsed(text: str, source: str, path: KeyPath = ()) -> tuple[yaml.Node | None, Any]:
    """YAML as nodes and as values; BadInput where it is none, or far more than it looks. `path` has the keys around
    it."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        check_size(node, source)
        # Before merged keys (<<) are added.
        problems = [*_duplicates(node, (), source), *misread(node, source, path)]
        values = loader.construct_document(node)
    except yaml.YAMLError as error:
        raise BadInput(_syntax(error, source, text)) from None
    except RecursionError:
        raise BadInput(f"{source}: not valid YAML: it is nested too deeply") from None
    except ValueError as error:  # a date that there is not, a number of thousands of digits
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{source}: not valid YAML: {error}") from None
    refuse(problems)
    return node, values


def _syntax(error: yaml.YAMLError, source: str, text: str) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f"{line_of(source, line)}: not valid YAML: the character {chr(int(error.character))!r} is not allowed"
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = line_of(source, mark.line + 1) if mark else source
    return f"{place}: not valid YAML: {getattr(error, 'problem', None) or error}"


def _duplicates(node: yaml.Node, path: KeyPath, source: str) -> list[str]:
    problems: list[str] = []
    if len(path) >= _MAX_DEPTH:
        return problems
    if isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            problems += _duplicates(value, (*path, index), source)
    if not isinstance(node, yaml.MappingNode):
        return problems
    first: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        line = key.start_mark.line + 1
        inner = (*path, key.value)
        if key.value in first:
            twice = f"{show(inner)} is given twice, first on line {first[key.value]}"
            problems.append(f"{line_of(source, line)}: {twice}")
        first.setdefault(key.value, line)
        problems += _duplicates(value, inner, source)
    return problems


def _find_places(node: yaml.Node, path: KeyPath, document: Document) -> None:
    if len(path) >= _MAX_DEPTH:
        return
    if isinstance(node, yaml.MappingNode):
        inner = [(key.value, key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
    elif isinstance(node, yaml.SequenceNode):
        inner = [(index, value, value) for index, value in enumerate(node.value)]
    else:
        return
    for name, marked, value in inner:
        document.places[(*path, name)] = f"{document.source}:{marked.start_mark.line + 1}"
        _find_places(value, (*path, name), document)


def lacks_space(value: Any) -> bool:
    """Whether a mapping somewhere in it has a key such as stage:1, which is one text to YAML, and no value."""
    if isinstance(value, dict):
        return any((inner is None and ":" in str(key)) or lacks_space(inner) for key, inner in value.items())
    return isinstance(value, list | tuple) and any(map(lacks_space, value))


def show(path: KeyPath) -> str:
    """A key path as people write it: lora.target_modules[1]."""
    text = "".join(f"[{name}]" if isinstance(name, int) else f".{_in_a_line(str(name))}" for name in path)
    return text.removeprefix(".")


def _in_a_line(name: str) -> str:
    return name if name.isprintable() else repr(name)[1:-1]


def dump_yaml(spec: Strict) -> str:
    """YAML with every field written out; loading it gives an equal object."""
    return yaml.dump(spec.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
