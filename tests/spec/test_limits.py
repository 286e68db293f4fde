"""Careless and hostile numbers, files and aliases: each is refused at once, with the reason, before it takes all
of the machine."""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from pydantic import BaseModel
from typed import refused

from sameday.cli import app
from sameday.commands.session import Specs
from sameday.spec.classify import ClassifyRecipe
from sameday.spec.errors import BadInput
from sameday.spec.limits import COUNT
from sameday.spec.load import load_plan, load_recipe
from sameday.spec.plan import Plan
from sameday.spec.reading import SPEC, read_file
from sameday.spec.registry import RECIPES
from sameday.spec.suite import Suite

ASKED = "model: tiny\ndata: {train: t}\n"
IMAGES = "task: classify\ndata: {path: set}\n"
BDH = IMAGES + "model: {kind: vision_bdh}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def error_of(text: str, *sets: str, kind: str = "recipe") -> str:
    path = Path(f"{kind}.yaml")
    path.write_text(text)
    with pytest.raises(BadInput) as error:
        load_recipe(path, sets) if kind == "recipe" else load_plan(path, sets)
    return str(error.value)


# Numbers


def test_every_silly_number_of_a_plan_is_refused_with_its_reason(folder: Path) -> None:
    text = "workers: 100000\nprefetch: 100000000\npad_to_multiple: 1000000\ntoken_budget: 10000000000\n"
    text += "save_steps: 10000000000\n"
    assert error_of(text, kind="plan").splitlines() == [
        "plan.yaml:4: token_budget is 10000000000; must be less than or equal to 2147483647: there are no more in any "
        "data",
        "plan.yaml:3: pad_to_multiple is 1000000; must be less than or equal to 8192: every row, however short, is "
        "padded to that many tokens",
        "plan.yaml:1: workers is 100000; must be less than or equal to 256: each is a process with memory of its own",
        "plan.yaml:2: prefetch is 100000000; must be less than or equal to 64: all of them are held in memory",
        "plan.yaml:5: save_steps is 10000000000; must be less than or equal to 2147483647 or 'epoch': no run has more "
        "steps",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ASKED + "lora: {r: 1000000000}", "lora.r is 1000000000; must be less than or equal to 8192: a higher rank"),
        (
            ASKED + "min_pixels: 999999999",
            "min_pixels is 999999999; must be less than or equal to 67108864: every image",
        ),
        (
            ASKED + "effective_batch: 99999999",
            "effective_batch is 99999999; must be less than or equal to 1048576: one",
        ),
        (ASKED + "learning_rate: 1e38", "learning_rate is 1e+38; must be less than or equal to 1000: AdamW moves"),
        (ASKED + "weight_decay: 1e300", "weight_decay is 1e+300; must be less than or equal to 1000: a step takes"),
        (ASKED + "eps: 1e-300", "eps is 1e-300; must be greater than or equal to 1e-30"),
        (ASKED + "lora: {alpha: 1e300}", "lora.alpha is 1e+300; must be less than or equal to 1048576: far above"),
        (ASKED + "num_epochs: 99999999", "num_epochs is 99999999; must be less than or equal to 1000000: such a run"),
        (ASKED + f"seed: {10**30}", f"seed is {10**30}; must be less than or equal to {2**63 - 1}: seeds have 63 bits"),
        (ASKED + f"seed: 0x{'f' * 9000}", "seed is a number of thousands of digits; must be less than or equal to"),
        (
            IMAGES + "model: {kind: vision_bdh, width: 999999}",
            "model.width is 999999; must be less than or equal to 16384",
        ),
        (
            IMAGES + "model: {kind: vision_bdh, levels: 9999}",
            "model.levels is 9999; must be less than or equal to 1024",
        ),
        (
            IMAGES + "model: {kind: vision_bdh, width: 16380, latents: 1000}",
            "model: width 16380 gives 804,913,200,000 parameters with the other fields; at most 4,294,967,296, since",
        ),
        (
            IMAGES + "model: {kind: vit, mlp: 1000000000}",
            "model: width 192 gives 884,736,001,769,472 parameters with the other fields; at most 4,294,967,296, since",
        ),
        (
            "task: classify\ndata: {path: set, image_size: 4096}\nmodel: {kind: vit, patch: 1024}\naugment: null",
            "model.patch is 1024; must be less than or equal to 256: a patch becomes one token, by as many weights",
        ),
        (BDH + "normalize_std: 1e-30", "normalize_std is 1e-30; must lie between 0.001 and 1000: pixels between 0 and"),
        (
            BDH + "normalize_std: [0.5, 0.5, 1e9]",
            "normalize_std is [0.5, 0.5, 1000000000.0]; must lie between 0.001 and 1000: pixels between 0 and 1 are",
        ),
        (
            BDH + "normalize_mean: -1e38",
            "normalize_mean is -1e+38; must lie between -1000 and 1000: it is taken from pixels between 0 and 1",
        ),
        (
            "task: classify\ndata: {path: set, image_size: 4096}\nmodel: {kind: vision_bdh}\naugment: null",
            "data.image_size 4096 with model.patch 4 gives 1,048,577 tokens; at most 16,385, since attention computes",
        ),
    ],
)
def test_silly_numbers_of_recipes(folder: Path, text: str, said: str) -> None:
    assert said in error_of(text + "\n")


