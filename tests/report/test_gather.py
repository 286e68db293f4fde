"""What is read of a run folder: all of it, whatever is missing, and a clear refusal of what is no run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reported import EVIL, NASTY, PHASES, Runs, profile, tune, verdict
from typed import refused, sameday

from sameday.record.folder import read_metrics
from sameday.report.gather import Run, gather
from sameday.report.page import render
from sameday.report.words import PHASES as ORDER
from sameday.report.words import in_order
from sameday.spec.errors import BadInput

Copied = Callable[[Path], Path]


def with_parts(run: Path, *phases: dict[str, float]) -> list[dict[str, Any]]:
    """The run's records, of which the first ones say where their time went, and no other does."""
    records = read_metrics(run / "metrics.jsonl")
    for record in records:
        record.pop("phases", None)
    for record, given in zip(records, phases, strict=False):
        record["phases"] = given
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def of_run(run: Run) -> dict[str, Any]:
    """A profile of the run's recipe and plan."""
    return profile(run.fingerprint) | {"plan": run.plan.model_dump(mode="json")}


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
    assert not run.finished and run.state == "unfinished: step 1 of 3, asked to stop"
    missing = [each.what for each in run.missing]
    assert missing[0] == "The run's end" and "Validation" in missing
    assert run.missing[0].remedy == "asked to stop: step 1 of 3 is saved; run again to go on"


def test_what_ended_a_run_is_told_until_it_goes_on(runs: Runs, copied: Copied) -> None:
    path = copied(runs.stopped)
    (path / "stopped.json").write_text(json.dumps({"why": f"step 2: loss nan {EVIL}", "code": 3}))
    [run] = gather([path])
    assert run.state == "unfinished: step 1 of 3, diverged" and run.missing[0].remedy == f"step 2: loss nan {EVIL}"
    page = render([run])
    assert EVIL not in page and "diverged" in page
    for odd in ([], {"why": 3, "code": 3}, {"why": "no"}):
        (path / "stopped.json").write_text(json.dumps(odd))
        with pytest.raises(BadInput, match=r"stopped\.json: is not what a run wrote"):
            gather([path])
    (path / "stopped.json").unlink()
    [run] = gather([path])
    assert run.state == "unfinished: step 1 of 3" and "the command that started it" in run.missing[0].remedy
    words = ("train", "recipe.yaml", "--on-bad", "skip", "--out", str(path), "--plan", "plain.yaml")
    assert sameday(runs.home, *words, "--stop-after", "2").code == 75
    assert json.loads((path / "stopped.json").read_text())["code"] == 75
    assert sameday(runs.home, *words).code == 0 and not (path / "stopped.json").exists()


def test_optional_files_are_found_beside_a_run_or_named(runs: Runs, copied: Copied, tmp_path: Path) -> None:
    run = copied(runs.stopped)
    [before] = gather([run])
    assert before.profile is None and before.tune is None and before.verdict is None
    for name, data in (("profile", of_run(before)), ("tune", tune()), ("verify", verdict("x"))):
        (run / f"{name}.json").write_text(json.dumps(data))
    other = tmp_path / "other.json"
    other.write_text(json.dumps(profile("y")))
    [beside], [named] = gather([run]), gather([run], [other])
    assert beside.profile and beside.profile.fingerprint == before.fingerprint and beside.tune and beside.verdict
    assert named.profile and named.profile.fingerprint == "y" and named.tune
    assert [each.what for each in beside.missing] == ["The run's end", "Validation"]


def test_the_timeline_is_the_profile_or_else_the_mean_of_the_steps(runs: Runs, copied: Copied) -> None:
    run = copied(runs.images)
    with_parts(run, {"wait": 0.1, "backward": 0.3}, {"backward": 0.5, "strange": 0.2})
    [found] = gather([run])
    assert found.timeline is not None
    assert found.timeline.phases == pytest.approx({"wait": 0.05, "backward": 0.4, "strange": 0.1})
    assert "2 steps" in found.timeline.source
    (run / "profile.json").write_text(json.dumps(of_run(found)))
    [found] = gather([run])
    assert found.timeline is not None and found.timeline.phases == PHASES and found.floor == 0.4125


