"""Bounded dynamic programming over the positions of all microbatches.

Operations start one after the other. The *state* of a partial schedule has the position of every
microbatch in flight, and the queued weight gradients. It also has the times at which each device
and each next operation can start. Of two partial schedules with equal counts, one that is nowhere
later dominates: any continuation of the other can follow it at the same times. With little memory
few microbatches are in flight, so counts and times are few. The search is then exhaustive, and its
schedule optimal (Gromicho et al., "Solving the job-shop scheduling problem optimally by dynamic
programming", 2012). Otherwise the ``width`` most promising states are kept after every operation (a
beam).

A forward may start only if all can still complete afterwards. The decision is exact, for one device
at a time. A microbatch frees no memory before it has taken all that it needs, and none before an
older one of its class has. So if any order completes, the oldest first does (the banker's rule).

An operation goes first if it takes no memory and would end before another could start on its
device. An earlier start can only help the rest.

The forwards and (input) gradients of a microbatch form a path of L = 2S positions. Position q is
its q-th operation; a microbatch *at* q has completed q of them. Weight gradients hang on the path.
Without weight gradients time may be reversed: the reversed path takes memory where the other frees
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.search.compaction import improve
from megatron_pulse.planner.schedule.search.dp_kernel import (
    ChainArrays,
    beginning,
    levels,
    no_children,
)
from megatron_pulse.planner.schedule.search.jobshop import JobShop, job_shop
from megatron_pulse.planner.schedule.search.time_grid import on_grid

FINE = 1 << 36
"""Ticks of the longest operation: sums are exact, and rounding is below what counts."""

BEHIND = 1.08
"""Ratio to the shortest known schedule up to which a sweep's result makes wider ones promising."""


