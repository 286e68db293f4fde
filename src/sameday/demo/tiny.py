"""A Qwen-VL small enough for a laptop, made on the spot: real architecture and files, random weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- else -%}
{{- raise_exception('a part is of type image or text, not ' + part['type']) -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def write_model(
    folder: Path,
    texts: Iterable[str],
    seed: int,
    family: Literal["qwen3_vl", "qwen2_5_vl"] = "qwen3_vl",
    *,
    sharpen: float = 1.0,
    vocab_size: int = 512,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Save model, tokenizer and image processor settings into `folder`, from where transformers loads them.

    `text` and `vision` replace entries of the two configurations. `sharpen` multiplies queries and keys, so
    that attention is far from uniform and a wrong position or mask shows. `device` is where the weights are
    drawn: a large model wants a GPU.
    """
    if family not in ("qwen3_vl", "qwen2_5_vl"):
        raise ValueError(f"family {family!r} is unknown; known are qwen3_vl, qwen2_5_vl")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(texts, vocab_size)
    tokenizer.save_pretrained(folder)
    config = _config(family, tokenizer, dict(text or {}), dict(vision or {}))
    _processor(config.vision_config).save_pretrained(folder)
    with torch.random.fork_rng(devices=[] if device == "cpu" else None):
        torch.manual_seed(seed)
        model_class = Qwen3VLForConditionalGeneration if family == "qwen3_vl" else Qwen2_5_VLForConditionalGeneration
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = model_class(config).to(dtype)
        torch.set_default_dtype(before)
    _sharpen(model, sharpen)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)


def _tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: whole words where `texts` has them, bytes elsewhere, so that any text has tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[token for token in SPECIAL if token not in ("<|im_end|>", "<|endoftext|>")],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _config(family: str, tokenizer: PreTrainedTokenizerFast, text: dict[str, Any], vision: dict[str, Any]) -> Any:
    token = tokenizer.convert_tokens_to_ids
    special = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    text = {**_TEXT, "vocab_size": len(tokenizer), **special, **text}
    vision = {**_VISION, "out_hidden_size": text["hidden_size"], **vision}
    # The usual 0.02 is for widths in the thousands; at this one it would leave the signal near zero.
    text.setdefault("initializer_range", text["hidden_size"] ** -0.5)
    vision.setdefault("initializer_range", vision["hidden_size"] ** -0.5)
    head_dim = text["hidden_size"] // text["num_attention_heads"]
    if family == "qwen3_vl":
        head_dim = text.setdefault("head_dim", head_dim)
        vision.setdefault("num_position_embeddings", 256)
        vision.setdefault("deepstack_visual_indexes", list(range(min(2, vision["depth"]))))
    else:
        text.setdefault("use_sliding_window", False)
        vision.setdefault("window_size", 4 * vision["patch_size"])
        vision.setdefault("fullatt_block_indexes", [vision["depth"] - 1])
    quarter = head_dim // 8
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    rope["mrope_section"] = [head_dim // 2 - 2 * quarter, quarter, quarter]
    if family == "qwen3_vl":
        rope["mrope_interleaved"] = True
    text.setdefault("rope_parameters", rope)
    config_class = Qwen3VLConfig if family == "qwen3_vl" else Qwen2_5_VLConfig
    return config_class(
        text_config=text,
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=False,
        dtype="float32",
    )


def _processor(vision: Any) -> Qwen2VLImageProcessorPil:
    # A size of its own: given min_pixels and max_pixels instead, the class keeps them for all processors.
    return Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        size={"shortest_edge": 16 * 16, "longest_edge": 128 * 128},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


@torch.no_grad()
def _sharpen(model: torch.nn.Module, factor: float) -> None:
    names = dict(model.named_parameters())
    # Where queries and keys are normalised, only the norms' own weights can make them larger.
    normed = any(name.endswith("q_norm.weight") for name in names)
    ends = ("q_norm.weight", "k_norm.weight") if normed else ("q_proj.weight", "k_proj.weight")
    for name, weight in names.items():
        if name.endswith(ends):
            weight.mul_(factor)
        elif name.endswith("attn.qkv.weight"):
            weight[: 2 * weight.shape[0] // 3].mul_(factor)
