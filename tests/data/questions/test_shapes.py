"""Padding a packed row to a shape changes nothing that its tokens are, see or are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sameday.data.questions import tree
from sameday.data.questions.batch import _segments
from sameday.data.questions.encode import Encoded
from sameday.data.questions.layout import PADDING, Layout, lay_out, mask_ids_of
from sameday.data.questions.partition import Cut, Item, units
from sameday.data.questions.pieces import rows_of
from sameday.data.questions.sample import ImageRef, Sample
from sameday.data.questions.shape_choice import (
    LEAST_USES,
    MOST_PADDED,
    MOST_SHAPES,
    TILE,
    choose_shapes,
    fitting,
)
from sameday.data.questions.shapes import Section, Shape, shape_of
from sameday.models.families import family_of

QWEN = family_of("qwen3_vl")
HEAD = [1, 2, 3, 3, 3, 3, 4]

asked = st.tuples(st.integers(0, 4), st.lists(st.integers(10, 11), min_size=1, max_size=7), st.integers(1, 3))
steps = st.lists(asked, min_size=1, max_size=9)
"""Questions: about which image, with which text, with how many tokens of answer."""
slack = st.lists(st.integers(0, 40), min_size=13, max_size=13)


def questions_of(step: Sequence[tuple[int, list[int], int]]) -> list[Encoded]:
    encoded = []
    for number, (picture, text, answer) in enumerate(step):
        tokens = np.array([*HEAD, *text, 5, 6, 7, *[20 + number % 3] * answer])
        targets = np.arange(len(tokens)) >= len(tokens) - answer
        image = ImageRef(Path(f"{picture}.png"), str(picture), 64, 64)
        sample = Sample(number + 1, f"train.jsonl:{number + 1}", (image,), ())
        encoded.append(Encoded(sample, tokens, targets, len(HEAD), ((4, 4),), ((2, 6),)))
    return encoded


def groups_of(encoded: Sequence[Encoded]) -> list[list[Encoded]]:
    items = [Item(i, e.length, e.prefix, e.key, e.text) for i, e in enumerate(encoded)]
    return [[encoded[i] for i in unit.members] for unit in units(items, Cut(True, True, 10**6))]


def laid_out(encoded: Sequence[Encoded], shape: Shape | None) -> Layout:
    return lay_out(
        groups_of(encoded),
        packing=True,
        family=QWEN,
        merge_size=2,
        loss_weight="sample",
        pad_token=0,
        share_text=True,
        mask_ids=mask_ids_of(encoded, share_text=True),
        shape=shape,
    )


def size_of(encoded: Sequence[Encoded]) -> Shape:
    return shape_of(rows_of(groups_of(encoded), True, True)[0][0])


def roomy(rows: Sequence[Shape], more: Sequence[int]) -> Shape:
    """A shape that covers all of these."""
    most = [max(values) for values in zip(*rows, strict=True)]
    room = [n + extra + (place < len(Section)) for place, (n, extra) in enumerate(zip(most, more, strict=True))]
    return Shape(*(n if most[place] else 0 for place, n in enumerate(room)))


def sight(layout: Layout) -> np.ndarray:
    """Who sees whom, query by key, as the bounds of the attention's calls have it."""
    assert layout.bounds is not None
    length = layout.tokens.shape[1]
    seen = np.zeros((length, length), bool)
    for first, end in zip(layout.bounds.cu[:-1], layout.bounds.cu[1:], strict=True):
        seen[first:end, first:end] |= np.tri(end - first, dtype=bool)
    for call in layout.bounds.dense:
        ends = zip(call.cu_queries[:-1], call.cu_queries[1:], call.cu_keys[:-1], call.cu_keys[1:], strict=True)
        for a, b, c, d in ends:
            part = seen[call.queries + a : call.queries + b, call.keys + c : call.keys + d]
            assert not part.any(), "what is seen twice counts twice"
            assert d > c or b == a, "who asks sees something"
            part[:] = True
    return seen


