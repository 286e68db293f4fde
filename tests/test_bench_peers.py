"""Other trainers are timed on the work that ours is timed on, and one that fails is a line of the table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peer
import peers
import pytest
import torch
from beside import table
from mixture import LARGE, USUAL
from PIL import Image
from rows import Row, data_of, model_of, recipe_of

from sameday.commands.session import silent
from sameday.data.order import Place, epoch_steps
from sameday.spec.load import recipe_from
from sameday.tasks.registry import setup_of
from sameday.tasks.vqa.loading import load_encoder, load_family, load_processor

NAME = "some"
ROW = Row("shuffle", ((USUAL[0], 4), (LARGE, 4)) * 3, template=10)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers")
    model_of(folder, tiny=True)
    return folder


def test_a_batch_has_the_questions_tokens_labels_and_pixels_of_ours(out: Path) -> None:
    recipe = recipe_from(recipe_of(out, data_of(out, NAME, ROW, True), ROW, True))
    family = load_family(recipe, out)
    images = load_processor(family, recipe, out)
    encoder = load_encoder(recipe, out, images)
    samples = setup_of(recipe, out).audit(silent, ("train",)).splits["train"]
    places = [Place(each.id, each.image_key, each.stage) for each in samples]
    first = epoch_steps(places, recipe.order, peer.BATCH, recipe.seed, 0)[0]

    folder = peers.model_for(out, recipe.max_pixels)
    batch = peer.Collator(peer.processor_of(str(folder)))(peers.questions_of(out, NAME, ROW, True)[: peer.BATCH])

    ends = batch["attention_mask"].sum(1).tolist()
    grids = batch["image_grid_thw"].tolist()
    pixels = batch["pixel_values"].split([high * wide for _, high, wide in grids])
    assert len(first) == len(ends) == peer.BATCH
    for number, (i, end) in enumerate(zip(first, ends, strict=True)):
        ours = encoder.encode(samples[i])
        assert batch["input_ids"][number, :end].tolist() == ours.tokens.tolist()
        wanted = torch.where(torch.from_numpy(ours.targets), torch.from_numpy(ours.tokens).long(), peer.IGNORED)
        assert torch.equal(batch["labels"][number, :end], wanted)
        assert (batch["labels"][number, end:] == peer.IGNORED).all()
        assert grids[number] == [1, *ours.grids[0]]
        seen = images.pixels(Image.open(samples[i].images[0].path).convert("RGB"))
        # torchvision, where it is there, resizes a little differently; another image would be 0.4 away.
        assert (pixels[number] - torch.from_numpy(seen)).abs().mean() < 0.05
    assert len({tuple(grid) for grid in grids}) == 2, "images of both sizes"


def test_images_keep_their_size(out: Path) -> None:
    """The model's own processor would make large ones smaller."""
    folder = peers.model_for(out, 1310720)
    size = json.loads((folder / "preprocessor_config.json").read_text())["size"]
    assert size["longest_edge"] == 1310720
    assert (
        size["longest_edge"] > json.loads((out / "model/preprocessor_config.json").read_text())["size"]["longest_edge"]
    )
    assert (folder / "config.json").samefile(out / "model/config.json")


class Hours:
    """A clock that goes when it is told to."""

    now = 1000.0

    def time(self) -> float:
        return self.now


@dataclass
class Steps:
    """Stands for a trainer: micro-batches of more than eight questions do not fit, and the larger is the faster."""

    hours: Hours
    micro: int
    clock: peer.Clock

    def train(self) -> None:
        if self.micro > 8:
            raise torch.OutOfMemoryError("too much")
        control = SimpleNamespace(should_training_stop=False)
        while not control.should_training_stop:
            self.hours.now += 4 / self.micro
            self.clock.on_step_end(None, None, control)


def tried(monkeypatch: pytest.MonkeyPatch, folder: Path, seconds: float, **more: Any) -> list[dict[str, Any]]:
    hours = Hours()
    monkeypatch.setattr(peer, "time", hours)
    monkeypatch.setattr(peer, "mark", hours.time)
    monkeypatch.setitem(peer.PEERS, "some", lambda job: lambda _, micro, clock: Steps(hours, micro, clock))
    (folder / "questions.jsonl").write_text("{}\n")
    rows = [
        {"name": name, "questions": str(folder / "questions.jsonl"), "images": images}
        for name, images in (("small", "a"), ("large", "b"), ("small again", "a"))
    ]
    return list(peer.measured({"peer": "some", "rows": rows, "steps": 4, "until": hours.now + seconds, **more}))


