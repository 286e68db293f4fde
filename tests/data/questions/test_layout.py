"""In every layout a question sees its own tokens at its own positions, its own image, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds import FAMILIES

from sameday.data.questions.encode import Encoded, Encoder
from sameday.data.questions.layout import PADDING, Layout, lay_out
from sameday.data.questions.partition import Cut, Item, units
from sameday.data.questions.processor import ImageProcessor
from sameday.data.questions.sample import ImageRef, Message, Sample
from sameday.kernels import attention
from sameday.models.families import family_of

QWEN = family_of("qwen3_vl")
MERGE = 2
PAD = 0
SIZES = ((16, 16), (48, 48), (96, 64), (64, 112), (128, 32))


@pytest.fixture(scope="module")
def encoder(tiny_qwen3: Path) -> Encoder:
    from transformers import AutoTokenizer

    processor = ImageProcessor.load(QWEN, str(tiny_qwen3))
    return Encoder(AutoTokenizer.from_pretrained(tiny_qwen3), processor)


def image(name: str, size: tuple[int, int]) -> ImageRef:
    return ImageRef(Path(f"{name}.png"), name, *size)


# The positions of one question alone


@cache
def load(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder)


def their_positions(model: Any, encoded: Encoded) -> np.ndarray:
    tokens = torch.from_numpy(encoded.tokens)[None]
    grid = torch.tensor([(1, high, wide) for high, wide in encoded.grids]) if encoded.grids else None
    positions, _ = model.model.get_rope_index(
        input_ids=tokens,
        mm_token_type_ids=(tokens == model.config.image_token_id).int(),
        image_grid_thw=grid,
        attention_mask=torch.ones_like(tokens),
    )
    return positions[:, 0].numpy()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [*((size,) for size in SIZES), SIZES[1:3], (SIZES[3], SIZES[0]), SIZES[2:5]], ids=str)
def test_positions_are_the_models_own(
    tiny_models: dict[str, Path], encoder: Encoder, family: str, sizes: tuple[tuple[int, int], ...]
) -> None:
    images = tuple(image(f"i{i}", size) for i, size in enumerate(sizes))
    parts = [part for i in range(len(sizes)) for part in (i, f"picture {i} of the wall")]
    messages = (Message("user", tuple(parts)), Message("assistant", ("no",)))
    encoded = encoder.encode(Sample(1, "train.jsonl:1", images, messages))
    ours = family_of(family).positions(encoded, MERGE)
    assert np.array_equal(ours, their_positions(load(tiny_models[family]), encoded))
    assert not np.array_equal(ours[1], ours[2]) or sizes == (SIZES[0],)


def test_a_conversation_with_images_in_two_turns(tiny_models: dict[str, Path], encoder: Encoder) -> None:
    messages = (
        Message("user", (0, "what?")),
        Message("assistant", ("a wall",)),
        Message("user", ("and", 1)),
        Message("assistant", ("no",)),
    )
    images = (image("a", SIZES[1]), image("b", SIZES[2]))
    encoded = encoder.encode(Sample(1, "train.jsonl:1", images, messages))
    for family in FAMILIES:
        assert np.array_equal(QWEN.positions(encoded, MERGE), their_positions(load(tiny_models[family]), encoded))


def test_text_alone_counts_on_by_one(encoder: Encoder) -> None:
    encoded = encoder.encode(
        Sample(1, "train.jsonl:1", (), (Message("user", ("why?",)), Message("assistant", ("so",))))
    )
    assert np.array_equal(QWEN.positions(encoded, MERGE), np.tile(np.arange(encoded.length), (3, 1)))


# Questions in rows

IMAGES = {name: image(name, SIZES[i]) for i, name in enumerate(("tiny", "square", "wide", "tall"))}
IMAGES["twin"] = replace(IMAGES["square"], path=Path("twin.png"), digest="twin")  # equal tokens, other pixels
WORDS = ("polyp", "left wall", "red", "how many mm", "is it")
TEMPLATES = ("", "look closely. ", "look closely at all of it, and say in one word how large it is. ")
KINDS = (*IMAGES, "none", "pair", "brief", "later", "cut")


def question(encoder: Encoder, id: int, kind: str, length: int) -> Encoded:
    """`pair`: two images. `brief`: a system prompt of its own. `later`: an image after the first answer. `cut`: one
    token of the answer is left."""
    text = TEMPLATES[length % len(TEMPLATES)] + " ".join(WORDS[(id + i) % len(WORDS)] for i in range(length))
    images = [IMAGES[kind]] if kind in IMAGES else [IMAGES["square"]]
    if kind == "none":
        images = []
    elif kind == "pair":
        images = [IMAGES["square"], IMAGES["wide"]]
    messages = [Message("user", (*range(len(images)), text)), Message("assistant", (text[::-1],))]
    if kind == "brief":
        messages.insert(0, Message("system", ("be brief",)))
    if kind == "later":
        images.append(IMAGES["tall"])
        messages += [Message("user", (1, "and here?")), Message("assistant", ("no",))]
    encoded = encoder.encode(Sample(id, f"train.jsonl:{id}", tuple(images), tuple(messages)))
    if kind == "cut":
        kept = encoded.length - encoded.target_count + 1
        encoded = replace(encoded, tokens=encoded.tokens[:kept], targets=encoded.targets[:kept])
    return encoded


asked = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 5)), min_size=1, max_size=14)
options = st.fixed_dictionaries(
    {
        "packing": st.booleans(),
        "loss_weight": st.sampled_from(["token", "sample"]),
        "pad_to_multiple": st.sampled_from([1, 7, 64]),
        "share_pixels": st.booleans(),
        "share_text": st.booleans(),
    }
)


def arrange(encoder: Encoder, kinds: list[tuple[str, int]], share: bool, budget: int = 10**6, **how: Any) -> Layout:
    """One micro-batch of these questions, grouped as the partition groups them."""
    encoded = [question(encoder, i + 1, kind, length) for i, (kind, length) in enumerate(kinds)]
    texts = [e.text if how.get("share_text") else () for e in encoded]
    items = [Item(i, e.length, e.prefix, e.key, text) for i, (e, text) in enumerate(zip(encoded, texts, strict=True))]
    grouped = units(items, Cut(share, True, budget))
    members = [[encoded[i] for i in unit.members] for unit in grouped]
    layout = lay_out(members, family=QWEN, merge_size=MERGE, pad_token=PAD, **how)
    taken = sum(unit.tokens for unit in grouped)
    assert (layout.group != PADDING).sum() == taken, "the partition's count of tokens is the layout's"
    return layout


def visible(layout: Layout) -> np.ndarray:
    """(rows, length, length), query by key."""
    levels = (torch.from_numpy(level) for level in (layout.group, layout.branch, layout.fork))
    return attention.visible(*levels)[:, 0].numpy()


def places(layout: Layout, sees: np.ndarray, owner: int) -> tuple[int, np.ndarray]:
    """The row of a question, and where its tokens stand there, but for the last, which no target needs."""
    row, last = divmod(int(layout.target_at[layout.owner == owner].max()), layout.tokens.shape[1])
    return row, np.flatnonzero(sees[row, last])


@given(kinds=asked, share=st.booleans(), budget=st.sampled_from([40, 90, 10**6]), how=options)
def test_a_question_sees_what_it_sees_alone(
    encoder: Encoder, kinds: list[tuple[str, int]], share: bool, budget: int, how: dict[str, Any]
) -> None:
    layout = arrange(encoder, kinds, share, budget, **how)
    sees = visible(layout)
    assert sorted(e.sample.id for e in layout.questions) == [i + 1 for i in range(len(kinds))]
    for owner, encoded in enumerate(layout.questions):
        row, mine = places(layout, sees, owner)
        count = encoded.length - 1
        assert np.array_equal(layout.tokens[row, mine], encoded.tokens[:count])
        assert np.array_equal(layout.positions[:, row, mine], QWEN.positions(encoded, MERGE)[:, :count])
        # Each of these tokens in turn sees those before it, itself, and nothing else: there is no detour.
        elsewhere = np.setdiff1d(np.arange(layout.tokens.shape[1]), mine)
        assert np.array_equal(sees[row][np.ix_(mine, mine)], np.tri(count, dtype=bool))
        assert not sees[row][np.ix_(mine, elsewhere)].any()


@given(kinds=asked, share=st.booleans(), how=options)
def test_padding_sees_and_is_seen_by_no_question(
    encoder: Encoder, kinds: list[tuple[str, int]], share: bool, how: dict[str, Any]
) -> None:
    layout = arrange(encoder, kinds, share, **how)
    assert layout.tokens.shape[1] % how["pad_to_multiple"] == 0
    sees = visible(layout)
    for row in range(len(sees)):
        padding = layout.group[row] == PADDING
        assert not sees[row][np.ix_(padding, ~padding)].any()
        assert not sees[row][np.ix_(~padding, padding)].any()
        assert sees[row].any(1).all(), "a row of scores without any key is not a number"
        assert (layout.tokens[row, padding] == PAD).all()
        assert not padding[: (~padding).sum()].any(), "padding comes last"


@given(kinds=asked, share=st.booleans(), how=options)
def test_targets_are_predicted_from_the_token_before(
    encoder: Encoder, kinds: list[tuple[str, int]], share: bool, how: dict[str, Any]
) -> None:
    layout = arrange(encoder, kinds, share, **how)
    sees = visible(layout)
    for owner, encoded in enumerate(layout.questions):
        row, mine = places(layout, sees, owner)
        wanted = np.flatnonzero(encoded.targets)
        chosen = layout.owner == owner
        expected = [(row * layout.tokens.shape[1] + mine[t - 1], encoded.tokens[t]) for t in wanted]
        assert sorted(zip(layout.target_at[chosen], layout.target[chosen], strict=True)) == sorted(expected)
        weight = layout.weight[chosen]
        if how["loss_weight"] == "sample":
            assert weight.sum() == pytest.approx(1, rel=1e-6) and len(set(weight.tolist())) == 1
        else:
            assert (weight == 1).all()
    assert len(layout.target) == sum(e.target_count for e in layout.questions)


@given(kinds=asked, share=st.booleans(), how=options)
def test_each_image_token_takes_its_own_row_of_its_own_image(
    encoder: Encoder, kinds: list[tuple[str, int]], share: bool, how: dict[str, Any]
) -> None:
    layout = arrange(encoder, kinds, share, **how)
    sees = visible(layout)
    rows = [high * wide // MERGE**2 for high, wide in layout.grids]
    produced = [
        (picture.digest, offset) for picture, count in zip(layout.images, rows, strict=True) for offset in range(count)
    ]
    taken = {
        slot: produced[source]
        for slot, source in zip(layout.image_slots.tolist(), layout.image_source.tolist(), strict=True)
    }
    assert len(taken) == len(layout.image_slots), "no place takes two features"
    assert set(layout.image_source.tolist()) == set(range(len(produced))), "no feature is computed in vain"
    needed = set()
    for owner, encoded in enumerate(layout.questions):
        row, mine = places(layout, sees, owner)
        for picture, (start, end) in zip(encoded.sample.images, encoded.image_spans, strict=True):
            for offset in range(end - start):
                slot = row * layout.tokens.shape[1] + int(mine[start + offset])
                assert taken[slot] == (picture.digest, offset)
                needed.add(slot)
    assert needed == set(taken)


@given(kinds=asked, share=st.booleans(), how=options)
def test_shared_pixels_go_through_the_tower_once(
    encoder: Encoder, kinds: list[tuple[str, int]], share: bool, how: dict[str, Any]
) -> None:
    layout = arrange(encoder, kinds, share, **how)
    digests = [picture.digest for picture in layout.images]
    wanted = [picture.digest for e in layout.questions for picture in e.sample.images]
    assert set(digests) == set(wanted)
    if how["share_pixels"]:
        assert len(digests) == len(set(digests))
    elif not share:
        assert sorted(digests) == sorted(wanted)


@given(kinds=asked, how=options)
def test_without_sharing_a_tokens_key_is_that_of_the_question_alone(
    encoder: Encoder, kinds: list[tuple[str, int]], how: dict[str, Any]
) -> None:
    layout = arrange(encoder, kinds, False, **how)
    sees = visible(layout)
    for owner, encoded in enumerate(layout.questions):
        row, mine = places(layout, sees, owner)
        alone = lay_out([[encoded]], packing=False, family=QWEN, merge_size=MERGE, loss_weight="token", pad_token=PAD)
        assert np.array_equal(layout.keys[row, mine], alone.keys[0, :-1])


@given(kinds=asked, share=st.booleans(), how=options)
def test_plain_causal_rows_are_announced_only_where_they_are_exact(
    encoder: Encoder, kinds: list[tuple[str, int]], share: bool, how: dict[str, Any]
) -> None:
    layout = arrange(encoder, kinds, share, **how)
    sees = visible(layout)
    lengths = (layout.group != PADDING).sum(1)
    causal = all(np.array_equal(mask[:n, :n], np.tri(n, dtype=bool)) for mask, n in zip(sees, lengths, strict=True))
    assert layout.one_per_row == causal


@given(kinds=asked, how=options, share=st.booleans())
def test_bounds_describe_the_same_attention_as_the_mask(
    encoder: Encoder, kinds: list[tuple[str, int]], share: bool, how: dict[str, Any]
) -> None:
    """Causal within each piece, and each run of queries over the whole of its run of keys."""
    layout = arrange(encoder, kinds, share, **(how | {"packing": True}))
    bounds = layout.bounds
    assert bounds is not None
    rebuilt = np.zeros(2 * layout.tokens.shape[1:], bool)
    for a, b in zip(bounds.cu[:-1], bounds.cu[1:], strict=True):
        rebuilt[a:b, a:b] = np.tri(b - a, dtype=bool)
    for call in bounds.dense:
        queries, keys = call.queries + call.cu_queries, call.keys + call.cu_keys
        assert (np.diff(queries) > 0).all() and (np.diff(keys) > 0).all(), "no run is empty"
        for (first, last), (a, b) in zip(pairwise(queries), pairwise(keys), strict=True):
            assert not rebuilt[first:last, a:b].any(), "no pair is computed twice"
            rebuilt[first:last, a:b] = True
    assert np.array_equal(rebuilt, visible(layout)[0])


def test_sharing_saves_the_prefix_of_every_further_question(encoder: Encoder) -> None:
    kinds = [("wide", 2)] * 6 + [("square", 1), ("twin", 1)]
    how = {"packing": True, "loss_weight": "token"}
    apart, together = (arrange(encoder, kinds, share, **how) for share in (False, True))
    prefix = question(encoder, 1, "wide", 2).prefix
    assert apart.tokens.size - together.tokens.size == 5 * prefix
    assert [picture.digest for picture in together.images].count("wide") == 1


def test_questions_of_two_prefixes_in_one_group_are_an_error(encoder: Encoder) -> None:
    for one, other in (("square", "twin"), ("square", "brief"), ("none", "none")):
        group = [question(encoder, 1, one, 1), question(encoder, 2, other, 1)]
        with pytest.raises(AssertionError, match="one prefix"):
            lay_out([group], packing=False, family=QWEN, merge_size=MERGE, loss_weight="token", pad_token=PAD)
