"""What is wrong with a document, in words: the place, the key, the value and what is allowed."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, Union

from pydantic import BaseModel, ValidationError

from sameday.spec.document import COLON, Document, KeyPath, lacks_space, show
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.spec.recipe import ASKED, Strict
from sameday.spec.registry import RECIPES
from sameday.spec.removed import REMOVED, refusal

Spec = TypeVar("Spec", bound=Strict)

_UNIONS = (Union, types.UnionType)
_NAMES = re.compile(r"[\w.*-]+(, *[\w.*-]+)*")
"""A text that may be meant for a list of such names."""
ROUNDS = 6
"""A key inside another is as deep as this; each level may have rules of its own."""
STAND_IN = "stand-in"
"""What stands for a missing name or file."""


def validate(kind: type[Spec], document: Document, asked: bool = True) -> Spec:
    """The document as a Recipe or a Plan; BadInput with one line per problem. Fields that contradict each other are
    found only once each of them is good by itself: the rest is asked again without those that are not. `asked`: it is
    what a user wrote, where a field that another puts out of use is a mistake."""
    # Each branch of a union reports for itself; what they say about one key is one problem.
    lines: dict[str, None] = {}
    values, gone = document.values, set[str]()
    for _ in range(ROUNDS):
        try:
            made = kind.model_validate(values, context={ASKED: asked})
        except ValidationError as error:
            problems = [_Problem.of(kind, dict(each)) for each in error.errors(include_url=False)]
            for problem in problems:
                if known := problem.without(gone):
                    lines[_explain(kind, document, known)] = None
            values = _without(values, problems, gone)
            if values is not None:
                continue
        else:
            if not lines:
                return made
        break
    raise BadInput("\n".join(lines))


@dataclass(frozen=True)
class _Problem:
    """What pydantic found: the key, the model that holds it, the type that it should have."""

    error: dict[str, Any]
    loc: KeyPath
    path: KeyPath
    owner: type[BaseModel]
    annotation: Any

    @classmethod
    def of(cls, kind: type[BaseModel], error: dict[str, Any]) -> _Problem:
        loc = error["loc"]
        if error["type"] == "missing" and isinstance(loc[-1], int):
            loc = loc[:-1]  # what is wrong is the length of the list
        return cls(error, loc, *_locate(kind, loc))

    @property
    def is_missing(self) -> bool:
        return bool(self.error["type"] == "missing" and self.loc == self.error["loc"])

    @property
    def names(self) -> set[str]:
        """What sentences about it would name: the key, or the mapping that is another one without it."""
        inside = self.error["type"] != "extra_forbidden" and self.path[-1] not in self.owner.model_fields
        return set(map(str, self.path[-2:] if inside else self.path[-1:]))

    def without(self, gone: Set[str]) -> _Problem | None:
        """As much of it as is not about keys that were taken away, or stood in for."""
        if gone & set(map(str, self.path)):
            return None
        if gone and self.error["type"] == "too_short":
            return None  # what was taken away is what it lacks
        if self.error["type"] != "value_error":
            return self
        names = "|".join(map(re.escape, (*gone, STAND_IN)))
        said = str(self.error["ctx"]["error"]).splitlines()
        left = [line for line in said if not gone or not re.search(rf"(?<!\w)(?:{names})(?!\w)", line)]
        return replace(self, error={**self.error, "ctx": {"error": "\n".join(left)}}) if left else None


def _without(values: Any, problems: Sequence[_Problem], gone: set[str]) -> Any:
    """A copy in which what is wrong is taken away, and something stands for what must be there: `gone` has their names.
    None where nothing is left to ask."""
    values, taken = _copied(values), set[KeyPath]()
    for problem in problems:
        path = problem.path
        if any(path[:end] in taken for end in range(1, len(path) + 1)):
            continue  # the branches of a union, or two items of one list
        stand_in = _stand_in(problem.annotation) if problem.is_missing else None
        held = _held(values, path[:-1]) if stand_in is not None else None
        if held is not None:
            held[path[-1]] = stand_in
        else:
            path = _take(values, path[:-1] if problem.is_missing else path)
            if not path:
                return None
            taken.add(path)
        gone |= {str(path[-1]), *problem.names}
    return values


def _copied(value: Any) -> Any:
    """Of its own everywhere: with aliases two keys may hold one object."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list | tuple) else value


def _held(values: Any, path: KeyPath) -> dict[Any, Any] | None:
    for name in path:
        try:
            values = values[name]
        except (KeyError, IndexError, TypeError):
            return None
    return values if isinstance(values, dict) else None


