"""How the cost of a question grows, beside its floor: with the questions of an image, with the pixels of an image, and
with the questions of a step. Steps are those of `bench/real.py`: JPEGs, the training loop, the automatic plan.

    python bench/growth.py OUT                             one GPU, Qwen3-VL-8B's shapes, about four minutes
    python bench/growth.py OUT --chart growth.svg          draws it too
    python bench/growth.py OUT --size tiny --steps 4       tries the script on a CPU, with sides of an eighth

Weights are random. `keep_features` is off, so that an image costs in each epoch what it costs in the first. Of each
point: seconds of a question, median (least to most) over the steps after the warm-up and three more, each divided by
its questions; the floor, the mean of the same steps; how many times the floor the median is; and what the warm-up took.
Steps have 16 questions in the first two panels, but 32 where an image has as many: in 16 each image would be computed
twice, and the point would show that instead. At the end: the largest ratio, and whether it is within the limit of 2.2.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loaded import Loaded, floors, start, warmed
from mixture import LARGE
from rows import Row, data_of, model_of, recipe_of

from sameday.report.charts import HEIGHT, WIDTH, Curve, line_chart, tag, text

WARM, STEPS = 3, 20
"""Steps after the warm-up, and steps that are timed."""
PICTURES = 48
"""The most that a set has. Later epochs see them again, and decode them again."""
TEMPLATE = 45
"""Words of a question's instruction."""
MOST_PIXELS = 2**22
"""Nothing is shrunk."""
LIMIT = 2.2
"""How many times its floor a question may cost, whatever grows."""


