"""Ticks are round, scales keep order, thinning keeps spikes, and no text becomes markup."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sameday.report import charts
from sameday.report.charts import Bar, Curve, Piece, bar_chart, line_chart
from sameday.spec.words import number

finite = st.floats(-1e12, 1e12, allow_nan=False)
ranges = st.tuples(finite, finite).filter(lambda r: r[1] - r[0] > 1e-6 * max(1e-6, abs(r[0]), abs(r[1])))
above_zero = st.floats(1e-9, 1e9)
# What XML 1.0 cannot hold is no question of escaping.
words = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff"), max_size=40)


@given(ranges, st.integers(2, 12))
def test_ticks_are_few_round_even_and_inside(limits: tuple[float, float], most: int) -> None:
    low, high = limits
    found = charts.ticks(low, high, most)
    slack = 1e-6 * (high - low)
    assert len(found) <= most
    assert all(low - slack <= tick <= high + slack for tick in found)
    assert found == sorted(set(found))
    gaps = [b - a for a, b in itertools.pairwise(found)]
    for gap in gaps:
        assert math.isclose(gap, gaps[0], rel_tol=1e-6)
        digit = float(f"{gap:.6e}".split("e")[0])
        assert min(abs(digit - round_one) for round_one in (1, 2, 5, 10)) < 1e-4
    # Whatever the range, there is something to read off.
    assert len(found) >= (2 if most >= 5 else 0)


@given(above_zero, st.floats(10, 1e12), st.integers(2, 10))
def test_ticks_of_a_logarithmic_axis(low: float, factor: float, most: int) -> None:
    found = charts.log_ticks(low, low * factor, most)
    assert 1 <= len(found) <= most
    assert all(low <= tick <= low * factor for tick in found)
    assert all(re.fullmatch(r"[1235]\.0+", f"{tick:.5e}".split("e")[0]) for tick in found)


def test_ticks_as_people_write_them() -> None:
    assert charts.ticks(0, 300, 6) == [0, 50, 100, 150, 200, 250, 300][::2]
    assert charts.ticks(0.21, 0.33, 5) == [0.25, 0.3]
    assert charts.ticks(-0.1, 0.1, 5) == [-0.1, -0.05, 0.0, 0.05, 0.1]
    assert charts.ticks(0, 3e-3, 5) == [0, 0.001, 0.002, 0.003]
    assert charts.log_ticks(0.15, 7, 6) == [0.2, 0.5, 1, 2, 5]
    assert charts.ticks(2, 2) == [2] and charts.ticks(math.nan, 1) == []


@given(ranges, st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_a_scale_keeps_order_and_ends(limits: tuple[float, float], shares: list[float]) -> None:
    low, high = limits
    placed = [charts.scale(low + share * (high - low), low, high, 100, 0) for share in sorted(shares)]
    assert all(a >= b - 1e-6 for a, b in itertools.pairwise(placed))
    assert charts.scale(low, low, high, 100, 0) == 100
    assert math.isclose(charts.scale(high, low, high, 100, 0), 0, abs_tol=1e-6)


@given(st.lists(finite, max_size=30), st.booleans())
def test_limits_hold_every_value_and_are_never_equal(values: list[float], zero: bool) -> None:
    low, high = charts.limits(values, zero)
    assert low < high and all(low <= value <= high for value in values)
    assert not (zero and values) or low <= 0 <= high


@given(st.lists(finite, min_size=1, max_size=60), st.integers(1, 40))
def test_smoothing_stays_among_the_values(values: list[float], window: int) -> None:
    found = charts.smooth(values, window)
    slack = 1e-6 * max(1.0, max(map(abs, values)))
    assert len(found) == len(values)
    assert all(min(values) - slack <= value <= max(values) + slack for value in found)
    assert math.isclose(found[0], values[0], abs_tol=slack) and math.isclose(found[-1], values[-1], abs_tol=slack)


@given(st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=60), st.integers(1, 40), st.data())
def test_a_spike_is_smoothed_where_it_is_and_nowhere_else(
    values: list[float], window: int, data: st.DataObject
) -> None:
    at, spike = data.draw(st.integers(0, len(values) - 1)), data.draw(st.sampled_from([1e16, 1e38, 1e100]))
    values[at] = spike
    for i, found in enumerate(charts.smooth(values, window)):
        reach = min(window // 2, i, len(values) - 1 - i)
        around = values[i - reach : i + reach + 1]
        assert math.isclose(found, math.fsum(around) / len(around), rel_tol=1e-12)


def test_a_spike_leaves_a_chart() -> None:
    raw = [(i, 1e16 if i == 20 else 2.0) for i in range(200)]
    calm = charts.smooth([y for _, y in raw], 10)
    svg = line_chart([Curve("a", 0, [(x, y) for (x, _), y in zip(raw, calm, strict=True)], raw=raw)], "step", "loss")
    assert "log scale" in svg and calm[100] == 2.0
    low, high = charts.frame([0.5, 2.0], [0.0, -1.0], log=True)
    assert 0 < low < 0.5 and high > 2


def test_nothing_that_is_not_above_zero_has_a_logarithm() -> None:
    """Nor has one of a short run, which is not smoothed, beside a long one that spans decades."""
    raw = [(i, 10.0 ** (i % 3)) for i in range(90)]
    long = Curve("long", 0, [(x, 10.0) for x, _ in raw], raw=raw)
    assert "log scale" in line_chart([long], "step", "loss")
    for least in (0.0, -1.0):
        assert "log scale" not in line_chart([long, Curve("short", 1, [(1, 1.0), (2, least)])], "step", "loss")


@given(st.lists(finite, min_size=1, max_size=400), st.integers(6, 50))
def test_thinning_keeps_ends_and_spikes(values: list[float], most: int) -> None:
    points = list(enumerate(values))
    found = charts.thin(points, most)
    assert len(found) <= max(most, 1) and found == sorted(found) and set(found) <= set(points)
    assert found[0] == points[0] and found[-1] == points[-1]
    kept = [y for _, y in found]
    assert min(kept) == min(values) and max(kept) == max(values)


@given(words, words, words)
def test_text_stays_text_in_every_chart(label: str, name: str, about: str) -> None:
    curve = Curve(label, 0, [(1, 0.5), (2, 0.25)], raw=[(1, 0.6), (2, 0.1)], dots=True)
    bar = Bar(label, label, [Piece("wait", 0.5, label)], 0.2, about)
    for svg in (line_chart([curve], name, name, about=about), bar_chart([bar], name, about)):
        tree = ElementTree.fromstring(svg)
        assert {element.tag for element in tree.iter()} <= {"svg", "title", "text", "line", "path", "circle", "rect"}
        texts = [element.text or "" for element in tree.iter("text")]
        assert name in texts
        assert any(label in (element.text or "") for element in tree.iter("title"))


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 10**6), st.floats(-1e6, 1e6)), max_size=30), max_size=3), st.booleans()
)
def test_any_numbers_give_a_chart_inside_its_frame(lines: list[list[tuple[int, float]]], zero: bool) -> None:
    curves = [Curve(f"run {i}", i, sorted(points), dots=True) for i, points in enumerate(lines)]
    tree = ElementTree.fromstring(line_chart(curves, "step", "loss", zero=zero))
    for circle in tree.iter("circle"):
        assert charts.LEFT - 1 <= float(circle.attrib["cx"]) <= charts.WIDTH - charts.RIGHT + 1
        assert charts.TOP - 1 <= float(circle.attrib["cy"]) <= charts.HEIGHT - charts.BOTTOM + 1


def test_marks_say_their_numbers() -> None:
    svg = line_chart([Curve("fast", 2, [(50, 0.5), (100, 0.674)], dots=True)], "step", "exact match", share=True)
    assert "<title>fast: 67.4% at step 100</title>" in svg and "60%" in svg


def test_a_curve_over_decades_has_a_logarithmic_axis() -> None:
    assert "loss, log scale" in line_chart([Curve("a", 0, [(1, 6.0), (2, 0.2)])], "step", "loss")
    assert "log scale" not in line_chart([Curve("a", 0, [(1, 6.0), (2, 2.0)])], "step", "loss")
    assert "log scale" not in line_chart([Curve("a", 0, [(1, 6.0), (2, 0.0)])], "step", "loss")


def test_one_spike_does_not_flatten_a_curve() -> None:
    values = [1.0 + 0.001 * i for i in range(1000)]
    values[500] = 1e6
    low, high = charts.frame(values, [1.5])
    assert low < 1.01 and 1.98 < high < 3


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (12345.6, "12,346"),
        (5e-5, "5e-5"),
        (3.0, "3"),
        (math.inf, "not finite"),
        (0.1 + 0.2, "0.3"),
    ],
)
def test_numbers_for_people(value: float, said: str) -> None:
    assert number(value) == said


def test_bars_share_one_scale() -> None:
    bars = [
        Bar("a", "1 s", [Piece("forward", 0.5, "x"), Piece("backward", 0.5, "y")]),
        Bar("b", "0.5 s", [Piece("wait", 0.5, "z")]),
    ]
    tree = ElementTree.fromstring(bar_chart(bars, "seconds", "about"))
    wide = [float(rect.attrib["width"]) for rect in tree.iter("rect")]
    assert wide[0] == pytest.approx(wide[2], abs=0.02) and wide[0] == pytest.approx(wide[1], abs=0.02)
