"""Values as people write them in YAML, JSON and shell scripts: what is read, and what gets a sentence."""

from pathlib import Path
from typing import Any

import pytest
from converting import AXOLOTL, converted, refused, whys

from sameday.spec.convert.config import convert
from sameday.spec.convert.conversion import write
from sameday.spec.errors import BadInput

QWEN = "Qwen/Qwen3-VL-8B-Instruct"
PLAIN = {"model_name_or_path": QWEN, "train_file": "train.jsonl"}
RECORDED = {
    "learning_rate": 1e-4,
    "lora": {"r": 4, "alpha": 8, "targets": ["q_proj"]},
    "bf16": True,
    "deepspeed": None,
    "seed": 3,
}
YES, NO = ("yes", "on", "True", "TRUE", "1", 1), ("no", "off", "False", "0", 0)


@pytest.mark.parametrize("value", [*YES, *NO])
def test_booleans_written_as_texts(tmp_path: Path, value: Any) -> None:
    names = ("bf16", "gradient_checkpointing", "use_fast", "dataloader_pin_memory", "torch_compile", "full_determinism")
    adapters = {"lora_r": 2, "lora_target_modules": ["q_proj"], "use_dora": value}
    done = converted(tmp_path, {**PLAIN, **adapters, **dict.fromkeys(names, value)})
    on = value in YES
    recipe, plan = done.recipe, done.plan
    assert (recipe.precision, recipe.lora.dora) == ("bf16" if on else "float32", on)
    assert recipe.image_backend == ("torchvision" if on else "pil")
    assert (plan.checkpointing, plan.compile) == (("full", "layers") if on else ("none", "none"))
    assert (plan.pin_memory, plan.deterministic) == (on, on)


@pytest.mark.parametrize("value", ["no", "off", "0"])
def test_what_is_off_in_words_is_off(tmp_path: Path, value: str) -> None:
    assert converted(tmp_path, {**PLAIN, "fp16": value, "group_by_length": value, "packing": value}).recipe
    llama = {"finetuning_type": "lora", "cutoff_len": 512, "disable_shuffling": value}
    done = converted(tmp_path, {**PLAIN, **llama, "disable_gradient_checkpointing": value})
    assert (done.recipe.order.kind, done.plan.checkpointing) == ("shuffle", "full")


@pytest.mark.parametrize("name", ["fp16", "bf16", "gradient_checkpointing", "load_in_4bit", "load_in_8bit", "use_fast"])
@pytest.mark.parametrize("value", ["maybe", 3, [True], {"x": 1}])
def test_what_is_no_boolean_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    lines = refused(tmp_path, {**PLAIN, name: value})
    if isinstance(value, dict):
        assert lines == [f"{name}.x is 1; not known, and it may change the model; --drop {name}.x leaves it out"]
    else:
        assert lines == [f"{name} is {'[True]' if value == [True] else value}; must be true or false"]


# Files of this package


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["kvasir_lora", "kvasir_nf4", "cifar10_vit", "kvasir/cot", "kvasir/exp1"])
def test_a_recipe_is_no_config_to_convert(name: str) -> None:
    path = EXAMPLES / f"{name}.yaml"
    with pytest.raises(BadInput) as error:
        convert(path)
    assert str(error.value) == f"{path}: is a recipe already: sameday train {path}"


@pytest.mark.parametrize("name", ["plain_plan", "shared_plan", "bdh_plan"])
def test_a_plan_is_no_config_to_convert(name: str) -> None:
    path = EXAMPLES / f"{name}.yaml"
    with pytest.raises(BadInput) as error:
        convert(path)
    assert str(error.value) == f"{path}: is a plan already: sameday train recipe.yaml --plan {path}"


def test_what_is_written_is_a_recipe_and_a_plan(tmp_path: Path) -> None:
    for path in write(converted(tmp_path, PLAIN), tmp_path / "new"):
        with pytest.raises(BadInput, match=" already: sameday train "):
            convert(path)


# Values that are filled in elsewhere


@pytest.mark.parametrize(
    ("old", "unknown"),
    [
        ({"train_file": "${oc.env:DATA}/x.jsonl"}, "${oc.env:DATA}"),
        ({"model_name_or_path": "${model.name}"}, "${model.name}"),
        ({"learning_rate": "${lr}"}, "${lr}"),
        ({"lora_r": 4, "lora_target_modules": ["q_proj", "${more}"]}, "${more}"),
        ({"image_root": "images/${split}"}, "${split}"),
        ({"per_device_train_batch_size": "${bs}"}, "${bs}"),
        ({"eval_steps": "${every}"}, "${every}"),
    ],
)
def test_a_value_that_the_old_program_fills_in(tmp_path: Path, old: dict[str, Any], unknown: str) -> None:
    (line,) = refused(tmp_path, {**PLAIN, **old})
    key = next(reversed(old))
    assert line.startswith(f"{key} is ") and line.endswith(
        f"; the old program fills in {unknown}, and this file does not say with what: give the value"
    )


