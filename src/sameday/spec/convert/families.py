"""What a config of another trainer means for each supported family of models: what its models are called, whether its
images have sizes to choose, how its answers end, and which layers of its tower are called like the language model's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
PROJECTORS = re.compile(r"visual\.(?:merger|deepstack_merger_list)\.|multi_modal_projector\.")
"""How names of the projector's layers begin."""
NOT_LINEAR = re.compile(r"patch_embed\.proj|pos_embed|_embedding")
"""How names of its other layers end that PEFT can adapt too, and no recipe."""
_BLOCK = "visual.blocks.{}."
_PATCHES = "visual.patch_embed.proj"
_ATTENDED = (f"{_BLOCK}attn.qkv", f"{_BLOCK}attn.proj", _PATCHES)
_MERGER = ("visual.merger.mlp.0", "visual.merger.mlp.2")
_TOWERS = ("vision_tower.", "vision_tower.vision_model.")
"""As transformers calls it now, and did before."""


@dataclass(frozen=True)
class FamilyFacts:
    image_parts: tuple[str, ...]
    """Parts in front of the language model that have linear layers."""
    tower_layers: tuple[str, ...]
    """All layers of the tower and of the projector that PEFT can adapt, by the names of today, and those of a tower by
    earlier ones too."""
    end_of_turn: str
    """The token that ends an answer."""
    earlier: str = ""
    """How names of the language model's layers began before transformers 4.52, where a model is as old as that."""
    convolution: str = ""
    """What is no linear layer of the tower and is called like one, by the last part of its name."""
    alike: tuple[str, ...] = ()
    """Names of the language model's layers that layers of the tower have too."""
    also_called: tuple[str, ...] = ()
    """In names of models, besides its model type."""
    token_side: int | None = None
    """Side in pixels of the square that one image token stands for; None where every image becomes one size."""
    least_pixels: int | None = None
    """To which the image processors of its models enlarge smaller images; None where every image becomes one size."""
    line_break: bool = True
    """Whether its chat template has a line break behind the token that ends an answer."""
    decayed_vectors: str = ""
    """What of tower and projector transformers' Trainer decays, though these are vectors: norms of a class of the
    model's own whose names do not say it, and embeddings."""
    whole_step_loss: bool = False
    """Whether transformers' Trainer divides a step's loss by all of its answer tokens, which it does where the model's
    forward accepts their number; else it divides each micro-batch's by those of the micro-batch."""
    stored: str = "bf16"
    """The format of its checkpoints' weights."""


_BOTH = ("tower", "projector")
_QWENS_END = "<|im_end|>"
_MERGERS = ("visual.merger", "visual.deepstack_merger_list.{}")
_FULLY = ("linear_fc1", "linear_fc2")
_IN_SQUARES = (
    *(f"encoder.layers.{{}}.self_attn.{name}" for name in (*ATTENTION[:3], "out_proj")),
    *("encoder.layers.{}.mlp.fc1", "encoder.layers.{}.mlp.fc2"),
    *("embeddings.patch_embedding", "embeddings.position_embedding"),
)
_SQUARES = tuple(tower + name for tower in _TOWERS for name in _IN_SQUARES)
FAMILIES = {
    "qwen2_5_vl": FamilyFacts(
        _BOTH,
        (*_ATTENDED, *(f"{_BLOCK}mlp.{name}" for name in MLP), *_MERGER),
        _QWENS_END,
        earlier="model.layers.",
        convolution=_PATCHES,
        alike=MLP,
        decayed_vectors="the tower's norms (norm1, norm2, ln_q)",
        token_side=28,
        least_pixels=56 * 56,
    ),
    "qwen2_vl": FamilyFacts(
        _BOTH,
        (*_ATTENDED, f"{_BLOCK}mlp.fc1", f"{_BLOCK}mlp.fc2", *_MERGER),
        _QWENS_END,
        earlier="model.layers.",
        convolution=_PATCHES,
        token_side=28,
        least_pixels=56 * 56,
        whole_step_loss=True,
    ),
    "qwen3_vl": FamilyFacts(
        _BOTH,
        (
            *(*_ATTENDED, "visual.pos_embed"),
            *(f"{where}.{name}" for where in (f"{_BLOCK}mlp", *_MERGERS) for name in _FULLY),
        ),
        _QWENS_END,
        convolution=_PATCHES,
        token_side=32,
        least_pixels=256 * 256,
    ),
    "llava": FamilyFacts(
        _BOTH,
        (*_SQUARES, "multi_modal_projector.linear_1", "multi_modal_projector.linear_2"),
        "</s>",
        earlier="language_model.model.layers.",
        alike=ATTENTION[:3],
        decayed_vectors="the tower's class_embedding",
        line_break=False,
        whole_step_loss=True,
        stored="fp16",
    ),
    "gemma3": FamilyFacts(
        ("tower",),
        _SQUARES,
        "<end_of_turn>",
        earlier="language_model.model.layers.",
        alike=ATTENTION[:3],
        also_called=("medgemma",),
        whole_step_loss=True,
    ),
}
OTHER = "of a family that is not supported"
_LOOK_ALIKES = {
    r"llava[-_]?(?:next|onevision|interleave|med|v?1\.6)|vip-?llava|paligemma|gemma-?3n": OTHER,
    r"-a\d+(?:\.\d+)?b(?![a-z0-9])": "a mixture of experts, and those are not supported",
    r"gemma-?3-(?:1b|270m)(?![a-z0-9])|medgemma-\d+b-text": "a model of texts alone",
    r"liuhaotian[/_-]": "in LLaVA's first layout; transformers' has names such as llava-hf/llava-1.5-7b-hf",
}
"""Names of models that only look like those of a supported family, and what these are."""


