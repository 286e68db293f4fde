"""Models told apart. Weights: for each tensor some of its numbers and the sum of all of its bits, which is exact in any
order and quick where the weights are. And what is computed with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ASIDE = frozenset(
    {
        *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "auto_map"),
        *("initializer_range", "initializer_factor", "attention_dropout", "hidden_dropout", "dropout"),
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward"),
        *("id2label", "label2id", "num_labels", "problem_type", "is_encoder_decoder", "pad_token_id"),
        *("bos_token_id", "eos_token_id", "decoder_start_token_id", "finetuning_task", "task_specific_params"),
    }
)
"""Settings of a model that decide nothing about what it computes from tokens: for training and saving, or said better
elsewhere (the format of weights, and which tokens end an answer)."""


def config_digest(config: Any) -> str:
    """Of a model's settings: with other rotary positions or another epsilon the same weights are another model."""
    return hashlib.sha256(json.dumps(_deciding(config.to_dict()), sort_keys=True, default=str).encode()).hexdigest()


def _deciding(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _deciding(inner) for name, inner in value.items() if name not in ASIDE}
    return value


def line_of(name: str, tensor: Tensor) -> str:
    """What a digest knows of one tensor."""
    flat = tensor.detach().contiguous().flatten()
    bits = flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))
    some = bits[:: max(1, bits.numel() // 64)].tolist()
    return f"{name} {tuple(tensor.shape)} {bits.sum(dtype=torch.int64).item()} {some}"


def digest_of_lines(lines: Mapping[str, str]) -> str:
    """By the tensors' names."""
    digest = hashlib.sha256()
    for _, line in sorted(lines.items()):
        digest.update(line.encode())
    return digest.hexdigest()


def digest_of(parameters: Mapping[str, Tensor]) -> str:
    return digest_of_lines({name: line_of(name, parameter) for name, parameter in parameters.items()})
