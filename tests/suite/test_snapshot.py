"""What is seen of a suite from its files alone: incrementally, bounded, and whatever stands in them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from watched import record, running, train_some, write_suite

from sameday.spec.writing import write_text
from sameday.suite.page import snapshot as module
from sameday.suite.page.drawing import ACROSS, BOX, Node, Span, as_lists, graph_picture, layers, time_picture
from sameday.suite.page.snapshot import KEPT, TAIL, Growing, Part, Snapshot, plain_view, tail
from sameday.suite.state import JobState, SuiteFolder


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every file that is read, and how much of it."""
    seen: list[tuple[str, int]] = []
    real = module.read_part

    def counted(path: Path, start: int, most: int) -> Part | None:
        part = real(path, start, most)
        seen.append((path.name, len(part.content) if part else 0))
        return part

    monkeypatch.setattr(module, "read_part", counted)
    return seen


def lines(*records: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in records)


def test_records_are_read_once(tmp_path: Path, read: list[tuple[str, int]]) -> None:
    path = tmp_path / "metrics.jsonl"
    growing = Growing(path)
    growing.look()
    for first in range(1, 100, 10):
        with path.open("ab") as file:
            file.write(lines(*map(record, range(first, first + 10))))
        growing.look()
    assert growing.step == 100 and [step for step, _ in growing.losses] == [*range(1, 101)]
    assert sum(size for _, size in read) == path.stat().st_size
    assert (growing.pace, growing.rate) == (2.0, 8.0)


def test_half_a_record_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(record(1)) + b'{"step": 2, "lo')
    growing = Growing(path)
    growing.look()
    assert growing.step == 1
    with path.open("ab") as file:
        file.write(b'ss": 0.5}\n')
    growing.look()
    assert growing.losses[-1] == (2, 0.5)


def test_a_resumed_run_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(*(record(step, 9.0) for step in range(1, 9)), record(8, 8.0, split="val")))
    growing = Growing(path)
    growing.look()
    assert (growing.step, growing.validation) == (8, [(8, 8.0)])
    write_text(path, lines(record(1, 9.0), record(2, 9.0), record(3, 1.0)).decode())  # as RunFolder.rewind does
    growing.look()
    assert (growing.step, growing.validation, growing.losses[-1]) == (3, [], (3, 1.0))
    path.unlink()
    growing.look()
    assert (growing.step, growing.losses) == (0, [])


strange = st.sampled_from(
    [
        *(b"{", b"[]", b"null", b"\xff\xfe", b'{"step": -1}', b'{"step": "x", "loss": 1}', b'{"step": 3, "loss": NaN}'),
        *(b'{"step": 3, "loss": 1e999, "seconds": -1}', b'{"step": 3, "gpu": "all", "samples": null}', b"[" * 3000),
    ]
)


