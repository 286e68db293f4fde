"""YAML to recipes and plans and back. All of a file's problems come out together, each with its place."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml
from pydantic import BaseModel, ValidationError

from sameday.spec.errors import BadInput, refuse
from sameday.spec.identity import as_before
from sameday.spec.plan import Plan, foreign
from sameday.spec.reading import check_size, line_of, read_spec
from sameday.spec.recipe import Recipe, Strict
from sameday.spec.registry import RECIPES, known_tasks, recipe_type
from sameday.spec.removed import REMOVED, refusal, without_removed
from sameday.spec.sets import divided, split_sets

Spec = TypeVar("Spec", bound=Strict)
Made = TypeVar("Made")
KeyPath = tuple[Any, ...]

_UNIONS = (Union, types.UnionType)

# No spec is nested deeper.
_MAX_DEPTH = 4


class _Loader(yaml.SafeLoader):
    """YAML 1.1, in which 5e-5 is a number too."""


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
    node, values = _parsed(text, str(path))
    if node is None:
        raise BadInput(f"{path}: the file is empty")
    if not isinstance(node, yaml.MappingNode):
        raise BadInput(f"{path}:{node.start_mark.line + 1}: must be a mapping of keys to values")
    document.values = values
    _find_places(node, (), document)
    return document


def _parsed(text: str, source: str) -> tuple[yaml.Node | None, Any]:
    """YAML as nodes and as values; BadInput where it is none, or far more than it looks."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        check_size(node, source)
        duplicates = _duplicates(node, (), source)  # before merged keys (<<) are added
        values = loader.construct_document(node)
    except yaml.YAMLError as error:
        raise BadInput(_syntax(error, source, text)) from None
    except RecursionError:
        raise BadInput(f"{source}: not valid YAML: it is nested too deeply") from None
    except ValueError as error:  # a date that there is not, a number of thousands of digits
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{source}: not valid YAML: {error}") from None
    refuse(duplicates)
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
    if not isinstance(node, yaml.MappingNode) or len(path) >= _MAX_DEPTH:
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


def _apply_sets(document: Document, sets: Sequence[str]) -> list[str]:
    """A sentence about each that cannot be applied."""
    problems = []
    for text in sets:
        key, _, value = text.partition("=")
        path = tuple(key.strip().split(".")[1:])
        try:
            _, parsed = _parsed(value, f"--set {text}")
        except BadInput as error:
            problems.append(str(error))
            continue
        here = document.values
        for depth, name in enumerate(path[:-1], start=1):
            inner = here.get(name)
            if path[:depth] == ("order",) and isinstance(inner, str):
                inner = {"kind": inner}
            elif inner is None:
                inner = {}
            if not isinstance(inner, dict):
                problems.append(f"--set {text}: {show(path[:depth])} is {inner!r}, which has no keys")
                break
            # A copy: with aliases two keys may hold one object, and only one of them is set.
            here[name] = inner = dict(inner)
            here = inner
        else:
            here[path[-1]] = parsed
            for old in [old for old in document.places if old[: len(path)] == path]:
                del document.places[old]
            document.places[path] = f"--set {text}"
    return problems


def load_specs(recipe_path: Path, plan_path: Path | None, sets: Sequence[str]) -> tuple[Recipe, Plan]:
    """Both, with their settings. BadInput has the problems of both."""
    recipe_sets, plan_sets, problems = divided(sets)
    recipe: Recipe | None = None
    try:
        recipe = load_recipe(recipe_path, recipe_sets)
    except BadInput as error:
        problems.append(str(error))
    plan = _unless(problems, lambda: load_plan(plan_path, plan_sets, recipe))
    assert recipe is not None
    return recipe, plan


def _unless(problems: Sequence[str], make: Callable[[], Made]) -> Made:
    """What is made, unless there are problems, or come up now: all of them are told together."""
    try:
        made = make()
    except BadInput as error:
        problems = [*problems, str(error)]
    if problems:
        raise BadInput("\n".join(problems))
    return made


