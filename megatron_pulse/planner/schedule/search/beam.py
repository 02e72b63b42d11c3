"""Modulo templates by beam search: quick, without a solver.

The classes are placed one after the other along a microbatch's path. A place is a gap of the
device's period, flush with a neighbour, or so that other classes still to come fit in between. Of
all partial templates those are kept that promise the least memory above the caps, then the least
delay of the path (../README.md: Search).
"""

from __future__ import annotations

from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from megatron_pulse.planner.schedule.compiled import compiled, part, zeros
from megatron_pulse.planner.schedule.operations import Kind
from megatron_pulse.planner.schedule.search.jobshop import JobShop
from megatron_pulse.planner.schedule.search.template import Template

MOST_WORK = 30_000_000
"""Sizes put into gaps to see whether all fit, beyond which there is no template: with twenty
classes of all lengths on a device that would take minutes."""

ROUNDING = 1e-12
"""Share of a device's memory that is not counted as above it: units may be too many for doubles."""


class _Classes(NamedTuple):
    """Of each class its duration, device, change of memory, earliest start, and the class and lag
    that it waits for (-1: none); which are weight gradients, and which the last of their stages.
    ``cap`` is by device."""

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
    """The classes in the order in which they are placed. What comes after step i of it on the same
    device takes, ascending, ``later[first[i]:first[i + 1]]``; ``sums[begin[i]:begin[i + 1]]`` are
    sums of some of these: of up to three where they are few."""

    classes: Any
    later: Any
    first: Any
    sums: Any
    begin: Any


class _States(NamedTuple):
    """Partial templates, a row each: starts by class (-1: none); what is taken of each device's
    period, ``taken`` times from ``begin`` in [0, period) to ``end``, in order; the path's delay;
    and by device what memory it comes to: ``life + held * delay`` over the period."""

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
    """Up to ``count`` templates of that period, those with the least memory over the caps first;
    none where to see what fits takes more than ``MOST_WORK``.

    The best may exceed a cap (``template.faults``): its order is then still a good start.
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
    apart = np.array([shop.kinds[k // num] is Kind.WEIGHT_GRAD for k in range(classes)])
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
    """So many templates without any class."""
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
    """The starts of all templates that are left in the end, the best first; begins with the first
    of ``states``, which has no class."""
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


@part
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
    """How many ``options`` there are, not before ``ready``, the earliest first."""
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


@part
def _fits(gaps: Any, sizes: Any, work: Any) -> bool:
    """Whether all sizes (ascending) can be packed into the gaps: each, from the largest on, goes
    into one gap after the other, of gaps that are alike into the first. What is put into a gap is
    counted; once that is too much, nothing fits."""
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


@part
def _before(gaps: Any, gap: int) -> bool:
    """Whether one before it is alike."""
    for other in range(gap):
        if gaps[other] == gaps[gap]:
            return True
    return False


@part
def _score(
    classes: _Classes, states: _States, s: int, k: int, t: int, period: int
) -> tuple[float, int]:
    """Memory above the caps, in shares of them, and the path's delay, if class k starts at t."""
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


@part
def _excess(classes: _Classes, states: _States, s: int, k: int, t: int, period: int) -> float:
    """What the device of class k holds above its cap in steady state, as a share, where k, at t, is
    the last of its device's last classes to be placed."""
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


@part
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
    """Let template ``to`` of the following ones be s with class k at t."""
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
