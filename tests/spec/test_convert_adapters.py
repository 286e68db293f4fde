"""A config that asks for adapters never becomes a recipe that trains all weights."""

import json
from pathlib import Path
from typing import Any

import pytest
from converting import TARGETED, converted, refused, script, whys

from sameday.spec.convert.families import FAMILIES

PLAIN = {"model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct", "train_file": "train.jsonl"}
LLAMA_ALL = {"model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct", "finetuning_type": "full", "cutoff_len": 512}
SWIFT_ALL = {"model": "Qwen/Qwen3-VL-8B-Instruct", "train_type": "full", "dataset": "d.jsonl", "attn_impl": "sdpa"}
NO_RANK = "it asks for adapters, and nothing gives their rank: give lora_r, lora_alpha, lora_dropout and lora_target_"
ALONE = (
    "would be trained, and no recipe says that: recipe.train_vision is of vision tower and projector together "
    "(allowed: both frozen, or both trained)"
)
SIZE = {"lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "lora_target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ({"use_lora": True}, "use_lora is true; "),
        ({"lora_enable": True}, "lora_enable is true; "),
        ({"use_peft": "true"}, "use_peft is true; "),
        ({"lora": {"enabled": True}}, "lora.enabled is true; "),
        ({"lora": True}, "lora is true; "),
        ({"peft_type": "LORA"}, "peft_type is LORA; "),
        ({"finetuning_type": "lora"}, "finetuning_type is lora; "),
        ({"train_type": "lora"}, "train_type is lora; "),
        ({"tuner_type": "lora"}, "tuner_type is lora; "),
        ({"lora": {"bias": "none"}}, "lora.bias is none; "),
        ({"use_dora": True}, "use_dora is true; "),
    ],
)
def test_adapters_without_a_rank_are_refused(tmp_path: Path, old: dict[str, Any], said: str) -> None:
    (line,) = refused(tmp_path, {**PLAIN, **old})
    assert line.startswith(said + NO_RANK)


NO_LAYERS = (
    "adapters are asked for, nothing names the layers that get them, and PEFT has no default for {}: give what the old "
    "run had (target_modules in its adapter_config.json), such as {}"
)
LIST = "lora_target_modules: [q_proj, k_proj, v_proj, o_proj]"
TRL = {"dataset_name": "data/train.jsonl", "completion_only_loss": True, "use_peft": True, "learning_rate": 1e-4}


@pytest.mark.parametrize(
    ("old", "kind"),
    [
        ({**PLAIN, "lora_r": 8}, "qwen3_vl"),
        ({**PLAIN, "lora": {"rank": 8, "alpha": 16}}, "qwen3_vl"),
        ({**PLAIN, "use_lora": True, "lora_alpha": 8, "model_name_or_path": "hospital/ours"}, "models with images"),
        ({**PLAIN, "prev_checkpoint": "saves/a"}, "qwen3_vl"),
        ({"model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct", **TRL}, "qwen2_5_vl"),
        (
            {name: value for name, value in TARGETED.items() if name != "lora_target_modules"}
            | {"optimizer": "adamw_torch", "datasets": [{"path": "a.jsonl"}], "base_model": "google/gemma-3-4b-it"}
            | {"chat_template": "gemma3"},
            "gemma3",
        ),
    ],
)
def test_adapters_without_layers_are_refused(tmp_path: Path, old: dict[str, Any], kind: str) -> None:
    """Layers that nobody named would be another model, said in one line among many."""
    (line,) = refused(tmp_path, old)
    assert line == f"lora_target_modules is not set; {NO_LAYERS.format(kind, LIST)}"


def test_layers_that_are_null_and_those_of_a_command(tmp_path: Path) -> None:
    (line,) = refused(tmp_path, {**PLAIN, "lora": {"r": 8, "target_modules": None}})
    assert line == f"lora.target_modules is null; {NO_LAYERS.format('qwen3_vl', LIST)}"
    old = {"model_name_or_path": "Qwen/Qwen3-VL-8B", **TRL}
    (line,) = refused(tmp_path, script("python sft_vlm.py", old))
    assert line.endswith(NO_LAYERS.format("qwen3_vl", "--lora_target_modules q_proj k_proj v_proj o_proj"))
    assert converted(tmp_path, script("python sft_vlm.py", {**old, "lora_target_modules": ["q_proj", "v_proj"]})).recipe


