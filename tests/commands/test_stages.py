"""Runs in stages: each stage an ordinary run, one command, one record, gone on with within and between stages."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from processes import listing, records, weights
from safetensors.torch import load_file, save_file

from sameday.commands.evaluate import Request, evaluate, weights_of
from sameday.commands.launch import train_from_files
from sameday.commands.session import Specs
from sameday.hardware.machine import detect_machine
from sameday.record.folder import RunFolder, stage_folders
from sameday.record.lock import Lock
from sameday.record.manifest import fault, weights_digest, write_manifest
from sameday.report.gather import gather
from sameday.report.page import report_from_files
from sameday.spec.document import dump_yaml
from sameday.spec.errors import EXIT_STOPPED, BadInput, RunStopped
from sameday.tasks.vqa.setup import VqaSetup
from sameday.verify.runs import compare_runs

pytestmark = pytest.mark.usefixtures("own_signals")

CURRICULUM = [
    {"name": "find", "where": {"stage": 1}},
    {"name": "none", "where": {"stage": 7}},
    {"name": "describe", "where": {"stage": 2}, "order": "by_image", "learning_rate": 3e-3},
    {"name": "treat", "where": {"stage": 3}, "max_steps": 2},
]
SETS = ["plan.device=cpu", "plan.save_steps=1", "plan.log_steps=1"]


def write_home(folder: Path, model: Path, stages: Any = CURRICULUM, **changes: Any) -> Path:
    """18 questions to learn: 12 of stage 1, 4 of stage 2 and 2 of stage 3, fewer than a step has; 4 to validate, none
    of stage 3."""
    worlds.write_world(folder, 3, (6, 6, 6), hard=False, sizes=((48, 48),))
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["stage"] = 3 if number % 9 == 8 else 2 if number % 4 == 3 else 1
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    fields: dict[str, Any] = {"effective_batch": 4, "num_epochs": 1, "lora": {"r": 4, "alpha": 8, "dropout": 0.1}}
    recipe = worlds.tiny_recipe(model, **(fields | {"stages": stages} | changes))
    (folder / "recipe.yaml").write_text(dump_yaml(recipe))
    return folder


def train(home: Path, run: Path, *sets: str, stop_after: int | None = None) -> dict[str, float]:
    return train_from_files(home / "recipe.yaml", None, run, [*SETS, *sets], stop_after)


def entries(run: Path) -> dict[str, Any]:
    return {each["name"]: each for each in json.loads((run / "stages.json").read_text())["stages"]}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Path:
    folder = write_home(tmp_path_factory.mktemp("stages"), tiny_qwen3)
    train(folder, folder / "reference")
    return folder


@pytest.fixture(scope="module")
def stopped(home: Path) -> Path:
    """A run that was stopped between two stages, and then in the midst of one."""
    run = home / "stopped"
    with pytest.raises(RunStopped) as stop:
        train(home, run, stop_after=3)
    assert str(stop.value) == ("asked to stop: 3 steps are done, before stage 3 of 4, describe; run again to go on")
    assert stop.value.code == EXIT_STOPPED and [path.name for path in stage_folders(run)] == ["1-find"]
    with pytest.raises(RunStopped) as stop:
        train(home, run, stop_after=5)
    assert str(stop.value) == "stage 4 of 4, treat: asked to stop: step 1 of 2 is saved; run again to go on"
    assert json.loads((run / "stopped.json").read_text())["code"] == EXIT_STOPPED
    return run


def test_one_record_of_all_stages(home: Path) -> None:
    run = home / "reference"
    recorded = entries(run)
    assert {name: each["status"] for name, each in recorded.items()} == {
        **{"find": "finished", "none": "nothing to train on", "describe": "finished", "treat": "finished"}
    }
    assert [each["steps"] for each in recorded.values()] == [3, 0, 1, 2]
    assert recorded["find"]["samples"] == {"train": 12, "val": 3}
    assert recorded["treat"]["samples"] == {"train": 2}, "no question to validate is no error"
    assert recorded["describe"]["start"] == "find" and recorded["treat"]["start"] == "describe"
    assert recorded["treat"]["start_digest"] == recorded["describe"]["result_digest"]
    assert recorded["find"]["scores"]["samples"] == 3 and recorded["treat"]["scores"] == {}
    assert weights(run) == weights(run / "stages/4-treat") and fault(run / "adapter") is None
    for folder in stage_folders(run):
        stage = RunFolder.read(folder)
        assert stage.finished_scores() is not None and stage.recipe.stage_recipes() == []


def test_a_stage_starts_from_the_one_before_bit_for_bit(home: Path) -> None:
    folder = home / "reference/stages/3-describe"
    recipe, plan = RunFolder.read(folder).recipe, RunFolder.read(folder).plan
    setup = VqaSetup(recipe, home)
    splits = setup.audit(lambda _: None).splits
    task = setup.load(setup.resolve_auto(plan, detect_machine("cpu")).plan, torch.device("cpu"), splits)
    saved = load_file(home / "reference/stages/1-find/adapter/adapter_model.safetensors")
    begun = {name.replace(".default", ""): tensor for name, tensor in task.trained().items()}
    assert len(begun) == len(saved)
    for name, tensor in saved.items():
        (same,) = [each for key, each in begun.items() if key.endswith(name.removeprefix("base_model.model."))]
        assert torch.equal(same.detach(), tensor) and same.dtype == tensor.dtype
    assert any(tensor.abs().max() > 0 for name, tensor in saved.items() if "lora_B" in name)


def test_stopped_in_a_stage_and_moved_it_goes_on_there(
    home: Path, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = home / "moved here"
    shutil.copytree(stopped, run)
    train(home, run)
    said = capsys.readouterr().out
    assert "stage 1 of 4, find: finished already, 3 steps\n" in said
    assert "stage 2 of 4, none: left out, because it has nothing to train on: train.jsonl: none of 18 questions" in said
    assert "stage 4 of 4, treat: 2 questions in train; starts from describe\n" in said
    assert "few questions: each step has 2, fewer than recipe.effective_batch 4\n" in said
    assert "resumed from step-000001\n" in said
    assert "find: finished: loss " in said and ", on 3 questions in val\n" in said
    assert weights(run) == weights(home / "reference")
    for folder in stage_folders(run):
        assert records(folder) == records(home / "reference/stages" / folder.name)
        assert listing(folder) == listing(home / "reference/stages" / folder.name)
    assert not (run / "stopped.json").exists()


def test_a_signal_stops_the_stage_that_it_meets(home: Path) -> None:
    run = home / "signalled"
    signal.signal(signal.SIGTERM, lambda *_: None)  # should it come before the loop or after it
    metrics = run / "stages/2-describe/metrics.jsonl"

    def send() -> None:
        while not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    find, describe = (
        "{name: find, where: {stage: 1}, max_steps: 1}",
        "{name: describe, where: {stage: 2}, max_steps: 500}",
    )
    with pytest.raises(
        RunStopped, match=r"^stage 2 of 2, describe: asked to stop: step .* of 500 is saved; run"
    ) as stop:
        train(home, run, f"recipe.stages=[{find}, {describe}]", "plan.save_steps=epoch")
    assert stop.value.code == json.loads((run / "stopped.json").read_text())["code"] == EXIT_STOPPED
    assert [each["status"] for each in entries(run).values()] == ["finished", "training"]


def test_a_finished_run_again_writes_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = home / "reference"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    train(home, run)
    assert capsys.readouterr().out == f"finished already: all 4 stages are done, in {run}\n"
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    shutil.copytree(run, home / "lost")
    shutil.rmtree(home / "lost/adapter")
    train(home, home / "lost")
    assert weights(home / "lost") == weights(run)


def test_a_changed_stage_is_noticed(home: Path, stopped: Path) -> None:
    run = home / "changed"
    shutil.copytree(stopped, run)
    adapter = run / "stages/1-find/adapter"
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] + 1}, path)
    with pytest.raises(BadInput) as caught:
        train(home, run)
    assert str(caught.value) == (
        f"{adapter}: is not what stage find trained: adapter_model.safetensors is not what was written; put it back as "
        "it was, or choose another --out"
    )
    # Whole, and another one: what started from it is not gone on with.
    write_manifest(adapter, sorted(each for each in adapter.iterdir() if each.name != "manifest.json"))
    with pytest.raises(BadInput, match="is not what stage find trained: its weights are others"):
        train(home, run)
    recorded = json.loads((run / "stages.json").read_text())
    recorded["stages"][0]["result_digest"] = weights_digest(adapter)
    (run / "stages.json").write_text(json.dumps(recorded))
    with pytest.raises(BadInput, match="stage describe started from other weights of stage find than those in"):
        train(home, run)
    with pytest.raises(BadInput, match=r"(?s)holds a run of another recipe.*learning_rate: 0.001 there, 0.002 here"):
        train(home, run, "recipe.learning_rate=0.002")
    faster = json.dumps([{**CURRICULUM[0], "learning_rate": 0.002}, *CURRICULUM[1:]])
    with pytest.raises(BadInput, match=r"here\):\n  stages\.find\.learning_rate: None there, 0\.002 here\nChoose"):
        train(home, run, f"recipe.stages={faster}")
    with pytest.raises(BadInput, match=r"\n  stages: find, none, describe, treat there, find here\nChoose"):
        train(home, run, f"recipe.stages={json.dumps(CURRICULUM[:1])}")
    questions = (home / "train.jsonl").read_text()
    (home / "train.jsonl").write_text(questions.replace('"question": "', '"question": "so, ', 1))
    with pytest.raises(BadInput) as caught:
        train(home, run)
    assert str(caught.value) == (
        f"{run / 'stages/1-find'}: the training data (newer: {home / 'train.jsonl'}) changed since stage find was "
        "begun; put it back as it was, or choose another --out"
    )
    (home / "train.jsonl").write_text(questions)
    (run / "stages.json").write_text("{}")
    with pytest.raises(BadInput, match=r"stages\.json: is not what a run wrote"):
        train(home, run)


def test_a_folder_in_which_no_stage_has_a_step_is_free(home: Path) -> None:
    """As one that a run left whose model did not fit in memory."""
    run = home / "free"
    shutil.copytree(home / "reference", run)
    for folder in ("adapter", "stages/3-describe", "stages/4-treat", "stages/1-find/checkpoints"):
        shutil.rmtree(run / folder)
    (run / "stages/1-find/metrics.jsonl").unlink()
    with pytest.raises(RunStopped, match="stage 1 of 4, find: asked to stop: step 1 of 3 is saved"):
        train(home, run, "recipe.learning_rate=0.002", stop_after=1)
    assert [each["status"] for each in entries(run).values()] == ["training", "nothing to train on", *["waiting"] * 2]
    assert (
        RunFolder.read(run).recipe.learning_rate == RunFolder.read(run / "stages/1-find").recipe.learning_rate == 0.002
    )


def test_all_problems_of_all_stages_come_before_the_first(home: Path, tiny_qwen3: Path, tmp_path: Path) -> None:
    write_home(tmp_path, tiny_qwen3, [*CURRICULUM, {"name": "typo", "where": {"sage": 1}}])
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    rows[8]["answer"] = " "
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = listing(tmp_path)
    with pytest.raises(BadInput) as caught:
        train(tmp_path, tmp_path / "run")
    said = str(caught.value).splitlines()
    assert said[0] == "stage treat: 1 problem in 1 line:" and said[1] == "train.jsonl:9: answer is empty"
    assert (
        "stage typo: train.jsonl: none of 18 questions: where sage is 1; recipe.data.where.sage: no line of " in said[3]
    )
    assert listing(tmp_path) == before
    with pytest.raises(BadInput) as caught:
        train(tmp_path, tmp_path / "run", "recipe.stages=[{name: a, where: {stage: 8}}, {name: b, where: {stage: 9}}]")
    said = str(caught.value).splitlines()
    assert said[0] == "no stage has anything to train on:"
    assert [line.partition(";")[0] for line in said[1:]] == [
        "train.jsonl: none of 18 questions: where stage is 8",
        "train.jsonl: none of 18 questions: where stage is 9",
    ]
    assert listing(tmp_path) == before


def test_models_of_their_own(home: Path, tiny_qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = [{**CURRICULUM[n], "start": "base"} for n in (0, 2, 3)]
    run = write_home(tmp_path, tiny_qwen3, stages) / "run"
    train(tmp_path, run)
    assert not (run / "adapter").exists()
    assert [each["start"] for each in entries(run).values()] == [None, None, None]
    assert weights(run / "stages/1-find") == weights(home / "reference/stages/1-find")
    assert weights(run / "stages/2-describe") != weights(home / "reference/stages/3-describe")
    assert f"each stage has its own model: {run}/stages/*/adapter\n" in capsys.readouterr().out
    train(tmp_path, run)
    assert capsys.readouterr().out == f"finished already: all 3 stages are done, in {run}\n"
    together = evaluate(Request(run, "val", scores_only=True))
    said = capsys.readouterr().out
    assert "stage treat:\nleft out: val.jsonl: none of 4 questions: where stage is 3" in said
    written = json.loads((run / "eval-val.json").read_text())
    find, describe = (written["stages"][name] for name in ("find", "describe"))
    assert (find["samples"], describe["samples"], together["samples"]) == (3, 1, 4)
    assert together["loss"] == pytest.approx((3 * find["loss"] + describe["loss"]) / 4)
    assert f"all stages together: loss {together['loss']:.4g}" in said and ", on 4 questions in val\n" in said


def test_stages_side_by_side_that_share_questions_or_leave_some(
    tiny_qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 4 questions to validate 3 are of stage 1 and one is of stage 2; of 18 in train 2 are of stage 3."""
    each = {"start": "base", "max_steps": 1}
    stages = [{"name": "a", "where": {"stage": [1, 2]}, **each}, {"name": "b", "where": {"stage": 2}, **each}]
    run = write_home(tmp_path, tiny_qwen3, stages, evaluate={"split": "train", "max_new_tokens": 1}) / "run"
    train(tmp_path, run)
    said = capsys.readouterr().out
    assert (
        "stages a and b both answer 4 questions of train, so that there are no scores of all stages together; those of "
        "each stage are its own\n2 of 18 questions of train are of no stage that was trained: they are left out\n"
        in said
    )
    assert "all stages together:" not in said and not (run / "answers/adapter-train/predictions.jsonl").exists()
    assert {name: s["samples"] for name, s in json.loads((run / "eval-train.json").read_text())["stages"].items()} == {
        "a": 16,
        "b": 4,
    }
    lines = [
        len((run / f"stages/{name}/answers/adapter-train/predictions.jsonl").read_text().splitlines())
        for name in ("1-a", "2-b")
    ]
    assert lines == [16, 4] and evaluate(Request(run, "train", scores_only=True)) == {}
    report_from_files([run], tmp_path / "shared.html")
    lock = Lock(run / "answers/adapter-train")
    with pytest.raises(BadInput, match=f"answers/adapter-train: in use by process {os.getpid()} on "):
        evaluate(Request(run, "train"))
    lock.release()
    capsys.readouterr()

    apart = tmp_path / "apart"
    stages[0]["where"] = {"stage": 3}
    run = write_home(apart, tiny_qwen3, stages, evaluate={"split": "train", "max_new_tokens": 1}) / "run"
    train(apart, run)
    said, left = (
        capsys.readouterr().out,
        "12 of 18 questions of train are of no stage that was trained: they are left out",
    )
    assert (
        f", on 6 questions in train\n{left}\n" in said
        and left in json.loads((run / "answers/adapter-train/metrics.json").read_text())["notes"]
    )
    report_from_files([run, tmp_path / "run"], apart / "both.html")
    assert "{&#39;name&#39;" not in (apart / "both.html").read_text()
    report_from_files([run], apart / "left.html")
    assert left in (apart / "left.html").read_text()

    # A limit is of each stage by itself: the questions of no stage are not all counted.
    for recipe in (run / "recipe.yaml", *run.glob("stages/*/recipe.yaml")):
        recipe.write_text(recipe.read_text().replace("limit: null", "limit: 7"))
    evaluate(Request(run, "train", scores_only=True))
    said = capsys.readouterr().out
    assert "6 of the first 7 questions of train are of no stage that was trained: they are left out\n" in said


