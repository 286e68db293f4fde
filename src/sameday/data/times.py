"""What building a micro-batch took, stage by stage. It travels with the micro-batch: workers are other processes, and
only what they send is known of them."""

from __future__ import annotations

from typing import NamedTuple


class Times(NamedTuple):
    """Seconds in whichever process built it. Workers build side by side: they may add up to more than a step took."""

    read: float = 0.0
    decode: float = 0.0
    resize: float = 0.0
