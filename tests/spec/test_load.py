"""Files become recipes and plans, and what is wrong with a file is said in one go, each at its place."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sameday.spec.document import dump_yaml
from sameday.spec.errors import BadInput
from sameday.spec.load import load_plan, load_recipe, load_recorded_recipe, load_specs, resolve_model, resolve_path
from sameday.spec.lora import Lora
from sameday.spec.order import Order
from sameday.spec.plan import Plan
from sameday.spec.recipe import differences
from sameday.spec.sets import split_sets
from sameday.spec.vqa import VqaRecipe

EXAMPLES = Path(__file__).parents[2] / "examples"
MINIMAL = "model: tiny\ndata: {train: train.jsonl}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(text: str, *sets: str) -> VqaRecipe:
    Path("recipe.yaml").write_text(text)
    return load_recipe(Path("recipe.yaml"), sets)


def recipe_error(text: str, *sets: str) -> str:
    with pytest.raises(BadInput) as error:
        recipe(text, *sets)
    return str(error.value)


def plan_error(text: str, *sets: str) -> str:
    Path("plan.yaml").write_text(text)
    with pytest.raises(BadInput) as error:
        load_plan(Path("plan.yaml"), sets)
    return str(error.value)


@pytest.mark.parametrize("text", ["5e-5", "5E-5", "5.0e-5", "0.5e-4", "+5e-5", "0.00005"])
def test_every_way_to_write_a_number_is_a_number(folder: Path, text: str) -> None:
    assert recipe(f"{MINIMAL}learning_rate: {text}").learning_rate == 5e-5
    assert recipe(MINIMAL, f"recipe.learning_rate={text}").learning_rate == 5e-5


def test_settings_are_put_over_the_file(folder: Path) -> None:
    text = MINIMAL + "order: shuffle\nlora: {r: 2}\n"
    got = recipe(text, "recipe.order.kind=by_image", "recipe.order.max_per_image=4", "recipe.lora.alpha=16")
    assert (got.order.kind, got.order.max_per_image) == ("by_image", 4)
    assert (got.lora.r, got.lora.alpha) == (2, 16.0)
    assert recipe(text, "recipe.order.kind=listed", "plan.workers=3").order.kind == "listed"
    assert recipe(text, "recipe.order=listed").order.kind == "listed"
    assert recipe(text, "recipe.system_prompt=a = b").system_prompt == "a = b"
    assert load_plan(None, ["plan.max_questions=null", "recipe.seed=1"]).max_questions is None
    assert load_plan(None) == Plan()


def test_settings_of_one_key_do_not_reach_what_an_alias_shares(folder: Path) -> None:
    text = "model: tiny\nlora: &x {r: 2}\ndata: {train: t}\n"
    assert recipe(text, "recipe.lora.r=3").lora.r == 3


def test_split_sets() -> None:
    assert split_sets(["plan.a=1", "recipe.b.c=2=3"]) == (["recipe.b.c=2=3"], ["plan.a=1"])
    with pytest.raises(BadInput) as error:
        split_sets(["learning_rate=1", "recipe.seed", "recipe.=1", "recipe..r=1", "plan.workers=2"])
    assert str(error.value).splitlines() == [
        "--set learning_rate=1: must start with recipe.KEY= or plan.KEY=",
        "--set recipe.seed: has no '='; write recipe.KEY=VALUE or plan.KEY=VALUE",
        "--set recipe.=1: must start with recipe.KEY= or plan.KEY=",
        "--set recipe..r=1: must start with recipe.KEY= or plan.KEY=",
    ]


def test_all_problems_of_a_file_in_one_error(folder: Path) -> None:
    text = """\
model: tiny
learning_rat: 5e-5
lora:
  r: 0
  rr: 4
  target_modules: [q_proj, 3]
