"""Shares that are held out: no image on two sides, and nothing but its pixels and the seed decides about one."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import draw_image, tiny_recipe

from sameday.data.questions.sample import ImageRef, Message, Sample
from sameday.data.questions.split import divided, told
from sameday.spec.dataset import Split
from sameday.spec.document import Document
from sameday.spec.errors import BadInput
from sameday.spec.explain import validate
from sameday.spec.vqa import VqaRecipe
from sameday.spec.words import count
from sameday.tasks.vqa.setup import VqaSetup

SHARES = st.floats(0.01, 0.45)
IMAGES = st.lists(st.integers(0, 12), max_size=3)


def sample(number: int, images: list[int]) -> Sample:
    refs = tuple(ImageRef(Path(f"{i}.png"), f"{i:032x}", 8, 8) for i in images)
    return Sample(number, f"a:{number}", refs, (Message("user", (f"what {number}?",)), Message("assistant", ("yes",))))


@given(st.lists(IMAGES, min_size=1, max_size=40), SHARES, SHARES, st.integers(0, 5), st.randoms())
def test_no_image_is_on_two_sides_whatever_the_order(
    rows: list[list[int]], val: float, test: float, seed: int, rng: random.Random
) -> None:
    samples, split = [sample(n, images) for n, images in enumerate(rows)], Split(val=val, test=test, seed=seed)
    sides = divided(samples, split)
    assert sorted(each.id for side in sides.values() for each in side) == list(range(len(rows)))
    held = {name: {i.digest for each in side for i in each.images} for name, side in sides.items()}
    assert not held["train"] & held["val"] and not held["train"] & held["test"] and not held["val"] & held["test"]
    rng.shuffle(samples)
    again = divided(samples, split)
    assert {n: {each.id for each in side} for n, side in again.items()} == {
        n: {each.id for each in side} for n, side in sides.items()
    }


@given(st.lists(st.integers(0, 30), min_size=2, max_size=40), st.integers(0, 5), st.integers(1, 39))
def test_fewer_rows_move_no_image(rows: list[int], seed: int, left: int) -> None:
    """As conditions, limits and stages leave fewer."""
    samples, split = [sample(n, [image]) for n, image in enumerate(rows)], Split(val=0.3, test=0.2, seed=seed)
    whole, some = divided(samples, split), divided(samples[:left], split)
    for name, side in some.items():
        assert {each.id for each in side} <= {each.id for each in whole[name]}


def test_shares_are_what_they_say() -> None:
    samples = [sample(n, [n]) for n in range(4000)]
    sides = divided(samples, Split(val=0.1, test=0.25, seed=3))
    assert 340 < len(sides["val"]) < 460 and 920 < len(sides["test"]) < 1080
    other = divided(samples, Split(val=0.1, test=0.25, seed=4))
    assert {each.id for each in other["test"]} != {each.id for each in sides["test"]}
    more = divided(samples, Split(val=0.3, test=0.25, seed=3))
    assert more["test"] == sides["test"], "another share of validation leaves the test as it is"


def test_a_share_far_from_what_was_asked_for_is_said() -> None:
    samples, held = [sample(n, [n // 2]) for n in range(28)], set[int]()
    for seed in range(40):
        sides = divided(samples, split := Split(val=0.2, seed=seed))
        images, said = len(sides["val"]) // 2, told("all.jsonl", sides, split)
        far = f"; val is {images / 14:.0%} of the images, not the 20% asked for; of few images shares are a matter of "
        assert (far in said) == (images != 3), "three of fourteen are 21%"
        assert ("asked for" in said) == (images != 3)
        held.add(images)
    assert {3, 5} <= held


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            {"split": {"val": 0.7, "test": 0.4}},
            "split: val and test are 1.1 together; must be more than 0 and less than",
        ),
        ({"split": {"seed": 1}}, "data.split: val and test are 0 together; must be more than 0 and less than 1"),
        ({"split": {"val": -0.1}}, "data.split.val is -0.1; must be greater than or equal to 0"),
        ({"split": {"test": 1.5}}, "data.split.test is 1.5; must be less than 1"),
        ({"split": {"part": 0.1}}, "data.split.part is not a key here; allowed: val, test, seed"),
        ({"split": 0.1}, "data.split is 0.1; must be a mapping with the keys val, test, seed or null"),
        (
            {"split": {"val": 0.1}, "val": "val.jsonl"},
            "data: val is 'val.jsonl', and split.val holds a share of train out: one of them is allowed",
        ),
    ],
)
def test_shares_that_cannot_be(data: dict[str, Any], said: str) -> None:
    values = {"model": "m", "data": {"train": "a.jsonl", **data}}
    with pytest.raises(BadInput) as error:
        validate(VqaRecipe, Document("recipe.yaml", values))
    assert said in str(error.value)


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve images with three questions each; the first stands there under two names."""
    folder, rng = tmp_path_factory.mktemp("split"), random.Random(0)
    for number in range(12):
        draw_image(folder / f"{number}.png", rng, (40, 40))
    shutil.copy(folder / "0.png", folder / "copy.png")
    names = [f"{number}.png" for number in range(12)] + ["copy.png"]
    rows = [{"image": name, "question": f"what is at {n}?", "answer": "it"} for name in names for n in range(3)]
    rng.shuffle(rows)
    (folder / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_recipe_holds_images_out(one_file: Path, tiny_qwen3: Path) -> None:
    data = {"train": "all.jsonl", "split": {"val": 0.2, "test": 0.2, "seed": 1}}
    setup, said = VqaSetup(tiny_recipe(tiny_qwen3, data=data), one_file), list[str]()
    assert [setup.lacks(name) for name in ("train", "val", "test")] == [None] * 3
    splits = setup.audit(said.append, ("train", "val", "test")).splits
    assert sum(map(len, splits.values())) == 39 and all(splits.values())
    copies = {name for name, side in splits.items() for each in side if each.images[0].path.stem in ("0", "copy")}
    assert len(copies) == 1, "two files of the same bytes are one image"
    counted = [
        f"{name} {count(len({each.image_key for each in side}), 'image')} with {len(side)} questions"
        for name, side in splits.items()
    ]
    (sentence,) = said
    assert sentence.startswith(f"all.jsonl is divided by its images' content, seed 1: {'; '.join(counted)}")
    few = setup.audit(said.append, ("train", "val"), {"train": 4, "val": 2}).splits
    assert [len(few["train"]), len(few["val"])] == [4, 2] and few["train"][0] in splits["train"]
    assert len({each.image_key for each in few["train"]}) == 2
    assert setup.audit(said.append, ("test",)).splits == {"test": splits["test"]}
    assert next(iter(setup.data_files(splits)["validation data"])) == one_file / "all.jsonl"
    assert "validated on 20% of its images, by their content" in setup.words()[1]


def test_a_side_without_images_is_told(one_file: Path, tiny_qwen3: Path) -> None:
    data = {"train": "all.jsonl", "split": {"val": 0.001, "test": 0.2, "seed": 1}}
    setup, said = VqaSetup(tiny_recipe(tiny_qwen3, data=data), one_file), list[str]()
    assert setup.audit(said.append, ("train", "val")).splits.keys() == {"train"}
    none = (
        "recipe.data.split.val 0.001, seed 1, leaves val none of the 12 images of all.jsonl; allowed: more images, "
        "other shares, another seed"
    )
    assert said[-1] == f"{none}; the run has no val scores"
    best = VqaSetup(tiny_recipe(tiny_qwen3, data=data, best="loss"), one_file)
    with pytest.raises(BadInput) as error:
        best.audit(said.append, ("train", "val"))
    assert str(error.value) == f"recipe.best chooses weights by their validation score, and {none}"