def test_a_curriculum_is_evaluated_with_its_last_adapter(home: Path) -> None:
    run = home / "reference"
    scores = evaluate(Request(run, "val", scores_only=True))
    assert scores["samples"] == 4 and (run / "eval-val.json").is_file()
    (run / "eval-val.json").unlink()


@pytest.mark.parametrize(
    ("start", "wanted", "told"),
    [
        (
            "base",
            {"cascade": True},
            "recipe.evaluate.cascade is true, and stage describe starts from the base model, so that each stage has a "
            "model of its own: a cascade is of one model's answers; allowed: false, or start: previous in each stage",
        ),
        ("base", {"split": "test"}, "recipe.evaluate.split is test, and no stage has a question of it"),
        (
            "previous",
            {"cascade": True, "split": "test"},
            "cascade goes by the questions' stages, and none of the 2 questions of data.test has one",
        ),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused_before_the_first_stage(
    start: str, wanted: dict[str, Any], told: str, tmp_path: Path, tiny_qwen3: Path
) -> None:
    """All stages were trained first."""
    by_stage = start == "base"
    stages: list[dict[str, Any]] = [
        {"name": "find", "where": {"stage": 1} if by_stage else {"image": "0.png"}},
        {"name": "describe", "where": {"stage": 2} if by_stage else {"image": "1.png"}, "start": start},
    ]
    home = write_home(tmp_path, tiny_qwen3, stages, evaluate={"split": "val"} | wanted)
    row = {"question": "is it red?", "answer": "no"} | ({"stage": 3} if by_stage else {})
    asked = [{"image": "0.png", **row}, {"image": "1.png", **row}]
    (home / "test.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
    with pytest.raises(BadInput) as refused:
        train(home, home / "run", "recipe.data.test=test.jsonl")
    assert str(refused.value) == told and not (home / "run").exists()


@pytest.mark.parametrize("start", ["base", "previous"])
def test_it_ends_with_the_evaluation_that_its_recipe_asks_for(
    start: str, tmp_path: Path, tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A curriculum's last adapter answers all questions; where each stage has a model, it answers its own stage's."""
    stages = [{**CURRICULUM[n], "start": start, "max_steps": 1} for n in (0, 2)]
    asked = {"split": "val", "max_new_tokens": 3}
    run = write_home(tmp_path, tiny_qwen3, stages, evaluate=asked) / "run"
    train(tmp_path, run)
    lines = (run / "answers/adapter-val/predictions.jsonl").read_text().splitlines()
    assert [(row["id"], row["stage"]) for row in map(json.loads, lines)] == [(1, 1), (2, 1), (3, 1), (4, 2)]
    assert f"answers in {run}/answers/adapter-val:\n  4 questions on 1 image: " in capsys.readouterr().out
    assert json.loads((run / "answers/adapter-val/metrics.json").read_text())["questions"] == 4
    notes = json.loads((run / "answers/adapter-val/metrics.json").read_text())["notes"]
    seen = "the only image of val was trained on: its scores are too good"
    assert [note for note in notes if "trained on" in note] == (
        [f"stage find: {seen}", f"stage describe: {seen}"] if start == "base" else [seen]
    )
    own = [(run / f"stages/{name}/answers/adapter-val/predictions.jsonl") for name in ("1-find", "2-describe")]
    if start == "base":
        assert "".join(path.read_text() for path in own).splitlines() == lines
        with pytest.raises(
            BadInput, match="has a model of its own, and a cascade is of one model's answers: use --no-cascade"
        ):
            evaluate(Request(run, "val", cascade=True))
        # Into a folder of its own, as a suite's evaluation: the run is left as it is.
        before, out = (run / "eval-val.json").stat().st_mtime_ns, tmp_path / "out"
        scores = evaluate(Request(run, "val", out=out, sets=["plan.eval_token_budget=300"]))
        written = json.loads((out / "scores.json").read_text())
        assert {name: written[name] for name in scores} == scores and written["stages"].keys() == {"find", "describe"}
        assert (out / "predictions.jsonl").read_text().splitlines() == lines
        assert json.loads((out / "metrics.json").read_text())["questions"] == 4
        assert (out / "stages/1-find/scores.json").is_file() and (run / "eval-val.json").stat().st_mtime_ns == before
        with pytest.raises(BadInput, match="was trained by its recipe; only plan"):
            evaluate(Request(run, "val", sets=["recipe.seed=1"]))
    else:
        assert not any(path.exists() for path in own)


def test_a_report_shows_each_stage(home: Path, tmp_path: Path) -> None:
    runs = gather([home / "reference"])
    assert [(run.label, run.last_step) for run in runs] == [("1-find", 3), ("3-describe", 1), ("4-treat", 2)]
    # Evaluated as a whole it stands beside its stages.
    shutil.copytree(home / "reference", tmp_path / "exp4")
    (tmp_path / "exp4/eval-test.json").write_text(json.dumps({"exact_match": 0.25, "samples": 40}))
    page = report_from_files([tmp_path / "exp4"], tmp_path / "report.html").read_text()
    assert page.count("test exact match") == 1 and "25.0%" in page and "finished, 4 stages" in page
    for label in ("1-find", "3-describe", "4-treat", "exp4"):
        assert label in page


def test_two_runs_in_stages_are_compared_stage_by_stage(home: Path) -> None:
    run = home / "reference"
    with pytest.raises(
        BadInput, match=f"^{run}: is a run in stages; compare them one by one, such as {run}/stages/1-find$"
    ):
        compare_runs(run, run / "stages/1-find")


def test_weights_of_a_run_in_stages_that_is_under_way(home: Path, stopped: Path) -> None:
    run = RunFolder.read(stopped)
    last = stage_folders(stopped)[-1]
    stages = f"it is a run in stages, which have checkpoints of their own; the last that was begun is {last}"
    with pytest.raises(BadInput) as caught:
        weights_of(run, "last")
    assert str(caught.value) == f"{stopped}: has no such checkpoint as last; {stages}"
    with pytest.raises(BadInput) as caught:
        weights_of(run, None)
    assert str(caught.value).endswith(f"--checkpoint last, best or step-N takes one of its checkpoints: {stages}")
    assert weights_of(RunFolder.read(last), "last").parent == last / "checkpoints"


def test_other_commands_take_the_first_stage(home: Path) -> None:
    said: list[str] = []
    specs = Specs.from_files(home / "recipe.yaml", None, ["plan.device=cpu"])
    first = specs.first_stage(said.append)
    assert first.recipe.fingerprint == specs.recipe.stage_recipes()[0].recipe.fingerprint
    assert said == [
        "the recipe has 4 stages: this is about the first one, find; --set recipe.stages=[] and --set "
        "recipe.data.where={...} choose other questions"
    ]
    chosen = ["recipe.stages=[]", "recipe.data.where={stage: 2}"]
    assert Specs.from_files(home / "recipe.yaml", None, chosen).first_stage(said.append).recipe.stage_recipes() == []
    assert len(said) == 1