def _take(values: Any, path: KeyPath) -> KeyPath:
    """Takes away what is nearest to the end of a path and has a name. The path of that."""
    for end in range(len(path), 0, -1):
        held = _held(values, path[: end - 1])
        name = next((key for key in held or () if str(key) == str(path[end - 1])), None)
        if held is not None and name is not None:
            del held[name]
            return path[:end]
    return ()


def _stand_in(annotation: Any) -> Any:
    """What a missing key could be, so that the others can be asked; None where nobody knows."""
    models = _models(annotation) if annotation is not None else {}
    if not models:
        return STAND_IN if annotation is str else None
    kind, model = next(iter(models.items()))
    needed = {name: _stand_in(field.annotation) for name, field in model.model_fields.items() if field.is_required()}
    return None if None in needed.values() else {**needed, **({"kind": kind} if kind else {})}


def _explain(kind: type[BaseModel], document: Document, of: _Problem) -> str:
    line = _explained(kind, document, of)
    return f"{line}: {COLON}" if of.path and _is_glued(of) else line


def _is_glued(of: _Problem) -> bool:
    """Whether a colon without a space behind it is to blame."""
    name, given = str(of.path[-1]), of.error["input"]
    if of.is_missing:
        beside = given.items() if isinstance(given, dict) else ()
        return any(str(key).startswith(f"{name}:") and value is None for key, value in beside)
    return (given is None and ":" in name) or (of.error["type"] != "extra_forbidden" and lacks_space(given))


def _explained(kind: type[BaseModel], document: Document, of: _Problem) -> str:
    problem, path, annotation = of.error, of.path, of.annotation
    place, name, given = document.place(path), show(path), problem["input"]
    if problem["type"].startswith("union_tag_"):
        return _explain_tag(document, (*path, "kind"), annotation, given)
    if problem["type"] == "extra_forbidden":
        why = "is not a key here" if _is_glued(of) else _unknown_key(kind, of.owner, path)
        return f"{place}: {name} {why}"
    if of.is_missing:
        return f"{place}: {name} is missing"
    if problem["type"] == "value_error":
        return _explain_rule(kind, document, path, given, str(problem["ctx"]["error"]))
    if problem["type"] == "invalid_key" or problem["loc"][-1] == "[key]":
        place = document.place((*path[:-1], str(path[-1])))
        return f"{place}: the key {given!r} must be a string: put it in quotes"
    if re.search(r"_type$|^literal_error$|^missing$|^too_long$", problem["type"]) and annotation is not None:
        allowed, hint = _allowed(annotation), ""
        if problem["type"] == "string_type" and not isinstance(given, list | dict | None):
            hint = ": put it in quotes"
        if allowed == "a list of strings" and isinstance(given, str) and _NAMES.fullmatch(given):
            hint = f": [{given}]"
        return f"{place}: {name} is {shown(given)}; must be {allowed}{hint}"
    must = re.sub(r"^\w+ should ", "must ", problem["msg"]).replace(" after validation", "")
    must = re.sub(r"\b0\.0{6,}\d+", lambda small: repr(float(small[0])), must)  # 1e-30, not thirty digits
    if problem["type"] == "less_than_equal":
        must += _why_at_most(of.owner, path[-1])
    return f"{place}: {name} is {shown(given)}; {must}"


def _why_at_most(owner: type[BaseModel], name: Any) -> str:
    extra = owner.model_fields[name].json_schema_extra if name in owner.model_fields else None
    return f": {extra['why_at_most']}" if isinstance(extra, dict) and "why_at_most" in extra else ""


def _explain_tag(document: Document, path: KeyPath, annotation: Any, given: dict[str, Any]) -> str:
    """One of several models was meant, and it is not known which."""
    said = f"is {shown(given['kind'])}" if "kind" in given else "is missing"
    allowed = ", ".join(map(repr, _models(annotation)))
    return f"{document.place(path)}: {show(path)} {said}; must be one of {allowed}"


def _explain_rule(kind: type[BaseModel], document: Document, path: KeyPath, given: Any, text: str) -> str:
    """A validator's own sentences, a line each. One about several keys stands at the first of them that was given."""
    if "\n" in text:
        return "\n".join(_explain_rule(kind, document, path, given, line) for line in text.splitlines())
    if text.startswith("must"):
        return f"{document.place(path)}: {show(path)} is {shown(given)}; {text}"
    named = [(*path, *word.split(".")) for word in re.findall(r"[\w-]+(?:\.[\w-]+)*", text)]
    short = [key[:-1] for key in named if len(key) > len(path) + 1]  # a key whose value stands for all of its own
    place = next((document.places[key] for key in named + short if key in document.places), document.place(path))
    return f"{place}: {show(path)}: {text}" if path else f"{place}: {text}"


