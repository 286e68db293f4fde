"""A vision-language model of any family: transformers' own modules, driven layer by layer, so that rows may hold many
questions and positions, masks and image features come from the layout."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from sameday.data.questions.batch import Batch
from sameday.hardware.kernels import without_flash
from sameday.hardware.machine import detect_machine, numeric_format
from sameday.hardware.phases import during
from sameday.kernels import attention
from sameday.kernels.decode import Answering
from sameday.kernels.dropout import DropoutKeys, ImageKeys, KeyedDropout
from sameday.kernels.patches import patches
from sameday.models.adapters import (
    adapter_parameters,
    add_adapters,
    head_notes,
    pad_ranks,
    prepare_adapters,
    saved_name,
    scales,
)
from sameday.models.digest import config_digest, digest_of
from sameday.models.families.base import Family, Grids
from sameday.models.features import FeatureMemory, in_powers
from sameday.models.formats import by_kind, notes, quantize
from sameday.models.host_table import embeddings_to_host
from sameday.models.layers import any_size, compile_layers
from sameday.models.load import read_weights
from sameday.models.norms import fuse_norms
from sameday.models.recompute import recomputing
from sameday.models.start import WEIGHTS, check_base, load_start, other_format, write_origin
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.spec.vlm import VlmRecipe
from sameday.spec.words import first_names, tell

COMPILE_BACKEND = "inductor"
KEPT = 128
"""Grids for which the tower's indices are kept, some hundred kilobytes each."""

Keep = Callable[[str, Tensor], None]
"""Takes what the tower made of an image, with the name of its content."""


