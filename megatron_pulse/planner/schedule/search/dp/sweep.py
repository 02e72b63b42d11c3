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
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_pulse.planner.schedule.search.dp.chain import ChainArrays, path_of
from megatron_pulse.planner.schedule.search.dp.states import beginning, levels, no_children
from megatron_pulse.planner.schedule.search.jobshop import JobShop

MOST_KEPT = 16_000_000
"""Limit of states in all levels together, at 8 bytes each."""


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
