"""Configs of LLaMA-Factory, with the keys and values of files in its repository: each becomes a recipe, or every key
that is lost is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import worlds
from converting import DATA, LLAMA, check_written, converted, lost, refused, whys
from PIL import Image
from safetensors.torch import load_file
from typed import sameday

from sameday.data.questions.sets import Reading
from sameday.spec.convert.conversion import write
from sameday.spec.load import load_recipe

# LLaMA-Factory: examples/train_lora, train_full and train_qlora of its repository

QWEN25 = {
    **LLAMA,
    **{"model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct", "template": "qwen2_vl", "overwrite_cache": True},
}
FULL = {
    **{key: value for key, value in LLAMA.items() if not key.startswith("lora_")},
    **{"finetuning_type": "full", "freeze_vision_tower": True, "freeze_multi_modal_projector": True},
    **{"freeze_language_model": False, "deepspeed": "examples/deepspeed/ds_z3_config.json"},
    **{"gradient_accumulation_steps": 2, "learning_rate": 1e-5},
}
DPO = {**LLAMA, "stage": "dpo", "pref_beta": 0.1, "pref_loss": "sigmoid", "dataset": "rlhf_v", "learning_rate": 5e-6}
RAY = {
    **LLAMA,
    **{"model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct", "template": "llama3", "ray_num_workers": 4},
    **{"dataset_dir": "REMOTE:llamafactory/demo_data", "ray_run_name": "llama3_8b_sft_lora"},
    **{"placement_strategy": "PACK", "resources_per_worker": {"GPU": 1}},
}
ERNIE = {
    **LLAMA,
    **{"model_name_or_path": "ours/ERNIE-4.5-VL-28B-A3B-PT", "lora_rank": 16, "lora_alpha": 32},
    **{"lora_target": "q_proj,v_proj,k_proj,o_proj", "template": "ernie_vl", "quantization_bit": 4},
}
LLAVA = {
    **{key: value for key, value in LLAMA.items() if key not in ("lora_rank", "report_to")},
    **{"model_name_or_path": "llava-hf/llava-1.5-7b-hf", "template": "llava", "val_size": 0.1, "eval_steps": 500},
    **{"eval_strategy": "steps", "per_device_eval_batch_size": 1},
}


@pytest.mark.parametrize("old", [LLAMA, QWEN25, {**QWEN25, "model_name_or_path": "Qwen/Qwen2-VL-7B-Instruct"}])
def test_llama_factory_lora(tmp_path: Path, old: dict[str, Any]) -> None:
    done = converted(tmp_path, old, DATA)
    recipe, plan = done.recipe, done.plan
    assert done.trainer.name == "LLaMA-Factory" and done.told_by.startswith("cutoff_len, finetuning_type, ")
    assert (recipe.train, recipe.lora.r, recipe.lora.alpha, recipe.lora.dropout) == ("lora", 8, 16.0, 0.0)
    assert (recipe.max_pixels, recipe.min_pixels, recipe.max_length) == (262144, None, 2048)
    assert (recipe.schedule, recipe.warmup_ratio, recipe.answer_end) == ("cosine", 0.1, "turn")
    assert (recipe.effective_batch, recipe.num_epochs, recipe.data.limit) == (8, 3, None)
    assert (plan.checkpointing, plan.workers, plan.save_steps, plan.log_steps) == ("full", 4, 500, 10)
    assert recipe.lora.target_modules[4:] == ("gate_proj", "up_proj", "down_proj")
    assert whys(done)["recipe.lora.alpha"] == "LLaMA-Factory's default"
    assert whys(done)["recipe.max_pixels"].startswith("near, not the same: it resizes to so many first")
    check_written(done, tmp_path)


@pytest.mark.parametrize(
    ("model", "template", "own"),
    [("Qwen/Qwen3-VL-4B-Instruct", "qwen3_vl_nothink", 65536), ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_vl", 3136)],
)
def test_llama_factory_leaves_the_processor_its_own_minimum(
    tmp_path: Path, model: str, template: str, own: int
) -> None:
    """It enlarges images to its own number of pixels, and the processor then enlarges what is still too small."""
    old = {**LLAMA, "model_name_or_path": model, "template": template}
    for given in ({}, {"image_min_pixels": own - 1}):
        done = converted(tmp_path, {**old, **given}, DATA)
        assert done.recipe.min_pixels is None
        assert whys(done)["recipe.min_pixels"].endswith("the model's own processor enlarges images to more")
    done = converted(tmp_path, {**old, "image_min_pixels": 2 * own}, DATA)
    assert done.recipe.min_pixels == 2 * own
    assert whys(done)["recipe.min_pixels"].startswith("near, not the same: it resizes to so many first")
    (line,) = refused(tmp_path, {**old, "image_max_pixels": own - 1}, DATA)
    assert line == (
        f"image_max_pixels is {own - 1}; images are shrunk to so many pixels first, and the model's own processor "
        f"enlarges them to {own:,} again, which no recipe says (allowed: {own:,} or more)"
    )


def test_llama_factory_with_a_folder_that_has_its_own_minimum(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    (tmp_path / "ours" / "preprocessor_config.json").write_text(json.dumps({"size": {"shortest_edge": 512}}))
    done = converted(tmp_path, {**LLAMA, "model_name_or_path": "ours"}, DATA)
    assert done.recipe.min_pixels == 1024


def test_llama_factory_forms_and_parts(tmp_path: Path) -> None:
    done = converted(tmp_path, {**LLAMA, "use_dora": True, "use_rslora": True, "freeze_vision_tower": False}, DATA)
    lora = done.recipe.lora
    assert (lora.dora, lora.rslora, lora.target_modules[-3:-1]) == (True, True, ("down_proj", "tower.all-linear"))
    assert lora.target_modules[-1] == "projector.deepstack_merger_list.all-linear"
    assert whys(done)["recipe.lora.target_modules"].endswith(
        "linear layers, and those of what is not frozen; it counts the mergers of inner layers to the tower"
    )
    check_written(done, tmp_path)
    both = {**FULL, "freeze_vision_tower": False, "freeze_multi_modal_projector": False}
    assert converted(tmp_path, both, DATA).recipe.train_vision
    # It looks for names in the language model alone, others in the whole model.
    named = {**LLAMA, "lora_target": "q_proj,gate_proj", "model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct"}
    named |= {"template": "qwen2_vl"}
    assert converted(tmp_path, named, DATA).recipe.lora.target_modules == ("q_proj", "gate_proj")


TOWER, PROJECTOR = "tower.all-linear", "projector.all-linear"


@pytest.mark.parametrize(
    ("model", "tower", "projector", "more"),
    [
        ("Qwen/Qwen3-VL-4B-Instruct", False, True, (TOWER, "projector.deepstack_merger_list.all-linear")),
        ("Qwen/Qwen3-VL-4B-Instruct", False, False, (TOWER, PROJECTOR)),
        ("Qwen/Qwen3-VL-4B-Instruct", True, False, ()),
        ("Qwen/Qwen2.5-VL-7B-Instruct", False, True, (TOWER,)),
        ("Qwen/Qwen2.5-VL-7B-Instruct", False, False, (TOWER,)),
        ("Qwen/Qwen2.5-VL-7B-Instruct", True, False, ()),
    ],
)
def test_llama_factory_parts_that_are_not_frozen(
    tmp_path: Path, model: str, tower: bool, projector: bool, more: tuple[str, ...]
) -> None:
    """Its names for all layers are of the tower and the language model; a projector's layers have none of the latter's,
    those of Qwen3-VL have names of the tower's layers."""
    frozen = {"freeze_vision_tower": tower, "freeze_multi_modal_projector": projector}
    done = converted(tmp_path, {**QWEN25, "model_name_or_path": model, **frozen}, DATA)
    assert done.recipe.lora.target_modules[7:] == more
    if not projector:
        taken = PROJECTOR in more
        said = "its layers get adapters too" if taken else "does nothing: no layer of it has such a name"
        assert whys(done)["freeze_multi_modal_projector"] == said