def _models(annotation: Any) -> dict[str, type[BaseModel]]:
    """The models among a type's alternatives, by their kinds where there are several."""
    given = typing.get_args(annotation) if typing.get_origin(annotation) in _UNIONS else (annotation,)
    models = [each for each in given if isinstance(each, type) and issubclass(each, BaseModel)]
    return {"": models[0]} if len(models) == 1 else {each.model_fields["kind"].default: each for each in models}


def _locate(kind: type[BaseModel], loc: KeyPath) -> tuple[KeyPath, type[BaseModel], Any]:
    """The key path in an error's location, the model that holds its last key, and that key's type."""
    path: KeyPath = ()
    owner: type[BaseModel] = kind
    annotation: Any = None
    while loc:
        path, loc = (*path, loc[0]), loc[1:]
        if path[-1] not in owner.model_fields:
            return path, owner, None
        annotation = owner.model_fields[path[-1]].annotation
        models = _models(annotation)
        item = typing.get_args(annotation)[0] if typing.get_origin(annotation) is tuple else None
        if loc and isinstance(loc[0], int) and isinstance(item, type) and issubclass(item, BaseModel):
            path, loc, annotation, owner = (*path, loc[0]), loc[1:], item, item if loc[1:] else owner
            continue
        if not models:
            # What follows is an index, a mapping's key, or the name of a union's branch, which is no key.
            if loc and typing.get_origin(annotation) is dict:
                value = typing.get_args(annotation)[1]
                path, loc = (*path, loc[0]), loc[1:]
                if not (loc and isinstance(value, type) and issubclass(value, BaseModel)):
                    return path, owner, value
                owner = value
                continue
            if loc and isinstance(loc[0], int):
                return (*path, loc[0]), owner, typing.get_args(annotation)[0]
            return path, owner, annotation
        if len(models) > 1 and loc:  # the kind comes first, and is no key
            annotation, loc = models[loc[0]], loc[1:]
        elif loc:
            (annotation,) = models.values()
        if loc:
            owner = annotation
    return path, owner, annotation


def _unknown_key(kind: type[BaseModel], owner: type[BaseModel], path: KeyPath) -> str:
    key = str(path[-1])
    if kind is Plan and key in REMOVED:
        return refusal(key)
    inside = [(name, kinds) for name, field in kind.model_fields.items() if (kinds := _models(field.annotation))]
    for _, kinds in inside:
        here = next((tag for tag, model in kinds.items() if model is owner), "")
        there = [tag for tag, model in kinds.items() if key in model.model_fields]
        if here and there:
            return f"is not a key of kind {here}, but of {', '.join(there)}"
    if kind is not Plan and key in Plan.model_fields:
        return "is a plan field, not a recipe field"
    for task, other in RECIPES.items():
        if kind is Plan and key in other.model_fields:
            return "is a recipe field, not a plan field"
        if owner is kind and kind is not other and key in other.model_fields:
            return f"is not a key here, but in recipes of task {task}"
    for name, kinds in inside:
        inner = key.removeprefix(f"{name}_")
        if owner not in kinds.values() and any(inner in model.model_fields for model in kinds.values()):
            return f"is not a key here; it belongs to {name}: {name}.{inner}"
    if owner is not kind and key in kind.model_fields:
        return f"is not a key here; {key} belongs to the top level"
    valid = list(owner.model_fields)
    near = difflib.get_close_matches(key, valid, n=3)
    return (
        f"is not a key here; nearest: {', '.join(near)}" if near else f"is not a key here; allowed: {', '.join(valid)}"
    )


def _allowed(annotation: Any) -> str:
    """A type in a user's words."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(repr(arg) for arg in args)
    if origin is typing.Annotated:
        return _allowed(args[0])
    if origin in _UNIONS:
        return " or ".join(_allowed(arg) for arg in args)
    if origin is tuple:
        if isinstance(args[0], type) and issubclass(args[0], BaseModel):
            return _allowed(args[0]).replace("a mapping", "a list of mappings", 1)
        count = "" if args[-1] is Ellipsis else f"{len(args)} "
        return f"a list of {count}{_allowed(args[0]).split()[-1]}s"
    if origin is dict or annotation is dict:
        return "a mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping with the keys {', '.join(annotation.model_fields)}"
    words = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    return words[annotation]


def shown(given: Any) -> str:
    """A value as the file may have written it, cut where it is long."""
    if given is None or isinstance(given, bool):
        return {None: "null", True: "true", False: "false"}[given]
    try:
        text = repr(list(given) if isinstance(given, tuple) else given)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."
