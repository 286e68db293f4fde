"""What a run saves is read by the libraries alone, and answers as it did in training."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from trained import Finished, trained
from transformers import AutoModelForImageTextToText
from worlds import FAMILIES, draw_image, lines_of, make_task, tiny_recipe, write_world

from sameday.data.questions.images import open_rgb
from sameday.models.handover import READ_ALIKE
from sameday.record import checkpoint, room
from sameday.spec.plan import Plan
from sameday.tasks.vqa.task import VqaTask
from sameday.train import state


@pytest.fixture(scope="module", params=FAMILIES)
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path]
) -> Finished:
    return trained(tmp_path_factory.mktemp(request.param), tiny_models[request.param])


@torch.no_grad()
def ours(task: VqaTask, number: int) -> torch.Tensor:
    """Logits of every token of a validation question, through our own forward pass."""
    encoded = task._encode(task.splits["val"][number])
    [[part]] = task._partition([encoded], task._cut(None), 1)
    batch = task._build([encoded], part)
    return task.model.logits(task.model.hidden(batch), torch.arange(encoded.length))


@torch.no_grad()
def theirs(model: Any, task: VqaTask, number: int) -> torch.Tensor:
    """The same through the library's own door: tokens, pixels and grids, as its processor would give them."""
    encoded = task._encode(task.splits["val"][number])
    tokens = torch.from_numpy(encoded.tokens)[None]
    [image] = encoded.sample.images
    return (
        model.eval()(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            pixel_values=torch.from_numpy(task.processor.pixels(open_rgb(image.path))),
            image_grid_thw=torch.tensor([(1, *encoded.grids[0])]),
            mm_token_type_ids=(tokens == task.encoder.image_token).int(),
        )
        .logits[0]
        .float()
    )


def base(model: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)


@pytest.mark.parametrize("name", ["adapter", "checkpoints/step-000002", "checkpoints/step-000004"])
def test_peft_loads_what_was_saved_and_answers_the_same(finished: Finished, name: str) -> None:
    task = finished.task()
    before = ours(task, 0)
    task.restore(finished.run / name)
    library = PeftModel.from_pretrained(base(finished.model), str(finished.run / name))
    for number in (0, len(task.splits["val"]) - 1):
        mine = ours(task, number)
        torch.testing.assert_close(theirs(library, task, number), mine, atol=1e-5, rtol=1e-5)
    assert (ours(task, 0) - before).abs().max() > 0.01, "training moved nothing"


def test_checkpoints_differ_and_the_last_is_the_adapter(finished: Finished) -> None:
    def weights(name: str) -> dict[str, torch.Tensor]:
        return load_file(finished.run / name / "adapter_model.safetensors")

    early, late, final = map(weights, ("checkpoints/step-000002", "checkpoints/step-000004", "adapter"))
    assert all(torch.equal(late[key], final[key]) for key in final)
    assert any(not torch.equal(early[key], final[key]) for key in final)
    assert all(value.dtype == torch.float32 for value in final.values())


def test_the_adapter_names_its_base(finished: Finished) -> None:
    config = json.loads((finished.run / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(finished.model)
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (2, 4, "LORA")
    assert sorted(config["target_modules"]) == ["k_proj", "o_proj", "q_proj", "v_proj"]


# Handed over


SMALL = 48 * 48
"""Pixels that images were reduced to; the base model takes more."""


@pytest.fixture(scope="module", params=[(family, "lora") for family in FAMILIES] + [("qwen3_vl", "all")], ids="-".join)
def handed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path]
) -> Finished:
    family, train = request.param
    folder = tmp_path_factory.mktemp(f"handed-{family}-{train}")
    rate = 0.05 if train == "lora" else 1e-3
    changes = {"train": train, "max_pixels": SMALL, "system_prompt": 'say "yes"', "learning_rate": rate}
    changes |= {"prompt": "so 'short' {{as}} can be:\n{question}"} if family == "qwen3_vl" else {}
    return trained(folder, tiny_models[family], **changes)


