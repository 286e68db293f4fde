"""Which parts of the model are trained where all weights are: what freezes or trains vision tower, projector and
language model."""

from __future__ import annotations

from sameday.spec.convert import keys
from sameday.spec.convert.settings import Settings

_PARTS = {
    "vision tower": {"freeze_vision_tower": False, "tune_mm_vision": True},
    "projector": {"freeze_multi_modal_projector": False, "tune_mm_mlp": True},
}
"""What freezes or trains each part in front of the language model, with the value that trains it."""
_LANGUAGE = {"freeze_llm": True, "freeze_language_model": True, "tune_mm_llm": False}
"""The same of the language model, with the value that freezes it."""
_NOT_FROZEN = "nothing here freezes the vision tower: set it to false if the old program froze it"


def image_parts_of_all(work: Settings) -> None:
    """All weights are trained, and the tower's and the projector's are some of them where no key freezes them."""
    said = {
        name: keys.cast(work.old[name][1], bool) is on
        for names in _PARTS.values()
        for name, on in names.items()
        if work.given(name)
    }
    if not said:
        work.default("recipe.train_vision", True, "freeze_vision_tower", _NOT_FROZEN)
    elif all(said.values()):
        work.put("recipe.train_vision", True, list(said), "tower and projector are trained with all the rest")
        for name in said:
            work.done(name)
    elif any(said.values()):
        for name in [name for name, trained in said.items() if trained]:
            refuse_alone(work, name)
    else:
        for part, names in _PARTS.items():
            if not said.keys() & names.keys():
                why = f"nothing here freezes the {part}: if the old program trained it alone, no recipe says that"
                work.default("recipe.train_vision", False, next(iter(names)), why)


def refuse_alone(work: Settings, name: str) -> None:
    """Of tower and projector only the one that this setting is about is trained: recipes have one field for both."""
    part = next(part for part, names in _PARTS.items() if name in names)
    other = next(each for each in _PARTS if each != part)
    without = any(keys.cast(work.old[each][1], bool) is off for each, off in _LANGUAGE.items() if work.given(each))
    trained = f"the {part} alone" if without else f"the language model and the {part}, but not the {other},"
    work.refuse(
        name,
        f"{trained} would be trained, and no recipe says that: recipe.train_vision is of vision tower and projector "
        "together (allowed: both frozen, or both trained)",
    )
    work.done(name)
