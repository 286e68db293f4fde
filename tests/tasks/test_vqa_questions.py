"""Which questions a recipe takes of its files, and how the model reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds

from sameday.spec.errors import BadInput, NothingToLearn
from sameday.spec.plan import Plan
from sameday.tasks.vqa.setup import VqaSetup

PLAN = Plan(attention="sdpa")
COMMON = "train and val have 1 image in common: scores of val will be too good"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve questions of stages 1 to 3, in turn, as yes/no and count; the first four are validated on."""
    folder = worlds.write_world(tmp_path_factory.mktemp("questions"), 5, (4, 4, 4), hard=False, sizes=((48, 48),))
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {"stage": 1 + number % 3, "type": ("yes/no", "count")[number % 2]}
    for name, part in (("train", rows), ("val", rows[:2])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    bare = [{key: row[key] for key in ("image", "question", "answer")} for row in rows]
    (folder / "bare.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bare))
    return folder


def setup(home: Path, model: Path, **changes: Any) -> VqaSetup:
    data = {"train": "train.jsonl", "val": "val.jsonl", "image_root": "images", **changes.pop("data", {})}
    return VqaSetup(worlds.tiny_recipe(model, data=data, **changes), home)


def test_conditions_hold_for_all_files(home: Path, tiny_qwen3: Path) -> None:
    said: list[str] = []
    audited = setup(home, tiny_qwen3, data={"where": {"stage": 2, "type": "count"}}).audit(said.append)
    assert audited.sizes == {"train": 2, "val": 1}
    assert said == [
        "train.jsonl: 2 of 12 questions: where stage is 2 and type is count",
        "val.jsonl: 1 of 2 questions: where stage is 2 and type is count",
        COMMON,
    ]


def test_a_file_of_which_nothing_is_left(home: Path, tiny_qwen3: Path) -> None:
    said: list[str] = []
    third = setup(home, tiny_qwen3, data={"where": {"stage": 3}})
    assert third.audit(said.append).sizes == {"train": 4}
    assert said[1] == (
        "val.jsonl: none of 2 questions: where stage is 3; recipe.data.where.stage is 3, which no line of val.jsonl "
        "has; stage is 1 (1), 2 (1) there; the run has no val scores"
    )
    with pytest.raises(NothingToLearn, match=r"^val\.jsonl: none of 2 questions"):
        third.audit(said.append, ["val"])
    with pytest.raises(
        BadInput, match=r"^recipe\.best chooses weights by their validation score, and val\.jsonl: none"
    ):
        setup(home, tiny_qwen3, data={"where": {"stage": 3}}, best="loss").audit(said.append)
    with pytest.raises(NothingToLearn, match=r"^train\.jsonl: none of 12 questions: where stage is 8; .* there$"):
        setup(home, tiny_qwen3, data={"where": {"stage": 8}}).audit(said.append)
    with pytest.raises(
        BadInput, match=r"^recipe\.data\.where\.stage is 8, which no line of train\.jsonl has; stage is"
    ):
        setup(home, tiny_qwen3, data={"where": {"stage": [1, 8]}}).audit(said.append)


def test_tokens_of_images_have_no_place_in_a_prompt(home: Path, tiny_qwen3: Path) -> None:
    token = VqaSetup(worlds.tiny_recipe(tiny_qwen3), home).family.markers.special[0]
    prompt = {"by": "type", "templates": {"yes/no": f"{token} {{question}}", "count": "<image> {question}"}}
    with pytest.raises(BadInput) as caught:
        setup(home, tiny_qwen3, prompt=prompt, system_prompt=f"a {token}").audit(print)
    assert str(caught.value).splitlines() == [
        f"recipe.system_prompt holds {token}, which would become a real token",
        f"recipe.prompt.templates.yes/no holds {token}, which would become a real token",
        "recipe.prompt.templates.count holds <image>: images stay where each line has them; remove it",
    ]


def test_the_model_reads_the_prompt_and_people_the_question(home: Path, tiny_qwen3: Path) -> None:
    said: list[str] = []
    prompt = {"by": "type", "templates": {"yes/no": "is there a {question}", "colour": "what {question}"}}
    chosen = setup(home, tiny_qwen3, prompt=prompt)
    samples = chosen.audit(said.append).splits["train"]
    assert said == [COMMON, "recipe.prompt.templates.colour: no question has the type colour"]
    plain = setup(home, tiny_qwen3).audit(print).splits["train"]
    assert [each.question for each in samples] == [each.question for each in plain]
    tokenizer = chosen._encoder.tokenizer
    for sample, same in zip(samples, plain, strict=True):
        text = tokenizer.decode(chosen._encoder.encode(sample).tokens.tolist())
        asked = f"is there a {same.question}" if sample.type == "yes/no" else same.question
        assert f"{asked}<|im_end|>" in text and sample.prompt == asked
    what, data = chosen.words()
    assert "A question is asked as “{question}”, or one of 2 by type." in data and what


def test_a_changed_table_is_noticed(home: Path, tiny_qwen3: Path) -> None:
    rows = [json.loads(line) for line in (home / "bare.jsonl").read_text().splitlines()]
    questions = list(dict.fromkeys(" ".join(row["question"].split()) for row in rows))
    recipe = {"data": {"train": "bare.jsonl", "val": None}, "categories": {"table": "table.json"}}

    def digests(kind: str) -> dict[str, str]:
        table = [{"question": q, "stage": 1 + n % 2, "type": kind if n == 0 else "a"} for n, q in enumerate(questions)]
        (home / "table.json").write_text(json.dumps(table))
        made = setup(home, tiny_qwen3, **{key: dict(value) for key, value in recipe.items()})
        samples = made.audit(print, ["train"]).splits
        assert {each.stage for each in samples["train"]} == {1, 2}
        return made.load(PLAN, torch.device("cpu"), samples).digests()

    one, other = digests("a"), digests("b")
    assert {name for name in one if one[name] != other[name]} == {"categories"}
