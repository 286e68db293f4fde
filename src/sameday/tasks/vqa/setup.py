"""Visual question answering before the loop: question files and images, the model's configuration, plan choices."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from sameday.spec.errors import BadInput, NothingToLearn, RunStopped, refuse
from sameday.spec.load import resolve_model, resolve_path
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.spec.vlm import VlmRecipe
from sameday.spec.vqa import VqaRecipe
from sameday.tasks.base import LeftOut, Say
from sameday.tasks.setup import DATA, TRAINING, Audited, Caching, Choice, Needed, Resolved, TaskSetup
from sameday.tasks.vqa.trials import SHARING, choices, cuts, trial_values
from sameday.tasks.vqa.words import recipe_words

if TYPE_CHECKING:
    import torch

    from sameday.data.questions.encode import Encoder
    from sameday.data.questions.sample import Sample
    from sameday.data.questions.wanted import Wanted
    from sameday.hardware.machine import Machine
    from sameday.models.families.base import Family
    from sameday.spec.dataset import QuestionSet
    from sameday.spec.evaluation import Evaluation
    from sameday.tasks.vqa.problems import Decoder
    from sameday.tasks.vqa.task import VqaTask

Loaded = TypeVar("Loaded", bound="VqaTask")
SOME = 64
"""Questions whose lengths stand for all."""


class VqaSetup(TaskSetup):
    recipe_type: ClassVar[type[Recipe]] = VqaRecipe
    modules: ClassVar[tuple[str, ...]] = ("transformers", "peft", "sameday.tasks.vqa.task")
    alone: ClassVar[Mapping[str, Any]] = {
        "share_images": False,
        "share_text": False,
        "packing": False,
        "max_questions": 1,
        "pad_to_multiple": 1,
    }
    together: ClassVar[Mapping[str, Any]] = {**SHARING, "token_budget": 2**30}
    together_words = "with each image once"
    has_base = generates = True
    needs_data = False
    # `make soak`, float32 and bf16 each: none of 100 puts the rate below 3% with 95% confidence.
    false_alarms = "no false alarm in 100 comparisons of equivalent plans on a CPU: fewer than 3 in 100"

    needed_stages: ClassVar[tuple[int, ...] | None] = None
    """Those that each question must be of; None where a question needs none."""

    recipe: VlmRecipe

    def lacks(self, split: str) -> str | None:
        there = any(self._file(part, split) is not None for part in self.recipe.data.sets)
        return None if there else f"the recipe has no data.{split}"

    @staticmethod
    def _file(part: QuestionSet, split: str) -> str | None:
        """The file that questions of a split come from: its own, or the training file, of which it is a share."""
        held = {} if part.split is None else part.split.shares
        file: str | None = part.train if split in held else getattr(part, split)
        return file

    def audit(self, say: Say, splits: Sequence[str] = TRAINING, few: Mapping[str, int] | None = None) -> Audited:
        from sameday.data.problems import in_lines, report
        from sameday.data.questions.sets import Reading, seen_in_epoch

        family, unknown = self._family_or_error(say)
        refuse(self._special_texts(() if family is None else family.markers.special))
        data = self.recipe.data
        reading = Reading(self.recipe, self.home, family, self.needed_stages, say, few).read(splits)
        audited, empty, errors = reading.splits, reading.empty, reading.errors
        none = {"train": empty["train"]} if "train" in empty else empty if not audited and not errors else {}
        if errors or (none and unknown is not None):
            raise BadInput("\n".join([*errors, *none.values()]))
        if unknown is not None:
            raise unknown
        if none:
            raise NothingToLearn("\n".join(none.values()))
        if "val" in empty and self.recipe.best is not None:
            raise BadInput(f"recipe.best chooses weights by their validation score, and {empty['val']}")
        for name, why in empty.items():
            say(f"{why}; the run has no {name} scores")
        if few is None:
            self._say_unused_templates(audited, say)
            self._say_layouts(audited, say)
        if reading.skipped:
            say(f"left out: {report(reading.skipped, in_lines(reading.skipped), self.home / data.train)}")
        sizes = {name: len(samples) for name, samples in audited.items()}
        if "train" in sizes:
            sizes["train"] = seen_in_epoch(audited["train"], [part.weight for part in data.sets])
        left_out = [LeftOut(problem.where, problem.what) for problem in reading.skipped]
        return Audited(audited, sizes, left_out, reading.counts(), empty)

    @cached_property
    def wanted(self) -> Wanted:
        """Which questions the recipe takes, and how they are asked."""
        from sameday.data.questions.wanted import Wanted

        return Wanted.by(self.recipe, self.home)

    def _special_texts(self, special: Sequence[str]) -> Iterator[str]:
        from sameday.data.questions.sample import PLACEHOLDER

        recipe, prompt = self.recipe, self.recipe.prompt
        texts = {"system_prompt": recipe.system_prompt or ""}
        if recipe.evaluate is not None:
            texts["evaluate.context"] = recipe.evaluate.context
        if prompt is not None:
            texts |= {"prompt.default": prompt.default}
            texts |= {f"prompt.templates.{name}": text for name, text in prompt.templates.items()}
        for name, text in texts.items():
            for token in special:
                if token in text:
                    yield f"recipe.{name} holds {token}, which would become a real token"
            if PLACEHOLDER in text and name != "system_prompt":
                yield f"recipe.{name} holds {PLACEHOLDER}: images stay where each line has them; remove it"

    def _say_unused_templates(self, audited: Mapping[str, Sequence[Sample]], say: Say) -> None:
        prompt = self.recipe.prompt
        if prompt is None or prompt.by is None:
            return
        there = {str(getattr(sample, prompt.by)) for samples in audited.values() for sample in samples}
        for name in prompt.templates.keys() - there:
            say(f"recipe.prompt.templates.{name}: no question has the {prompt.by} {name}")

    def _say_layouts(self, audited: Mapping[str, Sequence[Sample]], say: Say) -> None:
        from sameday.data.questions.turns import layouts_differ

        if differ := layouts_differ(audited, self.recipe.prompt, lambda: self._encoder.user_turn):
            say(differ)

    def _family_or_error(self, say: Say) -> tuple[Family | None, BadInput | None]:
        """Data is audited whatever is wrong with the model, and what is wrong with the data is said first."""
        try:
            self.check_model(say)
            return self.family, None
        except BadInput as error:
            return None, error

    def check_model(self, say: Say) -> None:
        from sameday.models.hub import announce_download

        announce_download(resolve_model(self.home, self.recipe.model), self.recipe.revision, say)
        _ = self.config
        if self.recipe.train == "lora":
            _ = self._targets
        if self.recipe.start_adapter is not None:
            _ = self._checked_start

    def check_evaluation(self, asked: Evaluation, splits: Any) -> None:
        samples: list[Sample] = splits[asked.split]
        if asked.cascade and all(sample.stage is None for sample in samples):
            raise BadInput(
                f"cascade goes by the questions' stages, and none of the {len(samples)} questions of "
                f"data.{asked.split} has one"
            )

    @cached_property
    def _checked_start(self) -> Path:
        """The adapter to start from, checked against a model without weights: before any are loaded, and before there
        is a run folder."""
        from sameday.models.start import check_start

        assert self.recipe.start_adapter is not None
        folder = resolve_path(self.home, self.recipe.start_adapter)
        base = resolve_model(self.home, self.recipe.model)
        check_start(self._without_weights, self.family, self.recipe, folder, base, self.recipe.adapter_from)
        return folder

    @cached_property
    def _targets(self) -> list[str] | str:
        """What PEFT is told about the layers that get adapters; what is wrong with them is known here, before weights
        are loaded."""
        from sameday.models.adapters import adapted_layers, resolve_targets

        recipe, model, part_of = self.recipe, self._without_weights, self.family.part_of
        targets = resolve_targets(model, self.family, recipe.lora, recipe.train_vision)
        refuse(recipe.wrong_rates(frozenset(part_of(name) for name in adapted_layers(model, targets))))
        return targets

    @cached_property
    def _without_weights(self) -> Any:
        import torch
        from transformers import AutoModelForImageTextToText

        with torch.device("meta"):
            return AutoModelForImageTextToText.from_config(self.config)

    @cached_property
    def config(self) -> Any:
        """The model's configuration; what cannot be trained is refused here, before weights are loaded."""
        from transformers import AutoConfig, PretrainedConfig

        from sameday.models.families import family_of
        from sameday.models.installed import check_torchvision

        check_torchvision()
        recipe, name = self.recipe, resolve_model(self.home, self.recipe.model)
        try:
            written, _ = PretrainedConfig.get_config_dict(name, revision=recipe.revision)
            if "model_type" in written:  # its own sentence; transformers' would tell to install another version
                family_of(written["model_type"])
            config = AutoConfig.from_pretrained(name, revision=recipe.revision)
        except BadInput:
            raise
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise BadInput(f"model {recipe.model!r}: its configuration cannot be read: {error}") from None
        family_of(config.model_type).check_supported(config)
        refuse(family_of(config.model_type).problems(config, recipe))
        if getattr(config, "quantization_config", None) is not None:
            raise BadInput(
                f"model {recipe.model!r}: its weights are stored quantized; allowed: a model in bf16 or float32, which "
                "recipe.base_format nf4 takes to four bits, and fp8 to eight"
            )
        return config

    @cached_property
    def family(self) -> Family:
        from sameday.models.families import family_of

        return family_of(self.config.model_type)

    @property
    def loading_advice(self) -> str:
        recipe = self.recipe
        fewer = ("a smaller recipe.model", "recipe.precision bf16", "recipe.train lora", "recipe.base_format nf4")
        four_bits = recipe.train == "lora" and recipe.base_format != "nf4"
        helps = (True, recipe.precision != "bf16", recipe.train != "lora", four_bits)
        return ", ".join([*(what for what, so in zip(fewer, helps, strict=True) if so), "a GPU with more memory"])

    def drop_too_long(self, splits: Any) -> Any:
        from sameday.tasks.vqa.loading import drop_too_long

        return drop_too_long(self.recipe, self._encoder, splits)

    def image_contents(self, splits: Any) -> dict[str, set[str]]:
        from sameday.data.questions.summary import contents

        return contents(splits)

    def hints(self, splits: Any) -> list[str]:
        from sameday.data.questions.summary import spaces_around
        from sameday.tasks.vqa.loading import beyond_positions

        longest = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return [*beyond_positions(splits, longest), *spaces_around(splits), *self._test_hints(splits)]

    def _test_hints(self, splits: Mapping[str, Sequence[Sample]]) -> list[str]:
        """Test questions are read for this alone, before the training that they are to judge. None are downloaded."""
        from sameday.data.questions.hub import to_be_brought
        from sameday.data.questions.sets import Reading
        from sameday.data.questions.summary import common_with, refused_later

        files = [file for part in self.recipe.data.sets if (file := self._file(part, "test")) is not None]
        if "test" in splits or not files or any(map(to_be_brought, files)):
            return []
        test = Reading(self.recipe, self.home, self.family, self.needed_stages, lambda _: None)
        try:
            refuse(test.read(("test",)).errors)
        except (BadInput, RunStopped) as error:  # such as a disk that has no room for the images of a table
            return [refused_later("test", "questions", error)]
        return common_with("test", self.image_contents({**splits, **test.splits}))

    def data_digests(self, splits: Any) -> dict[str, str]:
        from sameday.tasks.vqa.digests import data_digests

        return data_digests(self.recipe, splits)

    def sample_ids(self, splits: Any, split: str) -> frozenset[Hashable]:
        return frozenset(sample.id for sample in splits[split])

    def data_files(self, splits: Any) -> dict[str, dict[Path, str]]:
        data, categories = self.recipe.data, self.recipe.categories
        files: dict[str, dict[Path, str]] = {}
        for split, what in DATA.items():
            listed = [file for part in data.sets if (file := self._file(part, split)) is not None]
            if listed and split in splits:
                images = {image.path: image.digest for each in splits[split] for image in each.images}
                files[what] = {**dict.fromkeys((resolve_path(self.home, file) for file in listed), ""), **images}
        if categories is not None and categories.table is not None:
            files["categories"] = {resolve_path(self.home, categories.table): ""}
        return files

    @cached_property
    def _encoder(self) -> Encoder:
        from sameday.tasks.vqa.loading import load_encoder, load_processor

        return load_encoder(self.recipe, self.home, load_processor(self.family, self.recipe, self.home))

    def epoch_flop(self, plan: Plan, splits: Any) -> float:
        """Of the language model: a tower adds a tenth or so."""
        from sameday.data.questions.sets import seen_in_epoch
        from sameday.tasks.vqa.automatic import language_weights

        samples: list[Sample] = splits["train"]
        encoded = [self._encoder.encode(sample) for sample in samples[:: -(-len(samples) // SOME)]]
        prefix = sum(each.prefix for each in encoded) / len(encoded)
        rest = sum(each.length for each in encoded) / len(encoded) - prefix
        shares = plan.share_images and self.recipe.order.kind == "by_image"
        prefixes = len({sample.image_key for sample in samples}) if shares else len(samples)
        # A matmul forward and one for its input's gradient; one more for the weights' where they are trained.
        matmuls = 2 if self.recipe.train == "lora" else 3
        tokens = prefixes * prefix + len(samples) * rest
        tokens *= seen_in_epoch(samples, [part.weight for part in self.recipe.data.sets]) / len(samples)
        return 2 * matmuls * tokens * language_weights(self.config.get_text_config())

    def parameters(self) -> int:
        """Of the language model: nearly all of them."""
        from sameday.tasks.vqa.automatic import language_weights

        return language_weights(self.config.get_text_config())

    def least_memory(self, plan: Plan, ranks: int, trains: bool) -> Needed:
        from sameday.tasks.vqa.weights import SMALL, least_bytes

        if self.parameters() <= SMALL:
            return Needed()
        kinds = (self.config.dtype, self.config.get_text_config().dtype)
        stored = next((str(each).removeprefix("torch.") for each in kinds if each is not None), "")
        return least_bytes(self.recipe, self.family, self._without_weights, stored, trains)

    def load(self, plan: Plan, device: torch.device, splits: Any) -> VqaTask:
        from sameday.tasks.vqa.task import VqaTask

        return self._load(VqaTask, plan, device, splits)

    def _load(self, kind: type[Loaded], plan: Plan, device: torch.device, splits: Any) -> Loaded:
        import transformers

        if not sys.stderr.isatty():
            transformers.utils.logging.disable_progress_bar()
        kept = None if self.kept is None or self.frozen() is None else partial(self.kept, self.frozen())
        return kind.load(self.recipe, plan, self.home, device, splits, kept)

    def frozen(self) -> Hashable | None:
        """All that reading a base model depends on; adapters are added to it afterwards."""
        recipe = self.recipe
        name = resolve_model(self.home, recipe.model)
        return (name, recipe.revision, recipe.precision, recipe.base_format) if recipe.train == "lora" else None

    def choose_plan(self, machine: Machine, ranks: int) -> tuple[Plan, dict[str, str]]:
        from sameday.tasks.vqa.automatic import choose_plan

        return choose_plan(self.recipe, machine, self.config, ranks, self._decoder)

    def check_plan(self, plan: Plan, machine: Machine) -> None:
        from sameday.tasks.vqa.automatic import attention_kernel
        from sameday.tasks.vqa.problems import problems_beside_attention

        attention_kernel(plan, machine, self.recipe.precision, self._decoder)
        refuse(problems_beside_attention(plan, self.recipe, machine, self._decoder))

    def _decoder(self) -> Decoder:
        """What is wrong with a model is told where it is loaded."""
        from sameday.tasks.vqa.automatic import head_width
        from sameday.tasks.vqa.problems import Decoder

        try:
            config = self.config
            text = config.get_text_config()
            tied = any(getattr(each, "tie_word_embeddings", False) for each in (config, text))
            return Decoder("split" in self.family.kernels(config), head_width(text), not tied)
        except BadInput:
            return Decoder()

    def resolve_auto(self, plan: Plan, machine: Machine) -> Resolved:
        from sameday.tasks.vqa.automatic import attention_kernel
        from sameday.tasks.vqa.problems import problems_beside_attention

        problems = list(problems_beside_attention(plan, self.recipe, machine, self._decoder))
        if self.recipe.base_format == "nf4":
            from sameday.models.nf4 import lacking

            problems += [why for why in [lacking(machine.device)] if why is not None]
        if self.recipe.base_format == "fp8":
            from sameday.models import fp8

            problems += [why for why in [fp8.lacking(machine)] if why is not None]
        try:
            kernel, why = attention_kernel(plan, machine, self.recipe.precision, self._decoder)
        except BadInput as error:
            problems.append(str(error))
        refuse(problems)
        if plan.attention != "auto":
            return Resolved(plan)
        return Resolved(plan.model_copy(update={"attention": kernel}), {"attention": why})

    def recipe_for_evaluation(self) -> VlmRecipe:
        return self.recipe.model_copy(update={"start_adapter": None})

    def starts_from(self) -> Path | None:
        start: str | None = self.recipe.start_adapter
        return None if start is None else resolve_path(self.home, start)

    def recipe_with_adapter(self, folder: Path) -> VlmRecipe:
        from sameday.models.start import adapter_form, check_start

        model, whose = self._without_weights, "--adapter"
        base = resolve_model(self.home, self.recipe.model)
        lora, tower = adapter_form(model, self.family, folder, base, whose)
        changes = {"train": "lora", "lora": lora, "train_vision": tower, "start_adapter": str(folder.absolute())}
        recipe = self.recipe.model_copy(update=changes | {"learning_rates": {}})
        recipe._adapter_from = whose
        check_start(model, self.family, recipe, folder, base, whose)
        return recipe

    def merge(self, weights: Path, out: Path, say: Say) -> None:
        import torch

        from sameday.models.handover import asked_of, save_readme, save_settings
        from sameday.models.merge import merge
        from sameday.models.nf4 import lacking
        from sameday.models.start import check_start
        from sameday.tasks.vqa.loading import load_encoder, load_processor

        recipe, base = self.recipe, resolve_model(self.home, self.recipe.model)
        if recipe.train != "lora":
            raise BadInput(f"{weights}: is a whole model already, and has nothing to merge")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if recipe.base_format == "nf4" and (why := lacking(device.type)) is not None:
            raise BadInput(why)
        check_start(self._without_weights, self.family, recipe, weights, base, "merge")
        asked = asked_of(weights)  # before merging: a run under way may remove its checkpoint meanwhile
        done = merge(self._without_weights, recipe, base, weights, out, say, device)
        whole = recipe.model_copy(update={"train": "all", "base_format": "precision"})
        encoder = load_encoder(recipe, self.home, load_processor(self.family, recipe, self.home))
        save_settings(out, self.family, encoder)
        save_readme(out, self.family, encoder, whole, base, asked, fingerprint=recipe.fingerprint)
        kept = f"{recipe.precision} rounds what the adapter changes by {done.rounding:.2%}"
        say(f"{done.tensors} tensors, {done.changed} of them changed by the adapter; {kept}")

    def merged_bytes(self) -> int:
        from sameday.models.formats import computed_in

        each = computed_in(self.recipe).itemsize
        return sum(parameter.numel() * each for parameter in self._without_weights.parameters())

    def low_memory(self, plan: Plan) -> Plan:
        from sameday.hardware.machine import detect_machine, device_kind
        from sameday.tasks.vqa.automatic import low_memory

        return low_memory(plan, self.recipe, detect_machine(device_kind(plan)), self._decoder)

    def for_evaluation(self, plan: Plan) -> Plan:
        """LoRA's kernels compute nothing where there is no gradient, there is room for all weights, and no image comes
        twice."""
        changes = {"cuda_graphs": False, "lora_kernel": "plain", "embeddings_on": "device", "keep_features": False}
        return plan.model_copy(update=changes)

    def fits_two_arms(self, memory: int) -> bool:
        """A reference takes twice the weights in float32 and about as much for activations, another arm the weights
        and activations."""
        from sameday.tasks.vqa.automatic import language_weights

        return self.recipe.train == "lora" and memory > 5 * 2 * language_weights(self.config.get_text_config())

    def fill_cache(self, session: Any, asked: Caching) -> bool:
        from sameday.tasks.vqa.fill import fill_cache

        return fill_cache(self, session, asked)

    def images_folder(self, plan: Plan) -> Path:
        """What a cache will make need not be there yet."""
        where = plan.cache_dir if plan.cache in ("pixels", "features") else self.recipe.data.image_root
        path = resolve_path(self.home, where).resolve()
        return next(each for each in (path, *path.parents) if each.is_dir())

    def not_plain(self) -> list[str]:
        from sameday.tasks.vqa.plain import lost

        return list(lost(self.recipe))

    def plain_settings(self) -> dict[str, Any]:
        from sameday.tasks.vqa.plain import settings

        recipe, family = self.recipe, self.family
        # By what stands in the names of their parameters, the first that does.
        names = {"projector": family.projector_names, "tower": family.tower_names}
        rates = [(f".{name}.", recipe.learning_rates.get(part)) for part in names for name in names[part]]
        told = {"target_modules": self._targets, "rates": rates, "closing": self._encoder.closing}
        return settings(recipe, self.home) | told

    def choices(self, machine: Machine) -> list[Choice]:
        return choices(self.recipe, machine, self.cannot(machine))

    def cuts(self, device: str, plan: Plan) -> list[dict[str, Any]]:
        return cuts(device, plan)

    def cannot(self, machine: Machine) -> frozenset[tuple[str, Any]]:
        from sameday.tasks.vqa.problems import cannot

        return cannot(self.recipe, machine, self._decoder)

    def trial_values(self, device: str, size: int) -> dict[str, tuple[Any, ...]]:
        return trial_values(device, size)

    def words(self) -> tuple[str, str]:
        return recipe_words(self.recipe)
