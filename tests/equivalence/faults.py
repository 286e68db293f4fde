"""A catalogue of mistakes that people make when they speed a training up, each planted in a plan that is otherwise the
same as the plain one. What `sameday verify` is worth is how many of them it finds, and whether it says where."""

from __future__ import annotations

import faults_at_the_end
import faults_in_the_model
import faults_in_training
from catalogue import FAULTS, SHARED, Fault

assert faults_at_the_end and faults_in_the_model and faults_in_training, "they are there for what they plant"

# Parts that are not there yet

for _fault in (
    Fault(
        "a stale cache entry",
        "An image was changed, and what the cache holds for it was not.",
        "cache",
        "images",
        SHARED,
        waits_for="sameday.cache",
    ),
    Fault(
        "residual before the LayerNorm",
        "Vision-BDH adds its residual on the other side of a LayerNorm.",
        "models.vision_bdh",
        "gradient",
        {},
        waits_for="sameday.models.vision_bdh",
    ),
    Fault(
        "softmax in linear attention",
        "Vision-BDH's attention, which has none, gets a softmax.",
        "models.vision_bdh",
        "gradient",
        {},
        waits_for="sameday.models.vision_bdh",
    ),
):
    FAULTS[_fault.name] = _fault

RUNNABLE = {name: fault for name, fault in FAULTS.items() if fault.plant is not None}
WAITING = {name: fault for name, fault in FAULTS.items() if fault.plant is None}