@settings(max_examples=80, deadline=None)
@given(steps, st.lists(steps, max_size=2), slack, st.sampled_from([1, 3]))
def test_a_padded_row_is_the_row(
    step: list[tuple[int, list[int], int]], others: list[list[tuple[int, list[int], int]]], more: list[int], least: int
) -> None:
    encoded = questions_of(step)
    with patch.object(tree, "LEAST", least):
        shape = roomy([size_of(encoded), *(size_of(questions_of(other)) for other in others)], more)
        plain, padded = laid_out(encoded, None), laid_out(encoded, shape)
    real, places = (np.flatnonzero(layout.group[0] != PADDING) for layout in (plain, padded))
    assert padded.tokens.shape[1] == shape.tokens and plain.tokens.shape[1] == len(real) == len(places)
    for name in ("tokens", "group", "branch", "fork", "keys"):
        assert np.array_equal(getattr(plain, name), getattr(padded, name)[:, places]), name
    assert np.array_equal(plain.positions, padded.positions[:, :, places])
    seen = sight(padded)
    assert np.array_equal(sight(plain), seen[np.ix_(places, places)])
    padding = np.setdiff1d(np.arange(shape.tokens), places)
    assert not seen[np.ix_(places, padding)].any() and not seen[np.ix_(padding, places)].any()
    assert seen.any(1).all() and seen.shape[0] - 1 in padding
    count, images = len(plain.owner), len(plain.image_source)
    assert np.array_equal(plain.owner, padded.owner) and np.array_equal(plain.image_source, padded.image_source)
    for name, there in (("target_at", places[plain.target_at]), ("target", plain.target), ("weight", plain.weight)):
        assert np.array_equal(there, getattr(padded, name)[:count]), name
    assert np.array_equal(places[plain.image_slots], padded.image_slots[:images])
    assert not padded.weight[count:].any() and len(padded.weight) == len(padded.target_at) == shape.targets
    assert set(padded.target_at[count:]) | set(padded.image_slots[images:]) <= {shape.tokens - 1}


@settings(max_examples=40, deadline=None)
@given(steps, steps, slack)
def test_rows_of_one_shape_differ_in_nothing_that_the_host_reads(
    one: list[tuple[int, list[int], int]], other: list[tuple[int, list[int], int]], more: list[int]
) -> None:
    both = [questions_of(step) for step in (one, other)]
    with patch.object(tree, "LEAST", 1):
        shape = roomy([size_of(encoded) for encoded in both], more)
        first, second = (_segments(laid_out(encoded, shape)) for encoded in both)
        alone = _segments(laid_out(both[0], None))
    assert first is not None and second is not None and alone is not None
    assert torch.equal(first.at, second.at)
    assert [x.shape for x in first[:3]] == [x.shape for x in second[:3]]
    longest, *_ = first.at.tolist()
    for segments in (first, second):
        assert int(segments.cu.diff().max()) <= longest
    assert alone.at[0] <= longest, "what no piece exceeds"