def test_a_profile_of_something_else_is_not_the_runs_timeline(runs: Runs, copied: Copied) -> None:
    run = copied(runs.images)
    with_parts(run, {"wait": 0.1, "backward": 0.3})
    [found] = gather([run])
    own = of_run(found)
    plan = own["plan"]
    for data, ours in (
        (own | {"plan": plan | {"log_steps": 77, "save_steps": 5}}, True),
        (own | {"plan": plan | {"workers": plan["workers"] + 1}}, False),
        (own | {"fingerprint": "0123456789ab"}, False),
    ):
        (run / "profile.json").write_text(json.dumps(data))
        [found] = gather([run])
        assert found.timeline is not None and found.floor == (0.4125 if ours else None)
        assert found.timeline.phases == (PHASES if ours else {"wait": 0.1, "backward": 0.3})
    [floor] = [each for each in found.missing if each.what == "The least time that a step could take"]
    assert floor.remedy == "the profile is of another recipe or plan"
    with_parts(run)
    [found] = gather([run])
    assert found.timeline is None and "Where a step's time goes" in [each.what for each in found.missing]


def test_what_is_missing_comes_with_the_command_that_makes_it(runs: Runs, copied: Copied) -> None:
    run = copied(runs.images)
    with_parts(run, {"wait": 0.1, "backward": 0.3})
    commands = {each.what: each.command for each in gather([run])[0].missing}
    assert "Where a step's time goes" not in commands
    beside = {name: run.resolve() / f"{name}.json" for name in ("profile", "tune", "verify")}
    floor = f"sameday profile recipe.yaml --plan plan.yaml --json {beside['profile']}"
    assert commands["The least time that a step could take"] == floor
    # Without -o it would write over the plan.yaml that the page tells to save.
    tuning = f"sameday tune recipe.yaml -o tuned.yaml --json {beside['tune']}"
    assert commands["What each choice of the plan gives"] == tuning


def test_parts_have_one_order() -> None:
    assert in_order(["other", "strange", "prepare", "wait"]) == ["wait", "prepare", "other", "strange"]
    assert in_order(reversed(ORDER)) == list(ORDER)


def test_a_torn_last_line_is_passed_over(runs: Runs, copied: Copied) -> None:
    run = copied(runs.stopped)
    whole = gather([run])[0].steps
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "loss": 1.2')
    assert gather([run])[0].steps == whole


def test_a_bad_line_of_one_run_stops_no_report(runs: Runs, copied: Copied) -> None:
    run = copied(runs.stopped)
    whole = gather([run])[0].steps
    good = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(f"nothing\n{good}")
    said = sameday(run.parent, "report", run.name, str(runs.images))
    first = f"{run.name}/metrics.jsonl:1: is not a JSON object: nothing"
    assert (said.code, said.err) == (2, f"error: {first}\nreport.html is written without such lines\n")
    page = (run.parent / "report.html").read_text()
    assert "metrics.jsonl:1: is not a JSON object: nothing." in page and "A part of its curves" in page
    assert "pictures</b>" in page, "the other run stands there as it is"
    assert gather([run])[0].steps == whole
    (run / "metrics.jsonl").write_text(f'nothing\n{{"step": {"[" * 100_000}\n{good}')
    [missing] = (each.remedy for each in gather([run])[0].missing if each.what == "A part of its curves")
    assert missing == (
        f"{run}/metrics.jsonl:1: is not a JSON object: nothing; "
        f'{run}/metrics.jsonl:2: is not a JSON object: {{"step": {"[" * 51}'
    )


def test_every_line_that_is_left_out_is_named(runs: Runs, copied: Copied) -> None:
    """Also one that is JSON: what its step or its loss is, commands to a terminal shown and not obeyed."""
    run = copied(runs.images)
    whole = gather([run])[0].steps
    good = (run / "metrics.jsonl").read_text().splitlines()
    path = f"{run.name}/metrics.jsonl"
    bad = ['{"step": "ten"}', '{"step": 1, "loss": "\\u001b[31mRED\\u0007"}']
    (run / "metrics.jsonl").write_text("\n".join([good[0], *bad, *good[1:], "nonsense", ""]))
    said = sameday(run.parent, "report", run.name)
    lines = [
        f"{path}:2: step is 'ten'; must be the number of a step",
        f"{path}:3: loss is '\\x1b[31mRED\\x07'; must be a number, or null",
        f"{path}:{len(good) + 3}: is not a JSON object: nonsense",
    ]
    assert said.code == 2
    assert said.err.splitlines() == [f"error: {lines[0]}", *lines[1:], "report.html is written without such lines"]
    page = (run.parent / "report.html").read_text()
    assert "No data was left out." in page and "Nothing was left out" not in page
    assert "3 lines of pictures's metrics.jsonl are left out of this report: " in page
    assert "loss is &#39;\\x1b[31mRED\\x07&#39;; must be a number, or null" in page
    assert gather([run])[0].steps == whole
    (run / "metrics.jsonl").write_text("\n".join(good + bad * 100) + "\n")
    said = sameday(run.parent, "report", run.name)
    assert said.err.splitlines()[5:] == [
        f"and 195 more such lines in {path}",
        "report.html is written without such lines",
    ]
    (run / "metrics.jsonl").write_text("\n".join(good) + "\n")
    assert sameday(run.parent, "report", run.name).code == 0
    page = (run.parent / "report.html").read_text()
    assert "Nothing was left out." in page and "metrics.jsonl is left out" not in page