@pytest.mark.parametrize("spelled", ["target_modules", "lora_target", "lora_target_modules"])
def test_layers_in_each_spelling(tmp_path: Path, spelled: str) -> None:
    done = converted(tmp_path, {**PLAIN, "lora_r": 8, spelled: ["q_proj", "v_proj"]})
    assert done.recipe.lora.target_modules == ("q_proj", "v_proj")


def test_peft_has_no_default_for_the_families() -> None:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    assert not FAMILIES.keys() & TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.keys()


@pytest.mark.parametrize("switch", [{"use_lora": True}, {"peft_type": "LORA"}, {"finetuning_type": "lora"}])
def test_a_switch_beside_a_rank(tmp_path: Path, switch: dict[str, Any]) -> None:
    done = converted(tmp_path, {**PLAIN, **SIZE, **switch})
    assert (done.recipe.train, done.recipe.lora.r, done.recipe.lora.dropout) == ("lora", 4, 0.1)
    assert [note.went_to for note in done.notes if note.key in switch] == ["recipe.train"]


@pytest.mark.parametrize("switch", [{"use_lora": False}, {"use_peft": "false"}, {"finetuning_type": "full"}])
def test_adapters_that_are_off_train_all_weights(tmp_path: Path, switch: dict[str, Any]) -> None:
    (name, value) = next(iter(switch.items()))
    done = converted(tmp_path, {**PLAIN, **SIZE, **switch, "use_rslora": True})
    assert (done.recipe.train, done.recipe.train_vision) == ("all", True)
    assert {whys(done)[each] for each in (*SIZE, "use_rslora")} == {
        f"does nothing: {name} is {str(value).lower()}",
    }


