"""Suite files: what they say, and what is refused with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from sameday.spec.errors import BadInput
from sameday.spec.suite import Suite, load_suite, seconds_of
from sameday.suite.jobs import asked, command, request
from sameday.suite.state import SuiteFolder

TEXT = """
deadline: 6h
gpus: 4
plan: plan.yaml
set: [plan.workers=4]
slurm: {partition: gpu, time: 2h, environment: {A: b}}
jobs:
  features: {do: cache, recipe: exp.yaml, kind: features, gpus: 1}
  fastest: {do: tune, recipe: exp.yaml, minutes: 5}
  exp1: {do: train, recipe: exp.yaml, after: [features], plan: fastest, slurm: {time: 30m}}
  exp2: {do: train, recipe: exp.yaml, set: [recipe.seed=1], gpus: 2}
  exp1-test: {do: eval, of: exp1, split: test}
  zero: {do: eval, recipe: exp.yaml, base: true}
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name in ("exp.yaml", "plan.yaml"):
        (tmp_path / name).write_text("name: x\n")
    (tmp_path / "night.yaml").write_text(TEXT)
    return tmp_path


def test_a_suite_is_read_whole(home: Path) -> None:
    suite = load_suite(home / "night.yaml")
    assert (suite.name, suite.deadline, suite.gpus) == ("night", 6 * 3600, 4)
    assert suite.graph == {
        "features": [],
        "fastest": [],
        "exp1": ["fastest", "features"],
        "exp2": [],
        "exp1-test": ["exp1"],
        "zero": [],
    }
    order = suite.order()
    assert order.index("exp1-test") > order.index("exp1") > max(order.index("features"), order.index("fastest"))
    one, other = suite.slurm_of("exp1"), suite.slurm_of("exp2")
    assert (one.time, other.time, one.partition, one.environment) == (1800, 7200, "gpu", {"A": "b"})


def test_jobs_are_the_commands_that_a_user_would_type(home: Path) -> None:
    suite, folder = load_suite(home / "night.yaml"), SuiteFolder(home / "out")
    words = {
        name: " ".join(command(suite, Path("."), folder, name)).replace(str(home / "out"), "OUT") for name in suite.jobs
    }
    workers = "--set plan.workers=4"
    assert words == {
        "features": f"cache exp.yaml --kind features --plan plan.yaml {workers}",
        "fastest": f"tune exp.yaml --minutes 5 -o OUT/jobs/fastest/plan.yaml {workers}",
        "exp1": f"train exp.yaml --plan OUT/jobs/fastest/plan.yaml --out OUT/jobs/exp1/run {workers}",
        "exp2": f"train exp.yaml --plan plan.yaml --out OUT/jobs/exp2/run {workers} --set recipe.seed=1",
        "exp1-test": f"eval OUT/jobs/exp1/run --split test --plan plan.yaml --out OUT/jobs/exp1-test/run {workers}",
        "zero": f"eval exp.yaml --base --plan plan.yaml --out OUT/jobs/zero/run {workers}",
    }
    # Settings of the recipe reach an eval of a recipe, and not one of a job, which was trained by its own.
    wanted = ("plan.workers=4", "recipe.data.limit=9")
    jobs = {name: suite.jobs[name].model_copy(update={"cascade": name == "zero"}) for name in ("exp1-test", "zero")}
    other = suite.model_copy(update={"set": wanted, "jobs": suite.jobs | jobs})
    words = {name: " ".join(command(other, Path("."), folder, name)) for name in jobs}
    assert " --split test --no-cascade " in words["exp1-test"] and words["exp1-test"].endswith(f"run {workers}")
    assert " --base --cascade " in words["zero"] and words["zero"].endswith(f"{workers} --set recipe.data.limit=9")
    assert request(other, home, "zero")["set"] == ["recipe.data.limit=9"] and "set" not in request(suite, home, "zero")