def test_what_is_no_run_is_refused(runs: Runs, tmp_path: Path) -> None:
    said = refused(tmp_path, "report", "nowhere")
    assert said == "nowhere: no such folder"
    (tmp_path / "file").write_text("")
    assert refused(tmp_path, "report", "file") == "file: is a file, not a run folder"
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path, "report", "empty") == "empty: is not a run folder: it has no recipe.yaml"
    assert refused(runs.home, "report", "pictures", "pictures") == "pictures: is given twice"
    said = refused(tmp_path, "report", "nowhere", "file", "empty")
    assert said.splitlines() == [
        "nowhere: no such folder",
        "file: is a file, not a run folder",
        "empty: is not a run folder: it has no recipe.yaml",
    ]
    said = refused(runs.home, "report", "pictures", "-o", "none/report.html")
    assert said == "--out none/report.html: must be a file in a folder that is there"
    said = refused(runs.home, "report", "pictures", "--tune", "none.json")
    assert said == "none.json: no such file"
    said = refused(runs.home, "report", "pictures", "--tune", "a.json", "--tune", "b.json")
    assert said == "--tune is given 2 times for 1 runs: at most one for each"
    assert not (runs.home / "report.html").exists()


def test_what_is_read_is_not_written_over(runs: Runs, copied: Copied, tmp_path: Path) -> None:
    run = copied(runs.images)
    sameday(tmp_path, "eval", "pictures", "--split", "val")
    before = {path: path.read_bytes() for path in run.iterdir() if path.suffix in (".yaml", ".json", ".jsonl")}
    assert {"recipe.yaml", "metrics.jsonl", "eval.json", "eval-val.json"} <= {path.name for path in before}
    (tmp_path / "given.json").write_text("{}")
    outs = [
        *(f"pictures/{path.name}" for path in before),
        "pictures/stopped.json",
        "pictures/verify.json",
        "given.json",
    ]
    for out in outs:
        said = refused(tmp_path, "report", "pictures", "--profile", "given.json", "-o", out)
        assert said == f"--out {out}: is one of the files that are read; choose another one"
    assert before == {path: path.read_bytes() for path in before}
    for _ in range(2):  # an earlier report may be replaced
        assert sameday(tmp_path, "report", "pictures", "-o", "pictures/report.html").code == 0


HOMELESS = (
    "is not what a run wrote: recipe_dir must name the recipe's folder; "
    "put the file back as it was, or leave this run out"
)
STEPLESS = "is not what a run wrote: best.step must be the number of a step"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("profile.json", '{"phases": {"wait": "long"}}', "profile.json: is no profile of this program: phases.wait: "),
        ("profile.json", "[]", "profile.json: is no profile of this program: the whole: "),
        ("profile.json", "{}", "profile.json: is no profile of this program: it has no phases"),
        ("profile.json", '{"phases": {}}', "profile.json: is no profile of this program: it has no seconds"),
        ("profile.json", "[" * 100_000, "profile.json: is not JSON: "),
        ("tune.json", "{}", "tune.json: is no tune of this program: it has no plain"),
        (
            "tune.json",
            '{"plain": {}, "best": {}, "ablation": [{}]}',
            "tune.json: is no tune of this program: it has no ablation.0.field",
        ),
        ("verify.json", '{"verdict": ', "verify.json: is not JSON: "),
        ("verify.json", "{}", "verify.json: is no verdict of this program: it has no verdict"),
        (
            "verify.json",
            '{"verdict": "bitwise"}',
            "verify.json: is no verdict of this program: the whole: it has neither recipe nor runs",
        ),
        ("choices.json", "[]", "choices.json: is not what a run wrote: must be a mapping"),
        ("skipped.json", '{"a": 1}', "skipped.json: is not what a run wrote: must be a list of what was left out"),
        ("environment.json", "{}", f"environment.json: {HOMELESS}"),
        ("environment.json", '{"recipe_dir": null}', f"environment.json: {HOMELESS}"),
        ("environment.json", "[]", "environment.json: is not what a run wrote: must be a mapping"),
        ("environment.json", "{", "environment.json: is not JSON: "),
        ("eval.json", '{"best": {"step": "3"}}', f"eval.json: {STEPLESS}"),
        ("eval.json", '{"best": {"step": [3]}}', f"eval.json: {STEPLESS}"),
        ("eval.json", '{"best": {"step": NaN}}', f"eval.json: {STEPLESS}"),
        ("recipe.yaml", "task: nothing\n", "recipe.yaml:1: task is 'nothing'; must be one of"),
    ],
)
def test_a_broken_file_is_named(runs: Runs, copied: Copied, name: str, text: str, said: str) -> None:
    run = copied(runs.stopped)
    (run / name).write_text(text)
    assert refused(run.parent, "report", run.name).startswith(f"{run.name}/{said}")


