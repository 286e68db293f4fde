"""Arms in fresh processes. Whatever ends this process ends them too."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from sameday.spec.errors import EXIT_OUT_OF_MEMORY, BadInput, DiskTooSmall
from sameday.tasks.base import Say
from sameday.tasks.registry import setup_of
from sameday.verify.arm import DIED, ERROR, PEER, Job


class Arms:
    """Runs lanes of arms side by side, the arms of a lane one after another."""

    def __init__(self, say: Say, ranks: int) -> None:
        self.say, self.ranks = say, ranks
        self._running: list[subprocess.Popen[bytes]] = []
        self._stopped = False

    def run(self, lanes: Sequence[dict[str, Job]]) -> None:
        with ThreadPoolExecutor(len(lanes)) as pool:
            try:
                # A signal may come while the first lane is under way and the others are not.
                for lane in [pool.submit(self._lane, lane) for lane in lanes]:
                    lane.result()
            except BaseException:  # an arm that failed, or a signal: the others are not waited for
                self._stopped = True
                for process in self._running:
                    process.kill()
                raise

    def _lane(self, jobs: dict[str, Job]) -> None:
        for name, job in jobs.items():
            self._arm(name, job)

    def _arm(self, name: str, job: Job) -> None:
        """Both parts of an arm. The kill is real; any other end before the last step is a failure."""
        job.out.mkdir(parents=True)
        for part in (1, 2) if job.trajectory else (1,):
            began = time.perf_counter()
            code, log = self._process(name, job, part)
            if name == "reference" and code == EXIT_OUT_OF_MEMORY:
                job = replace(job, plan=setup_of(job.recipe, job.home).low_memory(job.plan))
                code, log = self._process(name, job, part)
            killed = part == 1 and job.trajectory
            if (job.out / DIED).exists() != killed or (code != 0) != killed:
                raise _failed(name, code, f" in part {part}", log)
            (job.out / DIED).unlink(missing_ok=True)
            did = {
                (1, True): "gradients, trained until killed",
                (2, True): "resumed to the end",
                (1, False): "gradients",
            }
            self.say(f"{name}: {did[part, job.trajectory]}, {time.perf_counter() - began:.0f} s")

    def peer(self, name: str, job: dict[str, Any]) -> None:
        """Another trainer's arm, in one process that imports nothing of our data and models."""
        out, began = Path(job["out"]), time.perf_counter()
        out.mkdir(parents=True)
        (out / "job.json").write_text(json.dumps(job))
        log = out / "log"
        code = self._wait(["-m", "sameday.verify.arm", str(out / "job.json"), PEER], log)
        if code:
            raise _failed(name, code, "", log)
        did = "gradients, trained to the end" if job["trajectory"] else "gradients"
        self.say(f"{name}: {did}, {time.perf_counter() - began:.0f} s")

    def _process(self, name: str, job: Job, part: int) -> tuple[int, Path]:
        ranks = self.ranks if name == "plan" else 1
        job.write(job.out / "job.json")
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)) if ranks > 1 else ()
        log = job.out / f"part-{part}.log"
        return self._wait([*torchrun, "-m", "sameday.verify.arm", str(job.out / "job.json"), str(part)], log), log

    def _wait(self, arguments: Sequence[str], log: Path) -> int:
        with log.open("w") as file:
            process = subprocess.Popen([sys.executable, *arguments], stdout=file, stderr=subprocess.STDOUT)
            self._running.append(process)
            if self._stopped:
                process.kill()
            return process.wait()


def _failed(name: str, code: int, where: str, log: Path) -> BadInput:
    """Where an arm refused what it was given, its own sentence."""
    lines = log.read_text(errors="replace").splitlines()
    refused = [number for number, line in enumerate(lines) if line.startswith(ERROR)]
    kinds = {kind.code: kind for kind in (BadInput, DiskTooSmall)}
    if code in kinds and refused:
        own = "\n".join(lines[refused[-1] :]).removeprefix(ERROR)
        return kinds[code](f"verify: the arm '{name}' cannot run: {own}")
    tail = "\n".join(lines[-25:])
    return BadInput(f"verify: the arm '{name}' failed with exit code {code}{where}:\n{tail}")
