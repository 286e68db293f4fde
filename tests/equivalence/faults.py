"""A catalogue of mistakes that people make when they speed a training up, each planted in a plan that is otherwise the
same as the plain one. What `sameday verify` is worth is how many of them it finds, and whether it says where."""

from __future__ import annotations

import faults_at_the_end
import faults_in_recording
import faults_in_the_cache
import faults_in_the_heads
import faults_in_the_model
import faults_in_training
import faults_in_vision_bdh
from catalogue import FAULTS as FAULTS

assert faults_at_the_end and faults_in_the_cache and faults_in_the_model, "they are there for what they plant"
assert faults_in_recording and faults_in_training and faults_in_vision_bdh and faults_in_the_heads, (
    "they are there for what they plant"
)
