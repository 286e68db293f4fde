"""A catalogue of mistakes that people make when they speed a training up, each planted in a plan that is otherwise the
same as the plain one. What `sameday verify` is worth is how many of them it finds, and whether it says where."""

from __future__ import annotations

import faults_at_the_end
import faults_in_the_model
import faults_in_training
import faults_in_vision_bdh
from catalogue import FAULTS, SHARED, Fault

assert faults_at_the_end and faults_in_the_model and faults_in_training and faults_in_vision_bdh, (
    "they are there for what they plant"
)

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
):
    FAULTS[_fault.name] = _fault

RUNNABLE = {name: fault for name, fault in FAULTS.items() if fault.plant is not None}
WAITING = {name: fault for name, fault in FAULTS.items() if fault.plant is None}