def counts_of(model: type[BaseModel], path: str = "") -> list[tuple[str, Any]]:
    """Every whole number of a spec, of nested ones too."""
    found: list[tuple[str, Any]] = []
    for name, field in model.model_fields.items():
        kinds = [
            each for each in (field.annotation, *getattr(field.annotation, "__args__", ())) if isinstance(each, type)
        ]
        if int in kinds:
            found.append((f"{path}{name}", field))
        for inner in kinds:
            if issubclass(inner, BaseModel):
                found += counts_of(inner, f"{path}{name}.")
    return found


BOUNDED_OTHERWISE = {
    "model.heads",
    "model.latents",
    "model.mlp",
    "eval_steps",
    "save_steps",
    "best.every",
    "heads.rank",
    "heads.weights",
}
"""By what the other fields are, or together with a word."""


def test_no_whole_number_is_without_a_bound_and_each_bound_has_its_reason() -> None:
    specs: list[type[BaseModel]] = [Plan, Suite, *RECIPES.values()]
    for name, field in (each for spec in specs for each in counts_of(spec)):
        bound = [limit.le for limit in field.metadata if hasattr(limit, "le")]
        if not bound:
            assert name in BOUNDED_OTHERWISE, f"{name} takes any number"
        else:
            assert field.json_schema_extra["why_at_most"] and bound[0] <= 2**63 - 1, name


def whole_options(group: typer.Typer, *words: str) -> Iterator[tuple[str, ...]]:
    """Every option of every command that takes a whole number, as words that are typed before the number."""
    for inner in group.registered_groups:
        assert inner.typer_instance is not None and isinstance(inner.name, str)
        yield from whole_options(inner.typer_instance, *words, inner.name)
    for command in group.registered_commands:
        function = command.callback
        assert function is not None
        kinds = get_type_hints(function)
        needed = [
            {"kind": "--kind=pixels", "out": "--out=x"}.get(name, "x")
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.default is inspect.Parameter.empty
        ]
        for name, kind in kinds.items():
            if kind is int or int in get_args(kind):
                yield (*words, command.name or function.__name__, *needed, f"--{name.replace('_', '-')}")


WHOLE_OPTIONS = [*whole_options(app)]


def test_whole_options_are_found() -> None:
    found = {(*words[: 1 + (words[0] == "suite")], words[-1]) for words in WHOLE_OPTIONS}
    assert {("profile", "--warmup"), ("verify", "--steps"), ("suite", "plan", "--gpus")} <= found


@pytest.mark.parametrize("words", WHOLE_OPTIONS, ids=" ".join)
def test_no_whole_number_that_is_typed_is_without_a_bound(folder: Path, words: tuple[str, ...]) -> None:
    """Said before anything is read: none of the files is there."""
    said = re.fullmatch(rf"{words[-1]} {10**30}: [a-z].*[a-z]; at most (\d+)", refused(folder, *words, str(10**30)))
    assert said and int(said[1]) < 2**31


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("profile x --steps 1000000000", "the times of every step are held in memory; at most 10000"),
        ("profile x --warmup 10001", "none of them is timed, and a run's own warm-up is of a few; at most 10000"),
        ("suite plan x --gpus 1000000000", "no suite has more; at most 1024"),
        ("eval x --max-new-tokens 32769", "room for so many is kept for each question that is answered at once; at"),
        ("suite watch x --port 65536", "ports have 16 bits; at most 65535"),
    ],
)
def test_silly_numbers_that_are_typed(folder: Path, words: str, said: str) -> None:
    *_, option, number = words.split()
    assert refused(folder, *words.split()).startswith(f"{option} {number}: {said}")


