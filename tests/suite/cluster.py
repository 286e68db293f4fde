"""A real SLURM for tests: two nodes with four pretended GPUs each, all of it on this machine and in one folder."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("munged", "munge", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
GPUS = 4
PAUSE = 0.2
"""Seconds from one look to the next: each may ask SLURM, which takes as much of a core as the jobs do."""

CONF = """\
ClusterName=sameday
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
MpiDefault=none
KillWait=5
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=100000,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=20 MaxTime=INFINITE State=UP
PartitionName=high Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket=16 ThreadsPerCore=1 RealMemory=8000 Gres=gpu:{gpus}"
)


def why_not() -> str | None:
    """Why no cluster can be started here; None where one can."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if lacking:
        return f"there is no SLURM here ({', '.join(lacking)} not found); `make slurm` installs one"
    return None if os.getuid() == 0 else "only root can start SLURM's daemons"


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


@dataclass
class Cluster:
    """What is under way, and how it is asked."""

    folder: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Numbers of jobs begin at 1 in each cluster, and so do names of jobs' own folders."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "SLURM_TMPDIR": str(self.folder / "tmp")}

    def ask(self, *words: str, code: int = 0) -> str:
        """What a command of SLURM says."""
        done = subprocess.run(words, capture_output=True, text=True, env=os.environ | self.environment, timeout=60)
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def jobs(self) -> dict[str, str]:
        """The state of each job in the queue, by its number."""
        return dict(line.split("|") for line in self.ask("squeue", "-h", "-o", "%A|%T").splitlines())

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))


def until(condition: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what()}"
        time.sleep(PAUSE)


@contextlib.contextmanager
def started() -> Iterator[Cluster]:
    """A cluster with both nodes idle; nothing of it is left behind, however the block ends."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = Cluster(folder)
    try:
        folder.chmod(0o755)
        _write(folder)
        _start(cluster)
        yield cluster
    finally:
        with contextlib.suppress(OSError, subprocess.SubprocessError, AssertionError):
            cluster.ask("scancel", "--user", pwd.getpwuid(os.getuid()).pw_name)
            until(lambda: not cluster.jobs(), 15, lambda: str(cluster.jobs()))
        for daemon in reversed(cluster.daemons):
            daemon.terminate()
        for daemon in cluster.daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
        for pid in _processes_of(folder):  # step daemons of jobs that would not end
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _write(folder: Path) -> None:
    host, ports = socket.gethostname().split(".")[0], _free_ports(3)
    nodes = [NODE.format(name=f"n{i}", host=host, port=ports[i], gpus=GPUS) for i in (1, 2)]
    text = CONF.format(host=host, folder=folder, ports=ports, nodes="\n".join(nodes))
    (folder / "slurm.conf").write_text(text)
    for i in range(GPUS):  # a count without files leaves the node invalid
        os.mknod(folder / f"gpu{i}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "state").mkdir()


def _start(cluster: Cluster) -> None:
    folder, environment = cluster.folder, {**os.environ, **cluster.environment, "PATH": _path()}

    def daemon(name: str, *words: str) -> None:
        with (folder / f"{name}.out.log").open("ab") as output:
            cluster.daemons.append(
                subprocess.Popen(words, stdout=output, stderr=output, env=environment, start_new_session=True)
            )

    own = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "seed")]
    own += [f"--socket={folder}/munge.socket", f"--log-file={folder}/munge.log", "--force", "--foreground"]
    daemon("munged", "munged", *own)
    munge = ["munge", "-n", "-S", f"{folder}/munge.socket"]
    until(lambda: subprocess.run(munge, capture_output=True).returncode == 0, 15, cluster.logs)
    daemon("slurmctld", "slurmctld", "-D", "-i")
    for name in ("n1", "n2"):
        daemon(name, "slurmd", "-D", "-N", name)

    def idle() -> bool:
        said = subprocess.run(["sinfo", "-h", "-N", "-p", "low", "-o", "%t"], capture_output=True, env=environment)
        return said.stdout.split() == [b"idle", b"idle"]

    until(idle, 30, cluster.logs)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _processes_of(folder: Path) -> list[int]:
    """Those that know this cluster by its configuration."""
    mark, found = f"SLURM_CONF={folder}/".encode(), []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found
