"""What reports are made of: the runs that their tests share, text that tries to be markup, files of other commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVIL = "<script>alert(1)</script>"
NASTY = "<img src=x onerror=alert(1)>"
"""Data text that would run if it were not text; the second can be a folder's name."""
OVERFLOWING = """
[...document.querySelectorAll('body *')].filter(e => {
  if (e.closest('svg') && e.tagName !== 'svg') return false;
  const box = e.getBoundingClientRect();
  if (!box.width || box.right <= innerWidth + 0.5 && box.left >= -0.5) return false;
  for (let up = e.parentElement; up; up = up.parentElement)
    if (['auto', 'scroll'].includes(getComputedStyle(up).overflowX)) return false;
  return true;
}).map(e => `${e.tagName}.${e.className}: ${e.textContent.slice(0, 60)}`)
"""
"""JavaScript: what of a page stands outside of the window and cannot be scrolled to."""

PHASES = {"wait": 0.01, "copy": 0.02, "tower": 0.05, "forward": 0.2, "loss": 0.01, "backward": 0.4, "other": 0.06}


@dataclass(frozen=True)
class Runs:
    home: Path
    finished: Path
    """Of questions: an automatic plan, skipped data, names that try to be markup."""
    stopped: Path
    """The same recipe under the plain plan, stopped after one step."""
    images: Path
    """Another recipe, of classification, validated twice."""
    bare: Path
    """Without validation."""


def profile(fingerprint: str) -> dict[str, Any]:
    return {
        "machine": {"device": "cuda", "name": f"Fast {EVIL}"},
        "fingerprint": fingerprint,
        "plan": {"share_images": True},
        "steps": 20,
        "seconds": {"mean": 0.75, "median": 0.74, "least": 0.7, "most": 0.8},
        "phases": PHASES,
        "workers": {"read": 0.003, "decode": 0.12, "resize": 0.04},
        "busy": 0.93,
        "memory_gib": 29.5,
        "floor": {
            "seconds": 0.4125,
            "bound": "arithmetic",
            "share": 0.55,
            "resources": {"arithmetic": 0.4125, "memory": 0.2, "copy": 0.01, "disk": None},
            "one_at_a_time": {"seconds": 0.6},
        },
        "bound_by": "launches",
        "advice": [
            {
                "remedy": "plan.cache features",
                "at_most": 1.08,
                "bound": "if 7.0% went away",
                "why": "the tower is 7% of the step",
            }
        ],
    }


def tune() -> dict[str, Any]:
    def timed(median: float, memory: float) -> dict[str, Any]:
        return {"seconds": {"median": median, "least": 0.9 * median, "most": 1.1 * median}, "memory_gib": memory}

    return {
        "machine": {"device": "cuda", "name": "Fast"},
        "minutes": 6,
        "plain": timed(6.0, 18.0) | {"finish_hours": [14.5, 15.5]},
        "best": timed(0.3, 30.0) | {"finish_hours": [0.6, 0.7], "plan": {"share_images": True}, "verdict": "rounding"},
        "ablation": [
            {
                "field": "share_images",
                "value": True,
                "claim": "statistical",
                "alone": timed(1.5, 20.0),
                "added": timed(1.25, 20.0),
                "left_out": timed(1.2, 33.0),
            },
            {
                "field": "rows",
                "value": {"packing": True, "max_questions": None},
                "claim": "rounding",
                "alone": {"seconds": None, "memory_gib": None, "failed": "out of memory"},
                "added": timed(0.6, 21.0),
                "left_out": None,
            },
            {"field": "workers", "value": 8, "claim": "bitwise", "alone": None, "added": timed(0.3, 30.0)},
        ],
        "not_tried": ["micro_batch: for another task"],
    }


def verdict(fingerprint: str) -> dict[str, Any]:
    return {
        "verdict": "rounding",
        "recipe": fingerprint,
        "plan": "plan.yaml",
        "against": "plain: one question at a time",
        "fields": {"share_images": {"against": False, "plan": True, "claim": "rounding"}},
        "precision": "bf16",
        "dropout": "none",
        "steps": 8,
        "ranks": 1,
        "differences": [],
        "largest": {"ratio_all": 1.05, "loss": 0.0123, "validation": None},
        "whose": {"loss": "", "ratio_all": ""},
        "groups": {"all": {"R": 1.05}, "q_proj": {"R": 1.2}},
        "limits": {"ratio_all": 1.35, "ratio_group": 1.8, "loss": 2e-5, "bf16_loss": 0.03},
        "seconds": 213.0,
    }
