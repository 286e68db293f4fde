"""Parquet and CSV give the questions that the same rows give as JSON lines; each image is a file once."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner
from worlds import tiny_recipe

from sameday.cli import app
from sameday.commands.launch import train_from_files
from sameday.data.questions.audit import check
from sameday.data.questions.lines import preview, read_lines
from sameday.data.questions.tables import UNPACKED, unpacked
from sameday.data.questions.wanted import Wanted
from sameday.spec.errors import BadInput
from sameday.tasks.vqa.setup import VqaSetup

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00\r"), min_size=1)


def picture(seed: int, size: int = 32) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, format="JPEG" if seed % 2 else "PNG")
    return file.getvalue()


def rows(images: int, each: int) -> list[dict[str, Any]]:
    """As Kvasir-VQA's rows on the hub: the image's bytes in every row about it."""
    return [
        {
            "image": {"bytes": picture(number), "path": None},
            "question": f"what is at place {asked}?",
            "answer": "nan" if asked == 3 else f"a polyp {number}",
            "img_id": f"image{number}",
            "complexity": 1 + asked % 3,
        }
        for number in range(images)
        for asked in range(each)
    ]


NO_IMAGES = [{**row, "image": {"bytes": b"no", "path": None}} for row in rows(1, 2)]


def write(path: Path, made: list[dict[str, Any]], group: int = 7) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(made), path, row_group_size=group)
    return path


def test_images_are_unpacked_once_and_rows_are_questions(tmp_path: Path) -> None:
    made = rows(5, 6)
    path, said = write(tmp_path / "raw.parquet", made), list[str]()
    wanted = Wanted(skip={"answer": ("nan",)}, fields={"stage": "complexity"})
    samples, problems = check(path, tmp_path, None, wanted=wanted, say=said.append)
    assert not problems and len(samples) == 25
    assert [sample.stage for sample in samples[:5]] == [1, 2, 3, 2, 3] and samples[3].where == "raw.parquet:5"
    assert samples[0].question == "what is at place 0?" and samples[0].answer == "a polyp 0"
    files = sorted((tmp_path / UNPACKED).glob("*.[jp]*g"))
    assert sorted(file.read_bytes() for file in files) == sorted(picture(number) for number in range(5))
    assert said == [
        f"raw.parquet: its images are unpacked into {tmp_path / UNPACKED}",
        "unpacking raw.parquet: 30 of 30 rows, 5 images",
        "raw.parquet: 5 of 30 lines are skipped: answer is nan",
    ]
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / UNPACKED).iterdir()}
    again, _ = check(path, tmp_path, None, wanted=wanted)
    assert again == samples and before == {f: f.stat().st_mtime_ns for f in (tmp_path / UNPACKED).iterdir()}
    write(path, made[:6])
    assert len(check(path, tmp_path, None, wanted=wanted)[0]) == 5, "made again for a file that changed"


def test_another_table_with_the_old_size_and_time_is_unpacked(tmp_path: Path) -> None:
    """As `cp -p`, `rsync -t` and `tar` put it there. A table whose bytes are the old ones is not unpacked again."""
    path = write(tmp_path / "raw.parquet", rows(2, 3))
    before, _ = check(path, tmp_path, None)
    old, content = path.stat(), path.read_bytes()
    lines = next((tmp_path / UNPACKED).glob("*.jsonl"))
    written = lines.stat().st_mtime_ns
    path.chmod(0o600)
    assert check(path, tmp_path, None)[0] == before and lines.stat().st_mtime_ns == written
    path.write_bytes(content.replace(b"a polyp 0", b"a cecum 0"))
    os.utime(path, ns=(old.st_mtime_ns, old.st_mtime_ns))
    now = path.stat()
    assert (now.st_size, now.st_mtime_ns) == (old.st_size, old.st_mtime_ns)
    after, _ = check(path, tmp_path, None)
    assert (before[0].answer, after[0].answer) == ("a polyp 0", "a cecum 0")


def test_a_table_that_is_replaced_while_it_is_unpacked_is_unpacked_again(tmp_path: Path) -> None:
    path = write(tmp_path / "raw.parquet", rows(2, 3))
    old, content = path.stat(), path.read_bytes()

    def replaced(said: str) -> None:
        if "its images are unpacked into" in said:
            other = tmp_path / "other"
            other.write_bytes(content.replace(b"a polyp 0", b"a cecum 0"))
            os.utime(other, ns=(old.st_mtime_ns, old.st_mtime_ns))
            other.replace(path)

    assert check(path, tmp_path, None, say=replaced)[0][0].answer == "a polyp 0"
    assert check(path, tmp_path, None)[0][0].answer == "a cecum 0"


def test_lines_of_earlier_releases_are_made_again(tmp_path: Path) -> None:
    """They did not note what their table was."""
    path = write(tmp_path / "raw.parquet", rows(2, 3))
    before, _ = check(path, tmp_path, None)
    (note,), (lines,) = (tmp_path / UNPACKED).glob("*.table"), (tmp_path / UNPACKED).glob("*.jsonl")
    note.unlink()
    lines.write_text("")
    assert check(path, tmp_path, None)[0] == before and note.exists()


def test_images_that_are_gone_are_restored_from_the_table(tmp_path: Path) -> None:
    path, said = write(tmp_path / "raw.parquet", rows(5, 6)), list[str]()
    before, _ = check(path, tmp_path, None, on_bad="skip")
    folder = tmp_path / UNPACKED
    images = sorted(folder.glob("*.[jp]*g"))
    content = {image: image.read_bytes() for image in images}
    for image in images[:2]:
        image.unlink()
    kept = {image: image.stat().st_mtime_ns for image in images[2:]}
    assert check(path, tmp_path, None, on_bad="skip", say=said.append)[0] == before
    assert said == [
        f"raw.parquet: 2 of its images are gone from {folder}",
        f"raw.parquet: its images are unpacked into {folder}",
        "unpacking raw.parquet: 30 of 30 rows, 5 images",
    ]
    assert {image: image.read_bytes() for image in images} == content
    assert kept == {image: image.stat().st_mtime_ns for image in kept}, "only what was gone is written"


def test_what_a_killed_unpacking_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """That of a process that is still unpacking is left to it."""
    script = (
        "import os, sys; from pathlib import Path; from sameday.data.questions import tables\n"
        "def say(text):\n"
        "    if text.startswith('unpacking'):\n"
        "        print('here', flush=True), sys.stdin.read(), os.kill(os.getpid(), 9)\n"
        "tables.unpacked(Path(sys.argv[1]), Path(sys.argv[2]), say)\n"
    )
    path, folder = write(tmp_path / "raw.parquet", rows(2, 3)), tmp_path / UNPACKED
    command = [sys.executable, "-c", script, str(path), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"here\n"
        (part,) = folder.glob("*.part")
        unpacked(path, tmp_path, lambda _: None)
        assert part.exists(), "its process is alive"
        other.communicate()  # which lets it go on to its end
    assert part.exists()
    next(folder.glob("*.jsonl")).unlink()
    assert len(check(path, tmp_path, None)[0]) == 6
    assert not list(folder.glob("*.part"))


def test_a_preview_has_what_unpacking_gives_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [{**row, "seen": [{"bytes": picture(1), "path": "a.jpg"}], "raw": b"0"} for row in rows(3, 4)]
    named = [{"image": f"{number}.png", "question": "q?", "answer": "a"} for number in range(5)]
    tables = [write(tmp_path / "raw.parquet", made), write(tmp_path / "named.parquet", named)]
    for read_whole in (80, 3):  # the bytes of later rows are not read, and nothing else changes
        monkeypatch.setattr("sameday.data.questions.tables.PREVIEWED", read_whole)
        for path in tables:
            seen = list(preview(path))
            assert [each.name for each in tmp_path.iterdir() if each not in tables] == []
            whole = [line.parse() for line in read_lines(path, images=tmp_path)]
            shutil.rmtree(tmp_path / UNPACKED)
            assert [list(row) for row in seen] == [list(row) for row in whole]
            of_text = (
                [name for name in whole[0] if name not in ("image", "seen", "raw")] if path == tables[0] else whole[0]
            )
            assert [{n: row[n] for n in of_text} for row in seen] == [{n: row[n] for n in of_text} for row in whole]
            if path == tables[0]:
                assert seen[0]["image"] == seen[-1]["raw"] == f"{UNPACKED}/"


def test_a_folder_that_cannot_be_written_is_known_before_anything_is_read(tmp_path: Path, tiny_qwen3: Path) -> None:
    """Of all sets, though the first one's images could be read."""
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "raw.parquet", rows(2, 2))
    for name in ("two", "three"):
        (tmp_path / name / UNPACKED).write_text("in the way")
    more = [{"train": f"{name}/raw.parquet", "image_root": name} for name in ("two", "three")]
    data = {"train": "one/raw.parquet", "image_root": "one", "mix": more}
    sentences = [
        f"{tmp_path / name / 'raw.parquet'}: its images are unpacked into {tmp_path / name / UNPACKED}, which cannot "
        "be written: File exists; allowed: another folder in recipe.data.image_root, or in --image-root of `sameday "
        "data`"
        for name in ("two", "three")
    ]
    with pytest.raises(BadInput) as error:
        VqaSetup(tiny_recipe(tiny_qwen3, data=data), tmp_path).audit(lambda _: None, ("train",))
    assert str(error.value).splitlines() == sentences
    assert not (tmp_path / "one" / UNPACKED).exists(), "what was made to find out is gone"
    with pytest.raises(BadInput) as error:
        CliRunner().invoke(app, ["data", str(tmp_path / "two/raw.parquet")], catch_exceptions=False)
    assert str(error.value) == sentences[0]


