"""A model small enough for a laptop, made on the spot: real architecture and files of a family, random weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedTokenizerFast

from sameday.models.families import DEFAULT, family_of
from sameday.models.families.base import TinyTokenizer


def write_model(
    folder: Path,
    texts: Iterable[str],
    seed: int,
    family: str = DEFAULT,
    *,
    sharpen: float = 1.0,
    vocab_size: int = 512,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    tokenizer: Any = None,
) -> None:
    """Save model, tokenizer and image processor settings into `folder`, from where transformers loads them.

    `text` and `vision` replace entries of the two configurations. `sharpen` multiplies queries and keys, so
    that attention is far from uniform and a wrong position or mask shows. `device` is where the weights are
    drawn: a large model wants a GPU. A `tokenizer` that is there stands instead of one made of `texts`.
    """
    made = family_of(family, "family")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or _tokenizer(texts, vocab_size, made.tiny_tokenizer())
    tokenizer.save_pretrained(folder)
    config = made.tiny_config(tokenizer, text or {}, vision or {})
    images = made.tiny_image_processor(config)
    images.save_pretrained(folder)
    if more := made.processor_settings(images):
        (folder / "processor_config.json").write_text(json.dumps(more))
    with torch.random.fork_rng(devices=[] if device == "cpu" else None):
        torch.manual_seed(seed)
        model_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = model_class(config).to(dtype)
        torch.set_default_dtype(before)
    made.sharpen(model, sharpen)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)


def _tokenizer(texts: Iterable[str], vocab_size: int, settings: TinyTokenizer) -> PreTrainedTokenizerFast:
    """Byte-level BPE: whole words where `texts` has them, bytes elsewhere, so that any text has tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in settings.special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    named = (settings.end_of_turn, settings.padding, settings.begin)
    if settings.begin is not None:
        begin = (settings.begin, tokenizer.token_to_id(settings.begin))
        tokenizer.post_processor = processors.TemplateProcessing(f"{begin[0]} $A", special_tokens=[begin])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=settings.end_of_turn,
        pad_token=settings.padding,
        bos_token=settings.begin,
        model_specific_special_tokens=dict(settings.named),
        additional_special_tokens=[token for token in settings.special if token not in named],
        chat_template=settings.chat_template,
        clean_up_tokenization_spaces=False,
    )