def test_silly_numbers_of_a_suite(folder: Path) -> None:
    Path("recipe.yaml").write_text(ASKED)
    Path("suite.yaml").write_text(
        "gpus: 1000000000\njobs:\n  a: {do: train, recipe: recipe.yaml, gpu: 1024}\n"
        "  b: {do: train, recipe: recipe.yaml, gpus: 100000, nodes: 100000}\n"
    )
    assert refused(folder, "suite", "plan", "suite.yaml").splitlines() == [
        "suite.yaml:1: gpus is 1000000000; must be less than or equal to 1024: no suite has more",
        "suite.yaml:3: jobs.a.gpu is 1024; must be less than or equal to 1023: they are counted from 0, and no suite "
        "has more",
        "suite.yaml:4: jobs.b.gpus is 100000; must be less than or equal to 1024: no suite has more",
        "suite.yaml:4: jobs.b.nodes is 100000; must be less than or equal to 1024: no suite has more",
    ]


def test_usual_numbers_are_far_from_the_bounds(folder: Path) -> None:
    assert load_plan(None, ["plan.workers=128", "plan.prefetch=16", f"plan.token_budget={COUNT}"]).workers == 128
    Path("recipe.yaml").write_text(BDH.replace("{kind: vision_bdh}", "{kind: vit, width: 1408, heads: 16, depth: 40}"))
    large = load_recipe(Path("recipe.yaml"))  # a ViT of a billion parameters
    assert isinstance(large, ClassifyRecipe) and 0.9e9 < large.model.parameters() < 1.1e9


def test_more_ranks_or_steps_than_verify_can_hold(folder: Path) -> None:
    Path("recipe.yaml").write_text(BDH)
    said = refused(folder, "verify", "recipe.yaml", "--ranks", "100000")
    assert said == "--ranks 100000: each is a process with the whole model in memory; at most 64"
    said = refused(folder, "verify", "recipe.yaml", "--steps", "1000000")
    assert said == "--steps 1000000: the weights of every step are recorded; at most 1000"
    for more in ((), ("--against", "recipe.yaml")):
        said = refused(folder, "verify", "recipe.yaml", "--steps", "3", *more)
        assert said == "--steps 3: must be at least 4, for two epochs, a kill and a resume"


# All at once


def test_the_problems_of_recipe_and_plan_come_together(folder: Path) -> None:
    Path("recipe.yaml").write_text(ASKED + "lora: {r: 0}\n")
    Path("plan.yaml").write_text("workers: -1\nmicro_batch: 8\nprefetc: 2\n")
    with pytest.raises(BadInput) as error:
        Specs.from_files(Path("recipe.yaml"), Path("plan.yaml"), ())
    assert str(error.value).splitlines() == [
        "recipe.yaml:3: lora.r is 0; must be greater than or equal to 1",
        "plan.yaml:1: workers is -1; must be greater than or equal to 0",
        "plan.yaml:3: prefetc is not a key here; nearest: prefetch",
        "plan.yaml:2: micro_batch is 8; it is for samples that are all of one size, which task vqa does not have: "
        "leave it out",
    ]
    Path("recipe.yaml").write_text(ASKED)
    with pytest.raises(BadInput) as error:
        Specs.from_files(Path("recipe.yaml"), Path("plan.yaml"), ())
    assert str(error.value).splitlines() == [
        "plan.yaml:1: workers is -1; must be greater than or equal to 0",
        "plan.yaml:3: prefetc is not a key here; nearest: prefetch",
        "plan.yaml:2: micro_batch is 8; it is for samples that are all of one size, which task vqa does not have: "
        "leave it out",
    ]


# Files


def bomb(lines: int) -> str:
    """Each line stands for nine times as much as the one before."""
    text = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    for n in range(1, lines):
        text += f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n"
    return text


