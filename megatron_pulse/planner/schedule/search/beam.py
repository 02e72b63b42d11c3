"""Modulo templates by beam search: quick, without a solver.

The classes are placed one after the other along a microbatch's path. A place is a gap of the
device's period, flush with a neighbour, or so that other classes still to come fit in between. Of
all partial templates those are kept that promise the least memory above the caps, then the least
delay of the path (../README.md: Search).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from megatron_pulse.planner.schedule.operations import Kind
from megatron_pulse.planner.schedule.search.jobshop import JobShop
from megatron_pulse.planner.schedule.search.template import Template, steady_peak

Busy = tuple[tuple[int, int], ...]
"""What is taken of a device's period: (begin, end) in order, begin in [0, period)."""


@dataclass(slots=True)
class _State:
    """A partial template: starts by class (-1: none), and by device what memory it comes to."""

    start: list[int]
    busy: list[Busy]
    delay: int
    life: list[int]
    open: list[int]
    excess: float
    score: tuple[float, float] = (0.0, 0.0)


def beam_templates(
    shop: JobShop, period: int, width: int = 32, branches: int = 5, count: int = 4
) -> list[Template]:
    """Up to ``count`` templates of that period, those with the least memory over the caps first.

    The best may exceed a cap (``template.faults``): its order is then still a good start.
    """
    return _Beam(shop, period).search(width, branches)[:count]


class _Beam:
    def __init__(self, shop: JobShop, period: int) -> None:
        self.shop, self.period = shop, period
        step, num = shop.num_microbatches, shop.placement.num_stages
        self.duration = [shop.duration[k * step] for k in range(shop.num_classes)]
        self.device = [shop.device[k * step] for k in range(shop.num_classes)]
        self.change = [shop.delta[k * step] for k in range(shop.num_classes)]
        self.source = [
            (shop.before[k * step][0][0] // step, shop.before[k * step][0][1])
            if shop.before[k * step]
            else (-1, 0)
            for k in range(shop.num_classes)
        ]
        self.heads = shop.heads()
        self.path = list(range(num))
        for stage in reversed(range(num)):
            self.path += range(num + stage, shop.num_classes, num)
        self.last = range(shop.num_classes - num, shop.num_classes)

    def search(self, width: int, branches: int) -> list[Template]:
        shop = self.shop
        devices = shop.placement.num_devices
        life = [0] * devices
        for device, change, head in zip(self.device, self.change, self.heads, strict=True):
            life[device] -= change * head
        empty: list[Busy] = [()] * devices
        states = [_State([-1] * shop.num_classes, empty, 0, life, [0] * devices, 0.0)]
        for at, k in enumerate(self.path):
            later = tuple(
                sorted(
                    self.duration[j]
                    for j in self.path[at + 1 :]
                    if self.device[j] == self.device[k]
                )
            )
            found = [
                self.placed(state, k, t)
                for state in states
                for t in self.places(state, k, later, branches)
            ]
            found.sort(key=lambda state: state.score)
            states = found[:width]
        return [Template(self.period, tuple(s.start)) for s in states]

    def places(self, state: _State, k: int, later: tuple[int, ...], branches: int) -> list[int]:
        """When class k can start, the earliest first."""
        period, need = self.period, self.duration[k]
        j, lag = self.source[k]
        ready = 0 if j < 0 else state.start[j] + self.duration[j] + lag
        busy = state.busy[self.device[k]]
        if not busy:
            return [ready]
        offset = ready % period
        options = set()
        sizes = _sums(later)
        gaps = list(_gaps(busy, period))
        for g, (begin, end) in enumerate(gaps):
            room = end - begin - need
            if room < 0:
                continue
            into = (offset - begin) % period
            choices = {0, room}
            choices.update(s for s in sizes if s < room)
            choices.update(room - s for s in sizes if s < room)
            if into <= room:
                choices.add(into)
            rest = [e - b for i, (b, e) in enumerate(gaps) if i != g]
            for c in choices:
                left = tuple(sorted(x for x in (*rest, c, room - c) if x))
                if _fits(left, later):
                    options.add(ready + (begin + c - offset) % period)
        return sorted(options)[:branches]

    def placed(self, state: _State, k: int, t: int) -> _State:
        shop, period, device = self.shop, self.period, self.device[k]
        start = state.start.copy()
        start[k] = t
        begin = t % period
        busy = state.busy.copy()
        busy[device] = tuple(sorted((*busy[device], (begin, begin + self.duration[k]))))
        delay = t - self.heads[k]
        life, held, excess = state.life, state.open, state.excess
        if self.change[k]:
            life, held = life.copy(), held.copy()
            life[device] -= self.change[k] * delay
            held[device] += self.change[k]
        if shop.kinds[k // shop.placement.num_stages] is Kind.WEIGHT_GRAD:
            delay = state.delay
        if k in self.last and all(start[b] >= 0 for b in self.last if self.device[b] == device):
            peak = steady_peak(shop, Template(period, tuple(start)), device)
            cap = shop.cap[device]
            excess += max(0, peak - cap) / max(cap, 1)
        over = excess
        for d, cap in enumerate(shop.cap):
            rate = (life[d] + held[d] * delay) / period
            if held[d] and rate > cap:
                over += (rate - cap) / max(cap, 1)
        return _State(start, busy, delay, life, held, excess, (over, delay))


def _gaps(busy: Busy, period: int) -> Iterator[tuple[int, int]]:
    for i, (_, end) in enumerate(busy):
        following = busy[i + 1][0] if i + 1 < len(busy) else busy[0][0] + period
        if following > end:
            yield end, following


@lru_cache(maxsize=1 << 16)
def _sums(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sums of some of the sizes: of up to three where they are few."""
    most = 3 if len(sizes) <= 3 else 2 if len(sizes) <= 5 else 1
    return tuple({sum(c) for n in range(1, most + 1) for c in combinations(sizes, n)})


@lru_cache(maxsize=1 << 16)
def _fits(gaps: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether all sizes (ascending) can be packed into the gaps."""
    if not sizes:
        return True
    if sum(sizes) > sum(gaps) or not gaps or sizes[-1] > gaps[-1]:
        return False
    largest, rest = sizes[-1], sizes[:-1]
    for i, gap in enumerate(gaps):
        if gap >= largest and (i == 0 or gaps[i - 1] != gap):
            left = (*gaps[:i], *gaps[i + 1 :], *((gap - largest,) if gap > largest else ()))
            if _fits(tuple(sorted(left)), rest):
                return True
    return False