@pytest.mark.parametrize("name", ["result", "checkpoints/step-000002"])
def test_the_readme_beside_weights_loads_and_asks_them(
    handed: Finished, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its lines alone, in the folder alone, about an image that is larger than max_pixels: the logits of evaluation."""
    folder = handed.run / (handed.recipe.result if name == "result" else name)
    assert checkpoint.fault(folder) is None and (folder / "README.md").is_file()
    shutil.copytree(folder, tmp_path / "moved")
    draw_image(handed.folder / "images/large.png", random.Random(1), (120, 112))
    row = {"image": "large.png", "question": "What is there?", "answer": "yes"}
    for split in ("train", "val"):
        (handed.folder / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    task = handed.task()
    task.restore(folder)
    encoded = task._encode(task.splits["val"][0])
    assert 120 * 112 > SMALL >= 64 * encoded.grids[0][0] * encoded.grids[0][1]

    shutil.copy(handed.folder / "images/large.png", tmp_path / "moved/image.png")
    monkeypatch.chdir(tmp_path / "moved")
    held: dict[str, Any] = {}
    exec(lines_of(Path("README.md")), held)
    inputs, model = held["inputs"].to("cpu"), held["model"].cpu()
    asked = inputs["input_ids"].shape[1]
    assert inputs["input_ids"][0].tolist() == encoded.tokens[:asked].tolist() and encoded.targets[asked]
    with torch.no_grad():
        logits = model(**inputs).logits[0].float()
    mine = ours(task, 0)[:asked]
    torch.testing.assert_close(logits, mine, atol=1e-5, rtol=1e-5)
    answer = held["answer"][0, asked:]
    assert answer[0] == mine[-1].argmax()
    assert capsys.readouterr().out.strip("\n") == held["tokenizer"].decode(answer, skip_special_tokens=True).strip("\n")


def test_the_readme_reads_images_as_the_training_did(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 256, (6, 5, 4), dtype=np.uint8)
    kinds = {
        "plain.png": Image.fromarray(colours[..., :3]),
        "alpha.png": Image.fromarray(colours),
        "grey and alpha.png": Image.fromarray(colours[..., :2]),
        "palette.gif": Image.fromarray(colours[..., :3]).quantize(8),
        "16 bit.png": Image.fromarray(rng.integers(0, 65536, (6, 5), dtype=np.uint16)),
        "grey.png": Image.fromarray(colours[..., 0]),
        "print.jpg": Image.fromarray(colours, "CMYK"),
    }
    for name, image in kinds.items():
        image.save(tmp_path / name)
        held: dict[str, Any] = {"Image": Image, "np": np, "image": Image.open(tmp_path / name)}
        exec(READ_ALIKE, held)
        assert held["image"].tobytes() == open_rgb(tmp_path / name).tobytes(), name


def test_auto_processor_finds_the_settings_beside_an_adapter(handed: Finished) -> None:
    pytest.importorskip("torchvision")
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(handed.run / handed.recipe.result)
    assert processor.image_processor.size["longest_edge"] == SMALL
    assert processor.tokenizer.chat_template == handed.task().encoder.tokenizer.chat_template


def test_the_settings_of_adapters_are_the_same_bytes_in_each_process(tmp_path: Path, tiny_qwen3: Path) -> None:
    """PEFT keeps the names of layers as a set, whose order is another wherever Python hashes texts otherwise."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = {"r": 2, "alpha": 4, "target_modules": names}
    task = make_task(write_world(tmp_path, 3, counts=(3, 2), hard=False), tiny_recipe(tiny_qwen3, lora=lora), Plan())
    task.model.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "adapter_config.json").read_text())["target_modules"] == sorted(names)


def test_new_adapters_are_a_function_of_the_seed(finished: Finished) -> None:
    def start(**changes: Any) -> dict[str, torch.Tensor]:
        recipe = finished.recipe.model_copy(update=changes)
        return {k: p.detach() for k, p in make_task(finished.folder, recipe, Plan()).trained().items()}

    torch.manual_seed(1)
    first = start(seed=3)
    torch.manual_seed(2)  # whatever the streams of random numbers are at
    again, other = start(seed=3), start(seed=4)
    assert all(torch.equal(first[key], again[key]) for key in first)
    for key in first:
        assert torch.equal(first[key], other[key]) == (".lora_B." in key), key
        assert bool(first[key].any()) == (".lora_A." in key), key
    drawn = [value for key, value in first.items() if ".lora_A." in key]
    assert len({tuple(value.flatten()[:4].tolist()) for value in drawn}) == len(drawn), "layers start alike"


