"""Which questions of a file are taken, how they are asked, and how they come by a stage and a type."""

from __future__ import annotations

import re
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from sameday.spec.identity import IS_PATH
from sameday.spec.limits import COUNTED
from sameday.spec.recipe import Strict

_STAGE = re.compile(r"(?:stage[\s_-]*)?(\d{1,9})", re.IGNORECASE | re.ASCII)


def stage_number(value: Any) -> Any:
    """2, "2", "stage 2" and "stage_2" are one stage; anything else is given back as it is."""
    written = _STAGE.fullmatch(value.strip()) if isinstance(value, str) else None
    return int(written[1]) if written else value


def compared(name: str, value: Any) -> str | None:
    """The value of a field as conditions compare it: numbers and texts by how they are written. None where it is
    neither."""
    value = stage_number(value) if name == "stage" else value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip() if isinstance(value, str | int | float) else None


def _conditions(given: Any) -> Any:
    """Each field with all values that it may have, in one form, however the recipe writes them."""
    if not isinstance(given, dict):
        return given
    conditions: dict[Any, Any] = {}
    for name, values in given.items():
        several = values if isinstance(values, list | tuple) else [values]
        texts = [compared(str(name), value) for value in several]
        if not texts or None in texts:
            raise ValueError("must give each field a text, a number, true or false, or a list of them")
        conditions[name] = tuple(sorted({text for text in texts if text is not None}))
    return conditions


Where = Annotated[dict[str, tuple[str, ...]], BeforeValidator(_conditions)]
"""Fields of a line, each with the values that it may have; all conditions must hold."""


def where_words(where: dict[str, tuple[str, ...]]) -> str:
    return "where " + " and ".join(f"{name} is {' or '.join(values)}" for name, values in where.items())


def _template(text: str) -> str:
    try:
        pieces = [(name, form, change) for _, name, form, change in Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise ValueError(f"must hold {{question}}, and {{{{ and }}}} for braces ({str(error).lower()})") from None
    for piece in pieces:
        if piece != ("question", "", None):
            name, form, change = piece
            written = f"{{{name}{f'!{change}' if change else ''}{f':{form}' if form else ''}}}"
            raise ValueError(f"must have no other placeholder than {{question}}, and has {written}")
    if not pieces:
        raise ValueError("must hold {question}: all questions would be the same text without it")
    return text


Template = Annotated[str, BeforeValidator(lambda text: _template(text) if isinstance(text, str) else text)]


class Prompt(Strict):
    """How a question is asked. The prompt is recipe: the model learns to answer what it reads."""

    default: Template = Field("{question}", description="For all questions that no other template is for.")
    by: Literal["type", "stage"] | None = Field(None, description="What chooses among the templates.")
    templates: dict[str, Template] = Field(default_factory=dict, description="By type, or by stage.")
    over_instruction: bool = Field(
        False, description="Also for lines with an instruction of their own, which is the whole text otherwise."
    )

    @model_validator(mode="before")
    @classmethod
    def _keys_as_text(cls, values: Any) -> Any:
        """Stages are numbers in YAML."""
        if not isinstance(values, dict) or not isinstance(values.get("templates"), dict):
            return values
        by = str(values.get("by"))
        given = {key: compared(by, key) for key in values["templates"]}
        return {**values, "templates": {given[k] or k: text for k, text in values["templates"].items()}}

    @model_validator(mode="after")
    def _chosen_by(self) -> Prompt:
        if (self.by is None) != (not self.templates):
            raise ValueError("by and templates belong together: by says what chooses among the templates")
        if self.by == "stage" and (odd := [key for key in self.templates if not key.isdigit()]):
            raise ValueError(f"templates: {odd[0]!r} is no stage; must be a whole number")
        return self

    def template(self, stage: int | None, kind: str | None) -> str:
        chosen = compared("stage", stage) if self.by == "stage" else kind
        return self.default if self.by is None or chosen is None else self.templates.get(chosen, self.default)


class Rule(Strict):
    """What a question is, where this is found in its text."""

    match: str = Field(description="A regular expression, found anywhere in the question; (?i) ignores case.")
    stage: int | None = Field(None, ge=0, **COUNTED, description="The stage of such questions.")
    type: str | None = Field(None, description="The type of such questions.")

    @field_validator("match")
    @classmethod
    def _compiles(cls, text: str) -> str:
        try:
            re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"must be a regular expression: {error}") from None
        return text

    @model_validator(mode="after")
    def _says_something(self) -> Rule:
        if self.stage is None and self.type is None:
            raise ValueError("match alone says nothing: give a stage, a type or both")
        return self


class Categories(Strict):
    """Stage and type of questions whose lines do not have them. A line's own always count."""

    table: str | None = Field(
        None,
        description="CSV or JSON with question, stage and type; case and spaces do not count.",
        json_schema_extra=IS_PATH,
    )
    rules: tuple[Rule, ...] = Field((), description="For questions that the table does not have; the first one counts.")
    strict: bool = Field(False, description="A question about which two rules disagree is unsure.")
    on_unsure: Literal["stop", "keep"] = Field(
        "stop", description="Questions that get no stage or type stop the run, or are kept without."
    )

    @model_validator(mode="after")
    def _knows_something(self) -> Categories:
        if self.table is None and not self.rules:
            raise ValueError("table and rules are both missing: one of them is needed")
        return self
