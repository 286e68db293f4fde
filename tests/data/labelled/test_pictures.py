"""Image sets come out of batches and folders as they were put in, in splits that are a function of the seed, and every
mistake in them is named."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sameday.data.labelled import cifar
from sameday.data.labelled.pictures import Pictures, fitted, held_out, read_pictures
from sameday.spec.errors import BadInput

CLASSES = ("cat", "dog", "frog")
REAL = Path(os.environ.get("CIFAR10", "nowhere"))


def noise(count: int, size: int = 32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def numbers(count: int, classes: int = 3) -> list[int]:
    return [i * 7 % classes for i in range(count)]


def flat(pixels: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)).reshape(len(pixels), -1)


@pytest.fixture
def batches(tmp_path: Path) -> Path:
    """CIFAR-10's layout with six images in each training batch and five in the test batch."""
    tmp_path /= "batches"
    tmp_path.mkdir()
    for i, name in enumerate(cifar.TRAIN_BATCHES):
        cifar.write_batch(tmp_path / name, noise(6, seed=i), numbers(6), [f"{j}.png" for j in range(6)], f"batch {i}")
    cifar.write_batch(tmp_path / cifar.TEST_BATCH, noise(5, seed=9), numbers(5), ["x.png"] * 5, "test")
    cifar.write_meta(tmp_path / cifar.META, CLASSES, 6)
    return tmp_path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tmp_path /= "tree"
    for split, count in (("train", 4), ("test", 2)):
        for label, name in enumerate(CLASSES):
            (tmp_path / split / name).mkdir(parents=True)
            for i, image in enumerate(noise(count, seed=label + 10 * count)):
                Image.fromarray(image).save(tmp_path / split / name / f"{i}.png")
    return tmp_path


def refusal(path: Path, **asked: Any) -> str:
    with pytest.raises(BadInput) as caught:
        read_pictures(path, **{"split": "train", "image_size": 32, **asked})
    return str(caught.value)


def content(pictures: Pictures) -> list[tuple[str, int, bytes]]:
    rows = zip(pictures.names, pictures.labels.tolist(), pictures.pixels, strict=True)
    return [(name, label, image.tobytes()) for name, label, image in rows]


def test_batches_are_read_in_order(batches: Path) -> None:
    train, test = (read_pictures(batches, split, 32) for split in ("train", "test"))
    assert train.classes == test.classes == CLASSES
    assert np.array_equal(train.pixels, np.concatenate([noise(6, seed=i) for i in range(5)]))
    assert train.pixels.dtype == np.uint8 and train.labels.dtype == np.int64
    assert train.labels.tolist() == numbers(6) * 5
    assert (train.names[0], train.names[13], len(train)) == ("data_batch_1:0", "data_batch_3:1", 30)
    assert np.array_equal(test.pixels, noise(5, seed=9)) and test.names[-1] == "test_batch:4"


