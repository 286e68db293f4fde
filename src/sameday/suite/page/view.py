"""What the live page shows of a suite: tiles, rows and pictures. The page itself only puts them in their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sameday.report.charts import WIDE, WIDTH, Curve, Point, line_chart, smooth
from sameday.report.curves import SMOOTHED, window
from sameday.report.words import percent, seconds
from sameday.spec.suite import Suite
from sameday.spec.words import number
from sameday.suite.page.drawing import Node, Span, as_lists, graph_picture, time_picture
from sameday.suite.page.snapshot import JobView, SuiteView, plain_view
from sameday.suite.state import State

TOLD: tuple[State, ...] = (
    *("running", "failed", "interrupted", "stopped", "blocked"),
    *("cancelled", "queued", "waiting", "done"),
)
"""States in the order in which people ask for them."""

Cell = dict[str, Any]
"""`text`; or `time`, seconds since 1970, which the reader's own clock says; or `state`; with a `note` below."""


def page_data(suite: Suite, view: SuiteView) -> dict[str, Any]:
    """All of it, as JSON has it. Texts are texts: nothing in here is markup."""
    return {
        **plain_view(view),
        "states": [{"state": state, "jobs": n} for state in TOLD if (n := _count(view.jobs, state))],
        "tiles": _tiles(view),
        "rows": [_row(job, view.now) for job in view.jobs],
        "gpus": _gpus(view.jobs),
        "graph": as_lists(graph_picture(suite.graph, suite.order(), {job.name: _node(job) for job in view.jobs})),
        "time": _time(view),
        "charts": _charts(view.jobs),
        "legend": [{"job": job.name, "colour": i % 8} for i, job in enumerate(_curved(view.jobs))],
    }


def _count(jobs: Sequence[JobView], state: str) -> int:
    return sum(job.state.state == state for job in jobs)


def _tiles(view: SuiteView) -> list[Cell]:
    done, running = _count(view.jobs, "done"), _count(view.jobs, "running")
    ended = done == len(view.jobs)
    tiles: list[Cell] = [{"name": "Jobs done", "text": f"{done} of {len(view.jobs)}", "note": f"{running} running"}]
    others = "" if view.rest is None else f"; the others end in {seconds(max(0.0, view.rest - view.now))}"
    when: Cell = {"text": "not known", "note": view.unknown + others} if view.finish is None else {"time": view.finish}
    if view.finish is not None and not ended:
        about = max((view.latest or 0.0) - view.finish, view.finish - (view.earliest or view.finish))
        more = f" ± {seconds(about)}" if about >= 1 else ""
        when["note"] = f"in {seconds(max(0.0, view.finish - view.now))}{more}"
    tiles.append({"name": "Finished" if ended else "Finish, as predicted", **when})
    if view.deadline is not None:
        tiles.append({"name": "Deadline", "time": view.deadline, **_against(view)})
    used = sum(job.gpu_hours for job in view.jobs)
    tiles.append({"name": "GPU hours so far", "text": f"{used:.3g}"})
    return tiles


def _against(view: SuiteView) -> Cell:
    """The finish against the deadline."""
    assert view.deadline is not None
    if view.finish is None:
        late = view.now > view.deadline
        said = "past" if late else f"in {seconds(view.deadline - view.now)}"
        return {"note": said, "mood": "bad" if late else ""}
    spare = view.deadline - view.finish
    if spare >= 0:
        return {"note": f"holds, {seconds(spare)} to spare", "mood": "good"}
    return {"note": f"missed by {seconds(-spare)}", "mood": "bad"}


def _progress(job: JobView) -> str:
    if job.step is None:
        return "–"
    return f"{job.step:,} of {job.total:,}" if job.total is not None else f"{job.step:,}"


def _share(job: JobView) -> float | None:
    if job.step is None or not job.total:
        return None
    return min(1.0, job.step / job.total)