order: shufle
token_budget: 4096
alpha: 8
max_pixels: lots
revision: 12
zzz: 1
betas: [0.9]
lora_dropout: 0.1
"""
    assert set(recipe_error(text).splitlines()) == {
        "recipe.yaml: data is missing",
        "recipe.yaml:2: learning_rat is not a key here; nearest: learning_rate, learning_rates",
        "recipe.yaml:4: lora.r is 0; must be greater than or equal to 1",
        "recipe.yaml:5: lora.rr is not a key here; nearest: r",
        "recipe.yaml:6: lora.target_modules[1] is 3; must be a string: put it in quotes",
        "recipe.yaml:7: order.kind is 'shufle'; must be one of 'shuffle', 'listed', 'by_image', 'curriculum'",
        "recipe.yaml:8: token_budget is a plan field, not a recipe field",
        "recipe.yaml:9: alpha is not a key here; it belongs to lora: lora.alpha",
        "recipe.yaml:10: max_pixels is 'lots'; must be an integer or null",
        "recipe.yaml:11: revision is 12; must be a string or null: put it in quotes",
        f"recipe.yaml:12: zzz is not a key here; allowed: {', '.join(VqaRecipe.model_fields)}",
        "recipe.yaml:13: betas is [0.9]; must be a list of 2 numbers",
        "recipe.yaml:14: lora_dropout is not a key here; it belongs to lora: lora.dropout",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {train: t}\n", "recipe.yaml: model is missing"),
        ("model: m\ndata:\n  val: v\n", "recipe.yaml:2: data.train is missing"),
        (MINIMAL + "data: 3\n", "recipe.yaml:3: data is given twice, first on line 2"),
        (MINIMAL + "lora:\n  r: 1\n  r: 2\n", "recipe.yaml:5: lora.r is given twice, first on line 4"),
        (
            MINIMAL + "stages:\n- name: a\n- {name: b, learning_rate: 1e-3,\n   learning_rate: 2e-3}\n",
            "recipe.yaml:6: stages[1].learning_rate is given twice, first on line 5",
        ),
        (
            MINIMAL + "max_grad_norm: 1e-300\n",
            "recipe.yaml:3: max_grad_norm is 1e-300; must be greater than or equal to 0.000001",
        ),
        (
            "model: m\ndata: 3\n",
            "recipe.yaml:2: data is 3; must be a mapping with the keys train, val, test, ",
        ),
        (MINIMAL + "train_vision: 1\n", "recipe.yaml:3: train_vision is 1; must be true or false"),
        (MINIMAL + "learning_rate: .nan\n", "recipe.yaml:3: learning_rate is nan; must be a finite number"),
        (MINIMAL + "name: a b\n", "recipe.yaml:3: name is 'a b'; must match pattern '^[A-Za-z0-9._-]+$'"),
        (
            MINIMAL + "lora: {target_modules: []}\n",
            "recipe.yaml:3: lora.target_modules is []; must have at least 1 item",
        ),
        (MINIMAL + "1: 2\n", "recipe.yaml:3: the key 1 must be a string: put it in quotes"),
        (
            MINIMAL + "order:\n  kind: listed\n  max_per_image: 2\n",
            "recipe.yaml:5: order: within_image and max_per_image",
        ),
        (
            MINIMAL + "max_pixels: 1\nmin_pixels: 2\n",
            "recipe.yaml:4: min_pixels 2 is larger than max_pixels 1",
        ),
        (
            MINIMAL + "lora: {data: 2}\n",
            "recipe.yaml:3: lora.data is not a key here; data belongs to the top level",
        ),
        ("model: [m\n", "recipe.yaml:2: not valid YAML: "),
        ("model: m\n\tdata: 2\n", "recipe.yaml:2: not valid YAML: "),
        ("model: !!python/none m\n", "recipe.yaml:1: not valid YAML: could not determine a constructor"),
        ("a: 1\n---\nb: 1\n", "recipe.yaml:2: not valid YAML: but found another document"),
        ("model: \x00\n", "recipe.yaml:1: not valid YAML: the character '\\x00' is not allowed"),
        ("? [a]\n: 1\n", "recipe.yaml:1: not valid YAML: found unhashable key"),
        ("# nothing\n", "recipe.yaml: the file is empty"),
        ("- a\n- b\n", "recipe.yaml:1: must be a mapping of keys to values"),
    ],
)
def test_error_texts(folder: Path, text: str, message: str) -> None:
    assert recipe_error(text).startswith(message)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lora: {target_modules: all-linear}", "must be a list of strings: [all-linear]"),
        ("lora: {target_modules: 'q_proj, v_proj'}", "must be a list of strings: [q_proj, v_proj]"),
        ("lora: {target_modules: '.*(q|v)_proj'}", "must be a list of strings"),
        ("betas: '0.9'", "must be a list of 2 numbers"),
    ],
)
def test_names_without_brackets_are_shown_with_them(folder: Path, line: str, said: str) -> None:
    assert recipe_error(f"{MINIMAL}{line}\n").endswith(f"; {said}")


def test_a_recursive_file_is_an_error_and_no_endless_loop(folder: Path) -> None:
    said = recipe_error(MINIMAL + "lora: &a\n  again: *a\n")
    assert said == "recipe.yaml:3: holds itself by an alias (*name), without end"


def test_plan_errors(folder: Path) -> None:
    text = "learning_rate: 1\neval_steps: often\nsave_steps: 0\nenvironment:\n  OMP_NUM_THREADS: 4\n"
    text += "workers: 1.5\n"
    assert set(plan_error(text).splitlines()) == {
        "plan.yaml:1: learning_rate is a recipe field, not a plan field",
        "plan.yaml:2: eval_steps is 'often'; must be an integer or 'epoch' or null",
        "plan.yaml:3: save_steps is 0; must be at least 1 or 'epoch', not 0",
        "plan.yaml:5: environment.OMP_NUM_THREADS is 4; must be a string: put it in quotes",
        "plan.yaml:6: workers is 1.5; must be an integer",
    }
    for name, text in (("A=B", "1"), ("", "1"), ("A", "x\0y"), ("A", "\ud800"), ("\ud800", "")):
        assert plan_error(json.dumps({"environment": {name: text}})) == (
            f"plan.yaml:1: environment: {name!r}: {text!r} is no environment variable; a name has at least one letter "
            "and no =, and neither has a NUL or half of a surrogate pair"
        )
    assert plan_error("environment: {NVIDIA_TF32_OVERRIDE: '1'}") == (
        "plan.yaml:1: environment: NVIDIA_TF32_OVERRIDE changes the numeric format: set recipe.precision instead"
    )


def test_a_value_from_set_is_placed_there(folder: Path) -> None:
    text = MINIMAL + "lora:\n  r: 4\n"
    assert recipe_error(text, "recipe.lora.r=0") == (
        "--set recipe.lora.r=0: lora.r is 0; must be greater than or equal to 1"
    )
    assert recipe_error(text, "recipe.lora={r: 0}").startswith("--set recipe.lora={r: 0}: lora.r is 0")
    assert recipe_error(text, "recipe.learning_rat=1").endswith("nearest: learning_rate, learning_rates")
    assert recipe_error(text, "recipe.model.x=1") == "--set recipe.model.x=1: model is 'tiny', which has no keys"
    assert recipe_error(text, "recipe.lora=[1").startswith("--set recipe.lora=[1: not valid YAML: ")
    assert plan_error("{}", "plan.attention=fast") == (
        "--set plan.attention=fast: attention is 'fast'; must be one of 'auto', 'sdpa', 'flex', 'split', 'fused'"
    )


def test_files_that_cannot_be_read(folder: Path) -> None:
    with pytest.raises(BadInput, match=r"^missing\.yaml: no such file$"):
        load_recipe(Path("missing.yaml"))
    with pytest.raises(BadInput, match="cannot be read: Is a directory"):
        load_recipe(folder)
    Path("latin.yaml").write_bytes(b"model: \xff\n")
    with pytest.raises(BadInput, match=r"^latin\.yaml: cannot be read: not UTF-8 text"):
        load_recipe(Path("latin.yaml"))


positive = st.floats(min_value=1e-12, max_value=1)
recipes = st.builds(
    lambda text, **values: VqaRecipe.model_validate({"data": {"train": text}, "model": text, **values}),
    text=st.text(min_size=1),
    system_prompt=st.none() | st.text(),
    revision=st.none() | st.sampled_from(["1e5", "12", "no", "null", "0x1f", "1_0", "2024-01-01", "~", "5e-05"]),
    learning_rate=positive,
    eps=positive,
    order=st.sampled_from(["shuffle", {"kind": "by_image", "max_per_image": 3}, {"kind": "curriculum"}]),
    lora=st.fixed_dictionaries({"alpha": positive, "target_modules": st.lists(st.text(), min_size=1, max_size=3)}),
    seed=st.integers(0, 2**63 - 1),
)
plans = st.builds(
    lambda **values: Plan.model_validate(values),
    environment=st.dictionaries(
        st.text(st.characters(exclude_characters="=\0", exclude_categories=["Cs"]), min_size=1),
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
        max_size=3,
    ),
    eval_steps=st.none() | st.just("epoch") | st.integers(1, 2**31 - 1),
    max_questions=st.none() | st.integers(1, 2**31 - 1),
    pin_memory=st.booleans(),
)


@settings(deadline=None, max_examples=60)
@given(recipe=recipes, plan=plans)
def test_dump_and_load_give_the_same(tmp_path_factory: Any, recipe: VqaRecipe, plan: Plan) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "r.yaml").write_text(dump_yaml(recipe), encoding="utf-8", newline="")
    (folder / "p.yaml").write_text(dump_yaml(plan), encoding="utf-8", newline="")
    again = load_recipe(folder / "r.yaml")
    assert again == recipe and again.fingerprint == recipe.fingerprint
    assert load_plan(folder / "p.yaml") == plan


def test_dumped_floats_are_floats_for_other_readers_too() -> None:
    text = dump_yaml(VqaRecipe.model_validate({"model": "m", "data": {"train": "t"}}))
    assert yaml.safe_load(text)["learning_rate"] == 5e-5
    assert "target_modules: [q_proj, k_proj, v_proj, o_proj]" in text


def test_paths_are_relative_to_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert resolve_path(tmp_path, "data/train.jsonl") == tmp_path / "data/train.jsonl"
    assert resolve_path(tmp_path, "/data/train.jsonl") == Path("/data/train.jsonl")
    assert resolve_path(tmp_path, "~/train.jsonl") == Path("/home/someone/train.jsonl")
    (tmp_path / "tiny").mkdir()
    assert resolve_model(tmp_path, "tiny") == str(tmp_path / "tiny")
    assert resolve_model(tmp_path, "Qwen/Qwen3-VL-8B-Instruct") == "Qwen/Qwen3-VL-8B-Instruct"


def test_the_examples_load() -> None:
    recipe = load_recipe(EXAMPLES / "kvasir_lora.yaml")
    assert (recipe.learning_rate, recipe.order.kind, recipe.effective_batch) == (5e-5, "by_image", 16)
    plain, shared = load_plan(EXAMPLES / "plain_plan.yaml"), load_plan(EXAMPLES / "shared_plan.yaml")
    assert not plain.share_images and plain.checkpointing == "full"
    assert shared.share_images and shared.max_questions is None


def test_the_experiments_are_what_they_say() -> None:
    made = {path.stem: load_recipe(path) for path in sorted((EXAMPLES / "kvasir").glob("*.yaml"))}
    assert {*made} == {"cot", "exp1", "exp1_448", "exp1_by_image", "exp1_r8", "exp2", "exp3", "exp4", "exp5"}
    for name, recipe in made.items():
        assert recipe.name == f"kvasir-{name.replace('_', '-')}"
        shared = ("effective_batch", "num_epochs", "learning_rate", "weight_decay", "schedule", "warmup_ratio", "model")
        assert [getattr(recipe, field) for field in shared] == [getattr(made["exp1"], field) for field in shared]
    assert (made["exp1"].effective_batch, made["exp1"].num_epochs, made["exp1"].learning_rate) == (16, 5, 5e-5)

    def unlike(name: str) -> list[str]:
        return [line.partition(":")[0] for line in differences(made["exp1"], made[name])]

    assert unlike("exp2") == ["order.kind", "order.within_image"]
    assert unlike("exp3") == unlike("exp4") == ["stages"]
    assert unlike("exp1_by_image") == ["order.kind"] and unlike("exp1_448") == ["max_pixels"]
    assert unlike("exp1_r8") == ["lora.alpha", "lora.r"]
    assert {*unlike("exp2")} <= {*unlike("exp5")}
    follows = {name: [stage.follows for stage in made[name].stage_recipes()] for name in ("exp3", "exp4")}
    assert follows == {"exp3": [False, False, False], "exp4": [False, True, True]}
    assert [stage.recipe.data.where for stage in made["exp4"].stage_recipes()] == [{"stage": (n,)} for n in "123"]


BOTH = "warmup_ratio is 0.1 and warmup_steps is 5; one of them is allowed: warmup_steps would replace warmup_ratio"
NO_ADAPTERS = "lora is set and train is all, which has no adapters; allowed: train lora, or no lora"


def test_a_field_that_another_puts_out_of_use_is_refused_where_a_user_sets_both(folder: Path) -> None:
    plain = "model: m\ndata: {train: t.jsonl}\n"
    both = plain + "warmup_ratio: 0.1\nwarmup_steps: 5\ntrain: all\nlora: {r: 9}\n"
    said = recipe_error(both + "min_pixels: 9\nmax_pixels: 5\n").splitlines()
    assert [line.partition(": ")[2] for line in said] == ["min_pixels 9 is larger than max_pixels 5", BOTH, NO_ADAPTERS]
    assert recipe_error(plain + "lora: {r: 9}\n", "recipe.train=all").endswith(f": {NO_ADAPTERS}")
    assert recipe_error(plain + "warmup_ratio: 0.1\n", "recipe.warmup_steps=5").endswith(f": {BOTH}")
    stages = "warmup_steps: 5\nstages: [{name: a, warmup_ratio: 0.1}, {name: b, warmup_ratio: 0.1, warmup_steps: 5}]\n"
    assert [line.partition(": ")[2] for line in recipe_error(plain + stages).splitlines()] == [
        BOTH.replace("warmup_ratio", "stages[0].warmup_ratio"),
        BOTH.replace("warmup_", "stages[1].warmup_"),
    ]
    (folder / "recipe.yaml").write_text(plain + "warmup_ratio: 0.1\nstages: [{name: a, warmup_steps: 5}]\n")
    (stage,) = load_recipe(folder / "recipe.yaml").stage_recipes()
    # What runs record, with every field, is taken as it was meant: also a stage whose field replaced the recipe's.
    whole = VqaRecipe.model_validate({"model": "m", "data": {"train": "t"}, "train": "all"})
    earlier = whole.model_copy(update={"lora": Lora(r=9)})
    for recipe in (stage.recipe, whole, earlier):
        (folder / "recipe.yaml").write_text(dump_yaml(recipe))
        assert load_recorded_recipe(folder / "recipe.yaml").fingerprint == recipe.fingerprint
    (folder / "recipe.yaml").write_text(dump_yaml(whole))
    assert load_recipe(folder / "recipe.yaml") == whole, "every field at its default is no second wish"


def test_contradictions_of_a_recipe_in_one_error(folder: Path) -> None:
    told = recipe_error(
        "model: m\ndata: {train: t.jsonl, where: {stage: 2}}\ntrain: all\nmin_pixels: 9000\nmax_pixels: 5000\n"
        "betas: [0.9, 1.0]\nbest: nonsense\ndouble_quant: true\nstart_adapter: a\n"
        "stages:\n- {name: a, where: {stage: 1}, start: base}\n- {name: a, where: {stage: 3}, start: base}\n"
    )
    places = [line.partition(": ")[0].rpartition("/")[2] for line in told.splitlines()]
    said = [line.partition(": ")[2] for line in told.splitlines()]
    assert said == [
        "best.metric 'nonsense': must be one of loss, exact_match",
        "betas [0.9, 1.0]: each must be at least 0 and less than 1",
        "start_adapter continues an adapter, so train must be lora",
        "double_quant is for base_format nf4, and base_format is precision",
        "min_pixels 9000 is larger than max_pixels 5000",
        "stages: the name 'a' is given twice; must be another for each",
        "stages[0].where.stage is 1, and data.where.stage is 2: no question is both",
        "stages[1].where.stage is 3, and data.where.stage is 2: no question is both",
    ]
    assert [place.rpartition(":")[2] for place in places] == ["7", "6", "9", "8", "4", "10", "10", "10"]


SPACE = "YAML wants a space behind the colon"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("data: {train: t.jsonl, where: {stage:1}}", "data.where is {'stage:1': None}; must give each field a text"),
        ("data: {train: t.jsonl, where: {1:0}}", "data.where is {'1:0': None}; must give each field a text"),
        (
            "data: {train: t.jsonl, where: {stage: {1:0}}}",
            "data.where is {'stage': {'1:0': None}}; must give each field a text",
        ),
        ("data: {train: t.jsonl, fields: {question:query}}", "data.fields.question:query is null; must be a string"),
        (f"{MINIMAL}lora: {{r:8}}", f"lora.r:8 is not a key here: {SPACE}"),
        (f"{MINIMAL}stages: [{{name: a, where: {{stage:1}}}}]", "stages[0].where is {'stage:1': None}; must give"),
        (f"{MINIMAL}categories: {{rules: [{{match: a, stage:1}}]}}", "categories.rules[0].stage:1 is not a key here"),
    ],
)
def test_a_colon_without_a_space_is_told(folder: Path, text: str, told: str) -> None:
    first, *_ = recipe_error(text if "model" in text else f"model: m\n{text}\n").splitlines()
    assert first.partition(": ")[2].startswith(told) and first.endswith(f": {SPACE}")


def test_what_lacks_a_space_is_told_beside_what_is_missing_for_it(folder: Path) -> None:
    told = recipe_error("model: m\ndata: {train:t.jsonl}\n")
    assert set(told.splitlines()) == {
        f"recipe.yaml:2: data.train is missing: {SPACE}",
        f"recipe.yaml:2: data.train:t.jsonl is not a key here: {SPACE}",
    }
    assert recipe_error("data: {train: t}\nwher: {stage:1}\n").splitlines()[0] == "recipe.yaml: model is missing"


@pytest.mark.parametrize("text", ["1:30", "1:0", "-12:59", "1:30.5", "190:20:30"])
def test_nothing_is_to_the_base_60(folder: Path, text: str) -> None:
    assert recipe_error(f"{MINIMAL}seed: {text}").startswith(f"recipe.yaml:3: seed is {text!r}; must be an integer")
    assert recipe(f"{MINIMAL}revision: {text}").revision == text
    assert dump_yaml(recipe(f"{MINIMAL}revision: {text}")).count(f"revision: '{text}'") == 1, "other readers see a text"


def test_wrong_fields_and_contradictions_in_one_error(folder: Path) -> None:
    told = recipe_error(
        "model: m\ndata: {train: t.jsonl, split: {val: 0.5, test: 0.5}, limt: 3}\nlearning_rat: 1\n"
        "min_pixels: 9000\nmax_pixels: 5000\nbetas: [0.9, 1.0]\neffective_batch: many\n"
        "lora: {r: 0}\norder: {kind: listed, max_per_image: 2, zzz: 1}\n"
    )
    assert set(told.splitlines()) == {
        "recipe.yaml:2: data.split: val and test are 1 together; must be more than 0 and less than 1",
        "recipe.yaml:2: data.limt is not a key here; nearest: limit, split",
        "recipe.yaml:3: learning_rat is not a key here; nearest: learning_rate, learning_rates",
        "recipe.yaml:7: effective_batch is 'many'; must be an integer",
        "recipe.yaml:8: lora.r is 0; must be greater than or equal to 1",
        f"recipe.yaml:9: order.zzz is not a key here; allowed: {', '.join(Order.model_fields)}",
        "recipe.yaml:4: min_pixels 9000 is larger than max_pixels 5000",
        "recipe.yaml:6: betas [0.9, 1.0]: each must be at least 0 and less than 1",
        "recipe.yaml:9: order: within_image and max_per_image belong to kind by_image, not listed",
    }


def test_contradictions_are_found_beside_what_is_missing(folder: Path) -> None:
    assert recipe_error("min_pixels: 9000\nmax_pixels: 5000\nstages: [{num_epochs: 1}, {num_epochs: 2}]\n") == (
        "recipe.yaml: model is missing\nrecipe.yaml: data is missing\nrecipe.yaml:3: stages[0].name is missing\n"
        "recipe.yaml:3: stages[1].name is missing\nrecipe.yaml:1: min_pixels 9000 is larger than max_pixels 5000"
    )


@pytest.mark.parametrize(
    "text",
    [
        "base_format: nf44\ndouble_quant: true\n",  # for nf4, which may be meant
        "train: al\nstart_adapter: a\nbase_format: nf4\n",
        "max_pixels: lots\nmin_pixels: 9000\n",
        "best: {metric: 3}\n",
        "order: by_imag\ntask: cot\n",
        "order: {kind: by_imag, max_per_image: 2}\n",
        "data: 3\nstages: [{name: a, where: {stage: 1}}]\n",
        "task: classify\nmodel: {kind: vitt}\ndata: {path: p, image_size: 30}\n",
        "stages: [{name: a}, {name: a, where: 3}, {}]\n",
    ],
)
def test_nothing_is_held_against_a_value_that_nobody_gave(folder: Path, text: str) -> None:
    """What stands in for a wrong value is not the user's, whatever it contradicts."""
    given_ = text if text.startswith("task") else f"model: m\n{text}" if "data" in text else MINIMAL + text
    told = recipe_error(given_)
    assert "stand-in" not in told and all(" is missing" in line or " is " in line for line in told.splitlines())
    for line in told.splitlines():
        assert "belong" not in line and "double_quant" not in line and "larger" not in line and "multiple" not in line
        assert "continues" not in line and "spreads" not in line


