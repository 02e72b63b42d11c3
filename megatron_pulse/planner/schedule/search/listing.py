"""List schedules: whenever a device is free it takes the ready operation of the earliest date."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megatron_pulse.planner.schedule.operations import Kind
from megatron_pulse.planner.schedule.search.jobshop import JobShop


def list_schedule(shop: JobShop, date: Sequence[float], release: Sequence[int]) -> list[int]:
    """Start times; operation i is due at ``date[i]``, and microbatch m enters the first stage at
    ``release[m]`` or later.

    A forward is admitted only if afterwards the unfinished microbatches, the oldest first, can
    each still get all the memory that they need on the device from what is spare and what the
    older ones give back (the banker's rule), so a cap never deadlocks.
    """
    placement, count, home = shop.placement, shop.num_microbatches, shop.device
    devices, classes = placement.num_devices, [shop.classes_of(d) for d in range(len(shop.cap))]
    after: list[list[tuple[int, int]]] = [[] for _ in range(shop.num_classes)]
    for k in range(shop.num_classes):
        for j, lag in shop.before[k * count]:
            after[j // count].append((home[k * count], lag))
    whole = [sum(max(0, shop.delta[k * count]) for k in mine) for mine in classes]
    to_allocate, to_free = [[w] * count for w in whole], [[w] * count for w in whole]
    frees = [sum(shop.delta[k * count] < 0 for k in mine) for mine in classes]
    open_frees = [[n] * count for n in frees]
    step, free = [0] * shop.num_classes, [0] * devices
    live, oldest = [0] * devices, [0] * devices
    start, end = [-1] * len(shop.duration), [-1] * len(shop.duration)
    events = [(t, home[0]) for t in sorted(set(release))]

    def ready(k: int, now: int) -> bool:
        m = step[k]
        if m == count or (k == 0 and release[m] > now):
            return False
        i = k * count + m
        for j, lag in shop.before[i]:
            if end[j] < 0 or end[j] + lag > now:
                return False
        return shop.delta[i] <= 0 or is_safe(home[i], m, shop.delta[i])

    def is_safe(device: int, admitted: int, takes: int) -> bool:
        spare = shop.cap[device] - live[device] - takes
        for m in range(oldest[device], count):
            needs = to_allocate[device][m] - (takes if m == admitted else 0)
            if needs > spare:
                return False
            if m >= admitted and needs == whole[device]:
                break
            spare += to_free[device][m] - needs
        return True

    while events:
        now, device = heapq.heappop(events)
        if free[device] > now:
            continue
        choices = [(date[k * count + step[k]], k) for k in classes[device] if ready(k, now)]
        if not choices:
            continue
        k = min(choices)[1]
        m = step[k]
        i = k * count + m
        step[k] += 1
        start[i] = now
        end[i] = free[device] = now + shop.duration[i]
        heapq.heappush(events, (end[i], device))
        for other, lag in after[k]:
            heapq.heappush(events, (end[i] + lag, other))
        change = shop.delta[i]
        live[device] += change
        if shop.kinds[k // placement.num_stages] is Kind.FORWARD:
            to_allocate[device][m] -= change
        to_free[device][m] += min(0, change)
        open_frees[device][m] -= change < 0
        while oldest[device] < count - 1 and not open_frees[device][oldest[device]]:
            oldest[device] += 1
    return start
