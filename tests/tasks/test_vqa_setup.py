"""Questions through the encoder once, for all who load them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
import worlds
from PIL import Image

from sameday.data.questions.encode import Encoder
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.tasks.vqa.setup import VqaSetup

PLAN = Plan(attention="sdpa")


def test_what_was_checked_is_not_encoded_again(
    tmp_path: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = worlds.write_world(tmp_path, 5, (3, 2, 4), hard=False)
    path = folder / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    Image.new("RGB", (128, 128), "red").save(folder / "images" / "large.png")
    rows.append(rows[0] | {"image": "large.png"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = worlds.tiny_recipe(tiny_qwen3, max_length=60)
    setup = VqaSetup(recipe, folder)
    splits = setup.audit(print).splits
    with pytest.raises(BadInput, match=r"train\.jsonl:10: .*\n.*on_bad=skip leaves them out"):
        setup.drop_too_long(splits)
    many = {**splits, "train": [*splits["train"], *[splits["train"][-1]] * 8]}
    with pytest.raises(BadInput, match=r"\n    9 of this kind: train\.jsonl:10, .* and 6 more\nall 9 are listed in "):
        setup.drop_too_long(many)
    setup = VqaSetup(recipe.model_copy(update={"data": recipe.data.model_copy(update={"on_bad": "skip"})}), folder)
    checked = pickle.loads(pickle.dumps(setup.drop_too_long(splits)))
    assert {name: len(each) for name, each in checked.items()} == {
        name: len(each) - (name == "train") for name, each in splits.items()
    }
    whole = setup.load(PLAN, torch.device("cpu"), splits)

    def never(*_: object) -> None:
        raise AssertionError("encoded again")

    monkeypatch.setattr(Encoder, "encode", never)
    task = setup.load(PLAN, torch.device("cpu"), checked)
    assert task.splits == whole.splits and len(whole.left_out) == 1


def test_a_plan_that_shares_nothing_says_so(tmp_path: Path, tiny_qwen3: Path) -> None:
    recipe = worlds.tiny_recipe(tiny_qwen3)
    worlds.write_world(tmp_path, 3, counts=(2,), hard=False)
    one = worlds.make_task(tmp_path, recipe, Plan(share_images=True)).notes
    said = "plan.share_images shares nothing, because plan.max_questions is 1; null leaves it to plan.token_budget"
    assert [note for note in one if "shares" in note] == [said]
    assert not [note for note in worlds.make_task(tmp_path, recipe, Plan()).notes if "shares" in note]


@pytest.mark.parametrize(("family", "behind"), [("llava", "' '"), ("gemma3", r"'\n'"), ("qwen3_vl", r"'\n'")])
def test_what_follows_an_answer_is_said_as_the_model_has_it(
    tmp_path: Path, tiny_models: dict[str, Path], family: str, behind: str
) -> None:
    """A recipe's words know no model, and name no family's line break."""
    worlds.write_world(tmp_path, 3, counts=(2,), hard=False)
    recipe = worlds.tiny_recipe(tiny_models[family], answer_end="turn")
    (note,) = [each for each in worlds.make_task(tmp_path, recipe, Plan()).notes if "answer_end" in each]
    assert note.startswith(f"answer_end turn: {behind}, which the model's chat template has behind ")
    words = VqaSetup(recipe, tmp_path).words()[1]
    assert "An answer is learned with what the model's chat template puts behind its end." in words
    assert "line break" not in words
