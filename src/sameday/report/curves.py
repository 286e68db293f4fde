"""Which curves a report draws of its runs, and where a loss left its curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sameday.report.charts import (
    WIDE,
    WIDTH,
    Bar,
    Curve,
    Piece,
    Point,
    bar_chart,
    frame,
    line_chart,
    smooth,
    spans_decades,
)
from sameday.report.gather import Record, Run, amount_of, number_of
from sameday.report.words import PHASES, is_share, percent, plain_name, score, seconds
from sameday.spec.words import first_names, number


@dataclass(frozen=True)
class Chart:
    title: str
    svg: str
    note: str = ""
    wide: str = ""
    """The same for a wide page."""


def points_of(records: Sequence[Record], key: str) -> list[Point]:
    """A record whose value is not a number, or was not finite, is passed over."""
    return [(record["step"], value) for record in records if (value := number_of(record, key)) is not None]


SMOOTHED = 60
"""Steps from which on a curve is smoothed."""


def window(count: int) -> int:
    """How many steps a smoothed value stands for."""
    return max(1, count // 20)


def training_curves(runs: Sequence[Run]) -> list[Chart]:
    charts = [_loss(runs)] if any(points_of(run.steps, "loss") for run in runs) else []
    charts += _validation(runs)
    rates = [Curve(run.label, i, points_of(run.steps, "lr")) for i, run in enumerate(runs)]
    if any(curve.points for curve in rates):
        charts.append(Chart("Learning rate", line_chart(rates, "step", "learning rate", zero=True)))
    norms = [_smoothed(run, i, "grad_norm") for i, run in enumerate(runs)]
    if any(curve.points for curve in norms):
        chart = line_chart(norms, "step", "norm", about="Norm of the gradient, step by step")
        charts.append(Chart("Norm of the gradient", chart, _beyond(norms, _clipping(runs))))
    return charts


def _clipping(runs: Sequence[Run]) -> str:
    clipped = [run.label for run in runs if run.recipe.max_grad_norm is not None]
    if not clipped:
        return ""
    return "before clipping" if len(clipped) == len(runs) else f"of {' and '.join(clipped)} before clipping"


def _smoothed(run: Run, colour: int, key: str) -> Curve:
    raw = points_of(run.steps, key)
    wide = window(len(raw))
    if len(raw) < SMOOTHED:
        return Curve(run.label, colour, raw)
    calm = smooth([y for _, y in raw], wide)
    return Curve(run.label, colour, [(x, y) for (x, _), y in zip(raw, calm, strict=True)], raw=raw)


def _loss(runs: Sequence[Run]) -> Chart:
    curves = [_smoothed(run, i, "loss") for i, run in enumerate(runs)]
    wide = sorted({window(len(curve.raw)) for curve in curves if curve.raw})
    how = f"faint: each step; bold: the mean of {' or '.join(map(str, wide))} steps" if wide else "each step"
    if wide and not all(curve.raw for curve in curves if curve.points):
        how += f"; of runs shorter than {SMOOTHED} steps each step"
    about = "Training loss, step by step"
    svg, wide_svg = (line_chart(curves, "step", "loss", about=about, width=width) for width in (WIDTH, WIDE))
    return Chart("Training loss", svg, _beyond(curves, how), wide_svg)


def _beyond(curves: Sequence[Curve], note: str) -> str:
    """What a spike outside the frame was, so that nothing is hidden."""
    raw = [point for curve in curves for point in curve.raw]
    if not raw:
        return note
    kept = [y for curve in curves for _, y in curve.points]
    values = [y for _, y in raw]
    low, high = frame(values, kept, spans_decades([*values, *kept]))
    out = [point for point in raw if not low <= point[1] <= high]
    if not out:
        return note
    far = max(out, key=lambda point: abs(point[1] - (low + high) / 2))
    count = f"{len(out)} steps lie" if len(out) > 1 else "one step lies"
    said = f"{count} outside the frame, the furthest {number(far[1])} at step {number(far[0])}"
    return f"{note}; {said}" if note else said


def _validation(runs: Sequence[Run]) -> list[Chart]:
    names: dict[tuple[str, str], None] = {}
    for run in runs:
        for record in run.evaluations:
            for key in record:
                if key not in ("step", "split", "samples") and number_of(record, key) is not None:
                    names[record["split"], key] = None
    charts = []
    for split, key in names:
        curves = [
            Curve(run.label, i, points_of([r for r in run.evaluations if r["split"] == split], key), dots=True)
            for i, run in enumerate(runs)
        ]
        if all(len(curve.points) < 2 for curve in curves):
            continue  # one number is said, not drawn
        word = "Validation" if split == "val" else split.capitalize()
        about = f"{word} {plain_name(key)}"
        svg = line_chart(curves, "step", plain_name(key), about=about, share=is_share(key))
        last = [f"{c.label + ': ' if len(runs) > 1 else ''}{_said(key, c.points[-1][1])}" for c in curves if c.points]
        charts.append(Chart(about, svg, "at the end " + ", ".join(last)))
    return charts


def validated_once(runs: Sequence[Run]) -> list[str]:
    """A sentence for each run whose validation is a point, not a curve, or was never recorded."""
    said = []
    for run in runs:
        if not run.evaluations and run.steps:
            said.append(f"{run.label} was not validated.")
        for record in run.evaluations if len(run.evaluations) == 1 else ():
            scores = [
                (k, v) for k in record if k not in ("step", "samples") and (v := number_of(record, k)) is not None
            ]
            listed = ", ".join(f"{plain_name(key)} {_said(key, value)}" for key, value in scores)
            said.append(f"{run.label} was validated once, at step {record['step']:,}: {listed}.")
    return said


def _said(key: str, value: float) -> str:
    return percent(value) if is_share(key) else number(value)


def timeline_charts(runs: Sequence[Run]) -> tuple[str, str]:
    """A bar for each run whose phases are known, all on one scale, the floor a line across it; for a narrow page and
    for a wide one."""
    bars = []
    for run in runs:
        timeline = run.timeline
        if timeline is None:
            continue
        pieces = [
            Piece(_kind(name), value, f"{PHASES.get(name, name)}: {seconds(value)}, {percent(value / timeline.total)}")
            for name, value in timeline.phases.items()
            if value > 0
        ]
        floor = run.floor
        said = f"floor: {seconds(floor)}" if floor is not None else ""
        bars.append(Bar(run.label, seconds(timeline.total), pieces, floor, said))
    if not bars:
        return "", ""
    narrow, wide = (bar_chart(bars, "seconds", "Where a step's time goes", width) for width in (WIDTH, WIDE))
    return narrow, wide


def _kind(name: str) -> str:
    """The colour's name; phases that are not known share one."""
    return name if name in PHASES else "other"