@given(st.lists(st.one_of(strange, st.integers(1, 50).map(lambda n: lines(record(n))[:-1]))), st.data())
def test_pieces_of_a_file_give_what_the_whole_gives(
    tmp_path_factory: pytest.TempPathFactory, content: list[bytes], drawn: st.DataObject
) -> None:
    whole = b"".join(line + b"\n" for line in content)
    cuts = sorted(drawn.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    folder = tmp_path_factory.mktemp("pieces")
    slow = Growing(folder / "slow")
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        with slow.path.open("ab") as file:
            file.write(whole[begin:end])
        slow.look()
    (folder / "fast").write_bytes(whole)
    fast = Growing(folder / "fast")
    fast.look()
    assert (slow.losses, slow.gpu, slow.step, slow.recent) == (fast.losses, fast.gpu, fast.step, fast.recent)


def test_a_long_run_stays_small_and_keeps_its_spikes(tmp_path: Path) -> None:
    growing = Growing(tmp_path / "metrics.jsonl")
    steps = [{"step": n, "loss": 50.0 if n == 777 else 1.0} for n in range(1, 12_001)]
    growing.path.write_bytes(lines(*steps))
    growing.look()
    assert len(growing.losses) < 4 * KEPT and growing.step == 12_000
    assert growing.losses[0] == (1, 1.0) and (777, 50.0) in growing.losses and growing.losses[-1] == (12_000, 1.0)


def test_of_a_long_log_only_the_end_is_read(tmp_path: Path, read: list[tuple[str, int]]) -> None:
    log = tmp_path / "log.txt"
    log.write_text("".join(f"line {n}\n" for n in range(100_000)) + "\x1b[31mred\u202e\n")
    text = tail(log)
    assert read == [("log.txt", TAIL)]
    assert text.endswith("line 99999\n\\x1b[31mred\\u202e") and text.startswith("line ")
    assert tail(tmp_path / "nothing") == ""
    os.mkfifo(tmp_path / "pipe")
    assert tail(tmp_path / "pipe") == ""  # nobody waits for its other end


def test_what_did_not_grow_is_not_read_again(tmp_path: Path, read: list[tuple[str, int]]) -> None:
    path, folder = write_suite(tmp_path)
    for name in ("exp1", "exp2"):
        train_some(folder, name, range(1, 50))
        folder.change(name, state="done", attempt=1)
    snapshot = Snapshot(path, folder.path)
    snapshot.look()
    read.clear()
    snapshot.look()
    assert sum(size for _, size in read) == 0
    train_some(folder, "exp2", range(50, 51))
    job = snapshot.look().jobs[2]
    assert job.step == 50 and job.last.startswith("step 50/20")
    assert [name for name, size in read if size] == ["log.txt", "metrics.jsonl"]


def test_a_suite_at_one_moment(tmp_path: Path) -> None:
    path, folder = write_suite(tmp_path)
    snapshot = Snapshot(path, folder.path, now=lambda: 10_000.0)
    before = snapshot.look()
    assert (before.began, before.deadline, before.finish) == (None, None, None)
    assert {job.state.state for job in before.jobs} == {"waiting"}
    folder.change("features", state="done", attempt=1, started=8_000.0, ended=9_000.0, spent=1_000.0, gpus=[0])
    train_some(folder, "exp1", range(1, 11))
    train_some(folder, "exp2", range(1, 6))
    with running(folder, "exp1", [0]):
        folder.change("exp1", started=9_100.0)
        folder.change(
            "exp2", state="failed", attempt=2, started=8_000.0, ended=9_800.0, spent=1_800.0, why="no room", gpus=[0, 1]
        )
        view = snapshot.look()
    jobs = {job.name: job for job in view.jobs}
    assert (view.began, view.deadline) == (8_000.0, 8_000.0 + 6 * 3600)
    exp1 = jobs["exp1"]
    assert (exp1.step, exp1.total, exp1.loss, exp1.rate, exp1.gpu) == (10, 20, 0.1, 8.0, 90)
    assert (exp1.left, exp1.spent, exp1.gpu_hours) == (20.0, 900.0, 0.25)
    assert jobs["exp2"].gpu_hours == 1.0 and jobs["exp2"].left is None  # two GPUs for half an hour
    folder.change("exp2", gpus=[])
    assert {job.name: job.gpu_hours for job in snapshot.look().jobs}["exp2"] == 0, "it ran here, without a GPU"
    assert jobs["exp1-test"].state.state == "waiting" and jobs["features"].gpu_hours == pytest.approx(1_000 / 3600)
    assert view.finish is None  # nobody knows how long the others take
    told = plain_view(view)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["jobs"][1]["state"] == "running" and "losses" not in told["jobs"][1]
    # Its process died without a word.
    assert {job.name: job.state.state for job in snapshot.look().jobs}["exp1"] == "interrupted"


def test_the_number_of_steps_is_known_before_the_first_line(tmp_path: Path) -> None:
    path, folder = write_suite(tmp_path)
    train_some(folder, "exp1", range(1, 4))
    folder.log("exp1").write_text("")
    (folder.run("exp1") / "times.jsonl").write_bytes(lines({"what": "start", "seconds": 3.0, "total": 60, "time": 1.0}))
    with running(folder, "exp1", [0]):
        job = Snapshot(path, folder.path).look().jobs[1]
    assert (job.step, job.total, job.left) == (3, 60, pytest.approx(114))


def test_evaluations_tell_their_questions(tmp_path: Path) -> None:
    path, folder = write_suite(tmp_path)
    with running(folder, "exp1-test", [1]):
        folder.log("exp1-test").write_text("loss 1.2\nanswers 30/90  6.0 questions/s  left 0:10\n")
        job = Snapshot(path, folder.path).look().jobs[3]
    assert (job.step, job.total, job.unit, job.rate, job.left) == (30, 90, "question", 6.0, 10.0)


def test_stages_stand_one_after_another(tmp_path: Path) -> None:
    path, folder = write_suite(tmp_path)
    run = folder.run("exp1")
    stages = [f"stages/{n}-part" for n in (1, 2)]
    for each in stages:
        (run / each).mkdir(parents=True)
        (run / each / "recipe.yaml").write_text("name: x\n")
        (run / each / "metrics.jsonl").write_bytes(lines(*map(record, range(1, 4))))
    (run / "stages.json").write_text(json.dumps({"stages": [{"folder": each} for each in stages]}))
    folder.change("exp1", state="done", attempt=1, started=1.0, ended=2.0)
    job = Snapshot(path, folder.path).look().jobs[1]
    assert [step for step, _ in job.losses] == [1, 2, 3, 4, 5, 6] and job.step == 3


@pytest.mark.parametrize(
    "values",
    [
        {"started": "soon"},
        {"spent": None},
        {"gpus": ["0"]},
        {"gpus": 3},
        {"why": ["x"]},
        {"host": 7},
        {"attempt": True},
        {"ended": float("nan")},
    ],
)
def test_a_damaged_state_is_a_job_that_has_not_begun(tmp_path: Path, values: dict[str, Any]) -> None:
    path, folder = write_suite(tmp_path)
    folder.job("exp1").mkdir(parents=True)
    (folder.job("exp1") / "state.json").write_text(json.dumps({"state": "running", **values}))
    assert folder.read("exp1") == JobState()
    assert Snapshot(path, folder.path).look().jobs[1].state == JobState()


def test_a_suite_that_was_changed_is_read_again(tmp_path: Path) -> None:
    path, folder = write_suite(tmp_path)
    snapshot = Snapshot(path, folder.path)
    path.write_text(path.read_text() + "  more: {do: train, recipe: exp.yaml}\n")
    assert [job.name for job in snapshot.look().jobs][-1] == "more"
    path.write_text("jobs: [\n")
    view = snapshot.look()
    assert view.jobs[-1].name == "more" and "the suite's file was changed, and cannot be read any more" in view.problem


def test_looking_is_allowed_to_those_who_may_not_write(tmp_path: Path) -> None:
    folder = SuiteFolder(tmp_path)
    with folder.hold("exp1"):
        (folder.job("exp1") / "lock").chmod(0o444)
        assert folder.held("exp1")
    assert not folder.held("exp1")


# Pictures


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, list[str]]:
    names = [f"job-{n}" for n in range(draw(st.integers(1, 9)))]
    return {
        name: draw(st.lists(st.sampled_from(names[:i]), unique=True, max_size=3)) if i else []
        for i, name in enumerate(names)
    }


