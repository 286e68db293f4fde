"""Settings of the command line, such as recipe.lora.r=8 and plan.workers=4: whose they are."""

from __future__ import annotations

from collections.abc import Sequence

from sameday.spec.errors import BadInput


def split_sets(sets: Sequence[str]) -> tuple[list[str], list[str]]:
    """The recipe's and the plan's; BadInput where one is neither's."""
    recipe, plan, problems = divided(sets)
    if problems:
        raise BadInput("\n".join(problems))
    return recipe, plan


def divided(sets: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The recipe's, the plan's, and a sentence about each that is neither's."""
    parts: dict[str, list[str]] = {"recipe": [], "plan": []}
    problems = []
    for text in sets:
        key, equals, _ = text.partition("=")
        kind, *names = key.strip().split(".")
        if not equals:
            problems.append(f"--set {text}: has no '='; write recipe.KEY=VALUE or plan.KEY=VALUE")
        elif kind not in parts or not names or not all(names):
            problems.append(f"--set {text}: must start with recipe.KEY= or plan.KEY=")
        else:
            parts[kind].append(text)
    return parts["recipe"], parts["plan"], problems
