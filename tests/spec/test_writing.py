"""Files that commands write: links, pipes and long names, and what must not or cannot be written over."""

import os
from pathlib import Path

import pytest

from sameday.spec.errors import BadInput
from sameday.spec.writing import check_folder, check_output, same_file, write_text


def test_links_pipes_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/file")
    for text in ("first", "second"):  # it points to nothing, then to a file
        write_text(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "folder" / "file").read_text() == text
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through" and (tmp_path / "pipe").is_fifo()
    os.close(reader)
    ends = os.openpty()  # a device that nothing can take the place of
    write_text(Path(os.ttyname(ends[1])), "typed")
    assert os.read(ends[0], 100) == b"typed"
    for end in ends:
        os.close(end)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "link", "pipe"]


def test_a_name_as_long_as_names_may_be(tmp_path: Path) -> None:
    check_output("--out", tmp_path / ("ä" * 125))
    write_text(tmp_path / ("ä" * 125), "text")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["text"]


def test_what_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/file")
    for path, why in (
        (tmp_path, "must be a file in a folder that is there"),
        (tmp_path / "none" / "file", "must be a file in a folder that is there"),
        (Path("/proc/file"), "cannot be written: "),
        (tmp_path / "link", "cannot be written: "),
        (tmp_path / ("n" * 256), "cannot be written: File name too long"),
    ):
        with pytest.raises(BadInput, match=f"--json {path}: .*{why}"):
            check_output("--json", path)
    for fine in (None, tmp_path / "file", Path("/dev/null")):
        check_output("--json", fine)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link"], "nothing is left of the attempt"


def test_what_is_read_is_not_written_over(tmp_path: Path) -> None:
    recipe, link, far = tmp_path / "recipe.yaml", tmp_path / "link", tmp_path / "far"
    recipe.write_text("text")
    link.symlink_to("recipe.yaml")
    far.symlink_to(".")
    long = tmp_path / ("n" * 256)
    for path in (recipe, link, far / "recipe.yaml"):
        with pytest.raises(BadInput) as error:
            check_output("--json", path, (None, long, recipe))
        assert str(error.value) == f"--json {path}: is one of the files that are read; choose another one"
    check_output("--json", tmp_path / "other.yaml", (None, long, recipe))
    check_output("--json", Path("/dev/null"), (Path("/dev/null"),))
    assert same_file(far / "none", tmp_path / "none") and not same_file(tmp_path / "none", recipe)


def test_what_a_command_did_not_write_is_not_written_over(tmp_path: Path) -> None:
    """A set of questions whose name was typed for the output's."""
    said = "is there already, and this command did not write it; choose another one"
    for text in ('[{"question": "?"}]', '{"question": "?"}\n', "<!DOCTYPE html>"):
        (tmp_path / "train.json").write_text(text)
        with pytest.raises(BadInput, match=said):
            check_output("--json", tmp_path / "train.json")
    check_output("--out", tmp_path / "train.json", begins=b"<!DOCTYPE html>")
    for text in ("", '{\n "verdict": 1}\n'):
        (tmp_path / "train.json").write_text(text)
        check_output("--json", tmp_path / "train.json")


def test_a_folder_that_cannot_be_made_is_known_before(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong, why in ((tmp_path / "file", "File exists"), (tmp_path / "file/a/b", "Not a directory")):
        with pytest.raises(BadInput) as told:
            check_folder(wrong, "-o")
        assert str(told.value) == f"-o {wrong}: cannot be a folder: {why}; choose another one"
    check_folder(tmp_path / "new/below", "-o")
    check_folder(tmp_path, "-o")
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left of the trial"
