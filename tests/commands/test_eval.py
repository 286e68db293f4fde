"""`sameday eval` as a user types it: any weights, answers in a file that a kill does not spoil, and stages that build
on each other."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import worlds
import yaml
from typed import Said, refused, sameday, write_recipe

from sameday.commands import evaluate
from sameday.commands.session import Session
from sameday.evaluate import predictions
from sameday.evaluate.answer import answer_split
from sameday.evaluate.predictions import PredictionFile, read_predictions
from sameday.evaluate.scores import question_scores
from sameday.hardware.ranks import Ranks
from sameday.record.lock import Lock
from sameday.record.times import TIMES, read_times
from sameday.spec.errors import EXIT_DISK_FULL, EXIT_STOPPED
from sameday.spec.evaluation import Evaluation
from sameday.spec.load import load_recipe
from sameday.spec.plan import Plan
from sameday.tasks.vqa.task import VqaTask

PLAN: dict[str, Any] = {"share_images": True, "packing": True, "max_questions": None, "eval_token_budget": 200}
NEW = 5


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Path:
    """A run whose recipe asks for answers to the test questions. Not to be written to."""
    folder = worlds.write_world(tmp_path_factory.mktemp("eval"), 6, (4, 2, 3, 1), hard=False)
    lines = (folder / "train.jsonl").read_text().splitlines()
    stages = [1, 2, 3, 1, 1, 2, 2, 1, 3, 2]  # the last image has no question of stage 1
    rows = [json.loads(line) | {"stage": stage} for line, stage in zip(lines, stages, strict=True)]
    random.Random(0).shuffle(rows)
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": "train.jsonl", "val": "val.jsonl", "test": "test.jsonl", "image_root": "images"}
    write_recipe(folder, tiny_qwen3, data=data, evaluate={"max_new_tokens": NEW})
    (folder / "plan.yaml").write_text(json.dumps(PLAN | {"device": "cpu"}))
    said = sameday(folder, "train", "recipe.yaml", "--plan", "plan.yaml", "--out", "run")
    assert said.code == 0, said.err
    (folder / "said.txt").write_text(said.out)
    return folder


@pytest.fixture
def world(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "world"))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def done(folder: Path, *words: str) -> Said:
    said = sameday(folder, "eval", *words)
    assert said.code == 0, said.err
    return said


def test_training_ends_with_the_evaluation_that_its_recipe_asks_for(trained: Path) -> None:
    answers = trained / "run/answers/adapter-test"
    rows = lines_of(answers)
    questions = [json.loads(line) for line in (trained / "test.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == list(range(1, 11)), "the data's order"
    for row, asked in zip(rows, questions, strict=True):
        assert (row["question"], row["answer"], row["stage"]) == (asked["question"], asked["answer"], asked["stage"])
        assert row["prompt"] == row["question"] and 1 <= row["tokens"] <= NEW and row["type"] is None
        assert row["where"] == f"test.jsonl:{row['id']}"
        assert row["scores"]["exact_match"] == float(row["prediction"].strip() == row["answer"])
    assert len({row["image"] for row in rows}) == 4
    metrics = json.loads((answers / "metrics.json").read_text())
    share = sum(row["scores"]["exact_match"] for row in rows) / 10
    assert (metrics["questions"], metrics["images"]) == (10, 4) and metrics["metrics"]["exact_match"]["value"] == share
    scores = json.loads((trained / "run/eval-test.json").read_text())
    assert scores.pop("trained_on") == {"images": 4, "of": 4}
    told = (trained / "said.txt").read_text().splitlines()
    at = told.index("answers in run/answers/adapter-test:")
    assert told[at - 1] == "  ".join(f"{name} {value:.4g}" for name, value in scores.items())
    assert told[at + 1].startswith(f"  10 questions on 4 images: exact match (accuracy) {100 * share:.1f}% (")


def test_it_decides_nothing_about_the_weights(trained: Path) -> None:
    recipe = load_recipe(trained / "recipe.yaml")
    assert recipe.fingerprint == recipe.model_copy(update={"evaluate": None}).fingerprint
    changed = {"evaluate": Evaluation(cascade=True, split="val")}
    assert recipe.fingerprint == recipe.model_copy(update=changed).fingerprint


def test_a_run_that_was_stopped_in_its_evaluation_goes_on_there(
    world: Path, monkeypatch: pytest.MonkeyPatch, own_signals: None
) -> None:
    whole = (world / "run/answers/adapter-test/predictions.jsonl").read_bytes()
    shutil.rmtree(world / "run/answers")
    words = ("train", "recipe.yaml", "--plan", "plan.yaml", "--out", "run")
    with monkeypatch.context() as patch:
        patch.setattr(PredictionFile, "append", then_stop(PredictionFile.append))
        said = sameday(world, *words)
    stopped = json.loads((world / "run/stopped.json").read_text())
    assert said.code == stopped["code"] == EXIT_STOPPED and stopped["why"] == said.err.rstrip("\n")
    assert re.fullmatch(r"asked to stop: [1-9] of 10 answers are saved in .*; run again to go on", stopped["why"])
    again = sameday(world, *words)
    assert again.code == 0 and "finished already" in again.out and "answers are there already" in again.out
    assert (world / "run/answers/adapter-test/predictions.jsonl").read_bytes() == whole
    assert not (world / "run/stopped.json").exists()


def then_stop(append: Any) -> Any:
    """Somebody asks the process to stop once the first answers are written."""

    def appended(self: PredictionFile, predictions: Any) -> None:
        append(self, predictions)
        os.kill(os.getpid(), signal.SIGTERM)

    return appended


def test_a_recipe_that_cannot_be_evaluated_is_not_trained(world: Path) -> None:
    words = ("train", "recipe.yaml", "--out", "other", "--set")
    said = refused(world, *words, "recipe.data.test=null")
    assert said == "recipe.evaluate.split is test, and the recipe has no data.test"
    said = refused(world, *words, "recipe.evaluate.context=see {findings}")
    assert "must hold {findings} and {question}; it lacks {question}" in said
    said = refused(world, *words, "recipe.evaluate.context=<|im_end|>{findings} {question}")
    assert said == "recipe.evaluate.context holds <|im_end|>, which would become a real token"
    said = refused(world, *words, "recipe.evaluate.max_new_tokens=40000")
    assert "room for so many is kept for each question" in said
    assert not (world / "other").exists()


# Which weights


def test_checkpoints_the_base_and_adapters_of_others(world: Path, tiny_qwen3: Path) -> None:
    run, whole = world / "run", lines_of(world / "run/answers/adapter-test")
    said = done(world, "run", "--checkpoint", "last")
    assert "--checkpoint last is step-000002\n" in said.out
    assert "answers in run/answers/step-000002-test:\n" in said.out
    said = done(world, "run", "--checkpoint", "best", "--scores-only")
    assert re.search(r"^--checkpoint best is step-00000\d, by its validation loss$", said.out, re.M)
    assert lines_of(run / "answers/step-000002-test") == whole
    done(world, "run", "--base", "--plan", "plan.yaml")
    base = lines_of(run / "answers/base-test")
    assert (run / "scores-base-test.json").is_file()
    assert [row["prediction"] for row in base] != [row["prediction"] for row in whole]
    # The run's own adapter, as anybody's: by its recipe, into a folder of its own.
    done(world, "recipe.yaml", "--adapter", "run/adapter", "--plan", "plan.yaml", "--max-new-tokens", str(NEW))
    name = f"small-{load_recipe(world / 'recipe.yaml').fingerprint}-adapter-run-adapter-test"
    assert lines_of(world / "runs" / name) == whole
    files = (world / "runs" / name / "scores.json", run / "eval-test.json")
    theirs, own = (json.loads(file.read_text()) for file in files)
    assert theirs.pop("trained_on") == own.pop("trained_on")
    assert theirs == pytest.approx(own)
    # Of another rank, with targets by a pattern; made by PEFT alone, as zeros: it answers as the base model does.
    foreign(tiny_qwen3, world / "theirs", r=3, target_modules=r".*language_model.*\.(up_proj|v_proj)")
    done(world, "run", "--adapter", "theirs", "--out", "there", "--plan", "plan.yaml")
    assert lines_of(world / "there") == base


def foreign(model: Path, folder: Path, **fields: Any) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    base = AutoModelForImageTextToText.from_pretrained(model)
    get_peft_model(base, LoraConfig(**fields)).save_pretrained(str(folder))


def test_sentences_about_an_adapter_name_the_option_that_gave_it(world: Path) -> None:
    """What only the loaded weights tell, too."""
    origin = json.loads((world / "run/adapter/origin.json").read_text())
    for name, text in (("other", json.dumps(origin | {"base_model": "0" * 16})), ("broken", "[")):
        shutil.copytree(world / "run/adapter", world / name)
        (world / name / "origin.json").write_text(text)
        (world / name / "manifest.json").unlink()
    said = refused(world, "eval", "recipe.yaml", "--adapter", "other", "--plan", "plan.yaml", "--scores-only")
    assert said.startswith(
        f"--adapter {world / 'other'}: was trained on another base model: its weights were not those"
    )
    assert said.endswith("; allowed: an adapter of this base model")
    broken = "origin.json is not what a run wrote"
    assert refused(world, "eval", "recipe.yaml", "--adapter", "broken") == f"--adapter broken: {broken}"
    start = ("--set", "recipe.start_adapter=broken", "--set", "plan.device=cpu", "--out", "new")
    assert refused(world, "train", "recipe.yaml", *start) == f"start_adapter {world / 'broken'}: {broken}"


def test_what_cannot_be_evaluated_is_said_before_a_model_is_loaded(
    world: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign(tiny_qwen3, world / "ranks", r=3, rank_pattern={"q_proj": 2}, target_modules=["q_proj"])
    monkeypatch.setattr("sameday.tasks.vqa.task.load_base", lambda *_: pytest.fail("loaded"))
    said = refused(
        world, "eval", "run", "--base", "--adapter", "x", "--checkpoint", "last", "--scores-only", "--cascade"
    )
    assert said.splitlines() == [
        "--adapter and --base: one of them",
        "--checkpoint last is of a run; --adapter and --base are other weights",
        "--scores-only generates no answers, so that --cascade and --max-new-tokens mean nothing",
    ]
    said = refused(world, "eval", "recipe.yaml")
    path = f"runs/small-{load_recipe(world / 'recipe.yaml').fingerprint}"
    assert said == (
        f"recipe.yaml: has not been trained: there is no {path}; --base evaluates its base model, --adapter DIR an "
        "adapter of it, and a run elsewhere is named by its folder"
    )
    assert refused(world, "eval", "run", "--adapter", "images") == (
        "--adapter: images is not a PEFT adapter (it has no adapter_config.json)"
    )
    said = refused(world, "eval", "run", "--adapter", "ranks")
    assert said == "--adapter ranks: rank_pattern is {'q_proj': 2} there, which a recipe cannot say"
    settings = json.loads((world / "run/adapter/adapter_config.json").read_text())
    shutil.copytree(world / "run/adapter", world / "other")
    (world / "other/adapter_config.json").write_text(json.dumps(settings | {"target_modules": ["nothing"]}))
    assert refused(world, "eval", "run", "--adapter", "other") == (
        "--adapter other: its target_modules ['nothing'] name no linear layer of the recipe's model"
    )
    images = {"task": "classify", "model": {"kind": "vit"}, "data": {"path": "images"}}
    weights = world / "run/adapter/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\x00\x00\xc0\x7f")  # NaN
    said = refused(world, "eval", "recipe.yaml", "--adapter", "run/adapter")
    assert said.startswith("--adapter run/adapter: adapter_model.safetensors is not what was written; ")
    assert "tensors that are not finite (1)" in said
    (world / "images.yaml").write_text(json.dumps(images))
    said = refused(world, "eval", "images.yaml", "--base", "--cascade")
    assert said.splitlines()[:2] == [
        "task classify generates no answers, so that --cascade and --max-new-tokens mean nothing",
        "--base: task classify starts from random weights, and has no base model to evaluate",
    ]


def test_a_recipe_finds_its_run_and_says_how_to_evaluate_it(world: Path) -> None:
    recipe = yaml.safe_load((world / "recipe.yaml").read_text()) | {"evaluate": {"max_new_tokens": 2, "split": "val"}}
    (world / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    path = Path("runs") / f"small-{load_recipe(world / 'recipe.yaml').fingerprint}"
    (world / "runs").mkdir()
    (world / "run").rename(world / path)
    assert f"answers in {path}/answers/adapter-val:\n  9 questions on 3 images: " in done(world, "recipe.yaml").out
    assert {row["tokens"] for row in lines_of(world / path / "answers/adapter-val")} <= {1, 2}


def test_scores_alone(world: Path) -> None:
    said = done(world, "run", "--split", "val", "--scores-only")
    # Where torchvision is installed, a line before them says how images are resized.
    assert said.out.splitlines()[-1].startswith("loss ") and not (world / "run/answers/adapter-val").exists()


def test_scores_that_could_not_be_written_are_not_computed(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VqaTask, "evaluate", lambda *_: pytest.fail("they are computed"))
    (world / "file").touch()
    said = refused(world, "eval", "run", "--split", "val", "--scores-only", "--out", "file/e")
    assert said == "file/e/scores.json: cannot be written: Not a directory; choose another --out"
    real = tempfile.TemporaryFile

    def read_only(*how: Any, **more: Any) -> Any:
        if Path(more.get("dir") or "").name == "run":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(*how, **more)

    monkeypatch.setattr(evaluate, "TemporaryFile", read_only)
    said = refused(world, "eval", "run", "--split", "val", "--scores-only")
    assert said == "run/eval-val.json: cannot be written: Read-only file system; choose another --out"


def test_the_last_checkpoint_is_not_another_without_a_word(world: Path) -> None:
    earlier = max((world / "run/checkpoints").glob("step-*"))
    newest = Path(shutil.copytree(earlier, earlier.with_name("step-000099")))
    with (newest / "adapter_config.json").open("a") as file:
        file.write(" ")
    said = done(world, "run", "--split", "val", "--scores-only", "--checkpoint", "last")
    why = "adapter_config.json is not what was written"
    assert f"--checkpoint last is {earlier.name}; {newest.name} is left aside: {why}" in said.out.splitlines()


# Killed, and run again


@pytest.fixture(scope="module")
def task(trained: Path) -> VqaTask:
    recipe = load_recipe(trained / "recipe.yaml")
    task = worlds.make_task(trained, recipe, Plan(**PLAN | {"eval_token_budget": 120}))  # type: ignore[arg-type]
    lines = {sample.question: sample for sample in task.splits["train"]}
    rows = [json.loads(line) for line in (trained / "test.jsonl").read_text().splitlines()]
    task.splits["test"] = [
        replace(lines[row["question"]], id=number, stage=row["stage"]) for number, row in enumerate(rows)
    ]
    worlds.stir(task)
    return task


def answered(task: VqaTask, folder: Path, cascade: bool, said: list[str], **changes: Any) -> bytes:
    asked = Evaluation(max_new_tokens=NEW, cascade=cascade, **changes)
    answer_split(task, asked, folder, {"precision": "float32"}, question_scores, Ranks(), said.append)
    return (folder / "predictions.jsonl").read_bytes()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("cascade", [False, True])
def test_killed_at_random_it_gives_the_same_file(
    task: VqaTask, cascade: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two batches, in the middle of a line, or of a file that was to take the place of another."""
    whole = answered(task, tmp_path / "whole", cascade, [])
    rng, append = random.Random(cascade), PredictionFile.append
    for attempt in range(3):
        folder, calls = tmp_path / str(attempt), iter(range(100))
        last = rng.randint(0, 1)

        def killed(self: PredictionFile, predictions: Any) -> None:
            append(self, predictions)
            if next(calls) == last:  # noqa: B023
                text = self.path.read_bytes()
                os.truncate(self.path, len(text) - rng.randrange(min(len(text), 300)))
                (self.folder / f".{self.path.name}.1.tmp").write_bytes(text[:100])
                raise Killed

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(PredictionFile, "append", killed)
            answered(task, folder, cascade, [])
        said: list[str] = []
        kept = len(read_predictions(folder / "predictions.jsonl"))
        assert answered(task, folder, cascade, said) == whole
        assert {path.name for path in folder.iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}
        assert said == ([f"{folder}/predictions.jsonl: {kept} of 10 answers are there already"] if kept else [])