@pytest.mark.parametrize("lines", [6, 10, 40])
def test_aliases_that_stand_for_too_much_are_refused_at_once(folder: Path, lines: int) -> None:
    began = time.perf_counter()
    said = error_of(ASKED + bomb(lines))
    count = "more than a billion" if lines > 8 else "672,616 "
    assert said.startswith(f"recipe.yaml: is {count}") and said.endswith(
        "values with its aliases (*name) written out; at most 20,000"
    )
    merged = "x0: &x0 {a: 1}\n" + "".join(
        f"x{n}: &x{n} {{<<: [{', '.join([f'*x{n - 1}'] * 9)}]}}\n" for n in range(1, 30)
    )
    assert "is more than a billion values with its aliases" in error_of(ASKED + merged)
    assert time.perf_counter() - began < 5


def test_a_setting_can_be_a_bomb_too(folder: Path) -> None:
    value = "[&a [1, 1, 1, 1, 1, 1, 1, 1, 1]"
    for n in range(8):
        value += f", &{chr(ord('b') + n)} [{', '.join(['*' + chr(ord('a') + n)] * 9)}]"
    said = error_of(ASKED, f"recipe.betas={value}]")
    assert said.startswith("--set recipe.betas=") and "written out; at most 20,000" in said


def test_aliases_and_merges_that_people_write_still_work(folder: Path) -> None:
    Path("recipe.yaml").write_text("model: tiny\ndata: &d {train: t}\nlora: &l {r: 2}\n")
    assert load_recipe(Path("recipe.yaml")).lora.r == 2  # type: ignore[attr-defined]
    Path("recipe.yaml").write_text("model: tiny\ndata:\n  <<: {train: a, val: v}\n  train: b\n")
    data = load_recipe(Path("recipe.yaml")).data  # type: ignore[attr-defined]
    assert (data.train, data.val) == ("b", "v")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[\n" * 3_000, "recipe.yaml: not valid YAML: it is nested too deeply"),
        ("seed: 2024-99-99\n", "recipe.yaml: not valid YAML: month must be in 1..12"),
        (f"seed: {'1' * 5000}\n", "recipe.yaml: not valid YAML: Exceeds the limit (4300 digits)"),
        (f"# {'x' * SPEC}\n", "recipe.yaml: is larger than 262,144 bytes, which no recipe or plan is"),
    ],
)
def test_files_that_break_a_reader(folder: Path, text: str, said: str) -> None:
    assert error_of(text).startswith(said)


def test_an_endless_file_is_not_read_to_its_end(folder: Path) -> None:
    with pytest.raises(BadInput, match="/dev/zero: is larger than 262,144 bytes, which no recipe or plan is"):
        load_recipe(Path("/dev/zero"))


def test_a_recipe_may_come_through_a_pipe(folder: Path) -> None:
    read, write = os.pipe()
    os.write(write, ASKED.encode())
    os.close(write)
    assert load_recipe(Path(f"/dev/fd/{read}")).model == "tiny"  # type: ignore[attr-defined]
    os.close(read)


def test_only_files_are_read_of_a_folder_and_no_more_than_is_allowed(folder: Path) -> None:
    os.mkfifo("pipe")
    with pytest.raises(BadInput, match=r"^pipe: cannot be read: it is a pipe or a device, not a file$"):
        read_file(Path("pipe"), 10)
    Path("large").write_bytes(b"x" * 1001)
    with pytest.raises(BadInput, match=r"^large: has 1,001 bytes; at most 1,000 are read of such a file$"):
        read_file(Path("large"), 1000)
    assert len(read_file(Path("large"), 1001)) == len(read_file(Path("large"), None)) == 1001


def test_options_that_are_too_large_are_told_at_once(folder: Path) -> None:
    options = ("--limit", "9999999999", "--max-steps", "8888888888", "--stop-after", "7777777777")
    assert refused(folder, "train", "recipe.yaml", *options) == (
        f"--limit 9999999999: there are no more in any data; at most {COUNT}\n"
        f"--max-steps 8888888888: no run has more steps; at most {COUNT}\n"
        f"--stop-after 7777777777: no run has more steps; at most {COUNT}"
    )
