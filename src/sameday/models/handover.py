"""What makes saved weights usable without this package: the settings they were trained with, and a README with the
lines of Python that load and ask them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sameday.data.questions.encode import Encoder
from sameday.data.questions.turns import IMAGE, Asked, UserTurn
from sameday.models.families.base import Family
from sameday.models.start import ORIGIN, origin_of
from sameday.spec.errors import BadInput
from sameday.spec.vlm import VlmRecipe

IMAGE_SETTINGS, VIDEO_SETTINGS = "preprocessor_config.json", "video_preprocessor_config.json"
WHOLE_SETTINGS = "processor_config.json"
ASKED = "asked"
"""Where `origin.json` has in which layouts the training questions were asked."""

SMALL_FILES = 10_000
"""About how many bytes README, chat template and the other settings take."""

READ_ALIKE = """\
if image.mode.startswith("I"):  # 16 bits of grey
    image = Image.fromarray(((np.asarray(image).astype(np.int64) + 128) // 257).astype(np.uint8))
if image.has_transparency_data:
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
image = image.convert("RGB")
"""
"""What training made of images that are no plain RGB, where Pillow alone would make something else."""


ROUNDED_TO_FP8 = """\
for name, layer in model.named_modules():
    sizes = getattr(layer, "in_features", 1), getattr(layer, "out_features", 1)
    if type(layer) is torch.nn.Linear and name != "lm_head" and not any(size % 16 for size in sizes):
        weight = layer.weight.data.float()
        _, exponent = torch.frexp(weight.abs().amax(1, keepdim=True).clamp_min(2.0**-100) / 448 * (1 - 2.0**-24))
        scale = torch.ldexp(torch.ones_like(weight[:, :1]), exponent)
        layer.weight.data = ((weight / scale).to(torch.float8_e4m3fn).float() * scale).to(torch.bfloat16)
"""
"""What training made of the weights of the base model, where it stores them in fp8."""


def save_settings(folder: Path, family: Family, encoder: Encoder) -> None:
    """Tokenizer, chat template and image processor, as AutoProcessor finds them too: it asks the image settings for
    its own class, and wants settings for videos, of which nothing was trained."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    encoder.tokenizer.save_pretrained(folder)
    encoder.processor.save(folder)
    whole = {"processor_class": PROCESSOR_MAPPING_NAMES[family.model_type]}
    _write(folder / IMAGE_SETTINGS, json.loads((folder / IMAGE_SETTINGS).read_text()) | whole)
    if more := encoder.processor.whole_settings:
        _write(folder / WHOLE_SETTINGS, more | whole)
    if family.video_processor is not None:
        _write(folder / VIDEO_SETTINGS, {"video_processor_type": family.video_processor} | whole)


def save_asked(folder: Path, asked: Asked) -> None:
    """Beside an adapter, for whoever makes another folder of it without the training data."""
    _write(folder / ORIGIN, {**(origin_of(folder, str(folder)) or {}), ASKED: asked.json()})


def asked_of(folder: Path) -> Asked:
    """Of nothing where an earlier release wrote the adapter."""
    told = (origin_of(folder, str(folder)) or {}).get(ASKED)
    try:
        return Asked() if told is None else Asked.from_json(told)
    except (ValueError, TypeError, KeyError):
        raise BadInput(f"{folder}: {ORIGIN} is not what a run wrote") from None


def settings_size(encoder: Encoder) -> int:
    """About how many bytes these files take, with the README: nearly all of them are the tokenizer's."""
    return len(encoder.tokenizer.backend_tokenizer.to_str(pretty=True).encode()) + SMALL_FILES


def save_readme(
    folder: Path,
    family: Family,
    encoder: Encoder,
    recipe: VlmRecipe,
    base: str,
    asked: Asked,
    asking: tuple[str, str] | None = None,
    fingerprint: str | None = None,
) -> None:
    """In place of PEFT's, which says nothing about this adapter. `asked` says in which layouts the training
    questions were. `asking` is Python, imports and lines, that asks a model once it is loaded; None generates one
    answer in the most common of these layouts. `fingerprint` is the run's, where `recipe` is not what was trained but
    what lies in the folder."""
    adapter, processor = recipe.train == "lora", encoder.processor
    where = {"base_model": base, "library_name": "peft" if adapter else "transformers"}
    header = "".join(f"{key}: {json.dumps(value)}\n" for key, value in where.items())
    kind, of = "a LoRA adapter of" if adapter else "the whole of", fingerprint or recipe.fingerprint
    at = "" if recipe.revision is None else f", revision `{recipe.revision}`"
    asking = ("", _generating(family, recipe, asked, encoder)) if asking is None else asking
    lines, layout = _lines(family, encoder, recipe, base, asking), asked.words()
    (folder / "README.md").write_text(
        f"---\n{header}---\n\n# {recipe.name}\n\n"
        f"Trained weights: {kind} `{base}`{at} (recipe {of}). Tokenizer, chat template and image "
        f"settings beside them are those of the training: images of {processor.min_pixels} to {processor.max_pixels} "
        f"pixels, resized by {processor.backend}. With other settings the answers may be worse.{_stored(recipe)}\n\n"
        + (f"{layout}\n\n" if layout else "")
        + f"Run in this folder, with an image beside:\n\n```python\n{lines}```\n",
        encoding="utf-8",
    )


def _stored(recipe: VlmRecipe) -> str:
    if recipe.base_format == "precision":
        return ""
    if recipe.base_format == "nf4":
        return (
            f" The base model's weights were stored as {recipe.base_words} (bitsandbytes); in another format it is "
            "another model, and answers otherwise."
        )
    return (
        " The base model's weights were stored as fp8 (float8_e4m3fn, a power of two as scale of each output channel); "
        "with other weights it is another model, and answers otherwise. The lines below round them so."
    ) + (
        " They compute in bf16 what the training computed in fp8, which is close and not the same; `sameday eval` "
        "computes as the training did."
        if recipe.precision == "bf16"
        else ""
    )


def _loading(source: str, recipe: VlmRecipe) -> str:
    """Lines that load the base model, or the whole one, as the training did."""
    dtype = "torch.bfloat16" if recipe.precision == "bf16" else "torch.float32"
    if recipe.base_format == "precision":
        return f"model = AutoModelForImageTextToText.from_pretrained({source}, dtype={dtype})\n"
    if recipe.base_format == "fp8":
        last = "" if recipe.precision == "bf16" else "model = model.float()\n"
        loaded = f"model = AutoModelForImageTextToText.from_pretrained({source}, dtype=torch.bfloat16)\n"
        return f"{loaded}{ROUNDED_TO_FP8}{last}"
    four_bits = (
        f'BitsAndBytesConfig(\n    load_in_4bit=True, bnb_4bit_quant_type="nf4", '
        f"bnb_4bit_use_double_quant={recipe.double_quant}, bnb_4bit_compute_dtype={dtype}\n)\n"
    )
    loaded = f"{source}, dtype=torch.bfloat16, quantization_config=four_bits, device_map=device"
    lines = f"four_bits = {four_bits}model = AutoModelForImageTextToText.from_pretrained({loaded})\n"
    if recipe.precision != "bf16":  # what is not in four bits is computed in float32 too
        lines += "model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)\n"
    return lines


def _lines(family: Family, encoder: Encoder, recipe: VlmRecipe, base: str, asking: tuple[str, str]) -> str:
    adapter, kind = recipe.train == "lora", encoder.processor.library_class
    four_bits = recipe.base_format == "nf4"
    source = repr(base if adapter else ".")
    if adapter and recipe.revision is not None:
        source += f", revision={recipe.revision!r}"
    peft = "PeftModel" + (", prepare_model_for_kbit_training" if four_bits and recipe.precision != "bf16" else "")
    imports, lines = asking
    return (
        "import numpy as np\nimport torch\n"
        + (f"from peft import {peft}\n" if adapter else "")
        + "from PIL import Image, ImageOps\n"
        f"from transformers import AutoModelForImageTextToText, AutoTokenizer{', BitsAndBytesConfig' * four_bits}\n"
        f"from {kind.__module__} import {kind.__name__}\n{imports}\n"
        f'image, question = ImageOps.exif_transpose(Image.open("image.png")), "What is there?"\n{READ_ALIKE}'
        'device = "cuda" if torch.cuda.is_available() else "cpu"\n'
        + _loading(source, recipe)
        + ('model = PeftModel.from_pretrained(model, ".")\n' if adapter else "")
        + ("model = model.eval()\n" if four_bits else "model = model.to(device).eval()\n")
        + f'tokenizer, processor = AutoTokenizer.from_pretrained("."), {kind.__name__}.from_pretrained(".")\n'
        + lines
    )


def prompt_in_python(family: Family, recipe: VlmRecipe, asked: Asked) -> str:
    """From `image` and `question` to `inputs`."""
    own = recipe.system_prompt if asked.system is None else asked.system
    system = [] if own is None else [{"role": "system", "content": own}]
    chat = "".join(f"{json.dumps(message, ensure_ascii=False)}, " for message in system)
    return (_prompt(recipe) if asked.turn.in_template else "") + (
        f'asked = {{"role": "user", "content": [{_content(asked.turn)}]}}\n'
        f"chat = [{chat}asked]\n"
        "text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)\n"
        f"{family.inputs_in_python()}"
    )


def _content(turn: UserTurn) -> str:
    """In Python: its images and texts, and among them the `question`."""
    before, behind = (json.dumps(text, ensure_ascii=False) if text else "" for text in turn.around)
    question = " + ".join(filter(None, [before, "question", behind]))
    texts = [question if n == turn.at else json.dumps(part, ensure_ascii=False) for n, part in enumerate(turn.parts)]
    return ", ".join(
        '{"type": "image"}' if part == IMAGE else f'{{"type": "text", "text": {text}}}'
        for part, text in zip(turn.parts, texts, strict=True)
    )


def _generating(family: Family, recipe: VlmRecipe, asked: Asked, encoder: Encoder) -> str:
    own = f".rpartition({json.dumps(encoder.opened)})[2].lstrip()" if encoder.opening else ""
    return prompt_in_python(family, recipe, asked) + (
        "answer = model.generate(**inputs.to(device), do_sample=False, max_new_tokens=64)\n"
        f'print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True){own})\n'
    )


def _prompt(recipe: VlmRecipe) -> str:
    """Asked otherwise than it was trained, a model answers worse."""
    prompt = recipe.prompt
    if prompt is None:
        return ""
    chosen = f"  # by {prompt.by}: {prompt.templates!r}" if prompt.by is not None else ""
    return f"question = {prompt.default!r}.format(question=question){chosen}\n"


def _write(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
