"""The lines of a README ask a question in the layout that the training questions had."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
import yaml
from typed import FIELDS, sameday, write_recipe

from sameday.models.start import ORIGIN
from sameday.record.manifest import MANIFEST, write_manifest
from sameday.spec.plan import Plan
from sameday.tasks.vqa.task import VqaTask

NEW = 4
Row = dict[str, Any]


def said_so(turn: str, system: str | None = None) -> Callable[[Row], Row]:
    """A plain line as a conversation, `{}` for its question."""

    def changed(row: Row) -> Row:
        said = turn.format(row["question"])
        turns = [{"role": "user", "content": said}, {"role": "assistant", "content": row["answer"]}]
        before = [] if system is None else [{"role": "system", "content": system}]
        return {"messages": before + turns, "images": [row["image"]], "stage": row["stage"]}

    return changed


LLAVA = said_so("<image>\n{}")
SHORT: dict[str, Any] = {"max_steps": 2, "learning_rate": 0.05, "data": FIELDS["data"] | {"test": "test.jsonl"}}


def write_data(folder: Path, *lines: Callable[[Row], Row]) -> Path:
    """The lines of all splits written by these, one after the other."""
    worlds.write_world(folder, 11, counts=(4, 3), hard=False)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for n, row in enumerate(rows):
        row["stage"] = 1 + n % 3
    text = "".join(json.dumps(lines[n % len(lines)](row)) + "\n" for n, row in enumerate(rows))
    for split in ("train", "val", "test"):
        (folder / f"{split}.jsonl").write_text(text)
    (folder / "plan.yaml").write_text("device: cpu\n")
    return folder


def train(folder: Path, model: Path, *lines: Callable[[Row], Row], **changes: Any) -> str:
    write_data(folder, *lines)
    write_recipe(folder, model, **(SHORT | {"evaluate": {"max_new_tokens": NEW}} | changes))
    said = sameday(folder, "train", "recipe.yaml", "--plan", "plan.yaml", "--out", "run")
    assert said.code == 0, said.err
    return said.out


def ask(weights: Path, moved: Path, image: Path, question: str) -> dict[str, Any]:
    """What the lines of its README leave, run in a copy of the folder alone."""
    if not moved.exists():
        shutil.copytree(weights, moved)
    shutil.copy(image, moved / "image.png")
    lines = worlds.lines_of(moved / "README.md")
    assert '"What is there?"' in lines
    lines = lines.replace('"What is there?"', repr(question)).replace("max_new_tokens=64", f"max_new_tokens={NEW}")
    held: dict[str, Any] = {}
    with contextlib.chdir(moved), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        exec(lines, held)
    return held


def task_of(folder: Path) -> VqaTask:
    fields = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe = worlds.tiny_recipe(Path(fields["model"]), **{k: v for k, v in fields.items() if k != "model"})
    return worlds.make_task(folder, recipe, Plan(device="cpu"))


def predictions(folder: Path) -> list[Row]:
    lines = (folder / "run/answers/adapter-test/predictions.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def question_of(text: str) -> str:
    """The question of a turn that has some text around it."""
    return text.split("Picture: ")[-1].removesuffix(" In a word.").strip()


@pytest.mark.parametrize(
    ("family", "line", "layout", "changes"),
    [
        ("qwen3_vl", LLAVA, r"'<image>\n{question}'", {}),
        ("qwen3_vl", said_so("{}\n<image>"), r"'{question}\n<image>'", {}),
        (
            "qwen3_vl",
            said_so("Picture: <image>\n{} "),
            r"'Picture: <image>\n{question without prompt} '",
            {"prompt": "Look. {question}"},
        ),
        ("qwen2_5_vl", LLAVA, r"'<image>\n{question}'", {"prompt": "Look. {question}\n", "system_prompt": "be brief"}),
        ("qwen2_vl", said_so("<image>{}", system='say "yes"'), "'<image>{question}'", {"system_prompt": "no"}),
        ("llava", said_so("{}\n<image>"), r"'{question}\n<image>'", {}),
        ("gemma3", LLAVA, r"'<image>\n{question}'", {}),
    ],
)
def test_the_lines_ask_as_the_training_did(
    family: str,
    line: Callable[[Row], Row],
    layout: str,
    changes: dict[str, Any],
    tmp_path: Path,
    tiny_models: dict[str, Path],
) -> None:
    """The same tokens as in evaluation, and its answers."""
    if family in worlds.SQUARE:
        changes = changes | {"lora": {"r": 2, "alpha": 4, "target_modules": worlds.OF_THE_DECODER}}
    said = train(tmp_path, tiny_models[family], line, **changes)
    assert "layouts of user turns" not in said
    adapter, task = tmp_path / "run/adapter", task_of(tmp_path)
    text = (adapter / "README.md").read_text()
    assert f"All training questions have the layout `{layout}`, in which the lines below ask." in text
    for sample, row in list(zip(task.splits["train"], predictions(tmp_path), strict=True))[:3]:
        held = ask(adapter, tmp_path / "moved", sample.images[0].path, question_of(sample.question))
        assert held["inputs"]["input_ids"][0].tolist() == task.encoder.prompt(sample).tokens.tolist()
        new = held["answer"][0, held["inputs"]["input_ids"].shape[1] :]
        assert task.answer(new.tolist()).text == row["prediction"]
        assert row["prompt"] == sample.turn
        written = layout[1:-1].encode().decode("unicode_escape").replace("<image>", "", layout.startswith("'<image>"))
        assert "prompt" in changes or row["prompt"] == written.format(question=row["question"])


def test_the_most_common_of_several_layouts_is_asked_in(tmp_path: Path, tiny_qwen3: Path) -> None:
    """In a checkpoint, in a whole model and in one that was merged, too."""
    train(tmp_path, tiny_qwen3, LLAVA, lambda row: row, LLAVA)
    words = (
        r"The lines below ask as `'<image>\n{question}'`, the layout of 5 of 7 training questions; there were others, "
        "too: `'<image>{question}'` (2 questions)."
    )
    assert sameday(tmp_path, "merge", "run", "-o", "whole").code == 0
    [last] = (tmp_path / "run/checkpoints").glob("step-000002")
    sample = task_of(tmp_path).splits["train"][0]
    for n, folder in enumerate((tmp_path / "run/adapter", last, tmp_path / "whole")):
        assert words in (folder / "README.md").read_text()
        held = ask(folder, tmp_path / f"moved-{n}", sample.images[0].path, sample.question)
        assert held["inputs"]["input_ids"][0].tolist() == task_of(tmp_path).encoder.prompt(sample).tokens.tolist()


def test_a_whole_model_is_asked_as_it_was_trained(tmp_path: Path, tiny_qwen3: Path) -> None:
    train(tmp_path, tiny_qwen3, LLAVA, train="all", learning_rate=1e-3)
    sample = task_of(tmp_path).splits["train"][0]
    held = ask(tmp_path / "run/model", tmp_path / "moved", sample.images[0].path, sample.question)
    assert held["inputs"]["input_ids"][0].tolist() == task_of(tmp_path).encoder.prompt(sample).tokens.tolist()


def test_an_adapter_of_an_earlier_release_is_merged(tmp_path: Path, tiny_qwen3: Path) -> None:
    """Nothing tells its layouts: a plain one, and no word about it."""
    train(tmp_path, tiny_qwen3, LLAVA)
    adapter = tmp_path / "run/adapter"
    origin = json.loads((adapter / ORIGIN).read_text())
    (adapter / ORIGIN).write_text(json.dumps({name: value for name, value in origin.items() if name != "asked"}))
    write_manifest(adapter, [path for path in adapter.iterdir() if path.name != MANIFEST])
    said = sameday(tmp_path, "merge", "run", "-o", "whole")
    assert said.code == 0, said.err
    text = (tmp_path / "whole/README.md").read_text()
    assert "training question" not in text and '[{"type": "image"}, {"type": "text", "text": question}]' in text


def test_the_lines_for_heads_ask_as_the_training_did(tmp_path: Path, tiny_qwen3: Path) -> None:
    write_data(tmp_path, LLAVA)
    write_recipe(tmp_path, tiny_qwen3, **(SHORT | {"task": "cot", "heads": {"rank": 3}}))
    said = sameday(tmp_path, "train", "recipe.yaml", "--plan", "plan.yaml", "--out", "run")
    assert said.code == 0, said.err
    text = (tmp_path / "run/adapter/README.md").read_text()
    assert r"All training questions have the layout `'<image>\n{question}'`, in which the lines below ask." in text
    program = worlds.lines_of(tmp_path / "run/adapter/README.md")
    begins, ends = program.index("def states("), program.index("    for token in answer:")
    assert r'{"type": "text", "text": "\n" + question}' in program[begins:ends]


def test_splits_of_different_layouts_are_told_once(tmp_path: Path, tiny_qwen3: Path) -> None:
    write_data(tmp_path, lambda row: row)
    rows = [json.loads(line) for line in (tmp_path / "val.jsonl").read_text().splitlines()]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(LLAVA(row)) + "\n" for row in rows))
    write_recipe(tmp_path, tiny_qwen3, **SHORT)
    told = (
        "the layouts of user turns differ: train has `'<image>{question}'` (7 questions); val has "
        r"`'<image>\n{question}'` (7 questions). A model answers best in the layout that it was trained on"
    )
    said = sameday(tmp_path, "train", "recipe.yaml", "--plan", "plan.yaml", "--out", "run")
    assert said.code == 0 and said.out.count(told) == 1, said.err
    looked = sameday(tmp_path, "data", "recipe.yaml")
    assert looked.code == 0 and " ".join(looked.out.split()).count(told) == 1, looked.err