def test_a_filled_in_value_that_changes_nothing(tmp_path: Path) -> None:
    old = {"output_dir": "${oc.env:HOME}/runs", "save_steps": "${steps}", "wandb_project": "${name}"}
    done = converted(tmp_path, {**PLAIN, **old})
    assert done.recipe.name == "run" or "$" not in done.recipe.name
    assert whys(done)["output_dir"] == "the old program fills in ${oc.env:HOME}; the model does not depend on it"
    assert whys(done)["save_steps"] == "the old program fills in ${steps}; the model does not depend on it"
    assert whys(done)["wandb_project"].startswith("a run always writes metrics.jsonl")
    given = converted(tmp_path, {**PLAIN, "train_file": "${oc.env:DATA}/x"}, {"--train": "train.jsonl"})
    assert given.recipe.data.train == "train.jsonl"


# Values and files that are none


@pytest.mark.parametrize("text", ["[" * 10_000, "{" * 10_000, "x: " + "[" * 10_000, '{"x":' * 10_000])
@pytest.mark.parametrize("where", ["old.yaml", "old.json", "ds.json", "launch.yaml"])
def test_files_that_are_nested_too_deeply(tmp_path: Path, text: str, where: str) -> None:
    (tmp_path / "old.yaml").write_text("deepspeed: ds.json\nlaunch: {config_file: launch.yaml}\n")
    (tmp_path / where).write_text(text)
    with pytest.raises(BadInput) as error:
        convert(tmp_path / (where if where[:3] == "old" else "old.yaml"))
    assert f"{tmp_path}/{where}: not valid YAML: it is nested too deeply" in str(error.value).splitlines()


def test_keys_that_are_no_texts(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("null: 3\n1: 4\n1.5: 5\ntraining: {2: 6}\n")
    with pytest.raises(BadInput) as error:
        convert(tmp_path / "old.yaml")
    for key in ("1 is 4", "1.5 is 5", "training.2 is 6"):
        said = f": {key}; not known, and it may change the model; --drop {key.split()[0]} leaves it out"
        assert said in str(error.value)
    (tmp_path / "old.yaml").write_text("? [a, b]\n: 3\n")
    with pytest.raises(BadInput, match=r"old\.yaml:1: not valid YAML: found unhashable key"):
        convert(tmp_path / "old.yaml")
    row = {"path": "train.jsonl", "type": "chat_template", 1: 2, "name": "x"}
    lines = refused(tmp_path, {**AXOLOTL, "datasets": [row]})
    assert any("; 1, name: questions would be chosen or read otherwise; give --train FILE" in line for line in lines)


@pytest.mark.parametrize(
    ("old", "line"),
    [
        ({"learning_rate": [1]}, "learning_rate is [1]; must be a number"),
        ({"learning_rate": {"a": 1}}, "learning_rate.a is 1; not known, and it may change the model; --drop learning"),
        ({"model_name_or_path": ["a"]}, "model_name_or_path: model is ['a']; must be a string: put it in quotes"),
        (
            {"target_modules": False, "vision_lr": 1e-6},
            "target_modules: lora.target_modules is false; must be a list of strings",
        ),
        ({"model_name_or_path": {"a": "b"}}, "model_name_or_path.a is b; not known, and it may change the model; --d"),
    ],
)
def test_values_of_another_kind(tmp_path: Path, old: dict[str, Any], line: str) -> None:
    assert any(each.startswith(line) for each in refused(tmp_path, {**PLAIN, **old}))


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "~nobody-here/x"])
def test_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    done = converted(tmp_path, {**PLAIN, "deepspeed": name, "launch": {"config_file": name}})
    assert whys(done)["deepspeed"].startswith("not found at ")
    old = {**PLAIN, "finetuning_type": "lora", "cutoff_len": 512, "dataset": "x", "dataset_dir": name}
    del old["train_file"]
    assert refused(tmp_path, old)
    done = converted(tmp_path, {**PLAIN, "image_root": "x" * 5000, "bf16": True})
    assert whys(done)["recipe.data.image_root"].startswith("not found at ")
    swift = {"model": "Qwen/Qwen3-VL-8B", "dataset": "x" * 5000 + ".jsonl", "freeze_vit": True}
    done = converted(tmp_path, swift, trainer="swift")
    assert whys(done)["recipe.data.train"].startswith("not found at ")


