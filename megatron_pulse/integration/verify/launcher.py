"""Launcher of a plan's ranks on this machine, which reports their failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_pulse.errors import UserError, format_faults
from megatron_pulse.integration.flags.flag_constraints import CONNECTIONS
from megatron_pulse.integration.verify.job import VerifyJob
from megatron_pulse.integration.verify.layout_rank import result_file
from megatron_pulse.integration.verify.reference import TimeLimitReached
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.processes import ending_with_us

RANK = (sys.executable, "-m", "megatron_pulse.integration.verify.rank_main")
"""Program of one rank."""
_GRACE_S = 10.0
_LOOK_S = 0.1


class LayoutFailed(UserError):
    """Failure of the plan's layout to make its steps; the message has its ranks' errors."""


def run_ranks(
    job: VerifyJob, given: PlanFile, deadline: float, progress: Callable[[int], None]
) -> None:
    """Run all passes of ``job`` on the plan's ranks; ``progress`` gets the number of passes done.

    Raises LayoutFailed for ranks that fail, TimeIsUp after ``deadline``, by ``time.monotonic``. No
    rank outlives the call.
    """
    job.save()
    folder = Path(job.folder)
    for earlier in folder.glob("rank_*_*.pt"):
        earlier.unlink()
    ranks = [_started(job, given, rank) for rank in range(given.world_size)]
    failed_at: float | None = None
    try:
        while any(rank.poll() is None for rank in ranks):
            now = time.monotonic()
            progress(sum(result_file(folder, 0, n).exists() for n in range(len(job.passes))))
            if failed_at is None and any(rank.poll() for rank in ranks):
                failed_at = now
            if failed_at is not None and now > failed_at + _GRACE_S:
                break
            if now > deadline:
                raise TimeLimitReached(_unfinished(job, ranks))
            time.sleep(_LOOK_S)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGKILL)
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise LayoutFailed(_failures(folder, ranks))


def _started(job: VerifyJob, given: PlanFile, rank: int) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(given.world_size),
        "OMP_NUM_THREADS": "1" if job.device == "cpu" else os.environ.get("OMP_NUM_THREADS", "1"),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        CONNECTIONS: "1" if given.tensor > 1 else "32",
    }
    with (Path(job.folder) / f"log_{rank}").open("wb") as log:
        command = ending_with_us([*RANK, job.folder])
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


def _unfinished(job: VerifyJob, ranks: list[subprocess.Popen[bytes]]) -> str:
    late = [str(number) for number, rank in enumerate(ranks) if rank.poll() is None]
    return (
        f"the plan's ranks reached the time limit ({job.timeout_s:g} s, --timeout-s); still "
        f"running: rank {', '.join(late)}. Raise --timeout-s, or verify a smaller model with the "
        "same layout (--option)"
    )


def _failures(folder: Path, ranks: list[subprocess.Popen[bytes]]) -> str:
    faults = []
    for number, rank in enumerate(ranks):
        if rank.returncode == 0:
            continue
        path = folder / f"failure_{number}"
        if path.exists():
            said = path.read_text()
        elif rank.returncode < 0:
            said = f"killed by {signal.Signals(-rank.returncode).name}"
        else:
            lines = (folder / f"log_{number}").read_text(errors="replace").strip().splitlines()
            said = lines[-1] if lines else f"exited with status {rank.returncode}"
        faults.append(f"rank {number}: {said}")
    return format_faults("the plan's layout cannot run a step", faults)
