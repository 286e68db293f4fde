"""A Trainer-style config becomes a recipe and a plan. What no recipe can say is refused."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sameday.spec.convert import keys
from sameday.spec.convert.adapters import adapters, form_of_start, has_adapters, one_adapter, switches
from sameday.spec.convert.batch import batch
from sameday.spec.convert.columns import columns
from sameday.spec.convert.conversion import Conversion, Note, show
from sameday.spec.convert.decay import explain_decay
from sameday.spec.convert.deepspeed import agree
from sameday.spec.convert.families import OTHER, look_alike, names_of
from sameday.spec.convert.interpolation import refuse_interpolations
from sameday.spec.convert.launching import add_launchers_file, count_devices, told_by_file
from sameday.spec.convert.objective import refuse_other_objectives, refuse_other_stages
from sameday.spec.convert.own import refuse_own
from sameday.spec.convert.precision import precision
from sameday.spec.convert.quantization import quantization
from sameday.spec.convert.rates import rates
from sameday.spec.convert.recorded import take_values
from sameday.spec.convert.running import Running
from sameday.spec.convert.settings import not_found
from sameday.spec.convert.shell.config_file import refuse_config_file
from sameday.spec.convert.shell.environment import take_environment
from sameday.spec.convert.shell.outside import reached
from sameday.spec.convert.shell.script import Script, is_script, read_script
from sameday.spec.convert.trainers.registry import recognise
from sameday.spec.convert.weighting import loss_weight
from sameday.spec.document import read_document
from sameday.spec.errors import BadInput
from sameday.spec.explain import validate
from sameday.spec.load import resolve_path
from sameday.spec.plan import Plan
from sameday.spec.questions import Prompt, stage_number
from sameday.spec.vqa import VqaRecipe


def convert(
    path: Path,
    families: Sequence[str] = (),
    drop: Sequence[str] = (),
    trainer: str | None = None,
    data: Mapping[str, str] | None = None,
) -> Conversion:
    """Read a config of transformers' Trainer or of another trainer, or a script that starts it. BadInput lists
    everything in it that no recipe can say. `families` are the supported ones; without them any model is taken. `drop`
    names keys or sections to leave out, whatever they say; `trainer` says whose config it is, where its keys are not
    to; `data` are files of questions and images that stand instead of the config's, relative to its folder."""
    return examine(path, families, drop, trainer, data).finish()


def examine(
    path: Path,
    families: Sequence[str] = (),
    drop: Sequence[str] = (),
    trainer: str | None = None,
    data: Mapping[str, str] | None = None,
) -> _Converter:
    """What becomes of each key, and what is refused."""
    if path.suffix in (".py", ".ipynb") and path.is_file():
        raise BadInput(
            f"{path}: is a program, and what it would do is not known before it runs; allowed: a trainer's config in "
            "YAML or JSON, or a shell script with its command line"
        )
    script = read_script(path, data or {}, trainer) if is_script(path) else Script(read_document(path))
    document, command = script.document, script.command
    take_values(document)
    refuse_other_objectives(path, command)
    refuse_config_file(path, script, trainer)
    if "stage" not in drop:
        refuse_other_stages(document)
    refuse_own(path, document.values)
    add_launchers_file(document, path.parent)
    try:
        whose, told_by = recognise((key for key, _ in keys.leaves(document.values, "")), command, trainer)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    take_environment(script, whose, drop)
    work = _Converter(document, path.parent, drop, whose, command, data)
    work.told_by = told_by
    work.notes += script.notes
    if not command:
        refuse_interpolations(work)
    count_devices(work)
    one_adapter(work)
    form_of_start(work)
    work.take_defaults()
    whose.prepare(work)
    work.model(families)
    quantization(work)
    switches(work)
    explain_decay(work)
    work.image_root()
    work.simple()
    batch(work)
    work.length()
    work.schedule()
    work.optimizer()
    adapters(work)
    rates(work)
    precision(work)
    agree(work)
    told_by_file(work)
    work.questions()
    columns(work)
    work.prompt()
    work.images()
    work.speed()
    work.intervals()
    work.best()
    work.name()
    work.remarks()
    work.notes += reached(script.defaults, work)
    taken = {note.key for note in work.notes if note.went_to is not None}
    work.refused += [why for name, why in script.unknown.items() if name in taken]
    return work


