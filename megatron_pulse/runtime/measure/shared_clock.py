"""Common clock of a pipeline's devices, for comparing their traces.

Processes of one machine share its monotonic clock. Between machines, every device asks device 0 for
the time. The answer is dated at the middle of the round trip, with an error of at most half of it
(Cristian's algorithm). The shortest of several round trips is used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_pulse.runtime.collectives import gather_objects

ROUND_TRIPS = 20


@dataclass(frozen=True)
class SharedClock:
    """Device 0's clock: ``time.perf_counter()`` of this process plus ``offset_s``.

    ``accuracy_s`` bounds the error over all devices; ``method`` names the comparison.
    """

    offset_s: float
    accuracy_s: float
    method: str


def share_clock(
    group: dist.ProcessGroup | None, device: torch.device, timeout_s: float
) -> SharedClock:
    """Common clock of the pipeline ``group`` (None: one process). Collective."""
    if group is None or group.size() == 1:
        return SharedClock(0.0, 0.0, "one process")
    own = _clock_identity()
    if own and len(set(gather_objects(own, group))) == 1:
        return SharedClock(0.0, time.get_clock_info("perf_counter").resolution, "one machine")
    return compare_clocks(group, device, timeout_s, time.perf_counter)


def compare_clocks(
    group: dist.ProcessGroup,
    device: torch.device,
    timeout_s: float,
    now: Callable[[], float],
) -> SharedClock:
    """Common clock by messages alone; ``now`` is this process's clock. Collective.

    ``device`` must suit the group's backend.
    """
    best, offset = float("inf"), 0.0
    for other in range(1, group.size()):
        for _ in range(ROUND_TRIPS + 1):  # the first opens the connection
            if group.rank() == 0:
                _receive(group, other, device, timeout_s)
                _send(group, other, now(), device, timeout_s)
            elif group.rank() == other:
                asked = now()
                _send(group, 0, 0.0, device, timeout_s)
                answer = _receive(group, 0, device, timeout_s)
                answered = now()
                if answered - asked < best:
                    best, offset = answered - asked, answer - (asked + answered) / 2
    accuracy = 0.0 if group.rank() == 0 else best / 2
    worst = torch.tensor(accuracy, dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return SharedClock(offset, worst.item(), f"the shortest of {ROUND_TRIPS + 1} round trips")


def _send(
    group: dist.ProcessGroup, to: int, value: float, device: torch.device, timeout_s: float
) -> None:
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    _finish(dist.isend(tensor, dist.get_global_rank(group, to), group=group), timeout_s)


def _receive(
    group: dist.ProcessGroup, source: int, device: torch.device, timeout_s: float
) -> float:
    tensor = torch.empty(1, dtype=torch.float64, device=device)
    _finish(dist.irecv(tensor, dist.get_global_rank(group, source), group=group), timeout_s)
    return float(tensor.item())


def _finish(work: dist.Work | None, timeout_s: float) -> None:
    assert work is not None
    work.wait(timedelta(seconds=timeout_s))


def _clock_identity() -> str:
    """Identity of the monotonic clock, equal in processes that share it; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return ""
