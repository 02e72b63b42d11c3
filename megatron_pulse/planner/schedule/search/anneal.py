"""Simulated annealing: swap neighbours on the critical path, accept slightly longer results.

A critical pair is an operation and its predecessor on the device, both on a longest path, with no
time in between. The makespan cannot shrink unless some critical pair is swapped. No swap of one
critical pair closes a cycle (van Laarhoven, Aarts and Lenstra, "Job shop scheduling by simulated
annealing", 1992). The cap only restricts the order on a device: a swap changes the memory in use at
two operations. The search may break a cap at a price, because caps would otherwise lock swaps in.
Only feasible orders are results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_pulse.planner.schedule.jit import compiled, compiled_inner, zeros
from megatron_pulse.planner.schedule.search.jobshop import JobShop


def anneal(
    shop: JobShop,
    start: Sequence[int],
    progress: Callable[[int], float],
    seed: int = 0,
    goal: int = 0,
    hot: float = 0.25,
    price: tuple[float, float] = (4.0, 16.0),
) -> list[int]:
    """Anneal from ``start`` and return the shortest feasible start times; ends early at ``goal``
    ticks.

    ``hot`` is the first temperature; ``price`` the first and last price of a forward that exceeds
    the memory; both are in units of the mean duration. ``progress`` takes the number of swaps so
    far and returns the elapsed share of the search; 1 or more ends it.
    """
    walk = _walk(shop, start)
    best = walk.end.copy()
    length = int(best.max())
    mean = sum(shop.duration) / len(shop.duration)
    share = max(1, min(500, 2_000_000 // len(shop.duration)))  # between two looks at the clock
    _seed(seed)
    swaps = 0
    while length > goal and (done := progress(swaps)) < 1:
        heat = mean * hot * 0.04**done
        fine = mean * price[0] * (price[1] / price[0]) ** done
        tried, length = _swaps(walk, best, length, share, heat, fine, goal)
        if not tried:
            break
        swaps += share
    return [int(t) for t in best[:-1] - walk.duration[:-1]]


class _Walk(NamedTuple):
    """Orders of all devices as linked lists, with the times they imply.

    Index n is a sentinel: it ended at 0 and is in no list. ``waiting[i]`` are the two operations or
    fewer whose ``source`` is i. ``rest`` is the longest path from an operation's end to the end of
    the step. ``order`` is a topological order of all operations.
    """

    microbatches: int
    duration: Any
    delta: Any
    device: Any
    cap: Any
    source: Any
    lag: Any
    waiting: Any
    previous: Any
    next: Any
    live: Any
    last: Any
    end: Any
    rest: Any
    order: Any
    position: Any


def _walk(shop: JobShop, start: Sequence[int]) -> _Walk:
    n, count = len(shop.duration), shop.num_microbatches
    source, lag = [n] * (n + 1), [0] * (n + 1)
    waiting = [[n, n] for _ in range(n + 1)]
    for i, edges in enumerate(shop.before):
        for j, between in edges:
            if j // count != i // count:
                source[i], lag[i] = j, between
                waiting[j] = [i, waiting[j][0]]
    lines = shop.lines(start)
    previous, following, live = [n] * (n + 1), [n] * (n + 1), [0] * (n + 1)
    for line in lines:
        for a, b in zip(line, line[1:], strict=False):
            previous[b], following[a] = a, b
            live[b] = live[a] + shop.delta[a]
    times = shop.timed(lines)
    order = sorted(range(n), key=times.__getitem__)
    position = [0] * (n + 1)
    for at, i in enumerate(order):
        position[i] = at
    rest = [0] * (n + 1)
    for i in reversed(order):
        for j in (following[i], *waiting[i]):
            if j != n:
                between = lag[j] if source[j] == i else 0
                rest[i] = max(rest[i], between + shop.duration[j] + rest[j])
    values = (
        [*shop.duration, 0],
        [*shop.delta, 0],
        [*shop.device, 0],
        shop.cap,
        source,
        lag,
        waiting,
        previous,
        following,
        live,
        [line[-1] for line in lines],
        [*(t + p for t, p in zip(times, shop.duration, strict=True)), 0],
        rest,
        order,
        position,
    )
    return _Walk(count, *(np.array(v, dtype=np.int64) for v in values))


@compiled
def _seed(seed: int) -> None:
    np.random.seed(seed)


@compiled
def _swaps(
    walk: _Walk, best: Any, length: int, number: int, heat: float, price: float, goal: int
) -> tuple[bool, int]:
    """Try ``number`` swaps; the ends of the shortest feasible order are kept in ``best``.

    Returns False if there was nothing to swap, and the makespan of ``best``.
    """
    n, now, over = len(walk.order), walk.end[0], 0
    trial = walk.end.copy()
    mark, fresh, pairs = zeros(n + 1), zeros(n), zeros(n)
    for i in range(n):
        now = max(now, trial[i])
        over += _lacks(walk, i, walk.live[i])
    tries = 0
    while tries < number and length > goal:
        if over and np.random.random() < 0.3:  # only to reduce memory
            pairs[0] = _stray(walk)
            found = 1 if pairs[0] != n else 0
            if not found:
                tries += 1
                continue
        else:
            found = _critical(walk, now, pairs)
            if not found:
                return tries > 0, length
        while found and tries < number:
            tries += 1
            at = int(np.random.random() * found)
            v = pairs[at]
            u = walk.previous[v]
            least = walk.live[u]
            more = (
                _lacks(walk, v, least)
                + _lacks(walk, u, least + walk.delta[v])
                - _lacks(walk, u, least)
                - _lacks(walk, v, walk.live[v])
            )
            limit = now - heat * np.log(1.0 - np.random.random()) - price * more
            reached = -1
            # At most twice the cap is in use, so that sums stay far below 2^63.
            if least + walk.delta[v] <= 2 * walk.cap[walk.device[v]]:
                reached = _swap(walk, v, limit, trial, mark, fresh, tries)
            if reached >= 0:
                now = reached
                over += more
                if now < length and not over:
                    length = now
                    for i in range(n):
                        best[i] = trial[i]
                break
            found -= 1
            pairs[at] = pairs[found]
    return True, length


@compiled_inner
def _lacks(walk: _Walk, i: int, live: int) -> int:
    """1 if ``i`` exceeds the memory with ``live`` in use before it, else 0."""
    grows = walk.delta[i]
    if grows > 0 and live + grows > walk.cap[walk.device[i]]:
        return 1
    return 0


@compiled_inner
def _stray(walk: _Walk) -> int:
    """Successor of an operation that exceeds the memory, if the two may be swapped; n if none."""
    n = len(walk.order)
    begin = int(np.random.random() * n)
    for at in range(n):
        u = (begin + at) % n
        if _lacks(walk, u, walk.live[u]):
            v: int = walk.next[u]
            if v != n and walk.source[v] != u and u // walk.microbatches != v // walk.microbatches:
                return v
    return n


@compiled_inner
def _critical(walk: _Walk, length: int, pairs: Any) -> int:
    """Put swappable operations of a random longest path into ``pairs`` and return their number.

    Each may be swapped with its predecessor on the device.
    """
    end, count, none = walk.end, walk.microbatches, len(walk.order)
    v, ends, found = none, 0, 0
    for i in walk.last:
        if end[i] == length:
            ends += 1
            if np.random.random() * ends < 1:
                v = i
    while v != none:
        begin = end[v] - walk.duration[v]
        u, j = walk.previous[v], walk.source[v]
        if u != none and end[u] == begin:
            if j != u and u // count != v // count:
                pairs[found] = v
                found += 1
            other = j != none and end[j] + walk.lag[v] == begin
            v = j if other and np.random.random() < 0.5 else u
        else:
            v = j
    return found


@compiled_inner
def _swap(walk: _Walk, v: int, limit: float, trial: Any, mark: Any, fresh: Any, stamp: int) -> int:
    """Swap v with its predecessor u unless the result is longer than ``limit``; return makespan or
    -1.

    ``trial`` equals ``walk.end`` before and after.
    """
    previous, following, source, lag = walk.previous, walk.next, walk.source, walk.lag
    duration, order, position, end = walk.duration, walk.order, walk.position, walk.end
    n, last, rest = len(order), walk.last, walk.rest
    u = previous[v]
    before, behind, device = previous[u], following[v], walk.device[u]
    # The longest path through either of them
    early = max(end[before], end[source[v]] + lag[v]) + duration[v]
    late = max(early, end[source[u]] + lag[u]) + duration[u]
    path = late + _rest(walk, u, behind)
    for j in walk.waiting[v]:
        path = max(path, early + lag[j] + duration[j] + rest[j])
    if path > limit:
        return -1
    low, high = position[u], position[v]
    # Operations that wait for u come after it in the new topological order, and v before it.
    mark[u] = stamp
    put = low
    for at in range(low + 1, high):
        i = order[at]
        if mark[previous[i]] == stamp or mark[source[i]] == stamp:
            mark[i] = stamp
        else:
            fresh[put] = i
            put += 1
    if mark[source[v]] == stamp:
        return -1  # with equal ends, a path through others is as long
    fresh[put] = v
    put += 1
    for at in range(low, high):
        i = order[at]
        if mark[i] == stamp:
            fresh[put] = i
            put += 1
    previous[v], previous[u] = before, v
    if behind != n:
        previous[behind] = u
    # Operations with changed predecessors are at positions up to ``reach``.
    at, reach = low, high
    while at <= reach:
        i = fresh[at] if at <= high else order[at]
        time = max(trial[previous[i]], trial[source[i]] + lag[i]) + duration[i]
        if time != trial[i]:
            trial[i] = time
            after = behind if i == u else following[i]
            for j in (after, walk.waiting[i, 0], walk.waiting[i, 1]):
                if j != n and position[j] > reach:
                    reach = position[j]
        at += 1
    length = 0
    for i in last:
        length = max(length, trial[u if i == v else i])
    if length > limit:
        previous[u], previous[v] = before, u
        if behind != n:
            previous[behind] = v
        for k in range(low, reach + 1):
            i = fresh[k] if k <= high else order[k]
            trial[i] = end[i]
        return -1
    if behind == n:
        last[device] = u
    if before != n:
        following[before] = v
    following[v], following[u] = u, behind
    walk.live[v] = walk.live[u]
    walk.live[u] = walk.live[v] + walk.delta[v]
    for k in range(low, high + 1):
        order[k] = fresh[k]
        position[order[k]] = k
    for k in range(low, reach + 1):
        end[order[k]] = trial[order[k]]
    at, reach = high, low
    while at >= reach:
        i = order[at]
        time = _rest(walk, i, following[i])
        if time != rest[i]:
            rest[i] = time
            for j in (previous[i], source[i]):
                if j != n and position[j] < reach:
                    reach = position[j]
        at -= 1
    return length


@compiled_inner
def _rest(walk: _Walk, i: int, after: int) -> int:
    """Longest path from the end of i to the end of the step if ``after`` runs next."""
    time: int = walk.duration[after] + walk.rest[after]
    for j in walk.waiting[i]:
        time = max(time, walk.lag[j] + walk.duration[j] + walk.rest[j])
    return time
