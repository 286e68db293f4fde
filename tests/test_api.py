"""The commands for Python on a tiny model: the same records and the same errors as on the command line."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sets
import worlds
from PIL import Image
from typed import sameday as typed
from typed import write_recipe

import sameday
from sameday import api
from sameday.commands.environment import CUBLAS, TOKENIZERS, environment_given_back, prepare_environment
from sameday.hardware.machine import set_deterministic
from sameday.hardware.signals import ASKING, AskedToStop, StopRequest, nothing_left_to_stop, unbroken
from sameday.spec.document import dump_yaml
from sameday.spec.errors import EXIT_STOPPED, BadInput, RunStopped
from sameday.spec.plan import Plan

CPU = {"plan.device": "cpu"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Path:
    """Two runs of one recipe under two plans. Not to be written to."""
    folder = worlds.write_world(tmp_path_factory.mktemp("api"), 6, (3, 2), hard=False)
    data = {"train": "train.jsonl", "val": "val.jsonl", "test": "val.jsonl", "image_root": "images"}
    write_recipe(folder, tiny_qwen3, data=data)
    (folder / "plan.yaml").write_text(json.dumps({"device": "cpu"}))
    (folder / "shared.yaml").write_text(json.dumps({"device": "cpu", "share_images": True, "packing": True}))
    return folder


@pytest.fixture(scope="module")
def run(world: Path) -> api.Run:
    return sameday.train(world / "recipe.yaml", world / "plan.yaml", world / "run")


def test_train(world: Path, run: api.Run) -> None:
    assert run.path == world / "run" and isinstance(run, api.Run)
    assert [record["step"] for record in run.metrics if "split" not in record] == [1, 2]
    assert set(run.scores) >= {"loss", "exact_match"} and run.plan.device == "cpu"
    assert run.result == world / "run" / "adapter" and (run.result / "adapter_config.json").is_file()
    typed_too = typed(world, "train", "recipe.yaml", "--plan", "plan.yaml", "--out", "typed")
    assert typed_too.code == 0, typed_too.err
    assert api.Run(world / "typed").recipe.fingerprint == run.recipe.fingerprint
    losses = [[record["loss"] for record in each.metrics] for each in (run, api.Run(world / "typed"))]
    assert losses[0] == losses[1]


def test_settings_and_the_usual_folder(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = api.train(world / "recipe.yaml", set={**CPU, "recipe.lora": {"r": 1}}, max_steps=1, limit=2)
    assert made.path == Path("runs") / f"small-{made.recipe.fingerprint}" and made.path.is_dir()
    assert made.recipe.lora.r == 1 and made.recipe.max_steps == 1


def test_stopping_early_is_an_exception_with_its_code(world: Path, tmp_path: Path, own_signals: None) -> None:
    with pytest.raises(RunStopped) as stop:
        api.train(world / "recipe.yaml", world / "plan.yaml", tmp_path / "run", stop_after=1)
    assert stop.value.code == EXIT_STOPPED
    assert len(api.train(world / "recipe.yaml", world / "plan.yaml", tmp_path / "run").metrics) >= 2


def test_variables_that_a_plan_sets_last_as_long_as_the_call(
    world: Path, run: api.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call, with another plan, does not find them; nor does it after an error."""
    for name in ("HF_NEW", CUBLAS, TOKENIZERS):
        monkeypatch.setenv(name, "0")  # so that it is put back after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_OLD", "before")
    before, recipe = dict(os.environ), world / "recipe.yaml"
    sets = {**CPU, "plan.environment": {"HF_NEW": "1", "HF_OLD": "2"}, "plan.deterministic": True}
    made = api.train(recipe, out=tmp_path / "run", set=sets, max_steps=1)
    recorded = json.loads((made.path / "environment.json").read_text())
    assert '"HF_NEW"' in json.dumps(recorded), "it was set while the run went on"
    assert dict(os.environ) == before
    api.evaluate(made, "val", scores_only=True, set=sets)
    with pytest.raises(BadInput, match="has no such checkpoint as step-9"):
        api.load(made, "step-9", set=sets)
    assert dict(os.environ) == before
    api.load(made, set=sets)
    assert dict(os.environ) == before | {TOKENIZERS: "false", CUBLAS: ":4096:8"}
    set_deterministic(False)