def load_recipe(path: Path, sets: Sequence[str] = ()) -> Recipe:
    """The recipe in this file, with `recipe.KEY=VALUE` settings put over it. Its task decides which fields it has."""
    document = read_document(path)
    return _unless(_apply_sets(document, split_sets(sets)[0]), lambda: _recipe_of(document))


def _recipe_of(document: Document) -> Recipe:
    task = document.values.get("task", next(iter(RECIPES)))
    kind = recipe_type(task) if isinstance(task, str) else None
    if kind is None:
        allowed = ", ".join(map(repr, known_tasks()))
        raise BadInput(f"{document.place(('task',))}: task is {_value(task)}; must be one of {allowed}")
    return validate(kind, document)


def recipe_from(values: dict[str, Any]) -> Recipe:
    """A recipe that was written as plain data."""
    task = values.get("task", next(iter(RECIPES)))
    kind = recipe_type(task)
    if kind is None:
        raise BadInput(f"task {task!r} is not installed here; there are {', '.join(known_tasks())}")
    return kind.model_validate(values)


def load_plan(path: Path | None, sets: Sequence[str] = (), recipe: Recipe | type[Recipe] | None = None) -> Plan:
    """The plan in this file (the plain plan without one), with `plan.KEY=VALUE` settings put over it. BadInput where it
    sets what the recipe's task cannot follow."""
    document = read_document(path) if path is not None else Document("plan")
    return _unless(_apply_sets(document, split_sets(sets)[1]), lambda: _plan_of(document, recipe))


def load_recorded_plan(path: Path, recipe: Recipe) -> Plan:
    """The plan that a run folder holds. An earlier release may have written it: fields that are gone are dropped."""
    document = read_document(path)
    document.values = without_removed(document.values)
    return _plan_of(document, recipe)


def load_recorded_recipe(path: Path) -> Recipe:
    """The recipe that a run folder holds. Runs write every field out: one that is not there came later, and is what it
    was before."""
    return as_before(load_recipe(path))


def _plan_of(document: Document, recipe: Recipe | type[Recipe] | None) -> Plan:
    lines = []
    try:
        plan = validate(Plan, document)
    except BadInput as error:
        lines.append(str(error))
        plan = Plan(**{name: value for name, value in document.values.items() if _is_good(name, value)})
    problems = foreign(plan, recipe) if recipe is not None else {}
    refuse(
        [*lines, *(f"{document.place((k,))}: {k} is {_value(getattr(plan, k))}; {why}" for k, why in problems.items())]
    )
    return plan


def _is_good(name: Any, value: Any) -> bool:
    """Whether a plan may have this by itself; no field's value depends on another's."""
    try:
        return isinstance(name, str) and bool(Plan.model_validate({name: value}))
    except ValidationError:
        return False


def validate(kind: type[Spec], document: Document) -> Spec:
    """The document as a Recipe or a Plan; BadInput with one line per problem."""
    try:
        return kind.model_validate(document.values)
    except ValidationError as error:
        # Each branch of a union reports for itself; what they say about one key is one problem.
        lines: dict[str, None] = {}
        for problem in error.errors(include_url=False):
            lines[_explain(kind, document, dict(problem))] = None
        raise BadInput("\n".join(lines)) from None


