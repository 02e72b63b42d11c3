"""Forward-backward improvement with insertion: squeeze idle time out of a schedule.

Times are integer ticks. Operations are numbered; only their order on each device is the result.
Moving an operation never breaks precedence (data flow, first in first out per stage and kind)
nor the cap on live activations, which binds the *order* on a device, not the times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_pulse.planner.placement import Placement


@dataclass(frozen=True)
class Problem:
    """One step as a job shop, operations numbered ``(kind * S + stage) * M + microbatch``.

    ``kind`` is 0 for forward and 1 for backward. ``duration[i]`` and ``lag`` are in ticks >= 1 and
    >= 0; ``before[i]`` lists ``(j, lag)``: i starts at the earliest ``lag`` after j has ended.
    ``delta[i]`` is +1 where i allocates an activation on its device and -1 where it frees one.
    """

    placement: Placement
    num_microbatches: int
    duration: tuple[int, ...]
    device: tuple[int, ...]
    before: tuple[tuple[tuple[int, int], ...], ...]
    delta: tuple[int, ...]
    cap: int

    def mirrored(self) -> Problem:
        """The same problem with time running backwards."""
        after: list[list[tuple[int, int]]] = [[] for _ in self.before]
        for i, edges in enumerate(self.before):
            for j, lag in edges:
                after[j].append((i, lag))
        return Problem(
            self.placement,
            self.num_microbatches,
            self.duration,
            self.device,
            tuple(map(tuple, after)),
            tuple(-d for d in self.delta),
            self.cap,
        )


def make_problem(
    placement: Placement,
    num_microbatches: int,
    forward: Sequence[int],
    backward: Sequence[int],
    link: int,
    cap: int,
) -> Problem:
    """The job shop of one step; durations per stage and link time in ticks."""
    num, home = placement.num_stages, placement.device_of_stage
    duration, device, delta = [], [], []
    before: list[tuple[tuple[int, int], ...]] = []
    for kind in (0, 1):
        for stage in range(num):
            upstream = stage - 1 if kind == 0 else stage + 1
            for m in range(num_microbatches):
                edges = []
                if 0 <= upstream < num:
                    lag = link if home[upstream] != home[stage] else 0
                    edges.append(((kind * num + upstream) * num_microbatches + m, lag))
                elif kind == 1:
                    edges.append((stage * num_microbatches + m, 0))
                if m:
                    edges.append(((kind * num + stage) * num_microbatches + m - 1, 0))
                duration.append((forward, backward)[kind][stage])
                device.append(home[stage])
                delta.append(1 - 2 * kind)
                before.append(tuple(edges))
    return Problem(
        placement,
        num_microbatches,
        tuple(duration),
        tuple(device),
        tuple(before),
        tuple(delta),
        cap,
    )


def makespan(problem: Problem, start: Sequence[int]) -> int:
    """Ticks from 0 to the last end."""
    return max(t + p for t, p in zip(start, problem.duration, strict=True))


def compact(problem: Problem, start: Sequence[int]) -> list[int]:
    """Move every operation, earliest first, into the earliest idle gap that can take it."""
    duration, delta, cap = problem.duration, problem.delta, problem.cap
    new = list(start)
    by_time = sorted(range(len(new)), key=new.__getitem__)
    lines: list[list[int]] = [[] for _ in range(problem.placement.num_devices)]
    live: list[list[int]] = [[] for _ in lines]
    for i in by_time:
        line, counts = lines[problem.device[i]], live[problem.device[i]]
        counts.append(counts[-1] + delta[line[-1]] if line else 0)
        line.append(i)
    cursor = [0] * len(lines)
    for i in by_time:
        d = problem.device[i]
        line, counts = lines[d], live[d]
        ready = max((new[j] + duration[j] + lag for j, lag in problem.before[i]), default=0)
        # Operations before the cursor are done, and nothing is ever inserted after it.
        here = spot = cursor[d]
        cursor[d] += 1
        best, need, room = new[i], duration[i], delta[i] < 0
        end = best + need
        for q in range(here, -1, -1):
            previous_end = new[line[q - 1]] + duration[line[q - 1]] if q else 0
            begin = max(ready, previous_end)
            if begin + need <= end:
                best, spot = begin, q
            if not q or previous_end <= ready:
                break
            y = line[q - 1]
            if not room and counts[q - 1] + max(delta[y], 0) >= cap:
                break
            end = new[y]
        new[i] = best
        if spot < here:
            count = counts[spot]
            for q in range(here, spot, -1):
                counts[q] = counts[q - 1] + delta[i]
            counts[spot] = count
            line.insert(spot, line.pop(here))
    return new


def improve(problem: Problem, start: Sequence[int], patience: int = 4) -> list[int]:
    """Compact towards the end and towards the beginning in turn, while it helps.

    Source: the project's scheduling.md, section 3. Stops after ``patience`` rounds without gain.
    """
    mirror = problem.mirrored()
    best = current = list(start)
    length, stale = makespan(problem, best), 0
    while stale < patience:
        late = compact(mirror, _flip(problem, current))
        current = compact(problem, _flip(problem, late))
        reached = makespan(problem, current)
        stale = 0 if reached < length else stale + 1
        if reached < length:
            best, length = current, reached
    return best


def _flip(problem: Problem, start: Sequence[int]) -> list[int]:
    """Start times as seen with time running backwards; its own inverse."""
    horizon = makespan(problem, start)
    return [horizon - t - p for t, p in zip(start, problem.duration, strict=True)]
