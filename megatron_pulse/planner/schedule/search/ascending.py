"""Stable argsort for compiled functions: Numba's own takes a second to compile per type."""

from __future__ import annotations

from typing import Any

from megatron_pulse.planner.schedule.jit import compiled_inner, zeros

RUN = 16
"""Length of the runs that are sorted by insertion before runs are merged."""


@compiled_inner
def stable_argsort(keys: Any, count: int) -> Any:
    """Indices below ``count`` in ascending order of their ``keys``; the sort is stable."""
    order, merged = zeros(count), zeros(count)
    for i in range(count):
        key, at = keys[i], i
        while at % RUN and keys[order[at - 1]] > key:
            order[at] = order[at - 1]
            at -= 1
        order[at] = i
    length = RUN
    while length < count:
        for begin in range(0, count, 2 * length):
            a, b = begin, min(begin + length, count)
            end_a, end_b = b, min(b + length, count)
            for at in range(begin, end_b):
                if b == end_b or (a < end_a and keys[order[a]] <= keys[order[b]]):
                    merged[at] = order[a]
                    a += 1
                else:
                    merged[at] = order[b]
                    b += 1
        order, merged = merged, order
        length *= 2
    return order
