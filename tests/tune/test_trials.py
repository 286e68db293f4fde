"""Plans timed in fresh processes: what fails is a result, what takes too long ends, and the minutes are kept."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sets
import torch
import worlds

from sameday.spec.document import dump_yaml
from sameday.spec.errors import BadInput
from sameday.spec.load import load_plan
from sameday.spec.plan import Plan
from sameday.tasks.classify.setup import ClassifySetup
from sameday.tasks.registry import setup_of
from sameday.tasks.setup import LOADED
from sameday.tune import command
from sameday.tune.command import Trials, _loaded_alike, tune
from sameday.tune.search import OutOfTime
from sameday.tune.trial import FIRST, NO_MEMORY, Job, Result, logged, run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = sets.write_set(tmp_path_factory.mktemp("set"), train=80)
    splits = ClassifySetup(sets.tiny_recipe(), home).audit(print).splits
    (home / "data.pickle").write_bytes(pickle.dumps(splits))
    (home / "recipe.yaml").write_text(dump_yaml(sets.tiny_recipe()))
    return home


def make_job(home: Path, plan: Plan, seconds: float = 60.0) -> Job:
    return Job(sets.tiny_recipe(), plan, home, home / "data.pickle", seconds, least=2, most=4)


def test_a_trial_times_the_same_steps_under_every_plan(home: Path, tmp_path: Path) -> None:
    for plan, pieces in ((Plan(), 1.0), (Plan(micro_batch=3), 3.0), (Plan(workers=1, micro_batch=4), 2.0)):
        job = make_job(home, plan)
        job.write(tmp_path / "job.json")
        assert Job.read(tmp_path / "job.json") == job
        found = run(job)
        assert list(found.seconds) == list(range(FIRST, FIRST + 4)) and min(found.seconds.values()) > 0
        assert found.pieces == pieces and found.failed is None
        assert found.whole == sets.tiny_recipe().num_epochs * -(-70 // sets.tiny_recipe().effective_batch)
        assert found.loading > 0 and found.warming > 0
    assert len(run(make_job(home, Plan(), seconds=0.0)).seconds) == 2, "as few as are asked for at least"


@pytest.mark.parametrize("task", ["classify", pytest.param("vqa", marks=pytest.mark.soak)])
def test_a_trial_loads_nothing_that_could_be_loaded_once_for_all(
    home: Path, tmp_path: Path, tiny_qwen3: Path, task: str
) -> None:
    """In a process that has what trials are forked with."""
    recipe: Any = sets.tiny_recipe()
    if task == "vqa":
        home = worlds.write_world(tmp_path, seed=5, counts=(4, 4, 4), hard=False)
        recipe = worlds.tiny_recipe(tiny_qwen3, effective_batch=4)
        (home / "data.pickle").write_bytes(pickle.dumps(setup_of(recipe, home).audit(print).splits))
    Job(recipe, Plan(device="cpu"), home, home / "data.pickle", 0.0, least=1, most=1).write(tmp_path / "job.json")
    modules = [*LOADED, *setup_of(recipe, home).modules]
    code = (
        f"import importlib, sys\nfrom pathlib import Path\nfor name in {modules!r}: importlib.import_module(name)\n"
        "from sameday.tune.trial import Job, run\nbefore = set(sys.modules)\n"
        f"assert not run(Job.read(Path({str(tmp_path / 'job.json')!r}))).failed\n"
        "large = ('torch', 'sympy', 'transformers')\n"
        "print(sum(name.startswith(large) for name in set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 100, "a compiler alone is some 800"


def trials(home: Path, folder: Path, seconds: float, said: list[str]) -> Trials:
    return Trials(sets.tiny_recipe(), home, home / "data.pickle", folder, seconds, said.append)


def test_minutes_are_those_of_the_command(home: Path, tmp_path: Path) -> None:
    """It looked as if tune had ended before its time: what came before trials was not among them."""
    said: list[str] = []
    measure = replace(trials(home, tmp_path, 1200, said), gone=600.0)
    assert 590 < measure.left < 600
    assert not measure.measure(Plan()).failed
    assert 10 <= float(said[-1].split()[0]) < 15 and said[-1].split()[1] == "min"


def test_a_plan_that_cannot_run_is_a_result(home: Path, tmp_path: Path) -> None:
    said: list[str] = []
    measure = trials(home, tmp_path, 600, said)
    assert not measure.measure(Plan()).failed
    found = measure.measure(Plan(cuda_graphs=True, device="cpu"))
    assert found.failed is not None and "needs a GPU" in found.failed
    assert "plain" in said[0] and "cuda_graphs true" in said[1] and measure.start > 0
    went = re.fullmatch(
        r"one trial took ([\d.]+) s: ([\d.]+) to load the model, ([\d.]+) for first steps, which may compile, "
        r"([\d.]+) for the steps that are timed, ([\d.]+) to begin and to end",
        measure.where_it_went(),
    )
    assert went is not None
    whole, *parts = map(float, went.groups())
    assert whole == pytest.approx(sum(parts), abs=0.3) and min(parts) >= 0


def test_threads_are_followed_by_a_process_that_is_forked(home: Path) -> None:
    """Others than threads are read while libraries are loaded, so that such a process begins from nothing."""
    one, other = {"OMP_NUM_THREADS": "1"}, {"MALLOC_ARENA_MAX": "2"}
    alike = [({}, {}), (other, other), (one, {}), (one, one), (one | other, other), (one, {"OMP_NUM_THREADS": "2"})]
    assert all(_loaded_alike(*each) for each in alike)
    unlike: list[tuple[dict[str, str], dict[str, str]]] = [(other, {}), ({}, one), (one, other)]
    assert not any(_loaded_alike(*each) for each in [*unlike, ({"OMP_NUM_THREADS": "2,1"}, {})])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run(make_job(home, Plan(environment={"OMP_NUM_THREADS": "1"})))
        assert torch.get_num_threads() == 1
        run(make_job(home, Plan(environment={"OMP_NUM_THREADS": "2,1"})))
        assert torch.get_num_threads() == 1, "more than a number is for the library itself"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("minutes", "left"), [(10, 9.5), (2, 2)])
def test_the_minutes_are_for_the_search(home: Path, tmp_path: Path, minutes: int, left: float) -> None:
    """Half a minute to verify: of ten it is kept back, and given back where nothing is to be verified; with two it
    comes after them, which is said."""
    said: list[str] = []
    measure = trials(home, tmp_path, 60 * minutes, said)
    measure.reserve(30.0)
    assert measure.seconds == 60 * left
    told = ["verify of what is found comes after these minutes and may take 0.5 more"]
    assert said == ([] if minutes == 10 else told)
    measure.release()
    measure.release()
    assert measure.seconds == 60 * minutes


def test_another_plan_is_begun_however_long_the_plain_one_took(home: Path, tmp_path: Path) -> None:
    measure = trials(home, tmp_path, 600, [])
    measure.plain, measure.count, measure.took = Result({4: 40.0}), 1, [160.0]
    measure.seconds = measure.spent + 100
    assert not measure.measure(Plan()).failed
    measure.took, measure.seconds = [160.0], measure.spent + 4
    with pytest.raises(OutOfTime):
        measure.measure(Plan())


def test_a_trial_whose_folder_is_gone_says_nothing(tmp_path: Path) -> None:
    """Where tune was told to end while the process began."""
    files = [str(tmp_path / "gone" / name) for name in ("job.json", "result.json", "log")]
    logged(files, {})
    assert not (tmp_path / "gone").exists()


def test_trials_end_with_the_time(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = trials(home, tmp_path, 600, [])
    monkeypatch.setattr(command, "SHORTEST", 1.0)
    measure.recipe = sets.tiny_recipe(effective_batch=80, model=sets.TINY | {"levels": 400})
    measure.plain, measure.count, measure.took = Result({4: 1.0}), 3, [60.0, 0.3, 0.5]
    measure.seconds = measure.spent + 0.3
    with pytest.raises(OutOfTime):
        measure.measure(Plan())
    assert not (tmp_path / "004").exists(), "there was no time to begin"
    measure.seconds = measure.spent + 1  # longer than the shortest trial after the first
    began = time.monotonic()
    with pytest.raises(OutOfTime):  # begun, and not done: a second is not enough to load torch and train
        measure.measure(Plan())
    assert (tmp_path / "004").exists() and time.monotonic() - began < 60


def test_the_plain_plan_must_run(home: Path, tmp_path: Path) -> None:
    measure = trials(home, tmp_path, 600, [])
    measure.data = tmp_path / "nothing"
    with pytest.raises(BadInput, match=r"the plain plan cannot be timed: exit code 1: .*nothing"):
        measure.measure(Plan())
    assert not measure.forks, "it was tried from nothing too"


def test_processes_that_cannot_be_forked_begin_from_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoSocket:
        def __init__(self, **_: object) -> None:
            pass

        def start(self) -> None:
            raise OSError("AF_UNIX path too long")

    monkeypatch.setattr(command._forked, "Process", NoSocket)
    measure = trials(home, tmp_path, 600, [])
    assert not measure.measure(Plan()).failed and not measure.forks


@pytest.mark.parametrize("task", ["classify", "vqa"])
def test_a_plain_plan_without_room(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_qwen3: Path, task: str
) -> None:
    """Layers are computed twice then, where there are such; images come in smaller micro-batches."""

    def no_room(_: Trials, __: Path, plan: Plan) -> Result:
        enough = plan.checkpointing == "full" or plan.micro_batch == 1
        return Result(dict.fromkeys(range(4, 9), 0.1)) if enough else Result({}, failed=NO_MEMORY)

    monkeypatch.setattr(command.Trials, "_run", no_room)
    if task == "classify":
        folder = home
    else:
        folder = worlds.write_world(tmp_path / "world", seed=5, counts=(4, 4), hard=False)
        (folder / "recipe.yaml").write_text(dump_yaml(worlds.tiny_recipe(tiny_qwen3, effective_batch=4)))
    said: list[str] = []
    code = tune(folder / "recipe.yaml", tmp_path / "plan.yaml", [], 0.3, None, said.append, check=False)
    plan = load_plan(tmp_path / "plan.yaml")
    assert code == 0 and (plan.checkpointing, plan.micro_batch) == (
        ("none", 1) if task == "classify" else ("full", None)
    )
    assert [NO_MEMORY in line for line in said if " min " in line][:2] == [True, False]


@pytest.mark.parametrize("task", ["classify", "vqa"])
def test_no_plan_has_room(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_qwen3: Path, task: str
) -> None:
    monkeypatch.setattr(command.Trials, "_run", lambda *_: Result({}, failed=NO_MEMORY))
    folder = home
    if task == "vqa":
        folder = worlds.write_world(tmp_path / "world", seed=5, counts=(4, 4), hard=False)
        (folder / "recipe.yaml").write_text(dump_yaml(worlds.tiny_recipe(tiny_qwen3, effective_batch=4)))
    with pytest.raises(BadInput, match=r"^tune: out of memory under the plain plan, and with less memory too$"):
        tune(folder / "recipe.yaml", tmp_path / "plan.yaml", [], 0.5, None, print, check=False)
    least = ["plan.checkpointing=full" if task == "vqa" else "plan.micro_batch=1"]
    least += ["plan.embeddings_on=host"] if task == "vqa" and torch.cuda.is_available() else []
    with pytest.raises(BadInput, match=r"^tune: out of memory under the plain plan$"):
        tune(folder / "recipe.yaml", tmp_path / "plan.yaml", least, 0.5, None, print, check=False)
    assert not (tmp_path / "plan.yaml").exists()


def test_whole(home: Path, tmp_path: Path) -> None:
    """In some seconds, with one field held fast."""
    said: list[str] = []
    began = time.monotonic()
    code = tune(
        home / "recipe.yaml",
        tmp_path / "plan.yaml",
        ["plan.images_on=device", "plan.environment={OMP_NUM_THREADS: '1'}"],
        0.6,
        tmp_path / "tune.json",
        said.append,
        check=False,
    )
    assert code == 0 and time.monotonic() - began < 90
    plan, table = load_plan(tmp_path / "plan.yaml"), json.loads((tmp_path / "tune.json").read_text())
    assert plan.images_on == "device" and plan.model_dump(mode="json") == table["best"]["plan"]
    assert table["best"]["seconds"]["median"] <= 1.05 * table["plain"]["seconds"]["median"]
    assert all(row["field"] != "images_on" for row in table["ablation"])
    assert table["steps"] == 18 and table["best"]["finish_hours"][0] >= 0
    assert sum("×" in line for line in said) >= 2
