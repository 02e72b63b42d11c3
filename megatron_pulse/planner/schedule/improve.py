"""Forward-backward improvement with insertion: squeeze idle time out of a schedule.

Only the order of operations on each device is the result. Moving an operation never breaks
precedence (data flow, first in first out per stage and kind) nor the cap on live activations,
which binds the *order* on a device, not the times.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_pulse.planner.schedule.jobshop import JobShop


def compact(shop: JobShop, start: Sequence[int]) -> list[int]:
    """Move every operation, earliest first, into the earliest idle gap that can take it."""
    duration, delta, before = shop.duration, shop.delta, shop.before
    new = list(start)
    end = [t + p for t, p in zip(start, duration, strict=True)]
    by_time = sorted(range(len(new)), key=new.__getitem__)
    lines: list[list[int]] = [[] for _ in shop.cap]
    live: list[list[int]] = [[] for _ in lines]
    for i in by_time:
        line, counts = lines[shop.device[i]], live[shop.device[i]]
        counts.append(counts[-1] + delta[line[-1]] if line else 0)
        line.append(i)
    cursor = [0] * len(lines)
    for i in by_time:
        d = shop.device[i]
        line, counts, cap = lines[d], live[d], shop.cap[d]
        ready = 0
        for j, lag in before[i]:
            if end[j] + lag > ready:
                ready = end[j] + lag
        # Operations before the cursor are done, and nothing is ever inserted after it.
        here = spot = cursor[d]
        cursor[d] += 1
        best, need, grows = new[i], duration[i], delta[i]
        limit = best + need
        for q in range(here, -1, -1):
            previous_end = end[line[q - 1]] if q else 0
            begin = ready if ready > previous_end else previous_end
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
            count = counts[spot]
            for q in range(here, spot, -1):
                counts[q] = counts[q - 1] + grows
            counts[spot] = count
            line.insert(spot, line.pop(here))
    return new


def improve(shop: JobShop, start: Sequence[int], patience: int = 4) -> list[int]:
    """Compact towards the end and towards the beginning in turn, while it helps.

    Source: the project's scheduling.md, section 3. Stops after ``patience`` rounds without gain.
    """
    mirror = shop.mirrored()
    best = current = list(start)
    length, stale = shop.makespan(best), 0
    while stale < patience:
        late = compact(mirror, _flip(shop, current))
        current = compact(shop, _flip(shop, late))
        reached = shop.makespan(current)
        stale = 0 if reached < length else stale + 1
        if reached < length:
            best, length = current, reached
    return best


def _flip(shop: JobShop, start: Sequence[int]) -> list[int]:
    """Start times as seen with time running backwards; its own inverse."""
    horizon = shop.makespan(start)
    return [horizon - t - p for t, p in zip(start, shop.duration, strict=True)]