@given(graphs())
def test_each_job_stands_right_of_what_it_waits_for(graph: dict[str, list[str]]) -> None:
    columns = layers(graph, list(graph))
    depth = {name: i for i, column in enumerate(columns) for name in column}
    assert sorted(depth) == sorted(graph) and sum(map(len, columns)) == len(graph)
    for name, needs in graph.items():
        assert all(depth[need] < depth[name] for need in needs)
        assert depth[name] == 1 + max((depth[need] for need in needs), default=-1)
    picture = as_lists(graph_picture(graph, list(graph), {name: Node("done", "x", "y") for name in graph}))
    width, height = map(float, picture[1]["viewBox"].split()[2:])
    boxes = [each for node in picture[2] if node[0] == "g" for each in node[2] if each[0] == "rect"]
    places = {(float(box[1]["x"]), float(box[1]["y"])) for box in boxes}
    assert len(places) == len(graph)
    assert all(0 <= x <= width - BOX and 0 <= y < height for x, y in places)
    assert sum(each[0] == "path" for each in picture[2]) == sum(map(len, graph.values()))
    assert width == len(columns) * (BOX + ACROSS) - ACROSS + 4


def test_text_in_pictures_is_text() -> None:
    evil = "<script>alert(1)</script> & \"'"
    picture = as_lists(graph_picture({"a": []}, ["a"], {"a": Node("failed", evil, evil)}))
    group = next(each for each in picture[2] if each[0] == "g")
    assert ["title", {}, [f"a: {evil}"]] in group[2]
    assert [each[2] for each in group[2] if each[0] == "text"] == [["a"], [evil]]


def test_time_against_the_deadline() -> None:
    now = time.time()
    spans = [
        Span("a", "done", now - 600, now - 300, None, "done"),
        Span("b", "running", now - 300, now, now + 600, "x"),
    ]
    picture = as_lists(time_picture(spans, now - 600, now, now + 300, 1000))

    def bars(name: str) -> list[tuple[float, float]]:
        group = next(each for each in picture[2] if each[1].get("data-job") == name)
        rects = [each[1] for each in group[2] if each[0] == "rect"]
        return sorted((float(each["x"]), float(each["x"]) + float(each["width"])) for each in rects)

    [(start, end)] = bars("a")
    (begin, moment), (same, finish) = bars("b")
    assert start == pytest.approx(2, abs=0.1) and end == begin and moment == pytest.approx(same, abs=0.1)
    assert end - start == pytest.approx(moment - begin, abs=0.1) == pytest.approx((finish - moment) / 2, abs=0.1)
    [deadline] = [float(each[1]["x1"]) for each in picture[2] if each[1].get("class") == "deadline"]
    assert moment < deadline < finish  # it will be missed
