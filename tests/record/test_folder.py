"""The run folder survives kills, keeps other recipes and processes out, and remembers how it was run."""

import json
import math
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sameday.record.folder import RunFolder, default_path, plain, read_metrics, run_files
from sameday.record.metrics import sound_metrics
from sameday.spec.errors import BadInput
from sameday.spec.load import load_plan
from sameday.spec.plan import Plan
from sameday.spec.vqa import VqaRecipe
from sameday.spec.writing import write_text


def installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def a_recipe(**values: Any) -> VqaRecipe:
    return VqaRecipe.model_validate({"model": "tiny", "data": {"train": "train.jsonl"}, **values})


def started(path: Path, plan: Plan | None = None, **values: Any) -> RunFolder:
    return RunFolder.open(path, a_recipe(**values), plan or Plan(), path.parent)


def test_a_new_run_writes_what_was_asked_for(tmp_path: Path) -> None:
    run = started(tmp_path / "a" / "run", name="first")
    environment = json.loads((run.path / "environment.json").read_text())
    assert not run.resumed
    assert environment["recipe_dir"] == str(tmp_path / "a")
    assert environment["python"] == sys.version.split()[0]
    assert {"torch", "transformers", "peft"} <= environment["versions"].keys()
    assert "sameday" in environment["versions"] or not installed("sameday"), "it may be run from its source"
    assert {"started", "hostname", "platform", "command", "sameday"} <= environment.keys()
    run.close()
    assert not list(run.path.glob("*.tmp")) and not list(run.path.glob(".*.tmp"))
    again = RunFolder.read(run.path)
    assert (again.recipe, again.plan, again.recipe_dir) == (run.recipe, Plan(), tmp_path / "a")
    assert again.metrics == []
    assert (run.checkpoints, run.result) == (run.path / "checkpoints", run.path / "adapter")


def test_default_path_is_found_again() -> None:
    recipe = a_recipe(name="kvasir")
    assert default_path(recipe) == Path(f"runs/kvasir-{recipe.fingerprint}")


def test_a_resume_keeps_every_plan(tmp_path: Path) -> None:
    started(tmp_path / "run").close()
    other = Plan.model_validate({"workers": 4})
    run = started(tmp_path / "run", other, name="renamed")
    run.close()
    environment = json.loads((run.path / "environment.json").read_text())
    assert run.resumed
    assert load_plan(run.path / "plan.yaml") == other
    assert [start["plan"]["workers"] for start in environment["history"]] == [0, 4]
    assert all(start["time"] and "command" in start for start in environment["history"])
    assert environment["started"] == environment["history"][0]["time"]


def test_another_recipe_is_kept_out(tmp_path: Path) -> None:
    first = started(tmp_path / "run", lora={"r": 4})
    first.append({"step": 1})
    first.close()
    with pytest.raises(BadInput) as error:
        started(tmp_path / "run", lora={"r": 8}, seed=3)
    text = str(error.value)
    assert text.startswith(f"{tmp_path / 'run'}: holds a run of another recipe (")
    assert "  lora.r: 4 there, 8 here\n" in text and "  seed: 0 there, 3 here\n" in text
    assert text.endswith("Choose another --out.")
    started(tmp_path / "run", lora={"r": 4}).close()  # the refused one holds no lock


def test_a_folder_in_which_nothing_was_trained_is_free(tmp_path: Path) -> None:
    """Its run ended in an error before the first step; the mended recipe may have the name."""
    started(tmp_path / "run", lora={"r": 4}).close()
    run = started(tmp_path / "run", lora={"r": 8})
    run.close()
    assert not run.resumed and RunFolder.read(tmp_path / "run").recipe.lora.r == 8


def test_a_folder_of_something_else_is_not_taken(tmp_path: Path) -> None:
    """Such as the base model's own."""
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "model.safetensors"):
        (base / name).write_text("{}")
    with pytest.raises(BadInput) as error:
        started(base)
    assert str(error.value) == (
        f"{base}: is no run's folder and is not empty: it holds config.json, model.safetensors; allowed: a folder that "
        f"is empty, new, or a run's, such as {base / 'run'}"
    )
    assert sorted(path.name for path in base.iterdir()) == ["config.json", "model.safetensors"]
    started(base / "run").close()


