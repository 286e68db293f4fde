"""A loss or gradient that is not finite: the run stops before the weights are touched and names the question."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from processes import finished, training_steps, write_run
from torch import Tensor
from transformers import AutoTokenizer
from typed import sameday

from sameday.hardware.ranks import Ranks
from sameday.record import checkpoint
from sameday.record.folder import RunFolder
from sameday.spec.errors import EXIT_BAD_INPUT, EXIT_DIVERGED, RunStopped
from sameday.spec.plan import Plan
from sameday.tasks.vqa import task as vqa
from sameday.train.loop import train

pytestmark = pytest.mark.usefixtures("own_signals")

LINE = 11
"""Of the training file, counted from one; in the third step when questions come as they are listed."""

PLAIN = ("plan.share_images=false", "plan.packing=false", "plan.max_questions=1")


POISONED = """\
\"\"\"`sameday train`, with an embedding that is not finite once the weights were found good.\"\"\"
from sameday.cli import main
from sameday.tasks.vqa import task

whole = task.load_base


def load_base(*args):
    base = whole(*args)
    base.get_input_embeddings().weight.data[{token}] = float("{value}")
    return base


task.load_base = load_base
if __name__ == "__main__":
    main()
"""


def poison(folder: Path, value: float) -> Path:
    """Give one training line a token that no other has; the script that is returned trains with an embedding of it that
    is not finite."""
    path = folder / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[LINE - 1]["question"] += " Q"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    texts = [tokenizer.apply_chat_template(messages(row), tokenize=False) for row in rows]
    (token,) = tokenizer.encode("Q", add_special_tokens=False)
    assert [i for i, text in enumerate(texts, 1) if token in tokenizer.encode(text)] == [LINE]
    script = folder / "poisoned.py"
    script.write_text(POISONED.format(token=token, value=value))
    return script


def messages(row: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]


@pytest.mark.parametrize(
    ("value", "sets"),
    [(float("nan"), ()), (float("inf"), (*PLAIN, "plan.optimizer_impl=fused"))],
    ids=["shared rows", "one at a time, fused optimizer"],
)
def test_loss_is_not_finite(tmp_path: Path, tiny_qwen3: Path, value: float, sets: tuple[str, ...]) -> None:
    shutil.copytree(tiny_qwen3, tmp_path / "model")
    folder = write_run(tmp_path, Path("model"), num_epochs=2, order="listed")
    script = poison(folder, value)
    process = finished(folder, "plan.save_steps=1", *sets, code=EXIT_DIVERGED, script=script)
    assert "Traceback" not in process.stderr
    assert re.search(r"step 3: loss (nan|inf|-inf), not finite at ", process.stderr)
    assert re.findall(r"\S*\.jsonl:\d+", process.stderr) == [f"train.jsonl:{LINE}"]
    newest = process.run.absolute() / "checkpoints" / "step-000002"
    assert process.stderr.rstrip().endswith(
        "The weights were not touched. Checkpoints: step-000002 is whole and finite. The same command would fail here "
        "again: mend or remove a sample that is to blame, or try --set recipe.learning_rate=0.0005; either is a run of "
        f"its own, with another --out; --set recipe.start_adapter={newest} begins it with the weights of step-000002."
    )
    noted = json.loads((process.run / "stopped.json").read_text())
    assert noted["code"] == EXIT_DIVERGED and noted["why"] in process.stderr
    assert training_steps(process.run) == [1, 2]
    kept = checkpoint.steps(process.run / "checkpoints")
    assert [step for step, _ in kept] == [1, 2]
    assert [checkpoint.fault(path) for _, path in kept] == [None, None]
    assert not (process.run / "adapter").exists()

    if not sets:  # a base model without the fault is another base model, though it differs in one row alone
        shutil.rmtree(folder / "model")
        shutil.copytree(tiny_qwen3, folder / "model")
        other = finished(folder, "plan.save_steps=1", *sets, code=EXIT_BAD_INPUT)
        assert "the base model changed since this checkpoint" in other.stderr


def test_gradient_is_not_finite(tmp_path: Path, tiny_qwen3: Path) -> None:
    """The square root has no slope at zero: the loss is as it was, its gradient is not finite."""
    folder = write_run(tmp_path, tiny_qwen3, num_epochs=2, order="listed")
    recipe = worlds.tiny_recipe(tiny_qwen3, num_epochs=2, order="listed", effective_batch=4)
    plan = Plan(share_images=True, packing=True, max_questions=None)
    task = worlds.make_task(folder, recipe, plan)
    guilty = task.splits["train"][LINE - 1]
    start = {name: parameter.detach().clone() for name, parameter in task.trained().items()}
    plain_loss = task.loss_sum

    def loss_sum(batch: Any, step: int) -> tuple[Tensor, Tensor]:
        loss, each = plain_loss(batch, step)
        if guilty.id in batch.sample_ids:
            some = next(iter(task.trained().values()))
            loss = loss + (0 * some).sum().sqrt()
        return loss, each

    task.loss_sum = loss_sum  # type: ignore[method-assign]
    run = RunFolder.open(tmp_path / "run", recipe, plan, folder)
    with pytest.raises(RunStopped) as stopped:
        train(recipe, plan, task, run, Ranks())
    run.close()
    assert stopped.value.code == EXIT_DIVERGED
    assert re.search(r"step 3: gradient norm nan at loss \d", str(stopped.value))
    assert re.findall(r"\S*\.jsonl:\d+", str(stopped.value)) == [guilty.where]
    assert not checkpoint.steps(run.checkpoints)
    assert ". The weights were not touched. Checkpoints: none yet. The same command would fail" in str(stopped.value)
    assert "start_adapter" not in str(stopped.value)
    assert training_steps(run.path) == [1, 2]
    moved = [name for name, value in task.trained().items() if not torch.equal(value, start[name])]
    assert moved and all(value.isfinite().all() for value in task.trained().values())


def test_a_step_that_spoils_the_weights_is_not_saved(
    tmp_path: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own loss was finite: validation finds it, before the next step would."""
    folder = write_run(tmp_path, tiny_qwen3, max_steps=4)
    stepped = torch.optim.AdamW.step

    def spoil(self: torch.optim.AdamW, *arguments: Any) -> Any:
        done = stepped(self, *arguments)
        spoil.calls += 1  # type: ignore[attr-defined]
        if spoil.calls == 2:  # type: ignore[attr-defined]
            self.param_groups[0]["params"][0].data.fill_(float("nan"))
        return done

    spoil.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.optim.AdamW, "step", spoil)
    sets = ("plan.eval_steps=1", "plan.save_steps=1", "plan.device=cpu")
    words = [part for each in sets for part in ("--set", each)]
    said = sameday(folder, "train", "recipe.yaml", "--out", "run", *words)
    assert said.code == EXIT_DIVERGED, said.err
    assert re.search(r"step 2: \S+lora\S+ not finite after it, though its loss was\. It is not saved\. ", said.err)
    assert "step-000001 is whole and finite" in said.err
    assert [step for step, _ in checkpoint.steps(folder / "run/checkpoints")] == [1]


def test_validation_is_not_finite(tmp_path: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on, what it gave is kept, and no step of it is the best; but the command does not succeed."""
    shutil.copytree(tiny_qwen3, tmp_path / "model")
    folder = write_run(tmp_path, Path("model"), max_steps=2)
    script = poison(folder, float("nan"))
    bad, good = ((folder / f"{name}.jsonl").read_text() for name in ("train", "val"))
    (folder / "train.jsonl").write_text(good)
    (folder / "val.jsonl").write_text(bad)
    monkeypatch.setattr(vqa, "load_base", vqa.load_base)  # to be taken back from what the script puts there
    runpy.run_path(str(script))
    said = sameday(folder, "train", "recipe.yaml", "--out", "run", "--set", "plan.eval_steps=1")
    assert said.code == EXIT_DIVERGED, said.err
    assert "validation loss nan: not finite, though all weights are; " in said.err and "Traceback" not in said.err
    assert training_steps(folder / "run") == [1, 2]
    recorded = json.loads((folder / "run/eval.json").read_text())
    assert recorded["val"]["loss"] is None and recorded["best"] is None
    assert checkpoint.fault(folder / "run/adapter") is None
