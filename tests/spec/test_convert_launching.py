"""What a launcher or DeepSpeed says beside the trainer's settings is taken, or refused where it contradicts them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from converting import converted, refused, script, whys

PLAIN = {"model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct", "train_file": "train.jsonl", "bf16": True}
BATCH = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
AUTO = {
    **{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"},
    **{"gradient_clipping": "auto", "fp16": {"enabled": "auto", "loss_scale": 0}, "bf16": {"enabled": "auto"}},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "steps_per_print": 10,
}


@pytest.mark.parametrize(
    ("launch", "batch"),
    [
        ({"num_processes": 4, "num_machines": 2}, 32),
        ({"nproc_per_node": 4, "nnodes": 2}, 64),
        ({"num_gpus": 4, "num_nodes": 2}, 64),
    ],
)
def test_processes_of_several_machines(tmp_path: Path, launch: dict[str, Any], batch: int) -> None:
    """accelerate counts those of all machines, torchrun and deepspeed those of one."""
    done = converted(tmp_path, {**PLAIN, **BATCH, "launch": launch})
    assert done.recipe.effective_batch == batch
    if "num_machines" in launch:
        assert whys(done)["launch.num_machines"] == "num_processes counts the processes of all machines"


@pytest.mark.parametrize("word", ["gpu", "auto"])
def test_a_number_of_processes_that_is_a_word(tmp_path: Path, word: str) -> None:
    done = converted(tmp_path, {**PLAIN, **BATCH, "launch": {"nproc_per_node": word, "nnodes": 2}})
    (said,) = {note.why for note in done.notes if note.key == "launch.nproc_per_node"}
    assert (
        said == f"2 at once x 4 accumulated x 2 processes; how many {word} were is not known: multiply by their number"
    )
    assert done.recipe.effective_batch == 16


def test_machines_without_processes_are_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, {**PLAIN, **BATCH, "launch": {"num_machines": 2}}) == [
        "launch.num_machines is 2; and num_processes, which counts the processes of all machines, is not given"
    ]


def test_the_precision_of_a_launcher(tmp_path: Path) -> None:
    plain = {**PLAIN, "bf16": None}
    done = converted(tmp_path, {**plain, "launch": {"mixed_precision": "bf16"}})
    assert done.recipe.precision == "bf16"
    assert [note.key for note in done.notes if note.went_to == "recipe.precision"] == ["launch.mixed_precision"]
    assert converted(tmp_path, {**plain, "launch": {"mixed_precision": "no"}}).recipe.precision == "float32"
    for precision in ("fp16", "fp8"):
        assert refused(tmp_path, {**plain, "launch": {"mixed_precision": precision}}) == [
            f"launch.mixed_precision is {precision}; no recipe has this precision (allowed: bf16, float32, tf32)"
        ]


def test_the_config_file_of_accelerate(tmp_path: Path) -> None:
    inner = {"gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "zero_stage": 2}
    there = {"num_processes": 3, "num_machines": 1, "mixed_precision": "bf16", "deepspeed_config": inner}
    (tmp_path / "zero.yaml").write_text(yaml.safe_dump(there))
    old = {**PLAIN, **BATCH, "bf16": None, "launch": {"config_file": "zero.yaml"}}
    done = converted(tmp_path, old)
    assert (done.recipe.effective_batch, done.recipe.precision) == (24, "bf16")
    assert whys(done)["launch.gradient_accumulation_steps"] == "the trainer's own settings say the same"
    there["mixed_precision"] = "fp16"
    inner |= {"gradient_accumulation_steps": 1, "gradient_clipping": 0.5}
    (tmp_path / "zero.yaml").write_text(yaml.safe_dump(there))
    assert refused(tmp_path, old) == [
        f"{tmp_path}/zero.yaml: launch.mixed_precision is fp16; no recipe has this precision (allowed: bf16, float32, "
        "tf32)",
        f"{tmp_path}/zero.yaml: launch.gradient_accumulation_steps is 1; it is DeepSpeed's "
        "(deepspeed_config.gradient_accumulation_steps in a file of accelerate's, --gradient_accumulation_steps of its "
        "launcher), but gradient_accumulation_steps of the trainer is 4: give both one value, or --drop "
        "launch.gradient_accumulation_steps",
        f"{tmp_path}/zero.yaml: launch.gradient_clipping is 0.5; it is DeepSpeed's (deepspeed_config.gradient_clipping "
        "in a file of accelerate's, --gradient_clipping of its launcher), but recipe.max_grad_norm is 1.0: give both "
        "one value, or --drop launch.gradient_clipping",
    ]
    done = converted(tmp_path, {**PLAIN, "launch": {"config_file": "nowhere.yaml"}})
    assert whys(done)["launch.config_file"] == (
        f"not found at {tmp_path}/nowhere.yaml: it may say how many processes there were, and their precision"
    )


def changed(where: str, value: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(AUTO))
    here = config
    *sections, last = where.split(".")
    for section in sections:
        here = here.setdefault(section, {})
    if value is None:
        del here[last]
    else:
        here[last] = value
    return config


WRONG = [
    ("train_batch_size", 64, "but recipe.effective_batch (num_processes gives the number of processes) is 8"),
    ("train_micro_batch_size_per_gpu", 8, "but the trainer's batch of one device is 2"),
    ("gradient_accumulation_steps", 2, "but gradient_accumulation_steps of the trainer is 4"),
    ("gradient_clipping", 0.5, "but recipe.max_grad_norm is 1.0"),
    ("fp16.enabled", True, "there is no fp16 recipe (allowed: false)"),
    ("bf16.enabled", False, "but bf16 of the trainer is true"),
    ("optimizer.type", "Lion", "no recipe has this optimizer (allowed: AdamW, Adam)"),
    ("optimizer.params.lr", 1e-3, "but recipe.learning_rate is 5e-05"),
    ("optimizer.params.betas", [0.8, 0.999], "but recipe.betas is [0.9, 0.999]"),
    ("optimizer.params.adam_w_mode", False, "the optimizer would be another one (allowed: true)"),
    ("scheduler.type", "WarmupLR", "but recipe.schedule is linear (allowed: WarmupDecayLR)"),
    (
        "zero_optimization.zero_quantized_weights",
        True,
        "weights or gradients would be rounded on their way (allowed:",
    ),
    ("progressive_layer_drop.theta", 0.5, "not known, and it may change the model; --drop deepspeed leaves out DeepSp"),
]


@pytest.mark.parametrize(("where", "value", "why"), WRONG)
def test_a_config_of_deepspeed_that_contradicts(tmp_path: Path, where: str, value: Any, why: str) -> None:
    shown = {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
    config = changed(where, value)
    (line,) = refused(tmp_path, {**PLAIN, **BATCH, "deepspeed": config})
    assert line.startswith(f"deepspeed.{where} is {shown}; {why}")
    (tmp_path / "ds.json").write_text(json.dumps(config))
    (line,) = refused(tmp_path, {**PLAIN, **BATCH, "deepspeed": "ds.json"})
    assert line.startswith(f"deepspeed is ds.json; {tmp_path}/ds.json: {where} is {shown}; {why}")
    assert converted(tmp_path, {**PLAIN, **BATCH, "deepspeed": "ds.json"}, drop=["deepspeed"]).recipe


@pytest.mark.parametrize(
    ("where", "value"),
    [
        *[("train_batch_size", 8), ("train_micro_batch_size_per_gpu", 2), ("gradient_accumulation_steps", 4)],
        *[("gradient_clipping", 1.0), ("fp16.enabled", False), ("bf16.enabled", True), ("optimizer.params.lr", "5e-5")],
        *[("optimizer.params.betas", [0.9, 0.999]), ("scheduler.type", "WarmupDecayLR")],
    ],
)
def test_a_config_of_deepspeed_that_says_the_same(tmp_path: Path, where: str, value: Any) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(changed(where, value)))
    done = converted(tmp_path, {**PLAIN, **BATCH, "deepspeed": "ds.json"})
    assert whys(done)["deepspeed"] == "it says what the trainer's settings say, or nothing"
    converted(tmp_path, {**PLAIN, **BATCH, "deepspeed": changed(where, value)})


def test_clipping_that_deepspeed_does_not_do(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(changed("gradient_clipping", None)))
    (line,) = refused(tmp_path, {**PLAIN, **BATCH, "deepspeed": "ds.json"})
    assert line.endswith(
        "/ds.json: has no gradient_clipping, so that DeepSpeed does not clip; but recipe.max_grad_norm is 1.0: give "
        "it, or max_grad_norm: 0"
    )
    done = converted(tmp_path, {**PLAIN, **BATCH, "deepspeed": "ds.json", "max_grad_norm": 0})
    assert done.recipe.max_grad_norm is None


def test_a_warm_up_of_deepspeed(tmp_path: Path) -> None:
    config = changed("scheduler", {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto"}})
    (line,) = refused(tmp_path, {**PLAIN, **BATCH, "deepspeed": config, "warmup_steps": 10})
    assert "DeepSpeed's warm-up follows a logarithm, and no recipe says that: give warmup_type linear if it was" in line
    config["scheduler"]["params"]["warmup_type"] = "linear"
    assert converted(tmp_path, {**PLAIN, **BATCH, "deepspeed": config, "warmup_steps": 10}).recipe.warmup_steps == 10
    config["scheduler"]["params"]["warmup_num_steps"] = 20
    (line,) = refused(tmp_path, {**PLAIN, **BATCH, "deepspeed": config, "warmup_steps": 10})
    assert line.endswith("warmup_num_steps is 20; but by the recipe it is 10; auto follows it")


def test_a_config_of_deepspeed_that_is_not_there(tmp_path: Path) -> None:
    done = converted(tmp_path, {**PLAIN, "deepspeed": "zero3.json"})
    assert whys(done)["deepspeed"] == (
        f"not found at {tmp_path}/zero3.json: it may set precision, optimizer, schedule, clipping and batch; look there"
    )
    swift = {"model": "Qwen/Qwen3-VL-8B-Instruct", "train_type": "lora", "dataset": "d.jsonl", "deepspeed": "zero2"}
    done = converted(tmp_path, swift, trainer="swift")
    assert whys(done)["deepspeed"] == "all in it that could change the model follows the trainer"


TRL = "--model_name_or_path Qwen/Qwen3-VL-8B --dataset_name a.jsonl --completion_only_loss true --bf16 --use_peft "
TRL += "--lora_target_modules q_proj v_proj"
FOUR = "8 at once x 1 accumulated x 4 processes"


@pytest.mark.parametrize(
    ("launcher", "why"),
    [
        ("deepspeed --include localhost:0,1,2,3 --master_port 1 sft_vlm.py", FOUR),
        ("deepspeed --include=host1:0,1@host2:0,1 sft_vlm.py", FOUR),
        ("deepspeed --num_gpus 4 --hostfile hosts sft_vlm.py", FOUR),
        ("python -m accelerate.commands.launch --num_processes 4 sft_vlm.py", FOUR),
        ("python3 -u -m deepspeed.launcher.runner --num_gpus 4 sft_vlm.py", FOUR),
        ("python -m torch.distributed.run --nproc_per_node 4 sft_vlm.py", FOUR),
        ("accelerate launch --num_processes 4 --module trl.scripts.sft", FOUR),
        ("accelerate launch --num_processes 4 --num_machines $SLURM_NNODES sft_vlm.py", FOUR),
        (
            "deepspeed --exclude host1:0 sft_vlm.py",
            "8 at once x 1 accumulated; how many devices --exclude host1:0 leaves is not known: multiply by their "
            "number",
        ),
        (
            "deepspeed --include host1@host2 sft_vlm.py",
            "8 at once x 1 accumulated; how many devices --include host1@host2 leaves is not known: multiply by their "
            "number",
        ),
        (
            "torchrun --nnodes 4 sft_vlm.py",
            f"{FOUR}; if each machine had several devices, multiply by their number",
        ),
    ],
)
def test_processes_of_launchers_as_they_are_typed(tmp_path: Path, launcher: str, why: str) -> None:
    done = converted(tmp_path, f"{launcher} {TRL} --gradient_accumulation_steps 1")
    assert whys(done)["recipe.effective_batch"] == why
    assert done.recipe.effective_batch == (32 if FOUR in why else 8)


def test_machines_that_are_not_known_are_refused_where_they_count(tmp_path: Path) -> None:
    (line,) = refused(tmp_path, f"torchrun --nnodes $N --nproc_per_node 4 sft_vlm.py {TRL}")
    assert line == "--nnodes is $N; this script does not say what $N is: give it"


def test_devices_that_a_script_lets_its_trainer_see(tmp_path: Path) -> None:
    """LLaMA-Factory's own command starts a process for each of them; others start one."""
    flags = {
        **{"stage": "sft", "model_name_or_path": "Qwen/Qwen3-VL-8B", "finetuning_type": "lora", "bf16": True},
        **{"template": "qwen3_vl_nothink", "train_file": "a.jsonl", "gradient_accumulation_steps": 1},
    }
    done = converted(tmp_path, script("llamafactory-cli train", flags, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}))
    assert done.recipe.effective_batch == 32
    assert whys(done)["recipe.effective_batch"] == (
        f"{FOUR}; llamafactory-cli starts a process for each of the 4 devices in CUDA_VISIBLE_DEVICES"
    )
    for seen in ({"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "$GPUS"}, {}):
        done = converted(tmp_path, script("llamafactory-cli train", flags, seen))
        assert whys(done)["recipe.effective_batch"].endswith(
            "accumulated; on several devices, multiply by their number"
        )
    done = converted(
        tmp_path, script("llamafactory-cli train", flags, {"CUDA_VISIBLE_DEVICES": "0,1", "NPROC_PER_NODE": 4})
    )
    assert whys(done)["recipe.effective_batch"] == FOUR
    done = converted(tmp_path, f"CUDA_VISIBLE_DEVICES=0,1,2,3 python sft_vlm.py {TRL}")
    assert done.recipe.effective_batch == 8
    assert whys(done)["recipe.effective_batch"].endswith(
        "; on several devices (CUDA_VISIBLE_DEVICES names 4), multiply by their number"
    )
    done = converted(tmp_path, f"export CUDA_VISIBLE_DEVICES=0,1,2,3\ndeepspeed sft_vlm.py {TRL}")
    assert done.recipe.effective_batch == 32
    assert "deepspeed starts a process for each of the 4 devices" in whys(done)["recipe.effective_batch"]


def test_devices_that_a_config_names(tmp_path: Path) -> None:
    for name in ("num_gpus", "world_size"):
        done = converted(tmp_path, {**PLAIN, "train": {name: 4, "grad_clip": 0.5}})
        assert done.recipe.effective_batch == 4 * converted(tmp_path, PLAIN).recipe.effective_batch
        assert done.recipe.max_grad_norm == 0.5


def test_the_accumulation_that_swift_takes_by_itself_follows_the_devices(tmp_path: Path) -> None:
    swift = "swift sft --model Qwen/Qwen3-VL-8B --dataset a.jsonl"
    keeps = "on several devices, ms-swift accumulates less by default: a step keeps about 16 questions"
    done = converted(tmp_path, swift)
    assert whys(done)["recipe.effective_batch"] == f"ms-swift's default; 1 at once x 16 accumulated; {keeps}"
    done = converted(tmp_path, f"{swift} --gradient_accumulation_steps 16")
    assert whys(done)["recipe.effective_batch"].endswith("16 accumulated; on several devices, multiply by their number")
