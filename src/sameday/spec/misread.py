"""Words that YAML takes for something else, where a recipe compares them with the words of a file: its `yes` is true,
and its 0012 is ten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from sameday.spec.reading import line_of

COMPARED = ("where", "skip", "templates")
"""Keys of mappings whose values, or whose own keys, are compared with what lines of a file have."""
_BOOL, _INT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:int"


def misread(node: yaml.Node, source: str, path: Sequence[Any] = ()) -> Iterator[str]:
    """A sentence about each. `path` has the keys around the node."""
    if any(name in COMPARED for name in path):
        yield from _inside(node, source)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else ""
            if name not in COMPARED or isinstance(value, yaml.MappingNode):
                yield from misread(value, source, (name,))
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from misread(value, source)


def _inside(node: yaml.Node, source: str) -> Iterator[str]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            for each in pair:
                yield from _inside(each, source)
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            yield from _inside(each, source)
    elif isinstance(node, yaml.ScalarNode) and (taken := _taken_for(node)) is not None:
        place = line_of(source, node.start_mark.line + 1)
        yield f'{place}: {node.value} is {taken} in YAML; write "{node.value}" for the word, or {taken}'


def _taken_for(node: yaml.ScalarNode) -> str | None:
    """What YAML makes of a word, where that is written otherwise."""
    if node.style is not None or node.tag not in (_BOOL, _INT):
        return None
    maker = yaml.SafeLoader("")
    if node.tag == _INT:
        number = str(maker.construct_yaml_int(node))
        return None if number == node.value else number
    plain = str(maker.construct_yaml_bool(node)).lower()
    return None if node.value.lower() == plain else plain
