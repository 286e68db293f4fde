"""Heads on disk: saved, resumed, restored, started from, and loaded by a stranger."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from typed import FIELDS, refused, sameday

from sameday.hardware.ranks import Ranks
from sameday.record import checkpoint
from sameday.record.folder import read_metrics
from sameday.record.manifest import MANIFEST, fault
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.tasks.cot.batch import CotBatch
from sameday.tasks.cot.task import CotTask

ON_CPU = ("--set", "plan.device=cpu")
FINISHED = ("train", "recipe.yaml", "--out", "run", *ON_CPU)


@dataclass
class Finished:
    folder: Path
    said: str

    @property
    def adapter(self) -> Path:
        return self.folder / "run/adapter"

    def task(self) -> CotTask:
        fields = yaml.safe_load((self.folder / "recipe.yaml").read_text())
        recipe = worlds.cot_recipe(self.folder / "base", **{k: v for k, v in fields.items() if k != "model"})
        return worlds.make_cot(self.folder, recipe, Plan())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Stopped in its second epoch and gone on with; and once more without a stop."""
    folder = worlds.write_world(tmp_path_factory.mktemp("cot"), 3, (3, 2, 3), hard=False, sizes=((48, 32),))
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for row, stage in zip(rows, (1, 2, 3, 1, 3, 2, 3, 3), strict=True):
        row["stage"] = stage
    for split in ("train", "val"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    worlds.write_tiny(folder / "base", text={"num_hidden_layers": 2})
    more = {"task": "cot", "heads": {"rank": 3}, "effective_batch": 4, "max_steps": 6}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"model": "base"} | FIELDS | more))
    assert sameday(folder, *FINISHED, "--stop-after", "3").code == 75
    again = sameday(folder, *FINISHED)
    assert again.code == 0, again.err
    whole = sameday(folder, "train", "recipe.yaml", "--out", "whole", *ON_CPU)
    assert whole.code == 0, whole.err
    return Finished(folder, again.out)


def test_a_run_goes_on_to_the_bit(finished: Finished) -> None:
    assert "resumed from step-000003" in finished.said
    for name in ("heads.safetensors", "adapter_model.safetensors"):
        ours, theirs = (load_file(finished.folder / run / "adapter" / name) for run in ("run", "whole"))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    heads = load_file(finished.adapter / "heads.safetensors")
    assert all(tensor.any() for tensor in heads.values()), "all of them learned"
    assert set(heads) == {*(f"{kind}.{stage}" for kind in "AB" for stage in "123"), "P.21", "P.31", "P.32"}
    about = json.loads((finished.adapter / "heads.json").read_text())
    assert about == {"rank": 3, "stages": [1, 2, 3], "width": 64, "vocabulary": len(heads["B.1"])}
    assert fault(finished.adapter, ("heads.safetensors", "heads.json")) is None
    assert checkpoint.not_finite(finished.adapter) == []


def test_the_log_has_losses_and_scores_by_stage(finished: Finished) -> None:
    records = read_metrics(finished.folder / "run/metrics.jsonl")
    steps = [record for record in records if "split" not in record]
    assert len(steps) == 6 and all({"loss_stage1", "loss_stage2", "loss_stage3"} & record.keys() for record in steps)
    scores = next(record for record in records if record.get("split") == "val")
    assert {"exact_match", "exact_match_stage1", "exact_match_stage2", "exact_match_stage3"} <= scores.keys()
    assert "exact_match_stage3 " in finished.said
    # Images have 3, 2 and 3 questions: a step of at least 4 takes two of them, and the next one the third.
    sizes = [record["samples"] for record in steps]
    assert {*zip(sizes[::2], sizes[1::2], strict=True)} <= {(5, 3), (6, 2)}


def test_evaluation_takes_the_heads_back(finished: Finished) -> None:
    task = finished.task()
    task.restore(finished.adapter)
    saved = json.loads((finished.folder / "run/eval.json").read_text())["val"]
    assert task.evaluate("val", Ranks()) == pytest.approx(saved, rel=1e-5)


