"""Before a run on a CPU begins: that it is on a CPU, how long it takes at least, and a format that the CPU is slow at.
What would take days must be asked for. Other commands say so of what is large."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sets
import torch
import worlds
from hypothesis import given
from hypothesis import strategies as st
from typed import refused, sameday, write_recipe

from sameday.commands import outlook
from sameday.commands.outlook import SLOW_FORMAT, Outlook, matmul_rate, rates_alone
from sameday.commands.session import Session
from sameday.hardware.ranks import Ranks
from sameday.spec.document import dump_yaml
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.tasks.classify.setup import ClassifySetup
from sameday.tasks.vqa import weights
from sameday.tasks.vqa.setup import VqaSetup
from sameday.tune import command
from sameday.verify.processes import Arms

pytestmark = pytest.mark.usefixtures("own_signals")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small set and a recipe for it, on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sets.write_set(tmp_path, train=20)
    (tmp_path / "recipe.yaml").write_text(dump_yaml(sets.tiny_recipe(data={"path": "set", "val": 4}, max_steps=2)))
    return tmp_path


def rated(monkeypatch: pytest.MonkeyPatch, rate: Callable[[Any], float]) -> None:
    """A CPU that does so many FLOP per second in each format, with all threads and with one."""
    monkeypatch.setattr(outlook, "matmul_rate", rate)
    monkeypatch.setattr(outlook, "rates_alone", lambda precision: {each: rate(each) for each in (precision, "float32")})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


TRAIN = ("train", "recipe.yaml", "--out", "run")
LONG = ("--set", "recipe.max_steps=2000000000")


def test_what_would_take_days_must_be_asked_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rated(monkeypatch, lambda _precision: 1e9)
    said = refused(home, *TRAIN, *LONG)
    assert re.fullmatch(
        r"plan\.device auto: torch finds no GPU here, and a CPU would take at least about [\d,]+ days \(\S+ FLOP of "
        r"matmuls at \S+ GFLOP/s, as measured in float32 with \d+ threads?\); --set plan\.device=cpu begins it all the "
        r"same",
        said,
    )
    assert not (home / "run").exists()
    begun = sameday(home, *TRAIN, *LONG, "--set", "plan.device=cpu", "--stop-after", "1")
    assert begun.code == 75 and "finds no GPU" not in begun.out


@pytest.mark.parametrize("command", [TRAIN, ("profile", "recipe.yaml", "--steps", "1")])
def test_what_has_no_room_in_memory_is_refused(home: Path, command: tuple[str, ...]) -> None:
    """Before a weight is drawn: the system would kill the process."""
    sets_ = ("--set", "recipe.model.latents=1000000", "--set", "recipe.effective_batch=16")
    said = refused(home, *command, *sets_, "--set", "plan.device=cpu")
    assert re.fullmatch(
        r"training takes at least 175 GiB of memory, and this machine has \S+: 45.8 GiB for 3,072,000,000 parameters, "
        r"gradients and AdamW's moments, 130 GiB for activations of 16 images at once; what is left to try: a smaller "
        r"plan.micro_batch, recipe.model or recipe.data.image_size",
        said,
    )
    assert not (home / "run").exists()


def test_a_short_run_is_said_to_be_on_a_cpu(home: Path) -> None:
    said = sameday(home, *TRAIN)
    assert said.code == 0 and said.out.splitlines()[0] == "device: cpu, because torch finds no GPU here"
    assert "the run takes" not in said.out


def test_a_long_one_says_how_long(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlook, "WORTH_TIMING", 1.0)
    rated(monkeypatch, lambda _precision: 1e6)
    assert "\non this CPU the run takes at least about " in sameday(home, *TRAIN).out


@pytest.mark.parametrize("asked", [(), ("--set", "plan.device=cpu")])
def test_a_format_that_the_cpu_is_slow_at(home: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...]) -> None:
    rates = {"bf16": 1e9, "float32": 2.4e11}
    rated(monkeypatch, rates.__getitem__)
    sentence = "bf16 matmuls are about 240 times slower than float32 ones on this CPU: recipe.precision float32 is "
    sentence += "another recipe, and the faster one here"
    assert f"{sentence}\n" in sameday(home, *TRAIN, "--set", "recipe.precision=bf16", *asked).out
    if not asked:
        long = (*TRAIN[:-1], "long", "--set", "recipe.precision=bf16", *LONG)
        assert refused(home, *long).endswith(f"all the same. {sentence}")
    rates["bf16"] = 1e11
    assert "slower" not in sameday(home, *TRAIN, "--set", "recipe.precision=bf16", "--set", "recipe.seed=8", *asked).out


ON_QUESTIONS = {
    "eval": ("eval", "recipe.yaml", "--base", "--split", "val"),
    "profile": ("profile", "recipe.yaml"),
    "tune": ("tune", "recipe.yaml", "--minutes", "1", "-o", "found.yaml"),
    "verify": ("verify", "recipe.yaml"),
    "verify beside transformers": ("verify", "recipe.yaml", "--against", "transformers"),
    "cache": ("cache", "recipe.yaml", "--kind", "features"),
}
LOADED = "the model would be loaded here"


@pytest.fixture
def asked(tmp_path: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe for questions, on a machine without a GPU, up to where a model is loaded."""

    def stop(*_: object, **__: object) -> None:
        raise BadInput(LOADED)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Session, "load", stop)
    monkeypatch.setattr(Arms, "run", stop)
    monkeypatch.setattr(command, "_explored", stop)
    return write_recipe(worlds.write_world(tmp_path, 3, counts=(3, 2), hard=False), tiny_qwen3)


