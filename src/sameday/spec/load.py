"""YAML to recipes and plans and back. All of a file's problems come out together, each with its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from sameday.spec.document import Document, parsed, read_document, show
from sameday.spec.errors import BadInput
from sameday.spec.explain import shown, validate
from sameday.spec.identity import as_before
from sameday.spec.plan import Plan, foreign
from sameday.spec.recipe import Recipe, Strict
from sameday.spec.registry import RECIPES, known_tasks, recipe_type
from sameday.spec.removed import without_removed
from sameday.spec.sets import divided, split_sets

Spec = TypeVar("Spec", bound=Strict)
Made = TypeVar("Made")
KeyPath = tuple[Any, ...]


class BadPlan(BadInput):
    """A plan that is wrong whatever machine it runs on. `rest` is what is good of it, which the machine may not be able
    to follow either, and `recipe` what it was for; None where that is wrong too."""

    def __init__(self, text: str, rest: Plan, recipe: Recipe | None) -> None:
        super().__init__(text, rest, recipe)
        self.rest, self.recipe = rest, recipe

    def __str__(self) -> str:
        return str(self.args[0])


def _apply_sets(document: Document, sets: Sequence[str]) -> list[str]:
    """A sentence about each that cannot be applied."""
    problems = []
    for text in sets:
        key, _, value = text.partition("=")
        path = tuple(key.strip().split(".")[1:])
        try:
            _, read = parsed(value, f"--set {text}", path)
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
            here[path[-1]] = read
            for old in [old for old in document.places if old[: len(path)] == path]:
                del document.places[old]
            document.places[path] = f"--set {text}"
    return problems


def load_specs(recipe_path: Path, plan_path: Path | None, sets: Sequence[str]) -> tuple[Recipe, Plan]:
    """Both, with their settings. BadInput has the problems of both."""
    recipe_sets, plan_sets, problems = divided(sets)
    recipe: Recipe | type[Recipe] | None = None
    try:
        recipe = load_recipe(recipe_path, recipe_sets)
    except BadInput as error:
        problems.append(str(error))
        recipe = _type_in(recipe_path, recipe_sets)
    plan = _unless(problems, lambda: load_plan(plan_path, plan_sets, recipe))
    assert isinstance(recipe, Recipe)
    return recipe, plan


def _type_in(path: Path, sets: Sequence[str]) -> type[Recipe] | None:
    """Of a recipe that cannot be: what its task has is known all the same, unless that is wrong too."""
    try:
        document = read_document(path)
    except BadInput:
        return None
    _apply_sets(document, sets)
    return _kind_of(document)


def _unless(problems: Sequence[str], make: Callable[[], Made]) -> Made:
    """What is made, unless there are problems, or come up now: all of them are told together."""
    try:
        made = make()
    except BadPlan as error:
        raise BadPlan("\n".join([*problems, str(error)]), error.rest, error.recipe) from None
    except BadInput as error:
        problems = [*problems, str(error)]
    if problems:
        raise BadInput("\n".join(problems))
    return made


def load_recipe(path: Path, sets: Sequence[str] = (), recorded: bool = False) -> Recipe:
    """The recipe in this file, with `recipe.KEY=VALUE` settings put over it. Its task decides which fields it has.
    `recorded`: a run wrote the file, with every field."""
    document = read_document(path)
    return _unless(_apply_sets(document, split_sets(sets)[0]), lambda: _recipe_of(document, recorded))


def _recipe_of(document: Document, recorded: bool) -> Recipe:
    kind = _kind_of(document)
    if kind is None:
        allowed, task = ", ".join(map(repr, known_tasks())), document.values["task"]
        raise BadInput(f"{document.place(('task',))}: task is {shown(task)}; must be one of {allowed}")
    return validate(kind, document, asked=not recorded)


def _kind_of(document: Document) -> type[Recipe] | None:
    task = document.values.get("task", next(iter(RECIPES)))
    return recipe_type(task) if isinstance(task, str) else None


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
    return as_before(load_recipe(path, recorded=True))


def _plan_of(document: Document, recipe: Recipe | type[Recipe] | None) -> Plan:
    lines = []
    try:
        plan = validate(Plan, document)
    except BadInput as error:
        lines.append(str(error))
        plan = Plan(**{name: value for name, value in document.values.items() if _is_good(name, value)})
    problems = foreign(plan, recipe) if recipe is not None else {}
    lines += [f"{document.place((k,))}: {k} is {shown(getattr(plan, k))}; {why}" for k, why in problems.items()]
    if lines:
        rest = plan.model_copy(update={name: getattr(Plan(), name) for name in problems})
        raise BadPlan("\n".join(lines), rest, recipe if isinstance(recipe, Recipe) else None)
    return plan


def _is_good(name: Any, value: Any) -> bool:
    """Whether a plan may have this by itself; no field's value depends on another's."""
    try:
        return isinstance(name, str) and bool(Plan.model_validate({name: value}))
    except ValidationError:
        return False


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
