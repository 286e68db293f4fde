"""LoRA by PEFT: which layers get an adapter, how new adapters start, and dropout that is keyed instead of streamed."""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sameday.kernels.dropout import DropoutKeys, ImageKeys, KeyedDropout, name_key
from sameday.models.families.base import Family
from sameday.spec.errors import BadInput, refuse
from sameday.spec.lora import ALL_LINEAR, OF_IMAGES, PARTS, Lora, Part, named_part

WORDS: dict[Part, str] = {"decoder": "language model", "tower": "vision tower", "projector": "projector"}
MAGNITUDE = "lora_magnitude_vector"
ALIGNMENT = 8
"""In bf16, 16 bytes: matmuls of matrices whose rows begin elsewhere have slower kernels on a GPU."""
TRAINED = (".lora_A.", ".lora_B.", f".{MAGNITUDE}.")
"""In the names of an adapter's tensors."""


def resolve_targets(model: nn.Module, family: Family, lora: Lora, allow_tower: bool) -> list[str] | str:
    """What PEFT is told, so that it takes the same layers of a plain model: the names themselves where it takes no
    others for them, else a pattern. `allow_tower`: bare names mean layers of tower and projector too."""
    layers = _targeted(model, family, lora, allow_tower)
    if lora.dropout and (head := head_name(model, family)) in layers:
        raise BadInput(
            f"lora.target_modules: {head!r} with lora.dropout {lora.dropout:g}: dropout is keyed by every token, and "
            f"the {head} computes only those that have a target; allowed: lora.dropout 0, or targets without {head}"
        )
    if allow_tower and not any(family.in_tower(name) for name in layers):
        raise BadInput(
            "train_vision is true, and none of lora.target_modules "
            f"({', '.join(lora.target_modules)}) is a layer of the vision tower"
        )
    modules, names = [name for name, _ in model.named_modules()], list(lora.target_modules)
    return names if set(taken(modules, names)) == layers else pattern_of(layers, modules)


def head_name(model: nn.Module, family: Family) -> str:
    """What the layer over the vocabulary is called."""
    head = family.parts(model).head
    return next(name for name, module in model.named_modules() if module is head)


def shares_embedding(model: Any) -> bool:
    """Whether the layer over the vocabulary has no weights of its own, but the embedding's."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def head_notes(model: nn.Module, family: Family) -> Iterator[str]:
    """What a run says of an adapter on a layer that has no weights of its own. `model` has its adapters already."""
    from peft.tuners.lora import LoraLayer

    if isinstance(family.parts(model).head, LoraLayer) and shares_embedding(model):
        head = head_name(model, family)
        yield (
            f"lora.target_modules: {head} has the embedding's weights in this model (tie_word_embeddings): its adapter "
            f"changes the {head} alone, and `sameday merge` will refuse it, because merged weights would change both"
        )


@contextlib.contextmanager
def ties_told_otherwise() -> Iterator[None]:
    """PEFT warns of what `head_notes` says."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Model (has|with) `tie_word_embeddings=True`")
        yield


def _targeted(model: nn.Module, family: Family, lora: Lora, allow_tower: bool) -> set[str]:
    """The layers that a recipe means. BadInput with every target that means none."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    unused = {id(module) for idle in family.idle(model) for module in idle.modules()}
    used = [name for name in linear if id(model.get_submodule(name)) not in unused]
    parts: dict[Part, list[str]] = {part: [name for name in used if family.part_of(name) == part] for part in PARTS}
    chosen, problems = set[str](), []
    for target in lora.target_modules:
        part, name = named_part(target)
        among = linear if allow_tower and part == "decoder" else parts[part]
        if name.startswith(family.language_name + "."):
            among, name = parts["decoder"], name.removeprefix(family.language_name + ".")
        inside, _, last = name.rpartition(".")
        if inside and last == ALL_LINEAR:
            among = [each for each in among if f".{inside}." in f".{each}"]
        if last == ALL_LINEAR:
            # Not the head, which PEFT's all-linear leaves out too.
            within = (family.language_name, *family.tower_names)
            among = [each for each in among if each in used and any(f".{word}." in f".{each}" for word in within)]
        layers = [each for each in among if last == ALL_LINEAR or name == each or each.endswith("." + name)]
        chosen.update(layers)
        if not layers:
            problems.append(_no_such_layer(target, part, name, parts, head_name(model, family)))
    refuse(problems)
    return chosen


def _no_such_layer(target: str, part: Part, name: str, parts: dict[Part, list[str]], head: str) -> str:
    where = "lora.target_modules: "
    if not parts[part]:
        return f"{where}{target!r}: the {WORDS[part]} of this model has no linear layer, and only these get adapters"
    only = {head: f"{head} (with lora.dropout 0)"}
    known = ", ".join(only.get(each, each) for each in sorted({each.rsplit(".", 1)[-1] for each in parts[part]}))
    others = [other for other in OF_IMAGES if any(f".{each}".endswith(f".{name}") for each in parts[other])]
    hint = "".join(f"; the {WORDS[other]} has one: write {f'{other}.{name}'!r}" for other in others)
    return f"{where}no linear layer of the {WORDS[part]} is called {name!r}; it has {known}{hint}"


def taken(modules: Iterable[str], targets: Iterable[str] | str) -> Iterator[str]:
    """The modules that PEFT takes for these targets, by their names."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    config = LoraConfig(target_modules=targets if isinstance(targets, str) else list(targets))
    return (name for name in modules if check_target_module_exists(config, name))