class VisionLanguageModel:
    """A model as recipe and plan ask for it: what is trained, in which format, computed how."""

    def __init__(
        self,
        base: Any,
        family: Family,
        recipe: VlmRecipe,
        plan: Plan,
        device: torch.device,
        byte_table: np.ndarray,
        start_adapter: Path | None = None,
    ) -> None:
        """`byte_table` (3, 256) is what the image processor makes of each byte."""
        family.check_supported(base.config)
        self.family, self.recipe, self.plan, self.device = family, recipe, plan, device
        self.name: str = base.name_or_path
        self.end_tokens = _end_tokens(base.generation_config)
        self.config_digest = config_digest(base.config)
        self.keys, self.image_keys = DropoutKeys(), ImageKeys()
        base.config.get_text_config()._attn_implementation = attention.NAME
        attention.register()
        base.requires_grad_(False)
        # Of the weights as they were read: what quantizing makes of them may differ in a bit between devices.
        self.base_digest, self.base_dtype = digest_of(dict(base.named_parameters())), next(base.parameters()).dtype
        quantize(base, recipe, device)
        self.coded_layers = by_kind(base)
        self.notes = list(notes(base, recipe, device))
        self.module: Any = self._trainable(base, start_adapter).to(device)
        parts = family.parts(base)
        self.text, self.tower, self.head = parts.text, parts.tower, parts.head
        if plan.embeddings_on == "host":
            embeddings_to_host(self.text, self.head, device)
        self.kinds = family.layer_kinds(self.text)
        self.tower_trained = any(p.requires_grad for p in self.tower.parameters())
        self.patching = family.tower_patching(self.tower)
        self.feature_shape = family.feature_shape(self.tower)
        dtype = torch.bfloat16 if recipe.precision == "bf16" and not self.tower_trained else torch.float32
        dtype = torch.promote_types(dtype, next(self.tower.parameters()).dtype)
        self.byte_table = torch.from_numpy(byte_table).to(device=device, dtype=dtype)
        self.keep: Keep | None = None
        """Set where features are cached on disk: takes those that were missing."""
        self.memory: FeatureMemory | None = None
        """Set where training keeps them in memory."""
        self._indices: dict[tuple[int, int], dict[str, Tensor]] = {}
        if not self.tower_trained and (plan.compile == "layers" or device.type == "cuda"):
            family.join_images(self.tower)
        if device.type == "cuda":
            fuse_norms(self.text)
        recomputing(self.text.layers, family)
        if plan.compile == "layers":
            self._compile()
        self.flash = without_flash(detect_machine(device.type), recipe.precision) is None
        assert plan.attention != "auto", "the session resolves it"
        self.kernel = plan.attention

    def _trainable(self, base: Any, start_adapter: Path | None) -> Any:
        recipe, family = self.recipe, self.family
        if recipe.train == "lora":
            if start_adapter is not None:
                digest, dtype = self.base_digest, self.base_dtype
                model = load_start(base, family, recipe, start_adapter, self.name, digest, dtype)
                self.notes += other_format(start_adapter, recipe.base_words, f"{recipe.adapter_from} {start_adapter}")
            else:
                model = add_adapters(base, family, recipe.lora, recipe.seed, allow_tower=recipe.train_vision)
            self.notes += head_notes(base, family)
            prepare_adapters(model, family, recipe.lora.dropout, self.keys, self.image_keys)
            if self.plan.lora_kernel == "triton":
                # Registering its operators loads Triton and Inductor, seconds of every start.
                from sameday.models.lora_kernel import use_kernels

                use_kernels(model)
            return model
        parts = family.parts(base)
        for part in (parts.text, parts.head, *([parts.tower] if recipe.train_vision else [])):
            part.float().requires_grad_(True)
        return base

    def _compile(self) -> None:
        layers = list(self.text.layers)
        if self.recipe.train == "lora" and self.recipe.precision == "bf16" and self.device.type == "cuda":
            pad_ranks(layers)
        if not self.tower_trained:
            layers += self.family.compilable_blocks(self.tower)
        compile_layers(layers, COMPILE_BACKEND, self.plan.activation_budget)

    @cached_property
    def alike_from(self) -> int | None:
        """The first layer with weights that are trained, where layers are compiled: it gets an input with a gradient as
        those behind it do, so that one graph serves all, and not one for it alone, which takes as long to compile."""
        if self.plan.compile != "layers":
            return None
        trained = (any(p.requires_grad for p in layer.parameters()) for layer in self.text.layers)
        return next((number for number, here in enumerate(trained) if here), None)

    def trained(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates, by name; float32 in every plan."""
        parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        assert all(p.dtype in (torch.float32, torch.float64) for p in parameters.values()), "masters are float32"
        return parameters

    def own_rates(self) -> dict[str, tuple[float, list[str]]]:
        """Parts that have a learning rate of their own, by name: the rate, and the names of what is trained there."""
        return {
            part: (rate, [name for name in self.trained() if self.family.part_of(name) == part])
            for part, rate in self.recipe.learning_rates.items()
        }

    def numeric_format(self) -> AbstractContextManager[None]:
        return numeric_format(self.recipe.precision, self.device.type)

    def hidden(
        self,
        batch: Batch,
        step: int = 0,
        keys: Answering | None = None,
        eager: bool = False,
        at: Tensor | None = None,
    ) -> Tensor:
        """The last hidden state of every token, (rows × length, width), or of those `at` some places. `keys` takes
        those of every layer, for tokens that will be generated. `eager`: by layers as they are, also where the plan has
        them compiled."""
        self.key_images(batch, step)
        if self.drops:
            self.keys.set(batch.keys, self.recipe.seed, step)
            self._any_keys()
        with during("tower"):
            features = self.features_at_tokens(batch)
        return self.decoded(batch, features, keys, eager, at)

    def decoded(
        self,
        batch: Batch,
        features: Sequence[Tensor],
        keys: Answering | None = None,
        eager: bool = False,
        at: Tensor | None = None,
    ) -> Tensor:
        """The same behind the tower, of whose output and DeepStack these are the `features` at each image token. It
        depends on tensors alone, so that it can be recorded."""
        x = self.text.embed_tokens(batch.tokens)
        deepstack: Sequence[Tensor] = ()
        if features:
            merged, *deepstack = features
            x = x.flatten(0, 1).index_copy(0, batch.image_slots, merged.to(x.dtype)).view_as(x)
        rotary = {kind: self._rotary(batch.positions, x.dtype, kind) for kind in set(self.kinds)}
        masks = {kind: self.family.mask(self.text, batch, self.kernel, kind) for kind in set(self.kinds)}
        kept = None if keys is None else self._room_for_keys(x)
        last = len(self.kinds) - 1
        for number, (layer, kind) in enumerate(zip(self.text.layers, self.kinds, strict=True)):
            if number == self.alike_from and torch.is_grad_enabled() and not x.requires_grad:
                x = x.detach().requires_grad_()
            seen = masks[kind] if kept is None else attention.Recorded(masks[kind], *kept)
            x = self._run(layer.forward if eager else layer, x, rotary[kind], seen, at if number == last else None)
            if keys is not None and kept is not None:
                keys.layer(self.family.window(self.text, kind)).record(*kept)
            if number < len(deepstack):
                # DeepStack: features of earlier blocks of the tower are added at the image's own places.
                x = x.flatten(0, 1).index_add(0, batch.image_slots, deepstack[number].to(x.dtype)).view_as(x)
        return self.text.norm(x).flatten(0, 1)

    @property
    def drops(self) -> bool:
        """Whether there is dropout, as the model is now."""
        return bool(self.recipe.train == "lora" and self.recipe.lora.dropout and self.module.training)

    def key_tokens(self, batch: Batch, key: Tensor) -> None:
        """Of dropout in the decoder, by the key of a step that is on the device."""
        if self.drops:
            self.keys.set_by(batch.keys, key)
            self._any_keys()

    def _any_keys(self) -> None:
        if self.plan.compile == "layers":
            any_size(self.keys.tokens)

    def key_images(self, batch: Batch, step: int) -> None:
        """Of dropout in the tower."""
        if self.drops and self.tower_trained:
            sizes = [high * wide for high, wide in batch.grids]
            self.image_keys.set(batch.contents, sizes, self.recipe.seed, step, self.device)

    def next_hidden(self, tokens: Tensor, positions: Tensor, keys: Answering) -> Tensor:
        """The last hidden states (n, width) of one more token (n,) of each question that is still answered."""
        x = self.text.embed_tokens(tokens[:, None])
        places = positions.expand(self.family.position_axes, -1)[..., None]
        rotary = {kind: self._rotary(places, x.dtype, kind) for kind in set(self.kinds)}
        keys.advance()
        for layer, kind, kept in zip(self.text.layers, self.kinds, keys.layers, strict=True):
            x = layer.forward(x, position_embeddings=rotary[kind], attention_mask=kept)
        return self.text.norm(x)[:, 0]

    @cached_property
    def ends_at_places(self) -> bool:
        """Whether the last layer's MLP can be computed at some places alone. Not where adapters drop in it, whose masks
        are those of all tokens, nor where DeepStack comes behind it, at images."""
        drops = any(isinstance(module, KeyedDropout) for module in self.text.layers[-1].mlp.modules())
        tensors, _ = self.feature_shape
        return not drops and tensors <= len(self.text.layers)

    def logits(self, hidden: Tensor, at: Tensor) -> Tensor:
        """Float32 logits of the places `at`: of them alone, or picked from those of all places."""
        if self.plan.label_only_logits:
            return self.head(hidden[at]).float()
        return self.head(hidden).float()[at]

    def _run(
        self, layer: Callable[..., Tensor], x: Tensor, rotary: tuple[Tensor, Tensor], mask: Any, at: Tensor | None
    ) -> Tensor:
        checkpointing = self.plan.checkpointing if torch.is_grad_enabled() else "none"
        places = {} if at is None else {"at": at}
        return layer(x, position_embeddings=rotary, attention_mask=mask, checkpointing=checkpointing, **places)

    def _room_for_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """For one layer's keys and values of a batch (rows, length, width): one after the other, all layers use it."""
        text, kind = self.text.config, self.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        shape = len(x), text.num_key_value_heads, x.shape[1], width
        return x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=dtype)

    def _rotary(self, positions: Tensor, dtype: torch.dtype, kind: str) -> tuple[Tensor, Tensor]:
        return self.family.rotary(self.text, positions, dtype, kind)

    def features_at_tokens(self, batch: Batch) -> list[Tensor]:
        """The tower's output and DeepStack's features at each image token; zeros at slots of padding. Nothing where
        there are no slots."""
        slots, source = len(batch.image_slots), batch.image_source
        if not slots:
            return []
        if not len(source):
            tensors, width = self.feature_shape
            return list(self.byte_table.new_zeros(tensors, slots, width))
        features = [each[source] for each in self._features_of(batch)]
        padding = slots - len(source)
        return [F.pad(each, (0, 0, 0, padding)) for each in features] if padding else features

    def _features_of(self, batch: Batch) -> Sequence[Tensor]:
        """The tower's output and DeepStack's features, (image tokens, width) each, over all images: computed, or as the
        batch brings them."""
        if all(batch.ready):
            return batch.features.unbind()
        missing = [grid for grid, ready in zip(batch.grids, batch.ready, strict=True) if not ready]
        if self.memory is not None and self.module.training:
            pixels = self._pixels_of(batch.pixels, batch.grids)
            return self.memory.of_all(batch.contents, partial(self._fresh, pixels, batch.grids)).unbind()
        if self.keep is None:
            return self.image_features(self.patches(batch.pixels, missing), missing)
        # One by one, so that an image's features do not depend on who was beside it when they were made.
        fresh = self.features_per_image(batch.pixels, missing)
        tokens = [self.family.image_tokens(grid, self.patching.merge) for grid in batch.grids]
        stored = iter(batch.features.split([n for n, ready in zip(tokens, batch.ready, strict=True) if ready], 1))
        parts: list[Tensor] = []
        for content, ready in zip(batch.contents, batch.ready, strict=True):
            parts.append(next(stored) if ready else next(fresh))
            if not ready:
                self.keep(content, parts[-1])
        return torch.cat(parts, 1).unbind()

    def features_per_image(self, pixels: Tensor, grids: Grids) -> Iterator[Tensor]:
        """The tower's output and DeepStack's features for each image by itself, (1 + DeepStack's, tokens, width)."""
        for image, grid in zip(self._pixels_of(pixels, grids), grids, strict=True):
            yield self._made(image, grid)

    @property
    def joins_images(self) -> bool:
        """Whether images of one size are computed together in training that keeps features. Not where runs promise the
        same bits: an image's features then do not depend on who is beside it, so they are the same whether there was
        room to keep them or not, and wherever a run was resumed."""
        return self.device.type == "cuda" and not self.plan.deterministic

    def _fresh(self, pixels: Sequence[Tensor], grids: Grids, numbers: Sequence[int]) -> list[Tensor]:
        """Of some of these images. One small image after the other would let a GPU wait for their launches."""
        if not self.joins_images:
            return [self._made(pixels[i], grids[i]) for i in numbers]
        made: dict[int, Tensor] = {}
        for together in in_powers(numbers, lambda i: grids[i]):
            sizes = [grids[i] for i in together]
            joined = self._made(torch.cat([pixels[i] for i in together]), *sizes)
            made |= zip(together, joined.chunk(len(together), 1), strict=True)
        return [made[i] for i in numbers]

    def _made(self, pixels: Tensor, *grids: tuple[int, int]) -> Tensor:
        """The tower's output and DeepStack's features of these images and no others."""
        return torch.stack(self.image_features(self.patches(pixels, grids), grids))

    def _pixels_of(self, pixels: Tensor, grids: Grids) -> Sequence[Tensor]:
        """Of each image."""
        side = self.patching.side
        return pixels.split([high * wide * side * side * 3 for high, wide in grids])

    def patches(self, pixels: Tensor, grids: Grids) -> Tensor:
        return patches(pixels, grids, self.patching, self.byte_table)

    def image_features(self, patches: Tensor, grids: Grids) -> list[Tensor]:
        """The tower's output for these patches and DeepStack's features. Without gradient where it is frozen."""
        # A frozen tower's weights are in the recipe's format already; autocast would only take its norms to float32.
        with (
            torch.set_grad_enabled(self.tower_trained and torch.is_grad_enabled()),
            torch.autocast(self.device.type, enabled=self.tower_trained and self.recipe.precision == "bf16"),
        ):
            return self.family.run_tower(self.tower, patches, grids, self._tower_indices(grids))

    def weights_digest(self) -> str:
        """Of what is trained, as it is now."""
        return digest_of(self.trained())

    def adapter_scales(self) -> dict[str, float]:
        """By what each adapter's output is multiplied: the same weights with another scale are another model."""
        return scales(self.module)

    def tower_digest(self) -> str:
        """Of all that its output depends on: every bit of its weights, and a configuration that may be another with the
        same weights."""
        made = hashlib.sha256(json.dumps(self.tower.config.to_dict(), sort_keys=True, default=str).encode())
        tensors = [*self.tower.named_parameters(), *self.tower.named_buffers()]
        for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
            made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            made.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return made.hexdigest()

    def _tower_indices(self, grids: Grids) -> dict[str, Tensor]:
        """What the tower derives from the grids, joined from those of each: images often have the same size, and sets
        of sizes are many. Those that came last are kept."""
        for grid in dict.fromkeys(grids):
            known = self._indices.pop(grid, None)
            self._indices[grid] = known or self.family.tower_indices(self.tower, grid, self._sent)
        joined = self.family.join_indices([self._indices[grid] for grid in grids])
        while len(self._indices) > KEPT:
            del self._indices[next(iter(self._indices))]
        return joined

    def _sent(self, tensor: Tensor) -> Tensor:
        """To the device, without waiting for what it is doing."""
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def save(self, folder: Path) -> None:
        """The adapter in PEFT's format, or the whole model in transformers'."""
        if self.recipe.train == "lora":
            for config in self.module.peft_config.values():
                if isinstance(config.target_modules, set):  # whose order is another in each process
                    config.target_modules = sorted(config.target_modules)
            self.module.save_pretrained(str(folder), save_embedding_layers=False)
            stored = None if self.recipe.base_format == "precision" else self.recipe.base_words
            write_origin(folder, self.base_digest, self.base_dtype, stored, self.coded_layers)
        else:
            self.module.save_pretrained(str(folder))

    def restore(self, folder: Path) -> None:
        """Take back what `save` wrote, to the bit."""
        if self.recipe.train == "lora":
            from peft import set_peft_model_state_dict

            check_base(folder, self.base_digest, self.base_dtype, str(folder), self.recipe.model)
            for note in other_format(folder, self.recipe.base_words, str(folder)):
                tell(note, sys.stderr)
            tensors = read_weights(lambda: load_file(folder / WEIGHTS), folder)
            own = {saved_name(name): p.shape for name, p in adapter_parameters(self.module)}
            if {name: tensor.shape for name, tensor in tensors.items()} != own:
                raise BadInput(f"{folder}: {WEIGHTS} does not have the tensors of this recipe's adapters")
            set_peft_model_state_dict(self.module, tensors)
        else:
            # By the library itself, which knows the names that it writes, and draws at random what is missing.
            kind, told = type(self.module), {"dtype": torch.float32, "output_loading_info": True}
            saved, loaded = read_weights(lambda: kind.from_pretrained(str(folder), **told), folder)
            if loaded["missing_keys"]:
                lacking = first_names(sorted(loaded["missing_keys"]))
                raise BadInput(f"{folder}: does not have all weights of this recipe's model; missing: {lacking}")
            self.module.load_state_dict(saved.state_dict())


def _end_tokens(settings: Any) -> frozenset[int]:
    """At which the model's own settings end a generated answer."""
    ends = getattr(settings, "eos_token_id", None)
    return frozenset([ends] if isinstance(ends, int) else ends or ())