@pytest.mark.parametrize(
    ("model", "template", "names", "namesakes"),
    [
        ("Qwen/Qwen3-VL-4B-Instruct", "qwen3_vl_nothink", "q_proj,v_proj,down_proj", ""),
        ("Qwen/Qwen2-VL-7B-Instruct", "qwen2_vl", ["q_proj", "gate_proj"], ""),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_vl", "q_proj, v_proj", ""),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_vl", "q_proj,gate_proj,up_proj", "gate_proj up_proj"),
        ("google/gemma-3-4b-it", "gemma3", "q_proj,o_proj,up_proj", "q_proj"),
    ],
)
def test_names_where_the_tower_is_not_frozen(
    tmp_path: Path, model: str, template: str, names: Any, namesakes: str
) -> None:
    """It looks for them in all that is not frozen: where the tower has none, nothing there is trained."""
    old = {**LLAMA, "model_name_or_path": model, "template": template, "lora_target": names}
    thawed = {**old, "freeze_vision_tower": False, "freeze_multi_modal_projector": False}
    if namesakes:
        (line,) = refused(tmp_path, thawed, DATA)
        told, hand = " and ".join(namesakes.split()), " and ".join(f"tower.{each}" for each in namesakes.split())
        assert line == (
            f"freeze_vision_tower is false; layers of the vision tower are called {told} too, and would get adapters: "
            f"set it to true, and add {hand} to recipe.lora.target_modules by hand (allowed: true)"
        )
        return
    done = converted(tmp_path, thawed, DATA)
    assert done.recipe == converted(tmp_path, old, DATA).recipe
    for key in ("freeze_vision_tower", "freeze_multi_modal_projector"):
        assert whys(done)[key] == "does nothing: no layer of it has such a name"