@settings(deadline=None, max_examples=40)
@given(
    st.dictionaries(
        st.sampled_from([*VqaRecipe.model_fields, "zzz", "lora.r"]),
        st.sampled_from([None, 0, -1, "x", [], {}, [1], {"a": 1}, True, {"a:1": None}]),
        max_size=6,
    )
)
def test_any_mixture_of_wrong_values_is_told_line_by_line(tmp_path_factory: Any, values: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "mixture.yaml"
    path.write_text(yaml.safe_dump({"task": "vqa"} | values))
    try:
        load_recipe(path)
    except BadInput as error:
        assert str(error) and all(line.startswith(str(path)) for line in str(error).splitlines())
        assert "stand-in" not in str(error)


def test_a_plan_is_held_against_the_task_of_a_recipe_that_is_wrong(folder: Path) -> None:
    (folder / "recipe.yaml").write_text("task: classify\nmodel: {kind: vit}\ndata: {path: p}\nseed: x\n")
    (folder / "plan.yaml").write_text("share_images: true\nworkers: -1\n")
    with pytest.raises(BadInput) as caught:
        load_specs(Path("recipe.yaml"), Path("plan.yaml"), [])
    said = str(caught.value).splitlines()
    assert [line.partition(" is ")[0] for line in said] == [
        "recipe.yaml:4: seed",
        "plan.yaml:2: workers",
        "plan.yaml:1: share_images",
    ]
    assert "which task classify does not have: leave it out" in said[2]