def test_several_files_are_one_set(tmp_path: Path) -> None:
    made = rows(4, 2)
    for number in range(2):
        write(tmp_path / f"raw-{number:05d}.parquet", made[4 * number : 4 * number + 4])
    samples, _ = check(tmp_path / "raw-*.parquet", tmp_path, None)
    assert [sample.id for sample in samples] == list(range(1, 9))
    assert samples[5].where == "raw-*.parquet:raw-00001.parquet:2" and samples[5].answer == "a polyp 2"
    with pytest.raises(BadInput, match=r"other-\*\.parquet: no file is called so"):
        check(tmp_path / "other-*.parquet", tmp_path, None)


@given(st.lists(st.fixed_dictionaries({"image": TEXT, "question": TEXT, "answer": TEXT}), min_size=1, max_size=5))
def test_a_table_has_the_values_of_its_rows(
    tmp_path_factory: pytest.TempPathFactory, made: list[dict[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    for name, separator in (("a.csv", ","), ("a.tsv", "\t"), ("b.csv", ";"), ("c.csv", "\t"), ("d.tsv", ",")):
        with (folder / name).open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(made[0]), delimiter=separator)
            writer.writeheader()
            writer.writerows(made)
        lines = list(read_lines(folder / name))
        assert [line.parse() for line in lines] == made
        breaks = [sum(value.count("\n") for value in row.values()) for row in made]
        assert [line.line for line in lines] == [2 + n + sum(breaks[:n]) for n in range(len(made))]
    path = write(folder / "a.parquet", made)
    assert [line.parse() for line in read_lines(path, images=folder)] == made


def test_never_all_images_are_in_memory(tmp_path: Path) -> None:
    """Rows of 300 KB, 60 MB of them."""
    content = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8).tobytes()
    made = [{"image": {"bytes": bytes([n]) + content, "path": None}, "question": "q"} for n in range(200)]
    path = write(tmp_path / "large.parquet", made, group=200)
    del made
    tracemalloc.start()
    before = pyarrow.total_allocated_bytes()
    unpacked(path, tmp_path, lambda _: None)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most + pyarrow.total_allocated_bytes() - before < 45e6


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-900]), "raw.parquet: is no parquet file, or only a part of"),
        (lambda path: path.write_bytes(b"PAR1 nothing"), "raw.parquet: is no parquet file, or only a part of one: "),
        (lambda path: write(path, NO_IMAGES), "image '.unpacked/"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, spoil: Any, said: str) -> None:
    path = write(tmp_path / "raw.parquet", rows(2, 2))
    spoil(path)
    with pytest.raises(BadInput) as error:
        check(path, tmp_path, None)
    assert said in str(error.value)
    assert not list(tmp_path.rglob("*.part"))


