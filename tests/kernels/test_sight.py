"""Layers that see a window, or images in both directions: in any layout a token sees of its own question what it would
see if the question stood alone, and of others nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st

from sameday.kernels.attention import Sight, make_mask
from sameday.models.flops import tile_pairs


class Question(NamedTuple):
    """Lengths: text before its image, the image, text behind it that is shared, and text of its own."""

    before: int
    image: int
    behind: int
    own: tuple[int, ...]


questions = st.lists(
    st.builds(
        Question,
        st.integers(1, 4),
        st.integers(0, 5),
        st.integers(1, 3),
        st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=3,
)


@given(questions, st.one_of(st.none(), st.integers(1, 9)), st.booleans())
def test_a_token_sees_what_it_would_see_alone(drawn: list[Question], window: int | None, images: bool) -> None:
    group, branch, position, image = [], [], [], []
    for g, (before, pixels, behind, own) in enumerate(drawn):
        prefix = before + pixels + behind
        group += [g] * (prefix + sum(own))
        branch += [0] * prefix + [b for b, length in enumerate(own, 1) for _ in range(length)]
        position += [*range(prefix), *(prefix + n for length in own for n in range(length))]
        image += [-1] * before + [g] * pixels + [-1] * (behind + sum(own))
    levels = [torch.tensor([each]) for each in (group, branch, [0] * len(group))]
    sight = Sight(torch.tensor([position]), window, torch.tensor([image]) if images else None)
    mask = make_mask(*levels, False, None, "sdpa", sight)
    assert isinstance(mask, torch.Tensor) and mask.shape == (1, 1, len(group), len(group))
    for i in range(len(group)):
        for j in range(len(group)):
            one = group[i] == group[j] and branch[j] in (0, branch[i])
            both = images and image[i] == image[j] >= 0
            near = window is None or position[i] - position[j] < window
            assert bool(mask[0, 0, i, j]) == (one and (position[j] <= position[i] or both) and near), (i, j)
    tiles = sum(
        bool(mask[0, 0, a : a + 4, b : b + 4].any()) for a in range(0, len(group), 4) for b in range(0, len(group), 4)
    )
    assert tile_pairs(mask[:, 0], tile=4) == 16 * tiles


def test_a_row_that_is_one_question_needs_no_mask_unless_its_layers_do() -> None:
    levels = [torch.zeros(1, 3, dtype=torch.long) for _ in range(3)]
    assert make_mask(*levels, True, None, "split") is None
    mask = make_mask(*levels, True, None, "sdpa", Sight(torch.arange(3)[None], 2))
    assert isinstance(mask, torch.Tensor)
    assert mask[0, 0].tolist() == [[True, False, False], [True, True, False], [False, True, True]]