def floor_chart(run: Run) -> str:
    """The step, the floor, and what each resource alone would need, on one scale."""
    assert run.profile is not None and run.profile.floor is not None
    floor, bars = run.profile.floor, []
    spread = run.profile.seconds
    took, which = (spread.median, "median") if spread.mean is None else (spread.mean, "mean")
    bars.append(Bar(f"this step, {which}", seconds(took), [Piece("step", took, f"this step: {seconds(took)}")]))
    one = floor.one_at_a_time.seconds if floor.one_at_a_time is not None else None
    if one is not None:
        what = f"floor with one {run.recipe.sample} at a time"
        bars.append(Bar(what, seconds(one), [Piece("resource", one, f"{what}: {seconds(one)}")]))
    what, least = f"floor: {floor.bound}" if floor.bound else "floor", floor.seconds
    bars.append(Bar(what, seconds(least), [Piece("floor", least, f"{what}, {seconds(least)}")]))
    for name, value in floor.resources.items():
        if value and name != floor.bound:
            bars.append(Bar(f"{name} alone", seconds(value), [Piece("resource", value, f"{name}: {seconds(value)}")]))
    return bar_chart(bars, "seconds", "The step beside its floor")


def spikes(run: Run) -> list[tuple[str, str, str, str]]:
    """Steps whose loss was far above those before them: the step, its loss, the usual one, its samples."""
    rows = []
    for record in run.steps:
        spike, loss = record.get("spike"), amount_of(record, "loss")
        if isinstance(spike, dict) and loss is not None:
            usual, samples = amount_of(spike, "usual"), spike.get("samples")
            names = first_names([str(name) for name in samples]) if isinstance(samples, list) else ""
            rows.append((f"{record['step']:,}", score("loss", loss), score("loss", usual), names))
    return rows
