"""What libraries write at each call and nobody reads, or read again and again: for a tiny model it takes a tenth of a
whole training."""

from __future__ import annotations

import gc
import importlib.metadata
import sys
from functools import cache


def use() -> None:
    """In this process from now on, for the libraries that are loaded by now."""
    if "transformers" in sys.modules:
        from transformers.configuration_utils import PreTrainedConfig

        # Each time that a configuration is read it is written out several times, for messages that are not shown.
        PreTrainedConfig.__repr__ = object.__repr__
    if "peft" in sys.modules:
        import jinja2

        jinja2.Template = cache(jinja2.Template)  # of the card that PEFT writes beside every adapter
    # Versions are in the record of each run, and each is read from a file.
    importlib.metadata.version = cache(importlib.metadata.version)
    # What is loaded stays: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
