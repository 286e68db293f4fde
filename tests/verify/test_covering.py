"""Every pair of values that can stand in an allowed row does so in a returned one, and the rows are few."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from covering import TRIES, pairwise, uncovered
from hypothesis import given
from hypothesis import strategies as st

Forbidden = tuple[tuple[str, int], tuple[str, int]]

PLAN_SIZES = (2, 2, 3, 2, 3, 2, 2, 4, 2, 3, 3, 2, 3, 2, 2, 2, 3, 3, 2, 3)
"""Twenty fields, about as many values in each as a plan offers."""


def table(sizes: Sequence[int]) -> dict[str, list[int]]:
    return {f"field{i}": list(range(size)) for i, size in enumerate(sizes)}


def unless(forbidden: Sequence[Forbidden]) -> Callable[[dict[str, Any]], bool]:
    return lambda row: not any(row[a] == i and row[b] == j for (a, i), (b, j) in forbidden)


@st.composite
def constrained(draw: st.DrawFn, sizes: st.SearchStrategy[list[int]]) -> tuple[dict[str, list[int]], list[Forbidden]]:
    """Choices, and pairs of values that exclude each other."""
    choices = table(draw(sizes))
    cells = [(name, value) for name, values in choices.items() for value in values]
    pairs = [(a, b) for a, b in combinations(cells, 2) if a[0] != b[0]]
    return choices, draw(st.lists(st.sampled_from(pairs), max_size=12)) if pairs else []


sizes = st.lists(st.integers(1, 4), min_size=2, max_size=8)
small = st.lists(st.integers(1, 4), min_size=1, max_size=5).filter(lambda s: math.prod(s) // min(s) <= TRIES)
"""So small that no value and no pair is given up that is possible."""


@given(sizes=sizes)
def test_every_pair_in_few_rows(sizes: list[int]) -> None:
    choices = table(sizes)
    rows = pairwise(choices)
    assert uncovered(rows, choices) == []
    assert all(list(row) == list(choices) and all(row[name] in choices[name] for name in choices) for row in rows)
    *_, second, largest = sorted(sizes)
    # Two fields show one pair in each row, so fewer cannot do. Most was seen for four binary fields: 6 rows, not 4.
    assert second * largest <= len(rows) <= 2 * second * largest


@given(case=constrained(small))
def test_what_an_allowed_row_can_hold_is_held(case: tuple[dict[str, list[int]], list[Forbidden]]) -> None:
    choices, forbidden = case
    allowed = unless(forbidden)
    every = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    possible = [row for row in every if allowed(row)]
    rows = pairwise(choices, allowed)
    assert all(allowed(row) for row in rows)
    assert uncovered(rows, choices) == uncovered(possible, choices)
    assert len(rows) <= len(possible)


@given(case=constrained(sizes))
def test_rows_are_allowed_and_the_same_each_time(case: tuple[dict[str, list[int]], list[Forbidden]]) -> None:
    choices, forbidden = case
    before = {name: list(values) for name, values in choices.items()}
    rows = pairwise(choices, unless(forbidden))
    assert all(map(unless(forbidden), rows))
    assert pairwise(choices, unless(forbidden)) == rows
    assert choices == before


@given(case=constrained(sizes))
def test_a_value_but_the_first_is_where_a_pair_needs_it(case: tuple[dict[str, list[int]], list[Forbidden]]) -> None:
    choices, forbidden = case
    rows = pairwise(choices, unless(forbidden))
    missing = uncovered(rows, choices)
    for i, row in enumerate(rows):
        for name in (name for name, value in row.items() if value and unless(forbidden)({**row, name: 0})):
            assert uncovered([*rows[:i], {**row, name: 0}, *rows[i + 1 :]], choices) != missing


@given(sizes=small, data=st.data())
def test_one_allowed_row_is_found_wherever_it_is(sizes: list[int], data: st.DataObject) -> None:
    choices = table(sizes)
    only = {name: data.draw(st.sampled_from(values)) for name, values in choices.items()}
    assert pairwise(choices, lambda row: row == only) == [only]


@given(sizes=sizes, data=st.data())
def test_uncovered_is_what_stands_in_no_row(sizes: list[int], data: st.DataObject) -> None:
    choices = table(sizes)
    one = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in choices.items()})
    rows = data.draw(st.lists(one, max_size=8))
    assert uncovered(rows, choices) == sorted(
        ((a, i), (b, j))
        for a, b in combinations(choices, 2)
        for i, j in product(choices[a], choices[b])
        if not any(row[a] == i and row[b] == j for row in rows)
    )


def test_the_fields_of_a_plan_take_twenty_rows_and_two_seconds() -> None:
    """Counted in calls, so that it is the same on every machine: 10,000 take two seconds at 0.2 ms each."""
    choices = table(PLAN_SIZES)
    forbidden = [(("field0", 1), ("field7", i)) for i in (1, 2)]
    forbidden += [(("field1", 1), ("field9", i)) for i in (1, 2)]
    forbidden += [((f"field{i}", 0), ("field7", 3)) for i in (2, 3, 4)]
    for exclude in ([], forbidden):
        calls = 0

        def allowed(row: dict[str, Any], exclude: list[Forbidden] = exclude) -> bool:
            nonlocal calls
            calls += 1
            return unless(exclude)(row)

        rows = pairwise(choices, allowed)
        assert calls <= 10_000
        assert len(rows) <= 20
        assert sorted(uncovered(rows, choices)) == sorted(exclude)


def test_a_row_is_asked_about_once() -> None:
    asked: list[dict[str, int]] = []

    def allowed(row: dict[str, Any]) -> bool:
        asked.append(row)
        return row["field0"] != row["field1"]

    pairwise(table([3, 3, 2, 2]), allowed)
    assert all(a != b for a, b in combinations(asked, 2))


def test_values_may_be_unhashable_and_equal_ones_of_two_types_are_told_apart() -> None:
    choices: dict[str, list[Any]] = {
        "environment": [{}, {"OMP_NUM_THREADS": "1"}],
        "sizes": [[1, 2], [3], []],
        "steps": [1, True, None],
    }
    rows = pairwise(choices, lambda row: bool(row["environment"]) or row["sizes"] != [3])
    assert uncovered(rows, choices) == [(("environment", {}), ("sizes", [3]))]
    ones = [row for row in rows if row["steps"] is not True]
    assert {name for pair in uncovered(ones, choices) for name, value in pair if value is True} == {"steps"}


def test_one_field_shows_each_allowed_value() -> None:
    assert sorted(row["size"] for row in pairwise({"size": [1, 2, 3, 4]})) == [1, 2, 3, 4]
    assert pairwise({"size": [1, 2, 3]}, lambda row: row["size"] == 2) == [{"size": 2}]


def test_nothing_to_choose_and_nothing_allowed_give_no_rows() -> None:
    assert pairwise({}) == []
    assert uncovered([], {}) == []
    choices = table([2, 3])
    assert pairwise(choices, lambda row: False) == []
    assert len(uncovered([], choices)) == 6


def test_a_field_without_values_is_named() -> None:
    with pytest.raises(ValueError, match=r"choices\['attention'\] is empty: a row needs a value for every field"):
        pairwise({"packing": [False, True], "attention": []})
