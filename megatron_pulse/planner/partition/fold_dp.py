"""Optimal fold: a dynamic program over nested pairs of stages, from the outside in.

In state (a, b) the layers before a and from b on are placed. A step takes the next pair, the layers
[a, a') and [b', b), for the next device. The cost of a pair depends on (a, a', b', b) alone. A skip
with both ends inside the pair is local. A skip with a single end inside travels, wherever its other
end is. The largest load, the largest stage and the sum of bytes are therefore exact, with skips
collocated by force or by choice. Source: PULSE, section IV, algorithm 1, extended by the device
load, memory, and routed skips.

An upper bound on the measure keeps the states few; the bound is widened until something fits. Outer
devices cannot hold more than the bound. They also cannot hold so little that an inner device would
exceed the bound. If devices differ, the rest counts in the shortest times of any of them, and a
device does at most its bound over its smallest ratio to these times.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_pulse.backbone.costs import Floats, running_sum
from megatron_pulse.planner.partition.pair_costs import SLACK, Bools, Ints, PairCosts, ragged

_MOST_AT_ONCE = 4_000_000

_STEPS = tuple(1.02 * 1.1**k for k in range(48))
_FEW_STEPS = (1.02, 1.05, 1.1, 1.2, 1.4, 1.8, 2.6, 4.2, 8.0)
"""Bounds to try, relative to an even spread.

A looser bound takes longer to search, and an infeasible bound fails quickly. Under a memory limit
infeasible bounds can take long as well, so there are fewer steps.
"""


@dataclass
class _Devices:
    """Costs of the pairs on each device, from the outside in."""

    pairs: Sequence[PairCosts]

    @property
    def num_pairs(self) -> int:
        return len(self.pairs)

    @property
    def limits_memory(self) -> bool:
        return any(pairs.memory is not None for pairs in self.pairs)

    @cached_property
    def rest(self) -> list[_Rest]:
        """Work of the devices from each one inwards."""
        return [_Rest.of(self.pairs[first:], first) for first in range(self.num_pairs)]

    def __getitem__(self, pair: int) -> PairCosts:
        return self.pairs[pair]


@dataclass
class _Rest:
    """Sums of the shortest times, and how much of them some devices do in a second.

    ``speeds`` are one over a device's smallest ratio to the shortest times, summed.
    ``beside_s`` are the seconds that the devices are busy with other chains, as such time.
    """

    compute: Floats
    forward: Floats
    speeds: float
    forward_speeds: float
    beside_s: float

    @staticmethod
    def of(devices: Sequence[PairCosts], first: int) -> _Rest:
        own = devices[0]
        if all(pairs is own for pairs in devices):
            num, beside = float(len(devices)), float(own.beside_s[first:].sum())
            return _Rest(own.compute, own.forward, num, num, beside)
        costs = [pairs.costs for pairs in devices]
        compute, ratios = _shortest([np.add(of.forward_s, of.backward_s) for of in costs])
        forward, of_forward = _shortest([np.array(of.forward_s) for of in costs])
        beside_s = sum(
            float(pairs.beside_s[first + k]) / ratio
            for k, (pairs, ratio) in enumerate(zip(devices, ratios, strict=True))
        )
        return _Rest(
            running_sum(compute.tolist()),
            running_sum(forward.tolist()),
            sum(1 / ratio for ratio in ratios),
            sum(1 / ratio for ratio in of_forward),
            beside_s,
        )


def _shortest(times: Sequence[Floats]) -> tuple[Floats, list[float]]:
    """Shortest time of each layer, and the least ratio of each device's times to these."""
    least = np.min(times, axis=0)
    some = least > 0
    ratios = [float((own[some] / least[some]).min(initial=np.inf)) for own in times]
    return least, [ratio if np.isfinite(ratio) else 1.0 for ratio in ratios]


