"""Which questions, in which prompt, of which category, in which stages: what a recipe may say, and what it comes to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sameday.spec.document import dump_yaml
from sameday.spec.errors import BadInput
from sameday.spec.load import load_recipe
from sameday.spec.questions import Prompt, where_words
from sameday.spec.recipe import differences
from sameday.spec.vqa import VqaRecipe


def vqa(**values: Any) -> VqaRecipe:
    data = {"train": "train.jsonl", **values.pop("data", {})}
    return VqaRecipe.model_validate({"model": "tiny", "data": data, **values})


def refusal(tmp_path: Path, text: str, *sets: str) -> list[str]:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: tiny\ndata: {{train: t.jsonl}}\n{text}")
    with pytest.raises(BadInput) as caught:
        load_recipe(path, sets)
    return str(caught.value).replace(f"{path}:", "").splitlines()


# Conditions


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"stage": 1}, {"stage": [1]}),
        ({"stage": "stage 2"}, {"stage": 2}),
        ({"stage": [2, 1, "stage_1"]}, {"stage": ["1", 2.0]}),
        ({"normal": True}, {"normal": "true"}),
        ({"type": " yes/no"}, {"type": ["yes/no"]}),
    ],
)
def test_two_ways_to_write_one_condition_are_one_recipe(one: Any, other: Any) -> None:
    recipes = vqa(data={"where": one}), vqa(data={"where": other})
    assert recipes[0].fingerprint == recipes[1].fingerprint != vqa().fingerprint
    assert differences(*recipes) == []


def test_conditions_in_words_and_in_a_file(tmp_path: Path) -> None:
    recipe = vqa(data={"where": {"stage": [2, 1], "type": "yes/no"}})
    assert where_words(recipe.data.where) == "where stage is 1 or 2 and type is yes/no"
    (tmp_path / "recipe.yaml").write_text(dump_yaml(recipe))
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    asked = load_recipe(tmp_path / "recipe.yaml", ["recipe.data.where.stage=3"])
    assert asked.data.where == {"stage": ("3",), "type": ("yes/no",)}  # type: ignore[attr-defined]


def test_conditions_that_say_nothing(tmp_path: Path) -> None:
    must = "must give each field a text, a number, true or false, or a list of them"
    for value in ("null", "[]", "[1, null]", "{a: 1}"):
        (line,) = refusal(tmp_path, "", f"recipe.data.where.stage={value}")
        assert line.endswith(must) and "data.where is {'stage': " in line
    assert refusal(tmp_path, "where: {stage: 1}\n") == ["3: where is not a key here; it belongs to data: data.where"]


# Prompts


def test_words_that_yaml_takes_for_something_else_are_told(tmp_path: Path) -> None:
    """`skip: {answer: [yes]}` skipped nothing without a word, and 0012 was ten."""
    path = tmp_path / "recipe.yaml"
    rest = 'task: vqa\nmodel: m\nprompt: {by: type, templates: {%s: "Say so. {question}"}}\n'
    data = "data: {train: t.jsonl, skip: {answer: [%s], patient: %s}}\n"
    path.write_text(rest % "No" + data % ("yes, off", "0012"))
    with pytest.raises(BadInput) as error:
        load_recipe(path)
    assert str(error.value).splitlines() == [
        f'{path}:3: No is false in YAML; write "No" for the word, or false',
        f'{path}:4: yes is true in YAML; write "yes" for the word, or true',
        f'{path}:4: off is false in YAML; write "off" for the word, or false',
        f'{path}:4: 0012 is 10 in YAML; write "0012" for the word, or 10',
    ]
    path.write_text(rest % "'No'" + data % ('"yes", true, no way', "[12, -3, '0012']"))
    recipe = load_recipe(path)
    assert recipe.data.skip == {"answer": ("no way", "true", "yes"), "patient": ("-3", "0012", "12")}
    for key, value in (("where", "{type: [no]}"), ("where.type", "no"), ("where.type", "[no]")):
        with pytest.raises(BadInput, match=f"--set recipe.data.{re.escape(f'{key}={value}')}: no is false in YAML"):
            load_recipe(path, [f"recipe.data.{key}={value}"])
    assert load_recipe(path, ["recipe.data.where.type='no'"]).data.where == {"type": ("no",)}


@given(st.text(), st.text(), st.text())
def test_braces_are_text_where_they_are_doubled(before: str, question: str, after: str) -> None:
    def doubled(text: str) -> str:
        return text.replace("{", "{{").replace("}", "}}")

    prompt = Prompt(default=f"{doubled(before)}{{question}}{doubled(after)}")
    assert prompt.template(None, None).format(question=question) == before + question + after


def test_a_prompt_is_chosen_by_type_or_stage() -> None:
    templates = {"yes/no": "Yes or no: {question}", "count": "A number: {question}"}
    prompt = vqa(prompt={"by": "type", "templates": templates, "default": "Briefly: {question}"}).prompt
    assert prompt is not None
    assert prompt.template(1, "yes/no") == "Yes or no: {question}"
    assert prompt.template(1, "colour") == prompt.template(1, None) == "Briefly: {question}"
    staged = vqa(prompt={"by": "stage", "templates": {1: "Find: {question}", "stage 2": "Say: {question}"}}).prompt
    assert staged is not None
    assert [staged.template(stage, None) for stage in (1, 2, 3)] == [
        "Find: {question}",
        "Say: {question}",
        "{question}",
    ]


def test_a_prompt_is_recipe() -> None:
    short, long = vqa(prompt="Briefly: {question}"), vqa(prompt={"default": "Briefly: {question}"})
    assert short.fingerprint == long.fingerprint != vqa().fingerprint
    assert vqa(prompt="{question}").fingerprint != vqa(prompt="{question} ").fingerprint


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            'prompt: "Say {answer}"',
            "3: prompt.default is 'Say {answer}'; must have no other placeholder than {question}, and has {answer}",
        ),
        (
            'prompt: "{question!r:>9}"',
            "3: prompt.default is '{question!r:>9}'; must have no other placeholder than {question}, and has "
            "{question!r:>9}",
        ),
        (
            "prompt: Briefly.",
            "3: prompt.default is 'Briefly.'; must hold {question}: all questions would be the same text without it",
        ),
        (
            'prompt: {by: type, templates: {"yes/no": "} {question}"}}',
            "3: prompt.templates.yes/no is '} {question}'; must hold {question}, and {{ and }} for braces (single '}' "
            "encountered in format string)",
        ),
        (
            'prompt: {templates: {a: "{question}"}}',
            "3: prompt: by and templates belong together: by says what chooses among the templates",
        ),
        (
            'prompt: {by: stage, templates: {first: "{question}"}}',
            "3: prompt: templates: 'first' is no stage; must be a whole number",
        ),
    ],
)
def test_prompts_that_cannot_be(tmp_path: Path, text: str, line: str) -> None:
    assert refusal(tmp_path, text) == [line]


# Categories


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            'categories:\n  rules:\n  - {match: "^Is", type: yes/no}\n  - {match: "how (many", type: count}',
            "6: categories.rules[1].match is 'how (many'; must be a regular expression: missing ), unterminated "
            "subpattern at position 4",
        ),
        (
            "categories:\n  rules: [{match: a}]",
            "4: categories.rules[0]: match alone says nothing: give a stage, a type or both",
        ),
        ("categories: {strict: true}", "3: categories: table and rules are both missing: one of them is needed"),
        (
            "categories:\n  rules: [{match: a, stag: 1}]",
            "4: categories.rules[0].stag is not a key here; nearest: stage",
        ),
        (
            "categories: {rules: 7}",
            "3: categories.rules is 7; must be a list of mappings with the keys match, stage, type",
        ),
    ],
)
def test_categories_that_cannot_be(tmp_path: Path, text: str, line: str) -> None:
    assert refusal(tmp_path, text)[0] == line


# Stages

STAGES = [
    {"name": "find", "where": {"stage": 1}},
    {"name": "describe", "where": {"stage": 2}, "learning_rate": 1e-4, "order": "by_image", "num_epochs": 1},
]


def test_a_stage_is_the_recipe_with_its_changes() -> None:
    recipe = vqa(name="kvasir", stages=STAGES, learning_rate=2e-4, data={"where": {"type": "yes/no"}})
    find, describe = recipe.stage_recipes()
    assert (find.name, find.follows, describe.name, describe.follows) == ("find", False, "describe", True)
    same = {"data": {"where": {"type": "yes/no", "stage": 1}}, "learning_rate": 2e-4, "name": "other"}
    assert find.recipe.fingerprint == vqa(**same).fingerprint
    other = {**same, "data": {"where": {"type": "yes/no", "stage": 2}}, "learning_rate": 1e-4}
    assert describe.recipe.fingerprint == vqa(**other, order="by_image", num_epochs=1).fingerprint
    assert (find.recipe.name, describe.recipe.name) == ("kvasir-find", "kvasir-describe")
    assert vqa(stages=STAGES[:1]).fingerprint != vqa(stages=STAGES).fingerprint
    apart = vqa(stages=[{**stage, "start": "base"} for stage in STAGES])
    assert [each.follows for each in apart.stage_recipes()] == [False, False]
    assert vqa().stage_recipes() == []


def test_where_the_stage_before_lies_does_not_count() -> None:
    describe = vqa(stages=STAGES).stage_recipes()[1].recipe
    here, there = describe.started_from("/here/adapter", "aaa"), describe.started_from("/there/adapter", "aaa")
    assert here.fingerprint == there.fingerprint != describe.fingerprint
    assert here.fingerprint != describe.started_from("/here/adapter", "bbb").fingerprint
    assert differences(here, there) == []
    assert here.start_adapter == "/here/adapter"  # type: ignore[attr-defined]


def test_stages_are_written_and_read_alike(tmp_path: Path) -> None:
    recipe = vqa(stages=STAGES, categories={"rules": [{"match": "^Is", "stage": 1}]}, prompt="So: {question}")
    (tmp_path / "recipe.yaml").write_text(dump_yaml(recipe))
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    assert load_recipe(tmp_path / "recipe.yaml", ["recipe.stages=[]"]).stage_recipes() == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "stages:\n- {name: a}\n- {name: a}",
            "3: stages: the name 'a' is given twice; must be another for each",
        ),
        ("stages:\n- {name: a/b}", "4: stages[0].name is 'a/b'; must match pattern '^[A-Za-z0-9._-]+$'"),
        ("stages:\n- {name: a, num_epoch: 3}", "4: stages[0].num_epoch is not a key here; nearest: num_epochs"),
        ("stages:\n- {name: a, start: last}", "4: stages[0].start is 'last'; must be one of 'previous', 'base'"),
        ("stages:\n- {name: a, learning_rate: -1.0}", "4: stages[0].learning_rate is -1.0; must be greater than 0"),
        (
            "train: all\nstages: [{name: a}, {name: b}]",
            "4: stages that start from the previous one go on with its adapter, so train must be lora",
        ),
    ],
)
def test_stages_that_cannot_be(tmp_path: Path, text: str, line: str) -> None:
    assert refusal(tmp_path, text) == [line]


def test_a_stage_of_questions_that_the_recipe_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: m\ndata: {train: t, where: {stage: [1, 2]}}\nstages:\n- {name: a, where: {stage: 3}}\n")
    with pytest.raises(BadInput) as caught:
        load_recipe(path)
    assert str(caught.value).partition(": ")[2] == (
        "stages[0].where.stage is 3, and data.where.stage is 1 or 2: no question is both"
    )
