"""Bounded dynamic programming: the shortest schedule by how far every microbatch has come.

Operations start one after the other. What a beginning of a schedule leaves to the rest is a
*state*: the position of every microbatch that is under way, the weight gradients that wait, and
when each device and each next operation is free to start. Of two beginnings with equal counts one
that is nowhere later dominates: whatever follows the other can follow it at the same times. With
little memory few microbatches are under way, so that counts and times are few, and all of them can
be looked at: the schedule is then the shortest (Gromicho et al., "Solving the job-shop scheduling
problem optimally by dynamic programming", 2012). Elsewhere the most promising are kept, as many as
``width``, after every operation (a beam).

A forward may start only where a completion is left. That is decided exactly, a device at a time:
nothing is given back by a microbatch before it has taken all that it needs, and by none before an
older one in its class has; so if any order completes, the oldest first does (the banker's rule).

An operation that takes no memory and would end before another could start on its device goes first:
whatever the rest, it can only be earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_pulse.planner.schedule.search.jobshop import JobShop
from megatron_pulse.planner.schedule.search.sweep.chain import SweptChain, path_of
from megatron_pulse.planner.schedule.search.sweep.states import beginning, levels, no_children

MOST_KEPT = 16_000_000
"""States to remember in all levels together, at 8 bytes each."""


@dataclass(frozen=True)
class Sweep:
    """What came of one pass: the order that was found, if any, as classes one after the other;
    whether no state was left out; and how many starts of operations were looked at."""

    order: list[int] | None
    complete: bool
    looked: int


def sweep(
    chain: SweptChain, width: int, below: int, favour: float, stop: Callable[[int], bool]
) -> Sweep:
    """The shortest schedule of less than ``below`` ticks that a beam of ``width`` finds.

    States are ranked by bound plus ``favour`` times the mean over devices of what each comes to.
    ``stop`` is asked now and then, with the starts that were looked at, whether to give up.
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
    """The operations of every device, from a sweep's order."""
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
