"""A folder with suites, and nothing of it that still runs when its test is over."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from scenarios import Home

from sameday.spec.registry import plugin
from sameday.suite.state import holders


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    made = Home(tmp_path)
    for name in ("PYTHONPATH", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, made.environment[name])
    monkeypatch.syspath_prepend(made.site)
    plugin.cache_clear()  # the stub's task is installed from here on
    yield made
    plugin.cache_clear()
    locks = [*tmp_path.glob("*/runner.lock"), *tmp_path.glob("*/jobs/*/lock")]
    for pid in dict.fromkeys(pid for lock in locks for pid in holders(lock) if pid != os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
