"""`sameday verify RECIPE --against transformers`: a plain loop of transformers and PEFT, which shares no code with our
encoding, layout and loop, finds what no comparison of our own plans can."""

from __future__ import annotations

import json
import random
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import sets
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoTokenizer
from typed import sameday
from worlds import FAMILIES, cot_recipe, draw_image, text, tiny_recipe

from sameday.spec.document import dump_yaml
from sameday.spec.plan import Plan
from sameday.spec.vqa import VqaRecipe
from sameday.tasks.vqa.setup import VqaSetup
from sameday.verify.arm import Job, Plant, run_here
from sameday.verify.compare import Comparison, apart, compare
from sameday.verify.limits import ACROSS, LIMITS
from sameday.verify.peer import loop
from sameday.verify.peer.differ import Differ
from sameday.verify.peer.run import NAME, peer_job
from sameday.verify.processes import Arms
from sameday.verify.trace import Trace
from sameday.verify.trial import make_trial

SHARED = {"share_images": True, "packing": True, "max_questions": None, "attention": "split", "label_only_logits": True}
LAYOUTS: dict[str, dict[str, Any]] = {"one at a time": {}, "shared": SHARED}


def write_questions(folder: Path) -> None:
    """Images of mixed sizes, one with several questions, one that is enlarged; answers of uneven length; two images,
    one twice, and none; a system turn, two turns."""
    rng = random.Random(5)
    (folder / "images").mkdir(parents=True)
    for name, size in (("a.png", (100, 70)), ("b.png", (40, 40)), ("c.png", (9, 20))):
        draw_image(folder / "images" / name, rng, size)
    turns = [("system", "be brief"), ("user", "<image>what size?"), ("assistant", "large")]
    turns += [("user", "is it red?"), ("assistant", "no")]
    rows: list[dict[str, Any]] = [
        {"image": "a.png", "question": text(rng, 2, 9), "answer": "red"},
        {"image": "a.png", "question": text(rng, 2, 9), "answer": text(rng, 38, 40)},
        {"image": ["b.png", "a.png"], "question": "what differs?", "answer": "the left wall"},
        {"image": "c.png", "question": text(rng, 3, 5), "answer": "how many"},
        {"messages": [{"role": role, "content": said} for role, said in turns], "images": ["b.png"]},
        {"image": "a.png", "question": text(rng, 2, 9), "answer": "two"},
        {"image": ["b.png", "c.png", "b.png"], "question": "which is there twice?", "answer": "the left"},
        {"messages": [{"role": "user", "content": "are you there?"}, {"role": "assistant", "content": "yes"}]},
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe_of(model: Path, **changes: Any) -> VqaRecipe:
    fields = {
        "data": {"train": "train.jsonl", "image_root": "images"},
        "order": "by_image",
        "effective_batch": 5,
        "max_pixels": 64 * 64,
        "min_pixels": 16 * 16,
        "lora": {"r": 4, "alpha": 8, "dropout": 0.1},
        "warmup_steps": 1,
        "weight_decay": 0.1,
    }
    return tiny_recipe(model, **(fields | changes))


@dataclass(frozen=True)
class Bench:
    """A recipe's arms in this process, as short as they can be: nobody is killed."""

    root: Path
    home: Path
    recipe: VqaRecipe

    def job(self, name: str, layout: str, steps: int = 2) -> Job:
        job = make_trial(self.recipe, 4).job(Plan(device="cpu", **LAYOUTS[layout]), self.home, self.root / name)
        recipe = job.recipe.model_copy(update={"max_steps": steps})
        return replace(job, recipe=recipe, steps=steps, dies_in=None, peer=True)

    def ours(self, name: str, layout: str, plant: Plant | None = None, steps: int = 2) -> Job:
        job = self.job(name, layout, steps)
        run_here(job, plant)
        return job

    def theirs(self, ours: Job, name: str = NAME, reference: str | None = None, **changes: Any) -> Trace:
        settings = VqaSetup(self.recipe, self.home).plain_settings()
        loop.run(peer_job(ours, settings, self.root / name, reference) | changes)
        return Trace(self.root / name)

    def judged(self, ours: Job, theirs: Trace, reference: Trace | None = None) -> Comparison:
        differ = Differ(AutoTokenizer.from_pretrained(self.recipe.model).decode, self.recipe.precision == "bf16")
        limits = LIMITS if reference is None else ACROSS
        return compare(Trace(ours.out), theirs, reference, limits=limits, differ=differ)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peer")
    write_questions(folder)
    return folder


@pytest.fixture(scope="module")
def bench(home: Path, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("arms"), home, recipe_of(tiny_models[FAMILIES[-1]]))


@pytest.fixture(scope="module")
def theirs(bench: Bench) -> Trace:
    return bench.theirs(bench.ours("ours", "one at a time"))


# Every family, both layouts

RECIPES: dict[str, dict[str, Any]] = {
    FAMILIES[0]: {"loss_weight": "token", "system_prompt": "see and say", "schedule": "cosine"},
    FAMILIES[1]: {"loss_weight": "sample", "answer_end": "turn", "max_grad_norm": None, "max_length": 73},
    FAMILIES[2]: {
        "loss_weight": "token",
        "schedule": "constant",
        "lora": {"r": 2, "alpha": 3, "target_modules": ["language_model.up_proj", "v_proj"]},
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_but_rounding_lies_between_us_and_a_plain_loop(
    family: str, home: Path, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """In both layouts, over an epoch's end."""
    bench = Bench(tmp_path, home, recipe_of(tiny_models[family], **RECIPES[family]))
    theirs: Trace | None = None
    for layout in LAYOUTS:
        ours = bench.ours(layout, layout, steps=3)
        theirs = theirs or bench.theirs(ours)
        found = bench.judged(ours, theirs)
        assert found.same, (layout, *map(str, found.differences))
        assert found.worst["gradient"] < LIMITS.gradient and found.worst["trained update"] < LIMITS.update
        trace = Trace(ours.out)
        assert len(trace.last) == len(theirs.last) == 3
        assert apart(load_file(trace.last[3].weights), trace.start)[0] > 1e-4, "training moved nothing"
    assert theirs is not None
    tokens = [each["tokens"] for record in theirs.records for each in record.facts["samples"]]
    assert max(map(len, tokens)) <= (bench.recipe.max_length or 200) and len({len(each) for each in tokens}) > 3


# Faults in our encoding, the same in all plans of ours


def encoded_as(task: Any, change: Callable[[Any], Any]) -> Any:
    return patch.object(task, "_encode", lambda sample, encode=task._encode: change(encode(sample)))


def newline_lost(task: Any, _ranks: Any) -> Any:
    """The template's line break behind a turn."""
    render = task.encoder._render
    return patch.object(task.encoder, "_render", lambda *a, **k: render(*a, **k).replace("<|im_end|>\n", "<|im_end|>"))


def labels_shifted(task: Any, _ranks: Any) -> Any:
    """The last token of the prompt is learned instead of the end of the answer."""
    return encoded_as(task, lambda encoded: replace(encoded, targets=np.roll(encoded.targets, -1)))


def end_not_learned(task: Any, _ranks: Any) -> Any:
    def change(encoded: Any) -> Any:
        targets = encoded.targets.copy()
        targets[np.flatnonzero(targets)[-1]] = False
        return replace(encoded, targets=targets)

    return encoded_as(task, change)


def other_size(task: Any, _ranks: Any) -> Any:
    """Images are reduced to fewer pixels than the recipe says."""
    smaller = {"shortest_edge": 16 * 16, "longest_edge": 48 * 48}
    return patch.object(task.processor._processor, "size", smaller)


def other_filter(task: Any, _ranks: Any) -> Any:
    """Images of the right size, resized by another filter."""
    return patch.object(task.processor._processor, "resample", Image.Resampling.BILINEAR)


def other_colours(task: Any, _ranks: Any) -> Any:
    """Normalised by another standard deviation."""
    return patch.object(task.model, "byte_table", 0.9 * task.model.byte_table)


FAULTS: dict[str, tuple[Plant, str, tuple[str, ...]]] = {
    "newline": (
        newline_lost,
        "tokens",
        ('<|im_end|>" comes "<|im_start|>', 'here, "\\n<|im_start|>', "(token "),
    ),
    "labels": (labels_shifted, "labels", ('"\\n" behind "', 'assistant" is learned here, and is not there')),
    "size": (other_size, "images", ("a.png is resized to 4×6 patches here, 6×8 there",)),
    "filter": (other_filter, "pixel values", ("pixel_values of ", ".png: up to 0.", " apart, mean ")),
    "colours": (other_colours, "pixel values", ("pixel_values of ", "standard deviation ")),
}

FAULTY_LAYOUTS = dict.fromkeys(("newline", "labels", "filter"), tuple(LAYOUTS))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_our_encoding_is_found_and_told(bench: Bench, theirs: Trace, fault: str) -> None:
    """And two plans of ours agree on it: they look at the same wrong questions."""
    plant, what, words = FAULTS[fault]
    arms = [bench.ours(f"{fault}, {layout}", layout, plant) for layout in FAULTY_LAYOUTS.get(fault, ("shared",))]
    for arm in arms:
        found = bench.judged(arm, theirs)
        first = found.differences[0]
        assert first.exact and first.step == 1 and first.what == what, first
        assert first.name.startswith("train.jsonl:")
        for each in words:
            assert each in first.text, (each, first.text)
        assert found.worst["gradient"] > LIMITS.doubtful or fault == "filter", "and the gradient is another one"
    traces = [Trace(arm.out) for arm in arms]
    assert compare(traces[-1], traces[0], differ=lambda *_: iter(())).same
    kept = [[each["digests"] for record in arm.records for each in record.facts["samples"]] for arm in traces]
    assert kept[0] == kept[-1]


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_judged_by_their_float32(family: str, home: Path, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    bench = Bench(tmp_path, home, recipe_of(tiny_models[family], precision="bf16"))
    ours = bench.ours("ours", "shared")
    found = bench.judged(ours, bench.theirs(ours), bench.theirs(ours, "reference", "float32"))
    assert found.same and found.precision == "bf16", list(map(str, found.differences))
    assert 0.6 < found.groups["all"]["R"] < ACROSS.ratio_all
    faulty = bench.judged(bench.ours("faulty", "shared", other_filter), bench.theirs(ours, "again"), None)
    assert faulty.differences[0].what == "pixel values"


# What the other trainer does otherwise


def test_another_schedule_and_another_weighting_are_told(bench: Bench, theirs: Trace) -> None:
    ours = bench.job("ours", "one at a time")
    assert bench.judged(ours, theirs).same
    other = bench.theirs(ours, "other", schedule="constant", warmup_steps=0, loss_weight="sample", eps=1e-6)
    found = bench.judged(ours, other)
    assert [each.what for each in found.differences if each.exact] == ["learning rate"] * 2
    assert str(found.differences[0]).startswith("step 1, learning rate: base_model.") and "0.0, not 0.001" in str(
        found.differences[0]
    )
    assert {"gradient", "loss"} <= {each.what for each in found.differences}


def test_a_reference_in_float64_is_theirs(bench: Bench, theirs: Trace) -> None:
    ours = bench.job("ours", "one at a time")
    double = bench.theirs(ours, "double", "float64")
    assert double.start.keys() == theirs.start.keys() and not double.records
    found = compare(Trace(ours.out), theirs, double, double=True, differ=lambda *_: iter(()))
    assert found.same and found.groups["all"]["R"] < LIMITS.ratio_all and 0 < found.groups["all"]["error"] < 1e-4


def test_an_answer_that_would_be_cut_whole_cannot_be_compared(bench: Bench, theirs: Trace) -> None:
    with pytest.raises(loop.CannotFollow) as error:
        bench.theirs(bench.job("ours", "one at a time"), "cut", max_length=45)
    for words in ("max_length 45: a plain loop would cut the whole answer of ", "train.jsonl:5, whose prompt has 71 "):
        assert words in str(error.value), error.value


# What is told


def question(**changes: Any) -> dict[str, Any]:
    alike = {"tokens": [5, 6, 7], "labels": [[2, 7]], "images": ["x.png"], "modes": ["RGB"], "grids": [[4, 4]]}
    return {**alike, "pixels": "same", "some pixels": [0.0, 0.5], **changes}


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        ({}, {}, []),
        (
            {"tokens": [5, 6]},
            {},
            ['tokens: behind "5 6" comes nothing here, "7" there (token 2 of 2 here, of 3 there)'],
        ),
        ({"labels": [[2, 8]]}, {}, ['labels: behind "5 6" "8" is learned here, "7" there (1 labels here, 1 there)']),
        ({"grids": [[4, 6]]}, {}, ["images: x.png is resized to 4×6 patches here, 4×4 there"]),
        ({"grids": []}, {}, ["images: 0 here, 1 there"]),
        (
            {"pixels": "other", "some pixels": [0.0, 1.0]},
            {"modes": ["RGBA"]},
            [
                "pixel values: pixel_values of x.png: up to 0.5 apart, mean 0.5000 and standard deviation 0.7071 here, "
                "mean 0.2500 and standard deviation 0.3536 there; x.png has mode RGBA, which the two may turn to RGB "
                "in different ways"
            ],
        ),
    ],
)
def test_how_a_question_differs(here: dict[str, Any], there: dict[str, Any], said: list[str]) -> None:
    differ = Differ(lambda tokens: " ".join(map(str, tokens)))
    assert [f"{what}: {text}" for what, text in differ._question(question(**here), question(**there))] == said


TOKENS = st.lists(st.integers(0, 3), max_size=6)
LABELS = st.dictionaries(st.integers(0, 8), st.integers(0, 3)).map(lambda each: sorted(map(list, each.items())))


@given(TOKENS, TOKENS, LABELS, LABELS)
def test_every_difference_is_told_at_its_first_place(
    here: list[int], there: list[int], learned: list[list[int]], expected: list[list[int]]
) -> None:
    a, b = question(tokens=here, labels=learned), question(tokens=there, labels=expected)
    told = list(Differ(lambda tokens: " ".join(map(str, tokens)))._question(a, b))
    if here != there:
        at = max(n for n in range(7) if here[:n] == there[:n] and n <= min(len(here), len(there)))
        assert told[0][0] == "tokens" and f"(token {at} of {len(here)} here, of {len(there)} there)" in told[0][1]
    elif learned != expected:
        assert told[0][0] == "labels" and f"({len(learned)} labels here, {len(expected)} there)" in told[0][1]
    else:
        assert not told


def test_features_that_come_from_a_cache_have_no_pixels_to_compare() -> None:
    cached = question()
    del cached["pixels"], cached["some pixels"]
    assert not list(Differ(str)._question(cached, question()))


# Refused


class Later(VqaRecipe):
    """A field that this comparison has never heard of."""

    shine: float = 0.0


def test_what_a_plain_loop_cannot_do_is_refused_in_one_sentence(home: Path, tiny_models: dict[str, Path]) -> None:
    model = tiny_models[FAMILIES[0]]
    stages = [{"name": "first", "where": {"stage": 1}}]
    made = cot_recipe(model, base_format="nf4", stages=stages, data=recipe_of(model).data.model_dump())
    (home / "cot.yaml").write_text(dump_yaml(made))
    said = sameday(home, "verify", "cot.yaml", "--against", "transformers")
    assert said.code == 2 and not said.out
    assert said.err == (
        "error: --against transformers: a plain loop of transformers and PEFT cannot do task cot (its heads), "
        "base_format nf4, stages (--set recipe.stages=[] is one training)\n"
    )
    (home / "images.yaml").write_text(dump_yaml(sets.tiny_recipe()))
    said = sameday(home, "verify", "images.yaml", "--against", "transformers")
    assert said.code == 2 and said.err.endswith("cannot do task classify\n"), said.err
    later = Later.model_validate(recipe_of(model).model_dump() | {"shine": 0.5, "train": "all"})
    assert VqaSetup(later, home).not_plain() == ["train all (what is compared are adapters)", "shine"]
    assert not VqaSetup(recipe_of(model), home).not_plain()


# As a user types it


@pytest.fixture
def typed_recipe(home: Path, tiny_models: dict[str, Path]) -> Iterator[Path]:
    handler = signal.getsignal(signal.SIGTERM)
    made = recipe_of(tiny_models[FAMILIES[-1]], precision="bf16", name="mine")
    (home / "recipe.yaml").write_text(dump_yaml(made))
    (home / "shared.yaml").write_text(dump_yaml(Plan(device="cpu", **SHARED)))
    yield home
    signal.signal(signal.SIGTERM, handler)


WORDS = ("verify", "recipe.yaml", "--against", "transformers", "--plan", "shared.yaml", "--steps", "4", "--json")


def test_the_command_says_rounding(typed_recipe: Path) -> None:
    said = sameday(typed_recipe, *WORDS, "same.json")
    lines = said.out.splitlines()
    assert said.code == 0 and len(lines) <= 40 and all(len(line) <= 100 for line in lines), said.err
    assert lines[0] == "rounding: the same mathematics, in another order of rounding"
    flat = " ".join(said.out.split())
    for words in (
        "precision float32 (the recipe's is bf16), mine",
        "plan shared.yaml",
        f"against transformers {version('transformers')} and peft {version('peft')}",
        "their processor, chat template, forward and loss, torch's AdamW, one question at a time; the questions of "
        "each step and the starting adapter are ours",
        "steps 4 of 5, 3, 5, 3 questions, over an epoch's end and a partial batch, killed in step 4, resumed from step",
        "dropout 0.1, set to 0 in both arms, which draw other masks",
        "structure equal: samples, starting adapter, images, tokens, labels, rates, groups",
        f"(limit {LIMITS.gradient:.0e})",
        "loss of a question",
        "the limits were measured on equivalent plans of ours, not across trainers",
        "no difference beyond a limit",
    ):
        assert words in flat, (words, said.out)
    assert "transformers: gradients, trained to the end" in said.err
    found = json.loads((typed_recipe / "same.json").read_text())
    assert (found["verdict"], found["precision"], found["dropout"]) == ("rounding", "float32", "off")
    assert found["against"].startswith("transformers ") and 0 < found["largest"]["gradient"] < LIMITS.gradient
    assert 0 < found["largest"]["question"] < LIMITS.trained(half=False)["question"]


def test_the_command_says_what_is_different(typed_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer's end is learned. The arms are in this process, ours killed and resumed."""
    monkeypatch.setattr(Arms, "run", lambda _self, lanes: run_here(lanes[0]["plan"], end_not_learned))
    monkeypatch.setattr(Arms, "peer", lambda _self, _name, job: loop.run(job))
    said = sameday(typed_recipe, *WORDS, "other.json")
    assert said.code == 1, said.err
    lines = said.out[said.out.index("different: NOT the same model\n") :].splitlines()
    assert len(lines) <= 40 and all(len(line) <= 100 for line in lines)
    flat = " ".join(said.out.split())
    assert "structure NOT equal: " in flat and "first step 1, labels: train.jsonl:" in flat, said.out
    assert '"<|im_end|>" behind ' in flat and "is not learned here, and is there" in flat, said.out
    found = json.loads((typed_recipe / "other.json").read_text())
    assert found["verdict"] == "different" and found["differences"][0]["what"] == "labels"


# What is trained

PARTS = {
    "qwen3_vl": {"r": 4, "alpha": 8, "dora": True, "target_modules": ["q_proj", "tower.qkv", "projector.all-linear"]},
    "llava": {
        "r": 4,
        "alpha": 8,
        "rslora": True,
        "target_modules": ["v_proj", "tower.all-linear", "projector.linear_2"],
    },
}


@pytest.mark.parametrize("family", PARTS)
def test_the_plain_loop_follows_parts_rates_and_forms_of_adapters(
    home: Path, tiny_models: dict[str, Path], tmp_path: Path, family: str
) -> None:
    sizes = {} if family == "qwen3_vl" else {"min_pixels": None, "max_pixels": None}
    rates = {"tower": 1e-4, "projector": 5e-4}
    here = Bench(tmp_path, home, recipe_of(tiny_models[family], lora=PARTS[family], learning_rates=rates, **sizes))
    both = {layout: here.ours(layout, layout) for layout in LAYOUTS}
    theirs = here.theirs(both["one at a time"])
    for layout, ours in both.items():
        found = here.judged(ours, theirs)
        assert found.same, (layout, *map(str, found.differences))
    told = {round(group["lr"] / 5e-4, 9) for group in theirs.records[1].facts["groups"]}
    assert told == {1, *(rate / 1e-3 for rate in rates.values())}
    other = here.theirs(both["one at a time"], "other", rates=[])
    (first, *_) = here.judged(both["shared"], other).differences
    assert first.what == "learning rate" and re.search("visual|vision_tower|multi_modal_projector", first.name)