def test_heads_that_a_task_does_not_have_are_told(finished: Finished) -> None:
    """Without them the same adapter is another model."""
    (finished.folder / "plan.yaml").write_text("device: cpu\n")
    fields = yaml.safe_load((finished.folder / "recipe.yaml").read_text())
    others = {name: value for name, value in fields.items() if name not in ("heads", "task")}
    (finished.folder / "others.yaml").write_text(yaml.safe_dump(others))
    words = ("--plan", "plan.yaml", "--split", "val", "--scores-only", "--adapter")
    said = sameday(finished.folder, "eval", "others.yaml", *words, "run/adapter")
    assert said.code == 0, said.err
    assert (
        f"{finished.adapter}: was trained with heads for stages (heads.safetensors), which task vqa does not have: the "
        "adapter alone is another model than the one that was trained\n"
    ) in said.out
    assert "heads" not in sameday(finished.folder, "eval", "recipe.yaml", *words, "run/adapter").out
    plain = finished.folder / "plain"
    shutil.copytree(finished.adapter, plain, ignore=shutil.ignore_patterns("heads*", MANIFEST))
    said = sameday(finished.folder, "eval", "recipe.yaml", *words, "plain")
    assert f"{plain}: has no heads for stages: theirs start at zero, as on the base model\n" in said.out


def test_heads_of_another_form_are_not_restored(finished: Finished, tmp_path: Path) -> None:
    task = finished.task()
    folder = shutil.copytree(finished.adapter, tmp_path / "adapter")
    heads = load_file(folder / "heads.safetensors")
    save_file({name: tensor for name, tensor in heads.items() if name != "P.31"}, folder / "heads.safetensors")
    with pytest.raises(BadInput, match=r"heads.safetensors does not have the tensors of this recipe's heads: P\.31"):
        task.restore(folder)
    (folder / "heads.safetensors").unlink()
    with pytest.raises(BadInput, match="its heads cannot be read: "):
        task.restore(folder)


def test_heads_beside_all_weights(finished: Finished, tmp_path: Path) -> None:
    """Where the whole model is trained, its own file has nothing of the heads."""
    recipe = finished.task().recipe.model_copy(update={"train": "all"})
    task = worlds.make_cot(finished.folder, recipe, Plan())
    worlds.stir(task)
    before = {name: p.detach().clone() for name, p in task.trained().items()}
    task.save(tmp_path)
    assert recipe.result == "model" and not [n for n in load_file(tmp_path / "model.safetensors") if "heads" in n]
    worlds.stir(task)
    task.restore(tmp_path)
    assert all(torch.equal(p, before[name]) for name, p in task.trained().items())


# Starting from


def test_a_start_with_heads_and_without(finished: Finished, tmp_path: Path) -> None:
    home = finished.folder
    start = shutil.copytree(finished.adapter, home / "start")
    recipe = finished.task().recipe.model_copy(update={"start_adapter": "start"})
    trained = worlds.make_cot(home, recipe, Plan())
    heads = load_file(finished.adapter / "heads.safetensors")
    assert all(torch.equal(p, heads[name]) for name, p in trained.heads.named_parameters())
    assert trained.start_from(start) == f"recipe.start_adapter={start}"
    asked = ("train", "recipe.yaml", "--out", "next", *ON_CPU, "--set", "recipe.start_adapter=start")
    said = refused(home, *asked, "--set", "recipe.heads.rank=5")
    assert said == f"start_adapter {start}: heads.rank is 3 there, 5 in the recipe"
    (start / MANIFEST).unlink()
    save_file(heads | {"A.2": heads["A.2"] * torch.nan}, start / "heads.safetensors")
    assert refused(home, *asked).endswith("heads.safetensors has tensors that are not finite (1): A.2")
    assert not (home / "next").exists()
    for name in ("heads.safetensors", "heads.json"):
        (start / name).unlink()
    fresh = worlds.make_cot(home, recipe, Plan())
    assert not any(fresh.heads.B[stage].any() for stage in "123") and not any(p.any() for p in fresh.heads.P.values())
    assert fresh.digests()["start adapter"] != trained.digests()["start adapter"]
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (start, finished.adapter))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# A stranger


