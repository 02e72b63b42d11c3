"""Long schedules from short ones, by repetition of the steady state.

The progress of a device is a count per class. Suppose that all devices are ``step`` microbatches
further in every class than at an earlier moment. Then the operations in between can be repeated:
data and memory are as they were (../README.md: Search).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_pulse.planner.schedule.search.jobshop import JobShop

STEPS = (1, 2, 3)
"""Numbers of microbatches that a repeated part may have."""


@dataclass(frozen=True)
class Repeat:
    """Repeated part of a schedule.

    On device d positions ``first[d]`` to ``last[d]`` of the order repeat, ``step`` microbatches
    later. ``ticks`` is the duration per microbatch.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    step: int
    ticks: float


def extended(core: JobShop, start: Sequence[int], shop: JobShop) -> Iterator[list[int]]:
    """Start times for ``shop``, which is ``core`` with more microbatches; the most promising first.

    Yields nothing if no part of ``start`` repeats with a matching number of microbatches.
    """
    more = shop.num_microbatches - core.num_microbatches
    lines = core.lines(start)
    for repeat in repeats(core, lines, start):
        if more % repeat.step == 0:
            yield shop.timed(
                [
                    _stretched(core, shop, line, first, last, repeat.step)
                    for line, first, last in zip(lines, repeat.first, repeat.last, strict=True)
                ]
            )


def repeats(shop: JobShop, lines: Sequence[Sequence[int]], start: Sequence[int]) -> list[Repeat]:
    """Parts that repeat, the fastest per microbatch first; among equals the one that ends last."""
    count = shop.num_microbatches
    counts = []  # per device: prefixes of its order by their counts of each class
    for line in lines:
        tally, beginnings = [0] * shop.num_classes, {}
        beginnings[tuple(tally)] = 0
        for at, i in enumerate(line):
            tally[i // count] += 1
            beginnings[tuple(tally)] = at + 1
        counts.append(beginnings)
    masks = [
        [shop.device[k * count] == d for k in range(shop.num_classes)] for d in range(len(lines))
    ]
    done, found = [0] * shop.num_classes, []
    for i in sorted(range(len(start)), key=start.__getitem__):
        done[i // count] += 1
        if min(done) == 0:
            continue
        for step in STEPS:
            last = []
            for beginnings, mask in zip(counts, masks, strict=True):
                end = beginnings.get(
                    tuple(n + step if own else 0 for n, own in zip(done, mask, strict=True))
                )
                if end is None:
                    break
                last.append(end)
            else:
                first = [at - step * sum(mask) for at, mask in zip(last, masks, strict=True)]
                ticks = max(
                    start[line[b - 1]]
                    + shop.duration[line[b - 1]]
                    - start[line[a - 1]]
                    - shop.duration[line[a - 1]]
                    for line, a, b in zip(lines, first, last, strict=True)
                )
                found.append(Repeat(tuple(first), tuple(last), step, ticks / step))
    return sorted(reversed(found), key=lambda repeat: repeat.ticks)


def _stretched(
    core: JobShop, shop: JobShop, line: Sequence[int], first: int, last: int, step: int
) -> list[int]:
    """Order of ``core`` with the part from ``first`` to ``last`` repeated as often as ``shop``
    needs."""
    more = shop.num_microbatches - core.num_microbatches

    def renumbered(part: Sequence[int], shift: int) -> list[int]:
        old, new = core.num_microbatches, shop.num_microbatches
        return [i // old * new + i % old + shift for i in part]

    stretched = renumbered(line[:last], 0)
    for shift in range(step, more + 1, step):
        stretched += renumbered(line[first:last], shift)
    return stretched + renumbered(line[last:], more)
