"""Finished runs side by side: what is equal, what is rounding, what is different, and where it begins."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))  # for commands, when this file runs alone

from processes import write_run
from typed import sameday

from sameday.record.folder import RunFolder, read_metrics
from sameday.record.manifest import MANIFEST, write_manifest
from sameday.spec.classify import ClassifyRecipe
from sameday.spec.document import dump_yaml
from sameday.spec.errors import BadInput
from sameday.spec.load import load_plan, load_recipe
from sameday.spec.plan import Plan
from sameday.verify.runs import ADVICE, RunsReport, compare_recipes, compare_runs

STEPS = 5
PLAIN = ("share_images=false", "packing=false", "max_questions=1", "label_only_logits=false", "optimizer_impl=loop")
SETS = ("plan.save_steps=2", "plan.save_total_limit=null", "plan.eval_steps=2", "plan.device=cpu")
RUNS = {
    "plain": tuple(f"plan.{field}" for field in PLAIN),
    "again": (*(f"plan.{field}" for field in PLAIN), "plan.workers=1"),
    "shared": ("plan.share_images=true", "plan.packing=true"),
    "seed1": ("recipe.seed=1",),
    "all": ("recipe.train=all", "recipe.lora={}", "recipe.learning_rate=1e-4"),
    "dropped": ("recipe.lora.dropout=0.05", *(f"plan.{field}" for field in PLAIN)),
    "dropped_packed": ("recipe.lora.dropout=0.05", "plan.share_images=false", "plan.packing=true"),
    "dropped_shared": ("recipe.lora.dropout=0.05", "plan.share_images=true", "plan.packing=true"),
}
ADAPTER = "adapter/adapter_model.safetensors"
TENSOR = "base_model.model.model.language_model.layers.1.self_attn.o_proj.lora_A.weight"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Path:
    """A run by each of RUNS. AdamW's eps is large, or it would make whole updates of rounded small gradients."""
    lora = {"r": 4, "alpha": 8, "target_modules": ["v_proj", "o_proj"]}
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder, tiny_qwen3, lora=lora, max_steps=STEPS, learning_rate=0.01, eps=0.1)
    for name, sets in RUNS.items():
        options = [part for field in (*SETS, *sets) for part in ("--set", field)]
        said = sameday(folder, "train", "recipe.yaml", "--out", name, *options)
        assert said.code == 0, said.err
    return folder


