"""predictions.jsonl: one line per question, written as answers come. What a kill leaves is kept by the next start, and
the finished file is in the data's order, whatever happened on the way."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from sameday.evaluate.prediction import Prediction
from sameday.record.folder import plain
from sameday.record.room import room_for
from sameday.spec.writing import remove_remains, write_text

PREDICTIONS, SETTINGS, METRICS = "predictions.jsonl", "settings.json", "metrics.json"
AGAIN = "Make room and run again: the answers so far are kept."

Score = Callable[[Prediction], Mapping[str, float]]


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with room_for(path.name, path.parent, len(text.encode()), AGAIN):
        write_text(path, text)


def read_predictions(path: Path) -> list[Prediction]:
    """Every whole line; others, such as the last one that a kill cut, are passed over."""
    if not path.exists():
        return []
    made = (_prediction(line) for line in path.read_bytes().split(b"\n"))
    return [prediction for prediction in made if prediction is not None]


def _prediction(line: bytes) -> Prediction | None:
    try:
        record = json.loads(line)
        prediction = Prediction(**{field.name: record[field.name] for field in fields(Prediction)})
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    texts = (prediction.question, prediction.prompt, prediction.answer, prediction.prediction)
    sound = isinstance(prediction.id, int) and isinstance(prediction.tokens, int)
    return prediction if sound and all(isinstance(text, str) for text in texts) else None


class PredictionFile:
    """The file in its folder, beside the settings under which its answers were made."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], score: Score) -> None:
        self.folder, self.path, self.settings, self.score = folder, folder / PREDICTIONS, dict(settings), score

    def begin(self, say: Callable[[str], None]) -> list[Prediction]:
        """What there is already. Answers of other settings are not mixed in: they are removed, and it is said."""
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_remains(self.folder)
        there = _settings(self.folder / SETTINGS)
        kept = read_predictions(self.path)
        if there != self.settings:
            if kept:
                say(f"{self.path}: its {len(kept)} answers {_why(there or {}, self.settings)}; they are begun anew")
            self.path.unlink(missing_ok=True)
            (self.folder / METRICS).unlink(missing_ok=True)
            write_json(self.folder / SETTINGS, self.settings)
            kept = []
        self._write(kept)
        return kept

    def append(self, predictions: Iterable[Prediction]) -> None:
        """Whole lines, or none of them."""
        text = "".join(map(self._line, predictions)).encode()
        before = self.path.stat().st_size
        with room_for("answers", self.folder, len(text), AGAIN), open(self.path, "ab", buffering=0) as file:
            try:
                assert file.write(text) == len(text)
                os.fsync(file.fileno())
            except OSError:
                os.truncate(self.path, before)
                raise

    def finish(self, predictions: Iterable[Prediction]) -> None:
        """All of them, in the order of the data."""
        self._write(predictions)

    def _write(self, predictions: Iterable[Prediction]) -> None:
        text = "".join(map(self._line, predictions))
        with room_for("answers", self.folder, len(text), AGAIN):
            write_text(self.path, text)

    def _line(self, prediction: Prediction) -> str:
        record = {**asdict(prediction), "scores": plain(dict(self.score(prediction)))}
        return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


def _settings(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _why(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    other = sorted(name for name in {*there, *here} if name not in here or there.get(name, here[name]) != here[name])
    if other:
        return f"were made with other settings ({', '.join(other)})"
    return f"do not say with which {', '.join(sorted(here.keys() - there.keys()))} they were made"
