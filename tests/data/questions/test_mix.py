"""Sets that are mixed: each question as often as its set's weight says, the same in every run and after a resume."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from worlds import tiny_recipe, write_world

from sameday.commands.launch import train_from_files
from sameday.data.order import Place, epoch_size, epoch_steps, mixed_epoch_steps
from sameday.spec.document import Document
from sameday.spec.errors import BadInput, RunStopped
from sameday.spec.explain import validate
from sameday.spec.order import Order
from sameday.spec.registry import RECIPES
from sameday.spec.vqa import VqaRecipe
from sameday.tasks.vqa.setup import VqaSetup

ORDERS = st.sampled_from(
    [Order(kind="shuffle"), Order(kind="by_image"), Order(kind="listed"), Order(kind="curriculum")]
)
WEIGHTS = st.lists(st.sampled_from([0.1, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0]), min_size=1, max_size=3)


def places(counts: list[int]) -> tuple[list[Place], list[int]]:
    """Sets of so many questions, three of which are about one image."""
    made = [Place(1000 * s + n, f"{s}/{n // 3}", n % 3) for s, count in enumerate(counts) for n in range(count)]
    return made, [place.id // 1000 for place in made]


@given(WEIGHTS, st.lists(st.integers(1, 14), min_size=3, max_size=3), ORDERS, st.integers(1, 8), st.integers(0, 3))
def test_each_question_comes_as_often_as_its_weight(
    weights: list[float], counts: list[int], order: Order, batch: int, seed: int
) -> None:
    counts = counts[: len(weights)]
    made, sets = places(counts)
    total, epochs = Counter[int](), 6
    for epoch in range(epochs):
        steps = mixed_epoch_steps(made, sets, weights, order, batch, seed, epoch)
        assert steps == mixed_epoch_steps(made, sets, weights, order, batch, seed, epoch)
        assert [len(step) for step in steps[:-1]] == [batch] * (len(steps) - 1)
        seen = Counter(i for step in steps for i in step)
        for number, weight in enumerate(weights):
            mine = [seen[i] for i, part in enumerate(sets) if part == number]
            assert sum(mine) == epoch_size(counts[number], weight) and max(mine) - min(mine) <= 1
        total += seen
    for number in range(len(weights)):
        mine = [total[i] for i, part in enumerate(sets) if part == number]
        assert max(mine) - min(mine) <= 1, "over epochs all are seen equally often"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), ORDERS, st.integers(1, 5))
def test_weights_of_one_are_no_weights(counts: list[int], order: Order, batch: int) -> None:
    made, sets = places(counts)
    mixed = mixed_epoch_steps(made, sets, [1.0] * len(counts), order, batch, 1, 2)
    assert mixed == epoch_steps(made, order, batch, 1, 2)


def test_a_part_of_a_set_is_whole_images() -> None:
    """Sharing needs an image's questions in one epoch."""
    made, sets = places([60])
    seen = {
        made[i].image for step in mixed_epoch_steps(made, sets, [0.25], Order(kind="shuffle"), 8, 0, 3) for i in step
    }
    assert len(seen) <= 60 // 4 // 3 + 1


def problem(data: dict[str, Any], task: str = "vqa") -> str:
    with pytest.raises(BadInput) as error:
        validate(RECIPES[task], Document("recipe.yaml", {"task": task, "model": "m", "data": {"train": "a", **data}}))
    return str(error.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"mix": [{"train": "b", "weight": -2}]}, "data.mix[0].weight is -2; must be greater than 0"),
        ({"mix": [{"train": "b", "weight": 0}]}, "data.mix[0].weight is 0; must be greater than 0"),
        ({"weight": 0.0}, "data.weight is 0.0; must be greater than 0"),
        ({"weight": 5000}, "must be less than or equal to 1000: an epoch would see each question more than a thousand"),
        ({"mix": [{"weight": 2}]}, "data.mix[0].train is missing"),
        ({"mix": [{"train": "b", "limit": 3}]}, "data.mix[0].limit is not a key here"),
        (
            {"mix": {"train": "b"}},
            "data.mix is {'train': 'b'}; must be a list of mappings with the keys train, val, test",
        ),
        ({"mix": [{"train": "b", "split": {"val": 0.6, "test": 0.6}}]}, "val and test are 1.2 together; must be more"),
        (
            {"where": {"stage": 1}, "mix": [{"train": "b", "where": {"stage": 2}}]},
            "mix[0].where.stage is 2, and where.stage is 1: no question is both",
        ),
    ],
)
def test_mixes_that_cannot_be(data: dict[str, Any], said: str) -> None:
    assert said in problem(data)