def test_micro_batches_begin_with_what_was_best_before() -> None:
    assert peer.candidates(None, None, peer.MICRO) == (16, 8, 4)
    assert peer.candidates(None, 16, peer.MICRO) == (16, 8, 4)
    assert peer.candidates(None, 4, peer.UNSLOTH_MICRO) == (4, 8), "a larger one too, which larger images may want"
    assert peer.candidates(8, 4, peer.MICRO) == (8,)


@pytest.mark.slow
def test_the_first_row_tries_every_micro_batch_and_the_others_what_was_best(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results = tried(monkeypatch, tmp_path, 1000)
    assert [(each["row"], each["micro"]) for each in results] == [
        ("small", 16),
        ("small", 8),
        ("small", 4),
        ("large", 8),
        ("large", 4),
        ("small again", 8),
    ]
    assert results[1]["seconds"] == [0.5] * 4 and results[1]["device"]
    assert [results[i]["why"] for i in (0, 2)] == ["out of memory", "slower, 1.000 s each"]


def test_micro_batches_of_the_first_row_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = tried(monkeypatch, tmp_path, 1000, micro=[4])
    assert [(each["row"], each["micro"]) for each in results][:1] == [("small", 4)]
    assert {each["micro"] for each in results if each["row"] == "small"} == {4}


def test_a_trainer_that_runs_out_of_time_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, one = tried(monkeypatch, tmp_path, 2.2)
    assert one["why"] == "out of time after 2 of 4 timed steps, 0.500 s each"
    _, one = tried(monkeypatch, tmp_path, 3.7, steps=9)
    assert one["seconds"] == [0.5] * 5, "few of them are a result too"


def test_what_is_slower_in_smaller_micro_batches_is_not_tried_in_still_smaller_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results = tried(monkeypatch, tmp_path, 1000, micro=[8, 4, 2])
    assert [each["micro"] for each in results if each["row"] == "small"] == [8, 4]


@pytest.mark.skipif(find_spec("unsloth") is not None, reason="Unsloth is installed")
def test_a_trainer_that_is_not_there_is_a_line_of_the_table(tmp_path: Path) -> None:
    ended = peers.run({"peer": "unsloth", "out": str(tmp_path / "unsloth.jsonl")}, tmp_path, 60)
    (one,) = peers.results("unsloth", "8b", ["mixture"], tmp_path / "unsloth.jsonl", ended)
    line = table([{"name": "mixture", "median": 0.1}], [one]).splitlines()[1]
    assert "not measured: ModuleNotFoundError: No module named 'unsloth'" in line


def test_the_best_setting_stands_beside_ours(tmp_path: Path) -> None:
    file = tmp_path / "trl.jsonl"
    lines = [
        {"row": "mixture", "micro": 4, "seconds": [0.5, 0.7, 0.6], "held": 20.0, "device": "H200"},
        {"row": "mixture", "micro": 8, "seconds": [0.4, 0.2, 0.3], "held": 40.0, "device": "H200"},
        {"row": "mixture", "micro": 16, "why": "out of memory", "memory": True},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    best, missing = peers.results("trl", "8b", ["mixture", "768×576, shuffle"], file, "")
    assert (best["setting"], best["median"], best["least"], best["most"]) == ("8×2", 0.3, 0.2, 0.4)
    assert missing["why"] == "no time was left for it"
    ours = {"name": "mixture", "median": 0.1, "size": "8b", "device": "H200", "plan": []}
    header, line, none = table([ours], [best, missing]).splitlines()
    assert line.split()[-2:] == ["3.00", "8×2"]
    assert none.endswith("not measured: no time was left for it")
    assert "/ ours" in header


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": "A100"}, "-   8×2; ours is of size 8b on A100, this of size 8b on H200"),
        ({"size": "tiny", "device": "CPU"}, "-   8×2; ours is of size tiny on CPU, this of size 8b on H200"),
        ({"plan": ["cuda_graphs=false", "workers=2"]}, "3.00   8×2; ours with cuda_graphs=false workers=2"),
    ],
)
def test_what_was_measured_elsewhere_is_not_divided(change: dict[str, Any], said: str) -> None:
    ours = {"name": "mixture", "median": 0.1, "size": "8b", "device": "H200", "plan": []}
    theirs = {"row": "mixture", "peer": "trl", "size": "8b", "device": "H200", "median": 0.3, "steps": 10, "least": 0.2}
    theirs |= {"most": 0.4, "held": 40.0, "samples_per_second": 53.3, "setting": "8×2"}
    assert table([ours | change], [theirs]).endswith(f" {said}")
    old = {"name": "mixture", "median": 0.1}
    assert "ours is of size unknown on unknown" in table([old], [theirs])


def test_a_trainer_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "unsloth.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(peers, "GRACE", 0)
    assert peers.run({"peer": "unsloth", "out": str(tmp_path / "out.jsonl")}, tmp_path, 0.3) == "not done after 0 s"
