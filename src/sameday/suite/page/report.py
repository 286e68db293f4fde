"""`sameday suite report`: one page over all experiments of a suite. Runs stand side by side with the metrics of their
evaluations; beside them what each job took, in GPU hours, and where it ran."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from sameday.record.folder import run_files
from sameday.record.metrics import is_number
from sameday.report.answers import METRICS, PREDICTIONS, SPLIT, Answers, Metrics, answer_files
from sameday.report.beside import read_beside, read_json
from sameday.report.gather import Run, gather, only_evaluated, with_stages
from sameday.report.page import render
from sameday.report.tables import NONE, Cell, Row, Section
from sameday.report.words import seconds
from sameday.spec.errors import BadInput
from sameday.spec.load import load_plan, load_recipe
from sameday.spec.recipe import Recipe
from sameday.spec.suite import Suite
from sameday.spec.words import count, tell
from sameday.spec.writing import check_output, write_text
from sameday.suite.jobs import OpenSuite, plan_path
from sameday.suite.page.snapshot import JobView, Snapshot, SuiteView
from sameday.suite.state import JobState, SuiteFolder

SCORES = "scores.json"


def report_suite(path: Path, out: Path | None, html: Path | None) -> Path:
    """Write the report of all that there is of a suite by now, whole or not at all; by default into its folder."""
    snapshot = Snapshot(path, out)
    suite, folder = snapshot.suite, snapshot.folder
    html = html or folder.path / "report.html"
    runs = suite_runs(suite, snapshot.opened.home, folder)
    if not runs:
        raise BadInput(f"{folder.path}: no job of {path} has trained or evaluated anything yet")
    check_output("-o", html, _read(suite, folder), b"<!DOCTYPE html>")
    view = snapshot.look()
    write_text(html, render(runs, heading=view.name, more=[jobs_section(view)]))
    return html


def report_at_the_end(opened: OpenSuite) -> None:
    """Where all is done: made once for the jobs of this file, and nothing where no job trains or evaluates. That it
    cannot be made does not undo the rest."""
    suite, folder = opened.suite, opened.folder
    html = folder.path / "report.html"
    if any(folder.read(name).state != "done" for name in suite.jobs):
        return  # a scheduler has it
    try:
        states = [folder.job(name) / "state.json" for name in suite.jobs]
        changed = max(path.stat().st_mtime for path in (*states, opened.path))
        fresh = html.exists() and html.stat().st_mtime >= changed
        if not fresh and any(job.do in ("train", "eval") for job in suite.jobs.values()):
            tell(f"report: {report_suite(opened.path, folder.path, html)}")
    except (BadInput, OSError) as error:
        tell(f"no report: {error}")


def _read(suite: Suite, folder: SuiteFolder) -> Iterator[Path]:
    for name in suite.jobs:
        yield from (folder.log(name), folder.job(name) / "state.json", folder.job(name) / "plan.yaml")
        yield from (folder.run(name) / each for each in (SCORES, METRICS, PREDICTIONS))
        for each in {folder.run(name), *with_stages([folder.run(name)])}:
            yield from (*run_files(each), *answer_files(each))


def suite_runs(suite: Suite, home: Path, folder: SuiteFolder) -> list[Run]:
    """In the file's order; each by its job's name, with what its evaluations found."""
    runs: dict[str, list[Run]] = {}
    for name, job in suite.jobs.items():
        if job.do == "train" and (folder.run(name) / "recipe.yaml").is_file():
            runs[name] = gather([folder.run(name)])
            for run in runs[name]:
                run.label = name if run.path == folder.run(name) else f"{name}: {run.path.name}"
    for name, job in suite.jobs.items():
        made = folder.run(name)
        if job.do != "eval" or not any((made / each).is_file() for each in (SCORES, METRICS, PREDICTIONS)):
            continue
        if job.of in runs:
            whose = runs[job.of][-1]  # of a run in stages, the last one gave the result
        elif job.recipe is not None:
            recipe = load_recipe(home / job.recipe)
            plan = load_plan(plan_path(suite, home, folder, name), recipe=recipe)
            whose = only_evaluated(made, name, recipe, plan)
            whose.environment = _where(folder.read(name), home / job.recipe)
            runs[name] = [whose]
        else:
            continue
        _attach(whose, name, job.split or _split(whose.recipe), made)
    order = {name: i for i, name in enumerate(suite.jobs)}
    return [run for name in sorted(runs, key=order.__getitem__) for run in runs[name]]


def _where(state: JobState, recipe: Path) -> dict[str, str]:
    """What is known of the environment of an evaluation, which records none itself."""
    started = (
        {}
        if state.started is None
        else {"started": datetime.fromtimestamp(state.started, UTC).isoformat(timespec="seconds")}
    )
    return {**started, **({"hostname": state.host} if state.host else {}), "recipe_dir": str(recipe.parent)}


def _split(recipe: Recipe) -> str:
    evaluation = getattr(recipe, "evaluate", None)
    return "test" if evaluation is None else str(evaluation.split)


def _attach(run: Run, name: str, split: str, made: Path) -> None:
    """Scores and answers of an evaluation whose folder is not the run's own."""
    if (made / SCORES).is_file():
        scores = read_json(made / SCORES)
        if not isinstance(scores, dict):
            raise BadInput(f"{made / SCORES}: is not what an evaluation wrote: must be a mapping")
        run.scores = {**run.scores, split: {str(key): value for key, value in scores.items() if is_number(value)}}
    if (made / METRICS).is_file() or (made / PREDICTIONS).is_file():
        found = SPLIT.search(name)
        called = name if found is not None and found[1] == split else f"{name}-{split}"
        metrics = read_beside(made / METRICS, Metrics) if (made / METRICS).is_file() else None
        run.answers.append(Answers(called, made, metrics))


