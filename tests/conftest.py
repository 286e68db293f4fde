"""One thread and quiet libraries for every test, and the tiny models that many of them share."""

from __future__ import annotations

import os

# Set before torch and transformers are loaded, which read them once. Two threads slow tiny products down.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # A made-up model is not looked for on the Hub, again and again, where there is no network. Tests of downloads have
    # a server of their own.
    "HF_HUB_OFFLINE": "1",
}

import signal
import subprocess
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forks
import pytest
import spared
import torch
from hypothesis import settings

from sameday.hardware.signals import ASKING

# What the shared helpers assert is told with its values, as what a test asserts is.
SHARED = (
    "answered",
    "arms",
    "builds",
    "entries",
    "processes",
    "recordings",
    "reported",
    "sets",
    "several",
    "typed",
    "watched",
    "worlds",
)
pytest.register_assert_rewrite(*SHARED)

# Triton reads it when a kernel's module is loaded, here and in every process that a test starts.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    forks.use()

# Where a script starts pytest in the background, Ctrl-C is ignored there, and would be by every process that a test
# starts and asks to stop.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The files that take longest, which waits too, in this order. Below half a minute of a core it does not matter.
LONGEST = (
    "suite/test_cluster.py",
    "equivalence/test_faults.py",
    "equivalence/test_array.py",
    "kernels/test_bdh.py",
    "equivalence/test_gradients.py",
    "models/test_compile.py",
    "test_real_data.py",
    "verify/test_verify.py",
    "train/test_ranks.py",
    "train/test_ranks_images.py",
    "train/test_ranks_fail.py",
    "train/test_stop.py",
    "test_cli.py",
    "tasks/test_third_task.py",
    "equivalence/test_array_classify.py",
    "tasks/test_vqa_cache.py",
    "tune/test_trials.py",
    "suite/test_local.py",
    "train/test_kill.py",
    "train/test_diverged.py",
    "tasks/test_vqa_graphs.py",
    "verify/test_peer.py",
    "commands/test_eval.py",
    "models/test_flops.py",
    "commands/test_stages.py",
    "data/test_order.py",
    "evaluate/test_generate.py",
)

# A first example pays for imports and caches, which says nothing about the code under test. Each run draws others.
settings.register_profile("sameday", deadline=None, max_examples=30)
settings.register_profile("quick", deadline=None, max_examples=15)
settings.load_profile("sameday")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="skip each test where it would start a process or train")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        settings.load_profile("quick")
    worker = getattr(config, "workerinput", None)
    if worker is None:
        if config.getoption("numprocesses", None) and not (config.getoption("--quick") or torch.cuda.is_available()):
            forks.share()
    elif config.args_source is config.ArgsSource.TESTPATHS:
        config.args = _from_another_place(worker["workerid"], worker["workercount"])


def _from_another_place(worker: str, count: int) -> list[str]:
    """All files. Each worker collects them from a place of its own, so that in a fresh clone each file is compiled by
    one of them and read by the others. A folder stays whole: some versions of pytest do not find the fixtures of one
    that they come back to."""
    tests = Path(__file__).parent
    files = sorted(path.relative_to(tests) for path in tests.rglob("test_*.py"))
    rooms = [path.parts[0] for path in files]
    first = rooms.index(rooms[len(files) * int(worker.removeprefix("gw")) // count])
    return [str(tests / path) for path in (*files[first:], *files[:first])]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, then those with tests that compute for long: a worker takes whole files, and none
    should be left alone with a long one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    tests = Path(__file__).parent

    def place(item: pytest.Item) -> tuple[int, bool, Path]:
        name = item.path.relative_to(tests).as_posix()
        return LONGEST.index(name) if name in LONGEST else len(LONGEST), item.path not in slow, item.path

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """All that the tests import is loaded."""
    spared.use()


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """A command that a test calls sets variables of this process, as a plan says; the next test has none of them."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def quick(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --quick a test is skipped at the moment at which it would start a process or step an optimizer: no list of
    slow tests has to be kept."""
    if not request.config.getoption("--quick"):
        yield
        return

    def skip(*_: Any, **__: Any) -> None:
        pytest.skip("starts a process or trains: left to `make test`")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", skip)
        patch.setattr(subprocess.Popen, "__del__", lambda _: None)
        patch.setattr(BaseProcess, "start", skip)
        patch.setattr(torch.optim.AdamW, "step", skip)
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What audits learn about images, here and in every process that a test starts, stays out of the user's cache."""
    os.environ["SAMEDAY_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache-home"))


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of a tiny model of each family. Not to be written to."""
    import worlds

    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    return {family: worlds.write_tiny(root / family, family) for family in (*worlds.FAMILIES, *worlds.SQUARE)}


@pytest.fixture(scope="session")
def tiny_qwen3(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["qwen3_vl"]


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for tests of what surrounds a step, which a third layer would only make longer. Not to be written to."""
    import worlds

    torch.set_num_threads(1)
    return worlds.write_tiny(tmp_path_factory.mktemp("two-layers"), text={"num_hidden_layers": 2})


@pytest.fixture(scope="session")
def tiny_qwen25(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["qwen2_5_vl"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the arrays of plans took, which are the longest of the comparisons."""
    reports = [r for kind in terminalreporter.stats.values() for r in kind if isinstance(r, pytest.TestReport)]
    array = [r for r in reports if "equivalence/test_array" in r.nodeid]
    if array:
        terminalreporter.write_line(f"pairwise arrays of plans: {sum(r.duration for r in array):.0f} s of one process")


@pytest.fixture(autouse=True)
def heard_signals() -> Iterator[None]:
    """A shell that starts tests in the background has them ignore Ctrl-C, and a batch system its warnings: what they
    start would ignore these too. SIGHUP stays as it is, for tests under nohup."""
    ignored = [n for n in ASKING if n.name != "SIGHUP" and signal.getsignal(n) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def own_signals() -> Iterator[None]:
    """A run that leaves early keeps its signal handlers; the tests that follow have theirs again. Under nohup, SIGHUP
    is not ignored by the test alone that sends it."""
    before = {number: signal.getsignal(number) for number in ASKING}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
