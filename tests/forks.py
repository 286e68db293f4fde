"""Processes that tests start, without the seconds in which each would load the same libraries: one that has loaded them
is forked. Each has its own id, session, signals, streams and exit code all the same.

Started from nothing, as always, is what may notice a difference: `python -c`, another environment (but for variables
that are read at run time, and folders of modules, whose `sitecustomize` is loaded too), and everything on a machine
with a GPU, which no fork can use."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import inspect
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import spared

LOADED = (
    "peft",
    "torch._dynamo",
    "torch.distributed.run",
    "torch.utils.tensorboard",
    "transformers.models.qwen2_vl.modeling_qwen2_vl",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "sameday.cli",
    "sameday.commands.launch",
    "sameday.profile.command",
    "sameday.report.page",
    "sameday.suite.running.execute",
    "sameday.suite.running.local",
    "sameday.suite.times.measure",
    "sameday.tasks.classify.task",
    "sameday.tasks.vqa.task",
    "sameday.train.loop",
    "sameday.tune.command",
    "sameday.verify.arm",
    "sameday.verify.command",
)
MODULES = (
    "sameday",
    "sameday.demo.patterns",
    "sameday.suite.running.execute",
    "sameday.suite.times.measure",
    "sameday.verify.arm",
    "torch.distributed.run",
)
"""What `python -m` may name."""
AT_RUN_TIME = (
    *("GROUP_", "LOCAL_", "MASTER_", "PYTEST_", "RANK", "ROLE_", "SAMEDAY_", "SLURM_", "TORCHELASTIC_", "WORLD_SIZE"),
    *(
        "COLUMNS",
        "CUBLAS_",
        "CUDA_VISIBLE_DEVICES",
        "KMP_",
        "LINES",
        "PYTHONUNBUFFERED",
        "TERM",
        "TMPDIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCH_NCCL_",
        "TRITON_CACHE_DIR",
    ),
)
"""How variables begin that no library reads while it is loaded, and those that libraries set themselves."""

SHARED = "SAMEDAY_TEST_FORKS"
"""The variable with the address of the process that is forked for all workers."""

_execute_child = subprocess.Popen._execute_child
_server: dict[str, Any] = {}
"""The process that is forked: the environment it has, and, once the first one was asked for, its address."""


def use() -> None:
    """In this process from now on, and in those that are forked for it."""
    _server["environment"] = dict(os.environ)
    if SHARED in os.environ:
        _server["address"] = os.environ[SHARED]
    subprocess.Popen = Forked


def share() -> None:
    """With the workers that this process will start: libraries are loaded once for all of them."""
    _start()
    os.environ[SHARED] = _server["address"]


class Forked(subprocess.Popen):
    _connection: socket.socket | None = None

    def _execute_child(self, *args: Any) -> None:
        given = inspect.signature(_execute_child).bind(self, *args).arguments
        request = _request(given)
        if request is None:
            _execute_child(self, *args)
            return
        if "address" not in _server:
            _start()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(_server["address"])
        own = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        streams = [inherited if stream == -1 else stream for inherited, stream in enumerate(own)]
        socket.send_fds(self._connection, [json.dumps(request).encode()], [*streams, *given["pass_fds"]])
        self.pid, self._child_created = int(self._connection.recv(64)), True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[pipe] for pipe in pipes))

    def _waitpid(self, pid: int, flags: int) -> tuple[int, int]:
        """As that of `os`, which knows children only."""
        try:
            status = int(self._connection.recv(64, socket.MSG_DONTWAIT if flags & os.WNOHANG else 0))
        except BlockingIOError:
            return 0, 0
        self._connection.shutdown(socket.SHUT_WR)
        self._connection.recv(64)  # until its id may be another's
        return pid, status

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._connection is None:
            return super()._try_wait(wait_flags)
        return self._waitpid(self.pid, wait_flags)

    def _internal_poll(self, _deadstate: int | None = None, **more: Any) -> int | None:
        if self._connection is not None:
            more["_waitpid"] = self._waitpid
        return super()._internal_poll(_deadstate, **more)


def _request(given: dict[str, Any]) -> dict[str, Any] | None:
    """What the process that is forked is told; None where one must be started from nothing."""
    args = given["args"]
    if isinstance(args, str | bytes | os.PathLike) or given["preexec_fn"]:
        return None
    program, *words = map(os.fspath, args)
    words = words[words[:1] == ["-u"] :]
    if program != sys.executable or not words:
        return None
    if not (words[0].endswith(".py") or (words[0] == "-m" and words[1] in MODULES)):
        return None
    environment = dict(os.environ if given["env"] is None else given["env"])
    folders = _added_folders(environment)
    if folders is None:
        return None
    home = os.fspath(given["cwd"] or os.getcwd())
    return {"words": words, "home": home, "environment": environment, "folders": folders}


def _added_folders(environment: dict[str, str]) -> list[str] | None:
    """The folders that this environment puts before those of modules; None where it may change what is loaded."""
    known = _server["environment"]
    changed = {name for name in environment.keys() | known.keys() if environment.get(name) != known.get(name)}
    if any(name != "PYTHONPATH" and not name.startswith(AT_RUN_TIME) for name in changed):
        return None
    asked, there = environment.get("PYTHONPATH", ""), known.get("PYTHONPATH", "")
    added = [folder for folder in asked.removesuffix(there).split(os.pathsep) if folder]
    return added if asked.endswith(there) else None


def _start() -> None:
    _server["address"] = str(Path(tempfile.mkdtemp(prefix="forks-"), "socket"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(_server["address"])
        listener.listen(64)
        here = str(Path(__file__).parent)
        code = f"import sys; sys.path.insert(0, {here!r}); import forks; sys.path.pop(0); forks.serve()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(_server), str(listener.fileno())],
            stdin=subprocess.PIPE,
            env=_server["environment"],
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    _server["process"] = process  # its standard input is closed with this one's end


def serve() -> None:
    """Until the process that started this one is gone."""
    _server.update(json.loads(sys.argv[1]))
    subprocess.Popen = Forked  # before torchrun takes it by its name
    for name in LOADED:
        importlib.import_module(name)
    spared.use()
    listener = socket.socket(fileno=int(sys.argv[2]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for a fork
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listener.close()
        told, streams, *_ = socket.recv_fds(connection, 1 << 20, 32)
        pid = os.fork()
        if pid:
            for stream in streams:
                os.close(stream)
            _wait_for(pid, connection)
            os._exit(0)
        connection.close()
        code: Any = 0
        try:
            _become(json.loads(told), streams)
        except SystemExit as end:
            code = end.code
        if (code is None or isinstance(code, int)) and "RANK" not in os.environ:
            _leave(code or 0)
        sys.exit(code)
    shutil.rmtree(Path(_server["address"]).parent)


def _leave(code: int) -> None:
    """As the interpreter leaves, but for what it then takes apart: half a second for libraries as large as these. Not
    the ranks of a group, whose end is also that of what joined them."""
    with contextlib.suppress(Exception):  # what cannot be written is told by the interpreter
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait_for(pid: int, connection: socket.socket) -> None:
    """As a parent does: its id stays its own until whoever asked for it knows how it ended."""
    with contextlib.suppress(ConnectionError):
        connection.send(str(pid).encode())
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        connection.send(str(ended.si_status << 8 if ended.si_code == os.CLD_EXITED else ended.si_status).encode())
        connection.recv(64)
    os.waitpid(pid, 0)


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """What the interpreter would be with these words. Descriptors that are passed on stay open, by other numbers."""
    os.setsid()
    for number, stream in enumerate(streams[:3]):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["home"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # looked for again
    words, folders = request["words"], request["folders"]
    sys.orig_argv = [sys.executable, *words]
    module = words[0] == "-m"
    sys.path[:] = [os.getcwd() if module else str(Path(words[0]).resolve().parent), *folders, *sys.path[1:]]
    if any(Path(folder, "sitecustomize.py").exists() for folder in folders):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    if module:
        sys.argv = [words[1], *words[2:]]
        sys.modules.pop(words[1], None)  # it is loaded as the program
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
