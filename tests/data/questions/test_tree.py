"""Over random trees of tokens: what questions have in common is found, as much of it as two levels can share, and in
the layout each question sees what it sees alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sameday.data.questions import tree
from sameday.data.questions.encode import Encoded
from sameday.data.questions.layout import PADDING, Layout, lay_out, mask_ids_of
from sameday.data.questions.partition import Cut, Item, micro_batches, units
from sameday.data.questions.sample import ImageRef, Sample
from sameday.data.questions.tree import Text, agreements, grow
from sameday.kernels.attention import visible
from sameday.models.families import family_of

QWEN = family_of("qwen3_vl")
IMAGE, AFTER_IMAGE, ANSWER = 90, 91, 92

LEAST = st.sampled_from([1, 2, 3, tree.LEAST])
STEM = st.lists(st.integers(0, 1), min_size=0, max_size=5).map(tuple)


@st.composite
def texts(draw: st.DrawFn, least: int = 1, most: int = 9) -> list[Text]:
    """Templates that begin alike, questions in them that do too, and some twice."""
    templates = draw(st.lists(st.tuples(STEM, STEM).map(lambda two: two[0] * 3 + two[1]), min_size=1, max_size=3))
    asked = st.tuples(st.sampled_from(templates), STEM).map(lambda two: two[0] + two[1])
    return draw(st.lists(asked, min_size=least, max_size=most))


def common(some: list[Text]) -> int:
    """The longest common run, token by token."""
    return next((n for n, each in enumerate(zip(*some, strict=False)) if len(set(each)) > 1), min(map(len, some)))


@given(texts(least=2), LEAST)
def test_a_tree_holds_what_its_questions_have_in_common(some: list[Text], least: int) -> None:
    some = sorted(some)
    with patch.object(tree, "LEAST", least):
        grown = grow(agreements(some))
    assert grown.root == common(some)
    inside = [number for fork in grown.forks for number in range(fork.first, fork.last)]
    assert inside in ([], list(range(len(some)))), "all questions are in forks, each in one, or none is"
    for fork in grown.forks:
        if fork.last - fork.first > 1:
            assert fork.tokens == common(some[fork.first : fork.last]) >= grown.root + least
        else:
            assert fork.tokens == grown.root + 1
    assert not grown.forks or any(fork.last - fork.first > 1 for fork in grown.forks)


def runs_of(numbers: list[int]) -> Iterator[list[list[int]]]:
    """All ways to cut them into neighbours."""
    if not numbers:
        yield []
    for end in range(1, len(numbers) + 1):
        for others in runs_of(numbers[end:]):
            yield [numbers[:end], *others]


@given(texts(least=2, most=6), LEAST)
def test_no_other_forks_save_more(some: list[Text], least: int) -> None:
    """Of all forks of neighbours in the sorted order, which is how rows are laid out. Questions that are no neighbours
    could at times save a few tokens more."""
    some = sorted(some)
    with patch.object(tree, "LEAST", least):
        saved = grow(agreements(some)).saved
    root = common(some)
    below = [
        sum((len(part) - 1) * gain for part in parts if (gain := common([some[i] for i in part]) - root) >= least)
        for parts in runs_of(list(range(len(some))))
    ]
    assert saved == (len(some) - 1) * root + max(below)


# Laid out


def questions_of(asked: list[tuple[int, Text, int]]) -> list[Encoded]:
    """A question is an image of four tokens, its text, and an answer of some tokens."""
    encoded = []
    for number, (picture, text, answer) in enumerate(asked):
        # Numbers of text tokens are from 10 on. What closes a prompt is alike in all of them.
        head, tail = [1, 2, *[IMAGE] * 4, AFTER_IMAGE], [5, 6, 7]
        tokens = np.array([*head, *(10 + token for token in text), *tail, *[ANSWER + number % 3] * answer])
        targets = np.arange(len(tokens)) >= len(tokens) - answer
        image = ImageRef(Path(f"{picture}.png"), str(picture), 64, 64)
        sample = Sample(number + 1, f"train.jsonl:{number + 1}", (image,), ())
        encoded.append(Encoded(sample, tokens, targets, len(head), ((4, 4),), ((2, 6),)))
    return encoded


asked = st.lists(st.tuples(st.integers(0, 1), STEM, st.integers(1, 3)), max_size=6)
steps = st.builds(
    lambda texts, answers, others: [(0, text, n) for text, n in zip(texts, answers, strict=False)] + others,
    texts(least=1),
    st.lists(st.integers(1, 3), min_size=9, max_size=9),
    asked,
)


def arranged(encoded: list[Encoded], packing: bool, budget: int = 10**6) -> list[Layout]:
    items = [Item(i, e.length, e.prefix, e.key, e.text) for i, e in enumerate(encoded)]
    (parts,) = micro_batches(items, Cut(True, packing, budget))
    ids = mask_ids_of(encoded, share_text=True)
    layouts = []
    for part in parts:
        members = [[encoded[i] for i in unit.members] for unit in part]
        layout = lay_out(
            members,
            packing=packing,
            family=QWEN,
            merge_size=2,
            loss_weight="token",
            pad_token=0,
            share_text=True,
            mask_ids=ids,
        )
        assert (layout.group != PADDING).sum() == sum(unit.tokens for unit in part), "the partition counts right"
        layouts.append(layout)
    return layouts


@given(steps, st.booleans(), st.sampled_from([20, 45, 10**6]), LEAST)
def test_each_question_sees_what_it_sees_alone(
    step: list[tuple[int, Text, int]], packing: bool, budget: int, least: int
) -> None:
    encoded = questions_of(step)
    with patch.object(tree, "LEAST", least):
        layouts = arranged(encoded, packing, budget)
    assert sorted(e.sample.id for layout in layouts for e in layout.questions) == list(range(1, len(encoded) + 1))
    for layout in layouts:
        levels = (torch.from_numpy(level) for level in (layout.group, layout.branch, layout.fork))
        sees = visible(*levels)[:, 0].numpy()
        width = layout.tokens.shape[1]
        for owner, question in enumerate(layout.questions):
            at = layout.target_at[layout.owner == owner]
            row, count = int(at[-1]) // width, question.length - 1
            mine = np.flatnonzero(sees[row, int(at[-1]) % width])
            assert np.array_equal(layout.tokens[row, mine], question.tokens[:count])
            assert np.array_equal(layout.positions[:, row, mine], QWEN.positions(question, 2)[:, :count])
            assert np.array_equal(sees[row][np.ix_(mine, mine)], np.tri(count, dtype=bool))
            assert sees[row][mine].sum() == count * (count + 1) // 2, "and nothing else"
            wanted = np.flatnonzero(question.targets)
            assert np.array_equal(at, row * width + mine[wanted - 1])
            assert (layout.branch[row, mine[wanted - 1]] > 0).all(), "what predicts a target is the question's own"


@given(steps, st.booleans(), st.sampled_from([20, 45]), LEAST)
def test_a_tokens_dropout_does_not_depend_on_how_a_step_is_split(
    step: list[tuple[int, Text, int]], packing: bool, budget: int, least: int
) -> None:
    encoded = questions_of(step)

    def keys(budget: int) -> dict[tuple[int, int], int]:
        """By question and place."""
        found = {}
        for layout in arranged(encoded, packing, budget):
            levels = (torch.from_numpy(level) for level in (layout.group, layout.branch, layout.fork))
            sees, width = visible(*levels)[:, 0].numpy(), layout.tokens.shape[1]
            for owner, question in enumerate(layout.questions):
                row, last = divmod(int(layout.target_at[layout.owner == owner][-1]), width)
                for place, at in enumerate(np.flatnonzero(sees[row, last])):
                    found[question.sample.id, place] = int(layout.keys[row, at])
        return found

    with patch.object(tree, "LEAST", least):
        assert keys(budget) == keys(10**6) == keys(1)


@given(steps, st.integers(2, 6), LEAST)
def test_no_rank_is_idle_and_each_counts_what_it_shares(
    step: list[tuple[int, Text, int]], ranks: int, least: int
) -> None:
    items = [Item(i, e.length, e.prefix, e.key, e.text) for i, e in enumerate(questions_of(step))]
    with patch.object(tree, "LEAST", least):
        parts = micro_batches(items, Cut(True, True, 10**6), ranks)
        assert sum(bool(rank) for rank in parts) == min(ranks, len(items))
        members = [unit for rank in parts for part in rank for unit in part]
        assert sorted(i for unit in members for i in unit.members) == list(range(len(items)))
        for unit in members:
            saved = grow(agreements([items[i].text for i in unit.members])).saved
            prefix = items[unit.members[0]].prefix
            assert unit.tokens == prefix + sum(items[i].length - prefix for i in unit.members) - saved


def test_what_a_template_saves() -> None:
    """Two templates of forty tokens, four questions in each: six times forty tokens less."""
    sets = [tuple(range(100, 140)), tuple(range(200, 240))]
    step = [(0, sets[number % 2] + (number,), 2) for number in range(8)]
    encoded = questions_of(step)
    (shared,) = units([Item(i, e.length, e.prefix, e.key, e.text) for i, e in enumerate(encoded)], Cut(True, True, 999))
    (images,) = units([Item(i, e.length, e.prefix, e.key) for i, e in enumerate(encoded)], Cut(True, True, 999))
    assert images.tokens - shared.tokens == 6 * 40
    assert shared.members == (0, 2, 4, 6, 1, 3, 5, 7), "those of one template stand together"


def test_a_prompt_and_a_question_without_an_image_share_no_text() -> None:
    (one, *_) = questions_of([(0, (1, 2, 3), 2)])
    assert one.text == (11, 12, 13, 5)
    prompt = Encoded(one.sample, one.tokens, np.zeros_like(one.targets), one.prefix, one.grids, one.image_spans)
    assert prompt.text == () and Encoded(one.sample, one.tokens, one.targets, 0, (), ()).text == ()