@pytest.mark.slow
def test_processes_killed_at_random_moments_leave_what_the_next_one_finishes(world: Path) -> None:
    """The whole command, in a process of its own, from its start to its last file."""
    answers = world / "run/answers/adapter-test"

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in answers.iterdir() if path.name != TIMES}

    whole = files()
    shutil.rmtree(world / "run/answers")
    words = [sys.executable, "-m", "sameday", "eval", "run"]

    def started() -> subprocess.Popen[bytes]:
        with (world / "log.txt").open("ab") as log:
            return subprocess.Popen(words, cwd=world, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})

    rng, cut = random.Random(0), 0
    for _ in range(5):
        process, moment = started(), rng.randint(0, 10)

        def answered() -> int:
            return file.read_bytes().count(b"\n") if (file := answers / "predictions.jsonl").exists() else -1

        while process.poll() is None and answered() < moment:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.02)
        cut += process.poll() is None
        process.kill()
        process.wait()
    assert cut >= 3, "most were killed before they ended"
    assert started().wait() == 0, (world / "log.txt").read_text()
    assert files() == whole
    start, evaluate = read_times(answers)[-2:]
    assert (start["what"], evaluate["what"]) == ("start", "evaluate")
    assert set(start["parts"]) == {"libraries", "audit", "load"} and sum(start["parts"].values()) <= start["seconds"]
    assert set(evaluate["parts"]) == {"scores", "answers", "metrics"}
    assert sum(evaluate["parts"].values()) <= evaluate["seconds"]