def test_metrics_that_are_a_folder_are_named(runs: Runs, copied: Copied) -> None:
    run = copied(runs.stopped)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    assert refused(run.parent, "report", run.name) == f"{run.name}/metrics.jsonl: cannot be read: Is a directory"


@pytest.mark.parametrize("name", ["metrics.jsonl", "profile.json", "environment.json", "eval.json", "recipe.yaml"])
def test_a_pipe_in_a_strangers_run_is_not_waited_for(runs: Runs, copied: Copied, name: str) -> None:
    run = copied(runs.stopped)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    said = sameday(run.parent, "report", run.name)
    if name == "metrics.jsonl":
        assert said.err == f"error: {run.name}/{name}: cannot be read: it is a pipe or a device, not a file\n"
    elif name in ("environment.json", "recipe.yaml"):
        assert said.err == f"error: {run.name}: is not a run folder: it has no {name}\n"
    else:
        assert said.code == 0, "what a run need not have is as good as missing"


@pytest.mark.parametrize(
    ("name", "most"), [("metrics.jsonl", "268,435,456"), ("tune.json", "33,554,432"), ("skipped.json", "33,554,432")]
)
def test_no_more_is_read_of_a_strangers_run_than_one_can_have(runs: Runs, copied: Copied, name: str, most: str) -> None:
    run = copied(runs.stopped)
    with (run / name).open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    said = refused(run.parent, "report", run.name)
    assert said == f"{run.name}/{name}: has 1,099,511,627,776 bytes; at most {most} are read of such a file"


def test_a_strangers_recipe_of_aliases_is_refused(runs: Runs, copied: Copied) -> None:
    run = copied(runs.stopped)
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(20)
    )
    (run / "recipe.yaml").write_text(bomb)
    said = refused(run.parent, "report", run.name)
    assert said.startswith(f"{run.name}/recipe.yaml: is more than a billion values with its aliases (*name) written")


FILES = {"profile": profile("x"), "tune": tune(), "verify": verdict("x")}
KINDS = {"profile": "profile", "tune": "tune", "verify": "verdict"}


@pytest.mark.parametrize(("asked", "given"), [(a, b) for a in FILES for b in FILES if a != b])
def test_a_file_of_another_kind_is_told_so(runs: Runs, tmp_path: Path, asked: str, given: str) -> None:
    (tmp_path / "file.json").write_text(json.dumps(FILES[given]))
    said = refused(tmp_path, "report", str(runs.images), f"--{asked}", "file.json")
    what = f"it is what `sameday {given} --json` writes"
    assert said == f"file.json: is no {KINDS[asked]} of this program: {what}"


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), float("-inf"), 10**400, 1e308], ids=lambda bad: str(bad)[:8]
)
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("profile", "seconds.median"),
        ("profile", "phases.wait"),
        ("profile", "floor.seconds"),
        ("profile", "floor.one_at_a_time.seconds"),
        ("tune", "plain.seconds.median"),
        ("tune", "best.finish_hours.0"),
        ("tune", "ablation.0.alone.memory_gib"),
        ("verify", "largest.loss"),
        ("verify", "steps"),
    ],
)
def test_a_number_that_is_none_is_named(runs: Runs, tmp_path: Path, name: str, where: str, bad: float) -> None:
    data = json.loads(json.dumps(FILES[name]))
    *path, last = [int(each) if each.isdigit() else each for each in where.split(".")]
    at = data
    for each in path:
        at = at[each]
    at[last] = bad
    (tmp_path / "file.json").write_text(json.dumps(data))
    said = refused(tmp_path, "report", str(runs.images), f"--{name}", "file.json")
    assert said.startswith(f"file.json: is no {KINDS[name]} of this program: {where}: ")


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
