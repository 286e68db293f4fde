"""A fingerprint names what is asked for: not how it is written, and not which release reads it."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from sameday.record import checkpoint
from sameday.record.folder import RunFolder, default_path
from sameday.spec.classify import ClassifyRecipe
from sameday.spec.document import dump_yaml
from sameday.spec.errors import BadInput
from sameday.spec.identity import as_before
from sameday.spec.load import load_recipe, load_recorded_recipe, recipe_from
from sameday.spec.lora import Lora
from sameday.spec.order import Order
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe, Strict, differences
from sameday.spec.vision import BdhModel
from sameday.spec.vlm import Data
from sameday.spec.vqa import VqaRecipe


def vqa(kind: type[VqaRecipe] = VqaRecipe, **values: Any) -> VqaRecipe:
    return kind.model_validate({"model": "tiny", "data": {"train": "train.jsonl"}, **values})


def classify(**values: Any) -> ClassifyRecipe:
    fields = {"task": "classify", "model": {"kind": "vit"}, "data": {"path": "cifar"}}
    return ClassifyRecipe.model_validate(fields | values)


# A later release, which has more fields than this one


class LaterLora(Lora):
    scaling: str = "plain"


class LaterOrder(Order):
    reverse: bool = False


class LaterData(Data):
    shard: int | None = None


class More(Strict):
    amount: float = 0.0


class LaterRecipe(VqaRecipe):
    lora: LaterLora = Field(default_factory=LaterLora)
    order: LaterOrder = Field(default_factory=LaterOrder)
    data: LaterData
    more: More = Field(default_factory=More)
    less: More | None = None


WRITTEN: list[dict[str, Any]] = [
    {},
    {"seed": 3, "lora": {"r": 8, "target_modules": ["q_proj"]}, "order": {"kind": "by_image", "max_per_image": 2}},
    {"data": {"train": "t", "val": "v", "limit": 4}, "train": "all"},
]


@pytest.mark.parametrize("values", WRITTEN)
def test_a_field_that_a_release_adds_changes_no_fingerprint(values: dict[str, Any]) -> None:
    before, after = vqa(**values), vqa(LaterRecipe, **values)
    assert before.fingerprint == after.fingerprint
    assert differences(before, before) == differences(after, after) == []
    assert after.fingerprint != vqa(LaterRecipe, **values | {"more": {"amount": 0.5}}).fingerprint
    assert after.fingerprint != vqa(LaterRecipe, **values | {"less": {}}).fingerprint


def test_what_is_written_out_is_what_is_left_out() -> None:
    assert vqa().identity() == {"task": "vqa", "model": "tiny", "data": {"train": "train.jsonl"}}
    assert classify().identity() == {"task": "classify", "model": {"kind": "vit"}, "data": {"path": "cifar"}}
    for recipe in (vqa(), classify()):
        assert recipe_from(recipe.model_dump(mode="json")).fingerprint == recipe.fingerprint
    assert vqa(lora={"alpha": 16}).fingerprint == vqa(lora={"alpha": 16.0}).fingerprint != vqa().fingerprint
    assert vqa(name="other").fingerprint == vqa().fingerprint
    assert vqa(train="all", lora={"r": 9}).fingerprint == vqa(train="all").fingerprint
    assert classify(augment=None).fingerprint != classify().fingerprint != classify(augment={"flip": False}).fingerprint


def test_paths_that_name_one_file_are_one() -> None:
    for path in ("t.jsonl", "./t.jsonl", "a/../t.jsonl", ".//t.jsonl"):
        fields = {"train": path, "val": path, "test": path, "image_root": path}
        one = vqa(data=fields, model=path, start_adapter=path)
        other = vqa(data=dict.fromkeys(fields, "t.jsonl"), model="t.jsonl", start_adapter="t.jsonl")
        assert one.fingerprint == other.fingerprint and differences(one, other) == []
        assert classify(data={"path": path}).fingerprint == classify(data={"path": "t.jsonl"}).fingerprint
        assert list(one.paths()) == [path] * 6, "what is opened is what was written"
    assert vqa(data={"train": "t", "image_root": "./"}).fingerprint == vqa(data={"train": "t"}).fingerprint
    assert vqa(model="org/name").fingerprint != vqa(model="org-name").fingerprint
    assert vqa(system_prompt="./a").fingerprint != vqa(system_prompt="a").fingerprint, "text is no path"


# Differences

PATHS = st.sampled_from(["t", "./t", "a/../t", "u"])
NUMBERS = st.sampled_from([0, 0.0, -0.0, 0.1, 0.5])
VQA = st.fixed_dictionaries(
    {"model": PATHS, "data": st.fixed_dictionaries({"train": PATHS}, optional={"val": PATHS | st.none()})},
    optional={
        "name": st.sampled_from(["a", "b"]),
        "train": st.sampled_from(["lora", "all"]),
        "lora": st.fixed_dictionaries(
            {},
            optional={
                "r": st.sampled_from([4, 8]),
                "alpha": st.sampled_from([8, 8.0, 4]),
                "dropout": NUMBERS,
                "target_modules": st.sampled_from([["q_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]]),
            },
        ),
        "order": st.sampled_from(
            ["shuffle", {"kind": "shuffle"}, "by_image", {"kind": "by_image", "max_per_image": 1}]
        ),
        "warmup_steps": st.sampled_from([None, 0]),
        "weight_decay": NUMBERS,
        "betas": st.sampled_from([[0.9, 0.999], [0.9, 0], [0.9, 0.0]]),
        "max_grad_norm": st.sampled_from([None, 1, 1.0]),
    },
)
CLASSIFY = st.fixed_dictionaries(
    {
        "task": st.just("classify"),
        "model": st.fixed_dictionaries({"kind": st.sampled_from(["vit", "vision_bdh"])}, optional={"dropout": NUMBERS}),
        "data": st.fixed_dictionaries({"path": PATHS}),
    },
    optional={
        "augment": st.sampled_from([None, {}, {"flip": True}, {"flip": False}]),
        "normalize_mean": st.sampled_from([0.5, 0, [0.5, 0.5, 0.5], [0, 0.0, 0.5]]),
    },
)


@given(there=VQA | CLASSIFY, here=VQA | CLASSIFY)
def test_differences_are_listed_exactly_where_fingerprints_differ(there: dict[str, Any], here: dict[str, Any]) -> None:
    one, other = (recipe_from({"task": "vqa"} | values) for values in (there, here))
    lines = differences(one, other)
    assert (one.fingerprint == other.fingerprint) == (lines == [])
    assert len(lines) == len(differences(other, one)) and lines == sorted(set(lines))
    assert differences(one, one) == []


def test_differences_have_whole_values() -> None:
    names = [f"layer_{index}_with_a_long_name" for index in range(20)]
    assert differences(vqa(), vqa(lora={"target_modules": names}, data={"train": "./new.jsonl"}, warmup_steps=0)) == [
        "data.train: 'train.jsonl' there, './new.jsonl' here",
        f"lora.target_modules: ['q_proj', 'k_proj', 'v_proj', 'o_proj'] there, {names!r} here",
        "warmup_steps: None there, 0 here",
    ]
    assert differences(classify(augment=None), classify(augment={"flip": False})) == [
        "augment: None there, {'crop_scale': [0.8, 1.0], 'crop_ratio': [0.75, 1.3333333333333333], 'flip': False} here",
    ]
    assert differences(vqa(lora={"r": 9}), vqa(train="all", lora={"r": 9})) == [
        "lora: {'r': 9, 'alpha': 8.0, 'dropout': 0.0, 'target_modules': ['q_proj', 'k_proj', 'v_proj', 'o_proj'], "
        "'rslora': False, 'dora': False} there, not used here",
        "train: 'lora' there, 'all' here",
    ]
    lines = differences(classify(), classify(model={"kind": "vision_bdh"}))
    assert "model.kind: 'vit' there, 'vision_bdh' here" in lines and "model.depth: 12 there, not used here" in lines
    assert "task: 'vqa' there, 'classify' here" in differences(vqa(), classify())


# Runs that an earlier release made


def recorded(folder: Path, recipe: Recipe) -> Path:
    """A run with a checkpoint, whose recorded fingerprint no release of today gives."""
    run = RunFolder.open(folder, recipe, Plan(), folder.parent)
    run.append({"step": 1})
    run.close()
    state = {"step": 1, "fingerprint": "0123456789ab", "recipe": recipe.model_dump(mode="json"), "digests": {}}
    checkpoint.write(run.checkpoints, "step-000001", lambda aside: (aside / checkpoint.OPTIMIZER).touch(), state)
    return folder


def test_recorded_fingerprints_are_not_compared(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "run", vqa())
    newest = next(checkpoint.candidates(folder / "checkpoints", vqa(data={"train": "./train.jsonl"}), print))
    assert newest.step == 1
    again = RunFolder.open(folder, vqa(model="./tiny"), Plan(), tmp_path)
    again.close()
    assert again.resumed
    with pytest.raises(BadInput, match="seed: 0 there, 1 here"):
        RunFolder.open(folder, vqa(seed=1), Plan(), tmp_path)


def test_a_run_that_an_earlier_release_named_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = vqa(name="mine")
    usual = Path("runs") / f"mine-{recipe.fingerprint}"
    assert default_path(recipe) == usual
    Path("runs/mine-ffffffffffff").mkdir(parents=True)  # nothing in it
    for name, text in (("eeeeeeeeeeee", "model: [\n"), ("dddddddddddd", "no_field: 1\n"), ("cccccccccccc", "\0")):
        Path(f"runs/mine-{name}").mkdir()
        Path(f"runs/mine-{name}/recipe.yaml").write_text(text)
    recorded(Path("runs/mine-bbbbbbbbbbbb"), vqa(name="mine", seed=1))
    recorded(Path("runs/mine-000000000000-copy"), recipe)
    recorded(Path("runs/other-000000000000"), recipe)
    Path("runs/mine-999999999999").write_text("a file")
    assert default_path(recipe) == usual
    earlier = recorded(Path("runs/mine-aaaaaaaaaaaa"), recipe)
    assert default_path(recipe) == earlier
    os.utime(recorded(Path("runs/mine-111111111111"), recipe) / "environment.json", (1, 1))
    assert default_path(recipe) == earlier, "of several the one that was started last"
    recorded(usual, recipe)
    assert default_path(recipe) == usual


# Defaults

SHARED = {
    **{"name": "run", "precision": "bf16", "effective_batch": 16, "optimizer": "adamw", "learning_rate": 5e-05},
    **{"weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-08, "max_grad_norm": 1.0, "schedule": "linear"},
    **{"warmup_ratio": 0.0, "warmup_steps": None, "num_epochs": 3, "max_steps": None, "seed": 0},
    "best": None,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "vqa": {
        **SHARED,
        **{"task": "vqa", "model": "m", "revision": None, "start_adapter": None, "train": "lora"},
        "lora": {
            **{"r": 4, "alpha": 8, "dropout": 0.0},
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            **{"rslora": False, "dora": False},
        },
        **{"train_vision": False, "learning_rates": {}},
        **{"base_format": "precision", "double_quant": False},
        "data": {
            **{
                "train": "t",
                "val": None,
                "test": None,
                "image_root": ".",
                "where": {},
                "skip": {},
                "fields": {},
                "split": None,
                "weight": 1.0,
                "mix": [],
                "limit": None,
            },
            "on_bad": "stop",
        },
        **{"stage_before": None, "categories": None, "prompt": None, "stages": []},
        **{"system_prompt": None, "min_pixels": None, "max_pixels": None, "image_backend": "pil", "max_length": None},
        "order": {"kind": "shuffle", "within_image": "listed", "max_per_image": None, "within_stage": "shuffle"},
        "loss_weight": "token",
        "answer_end": "end_token",
        "evaluate": None,
    },
    "classify": {
        **SHARED,
        "task": "classify",
        "model": {
            **{"kind": "vit", "width": 192, "heads": 3, "patch": 4, "pool": "class", "dropout": 0.0},
            **{"depth": 12, "mlp": 4},
        },
        "data": {"path": "p", "val": 0, "split_seed": 0, "image_size": 32, "limit": None},
        "augment": {"crop_scale": [0.8, 1.0], "crop_ratio": [0.75, 4 / 3], "flip": True},
        **{"normalize_mean": 0.5, "normalize_std": 0.5, "order": "shuffle", "label_smoothing": 0.0},
    },
}
BDH = {
    **{"kind": "vision_bdh", "width": 192, "heads": 6, "patch": 4, "pool": "class", "dropout": 0.1},
    **{"levels": 6, "latents": 32, "attention": "linear"},
}
LATER = {"start": ("xavier", "fan_in")}
"""Fields of it whose default is not what was meant before there was the field, each with both."""


def test_defaults_are_what_they_were() -> None:
    """A default may never change: a recipe that leaves the field out would silently ask for another model, under the
    fingerprint that it has. A new behaviour is a new value of a field, or a new field whose default is the old
    behaviour, or says what that was: then a recipe that leaves it out has another fingerprint. So a line may be added
    here, and none may be altered."""
    made = {
        "vqa": VqaRecipe.model_validate({"model": "m", "data": {"train": "t"}}),
        "classify": ClassifyRecipe.model_validate({"model": {"kind": "vit"}, "data": {"path": "p"}}),
    }
    assert {task: recipe.model_dump(mode="json") for task, recipe in made.items()} == DEFAULTS
    assert BdhModel().model_dump(mode="json") == BDH | {name: default for name, (default, _) in LATER.items()}
    assert as_before(BdhModel()).model_dump(mode="json") == BDH | {name: was for name, (_, was) in LATER.items()}


def test_a_default_that_is_not_what_was_meant_before_has_another_fingerprint(tmp_path: Path) -> None:
    """Those of the first two lines were written down by a release without `start`."""
    assert classify(model={"kind": "vision_bdh", "start": "fan_in"}).fingerprint == "f863e5b2ff8e"
    (tmp_path / "recipe.yaml").write_text("task: classify\nmodel: {kind: vision_bdh}\ndata: {path: cifar}\n")
    assert load_recorded_recipe(tmp_path / "recipe.yaml").fingerprint == "f863e5b2ff8e"
    new = load_recipe(tmp_path / "recipe.yaml")
    assert new.fingerprint == classify(model={"kind": "vision_bdh", "start": "xavier"}).fingerprint != "f863e5b2ff8e"
    assert new.identity()["model"] == {"kind": "vision_bdh", "start": "xavier"}
    (tmp_path / "recipe.yaml").write_text(dump_yaml(new))
    assert load_recorded_recipe(tmp_path / "recipe.yaml") == new, "what this release wrote says what it means"
    assert as_before(classify()) == classify() and as_before(vqa()) == vqa()


def test_a_written_recipe_keeps_its_fingerprint(tmp_path: Path) -> None:
    for recipe in (vqa(lora={"alpha": 3.5}), classify(normalize_mean=[0.1, 0.2, 0.3])):
        (tmp_path / "recipe.yaml").write_text(dump_yaml(recipe))
        assert load_recipe(tmp_path / "recipe.yaml").fingerprint == recipe.fingerprint
