"""The commands as a user types them: what they print, what they leave behind, and how they refuse."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import largest_file
from safetensors.torch import load_file, save_file
from typed import Said, refused, sameday, scores_in, write_recipe
from worlds import write_world

from sameday.api import load
from sameday.models.families import known_families
from sameday.record.folder import RunFolder, read_metrics
from sameday.record.manifest import MANIFEST, write_manifest
from sameday.spec.convert import conversion
from sameday.spec.convert.config import convert
from sameday.spec.errors import EXIT_DISK_FULL, EXIT_DIVERGED, BadInput
from sameday.spec.load import load_plan, load_recipe
from sameday.spec.vqa import VqaRecipe
from sameday.spec.writing import write_text

CPU = ("--set", "plan.device=cpu")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def world(tmp_path: Path, tiny_qwen3: Path) -> Path:
    """Two images, five questions, and a recipe for them."""
    return write_recipe(write_world(tmp_path, 3, counts=(3, 2), hard=False), tiny_qwen3)


@dataclass
class Finished:
    folder: Path
    run: Path
    said: Said


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Finished:
    """One run without a plan and without --out, with every short form."""
    folder = write_world(tmp_path_factory.mktemp("finished"), 3, counts=(3, 2), hard=False)
    write_recipe(folder, tiny_qwen3, learning_rate=0.05)
    (folder / "bad.jsonl").write_text('{"image": "0.png", "question": "why?"}\n' + (folder / "train.jsonl").read_text())
    said = sameday(
        folder,
        *("train", "recipe.yaml", "--max-steps", "3", "--limit", "5", "--on-bad", "skip"),
        *("--set", "recipe.data.train=bad.jsonl", "--set", "recipe.lora.r=3", "--set", "plan.log_steps=2"),
    )
    assert said.code == 0, said.err
    [run] = (folder / "runs").iterdir()
    return Finished(folder, run, said)


# Training


def test_short_forms_and_sets_reach_the_recipe(finished: Finished) -> None:
    recipe = load_recipe(finished.run / "recipe.yaml")
    assert (recipe.max_steps, recipe.data.limit, recipe.data.on_bad, recipe.lora.r) == (3, 5, "skip", 3)
    assert recipe.data.train == "bad.jsonl"
    config = json.loads((finished.run / "adapter/adapter_config.json").read_text())
    assert config["r"] == 3
    steps = [m["step"] for m in read_metrics(finished.run / "metrics.jsonl") if "split" not in m]
    assert steps == [1, 2, 3]


def test_a_run_lives_under_its_name_and_fingerprint(finished: Finished) -> None:
    recipe = load_recipe(finished.run / "recipe.yaml")
    assert finished.run.name == f"small-{recipe.fingerprint}"
    assert f"small {recipe.fingerprint} in runs/{finished.run.name}: 4 questions\n" in finished.said.out


def test_bad_lines_are_left_out_and_recorded(finished: Finished) -> None:
    [skipped] = json.loads((finished.run / "skipped.json").read_text())
    assert skipped["where"] == "bad.jsonl:1" and "answer" in skipped["what"]
    assert "left out: 1 problem in 1 line:\nbad.jsonl:1: " in finished.said.out
    assert "what was left out is recorded in skipped.json\n" in finished.said.out


def test_an_automatic_plan_says_why_and_is_kept(finished: Finished) -> None:
    plan = load_plan(finished.run / "plan.yaml")
    choices = json.loads((finished.run / "choices.json").read_text())
    assert plan.share_images and plan.share_text and plan.packing and plan.max_questions is None
    said = dict(re.findall(r"^plan\.(\w+): \S+, because (.+)$", finished.said.out, re.MULTILINE))
    assert said == {name: why for name, why in choices.items() if name != "attention"}
    for name in ("share_images", "share_text", "packing", "token_budget", "optimizer_impl"):
        assert len(said[name]) > 10, said
    assert said["share_text"].startswith("what its questions have in common after it, such as a template, is computed")
    assert re.search(r"^attention: \w+, because .+$", finished.said.out, re.MULTILINE)
    assert choices["attention"]


def test_what_was_set_stands_in_an_automatic_plan(finished: Finished) -> None:
    assert load_plan(finished.run / "plan.yaml").log_steps == 2
    assert "plan.log_steps: 2, because asked for\n" in finished.said.out
    lines = re.findall(r"^step (\d)/3  loss", finished.said.out, re.MULTILINE)
    assert lines == ["2", "3"]


def test_a_set_replaces_an_automatic_choice(world: Path) -> None:
    sets = ("plan.share_images=false", "plan.token_budget=300", "plan.environment.OMP_NUM_THREADS='1'")
    said = sameday(world, "train", "recipe.yaml", "--out", "run", *(w for s in sets for w in ("--set", s)))
    assert said.code == 0, said.err
    plan = load_plan(world / "run/plan.yaml")
    assert (plan.share_images, plan.token_budget, plan.packing) == (False, 300, True)
    assert plan.environment == {"OMP_NUM_THREADS": "1"}
    assert "plan.token_budget: 300, because asked for\n" in said.out


def test_a_plan_file_is_taken_as_it_is(world: Path) -> None:
    (world / "plan.yaml").write_text("attention: sdpa\nlog_steps: 1\n")
    said = sameday(world, "train", "recipe.yaml", "--plan", "plan.yaml", "--set", "plan.workers=0", "--out", "run")
    assert said.code == 0, said.err
    chosen = [line for line in said.out.splitlines() if "because" in line]
    assert set(chosen) <= {"device: cpu, because torch finds no GPU here"}, "no choice was made"
    assert load_plan(world / "run/plan.yaml") == load_plan(world / "plan.yaml")
    assert json.loads((world / "run/choices.json").read_text()) == {}


def test_paths_start_at_the_recipe_wherever_the_command_is_typed(world: Path, tmp_path_factory: Any) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    said = sameday(elsewhere, "train", str(world / "recipe.yaml"), "--max-steps", "1")
    assert said.code == 0, said.err
    assert [p.parent for p in elsewhere.glob("runs/small-*")] == [elsewhere / "runs"]


def test_the_same_command_again_goes_on(world: Path) -> None:
    stopped = sameday(world, "train", "recipe.yaml", "--stop-after", "1")
    assert stopped.code == 75 and "step 1 of 2 is saved" in stopped.err
    [run] = (world / "runs").iterdir()
    assert not (run / "adapter").exists()
    unfinished = refused(world, "eval", str(run), "--split", "val")
    assert unfinished.startswith(f"{run}: the run is not finished: it has no adapter/ yet; --checkpoint ")
    again = sameday(world, "train", "recipe.yaml")
    assert again.code == 0 and "resumed from step-000001\n" in again.out, again.err
    assert (run / "adapter").is_dir()


# Specs


def test_an_unknown_key_names_its_place_and_its_nearest(world: Path) -> None:
    text = (world / "recipe.yaml").read_text() + "learning_rte: 1\nnum_epoch: 2\n"
    (world / "recipe.yaml").write_text(text)
    last = len(text.splitlines())
    assert refused(world, "train", "recipe.yaml").splitlines() == [
        f"recipe.yaml:{last - 1}: learning_rte is not a key here; nearest: learning_rate, learning_rates",
        f"recipe.yaml:{last}: num_epoch is not a key here; nearest: num_epochs",
    ]


def test_a_plan_key_in_a_recipe_is_told_so(world: Path) -> None:
    text = (world / "recipe.yaml").read_text()
    (world / "recipe.yaml").write_text("packing: true\n" + text)
    said = refused(world, "train", "recipe.yaml")
    assert said == "recipe.yaml:1: packing is a plan field, not a recipe field"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe.seed", "--set recipe.seed: has no '='; write recipe.KEY=VALUE or plan.KEY=VALUE"),
        ("seed=1", "--set seed=1: must start with recipe.KEY= or plan.KEY="),
        ("recipe.seed=-1", "--set recipe.seed=-1: seed is -1; must be greater than or equal to 0"),
        (
            "plan.worker=2",
            "--set plan.worker=2: worker is not a key here; nearest: workers",
        ),
        ("recipe.lora.r=many", "--set recipe.lora.r=many: lora.r is 'many'; must be an integer"),
    ],
)
def test_a_bad_set_is_its_own_place(world: Path, text: str, message: str) -> None:
    assert refused(world, "train", "recipe.yaml", "--set", text) == message


def test_every_bad_setting_of_recipe_and_plan_comes_at_once(world: Path) -> None:
    sets = ("learning_rate=1", "recipe.lora.r=0", "plan.workers=many", "recipe.seed=[", "plan.nothing=1", "recipe.x=1")
    said = refused(world, "train", "recipe.yaml", *(word for text in sets for word in ("--set", text))).splitlines()
    assert [line.split(": ")[0] for line in said] == [
        "--set learning_rate=1",
        *("--set recipe.seed=[", "--set recipe.lora.r=0", "--set recipe.x=1"),
        *("--set plan.workers=many", "--set plan.nothing=1"),
    ]
    assert said[2] == "--set recipe.lora.r=0: lora.r is 0; must be greater than or equal to 1"
    assert "workers is 'many'; must be an integer" in said[4]
    said = refused(world, "train", "absent.yaml", "--plan", "missing.yaml")
    assert said == "absent.yaml: no such file\nmissing.yaml: no such file"


def test_missing_files_are_named(world: Path) -> None:
    assert refused(world, "train", "absent.yaml") == "absent.yaml: no such file"
    assert refused(world, "train", "recipe.yaml", "--plan", "absent.yaml") == "absent.yaml: no such file"
    said = refused(world, "train", "recipe.yaml", "--set", "recipe.data.train=none.jsonl")
    needed = "a file with one JSON object per line, or with one JSON array of objects, CSV or parquet, is needed"
    assert said == f"{world}/none.jsonl does not exist; {needed}"


# Data, before any model


def test_a_wrong_image_root_is_said_once(world: Path) -> None:
    (world / "val.jsonl").write_text((world / "val.jsonl").read_text() + "not json\n")
    said = refused(world, "train", "recipe.yaml", "--set", "recipe.data.image_root=nowhere")
    assert said.count("nowhere is not a folder") == said.count("recipe.data.image_root") == 1
    assert f"recipe.data.image_root is nowhere, and {world / 'nowhere'} is not a folder" in said
    assert "invalid JSON at column 1" in said  # and the texts are checked all the same
    (world / "empty").mkdir()
    said = refused(world, "train", "recipe.yaml", "--set", "recipe.data.image_root=empty")
    assert said.splitlines()[-1] == (
        f"none of the images that train.jsonl and val.jsonl name is under {world / 'empty'}, such as '0.png': "
        "recipe.data.image_root may be another folder"
    )
    assert said.count("recipe.data.image_root") == 1 and "not found under" not in said
    words = ("--set", "recipe.data.image_root=empty", "--set", "recipe.data.val=null")
    assert refused(world, "train", "recipe.yaml", *words).startswith(
        "none of the images that train.jsonl names is under"
    )


def test_a_json_array_is_trained_on_like_lines(world: Path) -> None:
    rows = [json.loads(line) for line in (world / "train.jsonl").read_text().splitlines()]
    (world / "train.json").write_text(json.dumps(rows, indent=2))
    words = ("train", "recipe.yaml", "--max-steps", "1")
    assert sameday(world, *words, "--out", "lines").code == 0
    assert sameday(world, *words, "--out", "array", "--set", "recipe.data.train=train.json").code == 0
    losses = [read_metrics(world / name / "metrics.jsonl")[0]["loss"] for name in ("lines", "array")]
    assert losses[0] == losses[1]


def test_all_bad_lines_of_all_files_come_in_one_list(world: Path) -> None:
    """And what is wrong with the model, last."""
    good = (world / "train.jsonl").read_text()
    (world / "train.jsonl").write_text(
        good
        + '{"image": "0.png", "question": "", "answer": "yes"}\n'
        + '{"image": "none.png", "question": "a", "answer": "b"}\n'
    )
    (world / "images/broken.png").write_bytes(b"\x89PNG nothing")
    (world / "val.jsonl").write_text(good + 'not json\n{"image": "broken.png", "question": "a", "answer": "b"}\n')
    said = refused(world, "train", "recipe.yaml", "--set", "recipe.model=no/such/model")
    assert said.count("2 problems in 2 lines:") == 2
    for line in (
        "train.jsonl:6: question is empty",
        "train.jsonl:7: image 'none.png' not found under ",
        "val.jsonl:6: invalid JSON at column 1: ",
        "val.jsonl:7: image 'broken.png' ",
    ):
        assert f"\n{line}" in said, said
    data, _, model = said.rpartition("recipe.data.on_bad=skip leaves them out")
    assert model.lstrip().startswith("model 'no/such/model' is neither a folder nor in the cache")
    assert "no/such/model" not in data
    assert not (world / "runs").exists()


def test_a_curriculum_needs_stages(world: Path) -> None:
    rows = [json.loads(line) for line in (world / "train.jsonl").read_text().splitlines()]
    for row in rows[1:3]:
        del row["stage"]
    (world / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = refused(world, "train", "recipe.yaml", "--set", "recipe.order=curriculum")
    assert said == "order curriculum needs a stage in every line; 2 have none: train.jsonl:2"


@pytest.mark.parametrize(
    "workers",
    [
        "0",
        "1",
    ],
)
def test_max_length_needs_room_for_image_and_answer(world: Path, workers: str) -> None:
    sets = ("--set", "recipe.max_length=10", "--set", f"plan.workers={workers}")
    said = refused(world, "train", "recipe.yaml", *sets)
    assert re.search(
        r"train\.jsonl:\d+: max_length 10 has no room for what is never cut \(images, earlier turns, the turn's frame "
        r"and one token of the answer\), which takes \d+ tokens",
        said,
    )


# Models


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_HUB_OFFLINE=1, which the library reads once at its import."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("name", ["someone/some-model", "../models/typo"])
def test_a_model_that_is_nowhere(world: Path, offline: None, name: str) -> None:
    said = refused(world, "train", "recipe.yaml", "--set", f"recipe.model={name}")
    assert said.startswith(f"model '{name}' is neither a folder nor in the cache (")
    assert "and the hub did not give it: " in said and not (world / "runs").exists()


@pytest.mark.parametrize("plan", [(), ("--plan", "plan.yaml")])
def test_an_unsupported_model_is_refused(world: Path, plan: tuple[str, ...]) -> None:
    (world / "plan.yaml").write_text("log_steps: 1\n")
    bert = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 8, "num_hidden_layers": 1}
    (world / "bert").mkdir()
    (world / "bert/config.json").write_text(json.dumps(bert))
    said = refused(world, "train", "recipe.yaml", "--set", "recipe.model=bert", *plan)
    assert said == f"recipe.model: model type 'bert' is not supported; allowed: {', '.join(known_families())}"
    assert not (world / "runs").exists()


def test_a_folder_that_is_no_model(world: Path) -> None:
    said = refused(world, "train", "recipe.yaml", "--set", "recipe.model=images")
    assert said.startswith("model 'images': its configuration cannot be read: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there(world: Path) -> None:
    said = refused(world, "train", "recipe.yaml", "--set", "plan.device=cuda")
    assert said == "plan.device is cuda, and torch finds no GPU here; allowed: auto, cpu"


def test_attention_that_cannot_run_is_refused_before_the_run_exists(world: Path) -> None:
    said = refused(world, "train", "recipe.yaml", "--set", "plan.attention=flex", "--set", "plan.device=cpu")
    assert said == "plan.attention flex has no backward pass on a CPU; allowed there: auto, sdpa, split"
    said = refused(world, "train", "recipe.yaml", "--set", "plan.attention=split", "--set", "plan.packing=false", *CPU)
    assert said == "plan.attention split is for packed rows: set plan.packing true, or attention sdpa or flex"
    said = refused(world, "train", "recipe.yaml", "--set", "plan.attention=fused", "--set", "plan.packing=false", *CPU)
    assert said.startswith("plan.attention fused is for packed rows: set plan.packing true")
    assert not (world / "runs").exists()


def test_a_lora_target_must_exist(world: Path) -> None:
    said = refused(world, "train", "recipe.yaml", "--set", "recipe.lora.target_modules=[q_proj, query]")
    assert said == (
        "lora.target_modules: no linear layer of the language model is called 'query'; it has "
        "down_proj, gate_proj, k_proj, lm_head (with lora.dropout 0), o_proj, q_proj, up_proj, v_proj"
    )
    assert not (world / "runs").exists()


def test_a_lora_target_of_the_tower_too_is_the_language_models(world: Path, tiny_qwen25: Path) -> None:
    model = f"recipe.model={tiny_qwen25}"
    words = ("train", "recipe.yaml", "--set", model, "--out", "run", "--max-steps", "1")
    done = sameday(world, *words, "--set", "recipe.lora.target_modules=[gate_proj]")
    assert done.code == 0, done.err
    names = load_file(world / "run/adapter/adapter_model.safetensors")
    assert names and all(".language_model." in name and ".gate_proj." in name for name in names)


def test_a_start_adapter_must_fit(finished: Finished, world: Path) -> None:
    adapter = finished.run / "adapter"
    words = ("train", "recipe.yaml", "--set", f"recipe.start_adapter={adapter}")
    said = refused(world, *words, "--set", "recipe.lora.alpha=5", "--set", "recipe.lora.target_modules=[q_proj]")
    assert said == (
        f"start_adapter {adapter}: r is 3 there, 2 in the recipe; alpha is 4 there, 5.0 in the recipe; "
        "target_modules are ['k_proj', 'o_proj', 'q_proj', 'v_proj'] there, ['q_proj'] in the recipe"
    )
    said = refused(world, "train", "recipe.yaml", "--out", "other", "--set", "recipe.start_adapter=images")
    assert said == f"start_adapter: {world}/images is not a PEFT adapter (it has no adapter_config.json)"


def test_a_start_adapter_of_other_layers_is_seen_through_its_pattern(world: Path) -> None:
    """What was saved for `language_model.q_proj` is a pattern, and a recipe for v_proj does not mean it."""
    words = ("train", "recipe.yaml", "--max-steps", "1")
    done = sameday(world, *words, "--out", "one", "--set", "recipe.lora.target_modules=[language_model.q_proj]")
    assert done.code == 0, done.err
    start = ("--set", "recipe.start_adapter=one/adapter")
    said = refused(world, *words, *start, "--out", "two", "--set", "recipe.lora.target_modules=[v_proj]")
    assert "target_modules are " in said and "['v_proj'] in the recipe" in said
    # The same layers by another name are the same.
    done = sameday(world, *words, *start, "--out", "three", "--set", "recipe.lora.target_modules=[q_proj]")
    assert done.code == 0, done.err


# Evaluation


def test_eval_gives_what_the_run_gave(finished: Finished) -> None:
    said = sameday(finished.folder, "eval", str(finished.run), "--split", "val", "--max-new-tokens", "4")
    assert said.code == 0, said.err
    scores = json.loads((finished.run / "eval.json").read_text())["val"]
    again = scores_in(finished.run / "eval-val.json")
    assert again == scores
    line = f"loss {scores['loss']:.4g}  exact_match {scores['exact_match']:.4g}  samples 5"
    assert line in said.out.splitlines()


def test_eval_of_a_curriculum_needs_no_training_questions(world: Path) -> None:
    words = ("train", "recipe.yaml", "--out", "run", "--max-steps", "1", "--set", "recipe.order=curriculum")
    assert sameday(world, *words).code == 0
    (world / "train.jsonl").unlink()
    said = sameday(world, "eval", "run", "--split", "val", "--scores-only")
    assert said.code == 0, said.err


def test_eval_refuses_what_it_cannot_answer(finished: Finished, tmp_path: Path) -> None:
    said = refused(finished.folder, "eval", str(finished.run))
    assert said == f"{finished.run}: the recipe has no data.test"
    said = refused(tmp_path, "eval", "nothing")
    assert said == "nothing: there is no such run folder or recipe"
    assert refused(tmp_path, "eval", ".") == ".: is not a run folder: it has no recipe.yaml"


@pytest.fixture
def copied(finished: Finished, tmp_path: Path) -> Finished:
    """The finished run, to be damaged."""
    shutil.copytree(finished.folder, tmp_path / "copied")
    return Finished(tmp_path / "copied", tmp_path / "copied" / "runs" / finished.run.name, finished.said)


def list_anew(folder: Path) -> None:
    write_manifest(folder, [path for path in folder.iterdir() if path.name != MANIFEST])


def test_eval_takes_only_weights_that_are_what_was_written(copied: Finished) -> None:
    adapter = copied.run / "adapter"
    weights = adapter / "adapter_model.safetensors"
    words, whole = ("eval", str(copied.run), "--split", "val"), weights.read_bytes()
    weights.write_bytes(whole[:-7] + bytes(b ^ 0xFF for b in whole[-7:]))
    said = refused(copied.folder, *words)
    assert said == (
        f"{adapter}: cannot be evaluated: adapter_model.safetensors is not what was written; the command that trained "
        "it writes it again from its last checkpoint"
    )
    for command, word in ((("merge", "-o", "whole"), "merged"), (("push", "me/x", "--dry-run"), "pushed")):
        told = refused(copied.folder, command[0], str(copied.run), *command[1:])
        assert told == said.replace("cannot be evaluated", f"cannot be {word}")
    with pytest.raises(BadInput, match=r"cannot be loaded: .* is not what was written"):
        load(copied.run, set={"plan.device": "cpu"})
    tensors = load_file(weights)
    first = sorted(tensors)[0]
    tensors[first][0, 0] = torch.nan
    for tensors_, sentence in (
        (tensors, f"{adapter}: holds weights that are not finite: {first.replace('_A.', '_A.default.')}"),
        (
            dict(list(tensors.items())[1:]),
            f"{adapter}: {weights.name} does not have the tensors of this recipe's adapters",
        ),
    ):
        save_file(tensors_, weights)
        list_anew(adapter)
        assert refused(copied.folder, *words) == sentence
    weights.unlink()
    list_anew(adapter)
    assert refused(copied.folder, *words).startswith(f"{adapter}: its weights cannot be read: ")


def test_a_score_that_is_not_finite_is_no_success(copied: Finished, tiny_qwen3: Path) -> None:
    """Weights that are finite, of which the logits are not."""
    shutil.rmtree(copied.run / "checkpoints")
    adapter = copied.run / "adapter"
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: tensor * 1e30 for name, tensor in tensors.items()}, adapter / "adapter_model.safetensors")
    list_anew(adapter)
    (copied.run / "eval-val.json").unlink(missing_ok=True)
    said = sameday(copied.folder, "eval", str(copied.run), "--split", "val")
    assert said.code == EXIT_DIVERGED and not (copied.run / "eval-val.json").exists()
    assert said.err.startswith(f"{adapter}: val loss nan: not finite, though all weights are; ")


def test_eval_of_checkpoints(copied: Finished) -> None:
    """Also of a run that is not finished, and that another process has; nothing of it is touched."""
    shutil.rmtree(copied.run / "adapter")
    (copied.run / "eval-val.json").unlink(missing_ok=True)
    words = ("eval", str(copied.run), "--split", "val", "--scores-only")
    said = refused(copied.folder, *words)
    assert said == (
        f"{copied.run}: the run is not finished: it has no adapter/ yet; --checkpoint last, best or step-N takes one "
        "of its checkpoints: there are step-000002, step-000003"
    )
    recipe, plan = load_recipe(copied.run / "recipe.yaml"), load_plan(copied.run / "plan.yaml")
    going = RunFolder.open(copied.run, recipe, plan, copied.folder)
    before = {path: path.stat().st_mtime_ns for path in copied.run.rglob("*") if path.is_file()}
    validated = {r["step"]: r for r in read_metrics(copied.run / "metrics.jsonl") if "split" in r}
    best = json.loads((copied.run / "checkpoints/best.json").read_text())["step"]
    for asked, step in (("last", 3), ("best", best), ("step-2", 2), ("step-000003", 3)):
        said_ = sameday(copied.folder, *words, "--checkpoint", asked)
        assert said_.code == 0, said_.err
        written = copied.run / f"scores-step-{step:06d}-val.json"
        scores = scores_in(written)
        shown = {name: score for name, score in validated[step].items() if name not in ("step", "split")}
        assert shown == pytest.approx(scores, rel=1e-6) and validated[step]["split"] == "val"
        before.pop(written, None)
    after = {path: path.stat().st_mtime_ns for path in before}
    assert after == before and not (copied.run / "eval-val.json").exists()
    going.close()
    there = "there are step-000002, step-000003"
    said = refused(copied.folder, *words, "--checkpoint", "step-9")
    assert said == f"{copied.run}: has no such checkpoint as step-9; {there}"
    said = refused(copied.folder, *words, "--checkpoint", "newest")
    assert said == f"--checkpoint newest: must be last, best or step-N; {there}"


def test_ranks_share_an_evaluation(copied: Finished) -> None:
    """As torchrun starts them; the scores are said once, and the answers are those of one process."""
    (copied.run / "plan.yaml").write_text((copied.run / "plan.yaml").read_text().replace("device: auto", "device: cpu"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("--split", "val", "--checkpoint", "last", "--max-new-tokens", "6")
    command = [sys.executable, "-m", "sameday", "eval", str(copied.run), *words]
    shared = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(command, env=shared | {"RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    first, second = (f"{rank.wait(300)}\n{rank.stdout.read()}" for rank in ranks if rank.stdout)
    scores = scores_in(copied.run / "scores-step-000003-val.json")
    assert scores == pytest.approx(json.loads((copied.run / "eval.json").read_text())["val"], rel=1e-6)
    assert first.startswith("0\n") and first.count(f"loss {scores['loss']:.4g}") == 1, first
    assert second == "0\n"
    alone = sameday(copied.folder, *command[3:], "--out", "alone")
    assert alone.code == 0, alone.err
    answers = copied.run / "answers/step-000003-val/predictions.jsonl"
    assert answers.read_bytes() == (copied.folder / "alone/predictions.jsonl").read_bytes()


# Conversion and examples


def test_convert_refuses_what_would_be_another_model(tmp_path: Path) -> None:
    old = "model: llava-hf/llava-v1.6-mistral-7b-hf\ntrain_json: t.json\nload_in_4bit: true\nours: {a: 1}\n"
    (tmp_path / "old.yaml").write_text(old)
    said = refused(tmp_path, "convert", "old.yaml", "-o", "new")
    assert [line.split(" is ")[0] for line in said.splitlines()] == [
        "old.yaml:4: ours.a",
        "old.yaml:1: model",
        "old.yaml:3: load_in_4bit",
    ]
    assert f"of a family that is not supported (allowed: {', '.join(known_families())})" in said
    assert not (tmp_path / "new").exists()
    (tmp_path / "old.yaml").write_text(old.replace("llava-hf/llava-v1.6-mistral-7b-hf", "Qwen/Qwen3-VL-8B-Instruct"))
    done = sameday(tmp_path, "convert", "old.yaml", "-o", "new", "--drop", "load_in_4bit", "--drop", "ours")
    assert done.code == 0, done.err
    assert "2 keys dropped:" in done.out and (tmp_path / "new" / "recipe.yaml").exists()


def test_convert_on_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its folder nor one of the two files."""
    words = ("convert", str(EXAMPLES / "trainer_config.yaml"), "-o", "new/folder")
    with largest_file(20):
        said = sameday(tmp_path, *words)
    assert said.code == EXIT_DISK_FULL and re.fullmatch(
        r"no room for recipe\.yaml in .*new/folder: File too large\. It takes about [\d,]+ bytes and [\d,]+ are free: "
        r"a quota or a limit on files is in the way\. Make room and run again\.\n",
        said.err,
    ), said.err
    assert not (tmp_path / "new").exists()
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_text", written_before("plan.yaml"))
        said = sameday(tmp_path, *words)
    assert said.code == EXIT_DISK_FULL and said.err.startswith("no room for plan.yaml in "), said.err
    assert not (tmp_path / "new").exists()


