"""However a step is cut into micro-batches and over ranks, each sample is in it once and the limits hold."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

from hypothesis import given
from hypothesis import strategies as st

from sameday.data.questions.partition import (
    Cut,
    Item,
    MicroBatch,
    Unit,
    micro_batches,
    size,
    units,
    whole_micro_batches,
)

KEYS: dict[Hashable, int] = {"a": 10, "b": 40, "c": 200}
"""Prefix lengths: equal keys mean equal prefixes."""


@st.composite
def steps(draw: st.DrawFn) -> list[Item]:
    items = []
    for index in range(draw(st.integers(1, 40))):
        # Sometimes a key without a prefix, or a prefix without a key: neither can be shared.
        key, prefix = draw(st.sampled_from([*2 * list(KEYS.items()), ("a", 0), (None, 15), (None, 0)]))
        items.append(Item(index, prefix + draw(st.integers(1, 60)), prefix, key))
    return items


few_images = st.lists(st.tuples(st.sampled_from(list(KEYS)), st.integers(1, 60)), min_size=1, max_size=20).map(
    lambda asked: [Item(i, KEYS[key] + branch, KEYS[key], key) for i, (key, branch) in enumerate(asked)]
)
cuts = st.builds(
    Cut,
    share=st.booleans(),
    packing=st.booleans(),
    token_budget=st.sampled_from([1, 30, 80, 250, 600, 5000]) | st.integers(1, 600),
    max_questions=st.none() | st.integers(1, 12),
)
ranks = st.integers(1, 8)


def members(batch: MicroBatch) -> list[int]:
    return [i for unit in batch for i in unit.members]


def tokens(items: list[Item], unit: Unit) -> int:
    """What a unit holds, counted afresh: the prefix once, and each branch."""
    prefix = items[unit.members[0]].prefix if len(unit.members) > 1 else 0
    return prefix + sum(items[i].length - prefix for i in unit.members)


@given(items=steps(), cut=cuts, count=ranks)
def test_each_sample_once_over_ranks_and_micro_batches(items: list[Item], cut: Cut, count: int) -> None:
    parts = micro_batches(items, cut, count)
    assert len(parts) == count
    assert all(part and all(unit.members for unit in part) for rank in parts for part in rank)
    assert sorted(i for rank in parts for part in rank for i in members(part)) == list(range(len(items)))


@given(items=steps(), cut=cuts, count=ranks)
def test_limits_hold_unless_one_question_is_alone(items: list[Item], cut: Cut, count: int) -> None:
    for rank in micro_batches(items, cut, count):
        for part in rank:
            computed = size(part, cut.packing)
            assert computed <= cut.token_budget or len(members(part)) == 1
            assert cut.max_questions is None or len(members(part)) <= cut.max_questions


@given(items=steps(), cut=cuts, count=ranks)
def test_only_equal_prefixes_stand_in_one_unit(items: list[Item], cut: Cut, count: int) -> None:
    for rank in micro_batches(items, cut, count):
        for unit in (unit for part in rank for unit in part):
            assert unit.tokens == tokens(items, unit)
            if len(unit.members) > 1:
                assert cut.share
                assert len({items[i].key for i in unit.members}) == 1
                assert all(items[i].key is not None and items[i].prefix for i in unit.members)


@given(items=steps(), cut=cuts, count=ranks)
def test_the_partition_is_pure(items: list[Item], cut: Cut, count: int) -> None:
    before = list(items)
    first = micro_batches(items, cut, count)
    assert micro_batches(list(items), cut, count) == first
    assert items == before


@given(items=steps(), cut=cuts, count=ranks)
def test_within_a_rank_units_keep_the_order_of_the_step(items: list[Item], cut: Cut, count: int) -> None:
    position = {index: i for i, unit in enumerate(units(items, cut)) for index in unit.members}
    for rank in micro_batches(items, cut, count):
        places = [position[unit.members[0]] for part in rank for unit in part]
        assert places == sorted(set(places)), "a unit that was split is whole on each rank"
        assert all(list(unit.members) == sorted(unit.members) for part in rank for unit in part)


@given(items=steps(), packing=st.booleans())
def test_with_room_all_that_can_be_shared_is(items: list[Item], packing: bool) -> None:
    found = units(items, Cut(True, packing, 10**6))
    shareable = {item.key for item in items if item.key is not None and item.prefix}
    alone = [item for item in items if item.key is None or not item.prefix]
    assert len(found) == len(shareable) + len(alone)
    assert len(units(items, Cut(False, packing, 10**6))) == len(items)


@given(
    branches=st.lists(st.integers(1, 60), min_size=2, max_size=30),
    prefix=st.integers(1, 100),
    budget=st.integers(1, 400),
)
def test_a_group_above_the_budget_is_split_and_no_further_than_needed(
    branches: list[int], prefix: int, budget: int
) -> None:
    items = [Item(i, prefix + branch, prefix, "one") for i, branch in enumerate(branches)]
    found = units(items, Cut(True, True, budget))
    assert (len(found) > 1) == (prefix + sum(branches) > budget)
    for unit, after in itertools.pairwise(found):
        assert unit.tokens + branches[after.members[0]] > budget  # the next one did not fit


@given(branches=st.lists(st.integers(1, 60), min_size=1, max_size=30), most=st.integers(1, 12))
def test_a_group_of_too_many_questions_is_split(branches: list[int], most: int) -> None:
    items = [Item(i, 20 + branch, 20, "one") for i, branch in enumerate(branches)]
    found = units(items, Cut(True, True, 10**6, most))
    assert len(found) == -(-len(branches) // most)
    assert all(len(unit.members) <= most for unit in found)


def loads(parts: list[list[MicroBatch]]) -> list[int]:
    """Tokens of each rank, the fullest first."""
    return sorted((sum(unit.tokens for part in rank for unit in part) for rank in parts), reverse=True)


def unsplit(items: list[Item], cut: Cut, count: int) -> list[int]:
    """The loads of units as they are, the longest first onto the emptiest rank."""
    result = [0] * count
    for unit in sorted(units(items, cut), key=lambda u: -u.tokens):
        result[result.index(min(result))] += unit.tokens
    return sorted(result, reverse=True)


@given(items=steps(), cut=cuts, count=st.integers(2, 8))
def test_ranks_are_about_equally_loaded(items: list[Item], cut: Cut, count: int) -> None:
    found = loads(micro_batches(items, cut, count))
    largest = max(unit.tokens for unit in units(items, cut))
    assert found[0] - found[-1] <= largest


@given(items=steps() | few_images, cut=cuts, count=st.integers(2, 8))
def test_splitting_never_makes_the_loads_worse(items: list[Item], cut: Cut, count: int) -> None:
    assert loads(micro_batches(items, cut, count)) <= unsplit(items, cut, count)


@given(items=steps() | few_images, cut=cuts | st.just(Cut(True, True, 10**6)), count=st.integers(2, 8))
def test_no_rank_is_idle_while_there_are_samples(items: list[Item], cut: Cut, count: int) -> None:
    busy = sum(bool(rank) for rank in micro_batches(items, cut, count))
    assert busy == min(count, len(items))


@given(items=steps(), cut=cuts)
def test_one_rank_has_the_units_as_they_are(items: list[Item], cut: Cut) -> None:
    (rank,) = micro_batches(items, cut)
    assert [unit for part in rank for unit in part] == units(items, cut)


def test_two_images_on_four_ranks() -> None:
    items = [Item(i, 1664 + 16 + i, 1664, i // 8) for i in range(16)]
    parts = micro_batches(items, Cut(True, True, 8192), 4)
    quarters = [tuple(range(at, at + 4)) for at in (0, 4, 8, 12)]
    assert sorted(unit.members for rank in parts for part in rank for unit in part) == quarters
    assert all(len(rank) == 1 for rank in parts)


def test_a_split_that_only_repeats_a_prefix_is_not_made() -> None:
    """Two images on two ranks: a third prefix would make one rank slower."""
    items = [Item(i, 1664 + 16, 1664, i // 8) for i in range(16)]
    parts = micro_batches(items, Cut(True, True, 8192), 2)
    assert loads(parts) == [1664 + 8 * 16] * 2


def test_a_smaller_unit_is_split_where_the_largest_does_not_help() -> None:
    """Five images of eight long branches on four ranks: the fifth is shared out among all of them."""
    items = [Item(i, 100 + 100, 100, i // 8) for i in range(40)]
    assert loads(micro_batches(items, Cut(True, True, 8192), 4)) == [1200] * 4


@given(items=steps(), cut=cuts, count=st.integers(1, 8))
def test_micro_batches_are_filled(items: list[Item], cut: Cut, count: int) -> None:
    """A unit opens a micro-batch only where the one before has no room for it."""
    for rank in micro_batches(items, cut, count):
        for part, after in itertools.pairwise(rank):
            longer = (*part, after[0])
            too_many = cut.max_questions is not None and len(members(longer)) > cut.max_questions
            assert too_many or size(longer, cut.packing) > cut.token_budget


def test_size_counts_padding_where_rows_are_padded() -> None:
    batch = (Unit((0,), 30), Unit((1, 2), 100), Unit((3,), 7))
    assert size(batch, packing=True) == 137
    assert size(batch, packing=False) == 300


# Bundles


@given(items=steps(), cut=cuts, count=ranks, data=st.data())
def test_a_bundle_is_in_one_micro_batch(items: list[Item], cut: Cut, count: int, data: st.DataObject) -> None:
    bundles: dict[int, list[Item]] = {}
    for item in items:
        bundles.setdefault(data.draw(st.integers(0, 6)), []).append(item)
    bundle_of = {item.index: number for number, bundle in bundles.items() for item in bundle}
    parts = whole_micro_batches(list(bundles.values()), cut, count)
    assert len(parts) == count
    assert sorted(i for rank in parts for part in rank for i in members(part)) == list(range(len(items)))
    held = [{bundle_of[i] for i in members(part)} for rank in parts for part in rank]
    assert sum(map(len, held)) == len(bundles), "none is split"
    for rank in parts:
        for part in rank:
            assert all(unit.tokens == tokens(items, unit) for unit in part)
            if len({bundle_of[i] for i in members(part)}) > 1:
                assert size(part, cut.packing) <= cut.token_budget
                assert cut.max_questions is None or len(members(part)) <= cut.max_questions
    used = sum(bool(rank) for rank in parts)
    assert used == min(count, len(bundles)), "no rank is idle while another has two"
