"""Evaluation of questions: the same scores whoever prepares the micro-batches, by workers that may stay."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import worlds

from sameday.hardware.ranks import Ranks
from sameday.spec.plan import Plan


def test_kept_workers_give_the_same_scores(tmp_path: Path, tiny_qwen3: Path) -> None:
    """They stay for the next evaluation, and make way when training had to lower the budget."""
    worlds.write_world(tmp_path, 5, counts=(5, 3))
    recipe = worlds.tiny_recipe(tiny_qwen3)
    plain = worlds.make_task(tmp_path, recipe, Plan(max_questions=None))
    kept = worlds.make_task(tmp_path, recipe, Plan(max_questions=None, workers=1, keep_workers=True))
    before = set(multiprocessing.active_children())
    processes = []
    for budget in (None, None, 120, 120, None):
        assert kept.evaluate("val", Ranks(), budget) == plain.evaluate("val", Ranks(), budget)
        (worker,) = set(multiprocessing.active_children()) - before
        processes.append(worker.pid)
    assert processes[0] == processes[1] and processes[2] == processes[3]
    assert len(set(processes)) == 3
    kept._rounds._kept["val"].close()
    assert set(multiprocessing.active_children()) <= before