def test_answers_of_other_settings_are_not_mixed_in(task: VqaTask, tmp_path: Path) -> None:
    said: list[str] = []
    whole = answered(task, tmp_path, False, said)
    assert said == [] and answered(task, tmp_path, False, said) == whole
    asked = Evaluation(max_new_tokens=NEW - 1)
    answer_split(task, asked, tmp_path, {"precision": "float32"}, question_scores, Ranks(), said.append)
    assert said[1:] == [
        f"{tmp_path}/predictions.jsonl: its 10 answers were made with other settings (max_new_tokens); they are begun "
        "anew"
    ]
    assert all(row["tokens"] < NEW for row in lines_of(tmp_path))
    settings = tmp_path / "settings.json"
    known = json.loads(settings.read_text())
    earlier = {name: value for name, value in known.items() if name not in ("end tokens", "adapter scale")}
    settings.write_text(json.dumps(earlier))  # as an earlier release wrote it
    answer_split(task, asked, tmp_path, {"precision": "float32"}, question_scores, Ranks(), said.append)
    assert said[-1] == (
        f"{tmp_path}/predictions.jsonl: its 10 answers do not say with which adapter scale, end tokens they were made; "
        "they are begun anew"
    )
    assert json.loads(settings.read_text()) == known
    parameter = next(iter(task.trained().values()))
    parameter.data += 1
    answer_split(task, asked, tmp_path, {"precision": "float32"}, question_scores, Ranks(), said.append)
    parameter.data -= 1
    assert "other settings (weights)" in said[-1]


