"""A recipe's task decides which fields it has, and which fields of a plan can be followed."""

from pathlib import Path
from typing import Any

import pytest

from sameday.record.folder import RunFolder
from sameday.spec.classify import ClassifyRecipe
from sameday.spec.document import dump_yaml
from sameday.spec.errors import BadInput
from sameday.spec.load import load_plan, load_recipe, recipe_from
from sameday.spec.plan import Plan, fields_of, foreign
from sameday.spec.recipe import Recipe, differences
from sameday.spec.registry import RECIPES
from sameday.spec.vqa import VqaRecipe

EXAMPLES = Path(__file__).parents[2] / "examples"
VQA = "model: tiny\ndata: {train: train.jsonl}\n"
BDH = "task: classify\nmodel: {kind: vision_bdh}\ndata: {path: cifar}\n"
VIT = "task: classify\nmodel: {kind: vit}\ndata: {path: cifar}\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def recipe(text: str, *sets: str) -> Recipe:
    Path("recipe.yaml").write_text(text)
    return load_recipe(Path("recipe.yaml"), sets)


def recipe_error(text: str, *sets: str) -> str:
    with pytest.raises(BadInput) as error:
        recipe(text, *sets)
    return str(error.value)


def plan_error(text: str, task: str, *sets: str) -> list[str]:
    Path("plan.yaml").write_text(text)
    with pytest.raises(BadInput) as error:
        load_plan(Path("plan.yaml"), sets, RECIPES[task])
    return str(error.value).splitlines()


# The loader


def test_the_task_picks_the_recipe() -> None:
    assert type(recipe(VQA)) is type(recipe(VQA + "task: vqa\n")) is VqaRecipe
    for text in (BDH, VIT):
        made = recipe(text)
        assert type(made) is ClassifyRecipe
        Path("again.yaml").write_text(dump_yaml(made))
        assert load_recipe(Path("again.yaml")) == made == recipe_from(made.model_dump(mode="json"))
    assert {kind.model_fields["task"].default: kind for kind in RECIPES.values()} == RECIPES


@pytest.mark.parametrize("value", ["detect", "3", "[vqa]"])
def test_an_unknown_task(value: str) -> None:
    said = recipe_error(VQA + f"task: {value}\n")
    assert said.startswith("recipe.yaml:3: task is ") and said.endswith("; must be one of 'vqa', 'cot', 'classify'")
    assert recipe_error(VQA, "recipe.task=detect") == (
        "--set recipe.task=detect: task is 'detect'; must be one of 'vqa', 'cot', 'classify'"
    )


def test_fingerprints_of_questions_are_what_they_were() -> None:
    """Run folders are named by them. Folders that earlier releases named by other ones are found too, by their
    recipes: test_fingerprint.py."""
    whole = {
        "data": {"train": "t", "val": "v", "limit": 7},
        "train": "all",
        "order": {"kind": "by_image", "max_per_image": 4},
        "precision": "float32",
        "warmup_steps": 3,
    }
    made = [VqaRecipe.model_validate({"model": "m", **more}) for more in ({"data": {"train": "t"}}, whole)]
    assert [each.fingerprint for each in made] == ["7270d0d7bfeb", "daa7e3f6fb8a"]
    assert load_recipe(EXAMPLES / "kvasir_lora.yaml").fingerprint == "ffcefb0d0649"


# Recipes of classification