def test_variables_that_something_else_sets_meanwhile_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKENIZERS, "before")
    for name in ("HF_CHANGED", "HF_TWICE", "HF_GONE"):
        monkeypatch.setenv(name, "0")
    with environment_given_back():
        prepare_environment(Plan(environment={"HF_CHANGED": "1", "HF_TWICE": "1", "HF_GONE": "1"}))
        prepare_environment(Plan(environment={"HF_TWICE": "2", TOKENIZERS: "true"}))
        os.environ["HF_CHANGED"] = "another's"
        del os.environ["HF_GONE"]
    assert (os.environ["HF_CHANGED"], os.environ["HF_TWICE"], os.environ[TOKENIZERS]) == ("another's", "0", "before")
    assert "HF_GONE" not in os.environ


def in_a_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_calls_in_a_thread_leave_signals_alone(world: Path, run: api.Run, tmp_path: Path) -> None:
    """Nothing is installed there, nor can be; data workers, which are forked by it, do what they do elsewhere."""
    before = {number: signal.getsignal(number) for number in ASKING}
    files, sets = (world / "recipe.yaml", world / "plan.yaml", tmp_path / "run"), {"plan.workers": 1}
    with pytest.raises(RunStopped) as stop:
        in_a_thread(lambda: api.train(*files, set=sets, stop_after=1))
    assert stop.value.code == EXIT_STOPPED
    made = in_a_thread(lambda: api.train(*files, set=sets))
    assert [record["loss"] for record in made.metrics] == [record["loss"] for record in run.metrics]
    scores = in_a_thread(lambda: api.evaluate(made, "val", max_new_tokens=4, set=CPU))
    assert scores["loss"] == pytest.approx(run.scores["loss"], rel=1e-6)
    assert in_a_thread(lambda: api.verify(run, made)).same
    loaded = in_a_thread(lambda: api.load(made, set=CPU))
    row = json.loads((world / "val.jsonl").read_text().splitlines()[0])
    asked = [{"image": row["image"], "question": row["question"]}]
    assert in_a_thread(lambda: loaded.answers(asked, world / "images", max_new_tokens=4)) == loaded.answers(
        asked, world / "images", max_new_tokens=4
    )
    assert {number: signal.getsignal(number) for number in ASKING} == before


def test_a_thread_does_not_disturb_what_the_main_one_listens_to(own_signals: None) -> None:
    def elsewhere() -> None:
        with StopRequest() as stop, stop.at_once(), unbroken():
            assert not stop.asked
        nothing_left_to_stop()

    with pytest.raises(AskedToStop), StopRequest() as listens, listens.at_once():
        in_a_thread(elsewhere)
        os.kill(os.getpid(), signal.SIGTERM)


def test_errors_are_those_of_the_command_line(world: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as error:
        api.train(world / "recipe.yaml", out=tmp_path / "run", set={"recipe.effective_batch": 0, "plan.workers": "x"})
    said = typed(world, "train", "recipe.yaml", "--set", "recipe.effective_batch=0", "--set", "plan.workers=x")
    assert said.err.replace("recipe.yaml", str(world / "recipe.yaml")).startswith(f"error: {error.value}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: api.train({"model": "x"}, plan={"device": "cpu"}),  # type: ignore[arg-type]
            "recipe is {'model': 'x'}; must be a path of a YAML file; single fields are given by set\n"
            "plan is {'device': 'cpu'}; must be a path of a YAML file; single fields are given by set",
        ),
        (
            lambda: api.train("recipe.yaml", set=["recipe.seed=1"]),  # type: ignore[arg-type]
            "set is ['recipe.seed=1']; must be a mapping of fields to values, such as "
            '{"recipe.learning_rate": 1e-4, "plan.device": "cpu"}',
        ),
        (lambda: api.load(None), "run is None; must be a path"),  # type: ignore[arg-type]
        (lambda: api.evaluate(3), "what is 3; must be a path"),  # type: ignore[arg-type]
        (lambda: api.verify("a", 1), "other is 1; must be a path"),  # type: ignore[arg-type]
        (lambda: api.train("a", stop_after=-1), "stop_after is -1; a whole number of at least 1 is needed"),
        (
            lambda: api.train("a", stop_after=1.5, limit="3"),  # type: ignore[arg-type]
            "stop_after is 1.5; a whole number of at least 1 is needed\n"
            "limit is '3'; a whole number of at least 1 is needed",
        ),
        (
            lambda: api.load("a", 3),  # type: ignore[arg-type]
            "checkpoint is 3; must be 'last', 'best', a text such as 'step-250', or None for the result",
        ),
        (
            lambda: api.train("a", set={"recipe.name": object(), 3: 1}),  # type: ignore[dict-item]
            "set: 'recipe.name' is of type object; allowed: what JSON has, such as a text\n"
            'set: 3 is no field; must be a text such as "recipe.learning_rate"',
        ),
        (
            lambda: api.verify("a", ranks="2", precision="fp16"),  # type: ignore[arg-type]
            "ranks is '2'; a whole number of at least 1 is needed\n"
            "precision is 'fp16'; must be 'float32' or 'bf16' or None",
        ),
        (
            lambda: api.evaluate("a", max_new_tokens=0, base=1),  # type: ignore[arg-type]
            "max_new_tokens is 0; a whole number of at least 1 is needed\nbase is 1; must be True or False",
        ),
        (
            lambda: api.verify("a", steps=10**6, ranks=65),
            "steps is 1000000: the weights of every step are recorded; at most 1000\n"
            "ranks is 65: each is a process with the whole model in memory; at most 64",
        ),
        (
            lambda: api.evaluate("a", max_new_tokens=10**9),
            "max_new_tokens is 1000000000: room for so many is kept for each question that is answered at once; "
            "at most 32768",
        ),
    ],
)
def test_arguments_of_another_kind_are_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(BadInput) as error:
        call()
    assert str(error.value) == words


