"""`sameday profile` on real runs, with real delays planted: the delay's part grows, and the advice names it first."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import sets
import torch
import worlds
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sameday.cli import app
from sameday.data.questions import source
from sameday.hardware.parts import PARTS
from sameday.profile.timeline import covered
from sameday.spec.errors import RunStopped
from sameday.spec.load import dump_yaml

SLOW = 0.15
SHARED = ["share_images=true", "packing=true", "max_questions=null", "label_only_logits=true", "optimizer_impl=foreach"]


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = worlds.write_world(tmp_path_factory.mktemp("world"), seed=5, counts=(4, 4, 4, 4), hard=False)
    worlds.write_tiny(folder / "model")
    recipe = worlds.tiny_recipe(folder / "model", effective_batch=8, order={"kind": "by_image"})
    (folder / "recipe.yaml").write_text(dump_yaml(recipe))
    home = sets.write_set(tmp_path_factory.mktemp("set"))
    (home / "recipe.yaml").write_text(dump_yaml(sets.tiny_recipe()))
    return {"vqa": folder, "classify": home}


def profiled(home: Path, out: Path, *fields: str) -> tuple[dict[str, Any], str]:
    words = ["profile", str(home / "recipe.yaml"), "--steps", "3", "--warmup", "1", "--json", str(out / "profile.json")]
    words += [word for each in (*SHARED, *fields) for word in ("--set", f"plan.{each}")]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads((out / "profile.json").read_text()), done.output


def test_questions(homes: dict[str, Path], tmp_path: Path) -> None:
    found, said = profiled(homes["vqa"], tmp_path)
    parts = found["parts"]
    assert list(parts) == [name for name in PARTS if name in parts] and found["steps"] >= 2
    assert {"decode", "tower", "forward", "loss", "backward", "optimizer"} <= set(parts)
    assert found["samples"] == 8 and found["micro_batches"] == 1 and found["busy"] is None
    floor = found["floor"]
    assert 0 < floor["share"] < 1 and floor["resources"].keys() >= {"arithmetic", "memory", "copy", "disk"}
    assert floor["seconds"] == pytest.approx(floor["shared"]["seconds"]) and floor["one_at_a_time"]["seconds"] > 0
    for words in ("vision tower", "everything else", "floor of this plan", "bound by", "samples/s"):
        assert words in said
    for name, seconds in parts.items():
        assert f"{PARTS[name]:20s} {1000 * seconds:10.3f} ms" in said


def test_pictures(homes: dict[str, Path], tmp_path: Path) -> None:
    words = ["profile", str(homes["classify"] / "recipe.yaml"), "--steps", "3", "--json", str(tmp_path / "found.json")]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.exit_code == 0 and {"prepare", "forward", "backward"} <= set(found["parts"])
    assert "disk" not in found["floor"]["resources"] and 0 < found["floor"]["share"] < 1
    assert not list(homes["classify"].glob("runs*")), "nothing of the user's is written"


@pytest.mark.parametrize(
    ("owner", "attribute", "part", "remedy", "fields"),
    [
        (Path, "read_bytes", "read", "a faster disk", ["workers=1"]),
        (source, "open_rgb", "decode", "plan.cache pixels", ["workers=1"]),
        (source, "open_rgb", "decode", "plan.workers 7", []),
    ],
)
def test_a_slow_input_is_named_first(
    homes: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    attribute: str,
    part: str,
    remedy: str,
    fields: list[str],
) -> None:
    """Two cores, where one worker is all there can be, and eight."""
    plain = getattr(owner, attribute)

    def slow(*args: Any, **named: Any) -> Any:
        if owner is not Path or str(args[0]).endswith(".png"):
            time.sleep(SLOW)
        return plain(*args, **named)

    monkeypatch.setattr(owner, attribute, slow)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(2 if fields else 8)))
    found, said = profiled(homes["vqa"], tmp_path, *fields)
    spent = found["workers"] if fields else found["parts"]
    assert spent[part] >= 2 * SLOW, "two images a step"
    assert found["bound_by"] == "data" and remedy in found["advice"][0]["remedy"], said
    # All of the delay is in what is waited for, and the remedy may take all of it away.
    assert found["advice"][0]["at_most"] > 1.5


def test_full_checkpointing_with_memory_to_spare(homes: dict[str, Path], tmp_path: Path) -> None:
    found, said = profiled(homes["vqa"], tmp_path, "checkpointing=full")
    assert any(each["change"] == {"checkpointing": "none"} for each in found["advice"]), said


def test_bad_wishes(homes: dict[str, Path], tmp_path: Path) -> None:
    words = ["profile", str(homes["classify"] / "recipe.yaml"), "--json", str(tmp_path / "no" / "file.json")]
    done = CliRunner().invoke(app, words)
    assert "must be a file in a folder that is there" in str(done.exception)


def test_a_run_that_cannot_go_on_says_why(homes: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sameday.tasks.classify.ClassifyTask.smaller_budget", lambda *_: None)
    monkeypatch.setattr("sameday.tasks.classify.ClassifyTask.loss_sum", _no_memory)
    done = CliRunner().invoke(app, ["profile", str(homes["classify"] / "recipe.yaml")])
    assert isinstance(done.exception, RunStopped) and "out of memory with a single image" in str(done.exception)


def _no_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("planted")


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 10)), max_size=12))
def test_what_spans_cover(begun: list[tuple[int, int]]) -> None:
    spans = [(float(begin), float(begin + length)) for begin, length in begun]
    inside = {tick for begin, length in begun for tick in range(begin, begin + length)}
    assert covered(spans) == len(inside)
