"""The tiny models load through transformers' own doors and behave like their large relatives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer
from worlds import FAMILIES

from sameday.data.questions.processor import ImageProcessor
from sameday.demo.tiny import write_model
from sameday.models.families import family_of, known_families

TEXTS = ["What colour is the background?", "Is there a circle?", "yes", "no", "red"]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_model(path, TEXTS, seed=0, family=request.param, sharpen=3.0)
    return path


def chat(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]


def inputs(folder: Path, question: str, size: tuple[int, int], seed: int = 0) -> dict[str, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = ImageProcessor.load(family_of("qwen3_vl"), str(folder))
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    text = tokenizer.apply_chat_template(chat(question), tokenize=False, add_generation_prompt=True)
    text = text.replace("<|image_pad|>", "<|image_pad|>" * processor.tokens(*size))
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    return {
        "input_ids": ids,
        "pixel_values": torch.from_numpy(processor.pixels(Image.fromarray(values))),
        "image_grid_thw": torch.tensor([[1, *processor.grid(*size)]]),
        "mm_token_type_ids": (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int(),
    }


def test_any_text_comes_back_from_its_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in (*TEXTS, "Ünï 漢字 🙂\n\n  two  spaces\t", "12345 don't", "e\u0301", " lead", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("yes")["input_ids"]) == 1
    for token in family_of("qwen3_vl").tiny_tokenizer().special:
        assert tokenizer(f"a{token}b")["input_ids"][1:-1] == [tokenizer.convert_tokens_to_ids(token)]


def test_the_chat_template_is_chatml(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "system", "content": "Be brief."},
        *chat("Red?"),
        {"role": "assistant", "content": "no"},
    ]
    before = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Red?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == before + "no<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True) == before


def test_config_and_tokenizer_agree(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    config = model.config
    for name in ("image_pad", "video_pad", "vision_start", "vision_end"):
        field = {"image_pad": "image_token_id", "video_pad": "video_token_id"}.get(name, f"{name}_token_id")
        assert getattr(config, field) == tokenizer.convert_tokens_to_ids(f"<|{name}|>")
    for settings in (config.text_config, model.generation_config):
        assert settings.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id
        assert settings.pad_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>") == tokenizer.pad_token_id
    assert config.text_config.vocab_size == len(tokenizer)
    assert sum(config.text_config.rope_parameters["mrope_section"]) == 8
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("size", [(28, 28), (96, 96), (200, 120)])
def test_forward_sees_the_image(folder: Path, size: tuple[int, int]) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.no_grad():
        one = model(**inputs(folder, "Is there a circle?", size)).logits[0, -1]
        two = model(**inputs(folder, "Is there a circle?", size, seed=1)).logits[0, -1]
    assert torch.isfinite(one).all()
    assert (one - two).abs().max() > 1e-3


def test_it_generates_and_learns(folder: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder)
    batch = inputs(folder, "Is there a circle?", (32, 32))
    out = model.generate(**batch, max_new_tokens=2, do_sample=False)
    assert out.shape[1] > batch["input_ids"].shape[1]
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    missing = [name for name, weight in model.named_parameters() if weight.grad is None]
    assert missing == []


@pytest.mark.parametrize("family", known_families())
def test_the_seed_decides_and_leaves_the_global_stream_alone(tmp_path: Path, family: Any) -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    for name, seed, sharpen in (("a", 1, 1.0), ("b", 1, 1.0), ("c", 2, 1.0), ("sharp", 1, 3.0)):
        write_model(tmp_path / name, TEXTS, seed, family, sharpen=sharpen)
    assert torch.equal(torch.rand(1), expected)
    a, b, c, sharp = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b", "c", "sharp"))
    assert (tmp_path / "a/tokenizer.json").read_text() == (tmp_path / "b/tokenizer.json").read_text()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)
    tripled = {name for name in a if torch.equal(sharp[name], 3.0 * a[name]) and a[name].any()}
    kinds = {"q_norm", "k_norm"} if family == "qwen3_vl" else {"q_proj", "k_proj"}
    assert {name.split(".")[-2] for name in tripled} == kinds


def test_sizes_can_be_changed(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        TEXTS,
        seed=0,
        text={"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        vision={"depth": 1, "patch_size": 4},
    )
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert model(**inputs(tmp_path, "Red?", (32, 24))).logits.shape[0] == 1
    assert model.config.vision_config.out_hidden_size == 32
    assert list(model.config.vision_config.deepstack_visual_indexes) == [0]


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"family: model type 'blip' is not supported; allowed: .*, qwen2_5_vl, "):
        write_model(tmp_path, TEXTS, seed=0, family="blip")
