"""Whether what another command found out about a plan, or about runs, is of this run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sameday.spec.plan import Plan

SELDOM = ("log_steps", "eval_steps", "save_steps", "save_total_limit", "track")
"""Plan fields that do not say how a step is computed."""


def judged_plan(against: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """The plan of which `sameday verify` speaks, as far as it is known: beside the plain plan whole, otherwise the
    fields in which two plans differ, as `told`."""
    plain = Plan().model_dump(mode="json") if against.startswith("plain: ") else {}
    return {**plain, **told}


def unlike(plan: Plan, judged: Mapping[str, Any]) -> list[str]:
    """Fields of a judged plan that say how a step is computed, and say it otherwise than this one. auto may have become
    either."""
    here = plan.model_dump(mode="json")
    told = [name for name, given in judged.items() if name in here and "auto" not in (here[name], given)]
    return [name for name in told if name not in SELDOM and here[name] != judged[name]]


def of_other_runs(names: Sequence[str], run: Path) -> bool:
    """By the folders' names, for paths are as they were typed; one that names no folder may mean any."""
    named = {Path(name).name for name in names}
    return bool(named) and not named & {run.resolve().name, "", ".."}
