"""When the operations of a job shop start in given orders: compiled ``check.simulate.play``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_pulse.planner.schedule.compiled import compiled


class Waits(NamedTuple):
    """``edges[first[i]:first[i + 1]]`` must have ended ``lags`` before operation i starts."""

    first: Any
    edges: Any
    lags: Any


def played(lines: Sequence[Sequence[int]], waits: Waits, duration: Any) -> Any:
    """The start of every operation, each as early as its device's line and ``waits`` allow, in the
    unit of ``lags`` and ``duration``, arrays of one type; lines are without circular waits."""
    return _play(*_joined(lines), waits, duration)[0]


def completes(lines: Sequence[Sequence[int]], waits: Waits) -> bool:
    """Whether nothing in these lines of all operations waits for ever."""
    duration: Any = np.ones(len(waits.first) - 1, dtype=np.int64)
    return bool(_play(*_joined(lines), waits, duration)[1].all())


def _joined(lines: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    firsts: Any = np.cumsum([0, *map(len, lines)])
    return np.array([i for line in lines for i in line]), firsts


@compiled
def _play(line: Any, firsts: Any, waits: Waits, duration: Any) -> tuple[Any, Any]:
    """Starts of the operations, and which of them have ended."""
    devices, num = len(firsts) - 1, len(duration)
    start: Any = np.zeros_like(duration)
    ended: Any = np.zeros(num, np.bool_)
    position, clock = firsts[:-1].copy(), np.zeros_like(duration)[:1].repeat(devices)
    progress = True
    while progress:
        progress = False
        for device in range(devices):
            at, now = position[device], clock[device]
            while at < firsts[device + 1]:
                i = line[at]
                begin, free = now, True
                for k in range(waits.first[i], waits.first[i + 1]):
                    j = waits.edges[k]
                    if not ended[j]:
                        free = False
                        break
                    begin = max(begin, start[j] + duration[j] + waits.lags[k])
                if not free:
                    break
                start[i] = begin
                now = begin + duration[i]
                ended[i] = True
                at += 1
                progress = True
            position[device], clock[device] = at, now
    return start, ended
