"""Evaluation of questions: the same scores whoever prepares the micro-batches and however they had to be cut, and a
match only where the whole answer is there."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import worlds
from torch import Tensor

from sameday.data.questions.batch import Batch
from sameday.hardware.ranks import Ranks
from sameday.spec.errors import EXIT_OUT_OF_MEMORY, RunStopped
from sameday.spec.plan import Plan
from sameday.tasks.vqa.task import VqaTask

SHARED: dict[str, Any] = {"share_images": True, "packing": True, "max_questions": None}


def test_workers_give_the_same_scores(tmp_path: Path, tiny_qwen3: Path) -> None:
    """With the plan's budget, and where training had to lower it."""
    worlds.write_world(tmp_path, 5, counts=(5, 3))
    recipe = worlds.tiny_recipe(tiny_qwen3)
    plain, workers = (worlds.make_task(tmp_path, recipe, Plan(max_questions=None, workers=count)) for count in (0, 1))
    before = set(multiprocessing.active_children())
    for budget in (None, 120, None):
        assert workers.evaluate("val", Ranks(), budget) == plain.evaluate("val", Ranks(), budget)
        assert set(multiprocessing.active_children()) <= before


# Exact match


def always_right(task: VqaTask, monkeypatch: pytest.MonkeyPatch, but: int = -1) -> None:
    """The model gives every target, but not this token."""
    seen: list[Batch] = []

    def hidden(batch: Batch, step: int = 0) -> Tensor:
        seen.append(batch)
        return torch.zeros(batch.tokens.numel(), 1)

    def logits(_hidden: Tensor, at: Tensor) -> Tensor:
        assert torch.equal(at, seen[-1].target_at)
        return F.one_hot(seen[-1].target, len(task.encoder.tokenizer)).float() * (seen[-1].target != but)[:, None]

    monkeypatch.setattr(task.model, "hidden", hidden)
    monkeypatch.setattr(task.model, "logits", logits)


@pytest.mark.parametrize("answer_end", ["end_token", "turn"])
@pytest.mark.parametrize("plan", [{}, {"max_questions": None}, SHARED], ids=["alone", "padded", "shared"])
def test_an_answer_that_was_cut_never_matches(
    tmp_path: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any], answer_end: str
) -> None:
    """Though an earlier turn of the same conversation, or of another one in the row, ends as it should."""
    worlds.write_world(tmp_path, 0, (1,), hard=False)

    def turns(*said: str) -> dict[str, Any]:
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        return {"messages": messages, "images": ["0.png"]}

    long = " ".join(worlds.WORDS * 4)
    rows = [
        turns("<image>what?", "a red wall", "size?", "small"),
        turns("<image>what?", "a red wall", "how so?", long),
        turns("<image>what?", "yes"),
        turns("<image>what?", long),
    ]
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = worlds.tiny_recipe(tiny_qwen3, max_length=100, answer_end=answer_end)
    task = worlds.make_task(tmp_path, recipe, Plan(**plan))
    encoded = [task._encode(sample).tokens for sample in task.splits["val"]]
    cut = [tokens[-1 - (answer_end == "turn")] != task.encoder.end_token for tokens in encoded]
    assert cut == [False, True, False, True]
    always_right(task, monkeypatch)
    scores = task.evaluate("val", Ranks())
    assert scores["exact_match"] == 0.5 and scores["samples"] == 4


