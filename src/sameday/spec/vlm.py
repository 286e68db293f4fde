"""The recipe of fine-tuning a vision-language model: its adapters, questions about images, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, model_validator

from sameday.spec.dataset import Data, Split
from sameday.spec.evaluation import Evaluation
from sameday.spec.identity import IS_PATH
from sameday.spec.limits import COUNTED, LEARNING_RATE, at_most
from sameday.spec.lora import OF_IMAGES, PARTS, Lora, Part
from sameday.spec.order import Order
from sameday.spec.questions import Categories, Prompt
from sameday.spec.recipe import Recipe, StageRecipe, one_warmup
from sameday.spec.stages import Stage


class VlmRecipe(Recipe):
    """What all tasks that train a vision-language model on questions about images share."""

    has: ClassVar[frozenset[str]] = frozenset(
        {"shared prefixes", "token rows", "decoder layers", "compiled layers", "image cache"}
    )
    sample: ClassVar[str] = "question"
    plain: ClassVar[str] = "one question at a time"
    scored_by: ClassVar[tuple[str, ...]] = ("loss_weight", "answer_end")
    scored_on: ClassVar[tuple[str, ...]] = (
        "data.val",
        "data.split",
        *(f"data.split.{name}" for name in Split.model_fields),
        "data.where",
    )
    names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "base model": ("model", "revision", "precision", "base_format", "double_quant"),
        "training data": (
            *("data", "categories", "prompt", "system_prompt", "stages", "stage_before"),
            *("model", "revision", "min_pixels", "max_pixels", "image_backend", "max_length"),  # questions too long
        ),
    }
    scores: ClassVar[tuple[str, ...]] = ("loss", "exact_match")

    model: str = Field(
        description="Hub name or local folder of a vision-language model of a supported family.",
        json_schema_extra=IS_PATH,
    )
    revision: str | None = Field(None, description="Hub revision of the model.")
    start_adapter: str | None = Field(
        None, description="Folder of a PEFT adapter to start from.", json_schema_extra=IS_PATH
    )
    stage_before: str | None = Field(
        None,
        description="Written by a run in stages: fingerprint of the stage whose adapter is start_adapter. It decides "
        "instead of the folder's name, so that the run may be moved.",
    )
    train: Literal["lora", "all"] = Field("lora", description="Adapters, or all of the language model's weights.")
    lora: Lora = Field(default_factory=Lora, description="The adapters, where train is lora.")
    train_vision: bool = Field(
        False,
        description="Where train is all: tower and projector too, otherwise they are frozen. With adapters: bare names "
        "of lora.target_modules mean their layers too, which tower.NAME and projector.NAME do without it.",
    )
    learning_rates: dict[str, float] = Field(
        default_factory=dict,
        description="Peak learning rates of parts that have one of their own: tower, projector. All else has "
        "learning_rate; schedule and warm-up are the same for all.",
    )
    base_format: Literal["precision", "nf4", "fp8"] = Field(
        "precision",
        description="How the frozen base weights are stored: in the format of precision, or their linear layers in "
        "four bits (bitsandbytes' NF4, as in QLoRA), or in eight (fp8: float8_e4m3fn; with precision bf16 their "
        "matmuls are computed in fp8 too), and the rest in bf16. nf4 and fp8 are other models: lossy.",
    )
    double_quant: bool = Field(
        False, description="With base_format nf4: the scales of the four-bit weights are quantized too, to eight bits."
    )

    data: Data = Field(description="Where questions and images are.")
    categories: Categories | None = Field(
        None, description="Stage and type of questions whose lines do not have them, by a table or by rules."
    )
    prompt: Prompt | None = Field(None, description="How a question is asked: a template with {question}, or several.")
    system_prompt: str | None = Field(None, description="System message put before every question that has none.")
    min_pixels: int | None = Field(
        None,
        ge=1,
        **at_most(2**26, "every image, however small, is enlarged to that many"),
        description="Smaller images are enlarged. Default: the processor's. Not for models that take every image at "
        "one size, as LLaVA and Gemma 3 do.",
    )
    max_pixels: int | None = Field(
        None,
        ge=1,
        **at_most(2**31 - 1, "no image that can be decoded has more"),
        description="Larger images are reduced. Default and models as with min_pixels.",
    )
    image_backend: Literal["pil", "torchvision"] = Field(
        "pil",
        description="Which implementation resizes images. AutoProcessor takes torchvision by itself where it is "
        "installed; about a third of the pixels differ by one level between the two.",
    )
    max_length: int | None = Field(
        None,
        ge=8,
        **COUNTED,
        description="Longest question with its answer, in tokens. Never cuts image tokens or a whole answer.",
    )

    order: Order = Field(default_factory=Order, description="In which order questions are seen.")
    loss_weight: Literal["token", "sample"] = Field(
        "token", description="Each answer token weighs the same, or each question does."
    )

    answer_end: Literal["end_token", "turn"] = Field(
        "end_token",
        description="Where the loss of an answer ends: after the token that ends it (<|im_end|>, <end_of_turn>, </s>), "
        "or after the whole turn as the model's chat template has it: with Qwen-VL and Gemma 3 one line break more, "
        "with LLaVA one space. A run says what it is.",
    )

    stages: tuple[Stage, ...] = Field(
        (), description="Trainings one after another, each with its own questions and schedule; one command runs all."
    )
    evaluate: Evaluation | None = Field(
        None, description="Training ends with answers generated so; null: `sameday eval` is a command of its own."
    )

    _adapter_from: str = PrivateAttr("start_adapter")

    @property
    def adapter_from(self) -> str:
        """What named the folder of start_adapter, for sentences about it: this field, or an option of a command."""
        return self._adapter_from

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        short = {"order": "kind", "prompt": "default"}
        return values | {name: {key: values[name]} for name, key in short.items() if isinstance(values.get(name), str)}

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.start_adapter is not None and self.train != "lora":
            yield "start_adapter continues an adapter, so train must be lora"
        if self.base_format != "precision" and self.train == "all":
            yield (
                f"base_format {self.base_format} stores weights that are not trained, and train is all; allowed: train "
                "lora, or base_format precision"
            )
        if self.base_format != "precision" and self.train == "lora" and self.lora.dora:
            yield (
                "lora.dora measures rows of the base model's weights, and base_format "
                f"{self.base_format} stores these in {'four' if self.base_format == 'nf4' else 'eight'} bits; "
                "allowed: lora.dora false, or base_format precision"
            )
        yield from self.wrong_rates(self.trained_parts)
        if self.double_quant and self.base_format != "nf4":
            yield f"double_quant is for base_format nf4, and base_format is {self.base_format}"
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            yield f"min_pixels {self.min_pixels} is larger than max_pixels {self.max_pixels}"
        names = [stage.name for stage in self.stages]
        if twice := [name for name in names if names.count(name) > 1]:
            yield f"stages: the name {twice[0]!r} is given twice; must be another for each"
        if self.train != "lora" and any(stage.start == "previous" for stage in self.stages[1:]):
            yield "stages that start from the previous one go on with its adapter, so train must be lora"
        for number, stage in enumerate(self.stages):
            try:
                self._of_stage(number, stage)
            except ValueError as error:
                yield str(error)

    def unheeded(self) -> Iterator[str]:
        yield from super().unheeded()
        if self.train == "all" and self.lora != Lora():
            yield "lora is set and train is all, which has no adapters; allowed: train lora, or no lora"
        for number, stage in enumerate(self.stages):
            ratio, steps = stage.warmup_ratio, stage.warmup_steps
            where = f"stages[{number}]."
            if ratio is not None and steps is not None:
                yield one_warmup(f"{where}warmup_ratio", ratio, f"{where}warmup_steps", steps)
            elif ratio is not None and self.warmup_steps is not None:
                yield one_warmup(f"{where}warmup_ratio", ratio, "warmup_steps", self.warmup_steps)

    def wrong_rates(self, trained_parts: frozenset[Part]) -> Iterator[str]:
        """What is wrong with learning_rates, where these parts are trained."""
        trained = ", ".join(part for part in PARTS if part in trained_parts)
        for part, rate in self.learning_rates.items():
            if part not in OF_IMAGES:
                allowed = f"must be of {' or '.join(OF_IMAGES)} (trained here: {trained}); all else has learning_rate"
                yield f"learning_rates.{part} is {rate:g}; {allowed}"
            elif part not in trained_parts:
                yield f"learning_rates.{part} is {rate:g}, and the {part} is not trained; trained here: {trained}"
            if not 0 < rate <= LEARNING_RATE:
                yield f"learning_rates.{part} is {rate:g}; must be greater than 0 and at most {LEARNING_RATE}"

    @property
    def trained_parts(self) -> frozenset[Part]:
        """Of the model, as far as the recipe alone tells: with adapters and train_vision, a name may be any part's."""
        if self.train_vision:
            return frozenset(PARTS)
        return self.lora.parts if self.train == "lora" else frozenset({"decoder"})

    @property
    def trains_image_parts(self) -> bool:
        """Whether what the model makes of an image changes while it is trained."""
        return bool(self.trained_parts & {*OF_IMAGES})

    def stage_recipes(self) -> list[StageRecipe]:
        return [
            StageRecipe(stage.name, self._of_stage(number, stage), follows=number > 0 and stage.start == "previous")
            for number, stage in enumerate(self.stages)
        ]

    def _of_stage(self, number: int, stage: Stage) -> VlmRecipe:
        where = dict(self.data.where)
        for field, values in stage.where.items():
            both = tuple(value for value in values if value in where.get(field, values))
            if not both:
                raise ValueError(
                    f"stages[{number}].where.{field} is {' or '.join(values)}, and data.where.{field} is "
                    f"{' or '.join(where[field])}: no question is both"
                )
            where[field] = both
        data = self.data.model_copy(update={"where": where})
        alone = {"name": f"{self.name}-{stage.name}", "data": data, "stages": (), "evaluate": None}
        changes = {**alone, **stage.changes()}
        return self.model_copy(update=changes)

    def started_from(self, folder: str, fingerprint: str) -> VlmRecipe:
        return self.model_copy(update={"start_adapter": folder, "stage_before": fingerprint})

    def ignored(self) -> frozenset[str]:
        unused = {"evaluate"} | ({"lora"} if self.train != "lora" else set())
        return super().ignored() | unused | ({"start_adapter"} if self.stage_before is not None else set())

    @property
    def base_words(self) -> str:
        """How the base model's weights are stored, for people."""
        if self.base_format == "precision":
            return "bf16" if self.precision == "bf16" else "float32"
        return self.base_format + (" with double_quant" if self.double_quant else "")

    @property
    def coarse_matmuls(self) -> bool:
        return self.base_format == "fp8" and self.precision == "bf16"

    @property
    def result(self) -> str:
        return "adapter" if self.train == "lora" else "model"

    @property
    def earlier_result(self) -> str | None:
        return "adapter" if self.train == "all" else None

    @property
    def dropout(self) -> float:
        return self.lora.dropout if self.train == "lora" else 0.0
