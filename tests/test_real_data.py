"""VQA-RAD with the real tokenizer and processor of Qwen3-VL, and a tiny model of the real vocabulary.

The data is not part of this: SAMEDAY_TEST_DATA names a folder with vqa-rad and qwen3-vl-processor."""

from __future__ import annotations

import json
import math
import os
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from sameday.commands.evaluate import Request, evaluate
from sameday.commands.launch import train_from_files
from sameday.data.questions.audit import audit
from sameday.data.questions.processor import ImageProcessor
from sameday.data.questions.sample import Sample, images_of
from sameday.data.questions.wanted import Reader, Wanted
from sameday.models.families import family_of
from sameday.record.folder import read_metrics
from sameday.spec.plan import Plan
from sameday.spec.vqa import VqaRecipe
from sameday.tasks.vqa.fill import Filling
from sameday.tasks.vqa.setup import VqaSetup
from sameday.verify.arm import run_here
from sameday.verify.compare import compare
from sameday.verify.peer import loop
from sameday.verify.peer.differ import Differ
from sameday.verify.peer.run import peer_job
from sameday.verify.trace import Trace
from sameday.verify.trial import make_trial

DATA = Path(os.environ.get("SAMEDAY_TEST_DATA") or "no folder")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all((DATA / name).is_dir() for name in ("vqa-rad", "qwen3-vl-processor")),
        reason="SAMEDAY_TEST_DATA names no folder with vqa-rad/ and qwen3-vl-processor/",
    ),
]
SPLITS = {"train": 1497, "val": 299, "test": 448}
STEPS = 4