def jobs_section(view: SuiteView) -> Section:
    """What each job took, and where."""
    rows = [Row(job.name, _cells(job), note=job.do) for job in view.jobs]
    used, took = sum(job.gpu_hours for job in view.jobs), sum(job.spent for job in view.jobs)
    rows.append(Row("all", [Cell(""), Cell(""), Cell(seconds(took)), Cell(f"{used:.3g}", strong=True), Cell("")]))
    return Section(
        "jobs", "Jobs and their cost", _said(view), ["job", "state", "attempts", "took", "GPU hours", "on"], rows
    )


def _cells(job: JobView) -> list[Cell]:
    state = job.state
    gpus = f"GPU {', '.join(map(str, state.gpus))}" if state.gpus else ""
    where = Cell(state.host, gpus) if state.host else NONE
    cost = (
        Cell(f"{job.gpu_hours:.3g}", count(job.asked_gpus, "GPU")) if job.asked_gpus else Cell("0", "a CPU is enough")
    )
    first = state.why.partition("\n")[0]
    return [
        Cell(state.state, first if state.state != "done" else ""),
        Cell(str(state.attempt) if state.attempt else "–"),
        Cell(seconds(job.spent)) if job.spent else NONE,
        cost if job.spent else NONE,
        where,
    ]


def _said(view: SuiteView) -> list[str]:
    done = sum(job.state.state == "done" for job in view.jobs)
    said = [f"{done} of {count(len(view.jobs), 'job')} {'is' if done == 1 else 'are'} done."]
    ended = done == len(view.jobs)
    if view.began is not None and view.finish is not None and ended:
        said[0] += f" From the first start to the last end it took {seconds(view.finish - view.began)}."
    if view.deadline is not None and view.finish is not None and ended:
        spare = view.deadline - view.finish
        said.append(
            f"The deadline was kept, with {seconds(spare)} to spare."
            if spare >= 0
            else f"The deadline was missed by {seconds(-spare)}."
        )
    if any(job.asked_gpus for job in view.jobs):
        said.append("GPU hours are the time of all attempts, loading and saving included, times the GPUs of a job.")
    return said
