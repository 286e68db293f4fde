"""How fast a training step could be here at best, and how near a plan comes to that."""

import os


def quiet() -> None:
    """PyTorch's profiler writes lines about itself to the terminal; 6 is above every kind of them. Its library reads
    this once, when it is first used."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
