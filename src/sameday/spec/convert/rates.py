"""Learning rates of parts of the model, where an old config gives tower or projector one of its own."""

from __future__ import annotations

from sameday.spec.convert import keys, sections
from sameday.spec.convert.settings import Settings


def rates(work: Settings) -> None:
    """Called when it is known what is trained."""
    recipe = work.new["recipe"].values
    layers = recipe.get("lora", {}).get("target_modules", ()) if recipe.get("train") != "all" else ()
    layers = layers if isinstance(layers, list) else ()  # what is none is refused with the recipe
    for name, part in keys.RATES.items():
        rate = work.get(name, float)
        if rate in (None, 0):
            work.drop(name, "not set: the part has the rate of all others")
        elif recipe.get("train_vision") or any(str(layer).startswith(f"{part}.") for layer in layers):
            work.put(f"recipe.learning_rates.{part}", rate, [name])
        elif recipe.get("train") != "all" and sections.rate_of_part(work.old[name][0], "learning_rate"):
            why = f"a learning rate of the {part}, which gets no adapters: if it got some, add {part}.all-linear to"
            work.refuse(name, f"{why} lora_target_modules; else --drop {work.old[name][0]}")
        else:
            work.drop(name, f"does nothing: the {part} is not trained")
