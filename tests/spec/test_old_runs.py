"""Runs that an earlier release began are gone on with: two of them are kept here, each stopped at step 3."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from typed import sameday

from sameday.record import checkpoint
from sameday.record.folder import RunFolder, read_metrics
from sameday.spec.identity import as_before
from sameday.spec.load import load_recipe
from sameday.spec.recipe import differences
from sameday.spec.removed import REMOVED

FIXTURES = Path(__file__).parents[1] / "fixtures" / "old_runs"


@dataclass(frozen=True)
class Old:
    """`home` holds the recipe, its data and `run`, which has `steps` steps in all."""

    home: Path
    run: Path
    steps: int
    split: str
    fingerprint: str
    """That the last release without `later` fields gave the recipe."""
    later: tuple[str, ...] = ()
    """Fields that came later, in which the recipe file means something else now."""


KEPT = {
    "questions": (6, "val", "1c0e90448f06"),
    "images": (4, "test", "79b9148f6bff", ("model.start: 'fan_in' there, 'xavier' here",)),
}


@pytest.fixture(params=KEPT)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Old:
    kind = request.param
    home = tmp_path / "home"
    shutil.copytree(FIXTURES / kind, home)
    (run,) = (home / "runs").iterdir()
    environment = json.loads((run / "environment.json").read_text())
    environment["recipe_dir"] = str(home)
    (run / "environment.json").write_text(json.dumps(environment))
    return Old(home, run, *KEPT[kind])


def test_they_are_what_an_earlier_release_wrote(old: Old) -> None:
    recipe = load_recipe(old.home / "recipe.yaml")
    assert old.run.name != f"{recipe.name}-{recipe.fingerprint}"
    assert all(f"\n{name}: " in (old.run / "plan.yaml").read_text() for name in REMOVED)
    assert checkpoint.fault(old.run / "checkpoints" / "step-000003") is None
    there = RunFolder.read(old.run).recipe
    assert there == as_before(recipe) and there.fingerprint == old.fingerprint
    assert differences(there, recipe) == list(old.later)


@pytest.mark.parametrize("named", [False, True], ids=["by recipe", "by --out"])
def test_the_same_command_goes_on(old: Old, named: bool, own_signals: None) -> None:
    before = read_metrics(old.run / "metrics.jsonl")
    said = sameday(old.home, "train", "recipe.yaml", *(("--out", str(old.run)) if named else ()))
    assert said.code == 0, said.err
    assert "resumed from step-000003" in said.out and f"old {old.fingerprint} in " in said.out
    for line in old.later:
        assert (
            f"recipe.{line}: an earlier release began this run, and it goes on as it began; to begin anew, " in said.out
        )
    assert list((old.home / "runs").iterdir()) == [old.run], "no second folder"
    records = read_metrics(old.run / "metrics.jsonl")
    assert records[: len(before)] == before
    assert [record["step"] for record in records if "split" not in record] == [*range(1, old.steps + 1)]
    assert RunFolder.read(old.run).result.is_dir() and not (old.run / "stopped.json").exists()
    history = json.loads((old.run / "environment.json").read_text())["history"]
    assert len(history) == 2 and history[0]["command"] == "sameday train recipe.yaml --stop-after 3"

    scored = sameday(old.home, "eval", str(old.run), "--split", old.split)
    assert scored.code == 0 and (old.run / f"eval-{old.split}.json").is_file(), scored.err
    shown = sameday(old.home, "report", str(old.run), "-o", "page.html")
    assert shown.code == 0 and "finished" in (old.home / "page.html").read_text(), shown.err


def test_weights_go_on_from_the_start_that_they_had(tmp_path: Path, own_signals: None) -> None:
    """A run of an earlier release that was killed before its first checkpoint begins again, and as it began."""
    home = tmp_path / "home"
    shutil.copytree(FIXTURES / "images", home)
    (run,) = (home / "runs").iterdir()
    first = read_metrics(run / "metrics.jsonl")[0]
    shutil.rmtree(run / "checkpoints")
    environment = json.loads((run / "environment.json").read_text()) | {"recipe_dir": str(home)}
    (run / "environment.json").write_text(json.dumps(environment))
    said = sameday(home, "train", "recipe.yaml", "--stop-after", "1", "--set", "plan.device=cpu")
    assert said.code == 75, said.err
    assert read_metrics(run / "metrics.jsonl")[0]["loss"] == pytest.approx(first["loss"], rel=1e-4)
    named = sameday(home, "train", "recipe.yaml", "--stop-after", "1", "--set", "recipe.model.start=xavier")
    assert named.code == 75 and "an earlier release" not in named.out
    (new,) = (each for each in (home / "runs").iterdir() if each != run)
    assert read_metrics(new / "metrics.jsonl")[0]["loss"] != pytest.approx(first["loss"], rel=1e-3)
    refusal = sameday(home, "train", "recipe.yaml", "--out", str(run), "--set", "recipe.model.start=xavier")
    assert refusal.code == 2 and "model.start: 'fan_in' there, 'xavier' here" in refusal.err


def test_one_that_is_not_gone_on_with_is_reported(old: Old) -> None:
    shown = sameday(old.home, "report", str(old.run), "-o", "page.html")
    assert shown.code == 0, shown.err
    page = (old.home / "page.html").read_text()
    assert "unfinished: step 3" in page and "asked to stop" in page
    assert not [name for name in REMOVED if name in page]


def test_another_recipe_is_still_kept_out(old: Old) -> None:
    said = sameday(old.home, "train", "recipe.yaml", "--out", str(old.run), "--set", "recipe.seed=11")
    assert said.code == 2 and ": holds a run of another recipe (" in said.err and " there, 11 here" in said.err