def test_columns_and_files_that_are_not_there(tmp_path: Path) -> None:
    path = write(tmp_path / "raw.parquet", rows(2, 2))
    with pytest.raises(BadInput) as error:
        check(path, tmp_path, None, wanted=Wanted(fields={"stage": "level", "answer": "reply"}))
    there = "there are image, question, answer, img_id, complexity"
    assert str(error.value) == (
        f"recipe.data.fields.stage is 'level', which no line of raw.parquet has; {there}\n"
        f"recipe.data.fields.answer is 'reply', which no line of raw.parquet has; {there}"
    )
    (tmp_path / "a.csv").write_text("image,question,answer\na.png,what?\n")
    with pytest.raises(BadInput) as error:
        check(tmp_path / "a.csv", tmp_path, None)
    assert "a.csv:2: has 2 values, and the header 3: image, question, answer" in str(error.value)
    assert "JSON" not in str(error.value)
    rows_after_breaks = 'image;question;answer\na.png;"what\n\nis it?";yes\n\nb.png;where?\nc.png;"x\n'
    (tmp_path / "c.csv").write_text(rows_after_breaks)
    with pytest.raises(
        BadInput, match=r"c\.csv:7: is no row of CSV: a value begins with a quotation mark that is not closed"
    ):
        check(tmp_path / "c.csv", tmp_path, None)
    (tmp_path / "c.csv").write_text(rows_after_breaks.rsplit("c.png")[0])
    with pytest.raises(BadInput, match=r"c\.csv:6: has 2 values, and the header 3: image, question, answer"):
        check(tmp_path / "c.csv", tmp_path, None)
    (tmp_path / "b.csv").write_text("image,question,question\n")
    with pytest.raises(BadInput, match=r"b\.csv: its header names question twice"):
        check(tmp_path / "b.csv", tmp_path, None)