def optimal_fold(
    pairs: PairCosts | Sequence[PairCosts],
    closed: Bools | None,
    order: tuple[str, ...],
    slack: float = 0.0,
) -> tuple[int, ...] | None:
    """Cuts of the fold that is smallest by the measures of ``order``, the most important first.

    ``pairs`` are the costs of a pair of stages, or those on each device if devices differ. A
    measure may exceed its smallest value by the share ``slack`` if a later measure gains.

    With ``closed``, every cut (a, b) must have ``closed[a, b]``: no skip has exactly one end among
    the layers a <= i < b. Returns None if no fold is legal and fits.
    """
    if isinstance(pairs, PairCosts):
        pairs = [pairs] * pairs.num_pairs
    devices = _Devices(pairs)
    caps: dict[str, float] = {}
    cuts: tuple[int, ...] | None = None
    for measure in order:
        if cuts is not None and "bytes" in caps:
            value, cuts = _smallest_within_bytes(devices, closed, measure, caps, cuts)
        else:
            found = None
            for cap in _widening(devices, measure):
                found = _search(devices, closed, measure, {**caps, measure: cap})
                if found is not None:
                    break
            if found is None:
                return None
            value, cuts = found
        caps[measure] = value * (1 + slack) * SLACK
    return cuts


def _smallest_within_bytes(
    devices: _Devices,
    closed: Bools | None,
    measure: str,
    caps: dict[str, float],
    cuts: tuple[int, ...],
) -> tuple[float, tuple[int, ...]]:
    """Smallest ``measure``, and its cuts, within ``caps`` that include the sum of bytes.

    ``cuts`` are a feasible start. The fewest bytes fall as the bound on the measure of each pair
    rises. Bisection finds the lowest bound at which the bytes are within their cap.
    """
    low, high = 0.0, _largest(devices, measure, cuts)
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        found = _search(devices, closed, "bytes", {**caps, measure: middle})
        if found is not None and found[0] <= caps["bytes"]:
            cuts = found[1]
            high = _largest(devices, measure, cuts)
        else:
            low = middle
    return high, cuts


def _largest(devices: _Devices, measure: str, cuts: tuple[int, ...]) -> float:
    """Value of ``measure`` for the largest pair."""
    half = devices.num_pairs + 1
    ahead, behind = np.array(cuts[:half]), np.array(cuts[: -half - 1 : -1])
    ends = np.stack([ahead[:-1], ahead[1:], behind[1:], behind[:-1]])[:, :, None]
    values = (
        getattr(pairs, measure)(number, *ends[:, number])
        for number, pairs in enumerate(devices.pairs)
    )
    return max(float(value.max()) for value in values)


def _widening(devices: _Devices, measure: str) -> list[float]:
    """Bounds to try, from that of an even spread to infinity."""
    rest = devices.rest[0]
    busiest = max(float(pairs.beside_s[number]) for number, pairs in enumerate(devices.pairs))
    even = {
        "load": max((rest.compute[-1] + rest.beside_s) / rest.speeds, busiest),
        "stage": rest.forward[-1] / (2 * rest.forward_speeds),
    }
    if measure not in even or even[measure] == 0:
        return [np.inf]
    steps = _FEW_STEPS if devices.limits_memory else _STEPS
    return [even[measure] * step for step in steps] + [np.inf]


@dataclass
class _Level:
    """States after a device, the best value of each, and its parent state."""

    a: Ints
    b: Ints
    value: Floats
    parent: Ints


def _search(
    devices: _Devices, closed: Bools | None, measure: str, caps: dict[str, float]
) -> tuple[float, tuple[int, ...]] | None:
    """Smallest value of ``measure`` and its cuts, with no pair above ``caps``; None if
    infeasible."""
    num = len(devices[0].costs.names)
    start = np.array([0]), np.array([num]), np.array([0.0]), np.array([0])
    levels = [_Level(*start)]
    for pair in range(devices.num_pairs):
        level = _next_level(devices, closed, measure, caps, levels[-1], pair)
        if level is None:
            return None
        levels.append(level)
    best = int(np.argmin(levels[-1].value))
    value = float(levels[-1].value[best])
    heads, tails = [], []
    for level in reversed(levels):
        heads.append(int(level.a[best]))
        tails.append(int(level.b[best]))
        best = int(level.parent[best])
    return value, (*reversed(heads), *tails[1:])


