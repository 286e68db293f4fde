"""What `sameday verify` was asked for: a plan under a recipe, two finished runs, or runs of several recipes."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sameday.hardware.signals import orderly_end
from sameday.record.folder import plain, run_files
from sameday.spec.errors import BadInput, RunStopped
from sameday.spec.words import count, tell
from sameday.spec.writing import check_output, write_text

DEFAULTS: dict[str, Any] = {"plan": None, "against": None, "sets": (), "steps": 8, "precision": None, "ranks": 1}


def verify(what: Sequence[Path], asked: dict[str, Any], recipes: bool, out: Path | None) -> int:
    """Print the verdict, write it where asked, and give the exit code. Nothing but a verdict leaves with 1."""
    read = [file for each in what for file in (each, *run_files(each))]
    check_output("--json", out, (*read, asked.get("plan"), asked.get("against")))
    with orderly_end():  # arms and folders are cleared
        report = compared(what, asked, recipes)
    tell("\n".join(report.lines()))
    if out is not None:
        write_text(out, json.dumps(plain(report.as_json()), indent=1) + "\n")
    return int(report.exit_code)


def compared(what: Sequence[Path], asked: dict[str, Any], recipes: bool) -> Any:
    """The report, with its lines, its data and the exit code; BadInput where nothing could be compared."""
    try:
        return _report(what, asked, recipes)
    except (BadInput, RunStopped):
        raise
    except Exception:
        traceback.print_exc()
        raise BadInput("verify could not compare: see above") from None


def _report(what: Sequence[Path], asked: dict[str, Any], recipes: bool) -> Any:
    if len(what) == 1 and not what[0].is_dir():
        from sameday.verify.run import Asked, verify_plan

        if recipes:
            raise BadInput("--recipes compares finished runs: give their folders, not a recipe")
        # The verdict alone goes to standard output.
        say = partial(tell, file=sys.stderr)
        return verify_plan(Asked(recipe=what[0], **(DEFAULTS | {k: v for k, v in asked.items() if v is not None})), say)

    from sameday.verify.runs import compare_recipes, compare_runs

    odd = [f"--{name.removesuffix('s') if name == 'sets' else name}" for name, value in asked.items() if value]
    if odd:
        raise BadInput(f"{', '.join(odd)}: belong to `verify RECIPE`; finished runs have their plans already")
    if not recipes and len(what) != 2:
        raise BadInput(f"{count(len(what), 'folder')}: give one recipe, two finished runs, or more runs with --recipes")
    return compare_recipes(what) if recipes else compare_runs(what[0], what[1])
