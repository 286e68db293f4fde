"""What a family of vision-language models is: everything in which its models differ from another family's. The defaults
are what most decoders in transformers have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sameday.data.questions.batch import Batch
from sameday.data.questions.encode import Encoded
from sameday.data.questions.family import Markers
from sameday.kernels import attention
from sameday.kernels.patches import Patching
from sameday.models.flops import Places, Work, attention_flops, linear_flops
from sameday.spec.errors import BadInput
from sameday.spec.lora import Part
from sameday.spec.plan import OF_PIECES
from sameday.spec.vlm import VlmRecipe

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of decoder layers, as transformers calls them."""
Grids = Sequence[tuple[int, int]]
"""How many patches each image is high and wide."""


@dataclass(frozen=True)
class Parts:
    """Modules of transformers' model: the decoder with its embeddings, the vision tower, the head."""

    text: Any
    tower: Any
    head: Any


@dataclass(frozen=True)
class TinyTokenizer:
    """What the tokenizer of a small model needs: special tokens, which of them end a turn and pad, the template; which
    one it puts before every text; and those that the library's processor asks for by name."""

    special: tuple[str, ...]
    end_of_turn: str
    padding: str
    chat_template: str
    begin: str | None = None
    named: Mapping[str, str] = field(default_factory=dict)