def _next_level(
    devices: _Devices,
    closed: Bools | None,
    measure: str,
    caps: dict[str, float],
    level: _Level,
    pair: int,
) -> _Level | None:
    pairs = devices[pair]
    found: list[tuple[Ints, Ints, Floats, Ints]] = []
    for state, a2, b2 in _portions(devices, caps, level, pair):
        if closed is not None and pair + 1 < devices.num_pairs:
            state, a2, b2 = _where(closed[a2, b2], state, a2, b2)
        a, b = level.a[state], level.b[state]
        state, a2, b2 = _where(pairs.fits(pair, a, a2, b2, b), state, a2, b2)
        capped = [name for name in ("load", "stage") if caps.get(name, np.inf) < np.inf]
        for name in (*(name for name in capped if name != measure), measure):
            values = getattr(pairs, name)(pair, level.a[state], a2, b2, level.b[state])
            if name in capped:
                within: Bools = values <= caps[name] * SLACK
                values = values[within]
                state, a2, b2 = _where(within, state, a2, b2)
        before = level.value[state]
        total = before + values if measure == "bytes" else np.maximum(before, values)
        found.append(_best(a2, b2, total, state))
    if not found:
        return None
    a2, b2, value, parent = (np.concatenate(column) for column in zip(*found, strict=True))
    return _Level(*_best(a2, b2, value, parent)) if len(a2) else None


def _where(keep: Bools, *columns: Ints) -> tuple[Ints, ...]:
    return tuple(column[keep] for column in columns)


def _best(a: Ints, b: Ints, value: Floats, parent: Ints) -> tuple[Ints, Ints, Floats, Ints]:
    """Deduplicate states, keeping the smallest value of each, and the first of equal values."""
    if not len(a):
        return a, b, value, parent
    width = int(b.max()) + 1
    state = a * width + b
    least = np.full(int(state.max()) + 1, np.inf)
    np.minimum.at(least, state, value)
    smallest = np.flatnonzero(value == least[state])
    first = np.full(len(least), -1)
    first[state[smallest[::-1]]] = smallest[::-1]
    chosen: Ints = first[first >= 0]
    return a[chosen], b[chosen], value[chosen], parent[chosen]


def _portions(
    devices: _Devices, caps: dict[str, float], level: _Level, pair: int
) -> list[tuple[Ints, Ints, Ints]]:
    """(state, a2, b2) of every next pair that computing time alone does not exclude."""
    pairs, left = devices[pair], devices.num_pairs - 1 - pair  # devices after this one
    load_cap, stage_cap = caps.get("load", np.inf), caps.get("stage", np.inf)
    compute, forward = pairs.compute, pairs.forward
    a, b = level.a, level.b
    room = load_cap * SLACK - pairs.beside_s[pair] - 2 * (pairs.send[a] + pairs.send[b])
    end = np.minimum(
        np.searchsorted(compute, compute[a] + room, "right"),
        np.searchsorted(forward, forward[a] + stage_cap * SLACK, "right"),
    )
    state, a2 = ragged(a + 1, np.minimum(end, b - 2 * left))
    if left == 0:
        return [(state, a2, a2)] if len(a2) else []
    a, b = a[state], b[state]
    room = room[state] - (compute[a2] - compute[a]) - 2 * pairs.send[a2]
    low = np.maximum(
        np.searchsorted(compute, compute[b] - room, "left"),
        np.searchsorted(forward, forward[b] - stage_cap * SLACK, "left"),
    )
    low = np.maximum(low, a2 + 2 * left)
    rest = devices.rest[pair + 1]
    within = rest.speeds * load_cap * SLACK - rest.beside_s
    most = 2 * rest.forward_speeds * stage_cap * SLACK
    high = np.minimum(
        np.searchsorted(rest.compute, rest.compute[a2] + within, "right"),
        np.searchsorted(rest.forward, rest.forward[a2] + most, "right"),
    )
    high = np.minimum(high, b)
    counts = np.maximum(high - low, 0)
    parts = []
    bounds: Ints = np.searchsorted(
        np.cumsum(counts), np.arange(0, counts.sum() + _MOST_AT_ONCE, _MOST_AT_ONCE)
    )
    edges = sorted({0, len(counts)}.union(map(int, bounds)))
    for first, last in itertools.pairwise(edges):
        owner, b2 = ragged(low[first:last], high[first:last])
        if len(owner):
            parts.append((state[first:last][owner], a2[first:last][owner], b2))
    return parts
