"""Flags that a condition of a script adds: left out where the model does not depend on them, else named."""

from pathlib import Path

import pytest
from converting import converted, refused, whys

COMMON = "--model Qwen/Qwen3-VL-8B --dataset a.jsonl"
ALL = f"{COMMON} --lora_rank 4 --output_dir out"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f'A=({ALL})\nif [ "$D" = 1 ]; then A+=(--max_steps 5); fi\nswift sft "${{A[@]}}"', "$A stands in the command"),
        (f'A="{ALL}"\nif [ "$D" = 1 ]; then A="$A --max_steps 5"; fi\nswift sft $A', "$A stands in the command"),
        (f'A="{ALL}"\n[ -n "$D" ] && A+=" --max_steps 5"\neval "swift sft $A"', "$A stands in the command"),
        (f'A="swift sft {ALL}"\n[ -n "$D" ] && A+=" --max_steps 5"\n$A 2>&1 | tee log', "$A is run as a command"),
        (f'A="swift sft {ALL}"\n[ -n "$D" ] && A+=" --max_steps 5"\neval "$A"', "$A is run as a command"),
    ],
)
def test_flags_that_a_condition_adds_are_named(tmp_path: Path, text: str, why: str) -> None:
    assert refused(tmp_path, text) == [
        f"{why}; A is ... (line 1) or ... --max_steps 5 (line 2), as a condition of the script decides: leave one"
    ]


@pytest.mark.parametrize(
    ("text", "left", "line"),
    [
        (
            f'A=({ALL})\nif [ "$R" ]; then\n  A+=(--resume_from_checkpoint "$R")\nfi\nswift sft "${{A[@]}}"',
            "(--resume_from_checkpoint $R)",
            3,
        ),
        (f'A="{ALL}"\n[ -n "$R" ] && A="$A --report_to wandb"\neval "swift sft $A"', "(--report_to wandb)", 2),
        (
            f'X=""\n[ -d c ] && X="--run_name=a --logging_dir b"\nswift sft {ALL} $X',
            "(--run_name=a --logging_dir b)",
            2,
        ),
        (f'X=()\nif a; then X+=(--report-to tb); fi\nswift sft {ALL} "${{X[@]}}"', "(--report-to tb)", 2),
        (
            f"if a; then X='--lora_rank 4 --run_name a'\nelse X='--lora_rank 4 --run_name b'; fi\n"
            f"swift sft {COMMON} $X",
            "(--run_name b)",
            2,
        ),
    ],
)
def test_flags_of_the_run_alone_are_left_out(tmp_path: Path, text: str, left: str, line: int) -> None:
    done = converted(tmp_path, text)
    assert done.recipe.lora is not None and done.recipe.lora.r == 4
    assert whys(done)[left] == (
        f"line {line} puts it into {'A' if text.startswith('A=') else 'X'} on a condition; "
        "here it is left out: the model does not depend on it"
    )


@pytest.mark.parametrize(
    "added",
    ["--report_to wandb --max_steps 5", "--run_name a b", "wandb --report_to x", "--resume_only_model true"],
)
def test_what_else_a_condition_adds_is_refused(tmp_path: Path, added: str) -> None:
    (line,) = refused(tmp_path, f"X='--seed 1'\nif a; then X=\"$X {added}\"; fi\nswift sft {ALL} $X")
    assert line == (
        f"$X stands behind --output_dir out; X is --seed 1 (line 1) or --seed 1 {added} (line 2), as a condition of "
        "the script decides: leave one"
    )


def test_what_stands_behind_the_name_of_a_folder_may_be_a_flag(tmp_path: Path) -> None:
    assert refused(tmp_path, f"swift sft {ALL}/$JOB $EXTRA") == [
        "$EXTRA stands behind --output_dir out/$JOB; this script does not say what $EXTRA is: give it"
    ]
