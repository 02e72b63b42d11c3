"""Templates by beam search: periodic schedules that repeat one microbatch every period.

Throughput and memory of a template do not depend on the number of microbatches. The classes are
placed one after the other along a microbatch's path. A class goes into a gap of the device's
period, flush with a neighbour, or so that remaining classes still fit in between. The search keeps
the partial templates with the least predicted memory above the caps, then with the least delay of
the path (../README.md: Search).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from megatron_pulse.planner.schedule.jit import compiled, compiled_inner, zeros
from megatron_pulse.planner.schedule.operations import OpType
from megatron_pulse.planner.schedule.search.jobshop import JobShop

MOST_WORK = 30_000_000
"""Limit of trial placements in the packing checks; beyond it there is no template.

Twenty classes of different lengths on a device would otherwise take minutes.
"""

ROUNDING = 1e-12
"""Share of a device's memory by which it may be exceeded: units may be too many for doubles."""


@dataclass(frozen=True)
class Template:
    """Class k starts microbatch m at ``start[k] + m * period``; all in ticks of a JobShop."""

    period: int
    start: tuple[int, ...]

    def unrolled(self, num_microbatches: int) -> list[int]:
        """Start times of every operation of a JobShop, the first at 0."""
        first = min(self.start)
        return [t - first + m * self.period for t in self.start for m in range(num_microbatches)]

    def keeps_caps(self, shop: JobShop) -> bool:
        """True if no device exceeds its memory in the steady state, for ever."""
        count = shop.num_microbatches
        for device, cap in enumerate(shop.cap):
            change = {k: shop.delta[k * count] for k in shop.classes_of(device)}
            for now, grows in change.items():
                begun = ((self.start[now] - self.start[k]) // self.period for k in change)
                live = sum(map(mul, change.values(), begun))
                if grows > 0 and live > cap:
                    return False
        return True


class _Classes(NamedTuple):
    """Attributes of each class.

    They are duration, device, change of memory, earliest start, predecessor and its lag (-1: none).
    ``apart`` marks weight gradients, ``last`` the last class of each stage. ``cap`` is by device.
    """

    duration: Any
    device: Any
    change: Any
    head: Any
    source: Any
    lag: Any
    apart: Any
    last: Any
    cap: Any


class _Path(NamedTuple):
    """Classes in the order of placement.

    ``later[first[i]:first[i + 1]]`` are the durations, ascending, of the classes after step i on
    the same device. ``sums[begin[i]:begin[i + 1]]`` are sums of up to three of them (fewer if there
    are many).
    """

    classes: Any
    later: Any
    first: Any
    sums: Any
    begin: Any


class _States(NamedTuple):
    """Partial templates, one per row.

    ``start`` is by class (-1: not placed). ``begin`` and ``end`` are the ``taken`` occupied
    intervals of each device's period, in order, with begins in [0, period). ``delay`` is the path's
    delay. The memory of a device is ``life + held * delay`` over the period; ``excess`` is its part
    above the caps.
    """

    start: Any
    begin: Any
    end: Any
    taken: Any
    delay: Any
    life: Any
    held: Any
    excess: Any


def beam_templates(
    shop: JobShop, period: int, width: int = 32, branches: int = 5, count: int = 4
) -> list[Template]:
    """Find up to ``count`` templates of that period, those with the least memory above the caps
    first.

    Returns none if the packing checks take more than ``MOST_WORK``. The best may exceed a cap
    (``keeps_caps``): its order is then still a good start.
    """
    states, following = _empty(shop, width), _empty(shop, width)
    found = _search(_classes(shop), _path(shop), states, following, period, branches)
    return [Template(period, tuple(start)) for start in found[:count].tolist()]


def _classes(shop: JobShop) -> _Classes:
    step, num, classes = shop.num_microbatches, shop.placement.num_stages, shop.num_classes
    waits = [shop.before[k * step][:1] for k in range(classes)]
    columns = (
        shop.duration[::step],
        shop.device[::step],
        shop.heads(),
        [each[0][0] // step if each else -1 for each in waits],
        [each[0][1] if each else 0 for each in waits],
    )
    duration, device, head, source, lag = (np.array(c, dtype=np.int64) for c in columns)
    apart = np.array([shop.kinds[k // num] is OpType.WEIGHT_GRAD for k in range(classes)])
    change, cap = (np.array(c, dtype=np.float64) for c in (shop.delta[::step], shop.cap))
    last = np.arange(classes) >= classes - num
    return _Classes(duration, device, change, head, source, lag, apart, last, cap)


def _path(shop: JobShop) -> _Path:
    step, num, classes = shop.num_microbatches, shop.placement.num_stages, shop.num_classes
    path = list(range(num))
    for stage in reversed(range(num)):
        path += range(num + stage, classes, num)
    rest: list[list[int]] = [[] for _ in shop.cap]
    later, sums = [], []
    for k in reversed(path):
        sizes = rest[shop.device[k * step]]
        most = 3 if len(sizes) <= 3 else 2 if len(sizes) <= 5 else 1
        later.append(sorted(sizes))
        sums.append({sum(c) for n in range(1, most + 1) for c in combinations(sizes, n)})
        sizes.append(shop.duration[k * step])
    tables: list[Any] = [np.array(path)]
    for rows in (later[::-1], sums[::-1]):
        tables.append(np.array([size for row in rows for size in row], dtype=np.int64))
        tables.append(np.cumsum([0, *map(len, rows)]))
    return _Path(*tables)


def _empty(shop: JobShop, count: int) -> _States:
    """``count`` templates without any class."""
    classes, devices, heads = shop.num_classes, len(shop.cap), shop.heads()
    each = [shop.classes_of(d) for d in range(devices)]
    most = max(map(len, each))
    life = [
        float(-sum(shop.delta[k * shop.num_microbatches] * heads[k] for k in mine)) for mine in each
    ]
    return _States(
        np.full((count, classes), -1),
        np.zeros((count, devices, most), np.int64),
        np.zeros((count, devices, most), np.int64),
        np.zeros((count, devices), np.int64),
        np.zeros(count, np.int64),
        np.array([life] * count),
        np.zeros((count, devices)),
        np.zeros(count),
    )


@compiled
def _search(
    classes: _Classes,
    path: _Path,
    states: _States,
    following: _States,
    period: int,
    branches: int,
) -> Any:
    """Starts of all complete templates, the best first; ``states`` begins with the empty
    template."""
    live, width, work = 1, len(following.delay), zeros(1)
    options, parent, at = zeros(branches), zeros(width), zeros(width)
    over, delay = np.zeros(width), zeros(width)
    for step in range(len(path.classes)):
        k = path.classes[step]
        device, source = classes.device[k], classes.source[k]
        later = path.later[path.first[step] : path.first[step + 1]]
        sums = path.sums[path.begin[step] : path.begin[step + 1]]
        found = 0
        for s in range(live):
            ready = 0
            if source >= 0:
                ready = states.start[s, source] + classes.duration[source] + classes.lag[k]
            begin, end = states.begin[s, device], states.end[s, device]
            taken, need = states.taken[s, device], classes.duration[k]
            num = _places(begin, end, taken, ready, need, period, later, sums, options, work)
            for o in range(num):
                much, late = _score(classes, states, s, k, options[o], period)
                place = found
                while place > 0 and (
                    much < over[place - 1] or (much == over[place - 1] and late < delay[place - 1])
                ):
                    place -= 1
                if place == width:
                    continue
                found = min(width, found + 1)
                for other in range(found - 1, place, -1):
                    over[other], delay[other] = over[other - 1], delay[other - 1]
                    parent[other], at[other] = parent[other - 1], at[other - 1]
                over[place], delay[place], parent[place], at[place] = much, late, s, options[o]
        for s in range(found):
            _place(classes, states, parent[s], following, s, k, at[s], period)
        states, following, live = following, states, 0 if work[0] > MOST_WORK else found
    return states.start[:live]


@compiled_inner
def _places(
    begins: Any,
    ends: Any,
    taken: int,
    ready: int,
    need: int,
    period: int,
    later: Any,
    sums: Any,
    options: Any,
    work: Any,
) -> int:
    """Fill ``options`` with starts from ``ready`` on, the earliest first; return their number."""
    if taken == 0:
        options[0] = ready
        return 1
    gaps, choices, left, count = zeros(taken), zeros(2 * len(sums) + 3), zeros(taken + 1), 0
    for i in range(taken):
        following = begins[i + 1] if i + 1 < taken else begins[0] + period
        gaps[i] = following - ends[i]
    for i in range(taken):
        room = gaps[i] - need
        if gaps[i] <= 0 or room < 0:
            continue
        choices[0], choices[1], num = 0, room, 2
        for k in range(len(sums)):
            if sums[k] < room:
                choices[num], choices[num + 1] = sums[k], room - sums[k]
                num += 2
        into = (ready - ends[i]) % period
        if into <= room:
            choices[num] = into
            num += 1
        for k in range(num):
            choice = choices[k]
            t = ready + (ends[i] + choice - ready) % period
            place = count
            while place > 0 and options[place - 1] > t:
                place -= 1
            if place == len(options) or (place > 0 and options[place - 1] == t):
                continue
            for j in range(taken):
                left[j] = gaps[j]
            left[i], left[taken] = choice, room - choice
            if not _fits(left, later, work):
                continue
            count = min(len(options), count + 1)
            for other in range(count - 1, place, -1):
                options[other] = options[other - 1]
            options[place] = t
    return count


@compiled_inner
def _fits(gaps: Any, sizes: Any, work: Any) -> bool:
    """True if all sizes (ascending) can be packed into the gaps.

    Backtracking search, largest size first; of equal gaps only the first is tried. Placements are
    counted in ``work``; once they exceed the limit, nothing fits.
    """
    chosen, depth, spare = zeros(len(sizes) + 1), 0, 0
    for i in range(len(gaps)):
        spare += gaps[i]
    for i in range(len(sizes)):
        chosen[i] = -1
        spare -= sizes[i]
    if spare < 0:
        return False
    while depth < len(sizes):
        work[0] += 1
        if work[0] > MOST_WORK:
            return False
        size, gap = sizes[len(sizes) - 1 - depth], chosen[depth]
        if gap >= 0:
            gaps[gap] += size
        gap += 1
        while gap < len(gaps) and (gaps[gap] < size or _before(gaps, gap)):
            gap += 1
        if gap == len(gaps):
            if depth == 0:
                return False
            chosen[depth] = -1
            depth -= 1
        else:
            gaps[gap] -= size
            chosen[depth] = gap
            depth += 1
    return True


@compiled_inner
def _before(gaps: Any, gap: int) -> bool:
    """True if an earlier gap has the same size."""
    for other in range(gap):
        if gaps[other] == gaps[gap]:
            return True
    return False


@compiled_inner
def _score(
    classes: _Classes, states: _States, s: int, k: int, t: int, period: int
) -> tuple[float, int]:
    """Relative memory above the caps, and the path's delay, if class k starts at t."""
    device, late = classes.device[k], t - classes.head[k]
    life = states.life[s, device] - classes.change[k] * late
    held = states.held[s, device] + classes.change[k]
    delay = states.delay[s] if classes.apart[k] else late
    over = states.excess[s] + _excess(classes, states, s, k, t, period)
    for d in range(len(classes.cap)):
        cap = classes.cap[d]
        alive, lives = (held, life) if d == device else (states.held[s, d], states.life[s, d])
        rate = (lives + alive * delay) / period
        if alive != 0 and rate > cap * (1 + ROUNDING):
            over += (rate - cap) / max(cap, 1.0)
    return over, delay


@compiled_inner
def _excess(classes: _Classes, states: _States, s: int, k: int, t: int, period: int) -> float:
    """Relative memory above the cap in steady state on the device of class k, which starts at t.

    The value is 0 until all last classes of the device's stages are placed.
    """
    device, start = classes.device[k], states.start[s]
    if not classes.last[k]:
        return 0.0
    for b in range(len(start)):
        if classes.last[b] and classes.device[b] == device and b != k and start[b] < 0:
            return 0.0
    most, cap = 0.0, classes.cap[device]
    for now in range(len(start)):
        if classes.device[now] == device and classes.change[now] > 0:
            peak = 0.0
            for b in range(len(start)):
                if classes.device[b] == device:
                    begun = (t if now == k else start[now]) - (t if b == k else start[b])
                    peak += classes.change[b] * (begun // period)
            most = max(most, peak)
    return max(0.0, most - cap) / max(cap, 1.0) if most > cap * (1 + ROUNDING) else 0.0


@compiled_inner
def _place(
    classes: _Classes,
    states: _States,
    s: int,
    following: _States,
    to: int,
    k: int,
    t: int,
    period: int,
) -> None:
    """Let template ``to`` of ``following`` be template s of ``states`` with class k at t."""
    device, late, change = classes.device[k], t - classes.head[k], classes.change[k]
    following.excess[to] = states.excess[s] + _excess(classes, states, s, k, t, period)
    following.delay[to] = states.delay[s] if classes.apart[k] else late
    for b in range(len(classes.device)):
        following.start[to, b] = t if b == k else states.start[s, b]
    for d in range(len(classes.cap)):
        following.life[to, d], following.held[to, d] = states.life[s, d], states.held[s, d]
        following.taken[to, d] = states.taken[s, d]
        for i in range(states.taken[s, d]):
            following.begin[to, d, i] = states.begin[s, d, i]
            following.end[to, d, i] = states.end[s, d, i]
    following.life[to, device] -= change * late
    following.held[to, device] += change
    at, begin = following.taken[to, device], t % period
    while at > 0 and following.begin[to, device, at - 1] > begin:
        following.begin[to, device, at] = following.begin[to, device, at - 1]
        following.end[to, device, at] = following.end[to, device, at - 1]
        at -= 1
    following.begin[to, device, at] = begin
    following.end[to, device, at] = begin + classes.duration[k]
    following.taken[to, device] += 1