def test_evaluate(world: Path, run: api.Run, tmp_path: Path) -> None:
    scores = sameday.evaluate(run, "val", scores_only=True, set=CPU)
    assert scores["loss"] == pytest.approx(run.scores["loss"], rel=1e-6)
    with pytest.raises(BadInput, match="there is no such run folder or recipe"):
        api.evaluate(tmp_path / "nothing")


def test_a_model_that_is_made_of_its_data_is_loaded_too(tmp_path: Path) -> None:
    sets.write_set(tmp_path, train=20)
    recipe = sets.tiny_recipe(data={"path": "set", "val": 4})
    (tmp_path / "recipe.yaml").write_text(dump_yaml(recipe))
    made = sameday.train(tmp_path / "recipe.yaml", out=tmp_path / "run", set=CPU)
    loaded = sameday.load(made, set=CPU)
    assert sum(each.numel() for each in loaded.model.parameters()) > 0 and not loaded.model.training
    with pytest.raises(BadInput, match="task classify generates no answers"):
        loaded.answers([])


def test_load(world: Path, run: api.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.path.parent)
    loaded = sameday.load(run.path.name, set=CPU)
    monkeypatch.chdir(tmp_path)
    assert not loaded.model.training and loaded.run.scores == pytest.approx(run.scores)
    rows = [json.loads(line) for line in (world / "val.jsonl").read_text().splitlines()]
    asked = [{"image": row["image"], "question": row["question"]} for row in rows]
    given = loaded.answers(asked, world / "images", max_new_tokens=4)
    api.evaluate(run, "val", max_new_tokens=4, set=CPU, out=world / "answers")
    made = [json.loads(line) for line in (world / "answers" / "predictions.jsonl").read_text().splitlines()]
    assert given == [each["prediction"] for each in made]
    by_paths = (
        {**row, "image": Path(row["image"]) if n else [world / "images" / row["image"]]} for n, row in enumerate(asked)
    )
    assert loaded.answers(by_paths, world / "images", max_new_tokens=4) == given
    with pytest.raises(BadInput, match=r"nowhere\.png"):
        loaded.answers([{"image": "nowhere.png", "question": "what?"}], world / "images")
    assert loaded.answers([], world / "images") == []
    for wrong, words in (
        ([{"image": rows[0]["image"], "question": 3}], "1 problem in 1 question:\nquestion 1: 'question' is a number"),
        ("hello", "questions is 'hello'; needed is a list of mappings such as "),
        (["h"], "question 1 is 'h'; needed is a mapping such as "),
        (
            [{"question": "hm"}],
            "1 problem in 1 question:\nquestion 1: unknown form with the keys 'question'; known are ",
        ),
        (
            [asked[0], {**asked[1], "question": "a <|im_end|>"}],
            "1 problem in 1 question:\nquestion 2: question holds '<|im_end|>', which would become a real token",
        ),
        (
            [{**asked[0], "image": Image.new("RGB", (8, 8))}, {**asked[1], "question": b"x"}],
            "question 1: 'image' is of type PIL.Image.Image; allowed: the path of an image file, or a list of paths\n"
            "question 2: 'question' is of type bytes; allowed: what JSON has, such as a text",
        ),
        (
            [{**asked[0], "image": "a.png"}, {**asked[1], "image": "b.png"}],
            f"none of the images is under {world / 'images'}, such as 'a.png': images may be another folder",
        ),
    ):
        with pytest.raises(BadInput) as told:
            loaded.answers(wrong, world / "images")
        assert str(told.value).startswith(words)
        assert "recipe.data" not in str(told.value) and "/tmp" not in str(told.value).replace(str(world), "")
    for count in (0, True, 2.5):
        with pytest.raises(BadInput, match=f"max_new_tokens is {count}; a whole number of at least 1 is needed"):
            loaded.answers(asked, world / "images", max_new_tokens=count)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="has no such checkpoint as step-9"):
        api.load(run, "step-9")
    with pytest.raises(BadInput, match="split is 'dev': Input should be 'train', 'val' or 'test'"):
        api.evaluate(run, "dev", set=CPU)  # type: ignore[arg-type]


