"""Scripts around the commands of other trainers, as people write them."""

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from converting import DATA, converted, refused, script
from hypothesis import given, settings
from hypothesis import strategies as st

from sameday.models.families import known_families
from sameday.spec.convert.config import convert
from sameday.spec.convert.shell.script import is_script, read_script
from sameday.spec.errors import BadInput

# Scripts


@pytest.mark.parametrize(
    ("text", "train", "batch"),
    [
        ("swift sft --model {m} --dataset a.jsonl --seed 3 >logs/x.log 2>&1 &", "a.jsonl", 16),
        ("pip install --upgrade x && swift sft --model {m} --dataset a.jsonl | tee --append x.log", "a.jsonl", 16),
        (
            'DATA="${{DATA:-b.jsonl}}"\nsrun -u swift sft --model {m} --dataset $DATA --output_dir o/${{M##*/}}',
            "b.jsonl",
            16,
        ),
        (
            "accelerate launch --config_file zero.yaml sft_vlm.py --model_name_or_path {m} --dataset_name a.jsonl "
            "--completion_only_loss true --per_device_train_batch_size 2",
            "a.jsonl",
            6,
        ),
    ],
)
def test_what_stands_around_a_command(tmp_path: Path, text: str, train: str, batch: int) -> None:
    (tmp_path / "zero.yaml").write_text("num_processes: 3\n")
    recipe = converted(tmp_path, text.format(m="Qwen/Qwen3-VL-8B")).recipe
    assert (recipe.data.train, recipe.effective_batch) == (train, batch)


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters="$`\\|&;<>"), min_size=1)
FLAGS = st.dictionaries(
    st.from_regex(r"[a-z][a-z_]{0,9}", fullmatch=True),
    st.just(True) | st.integers(0, 10**6) | WORDS.filter(lambda word: word[0] not in "-#{[" and word[-1] != ","),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(flags=FLAGS)
def test_flags_come_back_as_they_were_written(tmp_path_factory: Any, flags: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "flags.sh"
    path.write_text(script("swift sft", flags), encoding="utf-8")
    read = read_script(path)
    document = read.document
    assert read.command == "swift sft" and list(document.values) == list(flags)
    for line, (name, value) in enumerate(flags.items(), 2):
        read = document.values[name]
        assert read == value or (not isinstance(read, str) and read == yaml.safe_load(value)), (read, value)
        assert document.places[(name,)] == f"{path}:{line}"


def test_a_number_sign_inside_a_word_is_no_comment(tmp_path: Path) -> None:
    (line,) = refused(tmp_path, "swift sft --model Qwen/Qwen3-VL-8B --dataset a.jsonl#500 # all of it\n")
    assert line == (
        "dataset is a.jsonl#500; a subset that its program draws: write it to a file, and give --train FILE"
    )


def test_a_script_as_people_write_it(tmp_path: Path) -> None:
    text = """#!/bin/bash
# a comment
export CUDA_VISIBLE_DEVICES=0
MODEL=Qwen/Qwen3-VL-8B
cd /somewhere
swift sft --model ${MODEL} `# its model` \\
    --dataset=a.jsonl \\
    --lora_rank 4 "$@"
"""
    done = converted(tmp_path, text)
    recipe = done.recipe
    (given,) = [note for note in done.notes if note.key == '("$@")']
    assert given.why == "line 8 takes it from outside of the script; here it counts as empty"
    assert (recipe.model, recipe.data.train, recipe.lora.r) == ("Qwen/Qwen3-VL-8B", "a.jsonl", 4)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "swift sft --model m --seed 3 $MORE\n",
            "$MORE stands behind --seed 3; this script does not say what $MORE is",
        ),
        ("swift sft --model $WHICH --seed 1 --seed 2\n", "--model is $WHICH; this script does not say what $WHICH is"),
        (
            "swift sft --a 1\nswift sft --a 2\n",
            "starts 2 trainings (lines 1, 2); must be one command with --flags, of swift",
        ),
        ("pip install --upgrade x\n", "starts no trainer that is known; must be one command with --flags, of swift, "),
        ("llamafactory-cli train examples/a.yaml\n", "starts a training by examples/a.yaml: convert that file"),
        ("trl sft --config a.yaml --seed 1\n", "starts a training by a.yaml: convert that file"),
        ("swift sft --a 'b\n", "a quote is opened here and never closed"),
    ],
)
def test_scripts_that_cannot_be_read(tmp_path: Path, text: str, why: str) -> None:
    assert any(why in line for line in refused(tmp_path, text))


