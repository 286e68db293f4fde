"""Sizes, chat template and special tokens of a small Qwen-VL: real architecture, random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
VISION = {"depth": 2, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}


def text_sizes(tokenizer: Any) -> dict[str, Any]:
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    return {**TEXT, "vocab_size": len(tokenizer), **special}


def rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """M-RoPE whose first axis has what the other two leave, a quarter each."""
    width = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    quarter = width // 8
    return {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [width // 2 - 2 * quarter, quarter, quarter],
    }


def config(model_type: str, tokenizer: Any, text: dict[str, Any], vision: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    token = tokenizer.convert_tokens_to_ids
    text.setdefault("initializer_range", text["hidden_size"] ** -0.5)
    return CONFIG_MAPPING[model_type](
        text_config=text,
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=False,
        dtype="float32",
    )


def image_processor(vision: Any) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    # A size of its own: given min_pixels and max_pixels instead, the class keeps them for all processors.
    return Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        size={"shortest_edge": 16 * 16, "longest_edge": 128 * 128},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
