"""Lock of a folder: one run at a time, and no lock of a dead run remains."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_pulse.integration.checkpoint import lock
from megatron_pulse.integration.checkpoint.lock import LOCK, FolderInUse, FolderLock
from tests.integration.test_bad_input import GOOD
from tests.ranks import RanksFailed, run_ranks

HOLD = """
import os, sys, time
from pathlib import Path
from megatron_pulse.integration.checkpoint.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
if child := os.fork():
    print(os.getpid(), child, flush=True)
time.sleep(600)
"""
Holder = Callable[..., tuple[int, int]]


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    """Starts a process that holds the folder, with a forked child; returns both process ids."""
    started: list[int] = []

    def start(**environment: str) -> tuple[int, int]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        started.append(process.pid)
        assert process.stdout is not None
        pid, child = process.stdout.readline().split()
        return int(pid), int(child)

    yield start
    for pid in started:
        os.killpg(pid, signal.SIGKILL)


@pytest.mark.parametrize("put", [Path.mkdir, os.mkfifo, lambda p: p.symlink_to("../mine")])
def test_what_is_no_lock_is_left_alone(tmp_path: Path, put: Callable[[Path], None]) -> None:
    """A link that a stranger left would have had us write over what it leads to."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    put(tmp_path / "run" / LOCK)
    with pytest.raises(FolderInUse, match="not a lock file of a run. Remove it"):
        FolderLock(tmp_path / "run", wait_s=0)
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_second_run_is_refused(tmp_path: Path, holder: Holder) -> None:
    pid, _ = holder()
    with pytest.raises(FolderInUse, match=rf"another run writes into .*process {pid}.*--save"):
        FolderLock(tmp_path, wait_s=0)


def test_a_killed_run_holds_nothing(tmp_path: Path, holder: Holder) -> None:
    """Nor does a process that it forked and that lives on."""
    pid, child = holder()
    os.kill(pid, signal.SIGKILL)
    lock = FolderLock(tmp_path, wait_s=5)
    os.kill(child, 0)
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_stale_file_is_nothing(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"host": "elsewhere", "pid": "1"}'):
        (tmp_path / LOCK).write_text(text)
        FolderLock(tmp_path, wait_s=0).release()


def test_storage_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is held as long as its holder touches it, by the storage's own clock."""

    def no_locks(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    monkeypatch.setattr(lock, "BEAT_S", 0.05)
    held = FolderLock(tmp_path, wait_s=0)
    long_ago = time.time() - 2 * lock.STALE_S
    os.utime(tmp_path / LOCK, (long_ago, long_ago))
    time.sleep(0.5)
    with pytest.raises(FolderInUse, match=rf"process {os.getpid()}"):
        FolderLock(tmp_path, wait_s=0)
    held._released.set()  # its process dies
    time.sleep(0.2)
    os.utime(tmp_path / LOCK, (long_ago, long_ago))
    FolderLock(tmp_path, wait_s=0).release()
    assert not list(tmp_path.iterdir())


def test_a_requeued_job_does_not_wait_for_its_predecessor(
    tmp_path: Path, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that died may keep its locks on a server for a while."""
    holder(SLURM_JOB_ID="7")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(FolderInUse, match="Slurm job 7"):
        FolderLock(tmp_path, wait_s=0)  # the same start of the job: two steps of it
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.raises(FolderInUse):
        FolderLock(tmp_path, wait_s=0)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    lock = FolderLock(tmp_path, wait_s=0)
    assert f'"pid": "{os.getpid()}"' in (tmp_path / LOCK).read_text()
    lock.release()


def begin(folder: str) -> None:
    from tests.integration.runs import train

    train([*GOOD, "--save", folder, "--pipeline-model-parallel-size", "2"])


def test_every_rank_is_told(tmp_path: Path, holder: Holder) -> None:
    pid, _ = holder()
    before = (tmp_path / LOCK).read_text()
    with pytest.raises(RanksFailed) as error:
        run_ranks(2, begin, str(tmp_path))
    assert error.value.exit_codes == [2, 2]
    assert any(f"process {pid}" in output for output in error.value.outputs)
    assert "Traceback" not in "".join(error.value.outputs)
    assert (tmp_path / LOCK).read_text() == before and len(list(tmp_path.iterdir())) == 1


def see_otherwise(folder: str) -> None:
    import torch.distributed as dist

    from megatron_pulse.integration.checkpoint.starting_point import lock_for_job

    dist.init_process_group("gloo")
    for found, told in (
        (
            "3" if os.environ["RANK"] == "1" else None,
            "rank 1 finds 3 checkpoint there, rank 0 none",
        ),
        ("3", "another run has just saved None"),
    ):
        with pytest.raises(FolderInUse, match=told):
            lock_for_job(folder, found)
    with pytest.raises(FolderInUse, match="--save /proc/runs cannot be written"):
        lock_for_job("/proc/runs", None)
    lock = lock_for_job(folder, None)
    assert (lock is not None) == (dist.get_rank() == 0)
    dist.barrier()
    if lock is not None:
        lock.release()


def test_ranks_see_the_same_folder(tmp_path: Path) -> None:
    run_ranks(2, see_otherwise, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