@dataclass(frozen=True)
class ChatTemplate:
    """A prompt that a trainer has under a name of its own: of which families it is, and in what it is not theirs."""

    kinds: tuple[str, ...]
    system_prompts: Mapping[str, str] = field(default_factory=dict)
    """By family, what it puts before every question that has none, where the family's own template does not."""
    near: str = ""
    line_break: bool = True
    """Whether the line break behind an answer's end is learned with it."""
    without_thought: str = ""
    """Where it puts an empty thought before each answer: the template that does not."""

    def thought(self, enabled: bool) -> str:
        """Why it is refused. LLaMA-Factory learns the thought with the answer where enable_thinking is true."""
        where = "learned with it (enable_thinking, true by default)" if enabled else "part of the prompt"
        return (
            f"an empty thought, <think></think>, stands before each answer and is {where}, which no recipe says: set "
            f"template: {self.without_thought} if answers are to be learned as they are"
        )


# The template of Qwen2-VL and Qwen2.5-VL puts a system prompt first, that of Qwen3-VL none.
OF_QWEN2 = ChatTemplate(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), {"qwen3_vl": "You are a helpful assistant."})
OF_QWEN3 = ChatTemplate(("qwen3_vl",))
QWEN_TEMPLATES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), OF_QWEN2),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_nothink"), OF_QWEN3),
}
TEMPLATES = {
    **QWEN_TEMPLATES,
    "qwen3_vl": ChatTemplate(("qwen3_vl",), without_thought="qwen3_vl_nothink"),
    "llava": ChatTemplate(
        ("llava",),
        {
            "llava": "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
            "helpful, detailed, and polite answers to the user's questions."
        },
        "near, not the same: there no line break follows an image, and no space the system prompt",
        line_break=False,
    ),
    "gemma3": ChatTemplate(("gemma3",)),
}
"""Those of LLaMA-Factory, whose word `template` is."""


def names_of(kind: str) -> tuple[str, ...]:
    """In names of models, in small letters and digits alone."""
    facts = FAMILIES.get(kind)
    return kind.replace("_", ""), *(facts.also_called if facts is not None else ())


def look_alike(name: str) -> str:
    """What a model is whose name only looks like those of a supported family; empty for all others."""
    return next((what for pattern, what in _LOOK_ALIKES.items() if re.search(pattern, name.lower())), "")


def kind_by_name(name: str) -> str | None:
    """The family that a model's name tells."""
    squeezed = re.sub(r"[^a-z0-9]", "", name.lower())
    if look_alike(name):
        return None
    return next((kind for kind in FAMILIES if any(each in squeezed for each in names_of(kind))), None)