COMMON = "--model Qwen/Qwen2.5-VL-7B-Instruct --dataset a.jsonl"


@pytest.mark.parametrize(
    "text",
    [
        f'ARGS="{COMMON} --learning_rate 2e-5 --lora_rank 16"\nswift sft $ARGS',
        f'ARGS=( {COMMON} --learning_rate 2e-5 )\nARGS+=( --lora_rank 16 )\nswift sft "${{ARGS[@]}}"',
        f'ARGS="{COMMON}"\nARGS="$ARGS --lora_rank 16"\nARGS+=\' --learning_rate 2e-5\'\nswift sft $ARGS "$@"',
        f"ARGS=(\n  {COMMON}\n  # don't --lora_rank 8\n  --lora_rank 16  # it's\n)\n"
        "swift sft ${ARGS[*]} --learning_rate 2e-5 ${EXTRA:-}",
        f'# don\'t\nrun() {{\n  local RANK=$1; shift\n  swift sft {COMMON} --lora_rank $RANK "$@"\n}}\n'
        "run 16 --learning_rate 2e-5",
        f"CMD='swift sft {COMMON} --lora_rank 16 --learning_rate 2e-5'\neval \"$CMD\"",
        f"srun bash -c 'R=16; swift sft {COMMON} --lora_rank $R 2>&1 --learning_rate 2e-5 | tee x.log'",
    ],
)
def test_flags_in_variables_arrays_and_functions(tmp_path: Path, text: str) -> None:
    recipe = converted(tmp_path, text).recipe
    assert (recipe.lora.r, recipe.learning_rate, recipe.data.train) == (16, 2e-5, "a.jsonl")


def test_variables_that_env_sets_are_the_trainers(tmp_path: Path) -> None:
    for before in (
        "env MAX_PIXELS=1003520",
        "PIXELS=1003520\ndocker run -e MAX_PIXELS=$PIXELS image",
        "MAX_PIXELS=1003520",
    ):
        assert converted(tmp_path, f"{before} swift sft {COMMON}").recipe.max_pixels == 1003520
    lines = refused(tmp_path, f"env MAX_PIXELS=$PIXELS swift sft {COMMON}")
    assert "MAX_PIXELS is $PIXELS; this script does not say what $PIXELS is: give it" in lines


def test_a_variable_that_may_be_given_from_outside_is_told(tmp_path: Path) -> None:
    done = converted(tmp_path, f"swift sft {COMMON} \\\n  ${{EXTRA:-}} --lora_rank 4")
    (given,) = [note for note in done.notes if note.key.startswith("(${")]
    assert (given.key, given.why) == (
        "(${EXTRA:-})",
        "line 1 takes it from outside of the script; here it counts as empty",
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "swift sft $EXTRA_ARGS --seed 1",
            "$EXTRA_ARGS stands in the command; this script does not say what $EXTRA_ARGS is: give it",
        ),
        (
            'ARGS="--lora_rank 4 $MORE"\nswift sft $ARGS --seed 1',
            "$MORE stands behind --lora_rank 4; this script does not say what $MORE is: give it",
        ),
        ("swift sft --seed $(date +%s)", "--seed is $(date +%s); what it gives is not known before the script runs: "),
        ("swift sft --lora_rank {1,2}", "--lora_rank is {1,2}; bash makes several words of it: write them out"),
        (
            "torchrun --$HOW 4 train.py --seed 1",
            "--$HOW stands in the command; this script does not say what $HOW is: give it",
        ),
        ('A="x  y"\nswift sft --system "$A" "$@" --seed', None),
    ],
)
def test_words_that_are_not_known_are_named(tmp_path: Path, text: str, why: str | None) -> None:
    if why is None:
        (tmp_path / "old.sh").write_text(text)
        assert read_script(tmp_path / "old.sh").document.values == {"system": "x  y", "seed": True}
    else:
        assert any(line.startswith(why) for line in refused(tmp_path, text)), refused(tmp_path, text)


