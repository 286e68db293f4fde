"""The run folder: what was asked for, how it ran, what was measured. A kill leaves no file half written."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from sameday.record.lock import Lock
from sameday.record.manifest import fault
from sameday.record.metrics import sound_metrics, told
from sameday.record.room import AGAIN, room_for
from sameday.record.stopped import STOPPED, give_room_back, keep_room, note_stopped
from sameday.record.times import TIMES
from sameday.spec.document import dump_yaml
from sameday.spec.errors import BadInput, RunStopped
from sameday.spec.identity import as_before
from sameday.spec.load import load_recorded_plan, load_recorded_recipe, resolve_path
from sameday.spec.plan import Plan
from sameday.spec.reading import JSON, read_file
from sameday.spec.recipe import Recipe, differences
from sameday.spec.words import first_names, tell
from sameday.spec.writing import remove_remains, write_text

DISTRIBUTIONS = (
    *("sameday", "torch", "torchvision", "triton", "transformers", "tokenizers", "peft", "accelerate"),
    *("bitsandbytes", "safetensors", "numpy", "pillow", "pydantic"),
)
"""Packages whose versions may decide what a run computes."""
IMAGES = "images.json"
"""Which images a run was trained and validated on, by content."""
BESIDE = frozenset({"tensorboard", "stages"})
"""Folders of a run in which nothing was trained yet."""
LOGS = frozenset({".log", ".out", ".err"})
"""Endings of files that may lie in a run's folder before it starts: what it prints is sent there."""
STAGES = "stages.json"
"""What became of each stage of a run in stages, in order."""


def stage_folders(path: Path) -> list[Path]:
    """The folders of the stages of a run that are there, in order; none where it has no stages."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        listed = [str(each["folder"]) for each in json.loads(read_file(path / STAGES, JSON))["stages"]]
        inside = [path / folder for folder in listed if re.fullmatch(r"stages/\d+-[\w.-]+", folder)]
        return [folder for folder in inside if (folder / "recipe.yaml").is_file()]
    return []


def begun(folder: Path) -> bool:
    """Whether a step of a run was trained, or of one of its stages."""
    trained = (folder / "checkpoints").exists() or bool(sound_metrics(folder / "metrics.jsonl")[0])
    return trained or any(map(begun, stage_folders(folder)))


def default_path(recipe: Recipe) -> Path:
    """Where a run lives without --out: the same recipe finds it again, also where an earlier release, which took
    fingerprints otherwise, named the folder."""
    usual = Path("runs") / f"{recipe.name}-{recipe.fingerprint}"
    if (usual / "recipe.yaml").exists():
        return usual
    named = re.compile(re.escape(recipe.name) + "-[0-9a-f]{12}")
    earlier = [path for path in sorted(usual.parent.glob(f"{recipe.name}-*")) if named.fullmatch(path.name)]
    same = [path for path in earlier if _fingerprint_in(path) == recipe.fingerprint]
    return max(same, key=_last_start, default=usual)


def as_begun(recipe: Recipe, out: Path | None) -> Recipe:
    """The recipe as an earlier release understood it, where that began the run that this one would go on with: the same
    command must not become another model halfway."""
    earlier = as_before(recipe)
    if earlier is recipe or _fingerprint_in(out or default_path(earlier)) != earlier.fingerprint:
        return recipe
    return earlier


def _fingerprint_in(folder: Path) -> str | None:
    """Of the recipe that a folder's run has, read as recipes are read now; None where there is none to be read."""
    try:
        return load_recorded_recipe(folder / "recipe.yaml").fingerprint
    except (BadInput, OSError):
        return None