def test_the_published_form_and_every_later_one_is_read(tmp_path: Path) -> None:
    """As Python 2 wrote it, and as Python 3 writes the same dictionary, with any protocol and either name of numpy."""
    pixels = noise(4)
    cifar.write_batch(tmp_path / "old", pixels, numbers(4), ["a", "b", "c", "d"], "a title")
    raw = (tmp_path / "old").read_bytes()
    assert b"cnumpy.core.multiarray\n_reconstruct" in raw and b"_codecs" not in raw
    # The way the data set's own page reads it, and the way of readers that ask for text.
    assert np.array_equal(pickle.loads(raw, encoding="bytes")[b"data"], flat(pixels))
    assert np.array_equal(pickle.loads(raw, encoding="latin1")["data"], flat(pixels))
    forms: list[dict[Any, Any]] = [
        {b"data": flat(pixels), b"labels": numbers(4), b"batch_label": b"", b"filenames": [b"a"] * 4},
        {"data": flat(pixels), "labels": np.array(numbers(4))},
        {"data": np.asfortranarray(flat(pixels)), "labels": np.array(numbers(4), ">i4")},
    ]
    files = [raw, raw.replace(b"numpy.core", b"numpy._core")]
    files += [pickle.dumps(form, protocol) for form in forms for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for data in files:
        (tmp_path / "file").write_bytes(data)
        read, labels = cifar.rows(cifar.load(tmp_path / "file"), "labels")
        assert np.array_equal(read, pixels) and labels.tolist() == numbers(4)


def test_cifar_100_has_fine_labels(tmp_path: Path) -> None:
    pixels = noise(6)
    for name in ("train", "test"):
        rows = {b"data": flat(pixels), b"fine_labels": numbers(6), b"coarse_labels": [9] * 6, b"filenames": [b""] * 6}
        (tmp_path / name).write_bytes(pickle.dumps(rows, 2))
    meta = {b"fine_label_names": [b"cat", b"dog", b"frog"], b"coarse_label_names": [b"mammal"]}
    (tmp_path / "meta").write_bytes(pickle.dumps(meta, 2))
    train = read_pictures(tmp_path, "train", 32)
    assert train.classes == CLASSES and train.labels.tolist() == numbers(6) and train.names[5] == "train:5"
    assert np.array_equal(train.pixels, pixels)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch proof",)


class EvilArray:
    def __reduce__(self) -> Any:
        return np.load, ("file",)


@pytest.mark.parametrize(
    "thing", [Evil(), EvilArray(), np.float64(1), {1, 2}, np.dtype, Path("x"), print, [np.int64(3)]]
)
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_no_pickle_runs_anything(batches: Path, thing: Any, protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(batches)
    rows = {b"data": flat(noise(3)), b"labels": [0, 1, 2], b"more": thing}
    (batches / "data_batch_2").write_bytes(pickle.dumps(rows, protocol))
    if isinstance(thing, set) and protocol >= 4:
        return  # a set has an opcode of its own there, and harms nobody
    if thing is np.dtype:
        assert read_pictures(batches, "train", 32)  # a stand-in, under a key that nobody reads
        return
    assert "data_batch_2: asks for " in (text := refusal(batches)) and "nothing of it was run" in text
    assert not (batches / "proof").exists()


@pytest.mark.parametrize("kind", ["f8", "O", "U4", "V3"])
def test_arrays_hold_whole_numbers_alone(batches: Path, kind: str) -> None:
    for protocol in (2, 5):
        rows = {b"data": flat(noise(3)), b"labels": np.zeros(3, kind)}
        (batches / "data_batch_2").write_bytes(pickle.dumps(rows, protocol))
        assert "data_batch_2: " in refusal(batches)


def test_damaged_bytes_are_refused_or_harmless(batches: Path) -> None:
    """No damage gets past as anything but a refusal with the batch's name, or pixels of the right form."""
    rng, whole = random.Random(0), (batches / "test_batch").read_bytes()
    head = whole.index(b"labels")
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(200 if rng.random() < 0.5 else len(whole))] = rng.randrange(256)
        (batches / "test_batch").write_bytes(damaged[: rng.choice([len(whole), head, rng.randrange(len(whole))])])
        try:
            pictures = read_pictures(batches, "test", 32)
        except BadInput as error:
            assert "test_batch" in str(error)
        else:
            assert pictures.pixels.shape[1:] == (32, 32, 3) and pictures.pixels.dtype == np.uint8
            assert pictures.labels.min() >= 0 and pictures.labels.max() < 3


def test_all_problems_of_all_batches_come_at_once(batches: Path) -> None:
    def write(name: str, rows: Any) -> None:
        (batches / name).write_bytes(pickle.dumps(rows, 2))

    (batches / "data_batch_1").write_bytes((batches / "data_batch_1").read_bytes()[:5000])
    (batches / "data_batch_2").unlink()
    write("data_batch_3", {b"data": flat(noise(2)), b"labels": [1, 3]})
    write("data_batch_4", {b"data": flat(noise(2))[:, 1:], b"labels": [1, 2]})
    write("data_batch_5", {b"data": flat(noise(2)), b"labels": [1]})
    heading, *problems = refusal(batches).splitlines()
    assert heading == f"5 problems in {batches}:"
    assert problems[0].startswith("data_batch_1: is cut short or not a pickle: ")
    assert problems[1:] == [
        "data_batch_2: is missing",
        "data_batch_3:1: label 3 is out of range; 0 to 2 are named",
        "data_batch_4: 'data' is uint8 of shape (2, 3071); uint8 of shape (images, 3072) is expected",
        "data_batch_5: has 2 images and 1 labels",
    ]
    write("data_batch_1", [1, 2])
    write("data_batch_2", {b"labels": [1]})
    write("data_batch_3", {b"data": "none", b"labels": [1]})
    write("data_batch_4", {b"data": flat(noise(2)), b"labels": ["1", True]})
    write("data_batch_5", {b"data": flat(noise(1)), b"labels": [2**70]})
    write("batches.meta", {b"label_names": []})
    assert refusal(batches).splitlines()[1:] == [
        "batches.meta: has no list of names under 'label_names'; it holds label_names",
        "data_batch_1: holds a list where a dictionary is expected",
        "data_batch_2: has no 'data'; it holds labels",
        "data_batch_3: 'data' is str; uint8 of shape (images, 3072) is expected",
        "data_batch_4: 'labels' is not a list of whole numbers",
        "data_batch_5: 'labels' holds a number beyond 64 bits",
    ]


def test_a_tree_comes_class_by_turns(tree: Path) -> None:
    train = read_pictures(tree, "train", 32)
    assert train.classes == CLASSES and train.labels.tolist() == [0, 1, 2] * 4
    assert train.names[4] == str(tree / "train" / "dog" / "1.png")
    for i, name in enumerate(train.names):
        assert np.array_equal(train.pixels[i], np.asarray(Image.open(name)))
    first = read_pictures(tree, "train", 32, limit=3)
    assert content(first) == content(train)[:3]
    assert read_pictures(tree, "test", 32).labels.tolist() == [0, 1, 2] * 2


def test_other_files_are_passed_by_and_folders_below_are_not(tree: Path) -> None:
    before = read_pictures(tree, "train", 32)
    cat = tree / "train" / "cat"
    (cat / "boxes.txt").write_text("0 0 1 1")
    (cat / ".hidden.png").write_text("nothing")
    (tree / "train" / ".cache").mkdir()
    assert read_pictures(tree, "train", 32).digest == before.digest
    (cat / "below").mkdir()
    Image.fromarray(noise(1)[0]).convert("L").save(cat / "below" / "extra.JPG", format="JPEG")
    assert str(cat / "below" / "extra.JPG") in read_pictures(tree, "train", 32).names


def test_a_tree_with_its_own_validation(tree: Path) -> None:
    (tree / "val" / "frog").mkdir(parents=True)
    Image.fromarray(noise(1)[0]).save(tree / "val" / "frog" / "a.png")
    val = read_pictures(tree, "val", 32)
    assert val.classes == CLASSES and val.labels.tolist() == [2]  # the number that training gives it
    assert len(read_pictures(tree, "train", 32)) == 12
    assert "has a val folder of its own" in refusal(tree, val=3)


def test_all_problems_of_a_tree_come_at_once(tree: Path) -> None:
    names = [tree / "train" / "dog" / "1.png", tree / "train" / "frog" / "3.png", tree / "train" / "frog" / "wide.png"]
    names[0].write_bytes(names[0].read_bytes()[:200])
    names[1].write_text("no image")
    Image.new("RGB", (1, 300)).save(names[2])
    heading, *problems = refusal(tree).splitlines()
    assert heading == f"3 problems in {tree}:"
    assert sorted(problem.split(": ")[0] for problem in problems) == sorted(map(str, names))
    assert len(read_pictures(tree, "train", 32, limit=3)) == 3  # the others are not looked at

    (tree / "test" / "bird").mkdir()
    (tree / "test" / "stray.png").write_bytes(b"")
    for file in (tree / "test" / "dog").iterdir():
        file.unlink()
    text = refusal(tree, split="test")
    assert f"{tree / 'test' / 'stray.png'}: this image stands outside any class folder" in text
    assert f"{tree / 'test' / 'bird'}: this class is not among the training classes cat, dog, frog" in text
    assert f"{tree / 'test' / 'dog'}: this class has no image (.bmp, " in text


def test_what_is_no_set_at_all(tmp_path: Path, batches: Path) -> None:
    assert "nowhere does not exist; a folder is needed with data_batch_1" in refusal(tmp_path / "nowhere")
    assert "is not a folder" in refusal(batches / "test_batch")
    empty = tmp_path / "empty"
    (empty / "cifar-10-batches-py").mkdir(parents=True)
    text = refusal(empty)
    assert "known layout" in text and "CIFAR-100" in text and "train/CLASS" in text
    assert text.endswith(f"Is {empty / 'cifar-10-batches-py'} meant?")
    (empty / "train").mkdir()
    assert "holds no folders" in refusal(empty)
    (empty / "train" / "cat").mkdir()
    assert "this class has no image" in refusal(empty)
    assert "does not exist" in refusal(empty, split="test")
    assert "image_size 0" in refusal(batches, image_size=0)
    (batches / "train").mkdir()
    assert "holds both a train folder and CIFAR-10's batches" in refusal(batches)


def test_validation_needs_a_part_to_be_taken_from(batches: Path) -> None:
    assert "val 30 leaves nothing to train on" in refusal(batches, val=30)
    assert "has 30 images" in refusal(batches, val=31, split="val")
    assert "val says how many training images to hold out" in refusal(batches, split="val")


@given(count=st.integers(1, 300), share=st.floats(0, 1), seed=st.integers(0, 2**40))
def test_the_held_out_are_as_many_as_asked_and_grow(count: int, share: float, seed: int) -> None:
    val = int(share * count)
    chosen = held_out(count, val, seed)
    assert chosen.sum() == val and len(chosen) == count
    assert not (chosen & ~held_out(count, min(count, val + 1), seed)).any()


def test_the_held_out_are_the_same_on_every_machine() -> None:
    """Against the hash written with Python's own integers."""
    mask, key = 2**64 - 1, int.from_bytes(hashlib.blake2b(b"held out/5", digest_size=8).digest(), "little")

    def mixed(x: int) -> int:
        x = ((x ^ key) + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    expected = sorted(sorted(range(1000), key=mixed)[:100])
    assert np.flatnonzero(held_out(1000, 100, 5)).tolist() == expected


def test_the_held_out_look_random() -> None:
    draws = np.stack([held_out(500, 100, seed) for seed in range(400)])
    assert abs(draws.mean(0) - 0.2).max() < 5 * (0.16 / 400) ** 0.5
    assert abs(np.corrcoef(draws)[np.triu_indices(400, 1)]).max() < 6 / 500**0.5


def test_training_and_validation_share_nothing_and_make_the_whole(batches: Path) -> None:
    whole = read_pictures(batches, "train", 32)
    train, val = (read_pictures(batches, split, 32, val=8, split_seed=3) for split in ("train", "val"))
    assert len(val) == 8 and sorted(content(train) + content(val)) == sorted(content(whole))
    # Each in the order of the whole, and the first of it under a limit.
    assert [name for name in whole.names if name in train.names] == list(train.names)
    for split, all_of_it in (("train", train), ("val", val)):
        few = read_pictures(batches, split, 32, val=8, split_seed=3, limit=4)
        assert content(few) == content(all_of_it)[:4]
    assert read_pictures(batches, "val", 32, val=8, split_seed=4).names != val.names


def test_the_digest_knows_everything_but_the_names(batches: Path, tmp_path: Path) -> None:
    one = read_pictures(batches, "test", 32)
    assert one.digest == read_pictures(batches, "test", 32).digest
    parts: dict[str, Any] = vars(one) | {}
    parts.pop("digest")
    assert Pictures(**{**parts, "names": ("elsewhere",) * 5}).digest == one.digest
    assert Pictures(**{**parts, "labels": one.labels[::-1]}).digest != one.digest
    assert Pictures(**{**parts, "classes": ("cat", "dog", "bird")}).digest != one.digest
    changed = one.pixels.copy()
    changed[4, 31, 31, 2] ^= 1
    assert Pictures(**{**parts, "pixels": changed}).digest != one.digest


@pytest.mark.parametrize("size", [16, 32, 48])
@pytest.mark.parametrize("shape", [(32, 32), (64, 40), (33, 100), (7, 9)])
def test_images_are_scaled_by_the_shorter_side_and_cut_in_the_middle(shape: tuple[int, int], size: int) -> None:
    image = Image.fromarray(noise(1, 128)[0]).crop((0, 0, *shape))
    out = fitted(image, size)
    assert out.size == (size, size)
    if shape == (size, size):
        assert out.tobytes() == image.tobytes()
    mirrored = fitted(image.transpose(Image.Transpose.TRANSPOSE), size).transpose(Image.Transpose.TRANSPOSE)
    assert np.abs(np.asarray(mirrored, int) - np.asarray(out, int)).max() <= 1


def test_every_layout_is_brought_to_the_size(batches: Path, tree: Path) -> None:
    small = read_pictures(batches, "test", 16)
    expected = [
        np.asarray(Image.fromarray(image).resize((16, 16), Image.Resampling.BILINEAR)) for image in noise(5, seed=9)
    ]
    assert np.array_equal(small.pixels, np.stack(expected))
    large = read_pictures(tree, "test", 48)
    expected = [np.asarray(fitted(Image.open(name), 48)) for name in large.names]
    assert np.array_equal(large.pixels, np.stack(expected))


def test_progress_is_told_at_each_tenth(tree: Path) -> None:
    told: list[tuple[int, int]] = []
    read_pictures(tree, "train", 8, progress=lambda done, total: told.append((done, total)))
    assert len(told) == 10 and told[-1] == (12, 12) and [done for done, _ in told] == sorted({done for done, _ in told})


@pytest.mark.skipif(not REAL.is_dir(), reason="CIFAR10 does not name a folder with the real batches")
def test_the_real_set() -> None:
    train, val = (read_pictures(REAL, split, 32, val=10_000) for split in ("train", "val"))
    both = np.concatenate([train.labels, val.labels])
    assert (len(train), len(val)) == (40_000, 10_000) and np.bincount(both).tolist() == [5000] * 10
    assert np.bincount(read_pictures(REAL, "test", 32).labels).tolist() == [1000] * 10