class GrowingSweeps:
    """Sweeps of one problem; the next is wider if the last left states out.

    They run on times rounded down to whole ticks, a relaxation (``grid``). A complete sweep
    therefore proves a ``bound``, in the problem's unit. If that grid would be too fine, sweeps run
    in the ticks of ``shop`` and prove none. They also prove none if an activation changes its size
    at its input gradient, because sweeps count the larger size. ``reached`` is the length of the
    last schedule in ticks.
    """

    def __init__(self, problem: ScheduleProblem, shop: JobShop) -> None:
        grid = on_grid(problem, FINE)
        own, times = job_shop(grid.problem, FINE), grid.problem
        self.longest = max(*times.forward, *times.backward, *(times.weight_grad or ()))
        firsts = range(0, len(own.duration), own.num_microbatches)  # of each class
        each = (own.duration[i] + sum(lag for _, lag in own.before[i]) for i in firsts)
        reach = own.num_microbatches * sum(each)
        whole_ticks = max(own.duration) == self.longest and reach < 1 << 60  # sums stay below 2^63
        self.proves = problem.wgrad_holds_all and whole_ticks
        self.shop, self.ticks = shop, own if self.proves else shop
        self.unit = grid.width * self.longest / max(self.ticks.duration)
        self.bound, self.reached, self.done = 0.0, 0, False
        whole = problem.weight_grad is None
        # One device sets the bound, while others may already have wasted needed time. So the mean
        # over devices counts 8 times, or 2 times on the second turn.
        self.turns = ((False, 8.0), (True, 8.0) if whole else (False, 2.0))
        self.chains: dict[bool, ChainArrays] = {}
        self.turn, self.width, self.each, self.looked = 0, 64, 0.0, 0

    def starts(
        self, length: Callable[[], float], left: Callable[[int], float]
    ) -> Iterator[list[int]]:
        """Improved start times for the shop; from the second sweep on shorter than ``length()``.

        ``left`` maps the number of operation starts visited to the number that may still be
        visited.
        """
        self.looked = 0
        while not self.done:
            mirrored, favour = self.turns[self.turn % 2]
            if mirrored not in self.chains:
                self.chains[mirrored] = chain_of(self.ticks, mirrored)
            chain = self.chains[mirrored]
            width = min(self.width, 16_000_000 // chain.levels)  # of 8 bytes
            if self.each:
                width = int(min(width, left(self.looked) / self.each))
            if width < 0.375 * self.width:  # not 1.5 times the last
                return
            below = math.ceil(length() / self.unit * (1 - 1e-9)) if self.turn else 1 << 60
            found = sweep(chain, width, below, favour, lambda more: left(self.looked + more) <= 0)
            self.looked += found.looked
            if left(self.looked) <= 0 and not found.complete:
                return
            self.each = found.looked / width
            self.turn += 1
            self.width *= 4 if self.turn % 2 == 0 else 1
            self.done = found.complete
            if found.order is not None:
                lines = lines_of(self.ticks, found.order, mirrored)
                below = self.ticks.makespan(self.ticks.timed(lines))
                start = improve(self.shop, self.shop.timed(lines))
                self.reached = self.shop.makespan(start)
                yield start
            if found.complete and self.proves:
                self.bound = below * self.unit


@dataclass(frozen=True)
class Sweep:
    """Result of one sweep.

    ``order`` is the schedule found, if any, as classes one after the other. ``complete`` means that
    no state was left out. ``looked`` is the number of operation starts visited.
    """

    order: list[int] | None
    complete: bool
    looked: int


def sweep(
    chain: ChainArrays, width: int, below: int, favour: float, stop: Callable[[int], bool]
) -> Sweep:
    """Search by a beam of ``width`` for the shortest schedule of less than ``below`` ticks.

    States are ranked by bound plus ``favour`` times the mean over devices of their estimates.
    ``stop`` is called now and then with the number of operation starts visited; True aborts the
    sweep.
    """
    layers = [beginning(chain, width) for _ in range(2)]
    children = no_children(layers[0])
    table: Any = np.zeros(1 << (4 * width).bit_length(), np.int64)
    parent: Any = np.zeros((chain.levels, width), np.int32)
    code: Any = np.zeros((chain.levels, width), np.int32)
    level, size, complete, looked = 0, 1, True, 0
    while level < chain.levels and size:
        if stop(looked):
            return Sweep(None, False, looked)
        level, size, left_out, more = levels(
            chain,
            layers[level % 2],
            layers[1 - level % 2],
            children,
            table,
            parent,
            code,
            level,
            size,
            float(below),
            favour,
        )
        complete &= not left_out
        looked += more
    if not size:
        return Sweep(None, complete, looked)
    best = int(np.argmin(layers[level % 2].free[:size].max(axis=1)))
    order = []
    for level in reversed(range(chain.levels)):
        order.append(int(code[level, best]))
        best = int(parent[level, best])
    return Sweep(order[::-1], complete, looked)


def lines_of(shop: JobShop, order: list[int], mirrored: bool) -> list[list[int]]:
    """Operations of every device, from a sweep's order."""
    count, num = shop.num_microbatches, shop.placement.num_stages
    path = path_of(shop)
    done = [0] * shop.num_classes
    lines: list[list[int]] = [[] for _ in shop.cap]
    for q in order:
        k = q + (0 if q >= 2 * num else path[-1 - q if mirrored else q] - q)
        i = k * count + (count - 1 - done[k] if mirrored else done[k])
        done[k] += 1
        lines[shop.device[i]].append(i)
    return [line[::-1] for line in lines] if mirrored else lines


def max_in_flight_microbatches(shop: JobShop) -> int:
    """Largest number of microbatches in flight.

    Each holds the activation of its first stage until its last backward.
    """
    takes, room = shop.most(0), shop.cap[shop.device[0]]
    return min(shop.num_microbatches, room // takes if takes else shop.num_microbatches)


def chain_of(shop: JobShop, mirrored: bool = False) -> ChainArrays:
    """Chain of ``shop``; ``mirrored`` reverses time, for whole backwards alone."""
    count, num = shop.num_microbatches, shop.placement.num_stages
    classes = path_of(shop)
    first = [k * count for k in classes]
    device = [shop.device[i] for i in first]
    time = [shop.duration[i] for i in first]
    lag = [0, *(shop.before[i][0][1] for i in first[1:])]
    weight = [0] * (2 * num)
    if shop.num_classes > 2 * num:
        weight[num:] = [shop.duration[(num + k) * count] for k in classes[num:]]
    if mirrored:
        device, time, lag = device[::-1], time[::-1], [0, *lag[:0:-1]]
    memory = list(map(shop.most, range(num)))
    begin = np.cumsum(lag) + np.concatenate(([0], np.cumsum(time)[:-1]))
    ends = begin + time + weight
    devices = len(shop.cap)
    needs: Any = np.zeros((devices, 2 * num + 1), np.int64)
    holds: Any = np.zeros_like(needs)
    share: Any = np.zeros(needs.shape)
    life: Any = np.zeros(needs.shape)
    for s in range(num):
        d, back = device[s], 2 * num - 1 - s
        part = memory[s] / max(1, shop.cap[d])
        needs[d, : s + 1] += memory[s]
        life[d, : s + 1] += part * (ends[back] - begin[s])
        holds[d, s + 1 : back + 1] += memory[s]
        share[d, s + 1 : back + 1] += part
        life[d, s + 1 : back + 1] += part * (ends[back] - begin[s + 1 : back + 1])
    on = np.array(device) == np.arange(devices)[:, None]
    rest = begin[-1] + time[-1] - begin - time
    return ChainArrays(
        count,
        min(count, max_in_flight_microbatches(shop) + 1),
        any(weight),
        np.array(device, np.int64),
        np.array(time, np.int64),
        np.array(lag, np.int64),
        np.array(weight, np.int64),
        np.array(memory + [0] * num, np.int64),
        np.array([0] * num + memory[::-1], np.int64),
        np.array(shop.cap, np.int64),
        needs,
        holds,
        share,
        life,
        _tails(shop, device, time, lag, weight, memory),
        on @ np.array(time, np.int64),
        on @ np.array(weight, np.int64),
        np.where(on, rest, rest.max()).min(axis=1),
    )


def path_of(shop: JobShop) -> list[int]:
    """Class at every position of the path."""
    num = shop.placement.num_stages
    return [*range(num), *reversed(range(num, 2 * num))]


def _tails(
    shop: JobShop,
    device: list[int],
    time: list[int],
    lag: list[int],
    weight: list[int],
    memory: list[int],
) -> Any:
    """Tails by the rest of the path, later microbatches, and microbatches that wait for freed
    memory."""
    count, length = shop.num_microbatches, len(time)
    tail: Any = np.zeros((length, count), np.int64)
    for m in reversed(range(count)):
        for q in reversed(range(length)):
            least = weight[q]
            if q + 1 < length:
                least = max(least, lag[q + 1] + time[q + 1] + tail[q + 1, m])
            if m + 1 < count:
                least = max(least, time[q] + tail[q, m + 1])
            s = length - 1 - q
            if s < q and memory[s]:
                waits = m + shop.cap[device[q]] // memory[s]
                if waits < count:
                    least = max(least, weight[q] + time[s] + tail[s, waits])
            tail[q, m] = least
    return tail