def test_names_that_the_tower_has_too(tmp_path: Path) -> None:
    def targets(model: str, names: Any) -> tuple[str, ...]:
        return converted(
            tmp_path, {"model": model, "lora_rank": 2, "target_modules": names}, DATA
        ).recipe.lora.target_modules

    names = ["q_proj", "gate_proj"]
    assert targets("Qwen/Qwen3-VL-8B", names) == ("q_proj", "gate_proj")
    assert targets("Qwen/Qwen2.5-VL-7B-Instruct", names) == (*names, "tower.gate_proj")
    assert targets("llava-hf/llava-1.5-7b-hf", names) == (*names, "tower.q_proj")
    everything = ("all-linear", "tower.all-linear", "projector.all-linear")
    assert targets("Qwen/Qwen3-VL-8B", "all-linear") == targets("llava-hf/llava-1.5-7b-hf", "all-linear") == everything
    assert targets("google/gemma-3-4b-it", "all-linear") == everything[:2]
    done = converted(tmp_path, {"model": "some/model", "lora_rank": 2, "target_modules": names}, DATA)
    assert whys(done)["recipe.lora.target_modules"].startswith("the language model's; where the tower has layers of ")


VICUNA = "A chat between a curious user and an artificial intelligence assistant. "


def test_llama_factory_templates_of_every_family(tmp_path: Path) -> None:
    llava = {key: value for key, value in LLAVA.items() if key != "val_size"}
    done = converted(tmp_path, llava, DATA)
    recipe = done.recipe
    assert recipe.system_prompt is not None and recipe.system_prompt.startswith(VICUNA)
    assert (recipe.answer_end, recipe.min_pixels, recipe.max_pixels) == ("end_token", None, None)
    assert whys(done)["recipe.prompt"].startswith("near, not the same: there no line break follows an image")
    assert whys(done)["image_max_pixels"] == (
        "this model takes every image at one size, which its own image settings say; near, not the same: LLaMA-Factory "
        "shrinks larger images to so many pixels before that"
    )
    check_written(done, tmp_path)
    own = converted(tmp_path, {**llava, "system": "Be brief."}, DATA)
    assert own.recipe.system_prompt == "Be brief."
    gemma = converted(tmp_path, {**llava, "model_name_or_path": "google/medgemma-4b-it", "template": "gemma3"}, DATA)
    assert (gemma.recipe.answer_end, gemma.recipe.system_prompt, gemma.recipe.max_pixels) == ("turn", None, None)
    (line,) = refused(tmp_path, {**llava, "template": "vicuna"}, DATA)
    assert line == "template is vicuna; the prompt would be another one (allowed: llava)"
    (line,) = refused(tmp_path, {**llava, "template": "qwen2_vl"}, DATA)
    assert line == "template is qwen2_vl; the prompt would be another one (allowed: llava)"
    (line,) = refused(tmp_path, {**LLAMA, "template": "llava"}, DATA)
    assert line.endswith("(allowed: qwen2_vl, qwen2_5_vl, qwen3_vl_nothink)")