def test_what_a_start_may_find_in_its_folder(tmp_path: Path) -> None:
    """Nothing; what a killed start left; the file that its own output goes to."""
    for number, names in enumerate(([], [".lock", ".environment.json.tmp"], ["stopped.json"], ["train.log", "1.out"])):
        path = tmp_path / f"{number}"
        path.mkdir()
        for name in names:
            (path / name).write_text("")
        started(path).close()
        assert (path / "recipe.yaml").exists()


HOLDER = """
import sys, time
from pathlib import Path
from sameday.spec.plan import Plan
from sameday.spec.vqa import VqaRecipe
from sameday.record.folder import RunFolder
import os
recipe = VqaRecipe.model_validate({"model": "tiny", "data": {"train": "train.jsonl"}})
run = RunFolder.open(Path(sys.argv[1]), recipe, Plan(), Path("."))
child = os.fork()
print(child if child else "", flush=True)
time.sleep(60)
"""


def test_a_second_process_is_kept_out_until_the_first_dies(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    lines = {holder.stdout.readline().strip(), holder.stdout.readline().strip()}
    worker = int(max(lines))
    try:
        with pytest.raises(BadInput, match=f"run: in use by process {holder.pid} on .*choose another --out"):
            started(tmp_path / "run")
        holder.kill()
        holder.wait()
        # A forked worker that outlives its run does not hold the folder.
        os.kill(worker, 0)
        assert started(tmp_path / "run").resumed
    finally:
        os.kill(worker, signal.SIGKILL)
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_one_process_cannot_open_a_run_twice(tmp_path: Path) -> None:
    run = started(tmp_path / "run")
    with pytest.raises(BadInput, match=f"in use by process {os.getpid()}"):
        started(tmp_path / "run")
    run.close()
    run.close()
    started(tmp_path / "run").close()


def test_metrics_are_valid_json_whatever_is_measured(tmp_path: Path) -> None:
    class Scalar:
        def item(self) -> float:
            return math.inf

    run = started(tmp_path / "run")
    run.append({"step": 1, "loss": math.nan, "all": [1.0, -math.inf, (2,)], "scalar": Scalar(), "at": Path("x")})
    text = run.metrics_path.read_text()
    assert text.endswith("\n")
    assert json.loads(text, parse_constant=pytest.fail) == {
        **{"step": 1, "loss": None, "all": [1.0, None, [2]], "scalar": None, "at": "x"},
    }


def test_rewind_forgets_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    run = started(tmp_path / "run")
    run.append({"step": 0, "split": "val", "loss": None})
    for step in range(1, 6):
        run.append({"step": step})
    with open(run.metrics_path, "a") as file:
        file.write('{"step": 6, "lo')
    assert [record.get("step") for record in read_metrics(run.metrics_path)] == [0, 1, 2, 3, 4, 5]
    run.rewind(3)
    run.append({"step": 4, "again": 1})
    before = [{"step": 0, "split": "val", "loss": None}, *({"step": n} for n in (1, 2, 3))]
    assert run.metrics == [*before, {"step": 4, "again": 1}]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"step": "ten"}', "step is 'ten'; must be the number of a step"),
        ('{"step": null}', "step is None; must be the number of a step"),
        ('{"step": -1}', "step is -1; must be the number of a step"),
        ('{"loss": 2.5}', "has no step"),
        ('{"step": 1, "loss": "\\u001b[31mRED\\u0007"}', r"loss is '\x1b[31mRED\x07'; must be a number, or null"),
        ('{"step": 1, "seconds": NaN}', "seconds is nan; must be a number, or null"),
        ('{"step": 1, "split": 3}', "split is 3; must be the name of a split"),
        ("\x1b[31m", r"is not a JSON object: \x1b[31m"),
        ("nonsense", "is not a JSON object: nonsense"),
        ("[" * 100_000, "is not a JSON object: " + "[" * 60),
    ],
)
def test_a_line_that_is_no_record_is_moved_aside(tmp_path: Path, line: str, why: str) -> None:
    run = started(tmp_path / "run")
    text = f'{{"step": 1}}\n{line}\n{{"step": 2}}\n{{"step": 3}}\n'
    run.metrics_path.write_text(text)
    run.close()
    run, said = started(tmp_path / "run"), list[str]()
    run.rewind(2, said.append)
    assert said == [f"{run.metrics_path}:2: {why}; left out, the file as it was is metrics-damaged.jsonl"]
    assert run.metrics == [{"step": 1}, {"step": 2}]
    assert (run.path / "metrics-damaged.jsonl").read_text() == text
    run.close()