def pattern_of(layers: set[str], modules: Sequence[str]) -> str:
    """A pattern that means exactly these layers among all modules of a model, as short as it can be: layers whose names
    differ in a number alone are written once."""
    forms: dict[str, list[str]] = {}
    for name in (name for name in modules if name in layers):
        forms.setdefault(_pattern(name, [r"\d+"] * len(_numbers(name))), []).append(name)
    written: list[str] = []
    for form, members in forms.items():
        columns = zip(*map(_numbers, members), strict=True)
        exact = _pattern(members[0], [f"({'|'.join(dict.fromkeys(column))})" for column in columns])
        fits = (p for p in (form, exact) if {m for m in modules if re.fullmatch(p, m)} == set(members))
        written.append(next(fits, "|".join(map(re.escape, members))))
    return "|".join(written)


def _numbers(name: str) -> list[str]:
    return [word for word in name.split(".") if word.isdigit()]


def _pattern(name: str, numbers: Iterable[str]) -> str:
    """A name with these instead of its numbers."""
    instead = iter(numbers)
    return r"\.".join(next(instead) if word.isdigit() else re.escape(word) for word in name.split("."))


def add_adapters(model: nn.Module, family: Family, lora: Lora, seed: int, allow_tower: bool) -> Any:
    """New adapters. A starts uniform, keyed by (seed, parameter name); B starts at zero and DoRA's lengths at those of
    the base model's rows, so that training starts from the base model."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.r,
        lora_alpha=int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=resolve_targets(model, family, lora, allow_tower),
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        bias="none",
    )
    with ties_told_otherwise():
        wrapped = get_peft_model(model, config)
    for name, parameter in adapter_parameters(wrapped):
        if ".lora_A." in name:
            parameter.data.copy_(uniform(parameter, 1 / math.sqrt(parameter.shape[1]), seed, name))
        elif ".lora_B." in name:
            parameter.data.zero_()
        else:
            base = wrapped.get_submodule(name.partition(".lora_")[0]).get_base_layer().weight
            parameter.data = row_lengths(base, torch.zeros_like(base), 1.0)
    return wrapped


def adapted_layers(model: nn.Module, targets: Iterable[str] | str) -> set[str]:
    """The linear layers that PEFT gives an adapter for these targets."""
    return set(taken((name for name, module in model.named_modules() if isinstance(module, nn.Linear)), targets))


def adapter_parameters(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if any(kind in name for kind in TRAINED))


def saved_name(parameter: str) -> str:
    """As PEFT's files have it."""
    return parameter.replace(".default.", ".").replace(f"{MAGNITUDE}.weight", MAGNITUDE)


def prepare_adapters(
    model: nn.Module, family: Family, dropout: float, keys: DropoutKeys, image_keys: ImageKeys
) -> None:
    """Float32 masters, inputs in the base model's format (autocast turns the matmuls into bf16), keyed dropout."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False
            mine = image_keys if family.in_tower(name) else keys
            for adapter, down in module.lora_A.items():
                layer = KeyedDropout(dropout, name, down.in_features, mine) if dropout else nn.Identity()
                module.lora_dropout[adapter] = layer.to(down.weight.device)
            for dora in module.lora_magnitude_vector.values():
                dora.get_weight_norm, dora.get_lora_weight = row_lengths, _change
    for _, parameter in adapter_parameters(model):
        parameter.data = parameter.data.float()


def pad_ranks(layers: Iterable[nn.Module]) -> None:
    """In place: in training, adapters of these layers compute with zeros behind their matrices, up to a rank that is a
    multiple of `ALIGNMENT`; their parameters stay as they are. For layers that are compiled, where the zeros come with
    the cast to bf16 and take no kernel. Validation and generation use the matrices as they are."""
    from peft.tuners.lora import LoraLayer

    for module in [each for layer in layers for each in layer.modules() if isinstance(each, LoraLayer)]:
        for down in module.lora_A.values():
            if type(down) is nn.Linear and down.out_features % ALIGNMENT:
                down.__class__ = _PaddedDown
        for up in module.lora_B.values():
            if type(up) is nn.Linear and up.in_features % ALIGNMENT:
                up.__class__ = _PaddedUp


class _PaddedDown(nn.Linear):
    """To the rank."""

    def forward(self, x: Tensor) -> Tensor:
        more = -self.out_features % ALIGNMENT if self.training else 0
        return F.linear(x, F.pad(self.weight, (0, 0, 0, more)) if more else self.weight)


class _PaddedUp(nn.Linear):
    """From the rank."""

    def forward(self, x: Tensor) -> Tensor:
        more = -self.in_features % ALIGNMENT if self.training else 0
        return F.linear(x, F.pad(self.weight, (0, more)) if more else self.weight, self.bias)


def scales(model: nn.Module) -> dict[str, float]:
    """By what the output of each adapter is multiplied, as PEFT computes it."""
    from peft.tuners.lora import LoraLayer

    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))
    return {f"{name}.{adapter}": float(scale) for name, layer in layers for adapter, scale in layer.scaling.items()}


def row_lengths(weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: str | None = None) -> Tensor:
    """DoRA's lengths, in float32 at least. PEFT rounds them to the format of a layer's input, and where that is bf16
    this alone would change outputs by up to 0.2% before anything is learned."""
    kind = torch.promote_types(weight.dtype, torch.float32)
    return torch.linalg.vector_norm(weight.to(kind) + scaling * lora_weight.to(kind), dim=1)


def _change(lora_A: nn.Linear, lora_B: nn.Linear, adapter_name: str | None = None) -> Tensor:
    """What lengths are measured with. PEFT multiplies an identity matrix by both, and asks for no gradient either."""
    return (lora_B.weight @ lora_A.weight).detach()


def uniform(parameter: Tensor, bound: float, seed: int, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(name_key("adapter", seed, name) & 0xFFFFFFFF)
    return torch.empty(parameter.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
