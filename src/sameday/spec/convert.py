"""A Trainer-style config becomes a recipe and a plan. What no recipe can say is refused."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sameday.spec import trainer_keys as keys
from sameday.spec.errors import BadInput
from sameday.spec.load import Document, dump_yaml, read_document, resolve_path, validate
from sameday.spec.lora import Lora
from sameday.spec.plan import Plan
from sameday.spec.record import write_text
from sameday.spec.vqa import VqaRecipe


@dataclass(frozen=True)
class Note:
    """What became of one key. `went_to` is the new field, or None where the key was dropped."""

    key: str
    went_to: str | None
    value: Any
    why: str
    became: Any = None


@dataclass(frozen=True)
class Conversion:
    """The recipe and the plan, with paths as the old file had them, relative to `config_dir`."""

    recipe: VqaRecipe
    plan: Plan
    notes: list[Note]
    config_dir: Path


def convert(path: Path) -> Conversion:
    """Read a Trainer-style YAML. BadInput lists everything in it that no recipe can say."""
    work = _Converter(read_document(path), path.parent)
    work.simple()
    work.batch()
    work.length()
    work.schedule()
    work.optimizer()
    work.precision()
    work.adapters()
    work.speed()
    work.intervals()
    work.best()
    work.name()
    work.remarks()
    return work.finish()


class _Converter:
    """The old settings by their Hugging Face names, and what has been made of them so far."""

    def __init__(self, document: Document, folder: Path) -> None:
        self.document, self.folder = document, folder
        self.old: dict[str, tuple[str, Any]] = {}
        self.notes: list[Note] = []
        self.refused: list[str] = []
        self.new = {kind: Document(document.source) for kind in ("recipe", "plan")}
        self.leaves = dict(keys.leaves(document.values, ""))
        for key, value in self.leaves.items():
            name = keys.canonical(key)
            if name is None:
                near = difflib.get_close_matches(key.split(".")[-1], keys.KNOWN, n=1)
                self._drop_key(key, "not known" + (f"; nearest: {near[0]}" if near else ""))
            elif name in self.old and self.old[name][1] != value:
                other, there = self.old[name]
                self._refuse_key(key, f"but {other}, which means the same, is {_show(there)}")
            elif name in self.old:
                self._drop_key(key, f"says the same as {self.old[name][0]}")
            else:
                self.old[name] = (key, value)

    def get(self, name: str, kind: type) -> Any:
        """The old value as this type where it can be read so; None where it is absent or null."""
        return keys.cast(self.old[name][1], kind) if name in self.old else None

    def text(self, name: str) -> str:
        return "" if self.get(name, str) is None else str(self.get(name, str))

    def put(self, field: str, value: Any, names: Sequence[str], why: str = "") -> None:
        """Set a new field from the old settings of these names."""
        given = [self.old[name][0] for name in names if name in self.old]
        path = self._set(field, value)
        self.new[field.split(".")[0]].places[path] = f"{self._place(given[0])}: {given[0]}"
        self.notes += [Note(key, field, self.leaves[key], why, value) for key in given]

    def default(self, field: str, value: Any, name: str, why: str = "the Trainer's default") -> None:
        """Set a new field that the old config left to its program's default."""
        self.drop(name, "null: the default")
        self._set(field, value)
        self.notes.append(Note(f"(not set) {name}", field, None, why, value))

    def drop(self, name: str, why: str) -> None:
        """Let an old setting go, if it was given."""
        if name in self.old:
            self._drop_key(self.old[name][0], why)

    def refuse(self, name: str, why: str) -> None:
        self._refuse_key(self.old[name][0], why)

    def _drop_key(self, key: str, why: str) -> None:
        self.notes.append(Note(key, None, self.leaves[key], why))

    def _refuse_key(self, key: str, why: str) -> None:
        self.refused.append(f"{self._place(key)}: {key} is {_show(self.leaves[key])}; {why}")

    def _place(self, key: str) -> str:
        return self.document.place(tuple(key.split(".")))

    def _set(self, field: str, value: Any) -> tuple[str, ...]:
        kind, *path = field.split(".")
        here = self.new[kind].values
        for step in path[:-1]:
            here = here.setdefault(step, {})
        here[path[-1]] = value
        return tuple(path)

    def simple(self) -> None:
        """What one old key says alone."""
        for name, (field, kind) in keys.DIRECT.items():
            value, why = self.get(name, kind), keys.WHY.get(name, "")
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
            if name in self.old and self.old[name][1] not in (None, *neutral):
                self.refuse(name, f"{effect}, and no recipe says that (allowed: {_show(neutral[0])})")
            else:
                self.drop(name, "does nothing at this value")
        for name in self.old:
            if name not in (*keys.DIRECT, *keys.NEUTRAL, *keys.COMPUTED):
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
        betas = (self.get("adam_beta1", float), self.get("adam_beta2", float))
        if betas != (None, None):
            filled = [0.9 if betas[0] is None else betas[0], 0.999 if betas[1] is None else betas[1]]
            self.put("recipe.betas", filled, ["adam_beta1", "adam_beta2"])
        else:
            self.drop("adam_beta1", "null: the default")
            self.drop("adam_beta2", "null: the default")
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
        dtype, allowed = self.text("torch_dtype").removeprefix("torch."), "(allowed: bf16, float32, tf32)"
        if self.get("fp16", bool):
            self.refuse("fp16", f"there is no fp16 recipe {allowed}")
        if dtype and dtype not in keys.DTYPES:
            self.refuse("torch_dtype", f"no recipe has this precision {allowed}")
        name, chosen, why = "bf16", "float32", "bf16 is off"
        if self.get("bf16", bool):
            chosen, why = "bf16", "with float32 master copies of what is trained"
        elif keys.DTYPES.get(dtype) == "bf16":
            name, chosen, why = "torch_dtype", "bf16", "with float32 master copies of what is trained"
        elif self.get("tf32", bool):
            name, chosen, why = "tf32", "tf32", "float32 with TF32 matmuls"
        if self.get(name, bool) is None:
            self.default("recipe.precision", chosen, name)
        else:
            self.put("recipe.precision", chosen, [name], why)
        for other in ("bf16", "fp16", "tf32", "torch_dtype"):
            if other != name:
                self.drop(other, f"recipe.precision is {chosen}")

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
            self.drop(f"{what}_steps", f"not used: {field} is {_show(chosen)}")
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

    def remarks(self) -> None:
        """What the old config could not say, because its program did it always."""
        weight = "the Trainer at one question at a time weighs each question the same"
        if self.new["plan"].values["max_questions"] != 1:
            weight = "near, not the same: the Trainer weighs by token inside a micro-batch of several questions"
        for field, value, why in (
            ("recipe.loss_weight", "sample", weight),
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


def write(conversion: Conversion, out_dir: Path) -> tuple[Path, Path]:
    """Write recipe.yaml and plan.yaml. Relative paths are rewritten to name the same files from there."""
    base, target = os.path.realpath(conversion.config_dir), os.path.realpath(out_dir)

    def moved(value: str) -> str:
        if Path(value).expanduser().is_absolute():
            return value
        return Path(os.path.relpath(os.path.join(base, value), target)).as_posix()

    recipe = conversion.recipe
    if base != target:
        data = {name: moved(value) for name, value in recipe.data if f"data.{name}" in keys.PATHS and value}
        changed: dict[str, Any] = {"data": recipe.data.model_copy(update=data)}
        if recipe.start_adapter:
            changed["start_adapter"] = moved(recipe.start_adapter)
        if resolve_path(conversion.config_dir, recipe.model).is_dir():
            changed["model"] = moved(recipe.model)
        recipe = recipe.model_copy(update=changed)
    specs = {out_dir / "recipe.yaml": dump_yaml(recipe), out_dir / "plan.yaml": dump_yaml(conversion.plan)}
    for path, text in specs.items():
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise BadInput(f"{path}: already there, with other contents; choose another -o")
    for path, text in specs.items():
        write_text(path, text)
    return out_dir / "recipe.yaml", out_dir / "plan.yaml"


def render(notes: Sequence[Note]) -> str:
    """One line per key: what it was, what it became or why it was dropped."""
    rows = []
    for note in notes:
        left = note.key if note.key.startswith("(") else f"{note.key} = {_show(note.value)}"
        if note.went_to is None:
            rows.append((left, f"dropped: {note.why}"))
        else:
            rows.append((left, f"{note.went_to} = {_show(note.became)}" + (f"  ({note.why})" if note.why else "")))
    width = max((len(left) for left, _ in rows), default=0)
    return "\n".join(f"{left:<{width}}  ->  {right}" for left, right in rows)


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)
