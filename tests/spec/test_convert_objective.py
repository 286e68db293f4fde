"""Commands that train by something else than given answers are refused by name."""

from pathlib import Path

import pytest
from converting import DATA, LLAMA, OURS, converted, lost, refused, script

TRL = {"model_name_or_path": "Qwen/Qwen2.5-VL-3B-Instruct", "use_peft": True, "lora_r": 8, "dataset_name": "x.jsonl"}
TRL |= {"lora_target_modules": ["q_proj", "v_proj"]}
GIVEN = "a recipe learns answers that are given (allowed: "
REWARDS = "trains by preferences or rewards"
OWN = "a program of supervised fine-tuning"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("swift rlhf", f"swift rlhf {REWARDS}; {GIVEN}swift sft)"),
        ("swift pt", f"swift pt learns all tokens and has no chat template; {GIVEN}swift sft)"),
        ("megatron pt", f"megatron pt learns all tokens and has no chat template; {GIVEN}megatron sft)"),
        ("torchrun swift/cli/rlhf.py", f"swift rlhf {REWARDS}; {GIVEN}swift sft)"),
        ("python -m swift.cli.pt", f"swift pt learns all tokens and has no chat template; {GIVEN}swift sft)"),
        ("python -m trl.scripts.dpo", f"trl dpo {REWARDS}; {GIVEN}trl sft)"),
        *(
            (f"trl {word}", f"trl {word} {REWARDS}; {GIVEN}trl sft)")
            for word in ("dpo", "grpo", "kto", "reward", "rloo")
        ),
        (
            "accelerate launch examples/scripts/grpo_vlm.py",
            f"grpo_vlm.py by its name {REWARDS} (grpo); {GIVEN}{OWN})",
        ),
        (
            "python train_dpo.py",
            f"train_dpo.py by its name {REWARDS} (dpo); {GIVEN}{OWN})",
        ),
        (
            "python gkd.py",
            f"gkd.py by its name learns from another model (distillation) (gkd); {GIVEN}a program of supervised "
            "fine-tuning)",
        ),
    ],
)
def test_what_does_not_learn_answers(tmp_path: Path, command: str, said: str) -> None:
    old = OURS if "swift" in command or "megatron" in command else TRL
    assert refused(tmp_path, script(command, old)) == [said]


@pytest.mark.parametrize("command", ["trl dpo", "trl grpo", "swift rlhf", "swift pt"])
def test_nobody_converts_a_config_in_vain(tmp_path: Path, command: str) -> None:
    """The command says it already, whatever its config file holds."""
    (line,) = refused(tmp_path, f"{command} --config x.yaml")
    assert line.startswith(f"{command} ") and GIVEN in line


@pytest.mark.parametrize("stage", ["dpo", "kto", "ppo", "rm"])
def test_a_stage_of_preferences(tmp_path: Path, stage: str) -> None:
    said = f"stage {stage} {REWARDS}; {GIVEN}sft)"
    assert refused(tmp_path, {**LLAMA, "stage": stage}) == [said]
    assert refused(tmp_path, script("llamafactory-cli train", {**LLAMA, "stage": stage})) == [said]
    (tmp_path / "x.yaml").write_text(f"model_name_or_path: m\nstage: {stage}\n")
    (line,) = refused(tmp_path, "llamafactory-cli train x.yaml")
    assert line == f"{tmp_path / 'x.yaml'}:2: {said}"


def test_what_learns_answers(tmp_path: Path) -> None:
    for command in ("swift sft", "python swift/cli/sft.py", "python -m swift.cli.sft"):
        assert converted(tmp_path, script(command, OURS)).recipe.lora.r == 8
    assert (
        converted(tmp_path, script("python sft_then_dpo.py", {**TRL, "completion_only_loss": True})).recipe.lora.r == 8
    )


def test_keys_that_do_not_learn_answers(tmp_path: Path) -> None:
    lines = refused(tmp_path, {**OURS, "rlhf_type": "dpo"})
    assert lines == [f"rlhf_type is dpo; it {REWARDS}, and no recipe says that (allowed: null)"]
    lines = refused(tmp_path, {**LLAMA, "do_train": False, "do_predict": True}, DATA)
    assert lost(lines) == {"do_train"}
    assert lines == ["do_train is false; it trains nothing, and no recipe says that (allowed: true)"]
