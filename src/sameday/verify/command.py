"""What `sameday verify` was asked for: a plan under a recipe, two finished runs, or runs of several recipes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sameday.spec.errors import BadInput
from sameday.spec.record import write_text


def verify(
    what: Sequence[Path],
    plan: Path | None,
    against: Path | None,
    steps: int,
    precision: str | None,
    ranks: int,
    sets: Sequence[str],
    recipes: bool,
    out: Path | None,
) -> int:
    """Print the verdict, write it where asked, and give the exit code."""
    report: Any
    if len(what) == 1 and not what[0].is_dir():
        from sameday.verify.run import verify_plan

        if recipes:
            raise BadInput("--recipes compares finished runs: give their folders, not a recipe")
        # The verdict alone goes to standard output.
        say = partial(print, file=sys.stderr, flush=True)
        report = verify_plan(what[0], plan, against, sets, steps, precision, ranks, say)
    else:
        from sameday.verify.runs import compare_recipes, compare_runs

        given = {"--plan": plan, "--against": against, "--set": sets or None, "--precision": precision}
        odd = [name for name, value in given.items() if value is not None]
        if odd:
            raise BadInput(f"{', '.join(odd)}: belong to `verify RECIPE`; finished runs have their plans already")
        if not recipes and len(what) != 2:
            raise BadInput(f"{len(what)} folders: give one recipe, two finished runs, or more runs with --recipes")
        report = compare_recipes(what) if recipes else compare_runs(what[0], what[1])
    print("\n".join(report.lines()))
    if out is not None:
        write_text(out, json.dumps(report.as_json(), indent=1) + "\n")
    return int(report.exit_code)