FROZEN = r"(?P<gib>\S+) GiB for (?P<frozen>[\d,]+) weights in "
WHOLE = r"(?P<gib>\S+) GiB for (?P<trained>[\d,]+) trained ones, gradients and AdamW's moments"
OF_QUESTIONS: dict[str, tuple[dict[str, str], str, int, str]] = {
    "float32": (
        {},
        "bfloat16",
        4,
        rf"{FROZEN}float32; .* recipe.model, recipe.precision bf16, which is another recipe",
    ),
    "bf16": ({"precision": "bf16"}, "float32", 2, rf"{FROZEN}bf16; .* recipe.model"),
    "all": (
        {"train": "all"},
        "bfloat16",
        16,
        rf"\S+ GiB for (?P<frozen>[\d,]+) weights in float32 and {WHOLE}; .* recipe.model",
    ),
    "all, in place": ({"train": "all"}, "float32", 16, rf"{WHOLE}; .* recipe.model"),
}
"""Changes of a recipe, the format in which weights are stored, bytes of each number, and what is said."""
HAS = r"takes at least \S+ GiB of memory, and this machine has "


def stored(home: Path, model: Path, kind: str, **fields: str) -> Path:
    """A recipe for a model that says it is stored so."""
    copy = home / f"model-{kind}"
    shutil.copytree(model, copy)
    config = json.loads((model / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"dtype": kind}))
    write_recipe(home, copy, **fields)
    return copy


