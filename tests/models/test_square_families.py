"""Families whose images are squares of one size: what is trained, saved, asked and refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from typed import sameday
from worlds import OF_THE_DECODER, SQUARE, lines_of, make_task, tiny_recipe, write_tiny, write_world

from sameday.commands.launch import train_from_files
from sameday.data.questions.encode import Encoder
from sameday.data.questions.images import open_rgb
from sameday.data.questions.processor import ImageProcessor
from sameday.data.questions.sample import ImageRef, Message, Sample
from sameday.hardware.machine import detect_machine
from sameday.models.families import family_of
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.tasks.vqa.automatic import attention_kernel
from sameday.tasks.vqa.problems import Decoder
from sameday.tasks.vqa.setup import VqaSetup
from sameday.verify.peer import loop

PLAN = {"device": "cpu", "share_images": True, "packing": True, "max_questions": None, "cache": "features"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("home"), 11, counts=(4, 3), hard=False)


# Images


@pytest.mark.parametrize("family", SQUARE)
def test_an_image_of_any_size_is_what_the_librarys_processor_makes_of_it(
    tiny_models: dict[str, Path], family: str
) -> None:
    processor = ImageProcessor.load(family_of(family), str(tiny_models[family]))
    rng, side = np.random.default_rng(0), processor.patch_size * processor.grid(1, 1)[0]
    for width, height in ((30, 70), (100, 41), (side, side), (1, 9), (200, 200)):
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        (whole,) = processor._processor(images=[image], return_tensors="pt")["pixel_values"]
        assert whole.shape == (3, side, side) and processor.resized(image).shape == (side, side, 3)
        table = processor.byte_table
        looked_up = table[np.arange(3)[:, None, None], processor.resized(image).transpose(2, 0, 1)]
        assert torch.equal(torch.from_numpy(looked_up), whole)
        assert processor.tokens(width, height) * processor.merge_size**2 == len(processor.pixels(image))
    assert processor.min_pixels == processor.max_pixels == side**2


# A run, end to end


def as_on_the_hub(model: Path, folder: Path) -> Path:
    """With the names that tensors of the tower have in files of earlier releases."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    old = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in tensors.items()}
    assert old.keys() != tensors.keys()
    save_file(old, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("family", SQUARE)
def test_a_run_is_trained_cached_saved_merged_and_asked_by_its_readme(
    tiny_models: dict[str, Path], family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForImageTextToText

    write_world(tmp_path, 11, counts=(4, 3), hard=False)
    lora = {"r": 2, "alpha": 4, "target_modules": OF_THE_DECODER}
    model = as_on_the_hub(tiny_models[family], tmp_path / "model")
    recipe = tiny_recipe(model, effective_batch=4, learning_rate=0.05, max_steps=2, lora=lora)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(PLAN | {"cache_dir": "cache"}))
    train_from_files(tmp_path / "recipe.yaml", tmp_path / "plan.yaml", tmp_path / "run", [])
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]

    task = make_task(tmp_path, recipe, Plan(device="cpu"))
    task.training(False)
    before = logits(task, 0)
    task.restore(tmp_path / "run/adapter")
    mine = logits(task, 0)
    assert (mine - before).abs().max() > 0.01, "training moved nothing"
    encoded = task._encode(task.splits["val"][0])
    shutil.copytree(tmp_path / "run/adapter", tmp_path / "moved")
    shutil.copy(encoded.sample.images[0].path, tmp_path / "moved/image.png")
    monkeypatch.chdir(tmp_path / "moved")
    question = str(encoded.sample.messages[0].parts[-1])
    held: dict[str, Any] = {}
    exec(lines_of(Path("README.md")).replace('"What is there?"', repr(question)), held)
    inputs, asked = held["inputs"].to("cpu"), held["inputs"]["input_ids"].shape[1]
    assert inputs["input_ids"][0].tolist() == encoded.tokens[:asked].tolist() and encoded.targets[asked]
    with torch.no_grad():
        found = held["model"].cpu()(**inputs).logits[0].float()
    torch.testing.assert_close(found, mine[:asked], atol=1e-5, rtol=1e-5)
    assert held["answer"][0, asked] == mine[asked - 1].argmax()

    said = sameday(tmp_path, "merge", "run", "-o", "whole")
    assert said.code == 0 and "of them changed by the adapter" in said.out, said.err
    whole, told = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    # In float64 what is left between the two is that merged weights are rounded once.
    inputs["pixel_values"] = inputs["pixel_values"].double()
    written = load_file(tmp_path / "whole/model.safetensors")
    begins = {".".join(name.split(".")[:2]) for name in written if not name.startswith("lm_head.")}
    assert begins == {"model.language_model", "model.vision_tower", "model.multi_modal_projector"}
    with torch.no_grad():
        merged, apart = (model.eval().double()(**inputs).logits[0] for model in (whole, held["model"]))
    torch.testing.assert_close(merged, apart, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def logits(task: Any, number: int) -> torch.Tensor:
    encoded = task._encode(task.splits["val"][number])
    [[part]] = task._partition([encoded], task._cut(None), 1)
    return task.model.logits(task.model.hidden(task._build([encoded], part)), torch.arange(encoded.length))


# LLaVA-1.5


def asked(*texts: str, images: int = 1) -> Sample:
    """A conversation of questions and answers in turn, the first of them about images."""
    messages = [
        Message(("user", "assistant")[n % 2], (*range(images if n == 0 else 0), text)) for n, text in enumerate(texts)
    ]
    refs = tuple(ImageRef(Path("a.png"), 60, 40, "a", (0, 0)) for _ in range(images))
    return Sample(1, "train.jsonl:1", refs, tuple(messages))


@pytest.fixture(scope="module")
def llava(tiny_models: dict[str, Path]) -> Encoder:
    return encoder_of(tiny_models["llava"])


def encoder_of(folder: Path, tokenizer: Any = None, **more: Any) -> Encoder:
    from transformers import AutoTokenizer

    processor = ImageProcessor.load(family_of("llava"), str(folder))
    return Encoder(tokenizer or AutoTokenizer.from_pretrained(folder), processor, **more)


def test_answers_end_though_the_chat_template_does_not_end_them(llava: Encoder) -> None:
    encoded = llava.encode(asked("is it red?", "yes", "and now?", "no"))
    text = llava.tokenizer.decode(encoded.tokens).replace("<image>" * 36, "<image>")
    assert text == "<s>USER: <image>\nis it red? ASSISTANT: yes</s> USER: and now? ASSISTANT: no</s>"
    learned = llava.tokenizer.decode(encoded.tokens[encoded.targets])
    assert learned == " yes</s> no</s>" and encoded.tokens[-1] == llava.end_token
    assert llava.note == "the model's chat template does not end answers: </s> is put behind each, and learned"
    assert (
        llava.prompt(asked("is it red?", "yes")).tokens.tolist()
        == encoded.tokens[: int(encoded.targets.argmax())].tolist()
    )


def test_a_long_question_is_cut_before_what_asks_for_the_answer(tiny_models: dict[str, Path]) -> None:
    short = encoder_of(tiny_models["llava"], max_length=60)
    encoded = short.encode(asked("is there a red polyp near the left wall " * 4, "yes"))
    assert encoded.length == 60 and encoded.target_count == 1
    text = short.tokenizer.decode(encoded.tokens)
    assert text.endswith(" ASSISTANT: ") and "<image>\nis there a red" in text


def like_the_real_one(folder: Path) -> Any:
    """A tokenizer of the kind that LLaVA-1.5 has: pieces of words that begin with their space, bytes for the rest."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaTokenizer
    from worlds import WORDS

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    words.train_from_iterator([" ".join(WORDS)] * 2, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    made = json.loads(words.to_str())["model"]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
    vocab = {token: n for n, token in enumerate([*first, *sorted(made["vocab"], key=made["vocab"].get)])}
    tokenizer = LlamaTokenizer(vocab=vocab, merges=[tuple(pair) for pair in made["merges"]], add_bos_token=True)
    tokenizer.add_special_tokens({"pad_token": "<pad>", "additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = family_of("llava").tiny_tokenizer().chat_template
    write_tiny(folder, "llava", tokenizer=tokenizer)
    return tokenizer


def test_pieces_of_a_conversation_have_the_tokens_of_the_whole(tmp_path: Path) -> None:
    """Sentencepiece puts a space before a text, and only before the first of its pieces."""
    encoder = encoder_of(tmp_path / "llava", like_the_real_one(tmp_path / "llava"))
    assert encoder.tokenizer.bos_token_id == encoder._begin[0]
    Image.new("RGB", (60, 40)).save(tmp_path / "a.png")
    job = {"model": str(tmp_path / "llava"), "revision": None, "min_pixels": None, "max_pixels": None}
    job |= {"image_backend": "pil", "system_prompt": None, "answer_end": "end_token", "max_length": None}
    processor = loop.load_processor(job)
    for texts in (["is it red?", "yes"], ["is it red?", "a polyp", "and now?", "no"], ["Ünï?", "two  spaces"]):
        encoded = encoder.encode(asked(*texts))
        content = [[{"type": "text", "text": text}] for text in texts]
        content[0].insert(0, {"type": "image"})
        messages = [{"role": ("user", "assistant")[n % 2], "content": each} for n, each in enumerate(content)]
        question = {"images": [str(tmp_path / "a.png")], "messages": messages}
        theirs = loop.prepare(processor, question, job | {"closing": encoder.closing})
        assert theirs["input_ids"][0].tolist() == encoded.tokens.tolist(), texts
        assert (theirs["labels"][0] != loop.IGNORED).tolist() == encoded.targets.tolist(), texts


VARIANTS: dict[str, dict[str, Any]] = {
    "mistral": {"text": {"model_type": "mistral", "head_dim": 24}},
    "mistral with a window": {"text": {"model_type": "mistral", "sliding_window": 9}},
    "two blocks": {"layers": [-2, 1]},
    "the last block": {"layers": -1},
}


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_other_decoders_and_blocks_of_the_tower_give_the_librarys_logits(
    home: Path, tmp_path: Path, variant: str
) -> None:
    from transformers import AutoModelForImageTextToText, LlavaConfig, LlavaForConditionalGeneration

    folder = write_tiny(tmp_path / "llava", "llava", text=VARIANTS[variant].get("text", {}))
    if layers := VARIANTS[variant].get("layers"):
        config = LlavaConfig.from_pretrained(folder)
        config.vision_feature_layer = layers
        LlavaForConditionalGeneration(config).save_pretrained(folder)
    task = make_task(home, tiny_recipe(folder), Plan(device="cpu"))
    task.training(False)
    encoded = task._encode(task.splits["val"][0])
    image = open_rgb(encoded.sample.images[0].path)
    pixels = task.processor._processor(images=[image], return_tensors="pt")["pixel_values"]
    library = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    theirs = library(input_ids=torch.from_numpy(encoded.tokens)[None], pixel_values=pixels).logits[0]
    torch.testing.assert_close(logits(task, 0), theirs, atol=1e-5, rtol=1e-5)


# What is refused


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a decoder": (
        "llava",
        {"text_config": {"model_type": "qwen2"}},
        "this model's decoder is of type 'qwen2'; allowed with a model of type llava: llama, mistral",
    ),
    "a tower": (
        "llava",
        {"vision_config": {"model_type": "siglip_vision_model"}},
        "this model's vision tower is of type 'siglip_vision_model'; allowed: clip_vision_model",
    ),
    "a class token": (
        "llava",
        {"vision_feature_select_strategy": "full"},
        "vision_feature_select_strategy 'full' in the model's config: only 'default', which leaves the class token "
        "out, is supported",
    ),
    "a block": (
        "llava",
        {"vision_feature_layer": -9},
        "vision_feature_layer -9 in the model's config: the tower has 4 states",
    ),
    "a soft cap": (
        "gemma3",
        {"text_config": {"final_logit_softcapping": 30.0}},
        "final_logit_softcapping 30.0 in the model's config: transformers leaves it out of models with images, and "
        "only null is supported",
    ),
    "both directions": (
        "gemma3",
        {"text_config": {"use_bidirectional_attention": True}},
        "use_bidirectional_attention in the model's config: a decoder that answers sees only before",
    ),
    "dropout": (
        "gemma3",
        {"vision_config": {"attention_dropout": 0.1}},
        "attention_dropout 0.1 in the tower's config: only 0 is supported",
    ),
    "blocks of patches": (
        "gemma3",
        {"mm_tokens_per_image": 9},
        "mm_tokens_per_image 9 in the model's config: 8×8 patches cannot be averaged to a square of so many",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_would_be_another_is_refused_by_name(tiny_models: dict[str, Path], what: str) -> None:
    from transformers import CONFIG_MAPPING

    family, changes, sentence = REFUSED[what]
    written = json.loads((tiny_models[family] / "config.json").read_text())
    for key, value in changes.items():
        written[key] = written[key] | value if isinstance(value, dict) else value
    with pytest.raises(BadInput) as refused:
        family_of(family).check_supported(CONFIG_MAPPING[family](**written))
    assert str(refused.value) == sentence


IMAGES: dict[str, tuple[str, dict[str, Any], str]] = {
    "pan and scan": (
        "gemma3",
        {"do_pan_and_scan": True},
        "its image settings cut an image into several (do_pan_and_scan), which is not supported; allowed: "
        "do_pan_and_scan false",
    ),
    "another size": (
        "llava",
        {"crop_size": {"height": 32, "width": 40}},
        "its image settings make 40×32 pixels of an image, and its vision tower takes 48×48",
    ),
}


@pytest.mark.parametrize("what", IMAGES)
def test_image_settings_that_do_not_fit_are_refused(tiny_models: dict[str, Path], tmp_path: Path, what: str) -> None:
    family, changes, sentence = IMAGES[what]
    folder = shutil.copytree(tiny_models[family], tmp_path / family)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(BadInput) as refused:
        ImageProcessor.load(family_of(family), str(folder))
    assert str(refused.value) == f"model {str(folder)!r}: {sentence}"


SPLITS = (
    "plan.attention split: split attention cannot follow this model's layers, of which some see a window or images in "
    "both directions; allowed: auto, sdpa, flex"
)


def test_split_attention_is_refused_where_layers_see_otherwise(tiny_models: dict[str, Path], home: Path) -> None:
    asked = Plan(device="cpu", share_images=True, packing=True, max_questions=None, attention="split")
    with pytest.raises(BadInput) as refused:
        VqaSetup(tiny_recipe(tiny_models["gemma3"]), home).resolve_auto(asked, detect_machine("cpu"))
    assert str(refused.value) == SPLITS
    open_choice = asked.model_copy(update={"attention": "auto"})
    gpu = replace(detect_machine("cpu"), device="cuda", triton=True, capability=(9, 0))
    chosen = attention_kernel(open_choice, gpu, "bf16", lambda: Decoder(splits=False))
    assert chosen == ("flex", f"there is a GPU with Triton, and {SPLITS.split(': ')[1].split(';')[0]}")


@pytest.fixture
def typed(home: Path, tiny_models: dict[str, Path]) -> Iterator[Path]:
    path = home / "recipe.yaml"
    lora = {"r": 2, "alpha": 4, "target_modules": ["q_proj"]}
    recipe = tiny_recipe(tiny_models["llava"], lora=lora, max_pixels=4096)
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    yield path
    path.unlink()


def test_other_sizes_of_images_are_refused_before_anything_is_written(typed: Path, home: Path) -> None:
    before = sorted(home.rglob("*"))
    said = sameday(home, "train", "recipe.yaml", "--out", "run", "--set", "plan.device=cpu")
    sentence = "recipe.max_pixels is 4096: models of type llava take every image at 48×48 pixels; remove it"
    assert said.code == 2 and sentence in said.err, said.err
    assert sorted(home.rglob("*")) == before
