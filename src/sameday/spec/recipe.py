"""Recipe: what model comes out. Two runs of one recipe train the same model, whatever plan runs them."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Strict(BaseModel):
    """Frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _sequence_to_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class Lora(Strict):
    """Low-rank adapters on some of the language model's linear layers."""

    r: int = Field(4, ge=1, description="Rank of the adapters.")
    alpha: float = Field(8, gt=0, description="Scale: an adapter's output is multiplied by alpha / r.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the input of each adapter.")
    target_modules: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        min_length=1,
        description="Names of the linear layers that get an adapter. A name that only the vision tower has, "
        "or that it has too, is refused unless train_vision is true.",
    )


class Data(Strict):
    """Question files (JSONL, one question per line) and where their images lie."""

    train: str = Field(description="JSONL of training questions. Paths are relative to the recipe's folder.")
    val: str | None = Field(None, description="JSONL of validation questions.")
    test: str | None = Field(None, description="JSONL of test questions.")
    image_root: str = Field(".", description="Folder that image paths are relative to, and may not leave.")
    limit: int | None = Field(None, ge=1, description="Use only the first so many questions of each file.")
    on_bad: Literal["stop", "skip"] = Field(
        "stop", description="Bad lines stop the run, or are left out and recorded in the run folder."
    )


class Order(Strict):
    """In which order questions are seen. Order is recipe: it decides what model comes out."""

    kind: Literal["shuffle", "listed", "by_image", "curriculum"] = Field(
        "shuffle",
        description="shuffle: all questions at random. listed: as in the file. by_image: images at random, an "
        "image's questions together. curriculum: by stage, lowest first.",
    )
    within_image: Literal["listed", "stage"] = Field(
        "listed", description="by_image: an image's questions as in the file, or by clinical stage."
    )
    max_per_image: int | None = Field(
        None,
        ge=1,
        description="by_image: at most so many questions of one image in a step, for more images per step. "
        "Exceeded only where too few images are left to fill the step.",
    )
    within_stage: Literal["shuffle", "by_image"] = Field("shuffle", description="curriculum: the order inside a stage.")

    @model_validator(mode="after")
    def _fits_kind(self) -> Order:
        if self.kind != "by_image" and (self.max_per_image is not None or self.within_image != "listed"):
            raise ValueError(f"within_image and max_per_image belong to kind by_image, not {self.kind}")
        if self.kind != "curriculum" and self.within_stage != "shuffle":
            raise ValueError(f"within_stage belongs to kind curriculum, not {self.kind}")
        return self


class Recipe(Strict):
    """Everything that decides which model comes out, and nothing else."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9._-]+$", description="A name for people; not in the fingerprint.")
    task: Literal["vqa"] = Field("vqa", description="What is learned: answers to questions about images.")

    model: str = Field(description="Hub name or local folder of a Qwen3-VL or Qwen2.5-VL model.")
    revision: str | None = Field(None, description="Hub revision of the model.")
    start_adapter: str | None = Field(None, description="Folder of a PEFT adapter to start from.")
    train: Literal["lora", "all"] = Field("lora", description="Adapters, or all of the language model's weights.")
    lora: Lora = Field(default_factory=Lora, description="The adapters, where train is lora.")
    train_vision: bool = Field(False, description="Train the vision tower too. Otherwise it is frozen.")
    precision: Literal["bf16", "float32", "tf32"] = Field(
        "bf16",
        description="Numeric format. bf16: float32 master copies of what is trained, products in bf16 with "
        "float32 accumulation. tf32: float32 with TF32 matrix products.",
    )

    data: Data = Field(description="Where questions and images are.")
    system_prompt: str | None = Field(None, description="System message put before every question that has none.")
    min_pixels: int | None = Field(None, ge=1, description="Smaller images are enlarged. Default: the processor's.")
    max_pixels: int | None = Field(None, ge=1, description="Larger images are reduced. Default: the processor's.")
    image_backend: Literal["pil", "torchvision"] = Field(
        "pil", description="Which implementation resizes images. The two give different pixels."
    )
    max_length: int | None = Field(
        None,
        ge=8,
        description="Longest question with its answer, in tokens. Never cuts image tokens or a whole answer.",
    )

    order: Order = Field(default_factory=Order, description="In which order questions are seen.")
    effective_batch: int = Field(16, ge=1, description="Questions per optimizer step.")
    loss_weight: Literal["token", "sample"] = Field(
        "token", description="Each answer token weighs the same, or each question does."
    )

    optimizer: Literal["adamw"] = Field("adamw", description="The optimizer's mathematics.")
    learning_rate: float = Field(5e-5, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay on matrices; vectors have none.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's decay rates.")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="Clip the whole step's gradient to this norm.")
    schedule: Literal["linear", "cosine", "constant"] = Field(
        "linear",
        description="Learning rate after warm-up: to zero linearly, to zero as a cosine, or unchanged.",
    )
    warmup_ratio: float = Field(0.0, ge=0, lt=1, description="Warm-up, as a share of all steps.")
    warmup_steps: int | None = Field(None, ge=0, description="Warm-up in steps; replaces warmup_ratio.")
    num_epochs: int = Field(3, ge=1, description="Passes over the training questions.")
    max_steps: int | None = Field(None, ge=1, description="Train so many steps, whatever num_epochs says.")
    seed: int = Field(0, ge=0, description="Seed of order, dropout and new weights.")

    @model_validator(mode="before")
    @classmethod
    def _order_by_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("order"), str):
            return {**values, "order": {"kind": values["order"]}}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)}: each must be at least 0 and less than 1")
        if self.start_adapter is not None and self.train != "lora":
            raise ValueError("start_adapter continues an adapter, so train must be lora")
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is larger than max_pixels {self.max_pixels}")
        return self

    def identity(self) -> dict[str, Any]:
        """The fields that decide the model, as plain data: what the fingerprint is taken of."""
        fields = self.model_dump(mode="json", exclude={"name"})
        if self.train != "lora":
            fields.pop("lora")
        return fields

    @property
    def dropout(self) -> float:
        """The dropout that training really has."""
        return self.lora.dropout if self.train == "lora" else 0.0

    @property
    def fingerprint(self) -> str:
        """Equal exactly when two recipes ask for the same model."""
        text = json.dumps(self.identity(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def differences(there: Recipe, here: Recipe) -> list[str]:
    """Which deciding fields differ, one sentence each, nested fields by their full name."""

    def flat(value: Any, path: str) -> dict[str, Any]:
        if isinstance(value, dict):
            return {k: v for key, sub in value.items() for k, v in flat(sub, f"{path}.{key}" if path else key).items()}
        return {path: value}

    old, new = flat(there.identity(), ""), flat(here.identity(), "")
    return [
        f"{key}: {old.get(key)!r} there, {new.get(key)!r} here"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
