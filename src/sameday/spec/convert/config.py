"""A Trainer-style config becomes a recipe and a plan. What no recipe can say is refused."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sameday.spec.convert import keys
from sameday.spec.convert.conversion import Conversion, Note, show
from sameday.spec.convert.quantization import COMPUTE, quantization
from sameday.spec.convert.settings import Settings
from sameday.spec.document import read_document
from sameday.spec.errors import BadInput
from sameday.spec.explain import validate
from sameday.spec.load import resolve_path
from sameday.spec.lora import Lora
from sameday.spec.plan import Plan
from sameday.spec.questions import Prompt, stage_number
from sameday.spec.vqa import VqaRecipe


def convert(path: Path, families: Sequence[str] = (), drop: Sequence[str] = ()) -> Conversion:
    """Read a Trainer-style YAML. BadInput lists everything in it that no recipe can say. `families` are the supported
    ones; without them any model is taken. `drop` names keys or sections to leave out, whatever they say."""
    work = _Converter(read_document(path), path.parent, drop)
    work.model(families)
    quantization(work)
    work.simple()
    work.batch()
    work.length()
    work.schedule()
    work.optimizer()
    work.precision()
    work.adapters()
    work.questions()
    work.prompt()
    work.images()
    work.speed()
    work.intervals()
    work.best()
    work.name()
    work.remarks()
    return work.finish()


class _Converter(Settings):
    """Each method makes of some of the old settings what recipe and plan have for them."""

    def model(self, families: Sequence[str]) -> None:
        """Of a folder its configuration says what it is; of a name on the Hub, as far as it tells, the name."""
        name = self.text("model_name_or_path")
        if not name or not families:
            return
        allowed = f"(allowed: {', '.join(families)})"
        kind = _model_type(resolve_path(self.folder, name) / "config.json")
        squeezed = re.sub(r"[^a-z0-9]", "", name.lower())
        names = [each for family in families for each in (family.replace("_", ""), *keys.ALSO_CALLED.get(family, ()))]
        told = any(each in squeezed for each in names) and not keys.LOOK_ALIKE.search(name.lower())
        if kind is not None and kind not in families:
            self.refuse("model_name_or_path", f"its model type is {kind}, which is not supported {allowed}")
        elif kind is None and not told and keys.OTHER_FAMILIES.search(name.lower()):
            self.refuse("model_name_or_path", f"by its name it is of a family that is not supported {allowed}")
        elif kind is None and not told:
            self.why["model_name_or_path"] = f"its family is not told by its name: `train` looks at it {allowed}"
        if kind is None and keys.QUANTIZED.search(name.lower()):
            self.refuse("model_name_or_path", "by its name its weights are quantized, and no recipe says that")

    def simple(self) -> None:
        """What one old key says alone."""
        for name, (field, kind) in keys.DIRECT.items():
            value, why = self.get(name, kind), self.why.get(name, "")
            if value is None and name in keys.DEFAULTS and (name[:5] != "lora_" or self.has_adapters()):
                self.default(field, *keys.DEFAULTS[name])
            elif value is None:
                self.drop(name, "null: the default")
            else:
                if field.removeprefix("recipe.") in keys.PATHS:
                    path = resolve_path(self.folder, str(value))
                    why = "" if path.exists() else f"not found at {path}"
                self.put(field, value, [name], why)
        for name, what in (("model_name_or_path", "model"), ("train_file", "training questions")):
            if self.get(name, str) is None:
                self.refused.append(f"{self.document.source}: names no {what}: give {name}")
                self._set(keys.DIRECT[name][0], "?")
        for name, (neutral, effect) in keys.NEUTRAL.items():
            if name in self.old and keys.cast(self.old[name][1], bool) not in (None, *neutral):
                allowed = show(neutral[0] if neutral else None)
                self.refuse(name, f"{effect}, and no recipe says that (allowed: {allowed})")
            else:
                self.drop(name, "does nothing at this value")
        for name in self.old:
            known = (*keys.DIRECT, *keys.NEUTRAL, *keys.COMPUTED)
            if name not in known and not name.startswith(keys.QUANTIZATION):
                self.drop(name, keys.DROPPED.get(name) or keys.dropped_start(name) or "")

    def batch(self) -> None:
        per_device, accumulation = "per_device_train_batch_size", "gradient_accumulation_steps"
        size, times = self.get(per_device, int), self.get(accumulation, int)
        if size is None:
            size = 8
            self.default("plan.max_questions", size, per_device)
        else:
            self.put("plan.max_questions", size, [per_device], "questions at once")
        several = "on several devices, multiply by their number"
        if times is None:
            self.default("recipe.effective_batch", size, accumulation, f"{size} at once, none accumulated; {several}")
        else:
            whole = isinstance(size, int) and isinstance(times, int)
            why = f"{size} at once x {times} accumulated; {several}"
            self.put("recipe.effective_batch", size * times if whole else times, [accumulation], why)

    def length(self) -> None:
        limit, epochs = self.get("max_steps", int), self.get("num_train_epochs", int)
        limited = isinstance(limit, int) and limit > 0
        if limited:
            self.put("recipe.max_steps", limit, ["max_steps"], "the run ends here, whatever num_epochs says")
        else:
            self.drop("max_steps", "no limit")
        if epochs is None:
            self.default("recipe.num_epochs", 3, "num_train_epochs")
        elif isinstance(epochs, float) and limited:
            self.drop("num_train_epochs", "max_steps replaces it")
        elif isinstance(epochs, float):
            self.refuse("num_train_epochs", "must be whole: give max_steps for a part of an epoch")
        else:
            self.put("recipe.num_epochs", epochs, ["num_train_epochs"])

    def schedule(self) -> None:
        old = self.text("lr_scheduler_type")
        if not old:
            self.default("recipe.schedule", "linear", "lr_scheduler_type")
        elif old in keys.SCHEDULES:
            self.put("recipe.schedule", keys.SCHEDULES[old], ["lr_scheduler_type"])
        else:
            allowed = ", ".join(keys.SCHEDULES)
            self.refuse("lr_scheduler_type", f"no recipe has this schedule (allowed: {allowed})")
        steps, share = self.get("warmup_steps", float), self.get("warmup_ratio", float)
        if old == "constant":
            for name in ("warmup_steps", "warmup_ratio"):
                self.drop(name, "the Trainer's constant schedule has no warm-up")
        elif steps:
            if isinstance(steps, float) and 0 < steps < 1:
                self.put("recipe.warmup_ratio", steps, ["warmup_steps"], "below 1 it is a share of all steps")
            else:
                self.put("recipe.warmup_steps", self.get("warmup_steps", int), ["warmup_steps"])
            self.drop("warmup_ratio", "warmup_steps replaces it")
        else:
            self.drop("warmup_steps", "0 leaves it to warmup_ratio")
            if share is None:
                self.drop("warmup_ratio", "null: no warm-up")
            else:
                self.put("recipe.warmup_ratio", share, ["warmup_ratio"])

    def optimizer(self) -> None:
        one, two, both = self.get("adam_beta1", float), self.get("adam_beta2", float), self.get("betas", list)
        if both is not None:
            self.put("recipe.betas", both, ["betas"])
            for name, given in (("adam_beta1", one), ("adam_beta2", two)):
                if given is None:
                    self.drop(name, "null: betas says it")
                else:
                    self.refuse(name, f"but {self.old['betas'][0]}, which says both, is {show(both)}")
        elif (one, two) != (None, None):
            filled = [0.9 if one is None else one, 0.999 if two is None else two]
            self.put("recipe.betas", filled, ["adam_beta1", "adam_beta2"])
        for name in ("betas", "adam_beta1", "adam_beta2"):
            if (one, two, both) == (None, None, None):
                self.drop(name, "null: the default")
        norm = self.get("max_grad_norm", float)
        if norm is None:
            self.default("recipe.max_grad_norm", 1.0, "max_grad_norm")
        else:
            self.put("recipe.max_grad_norm", norm or None, ["max_grad_norm"], "" if norm else "0 does not clip")
        name = self.text("optim")
        if name in keys.OPTIMIZERS:
            why = "AdamW; its implementation is plan"
            self.put("plan.optimizer_impl", keys.OPTIMIZERS[name], ["optim"], why)
        elif name:
            self.refuse("optim", f"no recipe has this optimizer (allowed: {', '.join(keys.OPTIMIZERS)})")
        else:
            self.drop("optim", "null: the default")

    def precision(self) -> None:
        dtype, allowed = self.text("torch_dtype").lower().removeprefix("torch."), "(allowed: bf16, float32, tf32)"
        if self.get("fp16", bool):
            self.refuse("fp16", f"there is no fp16 recipe {allowed}")
        mixed = self.text("mixed_precision").lower()
        four_bits = self.new["recipe"].values.get("base_format") == "nf4"
        matmuls = self.text(COMPUTE).lower().removeprefix("torch.") if four_bits else ""
        for key, given in (("torch_dtype", dtype), ("mixed_precision", mixed), (COMPUTE, matmuls)):
            if given and given not in keys.DTYPES:
                self.refuse(key, f"no recipe has this precision {allowed}")
        name, chosen, why = "bf16", "float32", "bf16 is off"
        if self.get("bf16", bool):
            chosen, why = "bf16", "with float32 master copies of what is trained"
        elif "bf16" in (keys.DTYPES.get(dtype), keys.DTYPES.get(mixed)):
            name = "torch_dtype" if keys.DTYPES.get(dtype) == "bf16" else "mixed_precision"
            chosen, why = "bf16", "with float32 master copies of what is trained"
        elif self.get("tf32", bool):
            name, chosen, why = "tf32", "tf32", "float32 with TF32 matmuls"
        elif keys.DTYPES.get(matmuls) == "bf16" and not dtype and not mixed and self.get("bf16", bool) is None:
            name, chosen, why = COMPUTE, "bf16", "what the matmuls compute in"
        if self.get(name, bool) is None:
            self.default("recipe.precision", chosen, name)
        else:
            self.put("recipe.precision", chosen, [name], why)
        for other in ("bf16", "fp16", "tf32", "torch_dtype", "mixed_precision"):
            if other != name:
                self.drop(other, f"recipe.precision is {chosen}")
        if matmuls in keys.DTYPES and name != COMPUTE:
            if keys.DTYPES[matmuls] == chosen.replace("tf32", "float32"):
                self.drop(COMPUTE, f"recipe.precision is {chosen}")
            else:
                self.refuse(COMPUTE, f"but recipe.precision is {chosen}, which is what the matmuls compute in")

    def has_adapters(self) -> bool:
        names = [name for name, (_, value) in self.old.items() if value is not None]
        return any(name.startswith("lora_") or name == "start_adapter" for name in names)

    def adapters(self) -> None:
        targets = self.get("lora_target_modules", list)
        if not self.has_adapters():
            self.drop("lora_target_modules", "null: no adapters")
            why = "no LoRA key; the vision tower is frozen: set recipe.train_vision if the old run trained it"
            return self.default("recipe.train", "all", "lora", why)
        if isinstance(targets, str) and targets != "all" and re.fullmatch(r"\w+(?:[,\s]+\w+)*", targets):
            targets = re.split(r"[,\s]+", targets)
        if targets is None:
            names = list(Lora.model_fields["target_modules"].default)
            why = "PEFT has no default for Qwen-VL: check what the old run used"
            self.default("recipe.lora.target_modules", names, "lora_target_modules", why)
        elif isinstance(targets, str):
            self.refuse("lora_target_modules", "must be a list of layer names, such as [q_proj, v_proj]")
        else:
            self.put("recipe.lora.target_modules", targets, ["lora_target_modules"])

    def questions(self) -> None:
        """Of which stages and types."""
        chosen = {"stage": "stage", "stage_filter": "stage", "question_type": "type", "question_types": "type"}
        given = {name: self.old[name][1] for name in chosen if name in self.old}
        for name, value in given.items():
            field = f"recipe.data.where.{chosen[name]}"
            values = [stage_number(each) if chosen[name] == "stage" else each for each in _listed(value)]
            other = next((each for each in given if each != name and chosen[each] == chosen[name]), None)
            if value in (None, "", []) or (name, value) == ("stage", "sft"):
                self.drop(name, "all questions are used")
            elif other is not None and given[other] not in (None, "", [], "sft", value):
                self.refuse(name, f"but {self.old[other][0]}, which means the same, is {show(given[other])}")
            elif chosen[name] == "stage" and not all(isinstance(each, int) for each in values):
                self.refuse(name, "no recipe has such a stage (allowed: a whole number, a list of them, sft)")
            else:
                self.put(field, values, [name], "only such questions are used")

    def prompt(self) -> None:
        name = "instruction_template"
        text = self.text(name).replace("{}", "{question}")
        if text in ("", "{question}"):
            return self.drop(name, "does nothing at this value")
        try:
            made = Prompt(default=text)
        except ValidationError as error:
            return self.refuse(name, f"the prompt {error.errors()[0]['ctx']['error']}")
        self.put("recipe.prompt", {"default": made.default}, [name], "a line's own instruction stands instead of it")

    def images(self) -> None:
        """Which implementation resizes them, and whether they are kept."""
        fast, here = self.get("use_fast", bool), importlib.util.find_spec("torchvision") is not None
        backend = "pil" if fast is False else "torchvision"
        why = "the two resize about a third of the pixels one level apart"
        why += "" if here or backend == "pil" else "; torchvision is not installed here: a run will need it"
        if fast is None:
            default = "AutoProcessor's choice where torchvision is installed; set pil if the old run had the slow one"
            self.default("recipe.image_backend", backend, "use_fast", f"{default}: {why}")
        else:
            self.put("recipe.image_backend", backend, ["use_fast"], why)
        if self.get("use_vision_cache", bool) is None:
            self.drop("use_vision_cache", "null: the default")
        else:
            kept = "pixels" if self.get("use_vision_cache", bool) else "none"
            why = "made on the way, or ahead by `sameday cache --kind pixels`" if kept == "pixels" else ""
            self.put("plan.cache", kept, ["use_vision_cache"], why)

    def speed(self) -> None:
        fields = {"gradient_checkpointing": ("checkpointing", "full"), "torch_compile": ("compile", "layers")}
        for name, (field, on) in fields.items():
            if self.get(name, bool) is None:
                self.drop(name, "null: the default")
            else:
                self.put(f"plan.{field}", on if self.get(name, bool) else "none", [name])

    def intervals(self) -> None:
        """How often to save, evaluate and log. The model is the same: what is unclear takes the default."""
        for what, none in (("save", "epoch"), ("eval", None)):
            strategy, steps = self.text(f"{what}_strategy").lower(), self.get(f"{what}_steps", int)
            field, names = f"plan.{what}_steps", [f"{what}_strategy"]
            if strategy in ("no", "false"):  # YAML 1.1 reads `no` as false
                self.put(field, none, names, "saved so often at least" if none else "at the end")
            elif strategy in ("epoch", "best"):
                self.put(field, "epoch", names)
            elif isinstance(steps, int) and not isinstance(steps, bool):
                self.put(field, steps, [f"{what}_steps", *names])
                continue
            elif strategy == "steps":
                self.put(field, 500, names, "the Trainer's default")
            else:
                self.drop(names[0], f"{field} has no such choice")
            chosen = self.new["plan"].values.get(f"{what}_steps", "epoch")
            self.drop(f"{what}_steps", f"not used: {field} is {show(chosen)}")
        steps = self.get("logging_steps", int)
        if isinstance(steps, int):
            self.put("plan.log_steps", steps, ["logging_steps"])
        else:
            self.drop("logging_steps", "plan.log_steps is a number of steps")

    def best(self) -> None:
        """Which weights are the result. How often they are compared decides it too, so that it goes into the recipe."""
        first, metric, greater = "load_best_model_at_end", "metric_for_best_model", "greater_is_better"
        if self.get(first, bool) is not True:
            for name in (first, metric, greater):
                self.drop(name, "the result is the last weights; the best checkpoint is kept beside them")
            return
        asked = self.text(metric).removeprefix("eval_") or "loss"
        every = self.new["plan"].values.get("eval_steps", "epoch")
        if asked not in VqaRecipe.scores:
            self.refuse(metric, f"no such validation score is known (allowed: {', '.join(VqaRecipe.scores)})")
        elif self.get(greater, bool) not in (None, asked != "loss"):
            self.refuse(greater, f"the best {asked} is the {'lowest' if asked == 'loss' else 'highest'}")
        elif every is None or self.get("validation_file", str) is None:
            self.refuse(first, "without validation the best weights cannot be known")
        else:
            self.put("recipe.best", {"metric": asked, "every": every}, [first, metric, greater])

    def name(self) -> None:
        where = "the run folder is chosen with --out"
        for name in ("run_name", "output_dir"):
            clean = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(self.text(name)).name).strip("-.")
            if clean and "name" not in self.new["recipe"].values:
                self.put("recipe.name", clean, [name], where if name == "output_dir" else "")
            else:
                self.drop(name, where if name == "output_dir" else "no name in it")

    def template(self) -> bool:
        """Whether the config is LLaMA-Factory's: its templates have a line break at the end of an answer."""
        name = self.text("template")
        if name in keys.OWN_TEMPLATES:
            self.put("recipe.answer_end", "turn", ["template"], "this template's answers end with a line break")
        elif name:
            self.refuse("template", f"the prompt would be another one (allowed: {', '.join(keys.OWN_TEMPLATES)})")
        else:
            self.drop("template", "null: the model's own chat template")
        return bool(name)

    def remarks(self) -> None:
        """What the old config could not say, because its program did it always."""
        weight = "the Trainer at one question at a time weighs each question the same"
        if self.new["plan"].values["max_questions"] != 1:
            weight = "near, not the same: the Trainer weighs by token inside a micro-batch of several questions"
        end = "a program that masks the prompt alone learns the line break after an answer too: then set turn"
        for field, value, why in (
            ("recipe.loss_weight", "sample", weight),
            *([] if self.template() else [("recipe.answer_end", "end_token", end)]),
            ("recipe.order", "shuffle", "by_image is what lets images be shared, and is another recipe"),
            (
                "plan.share_images",
                False,
                "to be tuned later, once the order keeps an image's questions together",
            ),
        ):
            self._set(field, value)
            self.notes.append(Note("(always)", field, None, why, value))

    def finish(self) -> Conversion:
        specs: dict[str, Any] = {}
        for name in ("recipe", "plan"):
            try:
                new = self.new[name]
                specs[name] = validate(VqaRecipe, new) if name == "recipe" else validate(Plan, new)
            except BadInput as error:
                self.refused += str(error).splitlines()
        if self.refused:
            raise BadInput("\n".join(self.refused))
        order = {key: index for index, key in enumerate(self.leaves)}
        notes = sorted(self.notes, key=lambda note: order.get(note.key, len(order)))
        return Conversion(specs["recipe"], specs["plan"], notes, self.folder)


def _listed(value: Any) -> list[Any]:
    """Names in one text may stand side by side, with commas between them."""
    if isinstance(value, str) and "," in value:
        return [each.strip() for each in value.split(",")]
    return value if isinstance(value, list) else [value]


def _model_type(config: Path) -> str | None:
    """As a model's folder has it; None where there is no such folder."""
    try:
        with config.open(encoding="utf-8") as file:
            kind = json.loads(file.read(1_000_000)).get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return str(kind)