@pytest.mark.parametrize(
    ("old", "sentence"),
    [
        (
            {"tune_mm_vision": True},
            "tune_mm_vision is true; the vision tower would be trained: if it got adapters, name layers of it by hand "
            "in recipe.lora.target_modules (tower.all-linear) (allowed: false)",
        ),
        (
            {"val_size": 0.1},
            "val_size is 0.1; some training questions would be held out: --drop val_size and then set data.split in "
            "recipe.yaml, which holds out images with all of their questions, where most trainers hold out single "
            "questions, or give --train FILE and --val FILE (allowed: 0)",
        ),
        (
            {"shuffle": False},
            "shuffle is false; questions would come in the order of the file: --drop shuffle and then set order: "
            "listed in recipe.yaml (allowed: true)",
        ),
        ({"bias": "all"}, "bias is all; biases would be trained, and no recipe says that (allowed: none)"),
        (
            {"optim_args": "a=1"},
            "optim_args is a=1; the Trainer's AdamW does not read it, other programs may: --drop optim_args if it was "
            "that (allowed: '')",
        ),
        (
            {"processor": {"size": {"longest_edge": 1003520}}},
            "processor.size.longest_edge is 1003520; images would be resized otherwise than by recipe.min_pixels and "
            "max_pixels: of a Qwen-VL give shortest_edge as min_pixels and longest_edge as max_pixels instead; --drop "
            "processor.size leaves it out",
        ),
        (
            {"defaults": ["_self_", {"model": "qwen"}]},
            "defaults is [_self_, {'model': 'qwen'}]; files that Hydra reads too: convert the run's "
            ".hydra/config.yaml, which has all",
        ),
        ({"max_length": "None"}, "max_length is 'None'; must be an integer or null"),
        (
            {"train_file": ["a.jsonl", "b.jsonl"]},
            "train_file is [a.jsonl, b.jsonl]; several files of questions: join them in one file, and give --train "
            "FILE, or the first of them, and then the others in data.mix of recipe.yaml",
        ),
        (
            {"val_file": ["a.jsonl", "b.jsonl"]},
            "val_file is [a.jsonl, b.jsonl]; several files of questions: join them in one file, and give --val FILE",
        ),
        ({"lr": "None"}, "lr: learning_rate is 'None'; must be a number"),
    ],
)
def test_a_refusal_says_what_to_do_or_that_no_recipe_can(tmp_path: Path, old: dict[str, Any], sentence: str) -> None:
    plain = {"model_name_or_path": "Qwen/Qwen3-VL-8B", "train_file": "train.jsonl", "lora_r": 4}
    plain |= {"lora_target_modules": ["q_proj", "v_proj"]}
    assert refused(tmp_path, {**plain, **old}) == [sentence]


def test_names_of_an_older_version(tmp_path: Path) -> None:
    old = {"model": "Qwen/Qwen3-VL-8B", "sft_type": "lora", "freeze_vit": True, "dataset": "train.jsonl"}
    assert refused(tmp_path, old) == [
        "sft_type is lora; it is of ms-swift 2, whose defaults were others: give the names of ms-swift 3, train_type "
        "for it"
    ]


