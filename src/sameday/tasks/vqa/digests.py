"""What the outcome of training depends on besides the recipe's text, each as a digest: a run is not resumed on
something else that has the same name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sameday.data.questions.processor import ImageProcessor
from sameday.data.questions.sample import Sample
from sameday.spec.vlm import VlmRecipe
from sameday.tasks.setup import DATA

ASIDE = ("truncation", "padding")
"""What whoever called a tokenizer last left in it."""


def data_digest(samples: Sequence[Sample]) -> str:
    return _of(repr([(s.id, s.image_key, s.messages, s.stage) for s in samples]))


def data_digests(recipe: VlmRecipe, splits: Mapping[str, Sequence[Sample]]) -> dict[str, str]:
    """Where a table or rules sort the questions, what came of it too."""
    digests = {what: data_digest(splits[split]) for split, what in DATA.items() if split in splits}
    if recipe.categories is not None:
        digests["categories"] = _of(repr([(s.id, s.stage, s.type) for s in splits.get("train", [])]))
    return digests


def tokenizer_digest(tokenizer: Any) -> str:
    """Of its vocabulary, merges, normaliser and special tokens."""
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    return _of(json.dumps({name: part for name, part in whole.items() if name not in ASIDE}, sort_keys=True))


def template_digest(tokenizer: Any) -> str:
    return _of(json.dumps(tokenizer.chat_template, sort_keys=True))


def processor_digest(processor: ImageProcessor) -> str:
    return _of(json.dumps(processor.identity(), sort_keys=True))


def numbers_digest(named: Mapping[str, float]) -> str:
    return _of(json.dumps(named, sort_keys=True))


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Of every bit."""
    made = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        made.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()


def _of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