def test_a_changed_recipe_is_another_job(home: Path) -> None:
    suite = load_suite(home / "night.yaml")
    before = {name: asked(suite, home, name) for name in suite.jobs}
    (home / "exp.yaml").write_text("name: y\n")
    after = {name: asked(suite, home, name) for name in suite.jobs}
    assert {name for name in suite.jobs if before[name] != after[name]} == set(suite.jobs) - {"exp1-test"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("jobs: {}", "jobs"),
        ("jobs: {a: {do: train}}", "a train job has a recipe"),
        ("jobs: {a: {do: eval}}", "an eval has `of`"),
        ("jobs: {a: {do: eval, of: b}}", "a waits for 'b', which is no job; there are a"),
        (
            "jobs: {a: {do: train, recipe: exp.yaml, after: [b]}, b: {do: train, recipe: exp.yaml, after: [a]}}",
            "jobs wait for each other: ",
        ),
        ("jobs: {a: {do: train, recipe: exp.yaml, split: test}}", "split belongs to eval jobs"),
        ("jobs: {../a: {do: train, recipe: exp.yaml}}", "bad.yaml:1: jobs has the name '../a'; allowed are up to 64"),
        ("jobs: {.a: {do: train, recipe: exp.yaml}}", "digits, _, . and -, the first a letter or digit"),
        ("jobs: {a: {do: train, recipe: .}}", "bad.yaml:1: recipe '.' of a is a folder; must be a file"),
        ("jobs: {a: {do: train, recipe: nothing.yaml}}", "bad.yaml:1: recipe 'nothing.yaml' of a is not there"),
        ("deadline: soon\njobs: {a: {do: train, recipe: exp.yaml}}", "bad.yaml:1: deadline is 'soon'"),
        ("jobs: {a: {do: dance, recipe: exp.yaml}}", "bad.yaml:1: jobs.a.do is 'dance'; must be "),
        ("jobs: {a: {do: train, recipe: exp.yaml, gpus: 2, gpu: 1}}", "gpu pins a job of one GPU"),
        (
            "name: ../x\njobs: {a: {do: train, recipe: exp.yaml}}",
            "name is '../x'; it names a folder in runs/, and has no /",
        ),
        ("jobs: {a: {do: train, recipe: exp.yaml, cascade: true}}", "cascade belongs to eval jobs"),
        ("jobs: {a: {do: tune, recipe: exp.yaml, plan: plan.yaml}}", "a tune job finds a plan, and takes none"),
        (
            "jobs: {a: {do: train, recipe: exp.yaml}, b: {do: eval, of: a, set: [recipe.seed=1]}}",
            "set has 'recipe.seed=1', and the recipe of an eval of a job is what that trained; only plan.KEY is set",
        ),
        (
            "jobs: {a: {do: cache, recipe: exp.yaml, kind: pixels, gpus: 0}, b: {do: eval, of: a}}",
            "b evaluates a, which trains nothing",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_place(home: Path, text: str, said: str) -> None:
    (home / "bad.yaml").write_text(text)
    with pytest.raises(BadInput) as error:
        load_suite(home / "bad.yaml")
    assert said in str(error.value)


def test_all_that_is_wrong_is_told_at_once(home: Path) -> None:
    (home / "bad.yaml").write_text(
        "deadline: soon\n"
        "jobs:\n"
        "  one: {do: train, recipe: exp.yaml, after: [two]}\n"
        "  two: {do: train, recipe: gone.yaml, after: [one]}\n"
        "  two-b: {do: eval, of: nobody}\n"
        '  "a\\nb": {do: [1], recipe: exp.yaml}\n'
    )
    with pytest.raises(BadInput) as error:
        load_suite(home / "bad.yaml")
    assert [line.removeprefix(f"{home}/bad.yaml:") for line in str(error.value).splitlines()] == [
        "1: deadline is 'soon'; must be a time above zero, such as 90m, 6h or 1d12h, or a number of seconds",
        "6: jobs.a\\nb.do is [1]; must be one of 'cache', 'train', 'eval', 'tune'",
        "5: jobs.two-b waits for 'nobody', which is no job; there are one, two, two-b",
        "2: jobs wait for each other: one -> two -> one",
        "4: recipe 'gone.yaml' of two is not there",
    ]


@pytest.mark.parametrize("name", ["es\x1b[31mcape.yaml", "two\nlines.yaml", "..yaml"])
def test_a_file_whose_name_is_no_folder(home: Path, name: str) -> None:
    """Which OUT would be called after."""
    (home / name).write_text(TEXT)
    with pytest.raises(BadInput, match=r"its own name cannot be that of a folder in runs/; give the suite a name"):
        load_suite(home / name)
    (home / name).write_text("name: night\n" + TEXT)
    assert load_suite(home / name).name == "night"


@pytest.mark.parametrize(("text", "seconds"), [("6h", 21600.0), ("1d12h", 129600.0), ("1.5 h", 5400.0), (7, 7)])
def test_durations(text: object, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["90", "h", "", "6 hours", "-1h", 0, True, None, float("nan"), "1e9h"])
def test_no_durations(text: object) -> None:
    with pytest.raises(ValueError, match="such as 90m, 6h or 1d12h"):
        seconds_of(text)


def test_states(tmp_path: Path) -> None:
    jobs = {"a": {"do": "train", "recipe": "x"}, "b": {"do": "eval", "of": "a"}, "c": {"do": "train", "recipe": "x"}}
    suite, folder = Suite.model_validate({"jobs": jobs}), SuiteFolder(tmp_path)
    assert {state.state for state in folder.states(suite).values()} == {"waiting"}
    folder.change("a", state="failed")
    seen = folder.states(suite)
    assert (seen["b"].state, seen["b"].why, seen["c"].state) == ("blocked", "a is failed", "waiting")
    (folder.job("a") / "state.json").write_text("{")
    assert folder.states(suite)["b"].state == "waiting"
    with folder.hold("a") as mine, folder.hold("a") as other:
        assert (mine, other, folder.held("a")) == (True, False, True)
    assert not folder.held("a")


def test_the_only_job_is_there_although_it_is_wrong(home: Path) -> None:
    (home / "night.yaml").write_text("jobs:\n  exp1: {recipe: exp.yaml}\n")
    with pytest.raises(BadInput) as caught:
        load_suite(home / "night.yaml")
    assert str(caught.value) == f"{home / 'night.yaml'}:2: jobs.exp1.do is missing"
    (home / "night.yaml").write_text("jobs: {}\n")
    with pytest.raises(BadInput, match=r":1: jobs is \{\}; must have at least 1 item, not 0$"):
        load_suite(home / "night.yaml")
