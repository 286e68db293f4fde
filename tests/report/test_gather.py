"""What is read of a run folder: all of it, whatever is missing, and a clear refusal of what is no run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from reported import NASTY, PARTS, Runs, profile, tune, verdict
from typed import refused, sameday

from sameday.report.gather import gather
from sameday.spec.errors import BadInput
from sameday.spec.record import read_metrics

Copied = Callable[[Path], Path]


def test_a_finished_run_is_read_whole(runs: Runs) -> None:
    [run] = gather([runs.finished])
    records = read_metrics(runs.finished / "metrics.jsonl")
    assert [r["loss"] for r in run.steps] == [r["loss"] for r in records if "split" not in r]
    assert run.evaluations == [r for r in records if "split" in r]
    assert run.finished and run.last_step == 3 and run.label == NASTY
    assert run.scores["val"] == json.loads((runs.finished / "eval.json").read_text())["val"]
    assert run.choices["packing"] == "no padding is computed" and run.skipped and len(run.skipped) == 1
    assert run.recipe_text == (runs.finished / "recipe.yaml").read_text()


def test_an_unfinished_run_says_so(runs: Runs) -> None:
    [run] = gather([runs.stopped])
    assert not run.finished and run.state == "unfinished: step 1 of 3"
    missing = [each.what for each in run.missing]
    assert missing[0] == "The run's end" and "Validation" in missing


def test_optional_files_are_found_beside_a_run_or_named(runs: Runs, copied: Copied, tmp_path: Path) -> None:
    run = copied(runs.stopped)
    [before] = gather([run])
    assert before.profile is None and before.tune is None and before.verdict is None
    for name, data in (("profile", profile("x")), ("tune", tune()), ("verify", verdict("x"))):
        (run / f"{name}.json").write_text(json.dumps(data))
    other = tmp_path / "other.json"
    other.write_text(json.dumps(profile("y")))
    [beside], [named] = gather([run]), gather([run], [other])
    assert beside.profile and beside.profile.fingerprint == "x" and beside.tune and beside.verdict
    assert named.profile and named.profile.fingerprint == "y" and named.tune
    assert [each.what for each in beside.missing] == ["The run's end", "Validation"]


def test_the_timeline_is_the_profile_or_else_the_mean_of_the_steps(runs: Runs, copied: Copied) -> None:
    run = copied(runs.images)
    records = read_metrics(run / "metrics.jsonl")
    for record in records:
        record.pop("parts", None)
    records[0]["parts"], records[1]["parts"] = {"wait": 0.1, "backward": 0.3}, {"backward": 0.5, "strange": 0.2}
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    [found] = gather([run])
    assert found.timeline is not None
    assert found.timeline.parts == pytest.approx({"wait": 0.05, "backward": 0.4, "strange": 0.1})
    assert "2 steps" in found.timeline.source
    (run / "profile.json").write_text(json.dumps(profile("x")))
    [found] = gather([run])
    assert found.timeline is not None and found.timeline.parts == PARTS


def test_a_torn_last_line_is_passed_over(runs: Runs, copied: Copied) -> None:
    run = copied(runs.stopped)
    whole = gather([run])[0].steps
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "loss": 1.2')
    assert gather([run])[0].steps == whole
    (run / "metrics.jsonl").write_text("nothing\n" + (run / "metrics.jsonl").read_text())
    with pytest.raises(BadInput, match=r"metrics.jsonl:1: is not a JSON object: nothing"):
        gather([run])


def test_what_is_no_run_is_refused(runs: Runs, tmp_path: Path) -> None:
    said = refused(tmp_path, "report", "nowhere")
    assert said == "nowhere: no such folder"
    (tmp_path / "file").write_text("")
    assert refused(tmp_path, "report", "file") == "file: is a file, not a run folder"
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path, "report", "empty") == "empty: is not a run folder: it has no recipe.yaml"
    assert refused(runs.home, "report", "images", "images") == "images: is given twice"
    said = refused(runs.home, "report", "images", "-o", "none/report.html")
    assert said == "--out none/report.html: must be a file in a folder that is there"
    said = refused(runs.home, "report", "images", "--tune", "none.json")
    assert said == "none.json: no such file"
    said = refused(runs.home, "report", "images", "--tune", "a.json", "--tune", "b.json")
    assert said == "--tune is given 2 times for 1 runs: at most one for each"
    assert not (runs.home / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("profile.json", '{"parts": {"wait": "long"}}', "profile.json: is no profile of this program: parts.wait: "),
        ("profile.json", "[]", "profile.json: is no profile of this program: the whole: "),
        ("tune.json", '{"ablation": [{}]}', "tune.json: is no tune of this program: ablation.0.field: "),
        ("verify.json", '{"verdict": ', "verify.json: is not JSON: "),
        ("choices.json", "[]", "choices.json: is not what a run wrote: must be a mapping"),
        ("skipped.json", '{"a": 1}', "skipped.json: is not what a run wrote: must be a list of what was left out"),
        ("environment.json", "{}", "environment.json: is not what a run wrote"),
        ("recipe.yaml", "task: nothing\n", "recipe.yaml:1: task is 'nothing'; must be one of"),
    ],
)
def test_a_broken_file_is_named(runs: Runs, copied: Copied, name: str, text: str, said: str) -> None:
    run = copied(runs.stopped)
    (run / name).write_text(text)
    assert refused(run.parent, "report", run.name).startswith(f"{run.name}/{said}")


def test_a_run_with_the_least_that_makes_one(runs: Runs, tmp_path: Path) -> None:
    run = tmp_path / "least"
    run.mkdir()
    for name in ("recipe.yaml", "plan.yaml", "environment.json"):
        shutil.copy(runs.images / name, run / name)
    said = sameday(tmp_path, "report", "least")
    assert said.code == 0, said.err
    assert said.out == "written: report.html\n"
    page = (tmp_path / "report.html").read_text()
    assert "unfinished: no step yet" in page and "metrics.jsonl holds no step" in page
    assert "does not say: it has no skipped.json" in page
