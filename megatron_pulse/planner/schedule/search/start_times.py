"""Start times of a job shop's operations in given orders: compiled ``check.simulate.play``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_pulse.planner.schedule.jit import compiled


class Waits(NamedTuple):
    """Predecessors of operation i are ``edges[first[i]:first[i + 1]]``, each with its lag."""

    first: Any
    edges: Any
    lags: Any


def earliest_starts(lines: Sequence[Sequence[int]], waits: Waits, duration: Any) -> Any:
    """Earliest start of every operation, given its device's order and ``waits``.

    ``lags`` and ``duration`` are arrays of one type, in one unit. The orders have no circular
    waits.
    """
    return _play(*_joined(lines), waits, duration)[0]


def completes(lines: Sequence[Sequence[int]], waits: Waits) -> bool:
    """True if the orders, which contain all operations, have no circular wait."""
    duration: Any = np.ones(len(waits.first) - 1, dtype=np.int64)
    return bool(_play(*_joined(lines), waits, duration)[1].all())


def _joined(lines: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    firsts: Any = np.cumsum([0, *map(len, lines)])
    return np.array([i for line in lines for i in line]), firsts


@compiled
def _play(line: Any, firsts: Any, waits: Waits, duration: Any) -> tuple[Any, Any]:
    """Starts of the operations, and a mask of those that ended."""
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