def row(prefix: int, branch: int, prefixes: int = 2, questions: int = 16) -> Shape:
    counts = (prefixes + questions, prefixes, 0, 0, prefix // prefixes, prefix - 8 * prefixes, 3 * questions)
    return Shape(prefix, 0, 0, 0, branch, 0, *counts)


def test_few_shapes_serve_many_rows() -> None:
    """Sizes as steps of real photographs have them: two or three images, sixteen questions of thirty tokens."""
    rng = np.random.default_rng(0)
    rows = [
        row(int(n) * 440 + int(rng.integers(0, 3)) * 24, int(rng.integers(430, 560)), int(n))
        for n in rng.choice([2, 3, 4], 200, p=[0.6, 0.3, 0.1])
    ]
    shapes = choose_shapes(rows, 10)
    assert 1 < len(shapes) <= MOST_SHAPES and shapes == choose_shapes(rows, 10)
    served = [(each, shape) for each in rows if (shape := fitting(each, shapes)) is not None]
    assert len(served) == len(rows)
    assert all(shape.covers(each) and not shape.tokens % TILE for each, shape in served)
    assert sum(shape.tokens for _, shape in served) < 1.1 * sum(each.tokens for each, _ in served)


def test_rows_that_all_differ_are_served_as_well() -> None:
    """Hardly two rows of a mixture of photographs are alike, some have questions alone, and larger ones that are worth
    recording make no shape of the others worse."""
    rng = np.random.default_rng(0)
    rows = [
        row(int(rng.integers(800, 3000)), int(rng.integers(300, 380)))._replace(alone=int(alone))
        for alone in rng.choice([0, 420, 430, 455, 600], 300)
    ]
    for most in (2000, 4000):
        shapes = choose_shapes(rows, 10, most)
        served = [(each, shape) for each in rows if (shape := fitting(each, shapes)) is not None]
        assert len(served) > 0.8 * sum(each.tokens < most for each in rows)
        assert sum(shape.tokens for _, shape in served) < 1.15 * sum(each.tokens for each, _ in served)


def test_rows_that_differ_in_their_counts_too_are_compared_more_coarsely() -> None:
    """In numbers of images, of questions and of targets, and in their longest piece: of so many kinds that rounding
    tokens alone would never make few of them."""
    rng = np.random.default_rng(0)
    rows = [
        row(int(prefix), int(branch), int(prefixes), int(questions))._replace(longest=int(longest))
        for prefix, branch, prefixes, questions, longest in rng.integers(
            (1500, 600, 1, 8, 300), (2000, 800, 12, 64, 1500), (800, 5)
        )
    ]
    shapes = choose_shapes(rows, 10)
    assert 1 <= len(shapes) <= MOST_SHAPES
    assert sum(fitting(each, shapes) is not None for each in rows) > 0.5 * len(rows)


def test_a_question_alone_is_as_the_others_are_where_some_share() -> None:
    """Rows of one size have one shape, however their questions are spread over images."""

    def shape(*pictures: int) -> Shape:
        return size_of(questions_of([(picture, [10 + n % 2, 10], 2) for n, picture in enumerate(pictures)]))

    assert shape(0, 0, 0, 1, 1, 1) == shape(0, 0, 0, 0, 0, 1) and not shape(0, 0, 1).alone
    assert shape(0, 1, 2).alone and not shape(0, 1, 2).prefix, "where none share, each is one piece"


def test_what_is_rare_or_would_be_padded_much_is_left() -> None:
    usual, rare = row(880, 480), row(5000, 480, 12)
    shapes = choose_shapes([usual] * 20 + [rare], LEAST_USES - 1)
    assert fitting(usual, shapes) is not None and fitting(rare, shapes) is None
    shapes = choose_shapes([usual] * 20 + [rare], LEAST_USES)
    assert fitting(rare, shapes) is not None
    small = row(40, 30, 1, 2)
    assert fitting(small, shapes) is None, f"it would be more than {MOST_PADDED} times as long"
    assert choose_shapes([], 10) == ()


def test_each_section_that_is_there_has_room_for_padding() -> None:
    full = row(1024, 512)
    (shape,) = choose_shapes([full], LEAST_USES)
    assert shape.prefix > 1024 and shape.branch > 512 and not shape.covers(full._replace(prefix=shape.prefix))
    assert not shape.covers(full._replace(fork=1)) and not shape.covers(full._replace(targets=shape.targets + 1))


some_rows = st.lists(
    st.builds(row, st.integers(16, 4000), st.integers(1, 1500), st.integers(1, 4), st.integers(1, 32)), max_size=30
)


@settings(max_examples=100, deadline=None)
@given(some_rows, st.integers(1, 6000), st.sampled_from([0.5, 1, 10]))
def test_no_shape_is_larger_than_what_is_worth_it(rows: list[Shape], most: int, times: float) -> None:
    """Larger rows have no shape, and no say in those of the others."""
    shapes = choose_shapes(rows, times, most)
    assert all(shape.tokens <= most for shape in shapes) and len(shapes) <= MOST_SHAPES
    below = [each for each in rows if each.tokens <= most]
    assert shapes == choose_shapes(below, times, most)
    for each in rows:
        shape = fitting(each, shapes)
        assert shape is None or (each in below and shape.covers(each))
    assert choose_shapes(rows, times, 10**9) == choose_shapes(rows, times)
