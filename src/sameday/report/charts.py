"""Numbers become SVG. Pure: the same numbers give the same text, colours come from the page's style, and every text is
escaped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from itertools import accumulate

from sameday.spec.words import number

Point = tuple[float, float]
Say = Callable[[float], str]

WIDTH, WIDE, HEIGHT = 560, 1090, 300
LEFT, RIGHT, TOP, BOTTOM = 66, 12, 34, 54
MOST_POINTS = 480
HOVERED = 60


# Arithmetic


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) between low and high: at most `most` of them."""
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        return [low] if math.isfinite(low) else []
    step = _round_step((high - low) / most)
    while True:
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            return [_clean(i * step, step) for i in range(first, last + 1)]
        step = _round_step(step * 1.5)


def _round_step(least: float) -> float:
    """The smallest round step that is not smaller. Steps are written in decimals so that 0.1 is 0.1."""
    exponent = math.floor(math.log10(max(least, 5e-300)))
    for factor in (1, 2, 5, 10):
        step = float(f"{factor}e{exponent}")
        if step >= least * (1 - 1e-9):
            return step
    return float(f"1e{exponent + 2}")


def _clean(value: float, step: float) -> float:
    return round(value, max(0, 1 - math.floor(math.log10(step)))) + 0.0


def limits(values: Iterable[float], zero: bool = False) -> tuple[float, float]:
    """Least and most with some air, never equal. `zero` keeps the axis on the ground."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    # Numbers that differ by their rounding only are one number to a chart.
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        air = 0.1 * abs(high) or 1.0
        return low - (0.0 if zero and low >= 0 else air), high + air
    air = 0.06 * (high - low)
    return (low if zero and low == 0 else low - air), (high if zero and high == 0 else high + air)


def scale(value: float, low: float, high: float, start: float, end: float) -> float:
    """Where a value of [low, high] stands between start and end."""
    return start + (value - low) / (high - low) * (end - start)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value's neighbours, as many on either side: no lag, and at the ends nothing made up."""
    # Exact: in floats one huge value would swallow all that are summed after it.
    sums = [*accumulate(map(Fraction, values), initial=Fraction(0))]
    means = []
    for i in range(len(values)):
        reach = min(window // 2, i, len(values) - 1 - i)
        means.append(float((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1)))
    return means


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` points: both ends, and the lowest and highest of each piece, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    pieces = max(1, most // 2 - 1)
    inner, kept = points[1:-1], [points[0]]
    for k in range(pieces):
        piece = inner[k * len(inner) // pieces : (k + 1) * len(inner) // pieces]
        if piece:
            ends = {min(piece, key=lambda p: p[1]), max(piece, key=lambda p: p[1])}
            kept += sorted(ends)
    return [*kept, points[-1]]


def frame(values: Sequence[float], kept: Sequence[float], log: bool = False) -> tuple[float, float]:
    """Limits for a curve: of all values where they are few; of 99 in 100 and of what must be seen where they are many,
    for one spike would flatten the rest."""
    finite = sorted(value for value in values if math.isfinite(value))
    if len(finite) > 100:
        cut = len(finite) // 200
        finite = finite[cut : len(finite) - cut]
    if not log:
        return limits([*finite, *kept])
    low, high = limits([math.log10(value) for value in (*finite, *kept) if value > 0])
    return 10**low, 10**high


def spans_decades(values: Sequence[float]) -> bool:
    """Whether a logarithmic axis shows more: all above zero, the most at least ten times the least."""
    return bool(values) and min(values) > 1e-12 and max(values) >= 10 * min(values)


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between low and high for a logarithmic axis, at most `most`: 1, 2, 5 of each power of ten, or 1
    alone, or every second, third ... power."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        numbers = [v for p in powers for f in factors if low <= (v := float(f"{f}e{p}")) <= high]
        if len(numbers) <= most:
            return numbers
    every = -(-len(numbers) // most)
    return numbers[::every]


@dataclass(frozen=True)
class Axis:
    """Values from low to high between two places of a chart."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        if not self.log:
            return scale(value, self.low, self.high, self.start, self.end)
        low, high = math.log10(self.low), math.log10(self.high)
        return scale(math.log10(max(value, self.low * 1e-3)), low, high, self.start, self.end)

    def ticks(self, most: int) -> list[float]:
        return log_ticks(self.low, self.high, most) if self.log else ticks(self.low, self.high, most)


# Text of SVG


def tag(name: str, inner: str = "", **attributes: object) -> str:
    """One element. `inner` is markup already; attributes are escaped here. `class_` is class, `x_y` is x-y."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_short(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{given}>{inner}</{name}>" if inner else f"<{name}{given}/>"


def text(content: str, **attributes: object) -> str:
    return tag("text", escape(content), **attributes)


def title(content: str) -> str:
    return tag("title", escape(content))


def _cropped(label: str, most: int = 36) -> str:
    """The ends of a long name tell it apart; its middle goes."""
    return label if len(label) <= most else f"{label[: most // 3]}…{label[-(most - most // 3 - 1) :]}"


def _short(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


# Curves


@dataclass(frozen=True)
class Curve:
    """One line of a chart. `raw` lies faintly behind it; `dots` marks each point and says its numbers."""

    label: str
    colour: int
    points: Sequence[Point]
    raw: Sequence[Point] = ()
    dots: bool = False


def line_chart(
    curves: Sequence[Curve],
    x_label: str,
    y_label: str,
    *,
    zero: bool = False,
    share: bool = False,
    about: str = "",
    width: int = WIDTH,
) -> str:
    """Curves over one pair of axes. `share` writes the values, which are shares of one, in percent."""
    shown = [curve for curve in curves if curve.points]
    across, up = _axes(shown, zero, width)
    say: Say = (lambda value: f"{number(100 * value)}%") if share else number

    def place(point: Point) -> Point:
        return across.place(point[0]), up.place(point[1])

    lines = []
    for curve in sorted(shown, key=lambda curve: -len(curve.points)):  # a short one stays visible on a long one
        colour = f"c{curve.colour % 8}"
        if curve.raw:
            lines.append(_path(map(place, thin(curve.raw)), f"raw {colour}"))
        lines.append(_path(map(place, thin(curve.points)), f"line {colour}"))
        lines += _marks(curve, place, say, x_label, colour)
    x, wide, high = LEFT - 6, width - RIGHT - LEFT + 12, HEIGHT - BOTTOM + 6
    # An SVG inside cuts off what a frame leaves out; dots at its edge stay whole.
    inner = tag("svg", "".join(lines), x=x, y=0, width=wide, height=high, viewBox=f"{x} 0 {wide} {high}")
    names = text(x_label, x=(LEFT + width - RIGHT) / 2, y=HEIGHT - 6, class_="name centre")
    names += text(f"{y_label}, log scale" if up.log else y_label, x=0, y=16, class_="name start")
    whole = title(about or y_label) + _grid(across, up, say) + names + inner
    return tag("svg", whole, viewBox=f"0 0 {width} {HEIGHT}", class_="chart", role="img")


def _axes(curves: Sequence[Curve], zero: bool, width: int) -> tuple[Axis, Axis]:
    xs = [x for curve in curves for x, _ in curve.points] or [0.0, 1.0]
    least, most = min(xs), max(xs)
    if 0 <= least <= 0.05 * most:
        least = 0.0
    across = Axis(*((least, most) if least < most else (least - 1, most + 1)), LEFT, width - RIGHT)
    main = [y for curve in curves for _, y in curve.points]
    values = [y for curve in curves for _, y in curve.raw] or main
    log = not zero and spans_decades([*values, *main])
    low, high = limits(main, True) if zero else frame(values, main, log)
    return across, Axis(low, high, HEIGHT - BOTTOM, TOP, log)


def _grid(across: Axis, up: Axis, say: Say) -> str:
    left, right, bottom = across.start, across.end, up.start
    elements = []
    for value in up.ticks(5):
        y = up.place(value)
        elements.append(tag("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
        elements.append(text(say(value), x=left - 8, y=y, class_="tick end middle"))
    for value in across.ticks(6):
        x = across.place(value)
        elements.append(tag("line", x1=x, x2=x, y1=bottom, y2=bottom + 5, class_="axis"))
        where = "end" if x > right - 16 else "centre"
        elements.append(text(number(value), x=right if where == "end" else x, y=bottom + 21, class_=f"tick {where}"))
    elements.append(tag("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis"))
    return "".join(elements)


def _path(points: Iterable[Point], class_: str) -> str:
    coordinates = [f"{x:.1f} {y:.1f}" for x, y in points]
    return tag("path", d="M" + "L".join(coordinates), class_=class_) if len(coordinates) > 1 else ""


def _marks(curve: Curve, place: Callable[[Point], Point], say: Say, x_label: str, colour: str) -> list[str]:
    """Dots with their numbers; on a long curve some that are seen only by the pointer."""
    every = 1 if curve.dots or len(curve.points) == 1 else max(1, len(curve.points) // HOVERED)
    circles = []
    for point in curve.points[::every]:
        x, y = place(point)
        said = title(f"{curve.label}: {say(point[1])} at {x_label} {number(point[0])}")
        seen = curve.dots or len(curve.points) == 1
        circles.append(tag("circle", said, cx=x, cy=y, r=4 if seen else 7, class_=f"dot {colour}" if seen else "hover"))
    return circles


# Bars


@dataclass(frozen=True)
class Piece:
    """A part of a bar; `kind` names its colour in the page's style."""

    kind: str
    value: float
    said: str


@dataclass(frozen=True)
class Bar:
    label: str
    value: str
    pieces: Sequence[Piece]
    mark: float | None = None
    mark_said: str = ""


def bar_chart(bars: Sequence[Bar], unit: str, about: str, width: int = WIDTH) -> str:
    """Bars one under another on one scale from zero, each with its name above it. A mark is a line across a bar."""
    left, right, row, thick = 2, width - 2, 58, 26
    most = max([bar.mark or 0.0 for bar in bars] + [sum(p.value for p in bar.pieces) for bar in bars], default=0.0)
    high = most * 1.02 or 1.0
    bottom = len(bars) * row
    parts = []
    for value in ticks(0.0, high, 6):
        x = scale(value, 0.0, high, left, right)
        parts.append(tag("line", x1=x, x2=x, y1=24, y2=bottom, class_="grid"))
        where = "start" if x < left + 12 else "end" if x > right - 24 else "centre"
        parts.append(text(number(value), x=x, y=bottom + 17, class_=f"tick {where}"))
    parts.append(text(unit, x=(left + right) / 2, y=bottom + 40, class_="name centre"))
    for i, bar in enumerate(bars):
        top = i * row + 26
        parts.append(text(_cropped(bar.label), x=left, y=top - 8, class_="name start"))
        parts.append(text(bar.value, x=right, y=top - 8, class_="value end"))
        at = 0.0
        for piece in bar.pieces:
            x, end = (scale(value, 0.0, high, left, right) for value in (at, at + piece.value))
            parts.append(
                tag(
                    "rect",
                    title(piece.said),
                    x=x,
                    y=top,
                    width=max(0.0, end - x),
                    height=thick,
                    class_=f"piece p-{piece.kind}",
                )
            )
            at += piece.value
        if bar.mark is not None:
            x = scale(bar.mark, 0.0, high, left, right)
            mark = tag("line", title(bar.mark_said), x1=x, x2=x, y1=top - 5, y2=top + thick + 5, class_="mark")
            parts.append(mark)
    return tag(
        "svg", title(about) + "".join(parts), viewBox=f"0 0 {width} {bottom + 48}", class_="chart bars", role="img"
    )
