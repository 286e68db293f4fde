"""What an old config says about adapters: whether there are any, how large they are, and which layers get them."""

from __future__ import annotations

import json

from sameday.spec.convert import keys
from sameday.spec.convert.conversion import show
from sameday.spec.convert.frozen import image_parts_of_all
from sameday.spec.convert.settings import Settings
from sameday.spec.convert.targets import LANGUAGE, image_parts, matched, names_of_layers, of_all_parts
from sameday.spec.errors import BadInput
from sameday.spec.load import resolve_path
from sameday.spec.reading import JSON, read_file

SWITCHES = {"use_lora": "true, false", "peft_type": "LORA", "finetuning_type": "lora, full"}
"""What turns adapters on or off, with the values that are read. A trainer's own switch is read by the trainer."""
_FORMS = ("use_dora", "use_rslora")
_FORM = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_rslora": "use_rslora"}
_LAYERS = ("lora_target_modules", "lora_target_linear")
_OF_START = f"(adapter) {_LAYERS[0]}"
_NO_RANK = (
    "it asks for adapters, and nothing gives their rank: give lora_r, lora_alpha, lora_dropout and lora_target_modules "
    "as the old run had them"
)
_NAMES = "a list of layer names, such as [q_proj, v_proj]"


def one_adapter(work: Settings) -> None:
    """The adapter that training starts from, where it stands in a list; LLaMA-Factory splits a text at commas."""
    name = "start_adapter"
    if name not in work.old:
        return
    key, value = work.old[name]
    if isinstance(value, str) and work.trainer.short == "llamafactory":
        value = [each.strip() for each in value.split(",") if each.strip()]
    if not isinstance(value, list):
        return
    if not value:
        work.drop(name, "empty: none")
        return work.done(name)
    if len(value) > 1:
        work.refuse(name, "several adapters, and a recipe starts from one: merge all but the last into the model")
    work.old[name] = (key, value[0])
    return None


def form_of_start(work: Settings) -> None:
    """An adapter that training starts from keeps its own size and dropout, whatever the config says, where the trainer
    loads it by PEFT; done before defaults are taken."""
    folder = work.text("start_adapter")
    if not folder or not work.trainer.keeps_form:
        return
    try:
        read = json.loads(read_file(resolve_path(work.folder, folder) / "adapter_config.json", JSON))
    except (OSError, ValueError, RecursionError, BadInput):
        return  # the run says what is wrong with it
    if not isinstance(read, dict):
        return
    why = f"of the adapter that training starts from: {work.trainer.name} takes it with its settings"
    layers = read.get("target_modules")
    if layers and isinstance(layers, str | list) and not any(map(work.given, _LAYERS)):
        work.leaves[_OF_START], work.old[_LAYERS[0]], work.why[_LAYERS[0]] = layers, (_OF_START, layers), why
    for theirs, name in _FORM.items():
        value = read.get(theirs)
        if not isinstance(value, int | float):
            continue
        said = work.get(name, bool if isinstance(value, bool) else float)
        if said is not None and said != value:
            work.drop(name, f"does nothing: the adapter that training starts from has {show(value)}")
        if said != value:
            key = f"(adapter) {name}"
            work.leaves[key], work.old[name] = value, (key, value)
            work.why[name] = why


def has_adapters(work: Settings) -> bool:
    """Whether anything gives their size, their layers or their weights."""
    names = [name for name, (_, value) in work.old.items() if value is not None]
    return any(name.startswith("lora_") or name == "start_adapter" for name in names)


def switches(work: Settings) -> None:
    """Sets recipe.train where something says it. Done before anything is made of the settings of LoRA itself."""
    said: dict[str, bool] = {}
    for name in [name for name in SWITCHES if name in work.old]:
        says = _says(work, name)
        other = next((each for each, value in said.items() if says is not None and value != says), None)
        if work.is_null(name):
            work.drop(name, "null: the default")
        elif says is None:
            work.refuse(name, f"no recipe trains so (allowed: {SWITCHES[name]})")
        elif other is not None:
            work.refuse(name, f"but {work.old[other][0]} is {show(work.old[other][1])}")
        else:
            said[name] = says
            _switch(work, name, says)
    if not work.is_set("recipe.train") and not has_adapters(work):
        _only_mentioned(work)
    if not work.is_set("recipe.train") and not has_adapters(work):
        work.default("recipe.train", "all", "lora", "no LoRA key")
        image_parts_of_all(work)


