"""Real processes with gloo: ranks wait for the first one's work however long it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SLOW_FIRST = """\
from datetime import timedelta
import os
import time

import torch
from torch.distributed.distributed_c10d import _get_default_group, _set_pg_timeout

from sameday.hardware.ranks import SUM_TIMEOUT, WAIT_TIMEOUT, Ranks

SECONDS = 1
ranks = Ranks.join("cpu")
for group, allowed in ((_get_default_group(), SUM_TIMEOUT), (ranks._waiting, WAIT_TIMEOUT)):
    assert group._get_backend(torch.device("cpu")).options._timeout == allowed
_set_pg_timeout(timedelta(seconds=SECONDS))  # of the default group, once all have joined: they start seconds apart


def slow():
    time.sleep(2 * SECONDS)
    return ranks.rank


assert ranks.from_first(slow) == 0
if ranks.first:
    slow()
ranks.wait()
assert ranks.gather(slow() if ranks.first else ranks.rank) == [0, 1]
assert ranks.sum_(torch.ones(1)).item() == 2
try:
    if ranks.first:
        slow()
    ranks.sum_(torch.ones(1))
except RuntimeError as error:
    print("rank", ranks.rank, "gave up:", str(error).splitlines()[0])
print("rank", ranks.rank, "is through", flush=True)
os._exit(0)  # gloo's threads still wait for the sum that was given up, and would abort the process
"""


def torchrun(script: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    options = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return subprocess.run([sys.executable, *options, str(script)], capture_output=True, text=True, timeout=120)


def test_ranks_wait_for_the_first_longer_than_for_a_sum(tmp_path: Path) -> None:
    """The time-out of sums is a second here, and holds; what the first rank does alone takes longer."""
    script = tmp_path / "slow_first.py"
    script.write_text(SLOW_FIRST)
    done = torchrun(script, 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is through") == 2
    assert "rank 1 gave up" in done.stdout, "a sum is not waited for that long"
