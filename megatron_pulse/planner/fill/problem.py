"""What is to be filled, and what a filled step is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megatron_pulse.faults import Faults
from megatron_pulse.planner.cluster.link import Link
from megatron_pulse.planner.fill.components import Component, Piece, levels
from megatron_pulse.planner.schedule.check.simulate import Timeline, run
from megatron_pulse.planner.schedule.operations import Kind, Operation, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem


class Gap(NamedTuple):
    """Idle time of a device before the operation at ``position`` of its order; after the last
    operation it has no end."""

    start: float
    end: float
    device: int
    position: int


@dataclass(frozen=True)
class FillProblem:
    """The next step's ``num_samples`` through ``components`` while ``schedule`` runs.

    All times are in seconds. ``free_bytes[d]`` is what device d has beside the step itself (None:
    enough); results lie there until the step after has used them. ``link`` is what a device has for
    sending beside the step's own messages. Raises Faults.
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
        """Of the pipeline."""
        return self.schedule.placement.num_devices

    @cached_property
    def timeline(self) -> Timeline:
        """The step without components."""
        return run(self.step, self.schedule)

    @cached_property
    def gaps(self) -> tuple[tuple[Gap, ...], ...]:
        """Per device its idle times in order, the last of them open."""
        every = []
        for device, order in enumerate(self.schedule.order):
            now, mine = 0.0, []
            for position, operation in enumerate(order):
                start = self.timeline.start[operation]
                if start > now + 1e-9 * self.timeline.makespan:
                    mine.append(Gap(now, start, device, position))
                now = self.timeline.end[operation]
            mine.append(Gap(now, math.inf, device, len(order)))
            every.append(tuple(mine))
        return tuple(every)

    @cached_property
    def levels(self) -> list[int]:
        """Per component the length of the longest way to it."""
        return levels(self.components)

    @cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """Per component those whose results it takes."""
        number = {component.name: i for i, component in enumerate(self.components)}
        return tuple(tuple(number[name] for name in c.after) for c in self.components)

    def results_on(self, device: int) -> float:
        """Bytes of one batch's results that ``device`` holds for the step after."""
        return sum(
            c.result_bytes * self.num_samples for c in self.components if device in c.readers
        )

    def lag_s(self, component: int, layer: int, num_samples: int) -> float:
        """Seconds of what ``layer`` leaves to the next between two devices."""
        kept = self.components[component].layers[layer].output_bytes
        return self.link.time_s(kept * num_samples)

    def result_lag_s(self, component: int, num_samples: int) -> float:
        """Seconds of results to one other device."""
        return self.link.time_s(self.components[component].result_bytes * num_samples)

    def _faults(self) -> Iterator[str]:
        if self.num_samples < 1:
            yield f"{self.num_samples} samples: there must be one or more"
        if not self.components:
            yield "there are no components"
        if self.schedule.fillers or any(
            op.kind is Kind.FILLER for order in self.schedule.order for op in order
        ):
            yield f"the schedule {self.schedule.name} has fillers already"
        try:
            levels(self.components)
        except Faults as error:
            yield from error.faults
        known = range(self.num_devices)
        for c in self.components:
            if strange := sorted({*c.readers, *(c.devices or ())} - {*known}):
                yield (
                    f"component {c.name!r} names device {', '.join(map(str, strange))} of "
                    f"{self.num_devices}"
                )
        if self.free_bytes is not None and len(self.free_bytes) != self.num_devices:
            yield f"free_bytes: need {self.num_devices} values, got {len(self.free_bytes)}"


@dataclass(frozen=True)
class Filled:
    """``order[d]`` is what device d executes, in order: the schedule's operations and pieces."""

    order: tuple[tuple[Operation | Piece, ...], ...]

    @property
    def pieces(self) -> list[tuple[int, Piece]]:
        """Every piece with its device."""
        return [(d, p) for d, line in enumerate(self.order) for p in line if isinstance(p, Piece)]

    @property
    def homes(self) -> dict[int, tuple[int, ...]]:
        """Per component the devices that host layers of it."""
        found: dict[int, set[int]] = {}
        for device, piece in self.pieces:
            found.setdefault(piece.component, set()).add(device)
        return {component: tuple(sorted(devices)) for component, devices in sorted(found.items())}


def merged(problem: FillProblem, pieces: Mapping[tuple[int, int], Sequence[Piece]]) -> Filled:
    """The filled step with ``pieces[d, i]`` before operation i of device d, or at its end."""
    lines: list[tuple[Operation | Piece, ...]] = []
    for device, order in enumerate(problem.schedule.order):
        line: list[Operation | Piece] = []
        for position in range(len(order) + 1):
            line += pieces.get((device, position), ())
            line += order[position : position + 1]
        lines.append(tuple(line))
    return Filled(tuple(lines))


@dataclass(frozen=True)
class FillCertificate:
    """``makespan`` of the filled step in seconds, no shorter than ``lower_bound``; ``without`` is
    the step without components. ``spread`` gives the makespan over the bound where
    components take so many times as long as planned.
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
        """How far from the bound, at most, as a share."""
        return self.makespan / self.lower_bound - 1

    def __str__(self) -> str:
        longer = self.makespan / self.without - 1
        return (
            f"{self.makespan:.4g} s ({longer:+.1%} on the step without encoders, at most "
            f"{self.gap:.1%} above the shortest), {self.spill_share:.0%} after the flush, by "
            f"{self.solver} in {self.seconds:.1f} s"
        )
