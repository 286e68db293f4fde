"""Gemma 3, and MedGemma: a SigLIP tower whose patches are averaged in blocks, and a decoder in which most layers see a
window and some see everything, each kind with rotary embeddings of its own. An image's tokens see each other in both
directions, in layers with a window as far as it reaches back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sameday.data.questions.batch import Batch
from sameday.data.questions.family import Markers
from sameday.kernels.attention import Sight
from sameday.kernels.patches import Patching
from sameday.models.families import square_images
from sameday.models.families.base import FULL, SLIDING, TinyTokenizer
from sameday.models.families.square import Square, Tower
from sameday.models.flops import Flops, Work
from sameday.spec.errors import BadInput

IMAGE, BEGIN, END = "<image_soft_token>", "<start_of_image>", "<end_of_image>"
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", BEGIN, END, IMAGE)
NAMED = {"image_token": IMAGE, "boi_token": BEGIN, "eoi_token": END}
INPUTS = (
    square_images.INPUTS_IN_PYTHON
    + f"""\
del inputs["num_crops"]
slots = "{IMAGE}" * model.config.mm_tokens_per_image
text = text.replace("{BEGIN}", f"\\n\\n{BEGIN}{{slots}}{END}\\n\\n")
inputs |= tokenizer(text, add_special_tokens=False, return_tensors="pt")
inputs["token_type_ids"] = (inputs["input_ids"] == tokenizer.convert_tokens_to_ids("{IMAGE}")).int()
"""
)
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set before = namespace(text='') -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- set said = message['content'] if message['content'] is string else message['content'][0]['text'] -%}
{%- set before.text = said + '\\n\\n' -%}
{%- else -%}
{{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' + before.text -}}
{%- set before.text = '' -%}
{%- if message['content'] is string -%}
{{- message['content'] | trim -}}
{%- else -%}
{%- for part in message['content'] -%}
{{- '<start_of_image>' if part['type'] == 'image' else part['text'] | trim -}}
{%- endfor -%}
{%- endif -%}
{{- '<end_of_turn>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""


class Gemma3(Square):
    model_type = "gemma3"
    markers = Markers(
        image=IMAGE,
        end_of_turn="<end_of_turn>",
        user_header="<start_of_turn>user",
        special=SPECIAL,
        written=(BEGIN, f"\n\n{BEGIN}{IMAGE}{END}\n\n"),
    )

    def check_supported(self, config: Any) -> None:
        text, vision = config.get_text_config(), config.vision_config
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(text, name) is not None:
                raise BadInput(
                    f"{name} {getattr(text, name)} in the model's config: transformers leaves it out of models with "
                    "images, and only null is supported"
                )
        if text.use_bidirectional_attention:
            raise BadInput("use_bidirectional_attention in the model's config: a decoder that answers sees only before")
        for place, dropout in (("decoder", text.attention_dropout), ("tower", vision.attention_dropout)):
            if dropout:
                raise BadInput(f"attention_dropout {dropout} in the {place}'s config: only 0 is supported")
        kinds = sorted(set(text.layer_types) - {FULL, SLIDING})
        if kinds:
            raise BadInput(f"layer_types {', '.join(kinds)} in the model's config; allowed: {FULL}, {SLIDING}")
        for kind in sorted(set(text.layer_types)):
            rope = text.rope_parameters[kind]["rope_type"]
            if rope in ("dynamic", "longrope"):
                raise BadInput(f"rope type {rope!r} depends on the length of the row; allowed: those that do not")
        side, count = vision.image_size // vision.patch_size, math.isqrt(config.mm_tokens_per_image)
        if count**2 != config.mm_tokens_per_image or side % count:
            raise BadInput(
                f"mm_tokens_per_image {config.mm_tokens_per_image} in the model's config: {side}×{side} patches cannot "
                "be averaged to a square of so many"
            )

    def inputs_in_python(self) -> str:
        return INPUTS

    def processor_settings(self, processor: Any) -> dict[str, Any]:
        return {"image_seq_length": (processor.image_size // processor.patch_size // processor.merge_size) ** 2}

    # Decoder

    def kernels(self, config: Any) -> tuple[str, ...]:
        return "sdpa", "flex"

    def layer_kinds(self, text: Any) -> Sequence[str]:
        return list(text.config.layer_types)

    def window(self, text: Any, kind: str) -> int | None:
        return int(text.config.sliding_window) if kind == SLIDING else None

    def sight(self, text: Any, batch: Batch, kind: str) -> Sight | None:
        return Sight(batch.positions[0], self.window(text, kind), self.image_numbers(batch))

    def image_numbers(self, batch: Batch) -> Tensor:
        """Of each place in a row: of which image it is, -1 where of none. There is text between two images."""
        places = torch.zeros(batch.tokens.numel(), dtype=torch.bool, device=batch.tokens.device)
        places[batch.image_slots] = True
        places = places.view_as(batch.tokens)
        begins = places & ~nn.functional.pad(places, (1, 0))[:, :-1]
        return torch.where(places, begins.cumsum(1) - 1, -1)

    def rotary(self, text: Any, positions: Tensor, dtype: torch.dtype, kind: str) -> tuple[Tensor, Tensor]:
        rope = text.rotary_emb
        frequencies, scaling = (getattr(rope, f"{kind}_{name}") for name in ("inv_freq", "attention_scaling"))
        return square_images.rotary(frequencies, scaling, positions, dtype)

    def norms(self, layer: Any) -> tuple[nn.Module, nn.Module | None, nn.Module, nn.Module | None]:
        behind, behind_mlp = layer.post_attention_layernorm, layer.post_feedforward_layernorm
        return layer.input_layernorm, behind, layer.pre_feedforward_layernorm, behind_mlp

    # Vision tower

    def tower(self, model: Any) -> Tower:
        projector, side = model.model.multi_modal_projector, model.config.vision_config.patch_size
        patching = Patching(side, projector.kernel_size, 1)
        return Tower(model.model, patching, mm_tokens_per_image=model.config.mm_tokens_per_image)

    def feature_shape(self, tower: Any) -> tuple[int, int]:
        return 1, int(tower.projector.mm_input_projection_weight.shape[1])

    def features(self, tower: Any, images: Tensor) -> Tensor:
        x = tower.vision.embeddings(images)
        for block in self.used_blocks(tower):
            x = block(x, None)
        features: Tensor = tower.projector(tower.vision.post_layernorm(x))
        return features

    def projector_flops(self, tower: Any, tokens: int, wanted: bool) -> tuple[Work, bool]:
        weight = tower.projector.mm_input_projection_weight
        one = 2 * tokens * weight.numel()
        return Work(layers=Flops(one, one * (wanted + weight.requires_grad))), wanted or weight.requires_grad

    # A small one of random weights

    def tiny_tokenizer(self) -> TinyTokenizer:
        return TinyTokenizer(SPECIAL, "<end_of_turn>", "<pad>", CHAT_TEMPLATE, begin="<bos>", named=NAMED)

    def tiny_config(self, tokenizer: Any, text: Mapping[str, Any], vision: Mapping[str, Any]) -> Any:
        from transformers import Gemma3Config

        token = tokenizer.convert_tokens_to_ids
        sizes: dict[str, Any] = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
            "max_position_embeddings": 4096,
            "vocab_size": len(tokenizer),
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            **text,
        }
        # The usual 0.02 is for widths in the thousands; at this one it would leave the signal near zero.
        sizes.setdefault("initializer_range", sizes["hidden_size"] ** -0.5)
        count = sizes["num_hidden_layers"]
        sizes.setdefault("layer_types", [FULL if n % 3 == 2 or n == count - 1 else SLIDING for n in range(count)])
        tower: dict[str, Any] = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "patch_size": 8,
            "image_size": 64,
            "vision_use_head": False,
            **vision,
        }
        return Gemma3Config(
            text_config=sizes,
            vision_config=tower,
            mm_tokens_per_image=(tower["image_size"] // tower["patch_size"] // 2) ** 2,
            image_token_index=token(IMAGE),
            boi_token_index=token(BEGIN),
            eoi_token_index=token(END),
            dtype="float32",
        )

    def tiny_image_processor(self, config: Any) -> Any:
        from transformers import Gemma3ImageProcessorPil

        side = config.vision_config.image_size
        made = Gemma3ImageProcessorPil(size={"height": side, "width": side})
        made.patch_size, made.image_size = config.vision_config.patch_size, side
        made.merge_size = side // made.patch_size // math.isqrt(config.mm_tokens_per_image)
        return made

    @torch.no_grad()
    def sharpen(self, model: nn.Module, factor: float) -> None:
        super().sharpen(model, factor)
        for name, weight in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):  # one more than the weight is what scales
                weight.add_(factor - 1)
            elif name.endswith("mm_input_projection_weight"):  # the library starts at zero, blind to every image
                drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
                weight.copy_(drawn * weight.shape[0] ** -0.5)


FAMILY = Gemma3()
