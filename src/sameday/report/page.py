"""`sameday report`: gathered runs become one HTML file. It loads nothing, runs nothing, and shows data as text."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

import sameday
from sameday.record.folder import run_files
from sameday.report import answer_tables, tables, words
from sameday.report.answers import answer_files
from sameday.report.beside import COMMANDS
from sameday.report.curves import floor_chart, spikes, timeline_charts, training_curves, validated_once
from sameday.report.gather import Run, gather, with_stages
from sameday.spec.errors import BadInput
from sameday.spec.words import count, number, visible
from sameday.spec.writing import check_output, write_text

MOST_SKIPPED = 200
MOST_DIFFERENCES = 40
MOST_SPIKES = 40


def report_from_files(
    paths: Sequence[Path],
    out: Path,
    profiles: Sequence[Path] = (),
    tunes: Sequence[Path] = (),
    verdicts: Sequence[Path] = (),
) -> Path:
    """Write the report of these runs, whole or not at all. BadInput once it is written where lines of curves had to be
    left out."""
    folders = {*paths, *with_stages(paths)}
    beside = [path / f"{command}.json" for path in folders for command in COMMANDS]
    read = [file for path in folders for file in (*run_files(path), *answer_files(path))]
    check_output("--out", out, (*read, *beside, *profiles, *tunes, *verdicts), b"<!DOCTYPE html>")
    runs = gather(paths, profiles, tunes, verdicts)
    write_text(out, render(runs))
    if damaged := [line for run in runs for line in run.damaged_told]:
        raise BadInput("\n".join([*damaged, f"{out} is written without such lines"]))
    return out


def render(
    runs: Sequence[Run], now: datetime | None = None, heading: str = "", more: Sequence[tables.Section] = ()
) -> str:
    """`more` goes behind the first section. Without a heading the page is called by its recipes."""
    context = _context(runs, now or datetime.now(UTC)) | {"more": more}
    page = _template().render(context | ({"heading": heading} if heading else {}))
    # Names of files and JSON may hold half characters, which no UTF-8 file can, and what changes how others are shown.
    return visible(page.encode("utf-8", "replace").decode("utf-8"))


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("sameday.report", "template"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": words.seconds, "percent": words.percent, "number": number, "value": words.value}
    environment.filters |= {"score": lambda given, name: words.score(name, given), "plain": words.plain_name}
    return environment.get_template("page.html")


def _context(runs: Sequence[Run], now: datetime) -> dict[str, Any]:
    kinds = tables.kinds(runs)
    plan = tables.plan_rows(runs)
    return {
        "runs": runs,
        "colours": {run.label: i % 8 for i, run in enumerate(runs)},
        "made": now.strftime("%Y-%m-%d %H:%M UTC"),
        "version": sameday.__version__,
        "heading": " and ".join(dict.fromkeys(kind.name for kind in kinds)),
        "kinds": [(kind, words.recipe_words(kind.runs[0].recipe)) for kind in kinds],
        "other_inputs": tables.other_inputs_of(runs),
        "glance": tables.glance(runs),
        "said": [*tables.same_losses(runs), *validated_once(runs)],
        "charts": [(chart, Markup(chart.svg), Markup(chart.wide)) for chart in training_curves(runs)],
        "spikes": [(run, rows[:MOST_SPIKES], len(rows)) for run in runs if (rows := spikes(run))],
        "plan_told": [row for row in plan if row.told],
        "plan_rest": [row for row in plan if not row.told],
        "timeline": Markup("".join(timeline_charts(runs))),
        "has_floor": any(run.timeline is not None and run.floor is not None for run in runs),
        "part_rows": tables.part_rows(runs),
        "worker_rows": tables.worker_rows(runs),
        "profiled": [_profiled(run) for run in runs if run.profile is not None],
        "tuned": [_tuned(run) for run in runs if run.tune is not None],
        "verdicts": [_verdict(run) for run in runs if run.verdict is not None],
        "splits": answer_tables.splits(runs),
        "confusion_heads": answer_tables.confusion_heads,
        "scores": _scores(runs),
        "skipped": [(run, (run.skipped or [])[:MOST_SKIPPED]) for run in runs if run.skipped],
        "unskipped": [run for run in runs if run.skipped == []],
        "unread": [(run, count(len(run.damaged), "line")) for run in runs if run.damaged],
        "environment": tables.environment_rows(runs),
        "missing": _missing(runs),
        "starts": {run.label: _starts(run) for run in runs},
        "homes": {run.label: shlex.quote(str(run.environment.get("recipe_dir", "."))) for run in runs},
        "outs": {run.label: shlex.quote(f"{run.path.resolve().name}-again") for run in runs},
        "claims": words.CLAIMS,
        "verdict_words": words.VERDICTS,
        "save": _data_link,
    }


def _profiled(run: Run) -> dict[str, Any]:
    assert run.profile is not None
    has_floor = run.profile.floor is not None
    return {
        "run": run,
        "profile": run.profile,
        "notes": tables.profile_notes(run),
        "floor": Markup(floor_chart(run)) if has_floor else None,
    }


def _tuned(run: Run) -> dict[str, Any]:
    assert run.tune is not None
    tune = run.tune
    machine = tune.machine.get("name") if isinstance(tune.machine, dict) else tune.machine
    sides = [("plain plan", tune.plain), ("best plan", tune.best)]
    return {
        "run": run,
        "tune": tune,
        "notes": tables.tune_notes(run),
        "rows": tables.tried(tune),
        "gain": tables.gain(tune),
        "sides": [(name, part, tables.spread(part), tables.whole_run(part)) for name, part in sides],
        "machine": machine or "",
    }


def _verdict(run: Run) -> dict[str, Any]:
    assert run.verdict is not None
    odd = tables.unlike(run.verdict)
    return {
        "run": run,
        "verdict": run.verdict,
        "notes": tables.verdict_notes(run),
        "measures": tables.measures(run.verdict),
        "groups": tables.group_rows(run.verdict),
        "differences": odd[:MOST_DIFFERENCES],
        "more": max(0, len(odd) - MOST_DIFFERENCES),
    }


def _scores(runs: Sequence[Run]) -> list[tables.Row]:
    """A row for each split and score, a column for each run."""
    names = dict.fromkeys((split, name) for run in runs for split, scores in run.scores.items() for name in scores)
    rows = []
    for split, name in names:
        cells = [tables.Cell(words.score(name, run.scores.get(split, {}).get(name))) for run in runs]
        rows.append(tables.Row(f"{'validation' if split == 'val' else split} {words.plain_name(name)}", cells))
    if any(run.best_step is not None for run in runs):
        best = [tables.NONE if run.best_step is None else tables.Cell(f"step {run.best_step:,}") for run in runs]
        chosen = any(run.recipe.best is not None for run in runs)
        rows.append(tables.Row("best validation score at" if chosen else "lowest validation loss at", best))
    return rows


def _missing(runs: Sequence[Run]) -> list[tuple[str, str, list[Run], list[str]]]:
    """What is missing, why, from which runs, and the commands that would give it."""
    missing: dict[tuple[str, str], tuple[list[Run], list[str]]] = {}
    for run in runs:
        for each in run.missing:
            who, commands = missing.setdefault((each.what, each.remedy), ([], []))
            who.append(run)
            commands += [each.command] if each.command else []
    return [(*key, *rest) for key, rest in missing.items()]


def _starts(run: Run) -> list[tuple[str, str]]:
    """When the run was started or gone on with, and the command as it was typed."""
    history = run.environment.get("history")
    entries = [entry for entry in history if isinstance(entry, dict)] if isinstance(history, list) else []
    return [(str(entry.get("time", "")), _typed(str(entry.get("command", "")))) for entry in entries]


def _typed(command: str) -> str:
    """A program's path says where it was installed, not what was typed."""
    program, _, rest = command.partition(" ")
    known = {"__main__.py": "python -m sameday", "sameday": "sameday"}
    return f"{known.get(Path(program).name, program)} {rest}".strip()


def _data_link(text: str) -> str:
    """A file inside the page: a browser saves it without asking anybody."""
    return f"data:application/yaml;base64,{base64.b64encode(text.encode()).decode()}"