def test_defaults_of_the_models() -> None:
    bdh, vit = recipe(BDH), recipe(VIT)
    assert isinstance(bdh, ClassifyRecipe) and isinstance(vit, ClassifyRecipe)
    assert bdh.model.model_dump() == {
        **{"kind": "vision_bdh", "levels": 6, "heads": 6, "width": 192, "latents": 32, "patch": 4},
        **{"attention": "linear", "pool": "class", "dropout": 0.1, "start": "xavier"},
    }
    assert vit.model.model_dump() == {
        **{"kind": "vit", "width": 192, "depth": 12, "heads": 3, "mlp": 4, "patch": 4},
        **{"pool": "class", "dropout": 0.0},
    }
    assert (bdh.dropout, vit.dropout) == (0.1, 0.0)
    assert recipe(BDH + "augment: null\n").identity()["augment"] is None
    colours = recipe(BDH + "normalize_mean: [0.49, 0.48, 0.44]\nnormalize_std: 1\n")
    assert colours.identity()["normalize_mean"] == [0.49, 0.48, 0.44]
    assert differences(bdh, recipe(BDH, "recipe.model.levels=8", "recipe.augment.flip=false")) == [
        "augment.flip: True there, False here",
        "model.levels: 6 there, 8 here",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: classify\ndata: {path: c}\n", "recipe.yaml: model is missing"),
        (
            "task: classify\ndata: {path: c}\nmodel:\n  kind: resnet\n",
            "recipe.yaml:4: model.kind is 'resnet'; must be one of 'vision_bdh', 'vit'",
        ),
        (
            "task: classify\ndata: {path: c}\nmodel:\n  width: 8\n",
            "recipe.yaml:3: model.kind is missing; must be one of 'vision_bdh', 'vit'",
        ),
        (
            "task: classify\ndata: {path: c}\nmodel: vit\n",
            "recipe.yaml:3: model is 'vit'; must be a mapping with the keys kind, ",
        ),
        (
            "task: classify\ndata: {path: c}\nmodel:\n  kind: vit\n  depth: 0\n",
            "recipe.yaml:5: model.depth is 0; must be greater than or equal to 1",
        ),
        (
            "task: classify\ndata: {path: c}\nmodel:\n  kind: vision_bdh\n  pool: max\n",
            "recipe.yaml:5: model.pool is 'max'; must be one of 'class', 'mean'",
        ),
        (
            "task: classify\ndata: {path: c}\nmodel:\n  kind: vit\n  heads: 5\n",
            "recipe.yaml:5: model: width 192 is no multiple of heads 5",
        ),
        (
            "task: classify\ndata: {path: c}\nmodel:\n  kind: vit\n  attention: linear\n",
            "recipe.yaml:5: model.attention is not a key of kind vit, but of vision_bdh",
        ),
        (
            "task: classify\ndata: {path: c}\nmodel:\n  kind: vit\n  deptth: 2\n",
            "recipe.yaml:5: model.deptth is not a key here; nearest: depth",
        ),
        (
            "task: classify\ndata:\n  path: c\n  image_size: 30\nmodel: {kind: vit}\n",
            "recipe.yaml:4: data.image_size 30 is no multiple of model.patch 4",
        ),
        (
            "task: classify\ndata: {path: c}\nmodel:\n  kind: vit\n  patch: 5\n",
            "recipe.yaml:5: data.image_size 32 is no multiple of model.patch 5",
        ),
        (
            "task: classify\ndata:\n  path: c\n  image_size: 264\nmodel: {kind: vit}\n",
            "recipe.yaml:4: data.image_size 264: crops can be made of at most 256; larger needs augment null",
        ),
        (
            VIT + "augment:\n  crop_ratio: [0.001, 1000]\n",
            "recipe.yaml:5: augment.crop_ratio is [0.001, 1000]; must lie between 1/256 and 256",
        ),
        (
            "task: classify\ndata: {path: c}\nmodel: {kind: vit, width: 3, heads: 3, mlp: 1, dropout: 0.1, patch: 8}\n",
            "recipe.yaml:3: model: width 3 times mlp 1 is odd, and units are dropped by pairs of keys",
        ),
        (
            "task: classify\ndata: {path: c}\nmodel: {kind: vision_bdh, width: 6, heads: 6, latents: 5}\n",
            "recipe.yaml:3: model: latents 5 give each head 5 units, and they are rotated in pairs",
        ),
        (
            VIT + "augment:\n  crop_scale: [0.9, 0.1]\n",
            "recipe.yaml:5: augment.crop_scale is [0.9, 0.1]; must be the least and the most, above 0 and at most 1",
        ),
        (
            VIT + "augment:\n  crop_ratio: [1]\n",
            "recipe.yaml:5: augment.crop_ratio is [1]; must be a list of 2 numbers",
        ),
        (VIT + "augment:\n  flip: 1\n", "recipe.yaml:5: augment.flip is 1; must be true or false"),
        (
            VIT + "augment: 3\n",
            "recipe.yaml:4: augment is 3; must be a mapping with the keys crop_scale, crop_ratio, flip or null",
        ),
        (
            VIT + "normalize_mean: [0.5, 0.5]\n",
            "recipe.yaml:4: normalize_mean is [0.5, 0.5]; must be a number or a list of 3 numbers",
        ),
        (VIT + "normalize_std: 0.0\n", "recipe.yaml:4: normalize_std is 0.0; must lie between 0.001 and 1000: pixels"),
        (VIT + "order: by_image\n", "recipe.yaml:4: order is 'by_image'; must be one of 'shuffle', 'listed'"),
        (VIT + "label_smoothing: 1\n", "recipe.yaml:4: label_smoothing is 1; must be less than 1"),
        (VIT + "betas: [0.9, 1.5]\n", "recipe.yaml:4: betas [0.9, 1.5]: each must be at least 0 and less than 1"),
        (VIT + "lora: {r: 4}\n", "recipe.yaml:4: lora is not a key here, but in recipes of task vqa"),
        (VIT + "depth: 3\n", "recipe.yaml:4: depth is not a key here; it belongs to model: model.depth"),
        (VIT + "micro_batch: 3\n", "recipe.yaml:4: micro_batch is a plan field, not a recipe field"),
        (VQA + "augment: null\n", "recipe.yaml:3: augment is not a key here, but in recipes of task classify"),
    ],
)
def test_error_texts(text: str, message: str) -> None:
    said = recipe_error(text)
    assert said.startswith(message) and "\n" not in said


