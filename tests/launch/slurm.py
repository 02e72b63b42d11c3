"""A Slurm cluster on this machine: one controller and nodes that are only daemons.

    with slurm_cluster(num_nodes=2) as cluster:
        job = cluster.submit("job.sbatch", "--nodes", "2")
        cluster.wait_for(job, {"COMPLETED"}, timeout_s=60)

Configuration, keys, sockets, state and logs lie in a temporary directory with ports of their own:
a cluster that the machine may belong to is neither read nor touched. Needs root, because slurmd
starts jobs as their users. Nothing outlives the context.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.ranks import free_port

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
# proctrack/linuxproc, task/none: no cgroups, so that it works in containers.
# Jobs of the partition "urgent" preempt those of "all", which get 90 s of grace and are requeued.
# cred_expire: a requeued job waits until its credentials of before have expired; usually 120 s.
_CONFIGURATION = """\
ClusterName=pulse
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=90
MinJobAge=600
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=10 PriorityTier=1 GraceTime=90
PartitionName=urgent Nodes=ALL MaxTime=10 PriorityTier=2
"""
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])


class SlurmError(AssertionError):
    """A command failed or a wait took too long; says what the daemons and the job logged."""


def why_no_slurm() -> str | None:
    """Reason why no cluster can be started; None if it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "slurmd must run as root to start jobs"
    return None


@dataclass(frozen=True)
class SlurmCluster:
    """A running cluster; commands run with its configuration."""

    folder: Path
    environment: dict[str, str]

    def command(self, *argv: str, timeout_s: float = 20, cwd: Path | None = None) -> str:
        """Standard output of a Slurm command; raises SlurmError where it fails."""
        done = subprocess.run(
            argv,
            env=self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode:
            raise SlurmError(f"{' '.join(argv)} failed: {done.stderr.strip() or done.stdout}")
        return done.stdout + done.stderr if "--test-only" in argv else done.stdout

    def submit(self, *argv: str, cwd: Path | None = None) -> str:
        """``sbatch argv`` from ``cwd``; the job's id."""
        return self.command("sbatch", "--parsable", *argv, cwd=cwd).split(";")[0].strip()

    def field(self, job: str, name: str) -> str:
        """One field of ``scontrol show job``, such as JobState or Restarts."""
        shown = self.command("scontrol", "--oneliner", "show", "job", job)
        found = re.search(rf"\b{name}=(\S+)", shown)
        if found is None:
            raise SlurmError(f"job {job} has no {name}: {shown}")
        return found[1]

    def wait_for(self, job: str, states: Set[str], timeout_s: float) -> str:
        """Wait until ``job`` is in one of ``states``; any other final state is an error."""
        final = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"} - states

        def reached() -> bool:
            state = self.field(job, "JobState")
            if state in final:
                raise SlurmError(f"job {job} is {state}\n{self.logs()}")
            return state in states

        self.wait_until(reached, f"job {job} to be {' or '.join(sorted(states))}", timeout_s)
        return self.field(job, "JobState")

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Poll ``condition``; raises SlurmError with all logs when it takes longer."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise SlurmError(f"waited {timeout_s:g} s for {what}\n{self.logs()}")
            time.sleep(0.5)  # every look at a job is a process of its own

    def processes(self, *, of: str | None = None) -> list[int]:
        """Processes of this cluster (daemons and jobs), or only those of job ``of``."""
        wanted = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()
        job = None if of is None else f"SLURM_JOB_ID={of}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    variables = (entry / "environ").read_bytes().split(b"\0")
                except OSError:  # ended meanwhile
                    continue
                if wanted in variables and (job is None or job in variables):
                    found.append(int(entry.name))
        return found

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}"
            for log in sorted(self.folder.glob("*.log"))
        )


@contextmanager
def slurm_cluster(num_nodes: int) -> Iterator[SlurmCluster]:
    """A cluster of ``num_nodes`` nodes ``n1``, ``n2``, ... with one CPU each, and its end."""
    with ExitStack() as stack:
        # /tmp, and not $TMPDIR: a socket's path must be short.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp", prefix="slurm")))
        folder.chmod(0o755)  # munged demands it of its socket's folder
        host = socket.gethostname().split(".")[0]
        nodes = "\n".join(
            f"NodeName=n{i + 1} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1"
            for i in range(num_nodes)
        )
        (folder / "slurm.conf").write_text(
            _CONFIGURATION.format(folder=folder, host=host, port=free_port(), nodes=nodes)
        )
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        environment |= {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": _PATH}
        environment["OMP_NUM_THREADS"] = "1"  # as of other ranks, so that sums are alike
        cluster = SlurmCluster(folder, environment)
        stack.callback(_kill, cluster)
        stack.enter_context(_watchdog(folder))
        _start_munge(cluster)
        (folder / "state").mkdir()
        _start(cluster, "slurmctld", "slurmctld", "-D", "-c")
        for i in range(num_nodes):
            (folder / f"spool.n{i + 1}").mkdir()
            _start(cluster, f"slurmd{i + 1}", "slurmd", "-D", "-N", f"n{i + 1}")
        cluster.wait_until(lambda: _num_idle(cluster) == num_nodes, "all nodes to be idle", 30)
        yield cluster


def _num_idle(cluster: SlurmCluster) -> int:
    try:
        idle = cluster.command("sinfo", "-h", "-p", "all", "-N", "-t", "idle", "-o", "%N")
    except SlurmError:  # the controller does not listen yet
        return 0
    return len(idle.splitlines())


def _start(cluster: SlurmCluster, name: str, program: str, *argv: str) -> subprocess.Popen[bytes]:
    path = shutil.which(program, path=_PATH)
    assert path is not None
    with (cluster.folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [path, *argv],
            env=cluster.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _start_munge(cluster: SlurmCluster) -> None:
    folder = cluster.folder
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = [f"--{what}={folder}/munge.{end}" for what, end in _MUNGE_FILES]
    _start(cluster, "munged", "munged", "--foreground", "--force", *files)
    cluster.wait_until((folder / "munge.socket").exists, "munged", 10)


_MUNGE_FILES = (
    ("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"),
    ("seed-file", "seed"),
)  # fmt: skip


def _watchdog(folder: Path) -> subprocess.Popen[bytes]:
    """Process that ends the cluster if this one dies without doing so (a signal, a crash).

    It runs in a session of its own and waits for the end of a pipe that only this process holds.
    Signals to this process's group (Ctrl-C, ``timeout``) do not end it.
    """
    command = f"from tests.launch.slurm import _end_of; _end_of({str(folder)!r})"
    return subprocess.Popen(
        [sys.executable, "-c", command],
        stdin=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )


def _end_of(folder: str) -> None:
    sys.stdin.read()
    _kill(SlurmCluster(Path(folder), {"SLURM_CONF": f"{folder}/slurm.conf"}))
    shutil.rmtree(folder, ignore_errors=True)


def _kill(cluster: SlurmCluster) -> None:
    """End every process of the cluster, also those that started while it was being ended."""
    deadline = time.monotonic() + 10
    while (left := cluster.processes()) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
            except (ProcessLookupError, ChildProcessError):
                pass
        time.sleep(0.1)