def test_whole_images_are_not_weighed() -> None:
    said = problem({"mix": [{"train": "b", "weight": 2.0}]}, "cot")
    assert "data.mix[0].weight is 2, which takes some of an image's questions more often than others" in said


@pytest.fixture(scope="module")
def two_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mix")
    write_world(folder / "one", 1, counts=(4, 3, 2), hard=False)
    write_world(folder / "two", 2, counts=(3, 3), hard=False)
    rows = [json.loads(line) for line in (folder / "two/train.jsonl").read_text().splitlines()]
    renamed = [
        {"img_name": r["image"], "query": r["question"], "answer": r["answer"], "stage": r["stage"]} for r in rows
    ]
    (folder / "two/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in renamed))
    return folder


MIX: dict[str, Any] = {
    "train": "one/train.jsonl",
    "val": "one/val.jsonl",
    "image_root": "one/images",
    "mix": [
        {
            "train": "two/train.jsonl",
            "image_root": "two/images",
            "fields": {"image": "img_name", "question": "query"},
            "weight": 1.5,
        }
    ],
}


def test_a_set_of_which_nothing_is_left(two_sets: Path, tiny_qwen3: Path) -> None:
    def read(**data: Any) -> list[str]:
        said: list[str] = []
        VqaSetup(tiny_recipe(tiny_qwen3, data=data), two_sets).audit(said.append, ("train",))
        return said

    two = {"train": "two/train.jsonl", "image_root": "two/images", "fields": {"image": "img_name", "question": "query"}}
    one = {"train": "one/train.jsonl", "image_root": "one/images"}
    every = {"stage": [1, 2, 3]}
    skipped = "two/train.jsonl: 6 of 6 lines are skipped: stage is 1 or 2 or 3; "
    mixed = "a mix of 2 sets: one/train.jsonl 9 questions, weight 1: 9 an epoch; two/train.jsonl has no question left, "
    mixed += "and nothing of it is trained on"
    assert read(**one, mix=[{**two, "skip": every}]) == [f"{skipped}recipe.data.mix[0].skip leaves no question", mixed]
    none, last = read(**one, mix=[{**two, "where": {"stage": [7]}}])
    there = "recipe.data.mix[0].where.stage is 7, which no line of two/train.jsonl has; stage is "
    assert none.startswith(f"two/train.jsonl: none of 6 questions: where stage is 7; {there}") and last == mixed
    for data, sentence in (
        ({**two, "skip": every}, f"{skipped}recipe.data.skip leaves no question"),
        ({**one, "mix": [{**two, "where": {"x": [7]}}]}, "recipe.data.mix[0].where.x: no line of two/train.jsonl has"),
        (
            {**one, "mix": [{**two, "skip": {"anwser": ["nan"]}}]},
            "recipe.data.mix[0].skip.anwser: no line of two/train.jsonl has this field; there are answer, image, ",
        ),
        ({**one, "mix": [{**two, "fields": {"stage": "x"}}]}, "recipe.data.mix[0].fields.stage is 'x', which no line"),
    ):
        with pytest.raises(BadInput) as error:
            read(**data)
        assert sentence in str(error.value)


def test_of_sets_that_cannot_be_read_nothing_is_said(two_sets: Path, tiny_qwen3: Path) -> None:
    """A file that is not there was said to have no question left."""
    data = MIX | {"mix": [{"train": "gone.jsonl", "image_root": "one/images"}]}
    said: list[str] = []
    with pytest.raises(BadInput, match=r"gone\.jsonl does not exist"):
        VqaSetup(tiny_recipe(tiny_qwen3, data=data), two_sets).audit(said.append, ("train",))
    assert said == []


def test_what_is_wrong_with_the_recipe_is_told_once(two_sets: Path, tiny_qwen3: Path) -> None:
    """Each file told it again."""
    (two_sets / "double.csv").write_text("question,stage\nA?,1\na?,2\n")
    recipe = tiny_recipe(tiny_qwen3, data=MIX, categories={"table": "double.csv"})
    with pytest.raises(BadInput) as error:
        VqaSetup(recipe, two_sets).audit(print)
    assert str(error.value).count("the question 'a?' stands in the table twice") == 1


def test_every_set_says_why_it_has_no_question_of_a_split(two_sets: Path, tiny_qwen3: Path) -> None:
    share = {"image_root": "one/images", "train": "one/train.jsonl", "val": None, "split": {"val": 0.001}}
    said: list[str] = []
    VqaSetup(tiny_recipe(tiny_qwen3, data=share | {"mix": [share]}), two_sets).audit(said.append)
    allowed = "leaves val none of the 3 images of one/train.jsonl; allowed: more images, other shares, another seed"
    assert said[-1] == (
        f"recipe.data.split.val 0.001, seed 0, {allowed}; recipe.data.mix[0].split.val 0.001, seed 0, {allowed}; the "
        "run has no val scores"
    )


def test_sets_are_read_together(two_sets: Path, tiny_qwen3: Path) -> None:
    setup, said = VqaSetup(tiny_recipe(tiny_qwen3, data=MIX), two_sets), list[str]()
    audited = setup.audit(said.append, ("train", "val"))
    train = audited.splits["train"]
    assert len(train) == 15 and len({each.id for each in train}) == 15 and audited.sizes["train"] == 9 + 9
    assert [each.set for each in train] == [0] * 9 + [1] * 6
    assert said == [
        "a mix of 2 sets: one/train.jsonl 9 questions, weight 1: 9 an epoch; two/train.jsonl 6 questions, weight 1.5: "
        "9 an epoch",
        "train and val have 3 images in common: scores of val will be too good",
    ]
    alone = VqaSetup(tiny_recipe(tiny_qwen3, data={k: v for k, v in MIX.items() if k != "mix"}), two_sets)
    once = list[str]()
    alone.audit(once.append, ("train", "val"))
    assert once == ["train and val have 3 images in common: scores of val will be too good"], "plain files too"
    assert audited.counts == {"train": {"one/train.jsonl": 9, "two/train.jsonl": 6}, "val": {"one/train.jsonl": 9}}
    files = setup.data_files(audited.splits)["training data"]
    assert list(files)[:2] == [two_sets / "one/train.jsonl", two_sets / "two/train.jsonl"]
    assert "mixed with two/train.jsonl (weight 1.5)" in setup.words()[1]
    few = setup.audit(said.append, ("train",), {"train": 4}).splits["train"]
    assert [each.set for each in few] == [0, 0, 1, 1], "each set has its part of a trial"
    stage = VqaSetup(tiny_recipe(tiny_qwen3, data=MIX | {"where": {"stage": [1]}}), two_sets)
    assert {each.stage for each in stage.audit(said.append, ("train",)).splits["train"]} == {1}, (
        "conditions are for all"
    )


def test_problems_of_all_sets_are_told_at_once(two_sets: Path, tiny_qwen3: Path) -> None:
    (two_sets / "bad.jsonl").write_text('{"image": "0.png", "question": "q?"}\n')
    data = MIX | {
        "val": "none.jsonl",
        "mix": [{"train": "bad.jsonl", "image_root": "one/images"}, {"train": "two/train.jsonl", "image_root": "no"}],
    }
    with pytest.raises(BadInput) as error:
        VqaSetup(tiny_recipe(tiny_qwen3, data=data), two_sets).audit(lambda _: None)
    said = str(error.value)
    assert "none.jsonl does not exist" in said and "bad.jsonl:1: has no 'answer'" in said
    assert f"recipe.data.mix[1].image_root is no, and {two_sets}/no is not a folder" in said


@pytest.mark.slow
def test_a_mix_trains_and_goes_on_where_it_stopped(two_sets: Path, tiny_qwen3: Path, own_signals: None) -> None:
    recipe = tiny_recipe(tiny_qwen3, data=MIX, effective_batch=4, num_epochs=2, lora={"r": 4, "dropout": 0.1})
    (two_sets / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    sets, scores = ["plan.device=cpu", "plan.share_images=true"], {}
    scores["whole"] = train_from_files(two_sets / "recipe.yaml", None, two_sets / "whole", sets)
    with pytest.raises(RunStopped):
        train_from_files(two_sets / "recipe.yaml", None, two_sets / "parts", sets, stop_after=6)  # in the second epoch
    scores["parts"] = train_from_files(two_sets / "recipe.yaml", None, two_sets / "parts", sets)
    assert scores["whole"] == scores["parts"]
    assert json.loads((two_sets / "whole/data.json").read_text())["train"] == {
        "one/train.jsonl": 9,
        "two/train.jsonl": 6,
    }
    weights = [(two_sets / name / "adapter/adapter_model.safetensors").read_bytes() for name in scores]
    assert weights[0] == weights[1]


def test_a_recipe_without_a_mix_is_what_it_was() -> None:
    plain = VqaRecipe.model_validate({"model": "m", "data": {"train": "a"}})
    written = VqaRecipe.model_validate({"model": "m", "data": {"train": "a", "mix": [], "weight": 1}})
    mixed = VqaRecipe.model_validate({"model": "m", "data": {"train": "a", "mix": [{"train": "./b"}]}})
    assert plain.fingerprint == written.fingerprint != mixed.fingerprint
    same = VqaRecipe.model_validate({"model": "m", "data": {"train": "a", "mix": [{"train": "b", "weight": 1.0}]}})
    assert mixed.fingerprint == same.fingerprint and "./b" in list(mixed.paths())
