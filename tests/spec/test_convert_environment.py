"""Variables of a script: those that its trainer reads are settings; those in flags that the caller replaces are not
needed."""

from pathlib import Path

import pytest
from converting import converted, refused, whys

COMMON = "--model Qwen/Qwen2.5-VL-7B-Instruct --dataset a.jsonl"
LLAMA = (
    "train --stage sft --do_train --model_name_or_path Qwen/Qwen3-VL-8B --finetuning_type lora "
    "--template qwen3_vl_nothink --bf16 --train_file a.jsonl"
)
TRL = "--model_name_or_path Qwen/Qwen3-VL-8B --dataset_name a.jsonl --completion_only_loss true --use_peft "
TRL += "--lora_target_modules q_proj v_proj"


def test_a_script_exports_variables_of_its_own(tmp_path: Path) -> None:
    text = (
        "export LR=2e-4 MODEL_PATH=Qwen/Qwen3-VL-8B seed=3\nexport http_proxy=x LOCAL_RANK=0 HF_TOKEN=hidden\n"
        "swift sft --model $MODEL_PATH --dataset a.jsonl --learning_rate $LR --seed $seed\n"
    )
    done = converted(tmp_path, text)
    assert (done.recipe.model, done.recipe.learning_rate, done.recipe.seed) == ("Qwen/Qwen3-VL-8B", 2e-4, 3)
    assert whys(done)["(6 variables)"] == (
        "LR, MODEL_PATH, seed, http_proxy, LOCAL_RANK, HF_TOKEN: the script's own or the machine's; no setting is "
        "known that ms-swift reads from them"
    )


def test_of_many_variables_some_are_named(tmp_path: Path) -> None:
    text = f"export {' '.join(f'V{number}=1' for number in range(40))}\nswift sft {COMMON}"
    assert whys(converted(tmp_path, text))["(40 variables)"].startswith("V0, V1, V2, V3, V4, V5, V6, V7, V8, V9, V10, ")
    assert "V11 and 28 more: the script's own" in whys(converted(tmp_path, text))["(40 variables)"]
    assert whys(converted(tmp_path, f"X=1 swift sft {COMMON}"))["(1 variable)"].startswith("X: the script's own")


def test_settings_are_those_that_the_trainer_reads(tmp_path: Path) -> None:
    export = "export NPROC_PER_NODE=4 MAX_PIXELS=1003520"
    done = converted(tmp_path, f"{export}\nswift sft {COMMON} --gradient_accumulation_steps 1")
    assert (done.recipe.effective_batch, done.recipe.max_pixels) == (4, 1003520)
    done = converted(tmp_path, f"{export}\nFORCE_TORCHRUN=1 NNODES=2 llamafactory-cli {LLAMA}")
    assert (done.recipe.effective_batch, done.recipe.max_pixels) == (64, 768 * 768)
    assert whys(done)["(1 variable)"].startswith("MAX_PIXELS: the script's own or the machine's; no setting is known")
    done = converted(tmp_path, f"{export}\naccelerate launch --num_processes 2 sft_vlm.py {TRL}")
    assert (done.recipe.effective_batch, done.recipe.max_pixels) == (16, None)
    done = converted(tmp_path, f"export PET_NPROC_PER_NODE=2 PET_NNODES=3\ntorchrun --nnodes 4 sft_vlm.py {TRL}")
    assert done.recipe.effective_batch == 64


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"export MAX_PIXELS=$A\nswift sft {COMMON}", "MAX_PIXELS is $A; this script does not say what $A is: give it"),
        (
            f"export ACCELERATE_MIXED_PRECISION=fp16\naccelerate launch sft_vlm.py {TRL}",
            "ACCELERATE_MIXED_PRECISION is fp16; no recipe has this precision (allowed: bf16, float32, tf32)",
        ),
        (
            f"ROOT_IMAGE_DIR=x swift sft {COMMON}",
            "ROOT_IMAGE_DIR is x; not known, and it may change the model; --drop ROOT_IMAGE_DIR leaves it out",
        ),
    ],
)
def test_settings_of_the_environment_are_refused_by_name(tmp_path: Path, text: str, why: str) -> None:
    assert why in refused(tmp_path, text)


def test_a_variable_that_is_no_setting_can_be_dropped_by_name(tmp_path: Path) -> None:
    done = converted(tmp_path, f"export LR=1e-4\nswift sft {COMMON}", drop=["LR"])
    assert whys(done)["LR"].startswith("left out, as --drop asks")


UNKNOWN = "$DATA/my.jsonl; this script does not say what $DATA is: give it"


@pytest.mark.parametrize(
    ("text", "data", "key"),
    [
        ("swift sft --model m --dataset $DATA/my.jsonl", "--train", "dataset"),
        ("swift sft --model m --dataset a.jsonl --val_dataset $DATA/my.jsonl", "--val", "val_dataset"),
        (f"llamafactory-cli {LLAMA.replace('--train_file a.jsonl', '--dataset $DATA/my.jsonl')}", "--train", "dataset"),
        (f"python sft_vlm.py {TRL.replace('a.jsonl', '$DATA/my.jsonl')}", "--train", "dataset_name"),
        ("python train.py --model m --train_data $DATA/my.jsonl", "--train", "train_data"),
        ("python train.py --model m --train_file a.jsonl --img_dir $DATA/my.jsonl", "--images", "img_dir"),
    ],
)
def test_values_that_the_caller_replaces_need_not_be_known(tmp_path: Path, text: str, data: str, key: str) -> None:
    text = text.replace("--model m", "--model Qwen/Qwen3-VL-8B")
    assert f"--{key} is {UNKNOWN}" in refused(tmp_path, text)
    done = converted(tmp_path, text, {data: "mine.jsonl"})
    (note,) = [each for each in done.notes if each.key == key]
    assert (note.value, note.why) == ("$DATA/my.jsonl", f"{data} replaces it")
    field = {"--train": done.recipe.data.train, "--val": done.recipe.data.val, "--images": done.recipe.data.image_root}
    assert field[data] == "mine.jsonl"


def test_a_variable_behind_what_the_caller_replaces_may_be_a_flag(tmp_path: Path) -> None:
    text = "DIR=$(cd x && pwd)\nswift sft --model Qwen/Qwen3-VL-8B --dataset $DIR/a.jsonl $DIR/b.jsonl"
    assert converted(tmp_path, text, {"--train": "mine.jsonl"}).recipe.data.train == "mine.jsonl"
    assert refused(tmp_path, f"{text} $MORE", {"--train": "mine.jsonl"}) == [
        "$MORE stands behind --dataset $(cd x && pwd)/a.jsonl; this script does not say what $MORE is: give it"
    ]


def test_questions_of_validation_that_are_replaced_hold_none_of_training_out(tmp_path: Path) -> None:
    text = "swift sft --model Qwen/Qwen3-VL-8B --dataset a.jsonl --split_dataset_ratio 0.1"
    done = converted(tmp_path, f"{text} --val_dataset b.jsonl", {"--val": "mine.jsonl"})
    assert whys(done)["split_dataset_ratio"] == "does nothing: val_dataset is given"
    assert done.recipe.data.val == "mine.jsonl"
    (line,) = refused(tmp_path, text, {"--val": "mine.jsonl"})
    assert line.startswith("split_dataset_ratio is 0.1; some training questions would be held out")