# Plans

TOKENS = "it is for samples of different lengths, in tokens, which task classify does not have: leave it out"


def test_a_plan_field_of_another_task_is_refused_at_its_place() -> None:
    assert plan_error("workers: 2\ntoken_budget: 64\npacking: true\n", "classify") == [
        f"plan.yaml:3: packing is true; {TOKENS}",
        f"plan.yaml:2: token_budget is 64; {TOKENS}",
    ]
    assert plan_error("{}", "vqa", "plan.micro_batch=4") == [
        "--set plan.micro_batch=4: micro_batch is 4; it is for samples that are all of one size, which task vqa does "
        "not have: leave it out"
    ]
    assert plan_error("compile: auto\n", "vqa") == [
        "plan.yaml:1: compile is 'auto'; that is for a model whose compiled layers are compared with eager ones, which "
        "task vqa does not have; allowed: 'none', 'layers'"
    ]
    with pytest.raises(BadInput, match="packing is true"):  # a recipe says it as its class does
        load_plan(None, ["plan.packing=true"], recipe(BDH))


@pytest.mark.parametrize("task", RECIPES)
def test_what_is_at_its_default_is_no_setting(task: str) -> None:
    Path("plan.yaml").write_text(dump_yaml(Plan()))  # with every field written out
    assert load_plan(Path("plan.yaml"), (), RECIPES[task]) == Plan()


@pytest.mark.parametrize("task", RECIPES)
def test_every_field_of_another_task_is_seen(task: str) -> None:
    other: dict[str, Any] = {
        **{"share_images": True, "packing": True, "token_budget": 1, "max_questions": 2, "pad_to_multiple": 2},
        **{"share_text": True, "activation_budget": 0.5},
        **{"checkpointing": "full", "attention": "sdpa", "label_only_logits": True, "eval_token_budget": 1},
        **{"lora_kernel": "triton", "embeddings_on": "host"},
        **{"cache": "pixels", "cache_dir": "elsewhere", "keep_features": True},
        **{"micro_batch": 1, "compile_mode": "max-autotune", "level_kernel": "fused", "cuda_graphs": True},
        **{"images_on": "device", "eval_batch": 1},
    }
    own = fields_of(RECIPES[task])
    assert foreign(Plan(**other), RECIPES[task]).keys() == Plan.model_fields.keys() - own


def test_a_run_folder_names_its_result_by_the_task(tmp_path: Path) -> None:
    for text, name in ((VQA, "adapter"), (BDH, "model")):
        run = RunFolder.open(tmp_path / name, recipe(text), Plan(), tmp_path)
        run.close()
        assert RunFolder.read(run.path).result == run.path / name
