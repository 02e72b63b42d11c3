"""Repeated sweeps with more and more states, in both directions of time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.search.compaction import improve
from megatron_pulse.planner.schedule.search.dp.chain import ChainArrays, chain_of
from megatron_pulse.planner.schedule.search.dp.sweep import MOST_KEPT, lines_of, sweep
from megatron_pulse.planner.schedule.search.jobshop import JobShop, job_shop
from megatron_pulse.planner.schedule.search.time_grid import on_grid

FIRST, GROWTH = 64, 4
"""States of the first sweep, and growth factor of later ones."""

FINE = 1 << 36
"""Ticks of the longest operation: sums are exact, and rounding is below what counts."""

MOST_TICKS = 1 << 60
"""Limit of all operations and links together: sums stay below 2^63."""

WORTH = 1.5
"""Smallest growth of the number of states that is worth another sweep."""

FAVOUR, LITTLE = 8.0, 2.0
"""Weights of the mean over devices in the rank of a state, besides the bound.

The bound alone is set by one device, while others may already have wasted needed time.
"""

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
        whole_ticks = max(own.duration) == self.longest and reach < MOST_TICKS
        self.proves = problem.wgrad_holds_all and whole_ticks
        self.shop, self.ticks = shop, own if self.proves else shop
        self.unit = grid.width * self.longest / max(self.ticks.duration)
        self.bound, self.reached, self.done = 0.0, 0, False
        whole = problem.weight_grad is None
        self.turns = ((False, FAVOUR), (True, FAVOUR) if whole else (False, LITTLE))
        self.chains: dict[bool, ChainArrays] = {}
        self.turn, self.width, self.each, self.looked = 0, FIRST, 0.0, 0

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
            width = min(self.width, MOST_KEPT // chain.levels)
            if self.each:
                width = int(min(width, left(self.looked) / self.each))
            if width * GROWTH < self.width * WORTH:
                return
            below = math.ceil(length() / self.unit * (1 - 1e-9)) if self.turn else 1 << 60
            found = sweep(chain, width, below, favour, lambda more: left(self.looked + more) <= 0)
            self.looked += found.looked
            if left(self.looked) <= 0 and not found.complete:
                return
            self.each = found.looked / width
            self.turn += 1
            self.width *= GROWTH if self.turn % 2 == 0 else 1
            self.done = found.complete
            if found.order is not None:
                lines = lines_of(self.ticks, found.order, mirrored)
                below = self.ticks.makespan(self.ticks.timed(lines))
                start = improve(self.shop, self.shop.timed(lines))
                self.reached = self.shop.makespan(start)
                yield start
            if found.complete and self.proves:
                self.bound = below * self.unit
