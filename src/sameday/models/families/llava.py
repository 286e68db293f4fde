"""LLaVA-1.5: a CLIP tower of which the output of one block (or of several, side by side) is projected, without its
class token, and a decoder of Llama or Mistral."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sameday.data.questions.family import Markers
from sameday.kernels.patches import Patching
from sameday.models.families.base import TinyTokenizer
from sameday.models.families.square import Square, Tower
from sameday.models.families.square_images import INPUTS_IN_PYTHON
from sameday.spec.errors import BadInput

DECODERS = ("llama", "mistral")
SPECIAL = ("<unk>", "<s>", "</s>", "<image>", "<pad>")
INPUTS = (
    INPUTS_IN_PYTHON
    + """\
slots = (inputs["pixel_values"].shape[-1] // processor.patch_size) ** 2
inputs |= tokenizer(text.replace("<image>", "<image>" * slots), return_tensors="pt")
"""
)
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] != 'system' -%}{{- message['role'].upper() + ': ' -}}{%- endif -%}
{%- if message['content'] is string -%}
{{- message['content'] + ' ' -}}
{%- else -%}
{%- for part in message['content'] if part['type'] == 'image' -%}{{- '<image>\\n' -}}{%- endfor -%}
{%- for part in message['content'] if part['type'] == 'text' -%}{{- part['text'] + ' ' -}}{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}
"""


class Llava(Square):
    model_type = "llava"
    markers = Markers(image="<image>", end_of_turn="</s>", user_header="USER:", special=SPECIAL)
    class_tokens = 1

    def check_supported(self, config: Any) -> None:
        text, vision = config.get_text_config(), config.vision_config
        if text.model_type not in DECODERS:
            raise BadInput(
                f"this model's decoder is of type {text.model_type!r}; allowed with a model of type {self.model_type}: "
                f"{', '.join(DECODERS)}"
            )
        if vision.model_type != "clip_vision_model":
            raise BadInput(f"this model's vision tower is of type {vision.model_type!r}; allowed: clip_vision_model")
        if config.vision_feature_select_strategy != "default":
            raise BadInput(
                f"vision_feature_select_strategy {config.vision_feature_select_strategy!r} in the model's config: only "
                "'default', which leaves the class token out, is supported"
            )
        if vision.attention_dropout:
            raise BadInput(f"attention_dropout {vision.attention_dropout} in the tower's config: only 0 is supported")
        states = vision.num_hidden_layers + 1
        for layer in _feature_layers(config.vision_feature_layer):
            if not -states <= layer < states:
                raise BadInput(f"vision_feature_layer {layer} in the model's config: the tower has {states} states")
        super().check_supported(config)

    def inputs_in_python(self) -> str:
        return INPUTS

    def processor_settings(self, processor: Any) -> dict[str, Any]:
        return {
            "patch_size": processor.patch_size,
            "num_additional_image_tokens": self.class_tokens,
            "vision_feature_select_strategy": "default",
        }

    # Decoder: that of Mistral may have a window, the same one in all layers

    def kernels(self, config: Any) -> tuple[str, ...]:
        slides = getattr(config.get_text_config(), "sliding_window", None) is not None
        return ("sdpa", "flex") if slides else super().kernels(config)

    def window(self, text: Any, kind: str) -> int | None:
        return getattr(text.config, "sliding_window", None)

    # Vision tower

    def tower(self, model: Any) -> Tower:
        config = model.config
        more = {
            "vision_feature_layer": config.vision_feature_layer,
            "projector_hidden_act": config.projector_hidden_act,
        }
        return Tower(model.model, Patching(config.vision_config.patch_size, 1, 1), **more)

    def feature_shape(self, tower: Any) -> tuple[int, int]:
        return 1, int(tower.projector.linear_2.out_features)

    def used_blocks(self, tower: Any) -> Sequence[nn.Module]:
        return list(tower.vision.encoder.layers)[: max(_wanted_states(tower))]

    def features(self, tower: Any, images: Tensor) -> Tensor:
        """Blocks behind the last state that is asked for are left out; the library runs them for nothing."""
        wanted = _wanted_states(tower)
        x = tower.vision.pre_layrnorm(tower.vision.embeddings(images))
        states = [x]
        for block in self.used_blocks(tower):
            x = block(x, None)
            states.append(x)
        features: Tensor = tower.projector(torch.cat([states[n][:, self.class_tokens :] for n in wanted], -1))
        return features

    # A small one of random weights

    def tiny_tokenizer(self) -> TinyTokenizer:
        return TinyTokenizer(SPECIAL, "</s>", "<pad>", CHAT_TEMPLATE, begin="<s>")

    def tiny_config(self, tokenizer: Any, text: Mapping[str, Any], vision: Mapping[str, Any]) -> Any:
        from transformers import LlavaConfig

        special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        sizes: dict[str, Any] = {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "vocab_size": len(tokenizer),
            "bos_token_id": tokenizer.bos_token_id,
            **special,
            **text,
        }
        # The usual 0.02 is for widths in the thousands; at this one it would leave the signal near zero.
        sizes.setdefault("initializer_range", sizes["hidden_size"] ** -0.5)
        if sizes["model_type"] == "mistral":
            sizes.setdefault("sliding_window", None)
        tower: dict[str, Any] = {
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "patch_size": 8,
            "image_size": 48,
            **vision,
        }
        tower.setdefault("initializer_range", tower["hidden_size"] ** -0.5)
        return LlavaConfig(
            text_config=sizes,
            vision_config=tower,
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
            image_seq_length=(tower["image_size"] // tower["patch_size"]) ** 2,
            dtype="float32",
        )

    def tiny_image_processor(self, config: Any) -> Any:
        from transformers import LlavaImageProcessorPil

        side = config.vision_config.image_size
        made = LlavaImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
        made.patch_size = config.vision_config.patch_size
        return made


def _feature_layers(layers: int | Sequence[int]) -> list[int]:
    return [layers] if isinstance(layers, int) else list(layers)


def _wanted_states(tower: Any) -> list[int]:
    """How many blocks each state is behind, of those that are projected side by side."""
    states = len(tower.vision.encoder.layers) + 1
    return [layer % states for layer in _feature_layers(tower.config.vision_feature_layer)]


FAMILY = Llava()
