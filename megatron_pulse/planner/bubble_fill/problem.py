"""Bubble filling problem, and its solution: a filled step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from megatron_pulse.errors import Faults
from megatron_pulse.planner.bubble_fill.components import Component, Slice, levels
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.schedule.check.simulate import StepSimulator, Timeline, simulate
from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.simulate_kernel import Waits


class Bubble(NamedTuple):
    """Idle time (bubble) of a device before the operation at ``position`` of its order.

    The one after the last operation has no end.
    """

    start: float
    end: float
    device: int
    position: int


@dataclass(frozen=True)
class FillProblem:
    """Run the next step's ``num_samples`` through ``components`` while ``schedule`` runs.

    Times are in seconds. ``free_bytes[d]`` are the bytes of device d beside the step itself (None:
    unlimited); results stay there until the step after has consumed them. ``link`` is the bandwidth
    that the step's own messages leave. Raises Faults.
    """

    step: ScheduleProblem
    schedule: Schedule
    components: tuple[Component, ...]
    num_samples: int
    free_bytes: tuple[float, ...] | None = None
    link: Link = field(default_factory=Link)

    def __post_init__(self) -> None:
        if faults := list(self._faults()):
            raise Faults(faults)

    @property
    def num_devices(self) -> int:
        """Devices of the pipeline."""
        return self.schedule.placement.num_devices

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the step without components."""
        return simulate(self.step, self.schedule)

    @cached_property
    def arrays(self) -> tuple[StepSimulator, Waits, Any]:
        """Simulator of the schedule, predecessors of its items, and their durations."""
        simulator = StepSimulator(self.schedule)
        return simulator, simulator.waits(self.step), simulator.durations(self.step)

    @cached_property
    def gaps(self) -> tuple[tuple[Bubble, ...], ...]:
        """Bubbles of each device in order; the last has no end."""
        every = []
        for device, order in enumerate(self.schedule.order):
            now, mine = 0.0, []
            for position, operation in enumerate(order):
                start = self.timeline.start[operation]
                if start > now + 1e-9 * self.timeline.makespan:
                    mine.append(Bubble(now, start, device, position))
                now = self.timeline.end[operation]
            mine.append(Bubble(now, math.inf, device, len(order)))
            every.append(tuple(mine))
        return tuple(every)

    @cached_property
    def levels(self) -> list[int]:
        """Longest path to each component in the dependency graph."""
        return levels(self.components)

    @cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """Dependencies of each component, by index."""
        number = {component.name: i for i, component in enumerate(self.components)}
        return tuple(tuple(number[name] for name in c.after) for c in self.components)

    def results_on(self, device: int) -> float:
        """Bytes of one batch's results that ``device`` holds for the step after."""
        return sum(
            c.result_bytes * self.num_samples for c in self.components if device in c.consumers
        )

    def lag_s(self, component: int, layer: int, num_samples: int) -> float:
        """Seconds to send the output of ``layer`` to another device."""
        kept = self.components[component].layers[layer].output_bytes
        return self.link.time_s(kept * num_samples)

    def result_lag_s(self, component: int, num_samples: int) -> float:
        """Seconds to send results to one other device."""
        return self.link.time_s(self.components[component].result_bytes * num_samples)

    def _faults(self) -> Iterator[str]:
        if self.num_samples < 1:
            yield f"{self.num_samples} samples: there must be at least one"
        if not self.components:
            yield "there are no components"
        if self.schedule.bubble_tasks or any(
            op.kind is OpType.BUBBLE_TASK for order in self.schedule.order for op in order
        ):
            yield f"the schedule {self.schedule.name} has bubble tasks already"
        try:
            levels(self.components)
        except Faults as error:
            yield from error.faults
        known = range(self.num_devices)
        for c in self.components:
            if strange := sorted({*c.consumers, *(c.devices or ())} - {*known}):
                yield (
                    f"component {c.name!r} names device {', '.join(map(str, strange))} of "
                    f"{self.num_devices}"
                )
        if self.free_bytes is not None and len(self.free_bytes) != self.num_devices:
            yield f"free_bytes: need {self.num_devices} values, got {len(self.free_bytes)}"


@dataclass(frozen=True)
class FilledOrder:
    """Filled step. ``order[d]`` lists the schedule operations and slices of device d in order."""

    order: tuple[tuple[Operation | Slice, ...], ...]

    @property
    def slices(self) -> list[tuple[int, Slice]]:
        """Every slice with its device."""
        return [(d, p) for d, line in enumerate(self.order) for p in line if isinstance(p, Slice)]

    @property
    def homes(self) -> dict[int, tuple[int, ...]]:
        """Devices that host layers of each component."""
        found: dict[int, set[int]] = {}
        for device, slice_ in self.slices:
            found.setdefault(slice_.component, set()).add(device)
        return {component: tuple(sorted(devices)) for component, devices in sorted(found.items())}


def merged(problem: FillProblem, slices: Mapping[tuple[int, int], Sequence[Slice]]) -> FilledOrder:
    """Filled step with ``slices[d, i]`` before operation i of device d, or at its end."""
    lines: list[tuple[Operation | Slice, ...]] = []
    for device, order in enumerate(problem.schedule.order):
        line: list[Operation | Slice] = []
        for position in range(len(order) + 1):
            line += slices.get((device, position), ())
            line += order[position : position + 1]
        lines.append(tuple(line))
    return FilledOrder(tuple(lines))


@dataclass(frozen=True)
class FillCertificate:
    """Makespan and lower bound of a filled step, in seconds.

    ``without`` is the step without components. ``spill_share`` is the share of component work after
    the flush. ``spread`` gives makespan over bound if components take a factor of the planned time.
    """

    makespan: float
    lower_bound: float
    without: float
    spill_share: float
    spread: dict[float, float]
    solver: str
    seconds: float

    @property
    def gap(self) -> float:
        """Relative distance to the lower bound."""
        return self.makespan / self.lower_bound - 1

    def __str__(self) -> str:
        longer = self.makespan / self.without - 1
        return (
            f"{self.makespan:.4g} s ({longer:+.1%} over the step without encoders, at most "
            f"{self.gap:.1%} above the lower bound), {self.spill_share:.0%} after the flush, by "
            f"{self.solver} in {self.seconds:.1f} s"
        )