RATE = f"swift sft {COMMON} --learning_rate $LR"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            f"if [ -n \"$BIG\" ]; then LR=1e-4\nelse\n  LR=2e-4; fi\n{RATE}",
            "--learning_rate is $LR; LR is 1e-4 (line 1) or 2e-4 (line 3), as a condition of the script decides: "
            "leave one",
        ),
        (
            f'[ -z "$LR" ] && LR=3e-4\n{RATE}',
            "--learning_rate is $LR; LR is not set or 3e-4 (line 1), as a condition of the script decides: leave one",
        ),
        (
            f"LR=1e-4\ncase $1 in\n  small) LR=2e-4;;\n  *) ;;\nesac\n{RATE}",
            "--learning_rate is $LR; LR is 2e-4 (line 3) or 1e-4 (line 1), as a condition of the ",
        ),
        (
            f"if a; then LR=1e-4; elif b; then LR=2e-4; else LR=3e-4; fi\nif c; then LR=4e-4; fi\n{RATE}",
            "--learning_rate is $LR; LR is 1e-4 (line 1) or 2e-4 (line 1) or 3e-4 (line 1) or 4e-4 (line 2), as a ",
        ),
        (
            f'ARGS="--lora_rank 4"\nif [ "$P" ]; then ARGS="$ARGS --packing true"; fi\nswift sft {COMMON} $ARGS',
            "$ARGS stands behind --dataset a.jsonl; ARGS is --lora_rank 4 (line 1) or "
            "--lora_rank 4 --packing true (line 2)",
        ),
        (
            f'ARGS=({COMMON} --a 1)\n[ -n "$D" ] && ARGS+=(--deepspeed "$D" --b)\nswift sft --seed 1 "${{ARGS[@]}}"',
            "$ARGS stands behind --seed 1; ARGS is ... (line 1) or ... --deepspeed $D --b (line 2), as a condition of ",
        ),
        (
            f"for LR in 1e-4 2e-4; do\n{RATE}\ndone",
            "--learning_rate is $LR; LR is in turn 1e-4, 2e-4 in the loop of line 1, which would be several trainings: "
            "leave one value",
        ),
        (
            f"for i in 1 2; do ARGS=\"$ARGS --x $i\"; done\nswift sft {COMMON} $ARGS",
            "ARGS changes in the loop of line 1: leave one value",
        ),
        (
            f"LR=1e-4\nwhile [ $# -gt 0 ]; do LR=$2; shift 2; done\n{RATE}",
            "--learning_rate is $LR; LR is 1e-4 (line 1) or $2 (line 2), as a condition of the script decides",
        ),
        (
            f"export NPROC_PER_NODE=2\n[ $A ] && NPROC_PER_NODE=4\n{RATE.replace('$LR', '1e-4')}",
            "NPROC_PER_NODE is 2 (line 1) or 4 (line 2), as a condition of the script decides: leave one",
        ),
    ],
)  # fmt: skip
def test_what_a_condition_or_a_loop_decides_is_refused(tmp_path: Path, text: str, why: str) -> None:
    lines = refused(tmp_path, text)
    assert any(why in line for line in lines), lines


@pytest.mark.parametrize(
    "text",
    [
        f"if a; then LR=1e-4; else LR=1e-4; fi\n{RATE}",
        f"LR=1e-4\nif a; then LR=2e-4; echo usage; exit 1; fi\n{RATE}",
        f"for LR in 1e-4; do {RATE}; done",
        f"LR=2e-4; (LR=3e-4); LR=4e-4 | cat; cd x && LR=1e-4 && {RATE}",
        f"if a; then OTHER=1; fi\nLR=1e-4 # $OTHER\n{RATE} --output_dir out/$OTHER",
    ],
)
def test_what_no_condition_changes_is_taken(tmp_path: Path, text: str) -> None:
    assert converted(tmp_path, text).recipe.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("text", "batch", "why"),
    [
        ("N=4\nswift sft {c} --gradient_accumulation_steps $((8 * (N - 2) / 1))", 16, ""),
        ("N=4; M=$((N*4))\nswift sft {c} --gradient_accumulation_steps $M", 16, ""),
        (
            "swift sft {c} --gradient_accumulation_steps $((64 / NGPUS))",
            0,
            "--gradient_accumulation_steps is $((64 / NGPUS)); this script does not say what NGPUS is: give the number",
        ),
        (
            "swift sft {c} --gradient_accumulation_steps $((9**9**9))",
            0,
            "--gradient_accumulation_steps is $((9**9**9)); ** is not computed here: give the number",
        ),
        (
            "if a; then N=1; else N=2; fi; swift sft {c} --gradient_accumulation_steps $((N * 2))",
            0,
            "--gradient_accumulation_steps is $((N * 2)); N is 1 (line 1) or 2 (line 1), as a condition of the script "
            "decides: give the number",
        ),
        (
            "N=1; ((N++)); swift sft {c} --gradient_accumulation_steps $N",
            0,
            "--gradient_accumulation_steps is $N; N is computed in line 1: give the number",
        ),
    ],
)
def test_arithmetic_is_computed_or_refused(tmp_path: Path, text: str, batch: int, why: str) -> None:
    text = text.replace("{c}", COMMON)
    if why:
        assert refused(tmp_path, text) == [why]
    else:
        assert converted(tmp_path, text).recipe.effective_batch == batch