@pytest.mark.parametrize(
    ("old", "reason"),
    [
        (
            {"use_lora": False, "prev_checkpoint": "adapter"},
            "prev_checkpoint is adapter; but use_lora is false: no adapter would be trained",
        ),
        ({**SIZE, "use_lora": True, "finetuning_type": "full"}, "finetuning_type is full; but use_lora is true"),
        ({**SIZE, "peft_type": "IA3"}, "peft_type is IA3; no recipe trains so (allowed: LORA)"),
        ({**SIZE, "use_lora": "maybe"}, "use_lora is maybe; no recipe trains so (allowed: true, false)"),
        ({"finetuning_type": "freeze"}, "finetuning_type is freeze; no recipe trains so (allowed: lora, full)"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, old: dict[str, Any], reason: str) -> None:
    assert reason in refused(tmp_path, {**PLAIN, **old})


def test_a_trainer_with_a_switch_and_a_rank_of_its_own(tmp_path: Path) -> None:
    swift = {"model": "Qwen/Qwen3-VL-8B-Instruct", "train_type": "lora", "freeze_vit": True, "dataset": "d.jsonl"}
    done = converted(tmp_path, swift)
    assert (done.trainer.name, done.recipe.train, done.recipe.lora.r) == ("ms-swift", "lora", 8)
    llama = {"model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct", "finetuning_type": "lora", "cutoff_len": 512}
    done = converted(tmp_path, {**llama, "use_lora": True}, {"--train": "train.jsonl"})
    assert (done.trainer.name, done.recipe.train, done.recipe.lora.r) == ("LLaMA-Factory", "lora", 8)
    assert whys(done)["use_lora"] == "recipe.train is lora"
    assert "use_lora is false; but by the other keys adapters are trained (recipe.train lora)" in refused(
        tmp_path, {**llama, "use_lora": False}, {"--train": "train.jsonl"}
    )
    trl = {"model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct", "completion_only_loss": True, "dataset_name": "d.jsonl"}
    assert "lora_enable is true; but by the other keys all weights are trained (recipe.train all)" in refused(
        tmp_path, {**trl, "lora_enable": True}
    )


@pytest.mark.parametrize("more", [{}, {"use_lora": False}])
def test_all_weights_are_the_towers_too(tmp_path: Path, more: dict[str, Any]) -> None:
    """A program that freezes nothing trains everything; what freezes something says so."""
    done = converted(tmp_path, {**PLAIN, **more})
    assert (done.recipe.train, done.recipe.train_vision) == ("all", True)
    assert whys(done)["recipe.train_vision"] == (
        "nothing here freezes the vision tower: set it to false if the old program froze it"
    )
    thawed = converted(tmp_path, {**PLAIN, **more, "freeze_vision_tower": False, "tune_mm_mlp": True})
    assert thawed.recipe.train_vision
    assert whys(thawed)["recipe.train_vision"] == "tower and projector are trained with all the rest"
    frozen = converted(tmp_path, {**PLAIN, **more, "freeze_vision": True, "freeze_merger": True})
    assert not frozen.recipe.train_vision and "recipe.train_vision" not in whys(frozen)
    for key, part in (("freeze_vision", "projector"), ("freeze_merger", "vision tower")):
        half = converted(tmp_path, {**PLAIN, **more, key: True})
        assert not half.recipe.train_vision
        assert whys(half)["recipe.train_vision"] == (
            f"nothing here freezes the {part}: if the old program trained it alone, no recipe says that"
        )
    (line,) = refused(tmp_path, {**PLAIN, **more, "tune_mm_vision": False, "tune_mm_mlp": True})
    assert line == f"tune_mm_mlp is true; the language model and the projector, but not the vision tower, {ALONE}"
    assert not converted(tmp_path, {**PLAIN, **SIZE}).recipe.train_vision


@pytest.mark.parametrize(
    ("old", "more", "said"),
    [
        (LLAMA_ALL, {"freeze_multi_modal_projector": False, "freeze_language_model": True}, "the projector alone"),
        (LLAMA_ALL, {"freeze_vision_tower": False, "freeze_language_model": True}, "the vision tower alone"),
        (
            LLAMA_ALL,
            {"freeze_vision_tower": False},
            "the language model and the vision tower, but not the projector,",
        ),
        (SWIFT_ALL, {"freeze_aligner": False, "freeze_llm": True, "freeze_vit": True}, "the projector alone"),
        (SWIFT_ALL, {"freeze_vit": "false", "freeze_llm": "true"}, "the vision tower alone"),
        (PLAIN, {"tune_mm_vision": False, "tune_mm_mlp": True, "tune_mm_llm": False}, "the projector alone"),
    ],
)
def test_a_part_of_the_model_trained_without_the_others(
    tmp_path: Path, old: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    """Whoever followed an advice to train both would train what the old program left frozen."""
    lines = refused(tmp_path, {**old, **more}, {"--train": "train.jsonl"})
    (thawed, *language) = sorted(lines, key=lambda line: "language model would not be trained" in line)
    assert thawed.split("; ")[1] == f"{said} {ALONE}"
    assert len(language) == said.endswith(" alone")


@pytest.mark.parametrize("given", ["saves/a", ["saves/a"]])
def test_an_adapter_in_a_list_is_that_one(tmp_path: Path, given: Any) -> None:
    swift = {"model": "Qwen/Qwen3-VL-8B-Instruct", "train_type": "lora", "freeze_vit": True, "dataset": "d.jsonl"}
    assert converted(tmp_path, {**swift, "adapters": given}).recipe.start_adapter == "saves/a"
    assert converted(tmp_path, {**PLAIN, **SIZE, "adapter_name_or_path": given}).recipe.start_adapter == "saves/a"


def test_several_adapters_are_refused(tmp_path: Path) -> None:
    several = "several adapters, and a recipe starts from one: merge all but the last into the model"
    swift = {"model": "Qwen/Qwen3-VL-8B-Instruct", "train_type": "lora", "freeze_vit": True, "dataset": "d.jsonl"}
    (line,) = refused(tmp_path, {**swift, "adapters": ["saves/a", "saves/b"]})
    assert line == f"adapters is [saves/a, saves/b]; {several}"
    llama = {"model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct", "finetuning_type": "lora", "cutoff_len": 512}
    (line,) = refused(tmp_path, {**llama, "adapter_name_or_path": "saves/a,saves/b"}, {"--train": "train.jsonl"})
    assert line == f"adapter_name_or_path is saves/a,saves/b; {several}"
    done = converted(tmp_path, {**llama, "adapter_name_or_path": "saves/a"}, {"--train": "train.jsonl"})
    assert done.recipe.start_adapter == "saves/a"
    done = converted(tmp_path, {**PLAIN, "prev_checkpoint": []})
    assert (done.recipe.train, done.recipe.start_adapter) == ("all", None)


@pytest.mark.parametrize(
    ("model", "names", "layers", "why"),
    [
        (
            "llava-hf/llava-1.5-7b-hf",
            ["self_attn.q_proj", "o_proj"],
            ("self_attn.q_proj", "o_proj", "tower.self_attn.q_proj"),
            "PEFT took the tower's of these names too",
        ),
        (
            "Qwen/Qwen2.5-VL-7B-Instruct",
            ["mlp.down_proj"],
            ("mlp.down_proj", "tower.mlp.down_proj"),
            "PEFT took the tower's of these names too",
        ),
        (
            "Qwen/Qwen3-VL-8B-Instruct",
            ["q_proj", "qkv", "linear_fc1", "merger.linear_fc2"],
            ("q_proj", "tower.qkv", "tower.linear_fc1", "projector.linear_fc1", "projector.merger.linear_fc2"),
            "the language model has no layers of some of these names",
        ),
        ("Qwen/Qwen3-VL-8B-Instruct", ["language_model.q_proj", "proj"], ("language_model.q_proj", "proj"), ""),
        (
            "hospital/ours",
            ["self_attn.q_proj"],
            ("self_attn.q_proj",),
            "the language model's; where the tower has layers of these names too, PEFT took those as well",
        ),
    ],
)
def test_longer_names_of_layers_are_looked_for_in_the_whole_model_too(
    tmp_path: Path, model: str, names: list[str], layers: tuple[str, ...], why: str
) -> None:
    """As PEFT does."""
    done = converted(tmp_path, {**PLAIN, **SIZE, "model_name_or_path": model, "lora_target_modules": names})
    assert (done.recipe.lora.target_modules, whys(done)["recipe.lora.target_modules"]) == (layers, why)


@pytest.mark.parametrize(
    ("model", "pattern", "said"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", r".*\.(up_proj|down_proj)", "the vision tower or of the projector"),
        ("Qwen/Qwen2-VL-7B-Instruct", r".*\.(q_proj|fc2)", "the vision tower or of the projector"),
        ("Qwen/Qwen3-VL-8B-Instruct", r".*\.(q_proj|linear_fc2)", "the vision tower or of the projector"),
        ("llava-hf/llava-1.5-7b-hf", r".*\.(k|v)_proj", "the vision tower or of the projector"),
        ("llava-hf/llava-1.5-7b-hf", r".*(o_proj|linear_2)", "the vision tower or of the projector"),
        ("google/gemma-3-4b-it", r".*(o_proj|layers\.20\.mlp\.fc1)", "the vision tower or of the projector"),
        ("Qwen/Qwen3-VL-8B-Instruct", r".*(q_proj|lm_head)", "it takes lm_head too"),
        ("Qwen/Qwen3-VL-8B-Instruct", r".*(q_proj|embed_tokens)", "it takes the table of embeddings too"),
    ],
)
def test_a_pattern_is_held_against_every_layer_besides_the_language_models(
    tmp_path: Path, model: str, pattern: str, said: str
) -> None:
    (line,) = refused(tmp_path, {**PLAIN, **SIZE, "model_name_or_path": model, "lora_target_modules": pattern})
    assert said in line and line.endswith(": give a list of layer names, such as [q_proj, v_proj]")


@pytest.mark.parametrize(
    ("old", "line"),
    [
        (
            {"layers_to_transform": [20, 21]},
            "layers_to_transform is [20, 21]; only some layers would get adapters: leave layers_to_transform out, and "
            "name each of them in lora_target_modules, such as layers.20.self_attn.q_proj (allowed: [])",
        ),
        (
            {"exclude_modules": ".*visual.*"},
            "exclude_modules is .*visual.*; only some layers would get adapters: leave exclude_modules out, and name "
            "those that are left in lora_target_modules (language_model.q_proj is the language model's alone) "
            "(allowed: [])",
        ),
    ],
)
def test_some_layers_are_refused_with_what_names_them(tmp_path: Path, old: dict[str, Any], line: str) -> None:
    qwen = {**PLAIN, **SIZE, "model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct"}
    assert refused(tmp_path, {**qwen, **old}) == [line]
    named = ["layers.20.mlp.up_proj", "language_model.gate_proj"]
    assert converted(tmp_path, {**qwen, "lora_target_modules": named}).recipe.lora.target_modules == tuple(named)


def test_longer_names_of_layers_in_one_text(tmp_path: Path) -> None:
    """LLaMA-Factory cuts it at commas, and so do scripts."""
    llama = {**LLAMA_ALL, "finetuning_type": "lora", "dataset": None, "train_file": "train.jsonl"}
    for named in ("self_attn.q_proj", "self_attn.q_proj, self_attn.v_proj"):
        done = converted(tmp_path, {**llama, "lora_target": named})
        assert list(done.recipe.lora.target_modules) == named.split(", ")


def test_an_adapter_to_start_from_keeps_its_own_form(tmp_path: Path) -> None:
    """Where the trainer loads it by PEFT."""
    (tmp_path / "first").mkdir()
    form = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.1, "use_rslora": True, "target_modules": ["q_proj"]}
    (tmp_path / "first" / "adapter_config.json").write_text(json.dumps(form))
    llama = {**LLAMA_ALL, "finetuning_type": "lora", "dataset": None, "train_file": "train.jsonl"}
    old = {**llama, "lora_target": "q_proj", "lora_rank": 8, "adapter_name_or_path": "first"}
    done = converted(tmp_path, old)
    lora = done.recipe.lora
    assert (lora.r, lora.alpha, lora.dropout, lora.rslora) == (16, 32, 0.1, True)
    assert whys(done)["lora_rank"] == "does nothing: the adapter that training starts from has 16"
    assert whys(done)["recipe.lora.dropout"] == (
        "of the adapter that training starts from: LLaMA-Factory takes it with its settings"
    )
    same = converted(tmp_path, {**old, "lora_rank": 16})
    assert whys(same)["recipe.lora.r"] == ""
    (tmp_path / "first" / "adapter_config.json").write_text("[1]")
    assert converted(tmp_path, old).recipe.lora.r == 8


def test_an_adapter_to_start_from_names_its_layers(tmp_path: Path) -> None:
    """Where the config does not; LLaMA-Factory would take all of the decoder's for a new one. PEFT gave a name's
    adapters to the layers of the tower too."""
    (tmp_path / "first").mkdir()
    form = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
    (tmp_path / "first" / "adapter_config.json").write_text(json.dumps(form))
    axolotl = {name: value for name, value in TARGETED.items() if name != "lora_target_modules"}
    axolotl |= {"optimizer": "adamw_torch", "datasets": [{"path": "a.jsonl"}], "lora_model_dir": "first"}
    llama = {**LLAMA_ALL, "finetuning_type": "lora", "dataset": None, "train_file": "train.jsonl"}
    llama |= {"adapter_name_or_path": "first"}
    for old, trainer in ((axolotl, "axolotl"), (llama, "LLaMA-Factory")):
        done = converted(tmp_path, old)
        assert done.recipe.lora.target_modules == ("q_proj", "v_proj")
        assert whys(done)["recipe.lora.target_modules"] == (
            f"of the adapter that training starts from: {trainer} takes it with its settings"
        )
        (tmp_path / "recipe.yaml").unlink(missing_ok=True)
    named = {**llama, "lora_target": "o_proj"}
    assert converted(tmp_path, named).recipe.lora.target_modules == ("o_proj",)
    both = converted(tmp_path, {**llama, "model_name_or_path": "llava-hf/llava-1.5-7b-hf", "template": "llava"})
    assert "tower.q_proj" in both.recipe.lora.target_modules