@pytest.mark.slow
def test_times_in_nanoseconds_do_not_stop_a_table_from_being_read(tmp_path: Path) -> None:
    """pandas writes them so, and one that is no whole number of microseconds was an error of pyarrow."""
    table = pyarrow.Table.from_pylist(rows(1, 2))
    for name, kind in (
        ("taken", pyarrow.timestamp("ns", "UTC")),
        ("took", pyarrow.duration("ns")),
        ("at", pyarrow.time64("ns")),
    ):
        table = table.append_column(name, pyarrow.array([1_700_000_001, 1_000], kind))
    parquet.write_table(table, tmp_path / "raw.parquet")
    read = [line.parse() for line in read_lines(tmp_path / "raw.parquet", images=tmp_path)]
    assert [row["taken"] for row in read] == ["1970-01-01 00:00:01.700000+00:00", "1970-01-01 00:00:00.000001+00:00"]
    assert [(row["took"], row["at"]) for row in read] == [
        ("0:00:01.700000", "00:00:01.700000"),
        ("0:00:00.000001", "00:00:00.000001"),
    ]


def test_a_file_without_an_image_column_is_told_which_columns_it_has(tmp_path: Path) -> None:
    """Lines said that they have no image, and nothing of the columns that may be meant."""
    pmc, own = tmp_path / "pmc.csv", tmp_path / "own.csv"
    pmc.write_text("Figure_path,Question,Answer,Choice A\na.png,what?,yes,no\n")
    own.write_text("id,scan,question,answer,type\n7,a.png,what?,yes,x\n")
    said = {}
    for path in (pmc, own):
        with pytest.raises(BadInput) as error:
            check(path, tmp_path, None)
        said[path.stem] = str(error.value).splitlines()
    assert "every line has 'Figure_path': did you mean 'image'?" in said["pmc"]
    assert said["own"][1:2] == ["own.csv:2: has no 'image'; a question without an image has [] there"]
    assert "no line has 'image': recipe.data.fields.image can name what is meant, of 'id', 'scan'" in said["own"]


@pytest.mark.parametrize("key", ["image", "image_filename"])
def test_an_image_that_is_there_is_not_told_to_be_missing(tmp_path: Path, key: str) -> None:
    """Where every line has another fault."""
    rows = [{key: "a.png", "question": "what?", "answer": None, "source": "x"} for _ in range(3)]
    (tmp_path / "own.json").write_text(json.dumps(rows))
    with pytest.raises(BadInput) as error:
        check(tmp_path / "own.json", tmp_path, None)
    assert "'answer' is null" in str(error.value) and "no line has" not in str(error.value)


def test_a_run_trains_from_parquet(tmp_path: Path, tiny_qwen3: Path) -> None:
    """The same losses as from JSON lines and files of the same bytes."""
    made = [row for row in rows(4, 3) if row["answer"] != "nan"]
    write(tmp_path / "raw.parquet", made)
    for number in range(4):
        (tmp_path / f"{number}.img").write_bytes(picture(number))
    lines = [row | {"image": f"{n // 3}.img", "stage": row["complexity"]} for n, row in enumerate(made)]
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = []
    for name, fields in (("raw.parquet", {"stage": "complexity"}), ("plain.jsonl", {})):
        data = {"train": name, "val": name, "image_root": ".", "fields": fields}
        recipe = tiny_recipe(tiny_qwen3, effective_batch=4, num_epochs=1).model_dump(mode="json") | {"data": data}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        found.append(train_from_files(tmp_path / "recipe.yaml", None, tmp_path / f"run-{name}", ["plan.device=cpu"]))
    assert found[0] == found[1]
    said = CliRunner().invoke(app, ["train", str(tmp_path / "recipe.yaml"), "--set", "recipe.data.fields={colour: x}"])
    keys = "image, question, answer, stage, type, instruction"
    assert f"data.fields is {{'colour': 'x'}}; must name keys among {keys}, each with a column, and has colour" in (
        str(said.exception)
    )