def first_image(finished: Finished) -> tuple[CotTask, CotBatch, Tensor]:
    """The questions of the first image, and the logits of every target."""
    task = finished.task()
    task.restore(finished.adapter)
    task.training(False)
    whole = [[i for i, sample in enumerate(task.splits["train"]) if sample.images[0].path.name == "0.png"]]
    encoded = [task._encode(task.splits["train"][i]) for i in whole[0]]
    ((part,),) = task._partition(encoded, task._cut(None), 1)
    batch = task._build(encoded, part)
    with torch.no_grad():
        return task, batch, task.logits(batch, task.model.hidden(batch))


def prompts(task: CotTask, batch: CotBatch, folder: Path, image: Path) -> list[dict[str, Tensor]]:
    """What transformers' own processor and tokenizer make of each question."""
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer, processor = AutoTokenizer.from_pretrained(folder), Qwen2VLImageProcessorPil.from_pretrained(folder)
    made = []
    for number in batch.sample_ids:
        question = next(sample.question for sample in task.splits["train"] if sample.id == number)
        inputs = processor(images=[Image.open(image).convert("RGB")], return_tensors="pt")
        slots = int(inputs["image_grid_thw"].prod()) // processor.merge_size**2
        asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
        text = tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True)
        text = text.replace("<|image_pad|>", "<|image_pad|>" * slots)
        inputs |= tokenizer(text, add_special_tokens=False, return_tensors="pt")
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
        made.append(inputs)
    return made


def test_the_lines_of_the_documentation_load_and_ask_it(finished: Finished) -> None:
    """Just these lines, in plain transformers, PEFT and safetensors: the same logits."""
    page = (Path(__file__).parents[2] / "docs/cot.md").read_text()
    (lines,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    task, batch, expected = first_image(finished)
    asked = prompts(task, batch, finished.adapter, finished.folder / "images/0.png")
    held: dict[str, Any] = {
        "base": str(finished.folder / "base"),
        "folder": str(finished.adapter),
        "prompts": asked,
        "stages": batch.stage.tolist(),
    }
    assert sorted(held["stages"]) == [1, 2, 3]
    with torch.no_grad():
        exec(lines, held)
        given = torch.stack([held["logits"](h, s) for h, s in zip(held["ends"], held["stages"], strict=True)])
    firsts = torch.tensor([int((batch.target_at == at).nonzero()) for at in batch.prompt_at])
    torch.testing.assert_close(given, expected[firsts], atol=1e-5, rtol=1e-5)
    assert [int(token) for token in held["answers_begin_with"]] == expected[firsts].argmax(-1).tolist()
    adapter_only = torch.stack([held["model"].lm_head(h) for h in held["ends"]]).detach()
    assert (given - adapter_only).abs().max() > 1e-3, "the heads add something"


def test_the_readme_beside_the_heads_asks_all_questions(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its lines alone, in the folder alone: answers token by token, as the task's own logits give them."""
    folder = shutil.copytree(finished.adapter, tmp_path / "moved")
    shutil.copy(finished.folder / "images/0.png", folder / "image.png")
    task, batch, _ = first_image(finished)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    texts = {sample.id: (sample.stage, sample.question) for sample in task.splits["train"]}
    program = worlds.lines_of(folder / "README.md")
    shown = re.search(r"^questions = .*$", program, re.MULTILINE)
    assert shown is not None and "model.generate" not in program
    program = program.replace(shown[0], f"questions = {[texts[i] for i in batch.sample_ids]!r}").replace("< 64", "< 3")
    held: dict[str, Any] = {}
    exec(program, held)
    samples = [next(s for s in task.splits["train"] if s.id == i) for i in batch.sample_ids]
    asked = prompts(task, batch, folder, folder / "image.png")
    with torch.no_grad():
        whole = held["whole"]
        logits = task.answer_logits(
            torch.stack([whole.model(**prompt).last_hidden_state[0, -1] for prompt in asked]), samples
        )
        for row, (stage, question) in enumerate(texts[i] for i in batch.sample_ids):
            state = held["states"](question)[-1:]
            torch.testing.assert_close(
                logits(state, torch.tensor([row]))[0], held["logits"](state[0], stage), atol=1e-5, rtol=1e-5
            )
    assert capsys.readouterr().out.count("?") >= 3
