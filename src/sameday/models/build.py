"""Vision models by the name of their kind; as folders that can be loaded without the recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sameday.models.vision_bdh import VisionBDH
from sameday.models.vit import ViT
from sameday.record.manifest import MANIFEST, fault
from sameday.spec.errors import BadInput
from sameday.spec.identity import as_before
from sameday.spec.vision import BdhModel, VitModel

WEIGHTS, CONFIG = "model.safetensors", "config.json"
README = """\
# A {kind} model for images of {size}x{size} pixels, {classes} classes

`{weights}` has the weights, `{config}` their shape, the names of the classes and how pixels are normalised. Run in this
folder, with an image beside:

```python
import numpy as np
import torch
from PIL import Image

from sameday.data.labelled.pictures import fitted
from sameday.models.build import load_model

model, about = load_model(".")
image = fitted(Image.open("image.png").convert("RGB"), about["image_size"])
pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
mean, std = (torch.tensor(about[name]).expand(3)[:, None, None] for name in ("normalize_mean", "normalize_std"))
with torch.no_grad():
    logits = model(((pixels - mean) / std)[None])
print(about["classes"][logits.argmax()])
```
"""
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
    sizes = {"kind": model.shape.kind, "size": about["image_size"], "classes": len(about["classes"])}
    (folder / "README.md").write_text(README.format(weights=WEIGHTS, config=CONFIG, **sizes))


def restore_model(folder: Path, model: VisionModel, classes: Sequence[str]) -> None:
    """Refuses weights that were trained for other classes, or for these in another order."""
    try:
        there, tensors = json.loads((folder / CONFIG).read_text())["classes"], load_file(folder / WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise BadInput(f"{folder}: its weights cannot be read: {error}") from None
    if there != list(classes):
        raise BadInput(f"{folder}: trained for the classes {', '.join(there)}; the data has {', '.join(classes)}")
    if {name: t.shape for name, t in tensors.items()} != {name: t.shape for name, t in model.state_dict().items()}:
        raise BadInput(f"{folder}: {WEIGHTS} does not have the tensors of this recipe's model")
    model.load_state_dict(tensors)


def load_model(folder: Path | str) -> tuple[VisionModel, dict[str, Any]]:
    """A trained model from its folder, in evaluation mode, with what was saved about it: the names of the classes, and
    how pixels between 0 and 1 are normalised."""
    folder = Path(folder)
    if (folder / MANIFEST).exists() and (why := fault(folder)) is not None:
        raise BadInput(f"{folder}: {why}")
    about = json.loads((folder / CONFIG).read_text())
    shape: BdhModel | VitModel = as_before(TypeAdapter(BdhModel | VitModel).validate_python(about.pop("model")))
    model = build_model(shape, about["image_size"], len(about["classes"]), seed=0)
    restore_model(folder, model, about["classes"])
    return model.eval().to(torch.float32), about