def test_asked_to_stop_it_leaves_with_what_is_done(
    world: Path, monkeypatch: pytest.MonkeyPatch, own_signals: None
) -> None:
    """Between two tokens; the same command goes on."""
    whole = (world / "run/answers/adapter-test/predictions.jsonl").read_bytes()
    shutil.rmtree(world / "run/answers")
    with monkeypatch.context() as patch:
        patch.setattr(PredictionFile, "append", then_stop(PredictionFile.append))
        said = sameday(world, "eval", "run")
    there = len(lines_of(world / "run/answers/adapter-test"))
    assert said.code == EXIT_STOPPED and 0 < there < 10
    assert said.err == (
        f"asked to stop: {there} of 10 answers are saved in run/answers/adapter-test/predictions.jsonl; run again to "
        "go on\n"
    )
    assert f"{there} of 10 answers are there already" in done(world, "run").out
    assert (world / "run/answers/adapter-test/predictions.jsonl").read_bytes() == whole


@pytest.mark.parametrize("name", ["metrics.json", "eval-test.json"])
def test_a_full_disk_says_what_was_to_be_written(world: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are kept, and the same command ends with the same files."""
    answers = world / "run/answers/adapter-test"
    whole = (answers / "metrics.json").read_bytes()
    written = predictions.write_text

    def full(path: Path, text: str) -> None:
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(predictions, "write_text", full)
        said = sameday(world, "eval", "run")
    assert said.code == EXIT_DISK_FULL and said.err.startswith(f"no room for {name} in ")
    assert said.err.endswith("Make room and run again: the answers so far are kept.\n")
    assert "10 of 10 answers are there already" in done(world, "run").out
    assert (answers / "metrics.json").read_bytes() == whole


def test_two_at_once_would_mix_their_answers(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is told before its model is loaded, and scores alone are of no folder."""
    folder = Path("run/answers/adapter-test")
    before = (world / folder / "predictions.jsonl").read_bytes()
    lock = Lock(world / folder)
    said = (
        f"{folder}: in use by process {os.getpid()} on {socket.gethostname()}; wait for it, stop it, or choose another "
        "--out"
    )
    with monkeypatch.context() as patch:
        patch.setattr("sameday.tasks.vqa.task.load_base", lambda *_: pytest.fail("loaded"))
        assert refused(world, "eval", "run") == said
    assert refused(world, "train", "recipe.yaml", "--plan", "plan.yaml", "--out", "run") == said
    done(world, "run", "--scores-only")
    done(world, "run", "--split", "val", "--scores-only")
    lock.release()
    done(world, "run")
    assert (world / folder / "predictions.jsonl").read_bytes() == before
    assert not [*world.rglob(".lock")] and not (world / "run/answers/adapter-val").exists()


def test_a_newer_checkpoint_is_in_another_folder(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is last may be another one once the model is loaded: its folder is then the one that is held."""
    load, held = Session.load, list[Path]()

    def newer(self: Session, **more: Any) -> Any:
        held.extend(path.parent for path in world.rglob(".lock"))
        if not (world / "run/checkpoints/step-000003").exists():
            shutil.copytree(world / "run/checkpoints/step-000002", world / "run/checkpoints/step-000003")
        return load(self, **more)

    def appended(self: PredictionFile, given: Any) -> None:
        held.extend(path.parent for path in world.rglob(".lock"))
        append(self, given)

    append = PredictionFile.append
    monkeypatch.setattr(Session, "load", newer)
    monkeypatch.setattr(PredictionFile, "append", appended)
    done(world, "run", "--checkpoint", "last")
    names = [path.name for path in dict.fromkeys(held)]
    assert names == ["step-000002-test", "step-000003-test"]
    assert not (world / "run/answers/step-000002-test").exists() and not [*world.rglob(".lock")]


# The data, mended since


def test_types_that_were_mended_count_and_answers_stay(world: Path) -> None:
    rows = [json.loads(line) for line in (world / "test.jsonl").read_text().splitlines()]
    rows = [row | {"type": "colour" if number % 2 else "count"} for number, row in enumerate(rows)]
    (world / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    about = world / "run/environment.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"recipe_dir": str(world)}))
    before = lines_of(world / "run/answers/adapter-test")
    said = done(world, "run").out
    assert "10 of 10 answers are there already" in said and "type colour, 5 questions on " in said
    after = lines_of(world / "run/answers/adapter-test")
    assert [row["type"] for row in after] == [row["type"] for row in rows]
    assert [row | {"type": None} for row in after] == before
    groups = json.loads((world / "run/answers/adapter-test/metrics.json").read_text())["groups"]
    assert {kind: group["questions"] for kind, group in groups["type"].items()} == {"colour": 5, "count": 5}


def test_nothing_but_answers_is_kept_of_an_earlier_start(
    task: VqaTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = answered(task, tmp_path, False, [])
    file = tmp_path / "predictions.jsonl"
    rows = lines_of(tmp_path)
    kept = [row | {"type": "old", "where": "old.jsonl:1", "question": "old?", "answer": "old"} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in kept))
    monkeypatch.setattr("sameday.tasks.vqa.answers.generate", lambda *_: pytest.fail("generated"))
    assert answered(task, tmp_path, False, []) == before


def test_a_prompt_is_told_as_the_model_read_it(world: Path) -> None:
    """Also where its answer is kept of an earlier release, whose prompts had no white space around them."""
    layouts = ("<image>\n{}", "{} \n<image>", "See <image>: {}", "{}")
    read = ("\n{}", "{} \n<image>", "See <image>: {}", "{}")
    rows = [json.loads(line) for line in (world / "test.jsonl").read_text().splitlines()]
    for n, row in enumerate(rows):
        said = layouts[n % 4].format(row["question"])
        turns = [{"from": "human", "value": said}, {"from": "gpt", "value": row["answer"]}]
        rows[n] = {"image": row["image"], "conversations": turns}
    (world / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    about = world / "run/environment.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"recipe_dir": str(world)}))
    asked = [row["conversations"][0]["value"].replace("<image>", "").strip() for row in rows]
    done(world, "run")
    folder = world / "run/answers/adapter-test"
    made, path = lines_of(folder), folder / "predictions.jsonl"
    plain = [text.removeprefix("See : ") for text in asked]
    assert [row["prompt"] for row in made] == [read[n % 4].format(text) for n, text in enumerate(plain)]
    earlier = [row | {"prompt": text, "prediction": "kept"} for row, text in zip(made, asked, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in earlier))
    assert "10 of 10 answers are there already" in done(world, "run").out
    again = lines_of(folder)
    assert {row["prediction"] for row in again} == {"kept"}
    assert [row["prompt"] for row in again] == [row["prompt"] for row in made]


def test_an_answer_to_another_prompt_is_not_kept(task: VqaTask, tmp_path: Path) -> None:
    """In a cascade prompts hold answers: one that was lost may come out otherwise, under another plan."""
    whole = answered(task, tmp_path, True, [])
    rows = lines_of(tmp_path)
    later = next(row for row in rows if row["prompt"] != row["question"])
    later |= {"prompt": later["prompt"].replace("Earlier", "Other"), "prediction": "of another prompt"}
    (tmp_path / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert answered(task, tmp_path, True, []) == whole


# Stages that build on each other


def test_predictions_go_into_the_prompts_of_later_stages(world: Path) -> None:
    said = done(world, "run", "--cascade")
    folder = world / "run/answers/adapter-test-cascade"
    rows = lines_of(folder)
    plain = {row["id"]: row for row in lines_of(world / "run/answers/adapter-test")}
    without = 0
    for row in rows:
        earlier = [r for r in rows if r["image"] == row["image"] and r["stage"] < row["stage"]]
        earlier.sort(key=lambda r: r["stage"])
        findings = "\n".join(" ".join(f"- {r['question']} {r['prediction']}".split()) for r in earlier)
        expected = f"Earlier findings:\n{findings}\n\n{row['question']}" if earlier else row["question"]
        assert row["prompt"] == expected
        if not earlier:
            assert row == plain[row["id"]]
            without += row["stage"] > 1
    assert without == 1 and any(row["prompt"] != row["question"] for row in rows)
    assert json.loads((folder / "metrics.json").read_text())["without_earlier_answers"] == 1
    assert (
        "1 of 10 questions were asked without findings: they are of a later stage, and their image has no question of "
        "an earlier one" in said.out
    )
    assert json.loads((folder / "settings.json").read_text())["context"].startswith("Earlier findings:")


def test_a_cascade_needs_stages(world: Path) -> None:
    """Said before anything is computed or written."""
    rows = [json.loads(line) for line in (world / "test.jsonl").read_text().splitlines()]
    for row in rows:
        del row["stage"]
    (world / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = "cascade goes by the questions' stages, and none of the 10 questions of data.test has one"
    assert refused(world, "eval", "recipe.yaml", "--base", "--cascade") == told
    words = ("train", "recipe.yaml", "--out", "other", "--set", "recipe.evaluate.cascade=true")
    assert refused(world, *words) == told and not (world / "other").exists()


def test_an_evaluation_of_no_question_is_refused_before_training(world: Path) -> None:
    """It ended in a KeyError."""
    words = ("train", "recipe.yaml", "--out", "none", "--set", 'recipe.data.where={question: "is it red?"}')
    row = {"image": "0.png", "question": "is it red?", "answer": "no"}
    (world / "train.jsonl").write_text(json.dumps(row) + "\n")
    said = refused(world, *words, "--set", "recipe.effective_batch=1", "--set", "recipe.evaluate={split: test}")
    assert said.startswith("recipe.evaluate.split is test, and test.jsonl: none of 10 questions: where question is ")
    assert not (world / "none").exists()


REASONED = "<think>\n\n</think>\n\n"


def reasoning_model(base: Path, to: Path) -> Path:
    """Its chat template puts an empty reasoning before the last answer, and a generation begins with one."""
    shutil.copytree(base, to)
    template = to / "chat_template.jinja"
    text = template.read_text()
    opened = "{%- if message['role'] == 'assistant' and loop.last -%}{{- '" + REASONED.replace("\n", "\\n") + "' -}}"
    for old, new in (
        ("{%- if message['content'] is string -%}", opened + "{%- endif -%}{%- if message['content'] is string -%}"),
        ("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'"),
    ):
        assert old in text
        text = text.replace(old, new)
    template.write_text(text)
    return to


def test_a_templates_reasoning_is_no_part_of_an_answer(tmp_path: Path, tiny_qwen3: Path) -> None:
    """A model that has learned every answer is right in all of them."""
    folder = worlds.write_world(tmp_path, 6, (4, 3), hard=False)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    said = ["no", "<think>\nit is flat\n</think>\n\nno"]  # data may have a reasoning of its own
    for split, few in (("train", rows), ("val", rows[:3]), ("test", rows[:4])):
        lines = [row | {"answer": said[split == "test" and n == 3]} for n, row in enumerate(few)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"train": "train.jsonl", "val": "val.jsonl", "test": "test.jsonl", "image_root": "images"}
    model = reasoning_model(tiny_qwen3, folder / "reasons")
    write_recipe(folder, model, data=data, learning_rate=0.02, effective_batch=7, num_epochs=1000, max_steps=60)
    trained = sameday(folder, "train", "recipe.yaml", "--out", "run", "--set", "plan.device=cpu")
    assert trained.code == 0, trained.err
    note = (
        "the model's chat template puts '\\n</think>\\n\\n' before each answer: it is learned; generated answers are "
    )
    assert f"{note}what comes behind </think>" in trained.out
    assert json.loads((folder / "run/eval.json").read_text())["val"]["exact_match"] == 1
    found = done(folder, "run", "--split", "test")
    assert "exact match (accuracy) 100.0%" in found.out
    lines = lines_of(folder / "run/answers/adapter-test")
    assert {(line["answer"], line["prediction"]) for line in lines} == {("no", "no")}
    assert '.rpartition("</think>")[2].lstrip())' in (folder / "run/adapter/README.md").read_text()