def test_start_adapter_is_where_training_starts(finished: Finished) -> None:
    recipe = finished.recipe.model_copy(update={"start_adapter": "run/adapter"})
    task = make_task(finished.folder, recipe, Plan())
    task.training(False)
    done = finished.task()
    done.restore(finished.run / "adapter")
    started, ended = task.trained(), done.trained()
    assert started.keys() == ended.keys()
    assert all(torch.equal(started[key], ended[key]) for key in ended)
    assert torch.equal(ours(task, 0), ours(done, 0))


def test_a_run_from_start_adapter_continues_it(finished: Finished, tmp_path: Path) -> None:
    """At a learning rate that moves nothing what comes out is what went in."""
    start = str(finished.run / "adapter")
    after = trained(tmp_path, finished.model, start_adapter=start, learning_rate=1e-30, max_steps=1)
    there = load_file(finished.run / "adapter/adapter_model.safetensors")
    here = load_file(after.run / "adapter/adapter_model.safetensors")
    assert there.keys() == here.keys()
    assert all(torch.equal(there[key], here[key]) for key in there)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_language_model_alone_can_be_named(family: str, tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    """The tower of Qwen2.5-VL has a gate_proj too: the saved pattern must mean the same layers to PEFT."""
    lora = {"r": 2, "alpha": 4, "target_modules": ["language_model.gate_proj", "q_proj"]}
    after = trained(tmp_path, tiny_models[family], lora=lora, max_steps=2)
    names = list(load_file(after.run / "adapter/adapter_model.safetensors"))
    assert {name.split(".lora_")[0].split(".")[-1] for name in names} == {"gate_proj", "q_proj"}
    assert all(".language_model." in name for name in names)
    task = after.task()
    task.restore(after.run / "adapter")
    library = PeftModel.from_pretrained(base(after.model), str(after.run / "adapter"))
    torch.testing.assert_close(theirs(library, task, 0), ours(task, 0), atol=1e-5, rtol=1e-5)
    # And such an adapter can be continued.
    make_task(tmp_path, after.recipe.model_copy(update={"start_adapter": "run/adapter"}), Plan())


@pytest.fixture(scope="module", params=FAMILIES)
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path]
) -> Finished:
    folder = tmp_path_factory.mktemp(f"whole-{request.param}")
    return trained(folder, tiny_models[request.param], train="all", learning_rate=1e-3, max_steps=2)


@pytest.mark.parametrize("name", ["model", "checkpoints/step-000002"])
def test_a_whole_model_is_saved_as_one(whole: Finished, name: str) -> None:
    task = whole.task()
    before = ours(task, 0)
    assert "sameday" not in (whole.run / name / "config.json").read_text(), "nobody else knows our kernel"
    library = base(whole.run / name)
    task.model.module.load_state_dict(library.state_dict())
    torch.testing.assert_close(theirs(library, task, 0), ours(task, 0), atol=1e-5, rtol=1e-5)
    assert (ours(task, 0) - before).abs().max() > 0.01, "training moved nothing"


def test_a_whole_model_is_taken_back_to_the_bit(whole: Finished) -> None:
    task = whole.task()
    task.restore(whole.run / "model")
    there, here = base(whole.run / "model").state_dict(), task.model.module.state_dict()
    assert there.keys() == here.keys()
    assert all(torch.equal(there[key], here[key]) for key in there)


def test_room_is_asked_for_all_files_of_a_first_checkpoint(
    tmp_path: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer beside small weights is most of it."""
    asked: dict[str, int] = {}

    def room_for(what: str, folder: Path, size: int, then: str) -> Any:
        asked[what] = size
        return room.room_for(what, folder, size, then)

    monkeypatch.setattr(state, "room_for", room_for)
    run = trained(tmp_path, tiny_qwen3, max_steps=2).run
    for what, folder in (
        ("checkpoint step-000002", run / "checkpoints/step-000002"),
        ("the finished adapter", run / "adapter"),
    ):
        size, weights = checkpoint.size(folder), sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        assert size > 1.2 * weights, "too little lies beside the weights to tell"
        assert asked[what] == pytest.approx(checkpoint.size_on_disk(folder), rel=0.25), what
