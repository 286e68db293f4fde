"""`sameday profile` on real runs, with real delays planted: the delay's part grows, and the advice names it first."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
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
from sameday.hardware.peaks import Peaks
from sameday.hardware.phases import PHASES
from sameday.profile import timeline
from sameday.profile.command import PATIENCE, _rates, progress
from sameday.profile.summary import lines, short_place
from sameday.profile.timeline import covered
from sameday.spec.document import dump_yaml
from sameday.spec.errors import BadInput, RunStopped
from sameday.spec.load import load_recipe
from sameday.spec.plan import Plan
from sameday.tasks.registry import setup_of

SLOW = 0.3
"""Seconds that a busy machine's step does not hide."""
SHARED = [
    "share_images=true",
    "share_text=true",
    "packing=true",
    "max_questions=null",
    "label_only_logits=true",
    "optimizer_impl=foreach",
]
IN_COMMON = "train and val have 3 images in common: scores of val will be too good\n"
CPU = ["device=cpu", "workers=0"]
"""What these tests are about, on a machine with a GPU too."""


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = worlds.write_world(tmp_path_factory.mktemp("world"), seed=5, counts=(4, 4, 4, 4), hard=False)
    worlds.write_tiny(folder / "model", text={"num_hidden_layers": 2})
    recipe = worlds.tiny_recipe(folder / "model", effective_batch=8, order={"kind": "by_image"})
    (folder / "recipe.yaml").write_text(dump_yaml(recipe))
    home = sets.write_set(tmp_path_factory.mktemp("set"))
    (home / "recipe.yaml").write_text(dump_yaml(sets.tiny_recipe()))
    return {"vqa": folder, "classify": home}


def profiled(home: Path, out: Path, *fields: str, shared: Sequence[str] = SHARED) -> tuple[dict[str, Any], str]:
    words = ["profile", str(home / "recipe.yaml"), "--steps", "3", "--warmup", "1", "--json", str(out / "profile.json")]
    words += [word for each in (*CPU, *shared, *fields) for word in ("--set", f"plan.{each}")]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 100, done.output
    return json.loads((out / "profile.json").read_text()), done.output


def test_questions(homes: dict[str, Path], tmp_path: Path) -> None:
    found, said = profiled(homes["vqa"], tmp_path)
    phases = found["phases"]
    assert list(phases) == [name for name in PHASES if name in phases] and found["steps"] >= 2
    assert {"decode", "tower", "forward", "loss", "backward", "optimizer"} <= set(phases)
    assert found["samples"] == 8 and found["micro_batches"] == 1 and found["busy"] is None
    floor = found["floor"]
    assert 0 < floor["share"] < 1 and floor["resources"].keys() >= {"arithmetic", "memory", "copy", "disk"}
    assert floor["seconds"] == pytest.approx(floor["shared"]["seconds"]) and floor["one_at_a_time"]["seconds"] > 0
    for words in (
        "vision tower",
        "everything else",
        "floor of this plan",
        "bound by",
        "samples/s",
        "with each image once",
    ):
        assert words in said
    assert "\n1 step to warm up, 3 to time\n" in said
    spread = {name: f"{1000 * value:.2f}" for name, value in found["seconds"].items()}
    assert found["seconds"]["mean"] == pytest.approx(sum(phases.values()), rel=1e-9)
    header = " ".join(said.split())
    assert (
        f": {spread['mean']} ms a step on the average ({spread['least']}-{spread['most']}, median {spread['median']}), "
        in header
    )
    for each in found["advice"]:
        assert f"{each['remedy']}: at most {each['at_most']:.2f}×, {each['bound']}; " in header
    for name, seconds in phases.items():
        assert f"{PHASES[name]:20s} {1000 * seconds:10.3f} ms" in said
    assert floor["fp8_flop"] == 0 and "in fp8" not in said
    floor["fp8_flop"], floor["peaks"]["fp8_flop_per_second"] = 1e9, 1.4e15  # as of a GPU that has it
    assert " TFLOP/s (1400 in fp8), " in " ".join(" ".join(lines(found)).split())


def test_a_gpu_that_multiplies_in_fp8_says_how_fast() -> None:
    peaks = Peaks("a GPU", "bf16", 7e14, 4e12, 5e10, None)
    assert _rates(peaks) == (
        "bf16 matmuls 700 TFLOP/s, memory 4000 GB/s, copies to the device 50 GB/s, disk not measured"
    )
    assert _rates(replace(peaks, fp8_flop_per_second=1.3e15)).startswith(
        "bf16 matmuls 700 TFLOP/s, in fp8 1300, memory"
    )