def test_llama_factory_all_weights(tmp_path: Path) -> None:
    done = converted(tmp_path, FULL, DATA)
    assert (done.recipe.train, done.recipe.train_vision, done.recipe.effective_batch) == ("all", False, 2)
    check_written(done, tmp_path)


@pytest.mark.parametrize(
    ("old", "keys"),
    [
        ({**DPO, "stage": "sft"}, {"pref_beta", "pref_loss"}),
        (RAY, {"model_name_or_path", "template"}),
        (ERNIE, {"template"}),
        (LLAVA, {"val_size"}),
        ({**LLAMA, "pure_bf16": True, "loraplus_lr_ratio": 16.0}, {"pure_bf16"}),
        (
            {**{key: value for key, value in FULL.items()}, "freeze_multi_modal_projector": False},
            {"freeze_multi_modal_projector"},
        ),
        ({**LLAMA, "freeze_vision_tower": None}, {"freeze_vision_tower"}),
        ({**LLAMA, "cutoff_len": None, "lora_dropout": None}, {"cutoff_len", "lora_dropout"}),
    ],
)
def test_llama_factory_refuses(tmp_path: Path, old: dict[str, Any], keys: set[str]) -> None:
    lines = refused(tmp_path, old, DATA)
    assert keys <= lost(lines) and lost(lines) <= keys | {"loraplus_lr_ratio"}, lines


def test_llama_factory_keys_that_are_absent(tmp_path: Path) -> None:
    """Its defaults stand in the recipe where they are not ours, and say whose they are."""
    old = {"model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct", "finetuning_type": "lora", "template": "qwen3_vl_nothink"}
    done = converted(tmp_path, old, DATA)
    recipe = done.recipe
    assert (recipe.max_length, recipe.max_pixels, recipe.lora.r, recipe.lora.alpha) == (2048, 589824, 8, 16)
    assert (recipe.learning_rate, recipe.schedule, recipe.precision, recipe.seed) == (5e-5, "linear", "bf16", 42)
    assert (recipe.effective_batch, done.plan.checkpointing) == (8, "full")
    assert whys(done)["recipe.max_length"] == "LLaMA-Factory's default; never cuts image tokens or a whole answer"
    assert converted(tmp_path, {**old, "disable_gradient_checkpointing": True}, DATA).plan.checkpointing == "none"
    assert converted(tmp_path, {**old, "disable_shuffling": True}, DATA).recipe.order.kind == "listed"


FIELDS = "with data.fields in recipe.yaml where its keys have other names than image, question and answer"
NO_IMAGES = (
    "columns has no images, and here each line names its images ([] for none): write them, and give --train FILE, "
    + FIELDS
)


