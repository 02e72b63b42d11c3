"""Whether a device is slow: its operations beside the plan's times, or beside its own before.

Ranks are compared by what their operations took over what they should have: work that is heavier
on one device than on another is none of it, nor that all are slower than the plan. A device that
is slow keeps all others waiting, so that the speed of the run says nothing of which it is.
"""

from __future__ import annotations

import socket
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from megatron_pulse.planner.draw.looks import NAMES
from megatron_pulse.planner.schedule.check.simulate import duration_of
from megatron_pulse.planner.schedule.operations import Kind
from megatron_pulse.planner.step.plan import Plan
from megatron_pulse.runtime.measure.busy import StepTime

type Times = Mapping[tuple[Kind, int], float]
"""Seconds of a device's operations in a step, by kind and stage."""

ENOUGH = 10
"""Steps over which a device is judged."""


def planned_times(plan: Plan, num_microbatches: int, device: int) -> Times:
    """What the plan says of a device's operations in a step."""
    schedule = plan.step(num_microbatches).schedule
    duration = duration_of(plan.problem_of(num_microbatches), schedule)
    times: defaultdict[tuple[Kind, int], float] = defaultdict(float)
    for op in schedule.order[device]:
        if op.kind is not Kind.FILLER:
            times[op.kind, op.stage] += duration(op)
    return dict(times)


def slow_ranks(ratios: Sequence[float], most: float) -> list[int]:
    """Ranks whose operations took more than ``most`` times what they should have, taken by that
    of the (lower) median rank."""
    median = statistics.median_low(ratios)
    return [rank for rank, ratio in enumerate(ratios) if median > 0 and ratio > most * median]


class Stragglers:
    """Watches this rank's operations for being slow: more than ``most`` times as slow as others'.

    ``planned`` gives their times by the plan (None: the first ``ENOUGH`` steps, but
    the very first, are what later ones are compared with). ``gather`` gives one number of each rank
    (collective).
    """

    def __init__(
        self,
        rank: int,
        most: float,
        planned: Callable[[], Times] | None,
        gather: Callable[[float], list[float]],
    ) -> None:
        self._rank = rank
        self._most = most
        self._planned = planned
        self._expected: Times = {}
        self._source = "the plan says" if planned is not None else "they took at first"
        self._gather = gather
        self._steps: list[StepTime] = []
        self._is_warm = False

    def note(self, time: StepTime | None) -> None:
        """A step has been made; None where it was not timed."""
        if time is not None and self._is_warm:
            self._steps.append(time)
        self._is_warm = True

    def look(self) -> str:
        """A warning of this rank, if it is slow; empty if not (collective, at each interval)."""
        if len(self._steps) < ENOUGH:
            return ""
        took, num_steps = _mean(self._steps), len(self._steps)
        self._steps = []
        if not self._expected:
            self._expected = took if self._planned is None else self._planned()
        own = {which: s for which, s in took.items() if self._expected.get(which, 0.0) > 0}
        expected_s = sum(self._expected[which] for which in own)
        ratio = sum(own.values()) / expected_s if expected_s else 0.0
        ratios = self._gather(ratio)
        if self._rank not in slow_ranks(ratios, self._most):
            return ""
        worst = max(own, key=lambda which: own[which] / self._expected[which])
        kind, stage = worst
        return (
            f"warning: rank {self._rank} ({socket.gethostname()}) is slow: in {num_steps} steps "
            f"its operations took {ratio:.2f} times what {self._source}, those of the median rank "
            f"{statistics.median_low(ratios):.2f} times; most of all {NAMES[kind]} of stage "
            f"{stage}, {own[worst] / self._expected[worst]:.2f} times"
        )


def _mean(steps: Sequence[StepTime]) -> dict[tuple[Kind, int], float]:
    sums: defaultdict[tuple[Kind, int], float] = defaultdict(float)
    for step in steps:
        for which, seconds in step.operations.items():
            sums[which] += seconds / len(steps)
    return dict(sums)