class _Converter(Running):
    """Each method makes of some of the old settings what recipe and plan have for them."""

    told_by = ""

    def model(self, families: Sequence[str]) -> None:
        """Of a folder its configuration says what it is; of a name on the Hub, as far as it tells, the name."""
        name = self.text("model_name_or_path")
        if not name or not families:
            return
        allowed = f"(allowed: {', '.join(families)})"
        kind = keys.model_type(resolve_path(self.folder, name) / "config.json")
        squeezed = re.sub(r"[^a-z0-9]", "", name.lower())
        names = [each for family in families for each in names_of(family)]
        told = any(each in squeezed for each in names) and not look_alike(name)
        if kind is not None and kind not in families:
            self.refuse("model_name_or_path", f"its model type is {kind}, which is not supported {allowed}")
        elif kind is None and not told and keys.OTHER_FAMILIES.search(name.lower()):
            self.refuse("model_name_or_path", f"by its name it is {look_alike(name) or OTHER} {allowed}")
        elif kind is None and not told:
            self.why["model_name_or_path"] = f"its family is not told by its name: `train` looks at it {allowed}"
        if kind is None and keys.QUANTIZED.search(name.lower()):
            self.refuse(
                "model_name_or_path",
                "by its name its weights are quantized, and no recipe says that: give the model that it was made of, "
                "with load_in_4bit: true and bnb_4bit_quant_type: nf4 if it was in nf4",
            )

    def simple(self) -> None:
        """What one old key says alone."""
        for name, (field, kind) in keys.DIRECT.items():
            self.one_file(name)
            value, why = self.get(name, kind), self.why.get(name, "")
            if name in ("min_pixels", "max_pixels") and self.one_size():
                self.drop(name, self.one_size())
            elif value is None and name in keys.DEFAULTS and (name[:5] != "lora_" or has_adapters(self)):
                self.default(field, *keys.DEFAULTS[name])
            elif value is None:
                self.drop(name, self.trainer.own_nulls.get(name, "null: the default"))
            else:
                if field.removeprefix("recipe.") in keys.PATHS:
                    why = not_found(resolve_path(self.folder, str(value)))
                self.put(field, value, [name], why)
        for name, what in (("model_name_or_path", "model"), ("train_file", "training questions")):
            if self.get(name, str) is None and not self.is_set(keys.DIRECT[name][0]):
                option = ", or --train FILE" if name == "train_file" else ""
                told = any(f": {each} is " in line for each in self.data_keys() for line in self.refused)
                if name != "train_file" or not told:
                    self.refused.append(f"{self.document.source}: names no {what}: give {name}{option}")
                self._set(keys.DIRECT[name][0], "?")
        for name, (neutral, effect) in self.neutral.items():
            # Where true is what does nothing, a program that tests for truth takes null for false.
            passing = neutral if neutral[:1] == (True,) and not self.trainer.null_is_default else (None, *neutral)
            if name in self.old and keys.cast(self.old[name][1], bool) not in passing:
                remedy, effect = ": " in effect, effect.format(key=self.old[name][0])
                allowed = f" (allowed: {show(neutral[0] if neutral else None)})" if neutral or not remedy else ""
                self.refuse(name, f"{effect}{'' if remedy else ', and no recipe says that'}{allowed}")
            else:
                self.drop(name, "does nothing at this value")
        for name in self.old:
            known = {*self.handled, *self.neutral}
            if name not in known and not name.startswith(keys.QUANTIZATION):
                self.drop(name, self.dropped.get(name) or keys.begins(name, self.starts) or "")

    def image_root(self) -> None:
        """Recipes written into another folder name the config's folder too, which nobody would expect to find there."""
        if not self.is_set("recipe.data.image_root") and self.get("image_root", str) is None:
            why = "nothing says where images are: they are looked for from the config's folder; else give --images DIR"
            self.default("recipe.data.image_root", ".", "image_root", why)
            self.done("image_root")

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
        old = self.text("lr_scheduler_type").lower()
        if not old:
            self.default("recipe.schedule", "linear", "lr_scheduler_type")
        elif old in keys.SCHEDULES:
            why = "one cycle, where no lr_scheduler_kwargs ask for more" if old == "cosine_with_restarts" else ""
            self.put("recipe.schedule", keys.SCHEDULES[old], ["lr_scheduler_type"], why)
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
                self.put("recipe.warmup_ratio", share, ["warmup_ratio"], self.why.get("warmup_ratio", ""))

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
        if self.is_null("max_grad_norm") and not self.trainer.null_is_default:
            self.put("recipe.max_grad_norm", None, ["max_grad_norm"], "null does not clip")
        elif norm is None:
            self.default("recipe.max_grad_norm", 1.0, "max_grad_norm")
        else:
            clips = not isinstance(norm, int | float) or 0 < norm < math.inf
            said = "" if clips else f"{norm:g} does not clip"
            self.put("recipe.max_grad_norm", norm if clips else None, ["max_grad_norm"], said)
        name = self.text("optim").lower()
        if name in keys.OPTIMIZERS:
            why = "AdamW; its implementation is plan"
            self.put("plan.optimizer_impl", keys.OPTIMIZERS[name], ["optim"], why)
        elif name:
            self.refuse("optim", f"no recipe has this optimizer (allowed: {', '.join(keys.OPTIMIZERS)})")
        else:
            self.drop("optim", "null: the default")

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
        if fast is None and self.trainer.image_backend and not self.one_size():  # others resize by the processor alone
            self.drop("use_fast", "null: the default")
            self.always("recipe.image_backend", *self.trainer.image_backend)
        elif fast is None:
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

    def template(self) -> None:
        """The prompt by its trainer's name for it; a model is asked by its own chat template alone."""
        name, known = self.text("template"), self.trainer.templates
        own = [each for each in known if self.family is None or self.kind in known[each].kinds]
        allowed = [each for each in own if not known[each].without_thought]
        if not name:
            return self.drop("template", "null: the model's own chat template")
        if name in own and name not in allowed:
            return self.refuse("template", known[name].thought(self.get("enable_thinking", bool) is not False))
        if name not in allowed:
            return self.refuse("template", f"the prompt would be another one (allowed: {', '.join(allowed)})")
        asked = known[name]
        ends = ("turn", "a line break") if asked.line_break else ("end_token", "the token that ends it")
        doubt = f"; else it is the model's own chat template{self.if_of(asked.kinds)}" if self.family is None else ""
        self.put("recipe.answer_end", ends[0], ["template"], f"this template's answers end with {ends[1]}{doubt}")
        first = asked.system_prompts.get(self.kind or asked.kinds[0])
        if first is not None and not self.is_set("recipe.system_prompt"):
            self.put("recipe.system_prompt", first, ["template"], "what this template puts first")
        if asked.near and not self.is_set("recipe.prompt"):
            self.put("recipe.prompt", None, ["template"], asked.near)

    def answer_end(self) -> tuple[str, str]:
        """Where the old run stopped to learn, and why."""
        if self.family is not None and not self.family.line_break:
            return "end_token", "no line break follows the token that ends an answer of this model"
        unknown = "a program that masks the prompt alone learns the line break after an answer too: then set turn"
        by_kind = self.trainer.answer_ends.get(self.kind or "")
        return by_kind or self.trainer.answer_end or ("end_token", unknown)

    def end_tokens(self) -> None:
        """Answers end with the token that the model's own chat template ends a turn with, whoever names it."""
        own = self.family.end_of_turn if self.family is not None else ""
        for name in [name for name in self.trainer.end_tokens if name in self.old]:
            value = self.old[name][1]
            if value in (None, "", []):
                self.drop(name, "null: the model's own")
            elif own and {*map(str, _listed(value))} == {own}:
                self.drop(name, "the token that ends an answer of this model anyway")
            else:
                allowed = own or "the model's own; neither its folder nor its name tells which that is"
                self.refuse(name, f"an answer would end with another token (allowed: {allowed})")

    def remarks(self) -> None:
        """What the old config could not say, because its program did it always."""
        self.template()
        self.end_tokens()
        prompt = self.trainer.prompts.get(self.kind or "")
        for field, value, why in (
            ("recipe.loss_weight", *loss_weight(self)),
            ("recipe.answer_end", *self.answer_end()),
            *([("recipe.prompt", None, prompt)] if prompt is not None else []),
            ("recipe.order", "shuffle", "by_image is what lets images be shared, and is another recipe"),
            (
                "plan.share_images",
                False,
                "to be tuned later, once the order keeps an image's questions together",
            ),
        ):
            if not self.is_set(field):
                self.always(field, value, why)

    def always(self, field: str, value: Any, why: str) -> None:
        self._set(field, value)
        self.notes.append(Note("(always)", field, None, why, value))

    def data_keys(self) -> list[str]:
        """The config's own keys that say where training questions come from."""
        names = ("dataset", *self.trainer.data.get("--train", ()))
        return [key for key in self.leaves if self._canonical(key) in names]

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
        return Conversion(specs["recipe"], specs["plan"], notes, self.folder, self.trainer, self.told_by)


def _listed(value: Any) -> list[Any]:
    """Names in one text may stand side by side, with commas between them."""
    if isinstance(value, str) and "," in value:
        return [each.strip() for each in value.split(",")]
    return value if isinstance(value, list) else [value]