def test_llama_factory_list_of_data(tmp_path: Path) -> None:
    old = {"model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct", "finetuning_type": "lora", "template": "qwen3_vl_nothink"}
    (line,) = refused(tmp_path, {**old, "dataset": "ours"})
    where = tmp_path / "data" / "dataset_info.json"
    assert line == f"dataset is ours; a name in {where}, which is not there: give --train FILE"
    tags = {"role_tag": "role", "content_tag": "content"}
    columns = {"messages": "messages", "images": "images"}
    entry = {"file_name": "ours.json", "formatting": "sharegpt", "columns": columns, "tags": tags}
    known = {"ours": entry, "llava": {"file_name": "l.json", "formatting": "sharegpt"}, "text": {"file_name": "t.json"}}
    known |= {"far": {"hf_hub_url": "x/y"}, "odd": {**entry, "columns": {"messages": "talk"}}}
    where.parent.mkdir()
    where.write_text(json.dumps(known))
    done = converted(tmp_path, {**old, "dataset": "ours", "eval_dataset": "llava", "eval_strategy": "epoch"})
    data = done.recipe.data
    assert (data.train, data.val, data.image_root) == ("data/ours.json", "data/l.json", "data")
    missing = tmp_path / "data" / "ours.json"
    assert whys(done)["recipe.data.train"] == f"as dataset_info.json has it; not found at {missing}"
    beside = "LLaMA-Factory looks for images beside the list of its questions, as media_dir is not set"
    assert whys(done)["recipe.data.image_root"] == beside
    null = converted(tmp_path, {**old, "dataset": "ours", "dataset_dir": "data", "media_dir": None})
    assert (whys(null)["recipe.data.image_root"], whys(null)["media_dir"]) == (beside, "null: the default")
    missing.write_text("[]")
    done = converted(tmp_path, {**old, "dataset": "ours"})
    assert whys(done)["recipe.data.train"] == "as dataset_info.json has it"
    there = converted(tmp_path, {**old, "dataset": "ours", "dataset_dir": "data", "media_dir": "pictures"})
    assert there.recipe.data.image_root == "pictures"
    for name, why in (
        ("ours,text", f"text: {NO_IMAGES}"),
        ("text", NO_IMAGES),
        ("far", "it is fetched from a hub (hf_hub_url x/y): fetch it, and give --train FILE"),
        ("odd", "its columns have names that are not read here: rename them in the data, and give --train FILE"),
        ("none", f"{where} has no such name"),
    ):
        assert refused(tmp_path, {**old, "dataset": name}) == [f"dataset is {name}; {why}"]


@pytest.mark.parametrize("names", ["a, b", ["a", "b"]])
def test_llama_factory_several_sets(tmp_path: Path, names: Any) -> None:
    """One after another, each cut to its first max_samples: the same questions, as often."""
    entry = {"formatting": "sharegpt", "columns": {"messages": "messages", "images": "images"}}
    known = {name: {**entry, "file_name": f"{name}.json", "tags": {"role_tag": "role"}} for name in ("a", "b")}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(known))
    Image.new("RGB", (32, 32)).save(tmp_path / "data" / "x.png")
    for name, count in (("a", 2), ("b", 5)):
        turns = [
            [{"role": "user", "content": f"<image>{name}?"}, {"role": "assistant", "content": f"{name}{number}"}]
            for number in range(count)
        ]
        lines = [{"messages": each, "images": ["x.png"]} for each in turns]
        (tmp_path / "data" / f"{name}.json").write_text(json.dumps(lines))
    old = {"model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct", "finetuning_type": "lora", "template": "qwen3_vl_nothink"}
    old |= {"dataset": names, "max_samples": 3}
    done = converted(tmp_path, old)
    assert whys(done)["recipe.data.train"] == (
        "as dataset_info.json has it; recipe.data.mix has data/b.json: each question of all sets counts once"
    )
    recipe, _ = write(done, tmp_path / "new" / "deep")
    read = Reading(load_recipe(recipe), recipe.parent, None, None, lambda _: None).read(("train",))
    assert not read.errors and [each.answer for each in read.splits["train"]] == ["a0", "a1", "b0", "b1", "b2"]
    (line,) = refused(tmp_path, {**old, "dataset": "a", "eval_dataset": "a,b"})
    assert line == (
        "eval_dataset is a,b; several sets of validation questions: join them in one file, and give --val FILE"
    )
    (line,) = refused(tmp_path, {**old, "mix_strategy": "interleave_under"})
    assert line.startswith("mix_strategy is interleave_under; questions would be drawn from several sets")