def _explain(kind: type[BaseModel], document: Document, problem: dict[str, Any]) -> str:
    loc = problem["loc"]
    if problem["type"] == "missing" and isinstance(loc[-1], int):
        loc = loc[:-1]  # what is wrong is the length of the list
    path, owner, annotation = _locate(kind, loc)
    place, name, given = document.place(path), show(path), problem["input"]
    if problem["type"].startswith("union_tag_"):
        return _explain_tag(document, (*path, "kind"), annotation, given)
    if problem["type"] == "extra_forbidden":
        return f"{place}: {name} {_unknown_key(kind, owner, path)}"
    if problem["type"] == "missing" and loc == problem["loc"]:
        return f"{place}: {name} is missing"
    if problem["type"] == "value_error":
        return _explain_rule(kind, document, path, given, str(problem["ctx"]["error"]))
    if problem["type"] == "invalid_key" or problem["loc"][-1] == "[key]":
        place = document.place((*path[:-1], str(path[-1])))
        return f"{place}: the key {given!r} must be a string: put it in quotes"
    if re.search(r"_type$|^literal_error$|^missing$|^too_long$", problem["type"]) and annotation is not None:
        hint = ""
        if problem["type"] == "string_type" and not isinstance(given, list | dict | None):
            hint = ": put it in quotes"
        return f"{place}: {name} is {_value(given)}; must be {_allowed(annotation)}{hint}"
    must = re.sub(r"^\w+ should ", "must ", problem["msg"]).replace(" after validation", "")
    if problem["type"] == "less_than_equal":
        must += _why_at_most(owner, path[-1])
    return f"{place}: {name} is {_value(given)}; {must}"


def _why_at_most(owner: type[BaseModel], name: Any) -> str:
    extra = owner.model_fields[name].json_schema_extra if name in owner.model_fields else None
    return f": {extra['why_at_most']}" if isinstance(extra, dict) and "why_at_most" in extra else ""


def _explain_tag(document: Document, path: KeyPath, annotation: Any, given: dict[str, Any]) -> str:
    """One of several models was meant, and it is not known which."""
    said = f"is {_value(given['kind'])}" if "kind" in given else "is missing"
    allowed = ", ".join(map(repr, _models(annotation)))
    return f"{document.place(path)}: {show(path)} {said}; must be one of {allowed}"


def _explain_rule(kind: type[BaseModel], document: Document, path: KeyPath, given: Any, text: str) -> str:
    """A validator's own sentence. One about several keys stands at the first of them that was given."""
    if text.startswith("must"):
        return f"{document.place(path)}: {show(path)} is {_value(given)}; {text}"
    named = [(*path, *word.split(".")) for word in re.findall(r"\w+(?:\.\w+)*", text)]
    place = next((document.places[key] for key in named if key in document.places), document.place(path))
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
        if not models:
            # What follows is an index, a mapping's key, or the name of a union's branch, which is no key.
            if loc and typing.get_origin(annotation) is dict:
                return (*path, loc[0]), owner, typing.get_args(annotation)[1]
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
    if origin in _UNIONS:
        return " or ".join(_allowed(arg) for arg in args)
    if origin is tuple:
        count = "" if args[-1] is Ellipsis else f"{len(args)} "
        return f"a list of {count}{_allowed(args[0]).split()[-1]}s"
    if origin is dict or annotation is dict:
        return "a mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping with the keys {', '.join(annotation.model_fields)}"
    words = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    return words[annotation]


def _value(given: Any) -> str:
    """A value as the file may have written it, cut where it is long."""
    if given is None or isinstance(given, bool):
        return {None: "null", True: "true", False: "false"}[given]
    try:
        text = repr(list(given) if isinstance(given, tuple) else given)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."


def show(path: KeyPath) -> str:
    """A key path as people write it: lora.target_modules[1]."""
    text = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in path)
    return text.removeprefix(".")


def dump_yaml(spec: Recipe | Plan) -> str:
    """YAML with every field written out; loading it gives an equal object."""
    return yaml.dump(spec.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def resolve_path(recipe_dir: Path, value: str) -> Path:
    """A path of a recipe. Relative ones start at the recipe's folder, wherever the command was typed."""
    try:
        return recipe_dir / Path(value).expanduser()
    except RuntimeError as error:
        raise BadInput(f"path {value!r}: {error}") from None


def resolve_model(recipe_dir: Path, value: str) -> str:
    """A recipe's model: a folder, relative to the recipe's, if there is one; otherwise a name on the Hub."""
    folder = resolve_path(recipe_dir, value)
    if not folder.is_dir() and Path(value).is_dir():
        raise BadInput(
            f"model {value!r} is a folder here, but not beside the recipe in {recipe_dir}, where paths start"
        )
    return str(folder) if folder.is_dir() else value