@pytest.mark.parametrize("name", OF_QUESTIONS)
def test_a_model_that_has_no_room_in_memory_is_refused_before_it_is_read(
    asked: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fields, kind, each, what = OF_QUESTIONS[name]
    model = worlds.make_task(asked, worlds.tiny_recipe(tiny_qwen3, **fields), Plan()).model
    monkeypatch.setattr(weights, "SMALL", 0)
    monkeypatch.setattr(outlook, "free_memory", lambda _device: (0, 2**10))
    stored(asked, tiny_qwen3, kind, **fields)
    said = refused(asked, *TRAIN, "--set", "plan.device=cpu").splitlines()[-1]
    told = re.fullmatch(rf"training {HAS}9.54e-07: {what}", said)
    assert told is not None and not (asked / "run").exists(), said
    base = [parameter for key, parameter in model.module.named_parameters() if "lora_" not in key]
    numbers = {kind: int(number.replace(",", "")) for kind, number in told.groupdict().items() if kind != "gib"}
    for which, number in numbers.items():
        assert number == sum(p.numel() for p in base if p.requires_grad == (which == "trained")), which
    assert float(told["gib"]) == pytest.approx(
        each * numbers["trained" if "trained" in numbers else "frozen"] / 2**30, rel=0.01
    )
    scored = refused(asked, *ON_QUESTIONS["eval"], "--set", "plan.device=cpu").splitlines()[-1]
    assert re.match(f"the model {HAS}", scored), scored
    parts = {number.replace(",", "") for number in re.findall(r"GiB for ([\d,]+) ", scored)}
    assert parts == set(map(str, numbers.values())) and "AdamW" not in scored


@pytest.mark.parametrize(("precision", "kind"), [("float32", "float32"), ("bf16", "bfloat16")])
def test_weights_that_stay_in_their_files_may_be_larger_than_memory(
    asked: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch, precision: str, kind: str
) -> None:
    """The system gives their room to others, and reads them again."""
    monkeypatch.setattr(weights, "SMALL", 0)
    stored(asked, tiny_qwen3, kind, precision=precision)
    sentence = (
        r"\S+ GiB of weights do not fit into this machine's 9.54e-07 GiB of memory: each pass reads from the disk "
    )
    for there, small in ((2**10, True), (2**40, False)):
        monkeypatch.setattr(outlook, "free_memory", lambda _device, there=there: (0, there))
        for words in (TRAIN, ON_QUESTIONS["eval"]):
            begun = sameday(asked, *words, "--set", "plan.device=cpu")
            assert begun.err.endswith(f"error: {LOADED}\n"), begun.err
            assert bool(re.search(sentence, begun.out + begun.err)) == small
        shutil.rmtree(asked / "run", ignore_errors=True)


def test_of_codes_no_file_is_read_again(asked: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made of bf16 once, and held."""
    monkeypatch.setattr(weights, "SMALL", 0)
    monkeypatch.setattr(outlook, "free_memory", lambda _device: (0, 2**10))
    stored(asked, tiny_qwen3, "bfloat16", precision="bf16", base_format="nf4")
    begun = sameday(asked, *ON_QUESTIONS["eval"], "--set", "plan.device=cpu")
    assert begun.err.endswith(f"error: {LOADED}\n") and "from the disk" not in begun.out + begun.err


def test_reading_a_cache_needs_the_model_and_no_training(
    asked: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(asked, tiny_qwen3, "bfloat16", train="all")
    monkeypatch.setattr(weights, "SMALL", 0)
    model = worlds.make_task(asked, worlds.tiny_recipe(tiny_qwen3, train="all"), Plan()).model
    numbers = sum(parameter.numel() for parameter in model.module.parameters())
    monkeypatch.setattr(outlook, "free_memory", lambda _device: (0, 5 * numbers))
    words = (*ON_QUESTIONS["cache"], "--set", "plan.device=cpu")
    assert re.match(f"training {HAS}", refused(asked, *words).splitlines()[-1]), "its steps are timed"
    for more in ("--check", "--prune"):
        assert sameday(asked, *words, more).err.endswith(f"error: {LOADED}\n")


@pytest.mark.parametrize("words", ON_QUESTIONS.values(), ids=ON_QUESTIONS)
def test_whatever_loads_a_large_model_says_that_it_is_on_a_cpu(
    asked: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    sentence = "device: cpu, because torch finds no GPU here\n"
    small = sameday(asked, *words)
    assert small.err.endswith(f"error: {LOADED}\n") and "finds no GPU" not in small.out + small.err
    monkeypatch.setattr(outlook, "LARGE", 1)
    large = sameday(asked, *words)
    assert large.err.endswith(f"error: {LOADED}\n") and (large.out + large.err).count(sentence) == 1
    typed = sameday(asked, *words, "--set", "plan.device=cpu")
    assert typed.err.endswith(f"error: {LOADED}\n") and "finds no GPU" not in typed.out + typed.err


@pytest.mark.parametrize("words", ON_QUESTIONS.values(), ids=ON_QUESTIONS)
def test_a_format_that_a_large_model_is_slow_in(
    asked: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    rated(monkeypatch, {"bf16": 1e9, "float32": 2.4e11}.__getitem__)
    monkeypatch.setattr(outlook, "LARGE", 1)
    said = sameday(asked, *words, "--set", "recipe.precision=bf16")
    slow = "bf16 matmuls are about 240 times slower than float32 ones on this CPU: recipe.precision float32 is"
    assert (slow in said.out + said.err) == ("transformers" not in words), "beside transformers it is float32"


@pytest.mark.parametrize("name", [name for name in ON_QUESTIONS if name != "cache"])
def test_days_of_other_commands_must_be_asked_for(asked: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(outlook, "WORTH_TIMING", 1.0)
    rated(monkeypatch, lambda _precision: 10.0)
    said = refused(asked, *ON_QUESTIONS[name]).splitlines()[-1]
    assert re.fullmatch(
        r"plan\.device auto: torch finds no GPU here, and a CPU would take at least about [\d,]+ days \(.*\); "
        r"--set plan\.device=cpu begins it all the same",
        said,
    )
    begun = sameday(asked, *ON_QUESTIONS[name], "--set", "plan.device=cpu")
    assert begun.err.endswith(f"error: {LOADED}\n")
    takes = r"on this CPU (\d+ steps take|the loss of val takes) at least about [\d,]+ days \("
    assert re.search(takes, begun.out + begun.err)


def test_an_evaluation_of_images_is_looked_at_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sameday(home, *TRAIN).code == 0
    monkeypatch.setattr(outlook, "WORTH_TIMING", 1.0)
    rated(monkeypatch, lambda _precision: 1e6)
    said = sameday(home, "eval", "run", "--split", "val")
    assert said.code == 0 and said.out.startswith(
        "device: cpu, because torch finds no GPU here\non this CPU the loss of"
    )


STAGES = (*TRAIN, "--set", "recipe.stages=[{name: one, max_steps: 1000}, {name: two, max_steps: 1000}]")


def test_stages_are_judged_together(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of them takes a day; what is asked to stop early does not take long."""
    monkeypatch.setattr(outlook, "WORTH_TIMING", 1.0)
    total: list[float] = []
    rated(monkeypatch, lambda _precision: total[0] if total else 1e18)
    one_step = r"all stages together take at least about .* \((\S+) FLOP of matmuls at"
    said = sameday(asked, *STAGES)
    (flop,) = re.findall(one_step, said.out)
    total.append(float(flop) / (33 * 3600))  # 33 hours
    assert re.fullmatch(
        r"plan\.device auto: torch finds no GPU here, and a CPU would take at least about 33 hours \(.*\); --set "
        r"plan\.device=cpu begins it all the same",
        refused(asked, *STAGES),
    )
    assert not (asked / "run").exists()
    for words in (("--stop-after", "1200"), ("--set", "plan.device=cpu")):
        assert refused(asked, *STAGES, *words) == LOADED
    assert "33 hours" in refused(asked, *STAGES, "--stop-after", "2000")


def test_a_finished_stage_is_not_ahead(tmp_path: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(outlook, "WORTH_TIMING", 1.0)
    rated(monkeypatch, lambda _precision: 1e18)
    write_recipe(worlds.write_world(tmp_path, 3, counts=(3, 2), hard=False), tiny_qwen3)
    stages = (*TRAIN, "--set", "recipe.stages=[{name: one, max_steps: 1}, {name: two, max_steps: 3}]")
    together = r"\non this CPU all stages together take at least about 0 seconds \((\S+) FLOP"
    first = sameday(tmp_path, *stages, "--stop-after", "1")
    second = sameday(tmp_path, *stages)
    assert (first.code, second.code) == (75, 0)
    (one,), (three,) = (re.findall(together, f"\n{each.out}") for each in (first, second))
    assert float(three) / float(one) == pytest.approx(3, rel=0.1)


@given(st.floats(1e6, 1e20), st.floats(1e6, 1e13), st.floats(1e6, 1e13))
def test_outlook(flop: float, rate: float, float32: float) -> None:
    ahead = Outlook(flop, "bf16", rate, float32 / rate)
    assert ahead.seconds * rate == pytest.approx(flop)
    assert (ahead.slow_format() is not None) == (float32 / rate >= SLOW_FORMAT)
    number, unit = re.match(r"at least about ([\d,]+) (days|hours|minutes|seconds) \(", ahead.estimate()).groups()  # type: ignore[union-attr]
    size = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}[unit]
    assert abs(int(number.replace(",", "")) * size - ahead.seconds) <= 0.5001 * size


def test_other_programs_do_not_decide_whether_a_format_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads together are a hundred times too slow where they wait for one that lost its core, in any format."""
    monkeypatch.setattr(outlook, "rates_alone", lambda precision: {precision: 1e9, "float32": 5e9})
    for together in (1e7, 1e11):
        monkeypatch.setattr(outlook, "matmul_rate", lambda _precision, together=together: together)
        ahead = outlook._outlook(1e12, "bf16")
        assert ahead.slow_format() is not None and ahead.slower == 5
        assert ahead.rate >= 1e9 * torch.get_num_threads(), "what a run takes at least"


BUSY = "import time; end = time.time() + 60\nwhile time.time() < end: pass"


@pytest.mark.slow
def test_both_formats_are_timed_in_turns_with_one_thread() -> None:
    """Whatever else this machine does; how fast it is, nobody can say here."""
    threads = torch.get_num_threads()
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2 * threads)]
    try:
        ratios = [rates["float32"] / rates["bf16"] for rates in (rates_alone("bf16") for _ in range(5))]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert torch.get_num_threads() == threads
    assert max(ratios) < 3 * min(ratios), "the decision is the same each time"
    (only,) = rates_alone("float32").values()
    assert 1e7 < only < 1e15


@pytest.mark.slow
def test_a_cpu_is_timed() -> None:
    assert 1e7 < matmul_rate("float32") < 1e15 and 1e5 < matmul_rate("bf16") < 1e15


def test_an_epoch_of_images_is_counted_as_its_steps_are(tmp_path: Path) -> None:
    sets.write_set(tmp_path, train=20)
    recipe = sets.tiny_recipe(data={"path": "set", "val": 4})
    task, setup = sets.make_task(tmp_path, recipe), ClassifySetup(recipe, tmp_path)
    counted = sum(task.cost(step, None, Ranks()).flop for step in range(task.steps_per_epoch()))
    assert setup.epoch_flop(Plan(), setup.audit(print).splits) == counted


@pytest.mark.parametrize("shared", [False, True])
def test_an_epoch_of_questions_is_about_what_its_steps_are(tmp_path: Path, tiny_qwen3: Path, shared: bool) -> None:
    """Within a factor of three: in so small a model the tower and the embeddings are much of it."""
    worlds.write_world(tmp_path, 5, (9, 7, 8), hard=False)
    recipe = worlds.tiny_recipe(tiny_qwen3, order="by_image", effective_batch=24)
    plan = Plan(share_images=shared, packing=shared, max_questions=None if shared else 1)
    task, setup = worlds.make_task(tmp_path, recipe, plan), VqaSetup(recipe, tmp_path)
    counted = sum(task.cost(step, None, Ranks()).flop for step in range(task.steps_per_epoch()))
    told = setup.epoch_flop(plan, setup.drop_too_long(setup.audit(print).splits))
    assert counted / 3 < told < 3 * counted