ENTRY = {
    **{"file_name": "ours.json", "formatting": "sharegpt", "columns": {"messages": "messages", "images": "images"}},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
}
PART = "only a part of the questions: write it to a file, and give --train FILE"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (
            {"num_samples": 100},
            "num_samples is 100: so many are drawn at random: write them to a file, and give --train FILE",
        ),
        ({"split": "train[:10%]"}, f"split is train[:10%]: {PART}"),
        ({"subset": "radiology"}, f"subset is radiology: {PART}"),
        ({"folder": "part"}, f"folder is part: {PART}"),
        ({"hf_hub_url": "a/b"}, "it is fetched from a hub (hf_hub_url a/b): fetch it, and give --train FILE"),
        ({"ms_hub_url": "a/b"}, "it is fetched from a hub (ms_hub_url a/b): fetch it, and give --train FILE"),
        ({"script_url": "s"}, "it is fetched from a hub (script_url s): fetch it, and give --train FILE"),
        (
            {"columns": {"messages": "messages", "system": "rule"}},
            "columns.system is rule; system and system_prompt are read here: rename it in the data, and give --train "
            "FILE",
        ),
        (
            {"columns": {"messages": "messages", "tools": "tools"}},
            "columns.tools is tools, which is not read here: leave it out of the data, and give --train FILE",
        ),
        (
            {"tags": {"role_tag": "role", "user_tag": "patient"}},
            "tags.user_tag is patient, which is not read here (read: user): rename it in the data, and give --train "
            "FILE",
        ),
        ({"columns": ["messages"]}, "columns is [messages], and must be names: give --train FILE"),
        ({"tags": "role"}, "tags is role, and must be names: give --train FILE"),
        ({"weight": 2}, "weight is not known, and it may change the questions: give --train FILE"),
    ],
)
def test_an_entry_of_the_list_that_changes_the_questions(tmp_path: Path, more: dict[str, Any], why: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"ours": {**ENTRY, **more}}))
    old = {"model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct", "finetuning_type": "lora", "template": "qwen3_vl_nothink"}
    assert refused(tmp_path, {**old, "dataset": "ours"}) == [f"dataset is ours; {why}"]
    (said,) = refused(tmp_path, {**old, "eval_dataset": "ours"}, DATA)
    assert said == f"eval_dataset is ours; {why.replace('--train', '--val')}"


@pytest.mark.parametrize(
    "more",
    [
        {"columns": None, "tags": None},
        {"columns": {"messages": "messages", "system": "system"}},
        {"num_samples": None, "split": "train"},
        {},
    ],
)
def test_an_entry_of_the_list_that_says_nothing_else(tmp_path: Path, more: dict[str, Any]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"ours": {**ENTRY, **more}}))
    old = {"model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct", "finetuning_type": "lora", "template": "qwen3_vl_nothink"}
    assert converted(tmp_path, {**old, "dataset": "ours"}).recipe.data.train == "data/ours.json"


@pytest.mark.parametrize("text", ["[" * 20_000, "[1]", "{", "null", '{"ours": 3}'])
def test_a_list_of_data_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(text)
    old = {"model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct", "finetuning_type": "lora", "template": "qwen3_vl_nothink"}
    (said,) = refused(tmp_path, {**old, "dataset": "ours"})
    assert said.startswith(f"dataset is ours; {tmp_path}/data/dataset_info.json ") and "\n" not in said