def written_before(name: str) -> Callable[[Path, str], None]:
    """`write_text` on a disk that is full from the file of this name on."""

    def write(path: Path, text: str) -> None:
        with largest_file(0) if path.name == name else nullcontext():
            write_text(path, text)

    return write


def test_convert_writes_files_that_load(tmp_path: Path) -> None:
    said = sameday(tmp_path, "convert", str(EXAMPLES / "trainer_config.yaml"), "-o", "new")
    assert said.code == 0, said.err
    recipe, plan = load_recipe(tmp_path / "new/recipe.yaml"), load_plan(tmp_path / "new/plan.yaml")
    assert (recipe.effective_batch, recipe.learning_rate, recipe.loss_weight) == (16, 5e-5, "sample")
    assert (plan.checkpointing, plan.save_steps) == ("full", 250)
    assert said.out.endswith("written: new/recipe.yaml, new/plan.yaml\n")
    assert re.search(r"^train\.lr = 5e-05\s+->\s+recipe\.learning_rate = 5e-05$", said.out, re.MULTILINE), said.out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_loads_as_what_it_is(path: Path) -> None:
    if path.name.endswith("_plan.yaml"):
        load_plan(path)
    elif path.name == "trainer_config.yaml":
        assert isinstance(convert(path).recipe, VqaRecipe)
    else:
        assert load_recipe(path).fingerprint


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "sameday", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Train the same model, the same day." in done.stdout, done.stderr
