"""All sets that a recipe mixes, read and checked: the questions of each split, and everything that is wrong with any of
them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sameday.data.order import epoch_size
from sameday.data.problems import Problem
from sameday.data.questions.audit import EmptyFile, NoneLeft, WrongRoot, check, lost_images, tenths
from sameday.data.questions.family import QuestionFamily
from sameday.data.questions.hub import located
from sameday.data.questions.sample import SET_SPAN, Sample
from sameday.data.questions.split import divided, image_by_image, images_in, told
from sameday.data.questions.summary import common_images, contents, on_several_sides
from sameday.data.questions.tables import Say, check_unpacking, files_of
from sameday.data.questions.wanted import Wanted
from sameday.spec.dataset import QuestionSet, Split, hub_name
from sameday.spec.errors import BadInput
from sameday.spec.load import resolve_path
from sameday.spec.vlm import VlmRecipe
from sameday.spec.words import count, number

SPLITS = ("train", "val", "test")


@dataclass
class Reading:
    """What the files of a recipe hold. `errors` are sentences about all that is wrong, `empty` why a split has no
    question."""

    recipe: VlmRecipe
    home: Path
    family: QuestionFamily | None
    stages: Sequence[int] | None
    say: Say
    few: Mapping[str, int] | None = None
    splits: dict[str, list[Sample]] = field(default_factory=dict)
    skipped: list[Problem] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    empty: dict[str, str] = field(default_factory=dict)
    _lost: dict[Path, dict[str, str]] = field(default_factory=dict)

    def read(self, splits: Sequence[str]) -> Reading:
        sets = self.recipe.data.sets
        self.errors += (wrong := cannot_unpack(self.home, sets, splits))
        if wrong:
            return self
        for index, part in enumerate(sets):
            for name, samples in self._set(index, part, splits).items():
                self.splits.setdefault(name, []).extend(samples)
        if self.few is not None:
            self.splits = {name: samples[: self.few[name]] for name, samples in self.splits.items()}
        for root, names in self._lost.items():  # said once, whatever the number of files
            self.errors.append(lost_images(root, next(iter(names.values())), list(names)))
        for name in [name for name in self.empty if name in self.splits]:  # other sets have some
            self.say(self.empty.pop(name))
        if len(sets) > 1 and self.few is None and not self.errors:  # of a file that is wrong nothing is known
            self._tell_mix()
        for (one, other), images in on_several_sides(contents(self.splits)).items() if self.few is None else ():
            self.say(common_images(one, other, images))
        return self

    def counts(self) -> dict[str, dict[str, int]]:
        """Of each split, how many questions come from each set, where there is more to say than one number."""
        data = self.recipe.data
        if len(data.sets) == 1 and data.split is None:
            return {}
        return {name: dict(Counter(data.sets[each.set].train for each in side)) for name, side in self.splits.items()}

    def _set(self, index: int, part: QuestionSet, splits: Sequence[str]) -> dict[str, list[Sample]]:
        """The splits of one set, as far as they can be read."""
        data, place = self.recipe.data, f"recipe.data.mix[{index - 1}]" if index else "recipe.data"
        held = {} if part.split is None else part.split.shares
        root = resolve_path(self.home, part.image_root)
        if not root.is_dir():
            self.errors.append(f"{place}.image_root is {part.image_root}, and {root} is not a folder")
        found: dict[str, list[Sample]] = {}
        for name in dict.fromkeys("train" if each in held else each for each in splits):
            file = getattr(part, name)
            if file is None:
                continue
            try:
                samples, problems = check(
                    located(self.home, file, name, self.say),
                    root if root.is_dir() else None,
                    self.family,
                    limit=data.limit,
                    on_bad=data.on_bad,
                    progress=tenths(name, self.say),
                    label=file,
                    # What is held out only the whole file tells.
                    few=None if part.split is not None and name == "train" else self._few(name),
                    wanted=Wanted.by(self.recipe, self.home, part),
                    all_values=name == "train" and not data.mix,
                    all_fields=name == "train",
                    say=self.say,
                    stages=self.stages,
                )
                found[name] = [replace(each, id=each.id + index * SET_SPAN) for each in samples] if index else samples
                self.skipped += problems
            except EmptyFile as error:
                without = "" if name == "train" else f"; where there are none, leave {place}.{name} out"
                self.errors.append(f"{error}{without}")
            except NoneLeft as error:
                self._none_left(name, str(error))
            except WrongRoot as error:
                self._lost.setdefault(root, {})[file] = error.name
                self.errors += [error.others] if error.others else []
            except BadInput as error:
                # What is wrong with the recipe itself, such as its table of categories, every file says again.
                self.errors += [str(error)] if str(error) not in self.errors else []
        if part.split is not None and "train" in found:
            found |= self._divided(place, part, part.split, found.pop("train"), splits)
        return found

    def _none_left(self, name: str, why: str) -> None:
        """Several sets may have no question of a split, each for its own reason."""
        self.empty[name] = "; ".join([*filter(None, [self.empty.get(name)]), why])

    def _few(self, name: str) -> int | None:
        """Of each set, so that all of them have their part."""
        return None if self.few is None else -(-self.few[name] // len(self.recipe.data.sets))

    def _divided(
        self, place: str, part: QuestionSet, split: Split, samples: Sequence[Sample], splits: Sequence[str]
    ) -> dict[str, list[Sample]]:
        """Those sides of a training file that are asked for."""
        sides = divided(samples, split)
        if self.few is None:
            self.say(told(part.train, sides, split))
        asked = {name: side for name, side in sides.items() if name in splits}
        for name in [name for name, side in asked.items() if not side]:
            which = f"{place}.split.{name} {split.shares[name]:g}" if name in split.shares else f"{place}.split"
            self._none_left(
                name,
                f"{which}, seed {split.seed}, leaves {name} none of the {images_in(samples)} images of {part.train}; "
                "allowed: more images, other shares, another seed",
            )
            del asked[name]
        return {name: image_by_image(side, self._few(name)) for name, side in asked.items()}

    def _tell_mix(self) -> None:
        train, told_of = self.splits.get("train", []), Counter(each.set for each in self.splits.get("train", []))
        parts = [
            f"{part.train} {count(told_of[index], 'question')}, weight {number(part.weight)}: "
            f"{epoch_size(told_of[index], part.weight):,} an epoch"
            if told_of[index]
            else f"{part.train} has no question left, and nothing of it is trained on"
            for index, part in enumerate(self.recipe.data.sets)
        ]
        if train:
            self.say(f"a mix of {len(parts)} sets: {'; '.join(parts)}")


def cannot_unpack(home: Path, sets: Sequence[QuestionSet], splits: Sequence[str] = SPLITS) -> list[str]:
    """A sentence for each table here whose images could not be written, which is known before any image is read."""
    wrong: dict[str, None] = {}
    for part in sets:
        root = resolve_path(home, part.image_root)
        named = (getattr(part, name) for name in ("train", *splits))
        tables = [each for each in named if each and Path(each).suffix.lower() == ".parquet" and not hub_name(each)]
        for path in (resolve_path(home, each) for each in tables if root.is_dir()):
            for file in files_of(path) if path.exists() or list(path.parent.glob(path.name)) else ():
                try:
                    check_unpacking(file, root.resolve())
                except BadInput as error:
                    wrong[str(error)] = None
    return list(wrong)


def seen_in_epoch(samples: Sequence[Sample], weights: Sequence[float]) -> int:
    """How many questions an epoch of a mix sees."""
    there: Counter[Any] = Counter(sample.set for sample in samples)
    return sum(epoch_size(there[index], weight) for index, weight in enumerate(weights))
