"""Annealing: swap neighbours on the critical path, accept what is not much longer.

Where an operation starts the moment the one before it on its device ends, and both are on a longest
path, the makespan cannot shrink unless some such pair is swapped; and no swap of one closes a
circle (van Laarhoven, Aarts and Lenstra, "Job shop scheduling by simulated annealing", 1992). The
cap is checked per swap: it binds the order on a device only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from megatron_pulse.planner.schedule.jobshop import JobShop

HOT, COLD = 0.25, 0.01
"""First and last temperature, in units of the mean duration."""

CHECK = 32
"""Swaps between two looks at the progress."""


def anneal(
    shop: JobShop,
    start: Sequence[int],
    progress: Callable[[int], float],
    seed: int = 0,
    goal: int = 0,
    hot: float = HOT,
) -> list[int]:
    """The shortest start times on the way from ``start``; ends early at ``goal`` ticks.

    ``progress``, called with the number of swaps so far, says how much of the search is over:
    1 or more ends it.
    """
    chance = random.Random(seed)
    walk = _Walk(shop, start)
    best, length = walk.starts(), walk.length
    mean = sum(shop.duration) / len(shop.duration)
    swaps, heat = 0, 0.0
    while length > goal:
        if swaps % CHECK == 0:
            done = progress(swaps)
            if done >= 1:
                break
            heat = mean * hot * (COLD / HOT) ** done
        pairs = walk.critical(chance.random)
        swaps += 1
        if not pairs:
            break
        while pairs:
            at = int(chance.random() * len(pairs))
            u, v = pairs[at]
            limit = walk.length - heat * math.log(1.0 - chance.random())
            if walk.swap(u, v, limit):
                if walk.length < length:
                    best, length = walk.starts(), walk.length
                break
            pairs[at] = pairs[-1]
            pairs.pop()
            swaps += 1
            if swaps % CHECK == 0:
                break
    return best


class _Walk:
    """Orders of all devices as linked lists, and the times they come to.

    Number n stands for nothing: it has ended at 0 and is never in a list.
    """

    def __init__(self, shop: JobShop, start: Sequence[int]) -> None:
        n, count = len(shop.duration), shop.num_microbatches
        self.none, self.count = n, count
        self.duration, self.delta = [*shop.duration, 0], [*shop.delta, 0]
        self.device, self.cap = shop.device, shop.cap
        self.source, self.lag = [n] * (n + 1), [0] * (n + 1)
        for i, edges in enumerate(shop.before):
            for j, lag in edges:
                if j // count != i // count:
                    self.source[i], self.lag[i] = j, lag
        lines = shop.lines(start)
        self.previous, self.next = [n] * (n + 1), [n] * (n + 1)
        self.live = [0] * (n + 1)
        for line in lines:
            for a, b in zip(line, line[1:], strict=False):
                self.previous[b], self.next[a] = a, b
                self.live[b] = self.live[a] + self.delta[a]
        self.last = [line[-1] for line in lines]
        times = shop.timed(lines)
        self.end = [t + p for t, p in zip(times, shop.duration, strict=True)] + [0]
        self.order = sorted(range(n), key=times.__getitem__)
        self.position = [0] * (n + 1)
        for at, i in enumerate(self.order):
            self.position[i] = at
        self.length = max(self.end[i] for i in self.last)

    def starts(self) -> list[int]:
        """Start times."""
        return [self.end[i] - self.duration[i] for i in range(self.none)]

    def critical(self, chance: Callable[[], float]) -> list[tuple[int, int]]:
        """The pairs that may be swapped of a longest path, chosen by chance where there are
        several."""
        end, previous, source, lag = self.end, self.previous, self.source, self.lag
        duration, delta, live, count = self.duration, self.delta, self.live, self.count
        pairs = []
        ends = [i for i in self.last if end[i] == self.length]
        v = ends[int(chance() * len(ends))] if len(ends) > 1 else ends[0]
        none = self.none
        while v != none:
            begin = end[v] - duration[v]
            u, j = previous[v], source[v]
            if u != none and end[u] == begin:
                if (
                    j != u
                    and u // count != v // count
                    and (delta[v] <= 0 or live[u] + delta[v] <= self.cap[self.device[v]])
                ):
                    pairs.append((u, v))
                v = j if j != none and end[j] + lag[v] == begin and chance() < 0.5 else u
            else:
                v = j
        return pairs

    def swap(self, u: int, v: int, limit: float) -> bool:
        """Run v before u, its neighbour, unless that is longer than ``limit``; whether it was."""
        previous, following, source, lag = self.previous, self.next, self.source, self.lag
        duration, order, none = self.duration, self.order, self.none
        low, high = self.position[u], self.position[v]
        # What waits for u comes after it in the new topological order, and v before it.
        after, moved = {u}, [u]
        early = []
        for i in order[low + 1 : high]:
            if previous[i] in after or source[i] in after:
                after.add(i)
                moved.append(i)
            else:
                early.append(i)
        if source[v] in after:
            return False  # times of equal ends: a path through others is as long
        fresh = [*early, v, *moved]
        before, behind, device = previous[u], following[v], self.device[u]
        previous[v], previous[u], previous[behind] = before, v, u
        end = self.end.copy()
        for part in (fresh, order[high + 1 :]):
            for i in part:
                a = end[previous[i]]
                b = end[source[i]] + lag[i]
                end[i] = (a if a > b else b) + duration[i]
        last = self.last
        if behind == none:
            last[device] = u
        length = max([end[i] for i in last])
        if length > limit:
            previous[u], previous[v], previous[behind] = before, u, v
            if behind == none:
                last[device] = v
            return False
        if before != none:
            following[before] = v
        following[v], following[u] = u, behind
        self.live[v] = self.live[u]
        self.live[u] = self.live[v] + self.delta[v]
        self.end, self.length = end, length
        order[low : high + 1] = fresh
        for at in range(low, high + 1):
            self.position[order[at]] = at
        return True