def _row(job: JobView, now: float) -> dict[str, Any]:
    state = job.state
    ended: Cell = {"text": "–"}
    if state.state == "done" and state.ended is not None:
        ended = {"time": state.ended}
    elif job.finish is not None:
        ended = {"time": max(now, job.finish), "note": "as predicted"}
    attempts = f"attempt {state.attempt}" if state.attempt > 1 else ""
    batch = f"SLURM {state.slurm}" if state.slurm and state.state in ("queued", "running") else ""
    short = state.state in ("blocked", "waiting", "queued")
    cells: list[Cell] = [
        {"state": state.state, "note": ", ".join(filter(None, [state.why if short else attempts, batch]))},
        {"text": _progress(job), "share": _share(job), "note": f"{job.unit}s" if job.step is not None else ""},
        {"text": "–" if job.loss is None else f"{job.loss:.4f}" if abs(job.loss) < 1e4 else number(job.loss)},
        {"text": "–" if job.rate is None else number(job.rate)},
        {"text": "–" if job.gpu is None else percent(job.gpu / 100)},
        {"text": "–" if job.left is None else seconds(job.left)},
        ended,
        {
            "text": seconds(job.spent) if job.spent else "–",
            "note": f"{job.gpu_hours:.2g} GPU h" if job.gpu_hours else "",
        },
    ]
    return {"job": job.name, "do": job.do, "cells": cells, "why": "" if short else state.why, "last": job.last}


def _node(job: JobView) -> Node:
    share, state = _share(job), job.state
    said = f"{job.do} · {state.state}"
    if state.state == "running" and share is not None:
        said += f" · {percent(round(share, 2))}"
    return Node(
        state.state, said, ". ".join(filter(None, [said, state.why, job.last if state.state == "running" else ""]))
    )


def _gpus(jobs: Sequence[JobView]) -> list[dict[str, Any]]:
    """The GPUs that jobs have now."""
    rows = []
    for job in jobs:
        if job.state.state == "running":
            rows += [
                {"host": job.state.host or "", "gpu": gpu, "job": job.name, "use": job.gpu} for gpu in job.state.gpus
            ]
    return sorted(rows, key=lambda row: (row["host"], row["gpu"]))


def _time(view: SuiteView) -> list[Any] | None:
    if view.began is None:
        return None
    spans = []
    for job in view.jobs:
        state, begin = job.state, job.state.started
        if job.begins is not None and job.finish is not None:
            said = f"{state.state}, will take {seconds(job.finish - job.begins)}"
            spans.append(Span(job.name, state.state, job.begins, job.begins, job.finish, said))
        elif begin is not None:
            end = view.now if state.state == "running" else state.ended or begin
            said = f"{state.state}, {seconds(max(0.0, end - begin))}"
            spans.append(Span(job.name, state.state, begin, end, job.finish, said))
    spans.sort(key=lambda span: span.start)
    return as_lists(time_picture(spans, view.began, view.now, view.deadline, WIDE))


def _curved(jobs: Sequence[JobView]) -> list[JobView]:
    return [job for job in jobs if job.losses or job.validation or job.use]


def _charts(jobs: Sequence[JobView]) -> list[dict[str, Any]]:
    """All jobs on one chart each."""
    curved = _curved(jobs)
    kinds: list[tuple[str, str, Callable[[JobView], list[Point]], dict[str, Any]]] = [
        ("Training loss", "loss", lambda job: job.losses, {}),
        ("Validation loss", "loss", lambda job: job.validation, {}),
        ("GPU use", "percent", lambda job: job.use, {"zero": True}),
    ]
    charts: list[dict[str, Any]] = []
    for name, label, points, how in kinds:
        curves = [_curve(job.name, i, points(job), name) for i, job in enumerate(curved)]
        if any(curve.points for curve in curves):
            # The first one has the page's whole width, where that is wide.
            widths = (WIDTH,) if charts else (WIDTH, WIDE)
            drawn = [as_lists(line_chart(curves, "step", label, about=name, width=w, **how)) for w in widths]
            charts.append({"name": name, "drawn": drawn})
    return charts


def _curve(label: str, colour: int, points: list[Point], kind: str) -> Curve:
    if kind == "Validation loss" or len(points) < SMOOTHED:
        return Curve(label, colour, points, dots=kind == "Validation loss")
    calm = smooth([y for _, y in points], window(len(points)))
    return Curve(label, colour, [(x, y) for (x, _), y in zip(points, calm, strict=True)], raw=points)
