"""Variables that a shell script may be given from outside, and has a default for."""

from pathlib import Path

import pytest
from converting import converted

START = "swift sft --model Qwen/Qwen2-VL-7B-Instruct --dataset a.jsonl --train_type lora "


def said(folder: Path, script: str, data: dict[str, str] | None = None) -> list[str]:
    return [note.why for note in converted(folder, script, data).notes if note.why.startswith("line ")]


def takes(line: int, name: str, default: str) -> str:
    return f"line {line} takes {name} from outside of the script; here its default {default} is used"


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        (f"{START} --learning_rate ${{LR:-1e-4}}\n", [takes(1, "LR", "1e-4")]),
        (f"BS=${{2:-8}}\n{START} --per_device_train_batch_size $BS\n", [takes(1, "2", "8")]),
        (f': "${{BS:=4}}"\nARGS=(--seed "$BS")\n{START} "${{ARGS[@]}}"\n', [takes(1, "BS", "4")]),
        (
            f"N=${{N-4}}\nK=$((N * 2))\n{START} --gradient_accumulation_steps $K --seed ${{S:-$N}}\n",
            [takes(1, "N", "4"), takes(3, "S", "$N")],
        ),
        (f"export MAX_PIXELS=${{PIXELS:-200704}}\n{START}\n", [takes(1, "PIXELS", "200704")]),
        (
            f"NPROC_PER_NODE=${{GPUS:-2}} {START} --packing ${{P:-false}}\n",
            [takes(1, "P", "false"), takes(1, "GPUS", "2")],
        ),
        # No setting depends on these, or the script sets them itself.
        (f"{START} --output_dir ${{OUT:-out}} --report_to ${{LOG:-none}} --logging_steps ${{L:-5}}\n", []),
        (f"export WANDB_PROJECT=${{P:-x}}\necho ${{Q:-y}}\n{START}\n", []),
        (f"LR=3e-4\n{START} --learning_rate ${{LR:-1e-4}}\n", []),
        (f"LR=\n{START} --learning_rate ${{LR:-1e-4}}\n", []),
        (f"run() {{ {START} --learning_rate ${{1:-1e-4}}; }}\nrun\n", []),
    ],
)  # fmt: skip
def test_the_default_of_a_setting_is_named(tmp_path: Path, script: str, lines: list[str]) -> None:
    assert said(tmp_path, script) == lines


def test_what_an_option_replaces_depends_on_no_default(tmp_path: Path) -> None:
    script = START.replace("a.jsonl", "${DATA:-a.jsonl}")
    assert said(tmp_path, script) == [takes(1, "DATA", "a.jsonl")]
    assert said(tmp_path, script, {"--train": "b.jsonl"}) == []


def test_the_command_itself_by_default(tmp_path: Path) -> None:
    script = START.replace("swift", "${RUN:-swift}", 1)
    assert said(tmp_path, script) == [takes(1, "RUN", "swift")]
