"""What tests of several ranks share: a world of theirs, and with which codes they and torchrun leave."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

from processes import finished, write_run

TORCHRUN_FAILED = 1
"""What torchrun itself leaves with, whatever code its processes left with."""

DOCS = Path(__file__).parents[1] / "docs"
SETS = ("plan.save_steps=2", "plan.log_steps=1", "plan.device=cpu")
AHEAD = ("plan.save_steps=4", "plan.log_steps=1", "plan.optimizer_impl=fused")
"""What one rank meets is known to all a step later: none may be alone in a sum."""

DRIVER = """\
\"\"\"`sameday train` on a machine where rank {rank} has no room for micro-batches above {limit} tokens, and where a
step is launched before the end of the last is known.\"\"\"
import os

import torch

from sameday.cli import main
from sameday.tasks.vqa.task import VqaTask
from sameday.train import commit

commit.AHEAD["cpu"] = 1
plain = VqaTask.loss_sum


def loss_sum(self, batch, step):
    if os.environ["RANK"] == "{rank}" and batch.tokens.numel() > {limit}:
        raise torch.OutOfMemoryError("planted")
    return plain(self, batch, step)


VqaTask.loss_sum = loss_sum
main()
"""


def write_home(folder: Path, model: Path) -> Path:
    """Epsilon is above rounding, which AdamW would otherwise blow up where a gradient is nearly zero."""
    return write_run(folder, model, num_epochs=2, lora={"r": 4, "alpha": 8}, eps=1e-4)


def finished_alone(folder: Path, model: Path) -> Path:
    """With a finished run of one rank: `alone`."""
    write_home(folder, model)
    finished(folder, *SETS, out="alone")
    return folder


def exit_code(stderr: str) -> int:
    """Of the rank that was gone first, as torchrun reports it. The others leave with the same code, unless torchrun's
    signal meets them on their way out."""
    codes = [int(code) for code in re.findall(r"exitcode\s*:\s*(-?\d+) \(pid", stderr)]
    assert len(codes) == 2 and -signal.SIGKILL not in codes, stderr
    return codes[-1]


def documented_code(home: Path, run: str) -> int:
    """What the documented line of a batch script leaves with, where torchrun has failed."""
    (line,) = re.findall(r"^rm .* (\|\| exit .*)$", (DOCS / "runs.md").read_text(), re.MULTILINE)
    line = f"false {line.replace('run/stopped.json', f'{run}/stopped.json')}".replace("python", sys.executable)
    return subprocess.run(["bash", "-c", line], cwd=home).returncode