@pytest.fixture
def copy(home: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a run, to be changed. `fields` change its recipe."""

    def make(of: str, to: str = "copy", scores: dict[str, Any] | None = None, **fields: Any) -> Path:
        run = tmp_path / to
        shutil.copytree(home / of, run)
        recipe = load_recipe(run / "recipe.yaml")
        (run / "recipe.yaml").write_text(dump_yaml(recipe.model_validate(recipe.model_dump() | fields)))
        if scores is not None:
            (run / "eval.json").write_text(json.dumps({"val": {"samples": 9, **scores}}))
        return run

    return make


def text(report: RunsReport) -> str:
    """What is printed, which is always within its bounds; and JSON is JSON."""
    lines = report.lines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    json.dumps(report.as_json(), allow_nan=False)
    return "\n".join(lines)


def joined(report: RunsReport) -> str:
    """The text with its line breaks taken back."""
    return text(report).replace("\n    ", " ")


def kinds(report: RunsReport) -> dict[str, Any]:
    return {kind["name"]: kind for kind in report.as_json()["compared"]}


def change_record(run: Path, index: int, **values: Any) -> None:
    records = read_metrics(run / "metrics.jsonl")
    records[index].update(values)
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def index_of(run: Path, step: int, split: str | None = None) -> int:
    return next(
        i for i, r in enumerate(read_metrics(run / "metrics.jsonl")) if (r["step"], r.get("split")) == (step, split)
    )


def change_tensor(path: Path, change: Callable[[torch.Tensor], torch.Tensor], name: str = TENSOR) -> None:
    tensors = load_file(path)
    save_file({**tensors, name: change(tensors[name])}, path)
    list_anew(path.parent)


def list_anew(folder: Path) -> None:
    """The manifest, as if what lies there had been written so."""
    write_manifest(folder, [path for path in folder.iterdir() if path.name != MANIFEST])


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(BadInput) as error:
        call()
    return str(error.value)


# Two runs of one recipe


def test_the_same_to_the_bit(home: Path) -> None:
    report = compare_runs(home / "plain", home / "again")
    assert (report.verdict, report.exit_code) == ("bitwise", 0)
    said = text(report)
    assert said.startswith("the same to the bit")
    assert f"A: {home / 'plain'}\n" in said.replace("\n    ", "") and "  bitwise: workers 0 / 1" in said
    assert f"float32, seed 0, {STEPS} steps" in said and "1e-05" in said and "--against" not in said
    found = kinds(report)
    assert {k: v["count"] for k, v in found.items() if "weights" not in k} == {
        **dict.fromkeys(("training loss", "learning rate", "samples"), STEPS),
        **dict.fromkeys(("val loss", "val exact_match", "val samples"), 3),  # steps 2, 4 and the last
    }
    final = found["final weights"]["count"]
    assert final == len(load_file(home / "plain" / ADAPTER)) > 0
    assert found["weights at checkpoints"]["count"] == 3 * final
    assert all(kind["equal"] and kind["largest"] == 0 for kind in found.values())


def test_the_same_to_rounding(home: Path) -> None:
    report = compare_runs(home / "plain", home / "shared")
    assert (report.verdict, report.exit_code) == ("rounding", 0), text(report)
    assert text(report).startswith("the same to rounding")
    assert "  rounding: share_images False / True, packing False / True" in text(report)
    found = kinds(report)
    for name in ("training loss", "final weights", "weights at checkpoints"):
        assert not found[name]["equal"] and 0 < found[name]["largest"] <= 1e-5
    assert found["learning rate"]["equal"] and found["samples"]["equal"]


def test_weights_that_rounding_can_drive_apart_are_not_judged(home: Path, copy: Callable[..., Path]) -> None:
    """With a usual eps AdamW makes whole updates of rounded gradients: losses agree, and weights part."""
    run = copy("shared")
    change_tensor(run / ADAPTER, lambda tensor: tensor * 1.001)
    report = compare_runs(home / "plain", run)
    assert (report.verdict, report.exit_code) == ("undecided", 2), text(report)
    assert joined(report).startswith("not decided: losses agree, weights are further apart than the limit, as rounding")
    assert "`sameday verify RECIPE --plan A --against B` tells the two apart" in joined(report)
    found = kinds(report)
    assert found["training loss"]["beyond"] == 0 < found["final weights"]["beyond"]
    change_tensor(run / ADAPTER, lambda tensor: tensor * 1.1)
    assert compare_runs(home / "plain", run).verdict == "different", "further than rounding drives them"
    change_record(other := copy("shared", "other"), index_of(other, 2), samples=3)
    assert compare_runs(home / "plain", other).verdict == "different", "not of weights alone"


def test_a_changed_tensor_is_named(home: Path, copy: Callable[..., Path]) -> None:
    run = copy("plain")
    change_tensor(run / ADAPTER, lambda tensor: tensor * 1.001)
    report = compare_runs(home / "plain", run)
    assert (report.verdict, report.exit_code) == ("different", 1)
    said = joined(report)
    assert said.startswith("different: ")
    assert f"first tensor beyond its limit: final weights, step {STEPS}, {TENSOR}: 1.0e-03 apart" in said
    assert "first step beyond" not in said  # every loss is equal
    assert "rounding grows from step to step" in said and "`sameday verify RECIPE --plan A --against B`" in said
    final = kinds(report)["final weights"]
    assert final["beyond"] == 1 and final["largest"] == pytest.approx(1e-3, rel=0.01)
    assert final["largest_at"] == [STEPS, TENSOR]


def test_an_earlier_checkpoint_comes_first(home: Path, copy: Callable[..., Path]) -> None:
    run = copy("plain")
    change_tensor(run / ADAPTER, lambda tensor: tensor + 1)
    change_tensor(run / "checkpoints/step-000002/adapter_model.safetensors", lambda tensor: tensor * 1.001)
    report = compare_runs(home / "plain", run)
    assert f"first tensor beyond its limit: weights at checkpoints, step 2, {TENSOR}" in joined(report)
    shutil.rmtree(run / "checkpoints/step-000002")  # what only one run still has is not compared
    assert f"first tensor beyond its limit: final weights, step {STEPS}, {TENSOR}" in joined(
        compare_runs(home / "plain", run)
    )


def test_tensors_that_cannot_be_subtracted(home: Path, copy: Callable[..., Path]) -> None:
    run = copy("plain")
    change_tensor(run / ADAPTER, lambda tensor: tensor.bfloat16())
    shape = ", ".join(map(str, load_file(run / ADAPTER)[TENSOR].shape))
    said = joined(compare_runs(home / "plain", run))
    assert f"{TENSOR}: ('torch.float32', {shape}) in A, ('torch.bfloat16', {shape}) in B" in said
    save_file({k: v for k, v in load_file(run / ADAPTER).items() if k != TENSOR}, run / ADAPTER)
    list_anew(run / "adapter")
    said = joined(compare_runs(home / "plain", run))
    assert f"{TENSOR}: ('torch.float32', {shape}) in A, None in B" in said
    change_tensor(run / ADAPTER, lambda tensor: tensor * torch.nan, TENSOR.replace("_A", "_B"))
    assert compare_runs(home / "plain", run).verdict == "different"


def test_to_the_bit_means_bits(home: Path, copy: Callable[..., Path]) -> None:
    one, two = copy("plain", "one"), copy("plain", "two")
    change_tensor(one / ADAPTER, torch.zeros_like)
    change_tensor(two / ADAPTER, lambda tensor: -torch.zeros_like(tensor))
    assert compare_runs(one, two).verdict == "rounding"


def test_the_first_step_that_parts_is_named(home: Path, copy: Callable[..., Path]) -> None:
    run = copy("plain")
    loss = read_metrics(run / "metrics.jsonl")[index_of(run, 3)]["loss"]
    change_record(run, index_of(run, 3), loss=loss * (1 + 5e-6))
    assert compare_runs(home / "plain", run).verdict == "rounding"
    change_record(run, index_of(run, 3), loss=loss * 1.001)
    change_record(run, index_of(run, 4), loss=loss * 2)
    report = compare_runs(home / "plain", run)
    assert report.verdict == "different" and kinds(report)["training loss"]["largest_at"] == [4, ""]
    assert f"first step beyond its limit: training loss, step 3: {loss} in A, {loss * 1.001} in B" in joined(report)
    change_record(run, index_of(run, 2), samples=3)
    assert "first step beyond its limit: samples, step 2: 4 in A, 3 in B" in joined(compare_runs(home / "plain", run))
    change_record(run, index_of(run, 1), lr=0.010000000001)
    assert "learning rate, step 1: 0.01 in A, 0.010000000001 in B" in joined(compare_runs(home / "plain", run))


def test_a_damaged_record_is_a_difference(home: Path, copy: Callable[..., Path]) -> None:
    run = copy("plain")
    change_record(run, index_of(run, 3), loss=None)
    report = compare_runs(home / "plain", run)
    assert report.verdict == "different" and "in A, None in B" in joined(report)
    records = [r for r in read_metrics(run / "metrics.jsonl") if "split" in r or r["step"] not in (3, 5)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    report = compare_runs(home / "plain", run)
    gap = f"{run / 'metrics.jsonl'}: 2 of {STEPS} steps are missing, the first is step 3"
    assert report.verdict == "different" and gap in report.as_json()["gaps"] and "steps are missing" in joined(report)
    assert kinds(report)["training loss"]["count"] == 3 and not kinds(report)["training loss"]["beyond"]
    for path in (run, (twin := copy("plain", "twin"))):  # nothing proves nothing
        (path / "metrics.jsonl").write_text("")
    assert compare_runs(run, twin).verdict == "different"
    for path in (run, twin):
        shutil.rmtree(path / "checkpoints")
    assert "holds a step to compare" in refused(lambda: compare_runs(run, twin))


def test_lines_that_are_no_records_are_named_and_left_out(home: Path, copy: Callable[..., Path]) -> None:
    run = copy("plain")
    path = run / "metrics.jsonl"
    good = path.read_text().splitlines()
    bad = ['{"step": "ten"}', '{"step": 3, "loss": "\\u001b[31mRED\\u0007"}']
    path.write_text("\n".join([*good[:2], *bad, *good[2:], "nonsense", ""]))
    report = compare_runs(home / "plain", run)
    assert (report.verdict, report.exit_code) == ("bitwise", 0)
    lines = [
        f"{path}:3: step is 'ten'; must be the number of a step",
        f"{path}:4: loss is '\\x1b[31mRED\\x07'; must be a number, or null",
        f"{path}:{len(good) + 3}: is not a JSON object: nonsense",
    ]
    assert report.as_json()["damaged"] == lines
    assert report.as_json()["notes"] == [f"{line}; left out" for line in lines], "for the report"
    said = joined(report)
    for line in lines:
        assert f"{line}; left out" in said
    path.write_text("\n".join([*good[:2], *bad * 100, *good[2:], ""]))
    assert f"and 195 more such lines in {path}; left out" in joined(compare_runs(home / "plain", run))
    at = index_of(home / "plain", 3)  # what is lost with a line is missing
    path.write_text("\n".join([*good[:at], bad[1], *good[at + 1 :], ""]))
    report = compare_runs(home / "plain", run)
    assert report.verdict == "different" and report.as_json()["gaps"] == [
        f"{path}: 1 of {STEPS} steps are missing, the first is step 3"
    ]
    assert f"{path}:{at + 1}: loss is" in joined(report)
    assert joined(report).startswith("different: what was compared agrees, and not all steps could be")
    assert ADVICE not in report.lines(), "no number is further apart than a limit"


def test_a_step_that_no_run_has_costs_neither_memory_nor_the_blame(home: Path, copy: Callable[..., Path]) -> None:
    run = copy("plain")
    path, at = run / "metrics.jsonl", index_of(home / "plain", 3)
    change_record(run, at, step=2_000_000_000)
    tracemalloc.start()
    report = compare_runs(home / "plain", run)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**27
    assert report.verdict == "different" and report.as_json()["gaps"] == [
        f"{path}: {2_000_000_000 - STEPS} of 2000000000 steps are missing, the first is step 3",
        f"{home / 'plain'} ends at step {STEPS}, {run} at step 2000000000",
    ]
    change_record(run, at, step=20_000_000_000)
    report = compare_runs(home / "plain", run)
    assert f"{path}:{at + 1}: step is 20000000000; must be the number of a step; left out" in joined(report)
    gaps = report.as_json()["gaps"]
    assert report.verdict == "different" and gaps == [f"{path}: 1 of {STEPS} steps are missing, the first is step 3"]


def test_rounding_may_turn_one_answer(home: Path, copy: Callable[..., Path]) -> None:
    one, two = copy("plain", "one"), copy("plain", "two")
    for right, verdict in ((3, "bitwise"), (4, "rounding"), (5, "different")):
        change_record(one, index_of(one, 4, "val"), exact_match=3 / 9)
        change_record(two, index_of(two, 4, "val"), exact_match=right / 9)
        assert compare_runs(one, two).verdict == verdict
    change_record(two, index_of(two, 4, "val"), loss=1.0, exact_match=3 / 9)
    assert "first step beyond its limit: val loss, step 4: " in joined(compare_runs(one, two))


def test_results_of_different_steps_are_noted(home: Path, copy: Callable[..., Path]) -> None:
    run = copy("plain")
    recorded = json.loads((run / "eval.json").read_text())
    (run / "eval.json").write_text(json.dumps(recorded | {"result": {"weights": "best", "step": 2}}))
    noted = f"the final weights are those of step {STEPS} in A, of step 2 in B: the best of each run"
    assert noted in joined(compare_runs(home / "plain", run))
    (run / "eval.json").write_text(json.dumps({"val": {}}))  # of an earlier release
    assert "the final weights are those" not in joined(compare_runs(home / "plain", run))


def test_all_weights_in_several_files(home: Path, copy: Callable[..., Path]) -> None:
    run = copy("all")
    tensors = load_file(run / "model/model.safetensors")
    (run / "model/model.safetensors").unlink()
    for i in (0, 1):
        part = dict(list(tensors.items())[i::2])
        save_file(part, run / f"model/model-0000{i + 1}-of-00002.safetensors")
    list_anew(run / "model")
    report = compare_runs(home / "all", run)
    assert report.verdict == "bitwise" and kinds(report)["final weights"]["count"] == len(tensors)
    assert "plans: equal in every field" in text(report)


DRAWN = (
    "not decided: a plan draws dropout otherwise, and runs of one seed cannot tell that from a difference; what does "
    "not depend on the draw agrees"
)


def test_another_draw_of_dropout_is_not_judged(home: Path, copy: Callable[..., Path]) -> None:
    plain, shared = home / "dropped", home / "dropped_shared"
    report = compare_runs(plain, shared)
    assert (report.verdict, report.exit_code) == ("undecided", 2), text(report)
    said = joined(report)
    assert said.startswith(f"{DRAWN}\nA: ")
    assert "  statistical (another draw of dropout: only metrics over seeds can agree): share_images False" in said
    found = kinds(report)
    assert found["training loss"]["beyond"] and found["final weights"]["beyond"]
    assert found["samples"]["equal"] and found["learning rate"]["equal"]
    advice = "`sameday verify RECIPE --plan A --against B` compares the two plans with dropout off, and tells."
    assert said.endswith(advice) and "rounding grows" not in said and advice in report.as_json()["notes"][-1]
    assert compare_runs(shared, home / "dropped_packed").verdict == "undecided"
    said = sameday(home, "verify", "dropped", "dropped_shared")
    assert said.code == 2 and said.out.startswith("not decided: a plan draws dropout otherwise, "), said.err


@pytest.mark.parametrize("what", ["samples", "rate", "validated", "loss", "gap", "not finite", "shape", "missing"])
def test_what_no_draw_of_dropout_changes_is_a_difference(home: Path, copy: Callable[..., Path], what: str) -> None:
    run = copy("dropped_shared")
    first = f"first tensor beyond its limit: final weights, step {STEPS}, {TENSOR}: "
    shape = ", ".join(map(str, load_file(run / ADAPTER)[TENSOR].shape))
    if what == "samples":
        change_record(run, index_of(run, 3), samples=3)
        first = "first step beyond its limit: samples, step 3: 4 in A, 3 in B"
    elif what == "rate":
        change_record(run, index_of(run, 1), lr=0.010000000001)
        first = "first step beyond its limit: learning rate, step 1: 0.01 in A, 0.010000000001 in B"
    elif what == "validated":
        change_record(run, index_of(run, 4, "val"), samples=3)
        first = "first step beyond its limit: val samples, step 4: "
    elif what == "loss":
        change_record(run, index_of(run, 3), loss=None)
        first = "first step beyond its limit: training loss, step 3: "
    elif what == "gap":
        change_record(run, index_of(run, 3), step=2)
        first = f"{run / 'metrics.jsonl'}: 1 of {STEPS} steps are missing, the first is step 3"
    elif what == "not finite":
        change_tensor(run / ADAPTER, lambda tensor: tensor * torch.nan)
        first += "not finite"
    elif what == "shape":
        change_tensor(run / ADAPTER, lambda tensor: tensor.bfloat16())
        first += f"('torch.float32', {shape}) in A, ('torch.bfloat16', {shape}) in B"
    else:
        save_file({k: v for k, v in load_file(run / ADAPTER).items() if k != TENSOR}, run / ADAPTER)
        list_anew(run / "adapter")
        first += f"('torch.float32', {shape}) in A, None in B"
    report = compare_runs(home / "dropped", run)
    assert (report.verdict, report.exit_code) == ("different", 1)
    assert joined(report).startswith("different: ")
    assert first.replace(" ", "") in text(report).replace("\n", "").replace(" ", "")
    assert joined(report).count("beyond its limit") <= 1, "what another draw parts is not named with it"
    assert "Runs of equivalent plans part too" not in joined(report), "not in this"


def test_the_same_draw_of_dropout_is_judged(home: Path, copy: Callable[..., Path]) -> None:
    """Fields that draw the same masks claim rounding, with dropout too."""
    report = compare_runs(home / "dropped", home / "dropped_packed")
    assert (report.verdict, report.exit_code) == ("rounding", 0), text(report)
    run = copy("dropped_packed")
    change_record(run, index_of(run, 3), loss=1.0)
    report = compare_runs(home / "dropped", run)
    assert (report.verdict, report.exit_code) == ("different", 1)


def test_dropout_makes_sharing_another_draw(home: Path, copy: Callable[..., Path]) -> None:
    lora = {"r": 4, "alpha": 8.0, "dropout": 0.1}
    said = joined(compare_runs(copy("plain", "one", lora=lora), copy("shared", "two", lora=lora)))
    assert "  statistical (another draw of dropout: only metrics over seeds can agree): share_images False" in said


def test_long_names_and_many_fields_stay_in_bounds(home: Path, copy: Callable[..., Path]) -> None:
    run = copy("plain", "/".join(["a-folder-with-a-long-name" * 8] * 4))
    changed = load_plan(run / "plan.yaml").model_dump() | {
        **{"pad_to_multiple": 64, "checkpointing": "full", "token_budget": 7, "workers": 3, "prefetch": 9},
        **{"environment": {f"VARIABLE_{i}": "x" * 50 for i in range(40)}, "deterministic": True, "device": "cpu"},
    }
    (run / "plan.yaml").write_text(dump_yaml(load_plan(None).model_validate(changed)))
    change_tensor(run / ADAPTER, lambda tensor: tensor * 2)
    change_record(run, index_of(run, 1), loss=1.0)
    report = compare_runs(home / "shared", run)
    assert "first step beyond" in text(report) and "first tensor beyond" in text(report) and "--against" in text(report)
    copies = [copy("plain", f"{'r' * 200}{i}", learning_rate=10.0**-i, name="n" * 150) for i in range(12)]
    assert "more lines; --json has all of it" in text(compare_recipes(copies))


def test_what_cannot_be_compared_is_refused(home: Path, copy: Callable[..., Path]) -> None:
    plain, run = home / "plain", copy("plain")
    assert refused(lambda: compare_runs(plain, home)) == f"{home}: is not a run folder: it has no plan.yaml"
    assert refused(lambda: compare_runs(plain, plain)) == f"{plain}: is given twice; two runs are needed"
    names = [load_recipe(home / name / "recipe.yaml").fingerprint for name in ("seed1", "plain")]
    assert refused(lambda: compare_runs(plain, home / "seed1")) == (
        f"{home / 'seed1'}: is a run of another recipe ({names[0]} here) than {plain} ({names[1]} there):\n"
        "  seed: 0 there, 1 here\n"
        "Different recipes can only be compared by their metrics: add --recipes."
    )
    state = run / f"checkpoints/step-{STEPS:06d}/state.json"

    def record(what: Any) -> None:
        state.write_text(json.dumps(what))
        list_anew(state.parent)

    before = json.loads(state.read_text())
    digests = {name: "other" for name in before["digests"]}
    record(before | {"digests": before["digests"] | {"training data": "other"}})
    had = f"{run}: has the recipe of {plain}, but another "
    assert refused(lambda: compare_runs(plain, run)) == had + "training data"
    record(before | {"digests": digests})
    assert refused(lambda: compare_runs(plain, run)) == had + " and another ".join(digests)
    assert {"training data", "validation data", "base model", "tokenizer"} <= digests.keys()
    fewer = {name: before["digests"][name] for name in ("training data", "base model")}  # of an earlier release
    record(before | {"digests": fewer})
    assert compare_runs(plain, run).verdict == compare_runs(run, plain).verdict == "bitwise"
    shutil.rmtree(run / "checkpoints")
    report = compare_runs(plain, run)
    assert report.verdict == "bitwise"
    assert f"base model and training data are not compared: {run} has no checkpoint" in report.as_json()["notes"][0]
    (run / ADAPTER).write_bytes(b"torn")
    not_written = f"{run / 'adapter'}: cannot be compared: adapter_model.safetensors is not what was written"
    assert refused(lambda: compare_runs(plain, run)) == not_written
    list_anew(run / "adapter")
    assert refused(lambda: compare_runs(plain, run)).startswith(f"{run / ADAPTER}: cannot be read: ")
    (run / ADAPTER).unlink()
    list_anew(run / "adapter")
    assert refused(lambda: compare_runs(plain, run)) == f"{run / 'adapter'}: holds no weights (*.safetensors)"
    shutil.rmtree(run / "adapter")
    assert refused(lambda: compare_runs(plain, run)) == f"{run}: the run is not finished: it has no adapter/ yet"


# Recipes


def test_one_seed_each_cannot_tell(home: Path) -> None:
    report = compare_recipes([home / "plain", home / "all"])
    first, *rest = joined(report).split("\n")
    assert first == "DIFFERENT RECIPES: they differ in learning_rate, lora, train"
    assert "  train: 'lora' there, 'all' here" in rest and "  learning_rate: 0.01 there, 0.0001 here" in rest
    assert text(report).count("one seed each cannot tell it from a difference of seeds") == 2  # loss and exact match
    assert report.exit_code == 0 and report.verdict is None
    scores = json.loads((home / "all/eval.json").read_text())["val"]
    assert list(report.as_json()["val"].values())[1] == {"0": scores}
    assert "one seed of one cannot tell" in text(compare_recipes([home / "plain", home / "seed1", home / "all"]))


def test_recipes_over_seeds(copy: Callable[..., Path]) -> None:
    def group(rate: float, losses: list[float]) -> list[Path]:
        each = enumerate(losses)
        return [copy("plain", f"{rate}-{i}", {"loss": v}, learning_rate=rate, seed=i, name=f"r{i}") for i, v in each]

    low, near, far = group(0.1, [1.0, 1.2]), group(0.2, [1.1, 1.25, 1.3]), group(0.3, [2.0, 2.1])
    said = text(compare_recipes([*low, *near]))
    assert said.startswith("DIFFERENT RECIPES: they differ in learning_rate\n")
    table = [line.split() for line in said.split("\n") if line.startswith("  r0 ")]
    assert [row[2:] for row in table] == [["2", "1.1", "1", "1.2", "0.14"], ["3", "1.21667", "1.1", "1.3", "0.1"]]
    assert "  means, second - first: +0.117, not larger than the spread over seeds, 0.2" in said
    said = text(compare_recipes([*low, *far]))
    assert "  means, second - first: +0.95, larger than the spread over seeds, 0.2" in said
    said = text(compare_recipes([*low, *near, *far]))
    assert "second - first" not in said and said.count("(here) against") == 2


def test_scores_of_other_questions_or_weights_are_noted(copy: Callable[..., Path]) -> None:
    one = copy("plain", "one", {"loss": 1.0})
    note = "note: the validation samples, or their weights in the loss, differ: scores are not of one kind"
    others = {
        "rate": copy("plain", "rate", {"loss": 1.0}, learning_rate=0.5),
        "weight": copy("plain", "weight", {"loss": 1.0}, loss_weight="sample"),
        "fewer": copy("plain", "fewer", {"loss": 1.0, "samples": 8}, learning_rate=0.5),
    }
    assert [name for name, run in others.items() if note in joined(compare_recipes([one, run]))] == ["weight", "fewer"]


def test_one_content_under_two_names_is_no_other_validation_data(home: Path, tmp_path: Path) -> None:
    note = "note: the validation samples, or their weights in the loss, differ: scores are not of one kind"
    shutil.copytree(home / "images", tmp_path / "elsewhere" / "images")
    for name in ("train", "val"):
        shutil.copy(home / f"{name}.jsonl", tmp_path / "elsewhere" / f"{name}-again.jsonl")
    moved = {"train": "train-again.jsonl", "val": "val-again.jsonl", "image_root": "images"}
    recipe = load_recipe(home / "recipe.yaml")
    runs = {}
    for name, lines in (("same", slice(None)), ("other", slice(None, None, -1))):
        file = tmp_path / "elsewhere" / "val-again.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[lines]))
        asked = recipe.model_validate(recipe.model_dump() | {"data": moved})
        (tmp_path / "elsewhere" / "recipe.yaml").write_text(dump_yaml(asked))
        options = [part for field in (*SETS, *RUNS["plain"]) for part in ("--set", field)]
        runs[name] = tmp_path / name
        said = sameday(tmp_path / "elsewhere", "train", "recipe.yaml", "--out", str(runs[name]), *options)
        assert said.code == 0, said.err
    same, other = (joined(compare_recipes([home / "plain", run])) for run in runs.values())
    assert "they differ in data.train, data.val" in same and "note: " not in same
    assert note in other


def record_digests(run: Path, **digests: str) -> None:
    """As if its model or data had had another content."""
    state = run / f"checkpoints/step-{STEPS:06d}/state.json"
    record = json.loads(state.read_text())
    record["digests"] |= {name.replace("_", " "): digest for name, digest in digests.items()}
    state.write_text(json.dumps(record))
    list_anew(state.parent)


def test_data_that_changed_between_two_recipes_is_noted(copy: Callable[..., Path]) -> None:
    one, two = (copy("plain", f"{rate}", {"loss": 1.0}, learning_rate=rate) for rate in (0.1, 0.2))
    assert "note: " not in joined(compare_recipes([one, two]))
    record_digests(two, training_data="other", validation_data="other")
    said = joined(compare_recipes([one, two]))
    assert f"note: The recipes of {one} and {two} name the same training data, but it was another for each." in said
    judged = f"{one} and {two} were validated on different data: their validation scores are not of one kind."
    assert f"note: {judged}" in said
    shorter = copy("plain", "shorter", {"loss": 1.0}, max_length=500)  # which may leave other questions out
    record_digests(shorter, training_data="other")
    assert "note: " not in joined(compare_recipes([one, shorter]))
    shutil.rmtree(two / "checkpoints")  # nothing tells any more
    assert "note: " not in joined(compare_recipes([one, two]))


def test_recipes_that_cannot_be_compared(home: Path, copy: Callable[..., Path]) -> None:
    plain, seed1, other = home / "plain", home / "seed1", copy("plain", learning_rate=0.5)
    assert refused(lambda: compare_recipes([plain, seed1])) == (
        f"{plain}, {seed1}: one recipe, whatever the seed; --recipes compares two or more, without it two runs"
    )
    assert refused(lambda: compare_recipes([plain, home / "again", other])) == (
        f"{home / 'again'}: has the recipe and the seed of {plain}; give one run of each seed"
    )
    classified = ClassifyRecipe.model_validate({"model": {"kind": "vit"}, "data": {"path": "cifar"}})
    pictures = RunFolder.open(other.parent / "pictures", classified, Plan(), other)
    pictures.close()
    assert refused(lambda: compare_recipes([plain, pictures.path])) == (
        f"runs of several tasks have no scores to compare: vqa ({plain}), classify ({pictures.path})"
    )
    missing = f"{other / 'eval.json'}: has no validation scores; a run whose recipe has data.val ends with them"
    for content in ('{"val": {}}', '{"val": {"loss": null}}', "torn", None):
        (other / "eval.json").unlink() if content is None else (other / "eval.json").write_text(content)
        assert refused(lambda: compare_recipes([plain, other])) == missing
    os.mkfifo(other / "eval.json")
    assert refused(lambda: compare_recipes([plain, other])) == missing, "nobody writes into it, and nobody waits"
