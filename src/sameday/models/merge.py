"""An adapter merged into its base model's weights: a whole model that needs no PEFT. Shard by shard, so that never more
than one of them is in memory."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sameday.models.adapters import MAGNITUDE, row_lengths, shares_embedding
from sameday.models.digest import digest_of_lines, line_of
from sameday.models.formats import as_trained, computed_in, stored_layers
from sameday.models.nf4 import SOURCE
from sameday.models.start import WEIGHTS, check_origin, origin_of
from sameday.spec.errors import BadInput
from sameday.spec.vlm import VlmRecipe
from sameday.spec.words import first_names

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
EARLIER = (
    ("model.language_model.", "model."),
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.visual.", "visual."),
    ("model.vision_tower.", "vision_tower."),
    ("model.vision_tower.", "vision_tower.vision_model."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)
"""How names of this release's modules begin, and how in files of earlier ones."""
COPIED = ("config.json", "generation_config.json")


@dataclass
class Merged:
    """How many tensors, how many of them the adapter changed, and by how much rounding to the model's format changed
    these changes, relatively."""

    tensors: int = 0
    changed: int = 0
    wanted: float = 0.0
    lost: float = 0.0

    @property
    def rounding(self) -> float:
        return math.sqrt(self.lost / self.wanted) if self.wanted else 0.0


def weight_files(base: str, revision: str | None) -> list[Path]:
    """Of a folder, or of a model on the hub, in order."""
    index = _file(base, INDEX, revision)
    if index is None:
        single = _file(base, SINGLE, revision)
        if single is None:
            raise BadInput(f"model {base}: has neither {INDEX} nor {SINGLE}; weights in other files cannot be merged")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise BadInput(f"{index}: is no index of weights") from None
    found = {name: _file(base, name, revision) for name in names}
    if lacking := [name for name, path in found.items() if path is None]:
        raise BadInput(f"model {base}: {INDEX} names {first_names(lacking)}, which is not there")
    return [path for path in found.values() if path is not None]


def _file(base: str, name: str, revision: str | None) -> Path | None:
    from transformers.utils import cached_file

    try:
        found = cached_file(base, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise BadInput(f"model {base}: {str(error).strip().splitlines()[0]}") from None
    return None if found is None else Path(found)


def own_names(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """By the name in the files, the name of the parameter that it fills. Files may have others; every parameter must be
    there, but for those that are another one too."""
    there, names = set(stored), {}
    parameters = dict(model.named_parameters())
    lacking = []
    for name in parameters:
        earlier = [after + name.removeprefix(now) for now, after in EARLIER if name.startswith(now)]
        match = next((each for each in (name, *earlier) if each in there), None)
        if match is None:
            lacking.append(name)
        else:
            names[match] = name
    if getattr(model.config, "tie_word_embeddings", False):
        lacking = [name for name in lacking if name != "lm_head.weight"]
    if lacking:
        raise BadInput(f"the base model's files lack {first_names(lacking)}")
    return names


def merge(
    model: Any,
    recipe: VlmRecipe,
    base: str,
    adapter: Path,
    out: Path,
    say: Callable[[str], None],
    device: torch.device,
) -> Merged:
    """Weights, index and configuration into `out`. `model` has no weights: its names are asked for. BadInput where the
    adapter changes what the base has no weights for, and where it was trained on another base model, which is known
    once all of it was read."""
    files = weight_files(base, recipe.revision)
    dtype, stored_so = computed_in(recipe), set(stored_layers(model, recipe))
    read = dtype if recipe.base_format == "precision" else SOURCE
    # At once, since a run under way may remove its checkpoint meanwhile.
    changes, origin, scale = _changes(adapter), origin_of(adapter, str(adapter)), recipe.lora.scale
    stored = [name for file in files for name in _names(file)]
    names = own_names(model, stored)
    _check_changed(model, changes, {names.get(name, name) for name in stored}, adapter, base)
    done, lines, where, size = Merged(), dict[str, str](), dict[str, str](), 0
    for number, file in enumerate(files, 1):
        written = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else SINGLE
        shard: dict[str, Tensor] = {}
        for written_as, tensor in _tensors(file):
            name = names.get(written_as, written_as)
            tensor = tensor.to(read) if tensor.is_floating_point() else tensor
            if written_as in names:
                lines[name] = line_of(name, tensor)
            layer = name.removesuffix(".weight")
            if layer in stored_so:
                tensor = as_trained(tensor.to(device), recipe, dtype).cpu()
            tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
            if layer in changes:
                tensor = _added(tensor, scale, *changes.pop(layer), done, device)
            shard[name] = tensor
            where[name] = written
            size += tensor.nbytes
        save_file(shard, out / written, metadata={"format": "pt"})
        done.tensors += len(shard)
        say(f"{written}: {len(shard)} tensors")
        del shard
    check_origin(origin, digest_of_lines(lines), read, str(adapter), base)
    if len(files) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (out / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    _settings(base, recipe, dtype, out)
    return done


def _check_changed(model: Any, changed: Iterable[str], there: Container[str], adapter: Path, base: str) -> None:
    """BadInput where the base has no weights for a layer that an adapter changes."""
    lacking = sorted(layer for layer in changed if f"{layer}.weight" not in there)
    if lacking and shares_embedding(model):
        raise BadInput(
            f"{adapter}: changes {first_names(lacking)}, which has the embedding's weights in {base} "
            "(tie_word_embeddings): merged into them, it would change the embedding too; allowed: the adapter as it "
            f"is, by PEFT, or one without {first_names(lacking)}"
        )
    if lacking:
        raise BadInput(f"{adapter}: changes layers whose weights {base} does not have: {first_names(lacking)}")


def _settings(base: str, recipe: VlmRecipe, dtype: torch.dtype, out: Path) -> None:
    for name in COPIED:
        if (file := _file(base, name, recipe.revision)) is not None:
            shutil.copyfile(file, out / name)
    config = json.loads((out / "config.json").read_text())
    config.pop("quantization_config", None)
    config |= {"dtype": str(dtype).removeprefix("torch.")}
    config.pop("torch_dtype", None)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _changes(adapter: Path) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
    """A, B and, of DoRA, the lengths of rows by the layer that they change."""
    tensors = load_file(adapter / WEIGHTS)
    begin, a, b = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
    layers = sorted(name.removesuffix(a) for name in tensors if name.endswith(a))
    return {
        layer.removeprefix(begin): (tensors[layer + a], tensors[layer + b], tensors.get(f"{layer}.{MAGNITUDE}"))
        for layer in layers
    }


def _added(
    weight: Tensor,
    scale: float,
    a: Tensor,
    b: Tensor,
    lengths: Tensor | None,
    done: Merged,
    device: torch.device,
) -> Tensor:
    """In float32, rounded once."""
    plain = weight.to(device).float()
    change = scale * (b.to(device).float() @ a.to(device).float())
    if lengths is not None:
        ratio = lengths.to(device).float() / row_lengths(plain, change, 1.0)
        change = ratio[:, None] * (plain + change) - plain
    made = (plain + change).to(weight.dtype)
    done.changed += 1
    done.wanted += float(change.square().sum())
    done.lost += float((made.float() - plain - change).square().sum())
    return made.cpu()


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{file}: cannot be read: {error}") from None


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 (it is no mapping)
            yield name, opened.get_tensor(name)