def billions(depth: int) -> str:
    """YAML whose aliases stand for far more than is written."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    return "\n".join(lines + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, depth)])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("A=xxxxxxxxxx\n" + "A=$A$A\n" * 40 + RATE, "old.sh:18: makes a value of more than 1,048,576 characters"),
        ("A=(x y)\n" + 'A+=("${A[@]}")\n' * 40 + RATE, "old.sh:17: makes more than 65,536 words of one"),
        (
            "A=xxxxxxxxxx\n" + "A=$A$A\n" * 15 + "".join(f"B{n}=$A.\n" for n in range(9000)) + RATE,
            "the values made up to here have more than 4,194,304 characters",
        ),
        (
            "f0() { :; }\n" + "".join(f"f{n}() {{ f{n - 1}; f{n - 1}; }}\n" for n in range(1, 19)) + f"f18\n{RATE}",
            "functions run more than 20,000 commands up to here",
        ),
        (f"swift sft {COMMON} --x '{'[' * 50_000}'", "old.sh:1: --x has brackets in brackets deeper than 20"),
        (
            f"swift sft {COMMON} --x '{'[' * 5_000}{']' * 5_000}'",
            "old.sh:1: --x has brackets in brackets deeper than 20",
        ),
        (f"export FPS='{'{' * 50_000}'\nswift sft {COMMON}", "old.sh:1: FPS has brackets in brackets deeper than 20"),
        (f"swift sft {COMMON} --seed '{billions(30)}'", "seed is 'a0: &a0 [x, x, x, x, x, x, x, x, x]"),
        (f"swift sft {COMMON} --seed '&a [*a, *a]'", "seed is '&a [*a, *a]'; must be an integer"),
        (f"swift sft {COMMON} --seed {'9' * 90_000}", "must be an integer"),
    ],
    ids=["value", "array", "values", "functions", "open", "closed", "exported", "aliases", "itself", "digits"],
)
def test_a_few_lines_never_take_memory_or_hours(tmp_path: Path, text: str, why: str) -> None:
    start = time.process_time()
    (tmp_path / "old.sh").write_text(text)
    with pytest.raises(BadInput) as error:
        convert(tmp_path / "old.sh", known_families())
    assert why in str(error.value) and len(str(error.value)) < 100_000
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("text", "why"), [("[" * 2_000, "nested too deeply"), (billions(30), "more than a billion values")]
)
def test_an_accelerate_config_that_never_ends_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "zero.yaml").write_text(text)
    (tmp_path / "old.sh").write_text("accelerate launch --config_file zero.yaml sft.py --seed 1")
    with pytest.raises(BadInput, match=rf"zero\.yaml: .*{why}"):
        convert(tmp_path / "old.sh")


def test_text_that_looks_like_yaml_is_text(tmp_path: Path) -> None:
    given = {"a": "x: y", "b": "010", "c": "1:30", "d": "2026-11-19", "e": '"1"', "f": "*x", "g": "[q,v]"}
    (tmp_path / "old.sh").write_text(script("swift sft", given))
    assert read_script(tmp_path / "old.sh").document.values == given
    (tmp_path / "old.sh").write_text(script("swift sft", {"a": '{"b": [1, true]}', "c": "yes", "d": "1.0e-3", "e": 7}))
    assert read_script(tmp_path / "old.sh").document.values == {"a": {"b": [1, True]}, "c": True, "d": 1e-3, "e": 7}


@pytest.mark.parametrize(
    ("text", "places"),
    [
        (f'A="\n {COMMON}\n --nonsense 3\n"\nswift sft $A --foo 1', (3, 5)),
        (f'A=(\n {COMMON}\n # --nonsense 3\n --nonsense 3)\nswift sft "${{A[@]}}" \\\n --foo 1', (4, 6)),
        (f'echo "--nonsense N"\nA={{}}\nA+=" --nonsense 3"\neval "swift sft {COMMON} $A --foo 1"', (3, 4)),
        (f'A="--nonsense 3"\nB="--nonsense 3"\nswift sft {COMMON} $A --foo 1', (3, 3)),
    ],
)
def test_a_flag_is_named_with_the_line_on_which_it_is_written(
    tmp_path: Path, text: str, places: tuple[int, int]
) -> None:
    with pytest.raises(BadInput) as error:
        converted(tmp_path, text.replace("A={}", "A="))
    lines = str(error.value).splitlines()
    for place, name in zip(places, ("nonsense", "foo"), strict=True):
        assert any(line.startswith(f"{tmp_path}/old.sh:{place}: {name} is ") for line in lines), lines


def test_of_a_flag_that_is_given_twice_the_last_counts(tmp_path: Path) -> None:
    lines = ("--lora_rank $R --target_modules q_proj v_proj --hub_token a", "--lora-rank 4 --target_modules k_proj")
    text = f"swift sft {COMMON} \\\n  {lines[0]} \\\n  {lines[1]} --hub_token b"
    done = converted(tmp_path, text)
    assert (done.recipe.lora.r, done.recipe.lora.target_modules) == (4, ("k_proj",))
    said = {note.key: note.why for note in done.notes if note.key.startswith("(--")}
    assert said == {
        "(--lora_rank $R)": "line 2; given again as --lora-rank 4 in line 3: the last one counts",
        "(--target_modules q_proj v_proj)": "line 2; given again as --target_modules k_proj in line 3: the last one "
        "counts",
        "(--hub_token ***)": "line 2; given again as --hub_token *** in line 3: the last one counts",
    }
    assert refused(tmp_path, f"swift sft {COMMON} --seed 1 --seed $S") == [
        "--seed is $S; this script does not say what $S is: give it"
    ]


def test_an_argument_that_a_function_is_called_without_is_named(tmp_path: Path) -> None:
    text = f"f() {{\n  swift sft {COMMON} --lora_rank $1 --seed $2 --report_to none $3\n}}\nf 4"
    assert refused(tmp_path, text) == ["--seed is $2; its function is called without $2 here: give it"]
    assert refused(tmp_path, f"swift sft {COMMON} --seed $1") == [
        "--seed is $1; this script does not say what $1 is: give it"
    ]
    assert converted(tmp_path, f"{text} 5").recipe.seed == 5


@pytest.mark.parametrize("name", ["old.sh", "old.yaml", "old"])
def test_a_script_that_is_too_large_is_called_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x=1\n" * 100_000)
    with pytest.raises(BadInput) as error:
        convert(tmp_path / name, known_families())
    said = f"{tmp_path / name}: is larger than 262,144 bytes, which no config or script of a training is"
    assert str(error.value) == said


def test_many_lines_are_told_from_a_script_at_once(tmp_path: Path) -> None:
    start = time.process_time()
    for line in ("A=1\n", "\n", "A=1 "):
        (tmp_path / "notes").write_text(line * (200_000 // len(line)))
        assert not is_script(tmp_path / "notes")
    assert time.process_time() - start < 3


BESIDE = (
    "starts a training by x.yaml: convert that file, after putting into it what its launcher and its variables say:"
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("swift sft --config x.yaml", "starts a training by x.yaml: convert that file"),
        (
            "LR=1e-4\nswift sft --config x.yaml --lr $LR --packing",
            "starts a training by x.yaml: convert that file, after putting into it what stands on its command line: "
            "--lr 1e-4, --packing",
        ),
        (
            "llamafactory-cli train x.yaml learning_rate=1e-4 lora_rank=$R",
            "starts a training by x.yaml: convert that file, after putting into it what stands on its command line: "
            "learning_rate=1e-4, lora_rank=$R",
        ),
        (
            "axolotl train x.yaml --learning-rate 1e-4",
            "starts a training by x.yaml: convert that file, after putting into it what stands on its command line: "
            "--learning-rate 1e-4",
        ),
        (
            "axolotl train x.yaml --learning-rate 1e-4 --launcher accelerate -- --num_processes 4",
            "starts a training by x.yaml: convert that file, after putting into it what stands on its command line: "
            "--learning-rate 1e-4 and what its launcher and its variables say: launch: {num_processes: 4}",
        ),
        (
            "axolotl train x.yaml --launcher torchrun -- --nproc_per_node=4",
            f"{BESIDE} launch: {{nproc_per_node: 4}}",
        ),
        (
            "accelerate launch --config_file zero.yaml --multi_gpu -m axolotl.cli.train x.yml --seed=3",
            "starts a training by x.yml: convert that file, after putting into it what stands on its command line: "
            "--seed 3 and what its launcher and its variables say: launch: {config_file: zero.yaml}",
        ),
        ("torchrun --nproc_per_node $N run.py x.yaml", f"{BESIDE} launch: {{nproc_per_node: $N}}"),
        (
            "NNODES=2 NPROC_PER_NODE=4 NODE_RANK=1 llamafactory-cli train x.yaml",
            f"{BESIDE} NNODES: 2, NPROC_PER_NODE: 4",
        ),
        (
            "export NPROC_PER_NODE=4 MAX_PIXELS=100352 FPS=1\nLR=1 swift sft --config x.yaml",
            f"{BESIDE} NPROC_PER_NODE: 4, MAX_PIXELS: 100352",
        ),
        (
            "CUDA_VISIBLE_DEVICES=0,1,2 llamafactory-cli train x.yaml",
            f"{BESIDE} num_processes: 3 (llamafactory-cli starts one for each device in CUDA_VISIBLE_DEVICES)",
        ),
        ("CUDA_VISIBLE_DEVICES=0,1 swift sft --config x.yaml", f"{BESIDE} CUDA_VISIBLE_DEVICES: 0,1"),
        ("CUDA_VISIBLE_DEVICES=0 llamafactory-cli train x.yaml", "starts a training by x.yaml: convert that file"),
        (
            "python -u train.py lr=1e-4 +model.lora.r=8",
            "lr=1e-4, +model.lora.r=8 changes a config file, and no such file is named here: convert the program's own "
            "config file, after putting that into it",
        ),
        (
            "python train.py --seed 3 lr=1e-4 --model m",
            "lr=1e-4 changes a config file, and no such file is named here: convert the program's own config "
            "file, after putting that into it",
        ),
    ],
)
def test_settings_beside_a_config_are_told(tmp_path: Path, text: str, why: str) -> None:
    assert refused(tmp_path, text) == [why]


@pytest.mark.parametrize(
    ("beside", "batch"),
    [
        ({"NNODES": 2, "NPROC_PER_NODE": 4}, 16),
        ({"launch": {"nproc_per_node": 4, "nnodes": 2}}, 16),
        ({"launch": {"num_processes": 8, "num_machines": 2}}, 16),
        ({"num_processes": 3}, 6),
    ],
)
def test_what_is_put_into_a_config_is_counted(tmp_path: Path, beside: dict[str, Any], batch: int) -> None:
    old = {"model_name_or_path": "Qwen/Qwen3-VL-8B", "finetuning_type": "lora", "template": "qwen3_vl_nothink"}
    old |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    assert converted(tmp_path, {**old, **beside}, DATA).recipe.effective_batch == batch


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"swift sft {COMMON}\nswift export --adapters output/x --merge_lora true", "(swift export)"),
        (f"swift sft {COMMON} && swift infer --adapters x --load_data_args true", "(swift infer)"),
        (f"swift deploy --model x &\nswift sft {COMMON}", "(swift deploy)"),
        (f"python -m swift.cli.sft {COMMON}\npython -m swift.cli.merge_lora --a 1", "(python swift.cli.merge_lora)"),
        (f"swift sft {COMMON}\npython tools/eval_model.py --out x", "(python tools/eval_model.py)"),
        (f"python inference.py --out x\npython train.py --model_name_or_path m {COMMON}", None),
        (f"swift sft {COMMON}\ntorchrun --nproc_per_node 4 test.py --x 1", "(torchrun test.py)"),
    ],
)
def test_commands_that_do_not_train_are_left_out(tmp_path: Path, text: str, left: str | None) -> None:
    if left is None:  # of one's own, which says nothing about what its flags mean
        (tmp_path / "old.sh").write_text(text)
        read = read_script(tmp_path / "old.sh")
        assert read.command == "python train.py" and [note.key for note in read.notes] == ["(python inference.py)"]
        return
    done = converted(tmp_path, text)
    line = 1 + text[: text.index(left.split()[-1].strip("()"))].count("\n")
    (note,) = [note for note in done.notes if note.key == left]
    assert note.went_to is None and note.why == f"line {line} does not train"
    assert done.recipe.data.train == "a.jsonl"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("swift infer --model m", "starts no trainer that is known; must be one command with --flags, of swift, "),
        ("python train.py --a 1\npython train_and_eval.py --b 1", "starts 2 trainings (lines 1, 2); must be one "),
        ("swift sft --a 1; python run.py --b 1", "starts 2 trainings (lines 1, 1); must be one command with --flags"),
        ("python eval.py --a 1\npython test.py --b 1", "starts 2 trainings (lines 1, 2); must be one command"),
        ("f() { swift sft --a 1; }; f; f", "starts 2 trainings (lines 1, 1); must be one command with --flags"),
        ("echo swift sft --a 1; pip install swift --upgrade; python -m pip install --upgrade x", "starts no trainer "),
        ("python - --a 1 <<'E'\nimport x\nE\npython -c 'import torch' --b", "starts no trainer that is known; must be"),
    ],
)
def test_which_commands_train_is_not_guessed(tmp_path: Path, text: str, why: str) -> None:
    (line,) = refused(tmp_path, text)
    assert line.removeprefix(f"{tmp_path / 'old.sh'}: ").startswith(why), line


TRAINING = "swift sft --model Qwen/Qwen2.5-VL-7B-Instruct --dataset a.jsonl --gradient_accumulation_steps 1"


@pytest.mark.parametrize(
    "text",
    [
        f"sbatch <<EOF\n#!/bin/bash\n#SBATCH --gpus 2\n{TRAINING} --seed 3\nEOF",
        f"sbatch --gpus 2 --wrap '{TRAINING} --seed 3'",
        f'sbatch --wrap="{TRAINING} --seed 3" --gpus 2',
        f"tmux new -d -s train '{TRAINING} --seed 3'",
        f"nohup {TRAINING} --seed 3 > log 2>&1 &",
        f"screen -dm bash -c '{TRAINING} --seed 3'",
    ],
)
def test_a_training_that_another_program_starts(tmp_path: Path, text: str) -> None:
    done = converted(tmp_path, text)
    assert (done.recipe.seed, done.recipe.effective_batch) == (3, 1)
    done = converted(tmp_path, f"export NPROC_PER_NODE=2\nMAX_PIXELS=100352 {text}")
    assert (done.recipe.max_pixels, done.recipe.effective_batch) == (100352, 2)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("cd x\nsbatch --gpus 2 train.slurm", "runs train.slurm: if that starts the training, convert that file"),
        ("source env.sh\nrun", "runs env.sh: if that starts the training, convert that file"),
        ("./train.sh 3", "runs ./train.sh: if that starts the training, convert that file"),
        (
            "screen -S x -X stuff 'swift sft --model m\n'",
            "what screen runs is not read here: paste the command that trains into a file, and convert that",
        ),
        (
            "for LR in 1 2; do\nsbatch <<EOF\n#SBATCH -J $LR\nswift sft --lr $LR\nEOF\ndone",
            "$LR stands in the here-document of this line; LR is in turn 1, 2 in the loop of line 1, which would be "
            "several trainings: leave one value",
        ),
    ],
)
def test_what_another_program_starts_and_is_not_read(tmp_path: Path, text: str, why: str) -> None:
    assert refused(tmp_path, text) == [why]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("cat > /tmp/cfg.yaml <<EOF\nlr: 1e-4\nEOF\nllamafactory-cli train /tmp/cfg.yaml", 1),
        ("set -e\ncat <<'EOF' >cfg.yaml\nlr: 1e-4\nEOF\nllamafactory-cli train ./cfg.yaml", 2),
        ('C=/tmp/cfg.yaml\n\ncat << EOF > "$C"\nlr: 1e-4\nEOF\nllamafactory-cli train $C', 3),
        ("tee cfg.yaml <<EOF\nlr: 1e-4\nEOF\nswift sft --config cfg.yaml", 1),
        ("cat > other.yaml <<EOF\nlr: 1e-4\nEOF\nllamafactory-cli train cfg.yaml", None),
        ("echo > cfg.yaml\nllamafactory-cli train cfg.yaml", None),
    ],
)
def test_a_config_file_that_the_script_writes_itself(tmp_path: Path, text: str, line: int | None) -> None:
    (said,) = refused(tmp_path, f"{text}\n")
    told = "" if line is None else f", whose text stands behind line {line} of this script"
    assert said.endswith(f".yaml: convert that file{told}")
