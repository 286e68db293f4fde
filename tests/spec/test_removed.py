"""Plan fields that are gone: read where an earlier release recorded them, refused where somebody asks for them."""

import json
from pathlib import Path

import pytest
import reported

from sameday.record.folder import RunFolder
from sameday.report.beside import Profile, Tune, read_beside
from sameday.report.gather import gather
from sameday.spec.document import dump_yaml
from sameday.spec.errors import BadInput
from sameday.spec.load import load_plan
from sameday.spec.plan import Plan
from sameday.spec.removed import REMOVED, without_removed
from sameday.spec.vqa import VqaRecipe

OLD = {
    **{"rotary": "cached", "channels_last": True, "cudnn_benchmark": True, "compile_backend": "eager"},
    "keep_workers": True,
}
RECIPE = VqaRecipe.model_validate({"model": "tiny", "data": {"train": "train.jsonl"}})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """As an earlier release left it."""
    folder = RunFolder.open(tmp_path / "run", RECIPE, Plan(workers=3), tmp_path)
    folder.append({"step": 1, "loss": 1.0})
    folder.write_json("choices.json", {"rotary": "angles are the same at every use", "workers": "four cores"})
    folder.close()
    with (folder.path / "plan.yaml").open("a") as file:
        file.writelines(f"{name}: {json.dumps(value)}\n" for name, value in OLD.items())
    environment = json.loads((folder.path / "environment.json").read_text())
    environment["history"][0]["plan"] |= OLD
    (folder.path / "environment.json").write_text(json.dumps(environment))
    return folder.path


def test_what_is_gone_is_no_field() -> None:
    assert OLD.keys() == REMOVED.keys() and not REMOVED.keys() & Plan.model_fields.keys()
    assert without_removed({"workers": 2} | OLD) == {"workers": 2}


@pytest.mark.parametrize("name", REMOVED)
def test_asking_for_it_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = f"{name} was removed, since steps were 0.95 to 1.03 times as fast with it: leave it out"
    Path("plan.yaml").write_text(f"workers: 2\n{name}: true\n")
    with pytest.raises(BadInput) as error:
        load_plan(Path("plan.yaml"))
    assert str(error.value) == f"plan.yaml:2: {said}"
    with pytest.raises(BadInput) as error:
        load_plan(None, [f"plan.{name}=1"], RECIPE)
    assert str(error.value) == f"--set plan.{name}=1: {said}"


def test_a_run_folder_that_has_it_is_read_and_gone_on_with(run: Path) -> None:
    assert RunFolder.read(run).plan == Plan(workers=3)
    again = RunFolder.open(run, RECIPE, Plan(), run.parent)
    again.close()
    assert again.resumed and RunFolder.read(run).plan == Plan()
    with (run / "plan.yaml").open("a") as file:
        file.write("no_such_field: 1\n")
    with pytest.raises(BadInput, match=r"plan\.yaml:\d+: no_such_field is not a key here"):
        RunFolder.read(run)


def test_a_report_does_not_show_it(run: Path) -> None:
    plan = Plan(workers=3).model_dump(mode="json") | OLD
    (run / "profile.json").write_text(json.dumps(reported.profile(RECIPE.fingerprint) | {"plan": plan}))
    tuned = reported.tune()
    tuned["best"] |= {"plan": plan}
    (run / "tune.json").write_text(json.dumps(tuned))
    (shown,) = gather([run])
    assert shown.plan_text == dump_yaml(Plan(workers=3)) and shown.choices == {"workers": "four cores"}
    assert shown.own_profile is not None
    for kind, name in ((Profile, "profile"), (Tune, "tune")):
        told = read_beside(run / f"{name}.json", kind)
        recorded = told.plan if isinstance(told, Profile) else told.best.plan
        assert recorded.keys() == Plan.model_fields.keys()