def _last_start(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return (folder / "environment.json").stat().st_mtime
    return 0.0


def refuse_other_recipe(path: Path, recipe: Recipe) -> None:
    """BadInput where a run folder is of another recipe than this."""
    there = load_recorded_recipe(path / "recipe.yaml")
    if there.fingerprint != recipe.fingerprint:
        listed = "\n".join(f"  {line}" for line in differences(there, recipe))
        raise BadInput(
            f"{path}: holds a run of another recipe ({there.fingerprint} there, {recipe.fingerprint} here):\n{listed}\n"
            "Choose another --out."
        )


def run_files(folder: Path) -> list[Path]:
    """What a run writes into its folder besides weights, there already or not; nothing where there is no folder."""
    if not os.path.isdir(folder):
        return []
    asked = ("recipe.yaml", "plan.yaml")
    told = ("environment.json", "choices.json", "data.json", IMAGES, "skipped.json")
    measured = ("metrics.jsonl", "metrics-damaged.jsonl", TIMES, "eval.json", STOPPED, STAGES)
    scores = (*folder.glob("eval-*.json"), *folder.glob("scores-*.json"))
    return [*(folder / name for name in (*asked, *told, *measured)), *scores]


def _as_json(obj: Any) -> str:
    return json.dumps(plain(obj), indent=2, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """Plain JSON data. NaN and infinities become null, because JSON has no word for them."""
    if hasattr(value, "item") and not isinstance(value, float):  # scalars of numpy and torch
        value = value.item()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl. BadInput where a line of it is none."""
    records, problems = sound_metrics(path)
    if problems:
        raise BadInput(problems[0])
    return records


def versions(distributions: Iterable[str]) -> dict[str, str]:
    """Of those of these packages that are installed."""
    found = {}
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _environment(recipe_dir: Path) -> dict[str, Any]:
    installed = versions(DISTRIBUTIONS)
    return {
        "sameday": installed.get("sameday"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "versions": installed,
        "recipe_dir": str(recipe_dir.absolute()),
    }


class RunFolder:
    """One run on disk. `open` to write to it, alone; `read` to look at it at any time."""

    def __init__(self, path: Path, recipe: Recipe, plan: Plan, recipe_dir: Path) -> None:
        self.path, self.recipe, self.plan, self.recipe_dir = path, recipe, plan, recipe_dir
        self.resumed = False
        self.spent: dict[str, float] = {}  # on the parts of this process's start
        self._made = self._fresh = False
        self._lock: Lock | None = None
        self._about: dict[str, Any] | None = None
        self._file: IO[str] | None = None

    @classmethod
    def open(cls, path: Path, recipe: Recipe, plan: Plan, recipe_dir: Path) -> RunFolder:
        """Start a run here, or go on with it. BadInput if another recipe or process has the folder."""
        folder = cls(path, recipe, plan, recipe_dir.absolute())
        folder._made = not path.exists()
        try:
            with room_for("a run's files", path, 2**14, AGAIN):
                path.mkdir(parents=True, exist_ok=True)
            folder._fresh = not any(path.iterdir())
        except OSError as error:
            raise BadInput(f"{path}: cannot be a run folder: {error.strerror}") from None
        folder._lock = Lock(path)
        try:
            folder._check_inputs()
            folder._start()
        except BaseException as error:
            folder.discard()
            if isinstance(error, RunStopped) and not folder._fresh:  # no room for what a run that goes on records
                folder.stopped(str(error), error.code)
            folder.close()
            raise
        return folder

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        """Look at a run, finished or not, without touching it."""
        for name in ("recipe.yaml", "plan.yaml", "environment.json"):
            if not (path / name).is_file():
                raise BadInput(f"{path}: is not a run folder: it has no {name}")
        recipe = load_recorded_recipe(path / "recipe.yaml")
        plan = load_recorded_plan(path / "plan.yaml", recipe)
        return cls(path, recipe, plan, Path(_read_environment(path / "environment.json")["recipe_dir"]))

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def result(self) -> Path:
        """The finished weights; there once the run is done. Where an earlier release finished it, in its folder."""
        usual, earlier = self.path / self.recipe.result, self.recipe.earlier_result
        if earlier is not None and not usual.is_dir() and (self.path / earlier).is_dir():
            return self.path / earlier
        return usual

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Every record so far."""
        return read_metrics(self.metrics_path)

    def append(self, record: dict[str, Any]) -> None:
        """Add one record to the metrics."""
        if self._file is None:
            if self.metrics_path.exists() and not self.metrics_path.read_bytes().endswith(b"\n"):
                self._keep(sound_metrics(self.metrics_path)[0])  # otherwise this record would go on a torn line
            self._file = open(self.metrics_path, "a", encoding="utf-8")  # noqa: SIM115 (open while the run is)
        line = json.dumps(plain(record), allow_nan=False) + "\n"
        before = os.fstat(self._file.fileno()).st_size
        with room_for("the record of a step", self.path, len(line), AGAIN):
            try:
                self._file.write(line)
                self._file.flush()
            except OSError:
                self._close_file()
                os.truncate(self.metrics_path, before)  # no half of a record
                raise

    def rewind(self, step: int, say: Callable[[str], None] = tell) -> None:
        """Forget the records after this step: a resumed run goes through those steps again. Lines that are no records
        are no reason not to train: they are moved aside."""
        records, problems = sound_metrics(self.metrics_path)
        if problems:
            aside = self.path / "metrics-damaged.jsonl"
            aside.write_bytes(self.metrics_path.read_bytes())
            for line in told(self.metrics_path, problems):
                say(f"{line}; left out, the file as it was is {aside.name}")
        self._keep([record for record in records if record["step"] <= step])

    def write_json(self, name: str, obj: Any, then: str = AGAIN) -> Path:
        """Write one file of the folder as JSON, whole or not at all; `then` is what to do where the disk is full."""
        self._write(name, _as_json(obj), then)
        return self.path / name

    def _write(self, name: str, text: str, then: str = AGAIN) -> None:
        with room_for(name, self.path, len(text.encode()), then):
            write_text(self.path / name, text)

    def stopped(self, why: str, code: int) -> None:
        """Note what ended the run before its last step, for whoever looks at it later."""
        note_stopped(self.path, why, code)

    def discard(self) -> None:
        """Take back what was written for a run that could not begin. One that has begun stays."""
        if not self._fresh or self.checkpoints.exists() or self.metrics_path.exists():
            return
        for path in run_files(self.path):
            path.unlink(missing_ok=True)
        self._release()
        if self._made:
            with contextlib.suppress(OSError):  # someone put something there meanwhile
                self.path.rmdir()

    def close(self) -> None:
        """Let another process have the folder."""
        self._close_file()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            give_room_back(self.path)
            self._lock.release()

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what could not be written is tried once more, in vain
                self._file.close()
            self._file = None

    def _keep(self, records: list[dict[str, Any]]) -> None:
        self._close_file()
        if records or self.metrics_path.exists():
            self._write(self.metrics_path.name, "".join(json.dumps(record) + "\n" for record in records))

    def _check_inputs(self) -> None:
        """A run has a folder of its own, and its result takes the place of a folder that has its name."""
        ours = (self.path / "environment.json").exists() or begun(self.path)
        own = [name for name in ("recipe.yaml", "plan.yaml") if (self.path / name).exists()]
        if own and not ours:
            raise BadInput(
                f"{self.path}: its {' and its '.join(own)} would be written over: no run wrote "
                f"{'it' if len(own) == 1 else 'them'}; choose another --out, such as {self.path / 'run'}"
            )
        result = Path(os.path.realpath(self.result))
        for written in self.recipe.paths():
            path = Path(os.path.realpath(resolve_path(self.recipe_dir, written)))
            if path.is_relative_to(result):
                raise BadInput(
                    f"{self.path}: the finished {result.name}/ would be written over {written!r}, "
                    "which the recipe reads; choose another --out"
                )
        if not ours and (foreign := self._foreign()):
            raise BadInput(
                f"{self.path}: is no run's folder and is not empty: it holds {first_names(foreign, 3)}; allowed: a "
                f"folder that is empty, new, or a run's, such as {self.path / 'run'}"
            )

    def _foreign(self) -> list[str]:
        """What lies here besides what a killed start left, and what a shell or a scheduler writes."""
        left = {path.name for path in run_files(self.path)} | BESIDE
        names = (path.name for path in self.path.iterdir() if path.suffix not in LOGS)
        return sorted(name for name in names if name not in left and not name.startswith("."))

    def _start(self) -> None:
        remove_remains(self.path)
        remove_remains(self.checkpoints)
        (self.path / STOPPED).unlink(missing_ok=True)
        recipe_path, environment_path = self.path / "recipe.yaml", self.path / "environment.json"
        environment = _environment(self.recipe_dir)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        history: list[Any] = []
        environment["started"] = now
        if recipe_path.exists():
            if begun(self.path):
                refuse_other_recipe(self.path, self.recipe)
            # A folder in which nothing was trained yet, for an error came first, is free to take.
            self.resumed = load_recorded_recipe(recipe_path).fingerprint == self.recipe.fingerprint
        if self.resumed and environment_path.exists():
            before = _read_environment(environment_path)
            history, environment["started"] = before.get("history", []), before.get("started", now)
        command = shlex.join(sys.argv)
        start = {"time": now, "command": command, "plan": self.plan.model_dump(mode="json")}
        self._about = environment | {"command": command, "history": [*history, start]}
        if not self.resumed or self.finished_scores() is None:
            self.begin()

    def begin(self) -> None:
        """Record how it is run from here on; once. A finished run that is only looked at stays as it is."""
        about, self._about = self._about, None
        if about is None:
            return
        with room_for("a run's files", self.path, 2**14, AGAIN):
            keep_room(self.path)
            # First, because it tells a run's folder from one in which somebody keeps a recipe and a plan.
            write_text(self.path / "environment.json", _as_json(about))
            write_text(self.path / "plan.yaml", dump_yaml(self.plan))
            # Last, because it is what makes this a run folder.
            if not self.resumed:
                write_text(self.path / "recipe.yaml", dump_yaml(self.recipe))

    @property
    def begun(self) -> bool:
        """Whether this process has recorded itself here."""
        return self._about is None

    def finished_scores(self) -> dict[str, float] | None:
        """Of a run that has its weights already, whole; None where something is left to do."""
        if fault(self.result) is not None:
            return None
        try:
            scores = json.loads((self.path / "eval.json").read_text())["val"]
            return {name: math.nan if score is None else score for name, score in scores.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def _read_environment(path: Path) -> dict[str, Any]:
    try:
        environment = json.loads(read_file(path, JSON))
        environment["recipe_dir"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadInput(f"{path}: is not what a run wrote; move the folder away or choose another --out") from None
    return dict(environment)
