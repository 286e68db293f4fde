"""`suite plan --measure` times what nobody knows, all of it, and once."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import worlds
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sameday.hardware.known import KNOWN
from sameday.spec.document import dump_yaml
from sameday.spec.evaluation import Evaluation
from sameday.suite.jobs import OpenSuite, open_suite
from sameday.suite.state import SuiteFolder
from sameday.suite.times.measure import _measured
from sameday.suite.times.measured import MEASURED, Measured, keep_measured, read_measured
from sameday.suite.times.predict import Predictor
from sameday.suite.times.unknown import Unknown, unknown
from sameday.suite.times.work import Counts

TRAIN = {"do": "train", "recipe": "recipe.yaml"}
OF = {"do": "eval", "of": "a", "split": "val"}
BASE = {"do": "eval", "recipe": "recipe.yaml", "base": True, "split": "train"}
RESULT = {"machine": "CPU", "steps": [9.0, *[0.5] * 20], "start": 10.0, "save": 1.0, "score_each": 0.01}


@pytest.fixture
def home(tmp_path: Path, two_layers: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    worlds.write_world(tmp_path, seed=5, counts=(4, 4, 4), hard=False)
    (tmp_path / "recipe.yaml").write_text(dump_yaml(worlds.tiny_recipe(two_layers, effective_batch=4)))
    return tmp_path


def suite(home: Path, jobs: dict[str, Any]) -> OpenSuite:
    (home / "night.yaml").write_text(yaml.safe_dump({"set": ["plan.device=cpu"], "jobs": jobs}, sort_keys=False))
    opened = open_suite(home / "night.yaml")
    opened.folder.path.mkdir(parents=True, exist_ok=True)
    return opened


def predictor(opened: OpenSuite) -> Predictor:
    return Predictor(opened.suite, opened.home, opened.folder, audit=True)


def keep(opened: OpenSuite, one: Unknown, **more: Any) -> None:
    keep_measured(opened.folder, _measured((one.training, one.evaluation), RESULT | more, None, 0.5))


def test_evaluations_are_timed_with_a_training_of_their_model(home: Path) -> None:
    """Also where the training itself ends with none."""
    opened = suite(home, {"a": TRAIN, "e": OF, "base": BASE})
    (one,) = unknown(predictor(opened))
    assert (one.job, one.evaluation) == ("a", Evaluation(split="val"))
    keep(opened, one)
    left = predictor(opened).left()
    assert left["a"].seconds and (left["e"].seconds, left["base"].seconds) == (None, None), "scores are not all of it"
    keep(opened, one._replace(evaluation=None), answer_each=0.2)
    assert predictor(opened).left()["e"].seconds is None, "of an evaluation that nobody asks about"
    keep(opened, one, answer_each=0.2)
    there = predictor(opened)
    total = there.counts.of(one.training.recipe, home).sizes["val"]
    assert there.left()["e"].seconds == pytest.approx(10.5 + total * 0.21)
    assert there.left()["base"].source == "measured on CPU" and not unknown(there)


def test_evaluations_without_a_training_are_timed_alone(home: Path) -> None:
    """A suite of them, and those of a training whose pace is known: nobody is told to measure what is never timed."""
    opened = suite(home, {"val": BASE | {"split": "val"}, "base": BASE})
    (one,) = unknown(predictor(opened))
    assert (one.job, one.evaluation, bool(one.training.evaluated)) == ("val", Evaluation(split="val"), True)
    keep(opened, one, steps=[], answer_each=0.2)
    assert not unknown(predictor(opened))
    assert {each.source for each in predictor(opened).left().values()} == {"measured on CPU"}
    opened = suite(home, {"a": TRAIN, "e": OF, "base": BASE})
    (one,) = unknown(predictor(opened))
    assert (one.job, one.evaluation, one.training.evaluated) == ("a", None, ""), "an evaluation is no training"
    (opened.folder.path / "measured.json").unlink()
    keep(opened, one)
    (left,) = unknown(predictor(opened))
    assert (left.job, bool(left.training.evaluated)) == ("e", True)
    keep(opened, left, steps=[], answer_each=0.2)
    assert not unknown(predictor(opened)) and len(read_measured(opened.folder)) == 2


def test_the_longest_of_those_that_cost_the_same_is_timed(home: Path) -> None:
    """A job that only tries out a recipe has no pace worth having."""
    few = TRAIN | {"set": ["recipe.max_steps=1"]}
    for jobs in ({"few": few, "a": TRAIN}, {"a": TRAIN, "few": few}):
        assert [each.job for each in unknown(predictor(suite(home, jobs)))] == ["a"]


def test_answers_of_another_length_are_timed_by_themselves(home: Path) -> None:
    opened = suite(home, {"a": TRAIN, "e": OF})
    (one,) = unknown(predictor(opened))
    longer = Evaluation(split="val", max_new_tokens=500)
    keep(opened, one._replace(evaluation=longer), answer_each=0.2)
    assert predictor(opened).left()["e"].seconds is None
    assert [each.evaluation for each in unknown(predictor(opened))] == [Evaluation(split="val")]
    opened = replace_recipe(home, opened, evaluate={"split": "val", "max_new_tokens": 500})
    assert predictor(opened).left()["e"].seconds and predictor(opened).left()["a"].lacks == ()


def test_other_data_and_another_model_are_measured_again(home: Path, two_layers: Path) -> None:
    """Whatever else a record in OUT says of steps of this recipe."""
    shutil.copytree(two_layers, home / "model")
    opened = replace_recipe(home, suite(home, {"a": TRAIN, "e": OF}), model="./model")
    for path in ("train.jsonl", "model/model.safetensors", "model/config.json"):
        (one,) = unknown(predictor(opened))
        keep(opened, one, answer_each=0.2)
        assert not unknown(predictor(opened)) and predictor(opened).left()["e"].seconds
        assert len(read_measured(opened.folder)) == 1, "one that is of no use any more is not kept"
        with (home / path).open("ab") as file:
            file.write(b"\n")
        left = predictor(opened).left()
        assert [each.seconds for each in left.values()] == [None, None], path


WRONG = st.one_of(st.none(), st.text(max_size=3), st.lists(st.text(max_size=2), max_size=2), st.just({"a": "b"}))


@given(name=st.sampled_from(("cost", "plan", "machine", "steps", "start", "score_each", "files")), value=WRONG)
def test_a_measurement_that_cannot_be_read_is_not_there(name: str, value: Any) -> None:
    good = asdict(Measured("c", "p", "CPU", [1.0] * 5, 2.0, 0.1))
    with TemporaryDirectory() as folder:
        kept = {"measured": [good, good | {name: value}, 5, good | {"newer": 1}]}
        (Path(folder) / "measured.json").write_text(json.dumps(kept))
        read = read_measured(SuiteFolder(Path(folder)))
    right = {"steps": value == [], "start": False, "score_each": value is None}.get(name, isinstance(value, str))
    assert len(read) == (3 if right else 2) and read[0] == read[-1] == Measured(**good)
    assert all(each.pace({"val": 2}, "on") is not None or each.steps == [] for each in read)


@given(st.fixed_dictionaries({"per_epoch": WRONG, "sizes": WRONG}))
def test_counts_that_cannot_be_read_are_not_there(kept: dict[str, Any]) -> None:
    recipe = worlds.tiny_recipe(Path("m"))
    for text in ({"x": kept}, {"x": 5}, [kept], kept):
        with TemporaryDirectory() as folder:
            (Path(folder) / "counts.json").write_text(json.dumps(text))
            counts = Counts(SuiteFolder(Path(folder)))
            assert counts.of(recipe, Path(folder)).per_epoch is None
            counts._keep()


def replace_recipe(home: Path, opened: OpenSuite, **changes: Any) -> OpenSuite:
    text = yaml.safe_load((home / "recipe.yaml").read_text())
    (home / "recipe.yaml").write_text(yaml.safe_dump(text | changes))
    return opened


def test_what_was_measured_instead_of_another_gpu_is_of_that_one(home: Path) -> None:
    opened = suite(home, {"a": TRAIN})
    (one,) = unknown(predictor(opened))
    ask = (one.training, one.evaluation)
    assert _measured(ask, RESULT, None, 0.5).stood_for is None
    found, larger = (_measured(ask, RESULT, KNOWN[name], 0.5) for name in ("a100-40gb", "a100-80gb"))
    assert found.stood_for == (40 * 2**30, "A100 40 GB") != larger.stood_for
    keep_measured(opened.folder, found)
    assert [each.stood_for for each in read_measured(opened.folder)] == [found.stood_for] and unknown(predictor(opened))
    kept = json.loads((opened.folder.path / MEASURED).read_text())
    for each in kept["measured"]:
        del each["stands_for"]
    (opened.folder.path / MEASURED).write_text(json.dumps(kept))
    assert read_measured(opened.folder) == [], "an earlier version's: of which GPU it is nobody knows"
