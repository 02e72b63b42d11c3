"""Forward-backward improvement with insertion: remove idle time from a schedule.

Only the order of operations on each device is the result. Moving an operation never breaks
precedence (data flow, first in first out per stage and type). It also keeps the cap on live
activations, which restricts the *order* on a device, not the times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_pulse.planner.schedule.jit import compiled, compiled_inner, stable_argsort, zeros
from megatron_pulse.planner.schedule.search.jobshop import Arrays, JobShop, arrays, mirrored


def improve(shop: JobShop, start: Sequence[int], patience: int = 4) -> list[int]:
    """Compact towards the end and towards the beginning in turn, while the makespan shrinks.

    See ../README.md: Search. Stops after ``patience`` rounds without gain.
    """
    own = arrays(shop)
    best = _improve(own, mirrored(own), np.array(start, dtype=np.int64), patience)
    found: list[int] = best.tolist()
    return found


@compiled
def _improve(shop: Arrays, mirror: Arrays, start: Any, patience: int) -> Any:
    duration = shop.duration
    best = current = start
    length, stale = _makespan(start, duration), 0
    while stale < patience:
        late = _compact(mirror, _backwards(current, duration))
        current = _compact(shop, _backwards(late, duration))
        reached = _makespan(current, duration)
        stale = 0 if reached < length else stale + 1
        if reached < length:
            best, length = current, reached
    return best


@compiled_inner
def _makespan(start: Any, duration: Any) -> int:
    last = 0
    for i in range(len(start)):
        last = max(last, start[i] + duration[i])
    return last


@compiled_inner
def _backwards(start: Any, duration: Any) -> Any:
    """Start times with time reversed, counted from the last end."""
    turned, horizon = start.copy(), _makespan(start, duration)
    for i in range(len(start)):
        turned[i] = horizon - start[i] - duration[i]
    return turned


@compiled_inner
def _compact(shop: Arrays, start: Any) -> Any:
    """Move every operation, earliest first, into the earliest idle gap that can take it."""
    duration, delta, device = shop.duration, shop.delta, shop.device
    count, devices, most = len(start), len(shop.cap), 0
    new, end = start.copy(), start.copy()
    by_time = stable_argsort(start, count)
    length, cursor = zeros(devices), zeros(devices)
    for i in range(count):
        end[i] += duration[i]
        length[device[i]] += 1
        most = max(most, length[device[i]])
    lines: Any = np.zeros((devices, most), np.int64)
    live = lines.copy()  # before each operation of a line
    for d in range(devices):
        length[d] = 0
    for i in by_time:
        d = device[i]
        at = length[d]
        if at:
            live[d, at] = live[d, at - 1] + delta[lines[d, at - 1]]
        lines[d, at] = i
        length[d] += 1
    for i in by_time:
        d = device[i]
        line, counts, cap = lines[d], live[d], shop.cap[d]
        ready = 0
        for e in range(shop.first[i], shop.first[i + 1]):
            ready = max(ready, end[shop.edges[e]] + shop.lags[e])
        # Operations before the cursor are done; later ones are inserted at or before it.
        here = spot = cursor[d]
        cursor[d] += 1
        best, need, grows = new[i], duration[i], delta[i]
        limit = best + need
        for q in range(here, -1, -1):
            previous_end = end[line[q - 1]] if q else 0
            begin = max(ready, previous_end)
            if begin + need <= limit:
                best, spot = begin, q
            if not q or previous_end <= ready:
                break
            y = line[q - 1]
            if grows > 0 and counts[q - 1] + max(delta[y], 0) + grows > cap:
                break
            limit = new[y]
        new[i] = best
        end[i] = best + need
        if spot < here:
            taken = counts[spot]
            for q in range(here, spot, -1):
                counts[q] = counts[q - 1] + grows
                line[q] = line[q - 1]
            counts[spot] = taken
            line[spot] = i
    return new
