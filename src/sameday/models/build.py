"""Vision models by the name of their kind; as folders that can be loaded without the recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file

from sameday.models.vision_bdh import VisionBDH
from sameday.models.vit import ViT
from sameday.spec.errors import BadInput
from sameday.spec.identity import as_before
from sameday.spec.vision import BdhModel, VitModel

WEIGHTS, CONFIG = "model.safetensors", "config.json"
VisionModel = VisionBDH | ViT


def build_model(shape: BdhModel | VitModel, image_size: int, classes: int, seed: int) -> VisionModel:
    if isinstance(shape, BdhModel):
        return VisionBDH(shape, image_size, classes, seed)
    return ViT(shape, image_size, classes, seed)


def save_model(folder: Path, model: VisionModel, about: dict[str, Any]) -> None:
    """`about` is what a user needs besides the weights: class names, normalisation."""
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / WEIGHTS)
    text = json.dumps({"model": model.shape.model_dump(mode="json"), **about}, indent=2)
    (folder / CONFIG).write_text(text + "\n")


def restore_model(folder: Path, model: VisionModel, classes: Sequence[str]) -> None:
    """Refuses weights that were trained for other classes, or for these in another order."""
    there = json.loads((folder / CONFIG).read_text())["classes"]
    if there != list(classes):
        raise BadInput(f"{folder}: trained for the classes {', '.join(there)}; the data has {', '.join(classes)}")
    model.load_state_dict(load_file(folder / WEIGHTS))


def load_model(folder: Path | str) -> tuple[VisionModel, dict[str, Any]]:
    """A trained model from its folder, in evaluation mode, with what was saved about it: the names of the classes, and
    how pixels between 0 and 1 are normalised."""
    folder = Path(folder)
    about = json.loads((folder / CONFIG).read_text())
    shape: BdhModel | VitModel = as_before(TypeAdapter(BdhModel | VitModel).validate_python(about.pop("model")))
    model = build_model(shape, about["image_size"], len(about["classes"]), seed=0)
    restore_model(folder, model, about["classes"])
    return model.eval().to(torch.float32), about