@pytest.mark.parametrize(
    ("old", "field", "value"),
    [
        ({"lr_scheduler_type": "cosine_with_restarts"}, "schedule", "cosine"),
        ({"lr_scheduler": "Cosine"}, "schedule", "cosine"),
        ({"lr_scheduler": "Constant", "warmup_steps": 5}, "warmup_steps", None),
        ({"optimizer": "AdamW"}, "optimizer", "adamw"),
        ({"optim": {"name": "AdamW", "eps": 1e-7}}, "eps", 1e-7),
        ({"optimizer": {"eps": 1e-6}}, "eps", 1e-6),
        ({"batch_size": 2, "gradient_accumulation": 4}, "effective_batch", 8),
        ({"batch_size": 2, "accumulate_grad_batches": 3}, "effective_batch", 6),
        ({"gradient_clip": 0.5}, "max_grad_norm", 0.5),
        ({"trainer": {"max_epochs": 2}}, "num_epochs", 2),
        ({"max_train_steps": 7, "num_warmup_steps": 3, "max_train_samples": 9}, "warmup_steps", 3),
        ({"max_train_steps": 7}, "max_steps", 7),
        ({"max_grad_norm": -1}, "max_grad_norm", None),
        ({"max_grad_norm": float("inf")}, "max_grad_norm", None),
        ({"vision_lr": 1e-6, "merger_lr": 1e-5}, "learning_rates", {"tower": 1e-6, "projector": 1e-5}),
        ({"lr_scheduler_type": "SchedulerType.COSINE", "optim": "OptimizerNames.ADAMW_TORCH"}, "schedule", "cosine"),
        (
            {"model": {"pretrained_model_name_or_path": PLAIN["model_name_or_path"]}},
            "model",
            "Qwen/Qwen3-VL-8B-Instruct",
        ),
        ({"mm_projector_lr": 1e-5, "vision_tower_lr": 0}, "learning_rates", {"projector": 1e-5}),
    ],
)
def test_other_names_of_the_same(tmp_path: Path, old: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(converted(tmp_path, {**PLAIN, **old}).recipe, field) == value


def test_rates_of_parts_with_adapters(tmp_path: Path) -> None:
    old = {**PLAIN, "lora": {"r": 4, "targets": ["q_proj", "tower.all-linear"]}, "vision_lr": 1e-6, "merger_lr": 1e-5}
    done = converted(tmp_path, old)
    assert done.recipe.lora.target_modules == ("q_proj", "tower.all-linear")
    assert done.recipe.learning_rates == {"tower": 1e-6}
    assert whys(done)["merger_lr"] == "does nothing: the projector is not trained"


def test_cycles_of_a_schedule_are_refused(tmp_path: Path) -> None:
    old = {**PLAIN, "lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": "{num_cycles: 3}"}
    (line,) = refused(tmp_path, old)
    assert line.startswith("lr_scheduler_kwargs is {num_cycles: 3}; the schedule would be another one")


def test_what_only_begins_like_a_key_that_changes_nothing_is_not_let_go(tmp_path: Path) -> None:
    lines = refused(tmp_path, {**PLAIN, "dataloader_shuffle": False, "dataloader_mix": "x", "do_train_vision": True})
    assert [line.split("; ")[0] for line in lines] == [
        "dataloader_mix is x",
        "do_train_vision is true",
        "dataloader_shuffle is false",
    ]
    assert lines[0].endswith("it may change the model; --drop dataloader_mix leaves it out")
    assert "--drop dataloader_shuffle and then set order: listed in recipe.yaml" in lines[2]
    done = converted(tmp_path, {**PLAIN, "dataloader_batch_size": 4, "dataloader_timeout": 9, "do_eval": True})
    assert (done.plan.max_questions, done.recipe.effective_batch) == (4, 4)


def test_a_batch_that_the_trainer_makes_smaller_is_told_of(tmp_path: Path) -> None:
    done = converted(tmp_path, {**PLAIN, "auto_find_batch_size": True})
    assert whys(done)["auto_find_batch_size"].endswith(
        "where it is true and the old run ran out of memory, its steps took fewer questions than this recipe's: its "
        "log says so"
    )


def test_a_config_as_a_tracker_records_it(tmp_path: Path) -> None:
    written = {key: {"desc": None, "value": value} for key, value in {**PLAIN, **RECORDED}.items()}
    of_tracker = {"wandb_version": 1, "_wandb": {"desc": None, "value": {"cli_version": "0.18.1", "t": {"1": [1]}}}}
    done = converted(tmp_path, {**of_tracker, **written})
    assert done.recipe == converted(tmp_path, {**PLAIN, **RECORDED}).recipe
    (line,) = refused(tmp_path, {**of_tracker, **written, "odd": {"value": 1}})
    assert line == "odd is 1; not known, and it may change the model; --drop odd leaves it out"
    with pytest.raises(BadInput, match=r"old\.yaml:\d+: lora\.r is 0; must be"):
        converted(tmp_path, {**written, "lora": {"value": {"r": 0, "targets": ["q_proj"]}}})


@pytest.mark.parametrize(
    ("text", "key", "why"),
    [
        ("model: Qwen/Qwen3-VL-8B\ntrain_file: t.jsonl\nlora: {r:16, alpha:32}\n", "lora.r:16", ""),
        (
            '{"model":"Qwen/Qwen3-VL-8B", "train_file":"t.jsonl", // the peak\n"lr":1e-4}\n',
            '// the peak "lr":1e-4',
            "JSON has no comments, and ",
        ),
    ],
)
def test_a_key_without_a_space_behind_its_colon_is_refused(tmp_path: Path, text: str, key: str, why: str) -> None:
    (tmp_path / "old.yaml").write_text(text)
    with pytest.raises(BadInput) as error:
        convert(tmp_path / "old.yaml")
    said = f"{key} is null; it is one text and no key with a value: {why}YAML wants a space behind the colon"
    assert said in str(error.value).splitlines()[0]


def test_a_list_of_one_file_is_this_file(tmp_path: Path) -> None:
    done = converted(tmp_path, {**PLAIN, "train_file": ["a.jsonl"], "val_file": ["b.jsonl"], "max_train_samples": 5})
    assert (done.recipe.data.train, done.recipe.data.val, done.recipe.data.limit) == ("a.jsonl", "b.jsonl", 5)
    clipped = converted(tmp_path, {**PLAIN, "max_grad_norm": -1})
    assert whys(clipped)["recipe.max_grad_norm"] == "-1 does not clip"
