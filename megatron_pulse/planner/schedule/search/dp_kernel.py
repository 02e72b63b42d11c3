"""States of a sweep (``dp``) in arrays, for compiled functions.

Every array that a loop uses gets a local name. Access through a tuple costs Numba more than the
work in the loop.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from megatron_pulse.planner.schedule.jit import compiled, compiled_inner, stable_argsort, zeros

BLOCK = 20_000
"""Operation starts to visit between two looks at the clock."""


class ChainArrays(NamedTuple):
    """Chain of P devices and M ``microbatches`` in arrays; times in ticks, memory in units.

    ``columns`` is the number of microbatches in flight, plus the next one. ``is_split`` means that
    there are weight gradients.

    By position: ``device``, ``time``, ``lag`` (from the position before), ``weight`` (duration of
    the weight gradient that hangs on it, or 0), ``takes`` and ``gives`` (memory). ``tail[q, m]`` is
    the least time from the end of position q of microbatch m to the end of the step.

    By device and position of a microbatch: ``needs`` is the memory that it is still to take.
    ``holds`` is the memory that it has, and ``share`` the same as a share of the cap. ``life`` is
    the least memory times time, in caps times ticks, that it will use from there on. By device:
    ``load`` of a microbatch's path, ``extra`` of its weight gradients, and ``after``, the least
    time that follows the last operation of the path.
    """

    microbatches: int
    columns: int
    is_split: bool
    device: Any
    time: Any
    lag: Any
    weight: Any
    takes: Any
    gives: Any
    cap: Any
    needs: Any
    holds: Any
    share: Any
    life: Any
    tail: Any
    load: Any
    extra: Any
    after: Any

    @property
    def levels(self) -> int:
        """Number of operations of a step."""
        return int((len(self.time) + (self.weight > 0).sum()) * self.microbatches)


class StateLayer(NamedTuple):
    """``size`` states after equally many operations; microbatch ``base[z] + w`` is in column w.

    By column: ``at`` is the position, ``ready`` the earliest start of the next operation. By stage:
    ``waiting`` is the number of queued weight gradients. By device: ``free`` is the time from which
    it is free, and ``live`` its memory in use. ``left`` and ``extra`` are its remaining work on
    paths and in weight gradients. ``held`` is the share of the cap in use, ``life`` the memory
    times time as in ``ChainArrays``, with ``held`` counted from time 0. ``bound`` is a lower bound
    on the makespan.
    """

    base: Any
    at: Any
    ready: Any
    waiting: Any
    free: Any
    live: Any
    left: Any
    extra: Any
    held: Any
    life: Any
    bound: Any


class Children(NamedTuple):
    """Possible next starts: their state, operation, time, bound, and rank.

    ``what`` is a column, or, from W on, the stage of a weight gradient.
    """

    state: Any
    what: Any
    begin: Any
    bound: Any
    rank: Any


def beginning(chain: ChainArrays, width: int) -> StateLayer:
    """Allocate ``width`` states; the first is the beginning of the step."""
    columns, devices = chain.columns, len(chain.cap)
    layer = StateLayer(
        base=np.zeros(width, np.int64),
        at=np.zeros((width, columns), np.int64),
        ready=np.zeros((width, columns), np.int64),
        waiting=np.zeros((width, len(chain.time) // 2), np.int64),
        free=np.zeros((width, devices), np.int64),
        live=np.zeros((width, devices), np.int64),
        left=np.zeros((width, devices), np.int64),
        extra=np.zeros((width, devices), np.int64),
        held=np.zeros((width, devices)),
        life=np.zeros((width, devices)),
        bound=np.zeros(width),
    )
    layer.left[0] = chain.load * chain.microbatches
    layer.extra[0] = chain.extra * chain.microbatches
    layer.life[0] = chain.life[:, 0] * chain.microbatches
    return layer


def no_children(layer: StateLayer) -> Children:
    """Allocate the children of all states of a layer."""
    width, columns = layer.at.shape
    rows = width * (columns + layer.waiting.shape[1])
    return Children(
        state=np.zeros(rows, np.int32),
        what=np.zeros(rows, np.int32),
        begin=np.zeros(rows, np.int64),
        bound=np.zeros(rows),
        rank=np.zeros(rows),
    )


@compiled
def levels(
    chain: ChainArrays,
    now: StateLayer,
    then: StateLayer,
    children: Children,
    table: Any,
    parent: Any,
    code: Any,
    level: int,
    size: int,
    below: float,
    favour: float,
) -> tuple[int, int, bool, int]:
    """Go on from ``level`` until ``BLOCK`` starts were visited.

    Returns the level reached, its number of states, whether any state was left out, and the number
    of starts visited.
    """
    looked, left_out = 0, False
    while level < len(parent) and size and looked < BLOCK:
        found, more = _expand(chain, now, size, children, below, favour)
        size, dropped = _keep(chain, now, then, children, found, table, parent[level], code[level])
        looked += more
        left_out |= dropped
        level += 1
        now, then = then, now
    return level, size, left_out, looked


@compiled_inner
def _expand(
    chain: ChainArrays, now: StateLayer, size: int, children: Children, below: float, favour: float
) -> tuple[int, int]:
    """Put possible next starts into ``children``; return their number and the number visited.

    A device's estimate is the larger of its remaining work and its memory times time.
    """
    device_of, time_of, lag, weight = chain.device, chain.time, chain.lag, chain.weight
    takes, tail, after = chain.takes, chain.tail, chain.after
    share, life_of = chain.share, chain.life
    base, at, ready, waiting = now.base, now.at, now.ready, now.waiting
    free, left, extra, held, life = now.free, now.left, now.extra, now.held, now.life
    length, columns, stages, devices = len(time_of), at.shape[1], waiting.shape[1], len(after)
    what, begin = zeros(columns + stages), zeros(columns + stages)
    time, device = zeros(columns + stages), zeros(columns + stages)
    soonest = zeros(devices)  # earliest end of an operation that takes no memory
    looked = found = 0
    for z in range(size):
        count = 0
        for d in range(devices):
            soonest[d] = 1 << 60
        for w in range(min(columns, chain.microbatches - base[z])):
            q = at[z, w]
            d = device_of[q]
            if w == 0 or at[z, w - 1] > q:
                grows = takes[q]
                if not grows or _is_safe(
                    at, z, w, chain.needs, chain.holds, d, grows, chain.cap[d], now.live[z, d]
                ):
                    what[count], device[count], time[count] = w, d, time_of[q]
                    begin[count] = max(free[z, d], ready[z, w])
                    if not grows:
                        soonest[d] = min(soonest[d], begin[count] + time[count])
                    count += 1
            if q == 0:
                break
        for s in range(stages):
            if waiting[z, s]:
                d = device_of[s]
                what[count], device[count], time[count] = columns + s, d, weight[length - 1 - s]
                begin[count] = free[z, d]
                soonest[d] = min(soonest[d], begin[count] + time[count])
                count += 1
        for e in range(count):
            if begin[e] >= soonest[device[e]]:
                continue
            looked += 1
            q, since, on_path = 0, 0, what[e] < columns
            end = arrives = begin[e] + time[e]
            bound = now.bound[z]
            if on_path:
                q, since = at[z, what[e]], ready[z, what[e]]
                bound = max(bound, float(end + tail[q, base[z] + what[e]]))
                if q + 1 < length:
                    arrives += lag[q + 1]
            total = 0.0
            for d in range(devices):
                start, path, rest = max(free[z, d], begin[e]), left[z, d], extra[z, d]
                holds, lives = held[z, d], life[z, d]
                if d == device[e]:
                    start = end
                    if on_path:
                        path -= time[e]
                    else:
                        rest -= time[e]
                if on_path:
                    holds += share[d, q + 1] - share[d, q]
                    lives += life_of[d, q + 1] - life_of[d, q]
                    lives += share[d, q + 1] * arrives - share[d, q] * since
                comes = float(start + path + rest)
                full = begin[e] + lives - holds * begin[e]
                if path:
                    comes = max(comes, float(start + path + after[d]))
                    if not chain.is_split:
                        full += after[d]
                comes = max(comes, full)
                total += comes
                bound = max(bound, comes)
            if bound < below - 1e-6:
                children.state[found], children.what[found] = z, what[e]
                children.begin[found], children.bound[found] = begin[e], bound
                children.rank[found] = bound + favour * total / devices
                found += 1
    return found, looked


@compiled_inner
def _is_safe(
    at: Any, z: int, w: int, needs: Any, holds: Any, d: int, takes: int, cap: int, live: int
) -> bool:
    """True if the next forward of column w of state z is safe on device d.

    The device must have the memory, and all microbatches in flight must still be able to complete.
    """
    if live + takes > cap:
        return False
    spare = cap - takes
    last = w
    for v in range(at.shape[1]):
        if at[z, v]:
            last = max(last, v)
            spare -= holds[d, at[z, v]]
    for v in range(last + 1):
        own = takes if v == w else 0
        if needs[d, at[z, v]] - own > spare:
            return False
        spare += holds[d, at[z, v]] + own
    return True


@compiled_inner
def _keep(
    chain: ChainArrays,
    now: StateLayer,
    then: StateLayer,
    children: Children,
    found: int,
    table: Any,
    parent: Any,
    code: Any,
) -> tuple[int, bool]:
    """Turn the best of ``found`` children into states, unless another state dominates them.

    Returns the number of states, and whether children were left out for lack of room. ``code`` is
    the position of the started operation, or L + the stage of a weight gradient.
    """
    device, time, lag, weight = chain.device, chain.time, chain.lag, chain.weight
    takes, gives, share, life_of = chain.takes, chain.gives, chain.share, chain.life
    base, at, ready, waiting = then.base, then.at, then.ready, then.waiting
    free, live, left, extra = then.free, then.live, then.left, then.extra
    held, life, old = then.held, then.life, now
    length, columns, stages = len(time), at.shape[1], waiting.shape[1]
    devices, width, count = len(chain.cap), len(base), chain.microbatches
    following, hashes = zeros(width), zeros(width)
    mask = len(table) - 1
    for i in range(len(table)):
        table[i] = -1
    y: Any = np.int64(0)  # a literal 0 would be compiled separately
    for child in stable_argsort(children.rank, found):
        if y == width:
            return y, True
        z, what, begin = children.state[child], children.what[child], children.begin[child]
        _copy(old.at, at, z, y)
        _copy(old.ready, ready, z, y)
        _copy(old.waiting, waiting, z, y)
        _copy(old.free, free, z, y)
        _copy(old.live, live, z, y)
        _copy(old.left, left, z, y)
        _copy(old.extra, extra, z, y)
        base[y] = old.base[z]
        if what < columns:
            q = at[y, what]
            code[y], d, end = q, device[q], begin + time[q]
            left[y, d] -= time[q]
            live[y, d] += takes[q]
            if weight[q]:
                waiting[y, length - 1 - q] += 1
            else:
                live[y, d] -= gives[q]
            at[y, what] = q + 1
            if q + 1 < length:
                ready[y, what] = end + lag[q + 1]
            else:  # the oldest microbatch, which is in column 0
                base[y] += 1
                for w in range(columns - 1):
                    at[y, w], ready[y, w] = at[y, w + 1], ready[y, w + 1]
                at[y, columns - 1] = ready[y, columns - 1] = 0
        else:
            s = what - columns
            q = length - 1 - s
            code[y], d, end = length + s, device[q], begin + weight[q]
            extra[y, d] -= weight[q]
            live[y, d] -= gives[q]
            waiting[y, s] -= 1
        free[y, d] = end
        for d in range(devices):
            free[y, d] = max(free[y, d], begin)  # nothing starts before the last start
        key = base[y] * 1_000_003
        for w in range(columns):
            key = (key ^ at[y, w]) * 1_099_511_628_211
            if base[y] + w < count:
                ready[y, w] = max(ready[y, w], free[y, device[at[y, w]]])
        for s in range(stages):
            key = (key ^ waiting[y, s]) * 1_099_511_628_211
        key ^= key >> 29
        other = table[key & mask]
        while other >= 0:
            if (
                hashes[other] == key
                and base[other] == base[y]
                and _none_later(ready, other, y)
                and _none_later(free, other, y)
                and _equal(at, other, y)
                and _equal(waiting, other, y)
            ):
                break
            other = following[other]
        if other >= 0:
            continue
        hashes[y], following[y] = key, table[key & mask]
        table[key & mask] = y
        parent[y], then.bound[y] = z, children.bound[child]
        for d in range(devices):
            holds, lives = 0.0, max(0, count - base[y] - columns) * life_of[d, 0]
            for w in range(min(columns, count - base[y])):
                q = at[y, w]
                holds += share[d, q]
                lives += life_of[d, q] + share[d, q] * ready[y, w]
            held[y, d], life[y, d] = holds, lives
        y += 1
    return y, False


@compiled_inner
def _copy(source: Any, target: Any, z: int, y: int) -> None:
    for i in range(target.shape[1]):
        target[y, i] = source[z, i]


@compiled_inner
def _equal(values: Any, a: int, b: int) -> bool:
    for i in range(values.shape[1]):
        if values[a, i] != values[b, i]:
            return False
    return True


@compiled_inner
def _none_later(times: Any, a: int, b: int) -> bool:
    for i in range(times.shape[1]):
        if times[a, i] > times[b, i]:
            return False
    return True