@pytest.fixture(scope="module")
def radiology(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The set as a user has it: images unpacked, three question files."""
    folder = tmp_path_factory.mktemp("vqa-rad")
    with tarfile.open(DATA / "vqa-rad/images.tar") as archive:
        archive.extractall(folder, filter="data")
    for split in SPLITS:
        shutil.copy(DATA / f"vqa-rad/{split}.jsonl", folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, two narrow layers; tokens, ids, patches and processor as published."""
    folder = tmp_path_factory.mktemp("model")
    for file in (DATA / "qwen3-vl-processor").iterdir():
        shutil.copy(file, folder)
    token = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids
    text = {
        "vocab_size": 151_936,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 32**-0.5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": 32,
        "patch_size": 16,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 32**-0.5,
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    assert config.image_token_id == 151_655
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def audits(radiology: Path) -> dict[str, list[Sample]]:
    found = {}
    for split, count in SPLITS.items():
        result = audit(radiology / f"{split}.jsonl", radiology / "images", family_of("qwen3_vl"))
        assert result.problems == []
        assert len(result.samples) == count
        found[split] = result.samples
    return found


def test_the_whole_set_is_sound(audits: dict[str, list[Sample]]) -> None:
    assert sum(map(len, audits.values())) == 2_244


def test_images_are_told_apart_by_content(radiology: Path, audits: dict[str, list[Sample]], tmp_path: Path) -> None:
    samples = [sample for split in audits.values() for sample in split]
    assert len({sample.images[0].digest for sample in samples}) == 314
    # Every image under a second name: as many digests, and twins share theirs.
    rows = [json.loads(line) for line in (radiology / "val.jsonl").read_text().splitlines()[:40]]
    (tmp_path / "images").mkdir()
    for row in rows:
        shutil.copy(radiology / "images" / row["image"], tmp_path / "images" / row["image"])
        shutil.copy(radiology / "images" / row["image"], tmp_path / "images" / f"copy-{row['image']}")
    twins = [*rows, *({**row, "image": f"copy-{row['image']}"} for row in rows)]
    (tmp_path / "twins.jsonl").write_text("".join(json.dumps(row) + "\n" for row in twins))
    result = audit(tmp_path / "twins.jsonl", tmp_path / "images", family_of("qwen3_vl"))
    first, second = result.samples[: len(rows)], result.samples[len(rows) :]
    assert result.problems == []
    assert [s.image_key for s in first] == [s.image_key for s in second]
    assert all(a.images[0].path != b.images[0].path for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("most", [20, pytest.param(None, marks=pytest.mark.soak)])
def test_a_cache_has_each_content_once(radiology: Path, model: Path, tmp_path: Path, most: int | None) -> None:
    """As the source had it: a file for each question, one image under up to 13 names; by hand of all images, not of
    some of each split."""
    (tmp_path / "images").mkdir()
    names, contents = set(), set()
    for split in SPLITS:
        rows = [json.loads(line) for line in (radiology / f"{split}.jsonl").read_text().splitlines()]
        some = list(dict.fromkeys(row["image"] for row in rows))[:most]
        contents.update(some)
        rows = [row for row in rows if row["image"] in some]
        for row in rows:
            (tmp_path / "images" / row["source_file"]).hardlink_to(radiology / "images" / row["image"])
            row["image"] = row["source_file"]
            names.add(row["image"])
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(names) == 2_244 if most is None else len(names) > 2 * len(contents)
    data = {split: f"{split}.jsonl" for split in SPLITS} | {"image_root": "images"}
    fields = {"model": str(model), "data": data, "effective_batch": 16, "learning_rate": 1e-4}
    setup = VqaSetup(VqaRecipe.model_validate(fields), tmp_path)
    images = images_of(setup.audit(print, tuple(SPLITS)).splits)
    processor = ImageProcessor.load(family_of("qwen3_vl"), str(model))
    filling = Filling("pixels", processor, images, tmp_path / "cache", print)
    filling.fill(workers=2)
    entries = list((tmp_path / "cache").rglob("*.safetensors"))
    assert len(entries) == len(images) == len(contents) == (3 * most if most else 314)
    patches = sum(math.prod(processor.grid(image.width, image.height)) for image in images)
    values = patches * 3 * 2 * processor.patch_size**2 * 4
    whole = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file())
    print(f"{whole / len(entries) / 1e6:.2f} MB per image, {whole / values:.4f} of float32 pixel_values")
    assert whole <= 0.13 * values
    assert filling.check()


def train(radiology: Path, model: Path, name: str, plan: dict[str, Any]) -> tuple[dict[str, float], Path]:
    for split, images in (("train", 4), ("val", 2)):
        lines = (radiology / f"{split}.jsonl").read_text().splitlines()
        first = list(dict.fromkeys(json.loads(line)["image"] for line in lines))[:images]
        some = [line for line in lines if json.loads(line)["image"] in first]
        (radiology / f"{split}-first.jsonl").write_text("\n".join(some))
    recipe = {
        "name": "radiology",
        "model": str(model),
        "precision": "float32",
        "data": {"train": "train-first.jsonl", "val": "val-first.jsonl", "image_root": "images"},
        "min_pixels": 64 * 64,
        "max_pixels": 256 * 256,
        "order": "by_image",
        "effective_batch": 12,
        "learning_rate": 5e-3,
        "max_steps": STEPS,
        "lora": {"r": 4, "alpha": 8},
    }
    (radiology / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (radiology / f"{name}.yaml").write_text(yaml.safe_dump(plan))
    run = radiology / f"run-{name}"
    return train_from_files(radiology / "recipe.yaml", radiology / f"{name}.yaml", run, []), run


def test_both_layouts_train_the_same_model(radiology: Path, model: Path) -> None:
    plain, one = train(radiology, model, "plain", {"log_steps": 1})
    shared = {"share_images": True, "packing": True, "max_questions": None, "label_only_logits": True}
    packed, other = train(radiology, model, "shared", {"log_steps": 1, "token_budget": 2048} | shared)

    curves = [[m["loss"] for m in read_metrics(run / "metrics.jsonl") if "split" not in m] for run in (one, other)]
    assert len(curves[0]) == STEPS
    assert curves[1] == pytest.approx(curves[0], abs=1e-4)
    assert curves[0][-1] != pytest.approx(curves[0][0], abs=1e-2)

    first, second = (load_file(run / "adapter/adapter_model.safetensors") for run in (one, other))
    assert first.keys() == second.keys()
    for key in first:
        torch.testing.assert_close(second[key], first[key], atol=1e-4, rtol=1e-3, msg=key)

    assert plain["samples"] == packed["samples"] > 4
    assert 0 <= packed["exact_match"] <= 1 and packed["exact_match"] == plain["exact_match"]
    assert packed["loss"] == pytest.approx(plain["loss"], abs=1e-4)
    assert evaluate(Request(other, "val", scores_only=True)) == pytest.approx(packed)


def test_closed_questions_alone(radiology: Path) -> None:
    """By the key that the file has, and as the type that is read from it."""
    rows = [json.loads(line) for line in (radiology / "val.jsonl").read_text().splitlines()]
    closed = sum(row["answer_type"] == "closed" for row in rows)
    for name in ("type", "answer_type"):
        reader = Reader(radiology / "val.jsonl", "val.jsonl", Wanted({name: ("closed",)}))
        assert {question.raw.type for question in reader if question.raw is not None} == {"closed"}
        assert reader.tally.told() == f"{closed} of 299 questions: where {name} is closed"
        assert 0 < closed < len(rows)


@pytest.mark.skipif(not (DATA / "kvasir-vqa").is_dir(), reason="SAMEDAY_TEST_DATA has no kvasir-vqa/")
def test_stages_of_the_experiments() -> None:
    told = []
    for stage in ("1", "2", "3"):
        reader = Reader(DATA / "kvasir-vqa/val.jsonl", "val.jsonl", Wanted({"stage": (stage,)}))
        told.append((sum(1 for _ in reader), reader.tally.told()))
    assert sum(count for count, _ in told) == 8786
    assert told[2] == (11, "11 of 8,786 questions: where stage is 3")


def test_a_plain_loop_of_transformers_trains_the_same(radiology: Path, model: Path, tmp_path: Path) -> None:
    """Real template, real line breaks, real photographs: told to the token and the pixel."""
    made = VqaRecipe.model_validate(
        {
            "model": str(model),
            "precision": "float32",
            "data": {"train": "train.jsonl", "image_root": "images"},
            "order": "by_image",
            "effective_batch": 4,
            "max_pixels": 256 * 256,
            "min_pixels": 64 * 64,
            "learning_rate": 1e-3,
        }
    )
    plan = Plan(share_images=True, packing=True, max_questions=None, device="cpu")
    job = replace(make_trial(made, 4).job(plan, radiology, tmp_path / "plan"), peer=True, dies_in=None)
    run_here(job)
    loop.run(peer_job(job, VqaSetup(made, radiology).plain_settings(), tmp_path / "peer"))
    decode = AutoTokenizer.from_pretrained(model).decode
    found = compare(Trace(job.out), Trace(tmp_path / "peer"), differ=Differ(decode))
    assert found.same, list(map(str, found.differences))
    assert found.worst["gradient"] < 1e-5