def test_questions_are_those_that_are_asked(world: Path, tiny_qwen3: Path, tmp_path: Path) -> None:
    """Whatever else the recipe's data has: a split of its own, another set, other names of columns."""
    rows = [json.loads(line) for line in (world / "train.jsonl").read_text().splitlines()]
    renamed = [{"ask" if name == "question" else name: value for name, value in row.items()} for row in rows]
    (tmp_path / "renamed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in renamed))
    images = {"image_root": str(world / "images")}
    mixed = {"train": str(world / "val.jsonl"), "test": str(world / "val.jsonl"), **images}
    data = {"train": "renamed.jsonl", "fields": {"question": "ask"}, "split": {"val": 0.2, "test": 0.4}, **images}
    write_recipe(tmp_path, tiny_qwen3, data=data | {"mix": [mixed]})
    made = api.train(tmp_path / "recipe.yaml", out=tmp_path / "run", set=CPU, max_steps=1)
    loaded = sameday.load(made, set=CPU)
    asked = [{"image": row["image"], "question": row["question"]} for row in rows[:2]]
    given = loaded.answers(asked * 2, world / "images", max_new_tokens=4)
    assert len(given) == 4 and given[:2] == given[2:]
    theirs = [{"image": row["image"], "ask": row["question"]} for row in asked]
    assert loaded.answers(theirs, world / "images", max_new_tokens=4) == given[:2]
    with pytest.raises(BadInput, match=r"nowhere\.png"):
        loaded.answers([{"image": "nowhere.png", "question": "what?"}], world / "images")


def test_verify(world: Path, run: api.Run) -> None:
    shared = api.train(world / "recipe.yaml", world / "shared.yaml", world / "shared")
    verdict = sameday.verify(run, shared)
    assert verdict.same and verdict.code == 0 and verdict.details["exit_code"] == 0
    said = typed(world, "verify", "run", "shared")
    assert said.out.splitlines()[-1] == verdict.lines[-1]
    asked = {"plan": world / "shared.yaml", "against": world / "plan.yaml"}
    with pytest.raises(BadInput, match="steps"):  # of a recipe: what it compares is tested where it stands
        api.verify(world / "recipe.yaml", steps=1, **asked)
    with pytest.raises(BadInput, match="belong to `verify RECIPE`; finished runs have their plans already"):
        api.verify(run, shared, steps=4)


def test_importing_it_is_fast_and_each_name_has_types() -> None:
    code = (
        "import sys, sameday, sameday.api; assert callable(sameday.train) and callable(sameday.load); "
        "import sameday.train.cadence; assert callable(sameday.train) and sameday.train.cadence; "
        "print(sorted({'torch', 'transformers', 'peft', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    for name in ("train", "evaluate", "verify", "load"):
        about = inspect.signature(getattr(api, name))
        assert about.return_annotation and all(each.annotation for each in about.parameters.values())
    with pytest.raises(AttributeError, match="module 'sameday' has no attribute 'nothing'"):
        _ = sameday.nothing


def test_errors_have_the_packages_name() -> None:
    assert sameday.BadInput is BadInput and sameday.RunStopped is RunStopped