def _says(work: Settings, name: str) -> bool | None:
    if name == "use_lora":
        chosen = keys.cast(work.old[name][1], bool)
        return chosen if isinstance(chosen, bool) else None
    return {"lora": True, "full": False if name == "finetuning_type" else None}.get(work.text(name).lower())


def _switch(work: Settings, name: str, on: bool) -> None:
    """`recipe.train` is set already where the trainer has a switch of its own, or another key said the same."""
    train, told = "lora" if on else "all", work.new["recipe"].values.get("train")
    if told is not None and told != train:
        trained = "all weights are" if told == "all" else "adapters are"
        work.refuse(name, f"but by the other keys {trained} trained (recipe.train {told})")
    elif told is not None:
        work.drop(name, f"recipe.train is {told}")
    elif on and not has_adapters(work):
        work.refuse(name, _NO_RANK)
        work.put("recipe.train", train, [name])
    elif on:
        work.put("recipe.train", train, [name])
    else:
        _off(work, name)


def _off(work: Settings, name: str) -> None:
    key, value = work.old[name]
    if work.given("start_adapter"):
        work.refuse("start_adapter", f"but {key} is {show(value)}: no adapter would be trained")
    work.put("recipe.train", "all", [name])
    image_parts_of_all(work)
    for each in [each for each in work.old if each.startswith("lora_") or each in (*_FORMS, "start_adapter")]:
        work.drop(each, f"does nothing: {key} is {show(value)}")
        work.done(each)


def _only_mentioned(work: Settings) -> None:
    """A section about adapters, or a form of them, is no reason to train all weights."""
    for name, (key, value) in work.old.items():
        *sections, _ = key.split(".")
        of_adapters = any(each.startswith(keys.OF_ADAPTERS) for each in sections)
        form = name in _FORMS and work.get(name, bool) is True
        if value is not None and (of_adapters or form):
            work.refuse(name, _NO_RANK)
            return work.put("recipe.train", "lora", [name])
    return None


def adapters(work: Settings) -> None:
    """Which layers get them; all weights are trained where there are none."""
    targets = names_of_layers(work.get("lora_target_modules", list))
    if work.is_set("recipe.lora.target_modules") or work.new["recipe"].values.get("train") == "all":
        return work.drop("lora_target_modules", "recipe.train is all")
    if not has_adapters(work):
        work.drop("lora_target_modules", "null: no adapters")
        return None
    if targets is None:
        _nowhere(work)
    elif targets in ("all-linear", ["all-linear"]) and work.family is not None:
        names = ["all-linear", *(f"{part}.all-linear" for part in image_parts(work.kind))]
        work.put("recipe.lora.target_modules", names, ["lora_target_modules"], "PEFT's, of the whole model")
    elif targets in ("all-linear", "all", ["all-linear"], ["all"]):
        work.refuse("lora_target_modules", f"must be {_NAMES}")
    elif isinstance(targets, str):
        taken = matched(targets, work.kind)
        if taken.names:
            work.put("recipe.lora.target_modules", list(taken.names), ["lora_target_modules"], taken.why)
        else:
            work.refuse("lora_target_modules", f"{taken.why}: give {_NAMES}")
    else:
        _named(work, targets)


def _nowhere(work: Settings) -> None:
    """PEFT stops at such models where nothing names layers: the old run had them from somewhere else."""
    name, layers = _LAYERS[0], ("q_proj", "k_proj", "v_proj", "o_proj")
    which = work.kind if work.family is not None else "models with images"
    such = f"--{name} {' '.join(layers)}" if work.command else f"{name}: [{', '.join(layers)}]"
    why = (
        f"adapters are asked for, nothing names the layers that get them, and PEFT has no default for {which}: give "
        f"what the old run had (target_modules in its adapter_config.json), such as {such}"
    )
    if work.is_null(name):
        work.refuse(name, why)
    elif not any(map(work.was_refused, _LAYERS)):
        work.refused.append(f"{work.document.source}: {name} is not set; {why}")


def _named(work: Settings, targets: object) -> None:
    names, why = targets, ""
    peft = work.trainer.bare_names == "all" or work.old[_LAYERS[0]][0] == _OF_START
    if isinstance(targets, list) and peft:
        names, why = of_all_parts(targets, work.kind)
        if work.family is None and {str(each).rpartition(".")[2] for each in targets} & {*LANGUAGE}:
            why = "the language model's; where the tower has layers of these names too, PEFT took those as well"
    whys = filter(None, (work.why.get(_LAYERS[0]), why))
    work.put("recipe.lora.target_modules", names, [_LAYERS[0]], "; ".join(whys))
