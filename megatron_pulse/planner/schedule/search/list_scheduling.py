"""List scheduling: a free device takes the ready operation with the earliest due date."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np

from megatron_pulse.planner.schedule.jit import compiled, compiled_inner, zeros
from megatron_pulse.planner.schedule.search.jobshop import JobShop


def list_schedule(shop: JobShop, date: Sequence[float], release: Sequence[int]) -> list[int]:
    """List schedule with due dates ``date[i]``; returns start times.

    Microbatch m enters a chain's first stage at ``release[m]`` or later. A forward is admitted by
    the banker's rule, so that a cap never deadlocks. The unfinished microbatches, oldest first,
    must each be able to get their remaining memory on the device. They can use spare memory, and
    memory that older ones free.
    """
    count, classes = shop.num_microbatches, range(shop.num_classes)
    source: Any = np.full((shop.num_classes, 2), -1, np.int64)  # predecessor class, and its lag
    feeds: Any = np.full((shop.num_classes, 2), -1, np.int64)
    for k in classes:
        for j, lag in shop.before[k * count]:
            source[k] = j // count, lag
            feeds[j // count, int(feeds[j // count, 0] >= 0)] = k
    mine = [shop.classes_of(d) for d in range(len(shop.cap))]
    most = max(map(len, mine))
    return [
        int(t)
        for t in _listed(
            np.array([shop.duration[k * count] for k in classes], np.int64),
            np.array([shop.device[k * count] for k in classes], np.int64),
            np.array([shop.delta[k * count] for k in classes], np.int64),
            np.array(shop.cap, np.int64),
            np.array([own + [-1] * (most - len(own)) for own in mine], np.int64),
            source,
            feeds,
            np.array(date, np.float64),
            np.array(release, np.int64),
        )
    ]


@compiled
def _listed(
    duration: Any,
    home: Any,
    delta: Any,
    cap: Any,
    classes: Any,
    source: Any,
    feeds: Any,
    date: Any,
    release: Any,
) -> Any:
    """``list_schedule`` with per-class arrays.

    ``classes`` are those of each device, padded with -1. ``feeds`` are the classes that wait for a
    class.
    """
    count, devices = len(release), len(cap)
    whole = zeros(devices)  # memory of a microbatch
    frees = zeros(devices)  # classes that free memory
    for k in range(len(home)):
        whole[home[k]] += max(0, delta[k])
        frees[home[k]] += delta[k] < 0
    to_allocate: Any = np.zeros((devices, count), np.int64)
    to_free, open_frees = to_allocate.copy(), to_allocate.copy()
    for d in range(devices):
        for m in range(count):
            to_allocate[d, m] = to_free[d, m] = whole[d]
            open_frees[d, m] = frees[d]
    live, oldest, free = zeros(devices), zeros(devices), zeros(devices)
    step, start, end = zeros(len(home)), zeros(len(date)), zeros(len(date))
    for i in range(len(date)):
        start[i] = end[i] = -1
    # Times at which a device may go on: time * devices + device, in a heap.
    events = [0]
    events.pop()
    for k in range(len(home)):
        if source[k, 0] < 0:
            for t in release:
                heappush(events, t * devices + home[k])
    while len(events) > 0:
        event = heappop(events)
        now, d = event // devices, event % devices
        if free[d] > now:
            continue
        best = -1
        for k in classes[d]:
            if k < 0 or step[k] == count:
                continue
            m, j = step[k], source[k, 0]
            if j < 0:
                if release[m] > now:
                    continue
            elif end[j * count + m] < 0 or end[j * count + m] + source[k, 1] > now:
                continue
            if best >= 0 and date[k * count + m] >= date[best * count + step[best]]:
                continue
            if delta[k] > 0:
                spare = cap[d] - live[d] - delta[k]
                if not _is_safe(
                    to_allocate[d], to_free[d], spare, oldest[d], m, delta[k], whole[d]
                ):
                    continue
            best = k
        if best < 0:
            continue
        m, change = step[best], delta[best]
        i = best * count + m
        step[best] += 1
        start[i] = now
        end[i] = free[d] = now + duration[best]
        heappush(events, end[i] * devices + d)
        for k in feeds[best]:
            if k >= 0:
                heappush(events, (end[i] + source[k, 1]) * devices + home[k])
        live[d] += change
        to_allocate[d, m] -= max(0, change)
        to_free[d, m] += min(0, change)
        open_frees[d, m] -= change < 0
        while oldest[d] < count - 1 and not open_frees[d, oldest[d]]:
            oldest[d] += 1
    return start


@compiled_inner
def _is_safe(
    to_allocate: Any, to_free: Any, spare: int, oldest: int, admitted: int, takes: int, whole: int
) -> bool:
    """True if all microbatches can complete after microbatch ``admitted`` takes ``takes``."""
    for m in range(oldest, len(to_free)):
        needs = to_allocate[m] - (takes if m == admitted else 0)
        if needs > spare:
            return False
        if m >= admitted and needs == whole:
            return True
        spare += to_free[m] - needs
    return True