def test_of_many_lines_that_are_no_records_the_first_few_are_named(tmp_path: Path) -> None:
    run, said = started(tmp_path / "run"), list[str]()
    run.metrics_path.write_text("".join(f'{{"step": "{n}"}}\n' for n in range(1200)))
    run.rewind(2, said.append)
    kept = "left out, the file as it was is metrics-damaged.jsonl"
    assert [line.split(": ")[0] for line in said[:-1]] == [f"{run.metrics_path}:{n}" for n in (1, 2, 3, 4, 5)]
    assert said[-1] == f"and 1,195 more such lines in {run.metrics_path}; {kept}"


def test_a_whole_last_line_is_judged_without_its_newline_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": "two"}')
    assert sound_metrics(path) == ([{"step": 1}], [f"{path}:2: step is 'two'; must be the number of a step"])
    path.write_text('{"step": 1}\n{"step": "tw')  # a kill's
    assert sound_metrics(path) == ([{"step": 1}], [])


def test_append_never_goes_on_a_torn_line(tmp_path: Path) -> None:
    run = started(tmp_path / "run")
    run.metrics_path.write_text('{"step": 1}\n{"ste')
    run.append({"step": 2})
    assert run.metrics == [{"step": 1}, {"step": 2}]
    run.metrics_path.write_text('{"step": 1}\n{"step": 2}')
    assert RunFolder.read(run.path).metrics == [{"step": 1}, {"step": 2}]


@settings(deadline=None, max_examples=40)
@given(steps=st.lists(st.integers(0, 20), max_size=15), to=st.integers(0, 20), cut=st.integers(0, 8))
def test_rewind_keeps_exactly_the_steps_up_to_it(tmp_path_factory: Any, steps: list[int], to: int, cut: int) -> None:
    run = RunFolder(tmp_path_factory.mktemp("run"), a_recipe(), Plan(), Path("."))
    for step in steps:
        run.append({"step": step})
    run.close()
    whole = steps
    if cut and steps:
        run.metrics_path.write_bytes(run.metrics_path.read_bytes()[:-cut])
        whole = steps if cut == 1 else steps[:-1]  # only the newline is gone
    run.rewind(to)
    assert [record["step"] for record in run.metrics] == [step for step in whole if step <= to]


def test_a_bad_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(BadInput, match=r"metrics\.jsonl:2: is not a JSON object: nonsense"):
        read_metrics(tmp_path / "metrics.jsonl")
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_write_json_and_text_replace_whole_files(tmp_path: Path) -> None:
    run = started(tmp_path / "run")
    assert run.write_json("eval/test.json", {"accuracy": math.nan}).read_text() == '{\n  "accuracy": null\n}\n'
    write_text(tmp_path / "x", "old")
    with pytest.raises(TypeError):
        write_text(tmp_path / "x", b"new")  # type: ignore[arg-type]
    assert (tmp_path / "x").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "x"]
    assert plain({1: True, "n": None}) == {"1": True, "n": None}


def test_the_files_of_a_run(tmp_path: Path) -> None:
    run = started(tmp_path / "run")
    run.append({"step": 1})
    run.stopped("asked", 75)
    run.write_json("eval.json", {})
    run.write_json("eval-test.json", {})
    run.close()
    there = {path for path in run.path.iterdir() if path.name != ".lock"}
    assert there == {path for path in run_files(run.path) if path.exists()}
    assert run_files(tmp_path / "none") == run_files(run.path / "plan.yaml") == []


def test_what_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"is not a run folder: it has no recipe\.yaml"):
        RunFolder.read(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be a run folder: File exists"):
        started(tmp_path / "file")
    run = started(tmp_path / "run")
    run.close()
    (run.path / "environment.json").write_text("[]")
    for again in (lambda: RunFolder.read(run.path), lambda: started(run.path)):
        with pytest.raises(BadInput, match=r"environment\.json: is not what a run wrote"):
            again()