def test_what_follows_an_answer_is_no_part_of_a_match(
    tmp_path: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer that is generated goes on behind its end."""
    worlds.write_world(tmp_path, 0, (3,), hard=False)
    task = worlds.make_task(tmp_path, worlds.tiny_recipe(tiny_qwen3, answer_end="turn"), Plan())
    (line_break,) = task.encoder.tokenizer("\n")["input_ids"]
    always_right(task, monkeypatch, but=line_break)
    assert task.evaluate("val", Ranks())["exact_match"] == 1
    always_right(task, monkeypatch, but=task.encoder.end_token)
    assert task.evaluate("val", Ranks())["exact_match"] == 0


# Memory


class TooMany:
    """A model that has memory for so many questions at a time."""

    def __init__(self, task: VqaTask, most: int) -> None:
        self.hidden, self.most, self.sizes = task.model.hidden, most, list[int]()

    def __call__(self, batch: Batch, step: int = 0) -> Tensor:
        self.sizes.append(len(batch.sample_ids))
        if len(batch.sample_ids) > self.most:
            raise torch.OutOfMemoryError("planted")
        return self.hidden(batch, step)


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize(
    "plan", [{"max_questions": None}, SHARED, SHARED | {"workers": 1}], ids=["padded", "shared", "workers"]
)
def test_without_room_it_goes_on_in_halves(
    tmp_path: Path, tiny_qwen3: Path, plan: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds.write_world(tmp_path, 5, counts=(8, 3))
    task = worlds.make_task(tmp_path, worlds.tiny_recipe(tiny_qwen3, order="by_image"), Plan(**plan))
    expected = task.evaluate("val", Ranks())
    short = TooMany(task, most)
    monkeypatch.setattr(task.model, "hidden", short)
    found = task.evaluate("val", Ranks())
    assert max(short.sizes) > most and task.model.module.training
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert (found["exact_match"], found["samples"]) == (expected["exact_match"], expected["samples"])
    assert sum(size for size in short.sizes if size <= most) == expected["samples"], "each question once"


def test_a_group_of_one_image_is_halved_too(tmp_path: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions that share a prefix are one unit, and may be too many."""
    worlds.write_world(tmp_path, 5, counts=(9,), hard=False)
    task = worlds.make_task(tmp_path, worlds.tiny_recipe(tiny_qwen3), Plan(**SHARED))
    (batch,) = task._partition([task._encode(s) for s in task.splits["val"]], task._cut(None), 1)[0]
    assert [len(unit.members) for unit in batch] == [9]
    expected = task.evaluate("val", Ranks())
    short = TooMany(task, 2)
    monkeypatch.setattr(task.model, "hidden", short)
    assert task.evaluate("val", Ranks()) == pytest.approx(expected, rel=1e-6)
    assert short.sizes == [9, 4, 2, 2, 5, 2, 3, 1, 2]


def test_one_question_that_is_too_large_stops_the_run(
    tmp_path: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds.write_world(tmp_path, 5, counts=(3,), hard=False)
    task = worlds.make_task(tmp_path, worlds.tiny_recipe(tiny_qwen3), Plan(**SHARED))
    monkeypatch.setattr(task.model, "hidden", TooMany(task, 0))
    with pytest.raises(RunStopped) as stopped:
        task.evaluate("val", Ranks())
    assert stopped.value.code == EXIT_OUT_OF_MEMORY and task.model.module.training
    assert str(stopped.value) == (
        "out of memory in evaluation with a single question, val.jsonl:1. What is left to try: "
        "recipe.max_pixels, max_length."
    )


class OtherRankIsShort(Ranks):
    """Two ranks, of which the other ran out of memory."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def sum_(self, tensor: Tensor) -> Tensor:
        tensor[-1] += 1
        return tensor

    def gather(self, value: Any) -> list[Any]:
        return [value, ["val.jsonl:7"]]


def test_all_ranks_stop_where_one_is_short(tmp_path: Path, tiny_qwen3: Path) -> None:
    """A rank that stopped alone would leave the others waiting for its part of the sum."""
    worlds.write_world(tmp_path, 5, counts=(3,), hard=False)
    task = worlds.make_task(tmp_path, worlds.tiny_recipe(tiny_qwen3), Plan())
    with pytest.raises(RunStopped, match=r"with a single question, val\.jsonl:7\. What"):
        task.evaluate("val", OtherRankIsShort())


# What generated answers depend on


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, two_layers: Path) -> tuple[Path, dict[str, str]]:
    """Questions, and what answers to them depend on by the usual recipe."""
    folder = worlds.write_world(tmp_path_factory.mktemp("asked"), 5, (2,), hard=False)
    return folder, digests(folder, two_layers)


def digests(folder: Path, model: Path, plan: Mapping[str, Any] = SHARED, **changes: Any) -> dict[str, str]:
    """Whatever the scale of the adapters, their weights are the same."""
    task = worlds.make_task(folder, worlds.tiny_recipe(model, **changes), Plan(**plan))
    worlds.stir(task)
    return task.answer_digests("val")


def others(one: dict[str, str], other: dict[str, str]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if one[name] != other[name]}


def test_another_scale_of_adapters_is_another_model(asked: tuple[Path, dict[str, str]], two_layers: Path) -> None:
    folder, usual = asked
    assert others(digests(folder, two_layers, lora={"r": 4, "alpha": 16}), usual) == {"adapter scale"}
    assert others(digests(folder, two_layers, lora={"r": 4, "alpha": 8, "dropout": 0.1}), usual) == set()


def test_a_plan_changes_nothing_that_answers_depend_on(asked: tuple[Path, dict[str, str]], two_layers: Path) -> None:
    folder, usual = asked
    plan = {"checkpointing": "full", "token_budget": 300, "label_only_logits": True}
    assert others(digests(folder, two_layers, plan), usual) == set()


def test_base_weights_stored_otherwise_are_another_model(asked: tuple[Path, dict[str, str]], two_layers: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder, _ = asked
    bf16, nf4, twice = (
        digests(folder, two_layers, precision="bf16", **stored)
        for stored in ({}, {"base_format": "nf4"}, {"base_format": "nf4", "double_quant": True})
    )
    assert others(bf16, nf4) == others(nf4, twice) == others(bf16, twice) == {"base format"}
    assert [each["base format"] for each in (bf16, nf4, twice)] == ["bf16", "nf4", "nf4 with double_quant"]


CONFIGS: dict[str, tuple[str, Callable[[Any], Any], set[str]]] = {
    "rotary positions": (
        "config.json",
        lambda config: rotary(config["text_config"]).update(rope_theta=12_345.0),
        {"model config"},
    ),
    "epsilon of norms": (
        "config.json",
        lambda config: config["text_config"].update(rms_norm_eps=0.01),
        {"model config"},
    ),
    "activation of the tower": (
        "config.json",
        lambda config: config["vision_config"].update(hidden_act="silu"),
        {"model config"},
    ),
    "an end token more": (
        "generation_config.json",
        lambda config: config.update(eos_token_id=[*listed(config["eos_token_id"]), 7]),
        {"end tokens"},
    ),
    "what only training and saving read": (
        "config.json",
        lambda config: (
            config.update(transformers_version="4.0.0", architectures=["Other"]),
            config["text_config"].update(initializer_range=0.5, use_cache=False),
        ),
        set(),
    ),
    "settings of sampling": ("generation_config.json", lambda config: config.update(temperature=0.3, top_k=3), set()),
}


def rotary(config: dict[str, Any]) -> dict[str, Any]:
    name = next(name for name in ("rope_parameters", "rope_scaling") if config.get(name))
    return dict.__getitem__(config, name)


def listed(given: Any) -> list[int]:
    return given if isinstance(given, list) else [] if given is None else [given]


@pytest.mark.parametrize("what", CONFIGS)
def test_the_same_weights_with_other_settings(
    asked: tuple[Path, dict[str, str]], two_layers: Path, tmp_path: Path, what: str
) -> None:
    file, change, differ = CONFIGS[what]
    model = Path(shutil.copytree(two_layers, tmp_path / "model"))
    config = json.loads((model / file).read_text()) if (model / file).exists() else {"eos_token_id": None}
    change(config)
    (model / file).write_text(json.dumps(config))
    folder, usual = asked
    assert others(digests(folder, model), usual) == differ


def test_the_heads_of_stages_are_weights_too(tmp_path: Path, two_layers: Path) -> None:
    worlds.write_world(tmp_path, 5, (2,), hard=False)
    task = worlds.make_cot(tmp_path, worlds.cot_recipe(two_layers), Plan())
    before = task.answer_digests("val")
    next(iter(task.heads.parameters())).data += 1
    assert others(task.answer_digests("val"), before) == {"heads"}