class Family(ABC):
    """One instance per family; it holds no state. The first group is what data asks: see QuestionFamily."""

    model_type: str
    markers: Markers
    max_aspect_ratio: int
    position_axes: int = 1
    language_name = "language_model"
    """In the names of the decoder's layers; a LoRA target that begins with it is of the decoder alone."""
    tower_names: tuple[str, ...]
    """Each layer of the tower, and of the projector behind it, has one of them in its name."""
    projector_names: tuple[str, ...]
    """Each layer of the projector has one of them in its name."""
    video_processor: str | None = None
    """transformers' class, where its AutoProcessor wants one beside the image processor."""

    # Images and positions

    @abstractmethod
    def load_image_processor(
        self, model: str, revision: str | None, backend: str, min_pixels: int | None, max_pixels: int | None
    ) -> Any: ...

    @abstractmethod
    def pixel_limits(self, processor: Any) -> tuple[int, int]: ...

    @abstractmethod
    def patching(self, processor: Any) -> Patching: ...

    @abstractmethod
    def grid(self, processor: Any, width: int, height: int) -> tuple[int, int]: ...

    @abstractmethod
    def resize(self, processor: Any, image: Image.Image) -> np.ndarray: ...

    def pixel_values(self, processor: Any, image: Image.Image, resize: bool = True) -> Tensor:
        how = {} if resize else {"do_resize": False}
        made: Tensor = processor(images=[image], return_tensors="pt", **how)["pixel_values"]
        return made

    def image_settings(self, processor: Any) -> dict[str, Any]:
        return {}

    def processor_settings(self, processor: Any) -> dict[str, Any]:
        return {}

    def image_tokens(self, grid: tuple[int, int], merge: int) -> int:
        high, wide = grid
        return high * wide // merge**2

    @abstractmethod
    def positions(self, encoded: Encoded, merge: int) -> np.ndarray: ...

    @abstractmethod
    def inputs_in_python(self) -> str:
        """Lines for a README beside saved weights, whole ones: they make `inputs`, as transformers' model takes them,
        from `image`, `text` (of the chat template), `tokenizer` and the image `processor`."""

    # What is refused

    def check_supported(self, config: Any) -> None:
        """Refuse what would silently train another model."""
        text = config.get_text_config()
        if "sliding_attention" in (getattr(text, "layer_types", None) or ()):
            raise BadInput(
                "this model has sliding-window attention layers, which rows of several questions would widen"
            )
        if getattr(text, "attention_dropout", 0):
            raise BadInput(f"attention_dropout {text.attention_dropout} in the model's config: only 0 is supported")
        rope = text.rope_parameters["rope_type"]
        if rope in ("dynamic", "longrope"):
            raise BadInput(f"rope type {rope!r} depends on the length of the row; allowed: those that do not")

    def problems(self, config: Any, recipe: VlmRecipe) -> Iterator[str]:
        """What a recipe asks for that models of this family do not do."""
        return iter(())

    def in_tower(self, layer: str) -> bool:
        """Whether it is of what an image goes through: of the tower or of the projector."""
        return any(f".{name}." in f".{layer}" for name in self.tower_names)

    def part_of(self, layer: str) -> Part:
        """Of a layer, or of a parameter, by its name."""
        if any(f".{name}." in f".{layer}" for name in self.projector_names):
            return "projector"
        return "tower" if self.in_tower(layer) else "decoder"

    def idle(self, model: Any) -> Sequence[nn.Module]:
        """Modules of the tower on which no output depends: an adapter there would learn nothing."""
        return ()

    # Decoder

    @abstractmethod
    def parts(self, model: Any) -> Parts: ...

    def kernels(self, config: Any) -> tuple[str, ...]:
        """Of attention, those that can follow what its layers see."""
        return "sdpa", "flex", *OF_PIECES

    def layer_kinds(self, text: Any) -> Sequence[str]:
        """Of each decoder layer. Those of one kind share masks and rotary embeddings."""
        return [FULL] * len(text.layers)

    def window(self, text: Any, kind: str) -> int | None:
        """How many places back a token sees in layers of this kind, itself included; None: all."""
        return None

    @abstractmethod
    def rotary(self, text: Any, positions: Tensor, dtype: torch.dtype, kind: str) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions, as the decoder's layers of this kind take them."""

    def norms(self, layer: Any) -> tuple[nn.Module, nn.Module | None, nn.Module, nn.Module | None]:
        """Of a decoder layer: before and behind its attention, before and behind its MLP. What is behind is added to
        what came in."""
        return layer.input_layernorm, None, layer.post_attention_layernorm, None

    def sight(self, text: Any, batch: Batch, kind: str) -> attention.Sight | None:
        """In what layers of this kind differ from the usual rule."""
        window = self.window(text, kind)
        return None if window is None else attention.Sight(batch.positions[0], window)

    def mask(self, text: Any, batch: Batch, kernel: str, kind: str) -> attention.Mask:
        """Who sees whom: each token those before it in its group, of the prefix, its own fork and its own branch."""
        levels = batch.group, batch.branch, batch.fork
        sight = self.sight(text, batch, kind)
        return attention.make_mask(*levels, batch.one_per_row, batch.segments, kernel, sight)

    # Vision tower

    @abstractmethod
    def tower_patching(self, tower: Any) -> Patching:
        """How the tower expects images to be cut."""

    @abstractmethod
    def feature_shape(self, tower: Any) -> tuple[int, int]:
        """How many tensors the tower gives for an image, its output and DeepStack's, and their width."""

    @abstractmethod
    def tower_indices(self, tower: Any, grid: tuple[int, int], send: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """What the tower derives from the grid of an image, made on the CPU: derived on the device it would wait for
        the device at every layer. `send` copies to the device; what the CPU reads stays there."""

    @abstractmethod
    def join_indices(self, each: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Those of several images one after the other, of each image's own."""

    @abstractmethod
    def run_tower(self, tower: Any, patches: Tensor, grids: Grids, indices: Mapping[str, Tensor]) -> list[Tensor]:
        """The tower's output and then DeepStack's features, (image tokens, width) each."""

    def join_images(self, tower: Any) -> None:
        """Let the attention of a frozen tower be as few calls as its images allow; most have one for all already."""
        return None

    @abstractmethod
    def compilable_blocks(self, tower: Any) -> Sequence[nn.Module]:
        """The blocks of a frozen tower whose images are joined, to be compiled one by one."""

    # FLOPs

    @abstractmethod
    def tower_flops(
        self, tower: Any, grids: Grids, merge: int, backward_matmuls: Callable[[int, int], int | None]
    ) -> tuple[Work, list[bool]]:
        """Of these images, and whether each of the tower's tensors needs a gradient. `backward_matmuls` says for a
        number of heads and their width how many matmuls attention's backward pass has; see Pairs."""

    def heads(self, text: Any) -> tuple[int, int, int]:
        """Heads, key heads, and their width."""
        config = text.config
        return config.num_attention_heads, config.num_key_value_heads, int(text.layers[0].self_attn.head_dim)

    def attention_work(self, text: Any, layer: Any, places: Places, wanted: bool) -> tuple[Work, bool]:
        """Of a decoder layer up to its o_proj, and whether what that gives needs a gradient."""
        block = layer.self_attn
        q, ask = linear_flops(block.q_proj, places.asking, wanted)
        k, key = linear_flops(block.k_proj, places.seen, wanted)
        v, value = linear_flops(block.v_proj, places.seen, wanted)
        heads, _, width = self.heads(text)
        attended = Work(attention=attention_flops(places.pairs, heads, width, (ask, key, value)))
        out, through = linear_flops(block.o_proj, places.asking, ask or key or value)
        return q + k + v + attended + out, through

    # A small one of random weights

    @abstractmethod
    def tiny_tokenizer(self) -> TinyTokenizer: ...

    @abstractmethod
    def tiny_config(self, tokenizer: Any, text: Mapping[str, Any], vision: Mapping[str, Any]) -> Any:
        """`text` and `vision` replace entries of the two configurations."""

    @abstractmethod
    def tiny_image_processor(self, config: Any) -> Any: ...

    @abstractmethod
    def sharpen(self, model: nn.Module, factor: float) -> None:
        """Multiply queries and keys, of the decoder and of the tower."""
