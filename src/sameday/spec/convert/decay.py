"""Where weight decay is another one: transformers' Trainer leaves out biases and what it knows as norms, a recipe all
vectors."""

from __future__ import annotations

from sameday.spec.convert.families import FAMILIES
from sameday.spec.convert.settings import Settings

_LENGTHS = "the lengths that DoRA learns (lora_magnitude_vector)"


def explain_decay(work: Settings) -> None:
    """Says of weight_decay which vectors the Trainer decays besides. Called when it is known what is trained."""
    decay, recipe = work.get("weight_decay", float), work.new["recipe"].values
    if not isinstance(decay, int | float) or decay <= 0:
        return
    if recipe.get("train") == "lora":
        vectors = _LENGTHS if work.get("use_dora", bool) else ""
    else:
        vectors = _of_tower(work) if recipe.get("train_vision") else ""
    if vectors:
        work.why["weight_decay"] = f"near, not the same: the Trainer decays {vectors} too, a recipe no vectors"


def _of_tower(work: Settings) -> str:
    """Vectors of the model's tower and projector that are no norms to the Trainer."""
    if work.family is not None:
        return work.family.decayed_vectors
    return " and ".join(
        f"{facts.decayed_vectors} of {kind}" for kind, facts in FAMILIES.items() if facts.decayed_vectors
    )
