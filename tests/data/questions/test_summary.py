"""Numbers about sets of questions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sameday.data.questions.sample import ImageRef, Message, Sample
from sameday.data.questions.summary import (
    ORDERS,
    Spread,
    contents,
    images_a_step,
    on_several_sides,
    spaces_around,
    steps_in,
    summary_of,
)


def sample(number: int, image: int | None, asked: str = "what?", answer: str = "a red polyp", name: str = "") -> Sample:
    refs = () if image is None else (ImageRef(Path(name or f"{image}.png"), f"{image:032x}", 40 + image, 30),)
    stage = 1 + number % 2
    return Sample(
        number, f"a:{number}", refs, (Message("user", (asked,)), Message("assistant", (answer,))), stage, "open"
    )


def test_a_set_is_counted() -> None:
    samples = [
        sample(1, 0),
        sample(2, 0),
        sample(3, 0, answer="yes"),
        sample(4, 1, "how many?", "2", name="again.png"),
        sample(5, 1, "where?", "2"),
        sample(6, None),
    ]
    found = summary_of(samples)
    assert (found.questions, found.images, found.per_image) == (6, 2, Spread(2, 2.5, 3))
    assert found.sizes == Counter({(40, 30): 1, (41, 30): 1}) and found.words == Spread(1, 2, 3)
    assert (found.repeated, found.disagreeing, found.renamed) == (1, 1, 1)
    assert found.stages == Counter({1: 3, 2: 3}) and found.types == Counter({"open": 6})
    assert found.answers.most_common(1) == [("a red polyp", 3)]


def test_white_space_around_answers_is_told() -> None:
    """A CSV file with a space behind each comma taught every answer with it, and nothing said so."""
    odd = [sample(1, 0, answer=" yes"), sample(2, 0, answer="no\n"), sample(3, 0, answer="a red polyp")]
    assert spaces_around({"train": odd, "val": odd[2:]}) == [
        "train: 2 of 3 answers begin or end with spaces or line breaks, such as ' yes' (a:1); they are part of the "
        "answer unless the chat template removes them"
    ]


def test_images_in_two_splits_are_counted_by_content() -> None:
    splits = {"train": [sample(1, 0), sample(2, 1)], "val": [sample(1, 1, name="other.png")], "test": [sample(1, 2)]}
    assert on_several_sides(contents(splits)) == {("train", "val"): 1}


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 20))
def test_an_order_by_image_never_needs_more_images(images: list[int], batch: int) -> None:
    samples = [sample(n, image) for n, image in enumerate(images)]
    per_step = {kind: images_a_step(steps_in(kind, samples, batch), samples) for kind in ORDERS}
    distinct, steps = len(set(images)), -(-len(images) // batch)
    assert distinct <= per_step["by_image"] * steps + 1e-9 <= distinct + steps, "each image once, and at each cut again"
    assert 1 <= per_step["shuffle"] <= batch
