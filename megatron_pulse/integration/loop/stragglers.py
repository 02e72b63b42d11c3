"""Detection of stragglers: a device's operation times against the plan's, or its own earlier ones.

Ranks are compared by the ratio of measured to expected time of their operations. Unequal work per
device, or an overall deviation from the plan, therefore does not count. Since a slow device keeps
all others waiting, the speed of the run does not show which device is slow.
"""

from __future__ import annotations

import socket
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from megatron_pulse.planner.draw.style import NAMES
from megatron_pulse.planner.program.plan import Plan
from megatron_pulse.planner.schedule.check.simulate import duration_of
from megatron_pulse.planner.schedule.operations import OpType
from megatron_pulse.runtime.measure.recorder import StepTime

type Times = Mapping[tuple[OpType, int], float]
"""Seconds of a device's operations in a step, by operation type and stage."""

ENOUGH = 10
"""Number of steps over which a device is judged."""


def planned_times(plan: Plan, num_microbatches: int, device: int) -> Times:
    """Times of a device's operations in a step by the plan."""
    schedule = plan.step(num_microbatches).schedule
    duration = duration_of(plan.problem_of(num_microbatches), schedule)
    times: defaultdict[tuple[OpType, int], float] = defaultdict(float)
    for op in schedule.order[device]:
        if op.kind is not OpType.BUBBLE_TASK:
            times[op.kind, op.stage] += duration(op)
    return dict(times)


def slow_ranks(ratios: Sequence[float], most: float) -> list[int]:
    """Ranks with a ratio of measured to expected time above ``most`` times the lower median."""
    median = statistics.median_low(ratios)
    return [rank for rank, ratio in enumerate(ratios) if median > 0 and ratio > most * median]


class Stragglers:
    """Watch on this rank: a warning if it exceeds ``most``, see ``slow_ranks``.

    ``planned`` returns the operation times by the plan. If it is None, the first ``ENOUGH`` steps
    after the very first are the reference. ``gather`` collects one number of each rank
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
        self._source = "the planned time" if planned is not None else "the time of its first steps"
        self._gather = gather
        self._steps: list[StepTime] = []
        self._is_warm = False

    def note(self, time: StepTime | None) -> None:
        """Record a step; None if it was not timed."""
        if time is not None and self._is_warm:
            self._steps.append(time)
        self._is_warm = True

    def look(self) -> str:
        """Warning if this rank is slow, else empty (collective, at each interval)."""
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
            f"warning: rank {self._rank} ({socket.gethostname()}) is a straggler: in {num_steps} "
            f"steps its operations took {ratio:.2f} times {self._source}, those of the median "
            f"rank {statistics.median_low(ratios):.2f} times. Slowest: {NAMES[kind]} of stage "
            f"{stage}, {own[worst] / self._expected[worst]:.2f} times"
        )


def _mean(steps: Sequence[StepTime]) -> dict[tuple[OpType, int], float]:
    sums: defaultdict[tuple[OpType, int], float] = defaultdict(float)
    for step in steps:
        for which, seconds in step.operations.items():
            sums[which] += seconds / len(steps)
    return dict(sums)