@dataclass(frozen=True)
class Point:
    """Pixels and questions of an image, and questions of a step."""

    size: tuple[int, int] = LARGE
    questions: int = 8
    batch: int = 16

    @property
    def pictures(self) -> int:
        """As many as the steps need, up to a limit."""
        return min(PICTURES, (WARM + STEPS + 1) * self.batch // self.questions)


MEGAPIXELS = {0.25: (576, 448), 0.5: (800, 640), 1: (1120, 896), 2: (1600, 1280), 4: (2240, 1792)}
PANELS: dict[str, tuple[str, dict[float, Point]]] = {
    "questions": ("questions of an image", {n: Point(questions=n, batch=max(16, n)) for n in (2, 4, 8, 16, 32)}),
    "pixels": ("megapixels of an image", {each: Point(size) for each, size in MEGAPIXELS.items()}),
    "batch": ("questions of a step", {n: Point(batch=n) for n in (16, 32, 64, 128)}),
}
"""What grows, and its points."""


def timed(out: Path, point: Point, args: argparse.Namespace, loaded: Loaded) -> dict[str, float]:
    """Seconds of a question."""
    tiny, (wide, high) = args.size == "tiny", point.size
    row = Row("by_image", ((point.size, point.questions),) * point.pictures, TEMPLATE)
    data = data_of(out, f"growth {wide}×{high} {point.questions} of {point.pictures}", row, tiny)
    fields = recipe_of(out, data, row, tiny) | {"max_pixels": MOST_PIXELS, "effective_batch": point.batch}
    del fields["data"]["val"]  # for which more would be compiled
    # An image is in it as it comes the first time.
    with closing(start(out, fields, ["keep_features=false", *args.plan], tiny)) as session:
        task = loaded.task(session)
        with closing(session.steps(task)) as steps:
            before = warmed(session, task, steps)
            done = list(steps.run(range(WARM + args.steps)))[WARM:]
        least = floors(session, task, range(WARM, WARM + args.steps), loaded.peaks(session))
    assert {good.samples for good in done} == {point.batch}, "all steps are alike"
    seconds = [good.seconds / point.batch for good in done]
    usual, floor = statistics.median(seconds), statistics.fmean(least) / point.batch
    return {
        "median": usual,
        "least": min(seconds),
        "most": max(seconds),
        "floor": floor,
        "ratio": usual / floor,
        "warm_up": before,
    }


def words(at: float, point: Point, one: Mapping[str, float]) -> str:
    wide, high = point.size
    what = f"{point.batch} on {point.batch // point.questions} of {wide}×{high}"
    spread = f"({one['least']:.4f}-{one['most']:.4f})"
    return (
        f"{at:8g}  {what:24s} {one['median']:10.4f} {spread:>17s} {one['floor']:8.4f} {one['ratio']:6.2f} "
        f"{one['warm_up']:10.1f}"
    )


def largest(results: Iterable[Mapping[str, Any]]) -> str:
    """Ratio to the floor, and whether all of them are within the limit."""
    most = max(results, key=lambda each: each["ratio"])
    within = "within" if most["ratio"] <= LIMIT else "NOT within"
    at = f"{most['at']:g} {PANELS[most['panel']][0]}"
    return f"largest: {most['ratio']:.2f} times the floor, at {at}: {within} the limit of {LIMIT:g}"


STYLE = """
text { font: 13.5px system-ui, sans-serif; fill: #5d6570; } .name { fill: #1d2126; }
.end { text-anchor: end; } .centre { text-anchor: middle; } .start { text-anchor: start; }
.middle { dominant-baseline: central; } .grid { stroke: #ece9e2; } .axis { stroke: #b5b0a5; }
.line { fill: none; stroke-width: 2.2; } path.c0 { stroke: #1f6fb5; } path.c1 { stroke: #d9622b; }
circle.c0, rect.c0 { fill: #1f6fb5; } circle.c1, rect.c1 { fill: #d9622b; }
"""
CURVES = {"median": "measured", "floor": "floor"}
GAP = 24


def chart(results: Sequence[Mapping[str, Any]]) -> str:
    """A panel for each thing that grows: seconds of a question, and their floor."""
    panels = [name for name in PANELS if any(each["panel"] == name for each in results)]
    whole, top = len(panels) * (WIDTH + GAP) + GAP, 36
    inner = tag("style", STYLE) + tag("rect", width=whole, height=HEIGHT + top + GAP, fill="#ffffff")
    for number, label in enumerate(CURVES.values()):
        inner += tag("rect", x=GAP + 110 * number, y=14, width=12, height=12, class_=f"c{number}")
        inner += text(label, x=GAP + 110 * number + 18, y=25, class_="start")
    for number, name in enumerate(panels):
        points = sorted((each for each in results if each["panel"] == name), key=lambda each: each["at"])
        curves = [
            Curve(label, colour, [(each["at"], each[key]) for each in points], dots=True)
            for colour, (key, label) in enumerate(CURVES.items())
        ]
        drawn = line_chart(curves, PANELS[name][0], "seconds of a question", zero=True)
        inner += tag("svg", drawn, x=GAP + number * (WIDTH + GAP), y=top, width=WIDTH, height=HEIGHT)
    return tag("svg", inner, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {whole} {HEIGHT + top + GAP}") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=("8b", "tiny"), default="8b")
    parser.add_argument("--only", nargs="+", choices=tuple(PANELS), default=tuple(PANELS))
    parser.add_argument("--steps", type=int, default=STEPS, help="that are timed")
    parser.add_argument("--plan", action="append", default=[], help="FIELD=VALUE, instead of the automatic one")
    parser.add_argument("--chart", type=Path, help="an SVG file to draw into")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    model_of(out, args.size == "tiny")
    loaded, known, results = Loaded(), dict[Point, dict[str, float]](), list[dict[str, Any]]()
    for panel in args.only:
        what, points = PANELS[panel]
        print(f"{what:34s} {'s/question':>10s} {'(least-most)':>17s} {'floor':>8s} {'ratio':>6s} {'warm-up s':>10s}")
        for at, point in points.items():
            if point not in known:  # panels share one
                known[point] = timed(out, point, args, loaded)
            results.append({"panel": panel, "at": at, **known[point]})
            print(words(at, point, known[point]), flush=True)
    print(f"{largest(results)}; {loaded.peak_words()}")
    if args.json is not None:
        args.json.write_text(json.dumps(results) + "\n")
    if args.chart is not None:
        args.chart.write_text(chart(results), encoding="utf-8")


if __name__ == "__main__":
    main()
