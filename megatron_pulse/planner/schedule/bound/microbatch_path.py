"""Path of a microbatch through the stages, with earliest starts and latest ends.

The forwards and (input) gradients of a microbatch form a path: from stage 0 to the last and back.
Weight gradients hang on it. Positions count along the path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_pulse.planner.schedule.operations import OpType
from megatron_pulse.planner.schedule.problem import ScheduleProblem


@dataclass(frozen=True)
class MicrobatchPath:
    """Path of a microbatch and each device's share of it; positions count along the path."""

    problem: ScheduleProblem

    @cached_property
    def classes(self) -> list[tuple[OpType, int]]:
        """(kind, stage) along the path."""
        stages = range(self.problem.placement.num_stages)
        there, back = self.problem.kinds[:2]
        return [*((there, s) for s in stages), *((back, s) for s in reversed(stages))]

    @cached_property
    def time(self) -> list[float]:
        """Duration of each class of the path."""
        return [self.problem.duration(kind, stage) for kind, stage in self.classes]

    @cached_property
    def first(self) -> list[float]:
        """Earliest start of each class of the path."""
        first = [0.0]
        for (_, s), (_, t), time in zip(self.classes, self.classes[1:], self.time, strict=False):
            first.append(first[-1] + time + self.problem.lag(s, t))
        return first

    @cached_property
    def weight(self) -> list[float]:
        """Duration of the weight gradient that hangs on each class of the path; 0 if there is
        none."""
        split = self.problem.weight_grad is not None
        return [
            self.problem.duration(OpType.WEIGHT_GRAD, s)
            if split and kind is not OpType.FORWARD
            else 0
            for kind, s in self.classes
        ]

    @cached_property
    def last(self) -> list[float]:
        """Least time from the end of each class to the end of the step."""
        ends = [f + t + w for f, t, w in zip(self.first, self.time, self.weight, strict=True)]
        return [max(ends[k:]) - self.first[k] - self.time[k] for k in range(len(ends))]

    def on(self, device: int) -> list[int]:
        """Positions of a device's classes."""
        home = self.problem.placement.device_of_stage
        return [k for k, (_, stage) in enumerate(self.classes) if home[stage] == device]

    @cached_property
    def runs(self) -> list[tuple[int, int, float, float]]:
        """Runs of consecutive classes of a device: first and last position, load without and with
        W."""
        found = []
        for device in range(self.problem.placement.num_devices):
            mine = self.on(device)
            for i, a in enumerate(mine):
                load = whole = 0.0
                for b in mine[i:]:
                    load += self.time[b]
                    whole += self.time[b] + self.weight[b]
                    found.append((a, b, load, whole))
        return found

    @cached_property
    def heads(self) -> list[list[float]]:
        """Earliest start of every class of the path for every microbatch.

        The j-th start of a class waits for j+1 executions of each run of classes before it on a
        device.
        """
        count, first, time = self.problem.num_microbatches, self.first, self.time
        reuse = list(self._reuse())
        heads = [
            _waits(
                count,
                [(f, 0.0)]
                + [
                    (first[a] + f - first[b] - time[b], load)
                    for a, b, load, _ in self.runs
                    if b < k and load > 0
                ],
            )
            for k, f in enumerate(first)
        ]
        for m in range(count):
            for k in range(len(first)):
                best = heads[k][m]
                if k:
                    best = max(best, heads[k - 1][m] + first[k] - first[k - 1])
                if m:
                    best = max(best, heads[k][m - 1] + time[k])
                for takes, frees, later, room in reuse:
                    if k == takes and m >= room:
                        best = max(best, heads[frees][m - room] + time[frees] + later)
                heads[k][m] = best
        return heads

    @cached_property
    def tails(self) -> list[list[float]]:
        """Least time from the end of every operation of the path to the end of the step."""
        count, first, time = self.problem.num_microbatches, self.first, self.time
        reuse = list(self._reuse())
        runs = [(a, load, whole, min(self.last[a : b + 1])) for a, b, load, whole in self.runs]
        tails = []
        for k, last in enumerate(self.last):
            after = [(last, 0.0), (0.0, self.weight[k])]
            for a, load, whole, least in runs:
                if a > k:
                    wait = first[a] - first[k] - time[k]
                    after += [(wait + least, load), (wait, whole)]
            tails.append(_waits(count, after)[::-1])
        for m in reversed(range(count)):
            for k in reversed(range(len(first))):
                best = tails[k][m]
                if k + 1 < len(first):
                    gap = first[k + 1] - first[k] - time[k]
                    best = max(best, gap + time[k + 1] + tails[k + 1][m])
                if m + 1 < count:
                    best = max(best, time[k] + tails[k][m + 1])
                for takes, frees, later, room in reuse:
                    if k == frees and m + room < count:
                        best = max(best, later + time[takes] + tails[takes][m + room])
                tails[k][m] = best
        return tails

    def _reuse(self) -> Iterator[tuple[int, int, float, int]]:
        """Memory dependencies: (class that takes memory, class that frees it, seconds, n).

        The first class, for microbatch m + n, starts at least ``seconds`` after the end of the
        second class for microbatch m. The seconds are those of the weight gradient, or 0. From
        forward to weight gradient an activation takes the lesser of its two sizes. From forward to
        input gradient it takes its own size. From input to weight gradient it takes its
        weight-gradient queue bytes.
        """
        problem, num = self.problem, self.problem.placement.num_stages
        for s, device in enumerate(problem.placement.device_of_stage):
            own, wgrad_bytes, back = (
                problem.activation_of(s),
                problem.wgrad_bytes_of(s),
                2 * num - 1 - s,
            )
            cap = None if problem.cap is None else problem.cap[device] * (1 + 1e-9)
            for size, takes, later in (
                (min(own, wgrad_bytes), s, self.weight[back]),
                (own, s, 0.0),
                (wgrad_bytes, back, self.weight[back]),
            ):
                if cap is not None and cap < size * problem.num_microbatches:
                    yield takes, back, later, int(cap / size)


def _waits(count: int, lines: list[tuple[float, float]]) -> list[float]:
    """max of base + n * load over ``lines``, for n = 1 to ``count``."""
    base, load = np.array(lines).T
    waits: list[float] = (base[:, None] + load[:, None] * np.arange(1, count + 1)).max(0).tolist()
    return waits