@pytest.mark.parametrize(("family", "template"), [("qwen2_5_vl", "qwen2_vl"), ("llava", "llava")])
def test_what_comes_out_trains(tmp_path: Path, tiny_models: dict[str, Path], family: str, template: str) -> None:
    """Adapters on all layers of a language model whose tower has layers of the same names."""
    worlds.write_world(tmp_path / "data", 6, (3, 2), hard=False)
    rows = [json.loads(line) for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()]
    talks = [
        {
            "messages": [
                {"role": "user", "content": f"<image>{row['question']}"},
                {"role": "assistant", "content": row["answer"]},
            ],
            "images": [f"images/{row['image']}"],
        }
        for row in rows
    ]
    (tmp_path / "data" / "ours.json").write_text(json.dumps(talks))
    columns = {"messages": "messages", "images": "images"}
    entry = {"file_name": "ours.json", "formatting": "sharegpt", "columns": columns, "tags": {"role_tag": "role"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"ours": entry}))
    old = {**QWEN25, "model_name_or_path": str(tiny_models[family]), "dataset": "ours", "max_samples": 4, "bf16": False}
    old["template"] = template
    old |= {"use_fast_image_processor": False, "image_max_pixels": 16384, "gradient_accumulation_steps": 2}
    write(converted(tmp_path, {**old, "dataloader_num_workers": 0}), tmp_path / "new")
    words = ("--plan", "new/plan.yaml", "--out", "run", "--max-steps", "1", "--set", "plan.device=cpu")
    said = sameday(tmp_path, "train", "new/recipe.yaml", *words)
    assert said.code == 0, said.err
    names = list(load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors"))
    assert any("down_proj" in name for name in names) and all(".language_model." in name for name in names)


def test_an_empty_thought_before_answers_is_refused(tmp_path: Path) -> None:
    """LLaMA-Factory's template of Qwen3-VL adds it; the model's own has none."""
    thinks = {**LLAMA, "template": "qwen3_vl"}
    said = "template is qwen3_vl; an empty thought, <think></think>, stands before each answer and is "
    remedy = "which no recipe says: set template: qwen3_vl_nothink if answers are to be learned as they are"
    for more in ({}, {"enable_thinking": True}, {"model_name_or_path": "hospital/ours"}):
        (line,) = refused(tmp_path, {**thinks, **more}, DATA)
        assert line == f"{said}learned with it (enable_thinking, true by default), {remedy}"
    (line,) = refused(tmp_path, {**thinks, "enable_thinking": False}, DATA)
    assert line == f"{said}part of the prompt, {remedy}"
    for value in (True, False, None):  # the web UI passes it always
        done = converted(tmp_path, {**LLAMA, "enable_thinking": value}, DATA)
        assert whys(done)["enable_thinking"] == (
            "does nothing: only templates that put a thought before answers ask for it"
        )
    (line,) = refused(tmp_path, {**QWEN25, "template": "qwen3_vl"}, DATA)
    assert line == "template is qwen3_vl; the prompt would be another one (allowed: qwen2_vl, qwen2_5_vl)"


def test_a_system_prompt_instead_of_the_templates(tmp_path: Path) -> None:
    done = converted(tmp_path, {**LLAVA, "val_size": 0, "default_system": "You are a doctor."}, DATA)
    assert done.recipe.system_prompt == "You are a doctor."
    assert whys(done)["recipe.system_prompt"] == "of questions that have none of their own"
    assert converted(tmp_path, {**QWEN25, "default_system": None}, DATA).recipe.system_prompt is None
    assert refused(tmp_path, {**QWEN25, "default_system": ""}, DATA) == [
        "default_system is ''; the template's system prompt would be left out, and no recipe says that: leave "
        "default_system out where the template has none"
    ]