def test_fewer_threads_are_timed_on_a_cpu(
    homes: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that take the longer the more threads there are: one thread is advised, and all are there afterwards."""
    before, seen = torch.get_num_threads(), []

    class Crowded(timeline.RunFolder):
        def append(self, record: dict[str, Any]) -> None:
            seen.append(torch.get_num_threads())
            time.sleep(0.06 * (torch.get_num_threads() - 1))

    monkeypatch.setattr(timeline, "RunFolder", Crowded)
    torch.set_num_threads(4)
    try:
        found, said = profiled(homes["classify"], tmp_path, shared=())
        assert torch.get_num_threads() == 4 and set(seen) == {1, 2, 4}
    finally:
        torch.set_num_threads(before)
    assert found["threads"]["count"] == 4 and [count for count, _ in found["threads"]["fewer"]] == [1, 2]
    first = found["advice"][0]
    assert first["change"] == {"environment": {"OMP_NUM_THREADS": "1"}} and first["at_most"] > 2
    assert 'plan.environment {"OMP_NUM_THREADS": "1"}: at most' in said and "timed here: " in " ".join(said.split())
    slow: Any = timeline.Timeline(({"forward": 60.0},), {}, 1.0)
    assert timeline.with_fewer_threads(None, None, slow) == (), "where steps take long, that would too"  # type: ignore[arg-type]


def check_trace(path: Path, said: str) -> None:
    """As Perfetto reads it: complete events with a beginning and a length, phases inside of steps."""
    assert f"3 steps traced in {path}: ui.perfetto.dev or chrome://tracing opens it\n" in said
    events = json.loads(path.read_text())["traceEvents"]
    ranges = [each for each in events if each.get("ph") == "X" and each.get("cat") == "user_annotation"]
    steps = {each["name"]: each for each in ranges if re.fullmatch(r"step \d+", each["name"])}
    assert list(steps) == ["step 7", "step 8", "step 9"]
    for step in steps.values():
        ends = step["ts"] + step["dur"] + 1
        inside = {each["name"] for each in ranges if step["ts"] <= each["ts"] and each["ts"] + each["dur"] <= ends}
        assert {"prepare", "forward", "backward", "optimizer"} <= inside, inside
    assert any(each.get("cat") == "cpu_op" and each["name"].startswith("aten::") for each in events)
    assert not list(path.parent.glob(".*steps.json")), "what it was written to is gone"


def test_pictures(homes: dict[str, Path], tmp_path: Path) -> None:
    """In a process of its own: the profiler's library reads once, at its first use, whether it is to be silent."""
    words = ["profile", str(homes["classify"] / "recipe.yaml"), "--steps", "3", "--json", str(tmp_path / "found.json")]
    words += ["--trace", str(tmp_path / "steps.json"), "--set", "plan.device=cpu"]
    environment = {key: value for key, value in os.environ.items() if key != "KINETO_LOG_LEVEL"}
    command = [sys.executable, "-m", "sameday", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    check_trace(tmp_path / "steps.json", said)
    assert "profiler" not in said, "what the library says to itself"
    found = json.loads((tmp_path / "found.json").read_text())
    assert {"prepare", "forward", "backward"} <= set(found["phases"])
    assert "disk" not in found["floor"]["resources"] and 0 < found["floor"]["share"] < 1
    assert "floor all at once " in said and ", one image at a time " in " ".join(said.split())
    assert "each image once" not in said and "mask" not in said
    assert not list(homes["classify"].glob("runs*")), "nothing of the user's is written"


def in_micro_batches_of(size: str, home: Path, out: Path) -> dict[str, Any]:
    words = ["profile", str(home / "recipe.yaml"), "--json", str(out / "found.json")]
    words += ["--set", "plan.device=cpu", "--set", f"plan.micro_batch={size}", "--steps", "6"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    found: dict[str, Any] = json.loads((out / "found.json").read_text())
    return found


def larger_micro_batch(found: dict[str, Any]) -> dict[str, Any]:
    (remedy,) = [each for each in found["advice"] if each["change"] == {"micro_batch": None}]
    return dict(remedy)


def test_a_larger_micro_batch_is_promised_no_more_than_the_floor(homes: dict[str, Path], tmp_path: Path) -> None:
    found = in_micro_batches_of("1", homes["classify"], tmp_path)
    remedy = larger_micro_batch(found)
    assert remedy["remedy"] == "plan.micro_batch null" and found["bound_by"] == "small operations"
    assert 1 < remedy["at_most"] <= found["seconds"]["mean"] / found["floor"]["seconds"]
    assert found["floor"]["shared"]["seconds"] <= found["floor"]["seconds"]


@pytest.mark.soak
def test_a_larger_micro_batch_gives_no_more_than_is_promised(homes: dict[str, Path], tmp_path: Path) -> None:
    """Of two processes' timings: only where nothing else keeps the machine busy."""
    before, after = (in_micro_batches_of(size, homes["classify"], tmp_path) for size in ("1", "null"))
    gives = before["seconds"]["median"] / after["seconds"]["median"]
    assert 1.5 * larger_micro_batch(before)["at_most"] > gives


def test_what_was_chosen_is_said(homes: dict[str, Path], tmp_path: Path) -> None:
    words = ["profile", str(homes["vqa"] / "recipe.yaml"), "--steps", "1", "--warmup", "1"]
    done = CliRunner().invoke(app, [*words, "--set", "plan.device=cpu"], catch_exceptions=False)
    assert done.exit_code == 0 and max(map(len, done.output.splitlines())) <= 100
    for line in (
        "plan.packing: true, because no padding is computed",
        "plan.max_questions: null, because the token budget decides",
        "plan.token_budget: 2048, because a dense mask grows with the square of a row",
        "plan.device: cpu, because asked for",
        "attention: sdpa, because on a CPU a dense mask is the fastest",
    ):
        assert f"\n{line}\n" in f"\n{done.output}", done.output
    (tmp_path / "plan.yaml").write_text("device: cpu\n")
    done = CliRunner().invoke(app, [*words, "--plan", str(tmp_path / "plan.yaml")], catch_exceptions=False)
    said = done.output.removeprefix(IN_COMMON)
    assert "\nplan." not in f"\n{said}" and said.startswith("attention: sdpa, because each row is one")


@given(st.lists(st.floats(0.01, 20), max_size=40))
def test_progress_is_said_now_and_then(takes: list[float]) -> None:
    said: list[str] = []
    times = [0.0]
    show = progress(len(takes), said.append, lambda: times[-1])
    for number, seconds in enumerate(takes):
        times.append(times[-1] + seconds)
        show(number + 2)  # one more than there are is timed
    assert len(said) <= times[-1] / PATIENCE and (len(said) > 0) == (times[-1] >= PATIENCE)
    assert all(int(line.split()[0]) <= len(takes) for line in said)
    assert not said or said[-1].split(", ")[0].endswith("steps" if len(takes) > 1 else "step")


def test_the_disk_is_the_images_own(homes: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, bool]] = []

    def rate(folder: Path, checked: bool = True) -> float:
        asked.append((folder, checked))
        return 1e9

    monkeypatch.setattr("sameday.hardware.peaks.read_rate", rate)
    found, _ = profiled(homes["vqa"], tmp_path)
    assert found["floor"]["peaks"]["disk_bytes_per_second"] == 1e9
    recipe = load_recipe(homes["vqa"] / "recipe.yaml")
    images = (homes["vqa"] / recipe.data.image_root).resolve()
    assert asked == [(images, False)] and images != homes["vqa"].resolve()


def test_a_cache_has_a_disk_of_its_own(tmp_path: Path) -> None:
    recipe = worlds.tiny_recipe(tmp_path / "model")
    vqa, pictures = setup_of(recipe, tmp_path), setup_of(sets.tiny_recipe(), tmp_path)
    for folder in ("here", "set", recipe.data.image_root):
        (tmp_path / folder).mkdir(exist_ok=True)
    cached = Plan(cache="pixels", cache_dir="here/not/yet")
    assert vqa.images_folder(Plan()) == (tmp_path / recipe.data.image_root).resolve()
    assert vqa.images_folder(cached) == tmp_path / "here"
    assert pictures.images_folder(Plan()) is None, "they are in memory before the first step"
    assert not (tmp_path / "here/not").exists()


def test_bad_data_is_told_in_words_that_hold_here(homes: dict[str, Path], tmp_path: Path) -> None:
    """No file is named that is not written, and no option that the command does not have."""
    line = '{"image": "gone.png", "question": "a?", "answer": "b"}\n'
    (tmp_path / "bad.jsonl").write_text((homes["vqa"] / "train.jsonl").read_text() + line)
    words = ["profile", str(homes["vqa"] / "recipe.yaml"), "--steps", "1", "--warmup", "1", "--set", "plan.device=cpu"]
    words += ["--set", f"recipe.data.train={tmp_path / 'bad.jsonl'}"]
    stopped = CliRunner().invoke(app, words)
    assert isinstance(stopped.exception, BadInput) and "--on-bad" not in str(stopped.exception)
    assert "recipe.data.on_bad=skip leaves them out" in str(stopped.exception)
    before = set(homes["vqa"].rglob("*"))
    done = CliRunner().invoke(app, [*words, "--set", "recipe.data.on_bad=skip"], catch_exceptions=False)
    assert done.output.startswith(f"{IN_COMMON}left out: 1 problem in 1 line:\n") and "skipped.json" not in done.output
    assert done.exit_code == 0 and set(homes["vqa"].rglob("*")) == before


def test_places_are_short() -> None:
    here = str(Path(timeline.__file__).resolve())
    assert short_place(f"{here}:7") == "sameday/profile/timeline.py:7"
    assert short_place(f"{torch.__file__}:7") == "torch/__init__.py:7"
    assert short_place("/home/me/model.py:7") == "/home/me/model.py:7"


@pytest.mark.parametrize(
    ("owner", "attribute", "part", "remedy", "cores", "fields"),
    [
        (Path, "read_bytes", "read", "a faster disk", 2, ["workers=1"]),
        (source, "open_rgb", "decode", "plan.cache pixels", 2, ["workers=1"]),
        pytest.param(source, "open_rgb", "decode", "plan.workers 63", 64, ["workers=1"], marks=pytest.mark.soak),
        (source, "open_rgb", "decode", "plan.workers 63", 64, []),
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
    cores: int,
    fields: list[str],
) -> None:
    """With two cores one worker is all there can be; with many, more of them hide it however fast the step is."""
    plain = getattr(owner, attribute)

    def slow(*args: Any, **named: Any) -> Any:
        if owner is not Path or str(args[0]).endswith(".png"):
            time.sleep(SLOW)
        return plain(*args, **named)

    monkeypatch.setattr(owner, attribute, slow)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    found, said = profiled(homes["vqa"], tmp_path, *fields)
    spent = found["workers"] if fields else found["phases"]
    assert spent[part] >= 2 * SLOW, "two images a step"
    assert found["bound_by"] == "data" and remedy in found["advice"][0]["remedy"], said
    # All of the delay is in what is waited for, and the remedy may take all of it away.
    assert found["advice"][0]["at_most"] > 1.5


def test_full_checkpointing_with_memory_to_spare(homes: dict[str, Path], tmp_path: Path) -> None:
    found, said = profiled(homes["vqa"], tmp_path, "checkpointing=full")
    (advice,) = [each for each in found["advice"] if each["change"] == {"checkpointing": "none"}]
    used, most = map(float, re.findall(r"this process used (\S+) of (\S+) GiB at most", advice["why"])[0])
    assert 0 < used < most, said


def test_bad_wishes(homes: dict[str, Path], tmp_path: Path) -> None:
    words = ["profile", str(homes["classify"] / "recipe.yaml"), "--json", str(tmp_path / "no" / "file.json")]
    done = CliRunner().invoke(app, words)
    assert "must be a file in a folder that is there" in str(done.exception)


def test_what_is_read_is_not_written_over(homes: dict[str, Path], tmp_path: Path) -> None:
    recipe, plan = homes["classify"] / "recipe.yaml", tmp_path / "plan.yaml"
    plan.write_text("workers: 0\n")
    before = recipe.read_text()
    for out in (recipe, plan):
        done = CliRunner().invoke(app, ["profile", str(recipe), "--plan", str(plan), "--json", str(out)])
        said = f"--json {out}: is one of the files that are read; choose another one"
        assert isinstance(done.exception, BadInput) and str(done.exception) == said
    assert recipe.read_text() == before and plan.read_text() == "workers: 0\n"


def test_a_run_that_cannot_go_on_says_why(homes: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sameday.tasks.classify.task.ClassifyTask.smaller_budget", lambda *_: None)
    monkeypatch.setattr("sameday.tasks.classify.task.ClassifyTask.loss_sum", _no_memory)
    done = CliRunner().invoke(app, ["profile", str(homes["classify"] / "recipe.yaml"), "--set", "plan.device=cpu"])
    assert isinstance(done.exception, RunStopped) and "out of memory with a single image" in str(done.exception)


def _no_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("planted")


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 10)), max_size=12))
def test_what_spans_cover(begun: list[tuple[int, int]]) -> None:
    spans = [(float(begin), float(begin + length)) for begin, length in begun]
    inside = {tick for begin, length in begun for tick in range(begin, begin + length)}
    assert covered(spans) == len(inside)


def test_where_a_trace_cannot_be_written(homes: dict[str, Path], tmp_path: Path) -> None:
    recipe = str(homes["vqa"] / "recipe.yaml")
    (tmp_path / "other.json").write_text("[]\n")
    for words, why in (
        (["--trace", "steps.txt"], "--trace steps.txt: must end with .json, or with .json.gz for a compressed one"),
        (["--trace", str(tmp_path / "other.json")], "is there already, and this command did not write it"),
        (["--trace", str(tmp_path / "no" / "a.json")], "must be a file in a folder that is there"),
        (["--hardware", "--trace", "a.json"], "--hardware has no --trace: it lists what is there"),
    ):
        with pytest.raises(BadInput) as error:
            CliRunner().invoke(app, ["profile", recipe, *words], catch_exceptions=False)
        assert why in str(error.value)
