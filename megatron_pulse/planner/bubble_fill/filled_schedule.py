"""Conversion between filled steps and schedules with bubble tasks, as executed and stored in
plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_pulse.errors import Faults, unknown_name
from megatron_pulse.planner.bubble_fill.components import Component, Slice
from megatron_pulse.planner.bubble_fill.problem import FillCertificate, FilledOrder, FillProblem
from megatron_pulse.planner.bubble_fill.search import Filling
from megatron_pulse.planner.bubble_fill.simulate import FilledSimulation
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.operations import (
    BubbleTask,
    Operation,
    OpType,
    Schedule,
    SliceDependency,
)
from megatron_pulse.planner.schedule.problem import Certificate, Synthesis


def filled_schedule(problem: FillProblem, filled: FilledOrder) -> Schedule:
    """Schedule with one bubble task per component, whose slices are in order of start.

    The devices of a bubble task are those that host the component.
    """
    step = FilledSimulation(problem, filled)
    start = step.run().start
    slices: dict[int, list[Slice]] = defaultdict(list)
    for _, slice_ in sorted(filled.slices, key=lambda pair: (start[pair[1]], pair[0])):
        slices[slice_.component].append(slice_)
    named = {
        slice_: Operation(OpType.BUBBLE_TASK, c, number)
        for c, mine in slices.items()
        for number, slice_ in enumerate(mine)
    }
    bubble_tasks = []
    for c, component in enumerate(problem.components):
        deps = []
        for slice_ in slices[c]:
            of = [(named[s], lag) for s, lag in step.deps[slice_] if isinstance(s, Slice)]
            deps.append(tuple(SliceDependency(op.stage, op.microbatch, lag) for op, lag in of))
        bubble_tasks.append(
            BubbleTask(
                component.name,
                tuple(slice_.time_s(problem.components) for slice_ in slices[c]),
                filled.homes[c],
                tuple((*slice_.layers, *slice_.samples) for slice_ in slices[c]),
                tuple(deps),
                component.consumers,
            )
        )
    order = tuple(
        tuple(named[item] if isinstance(item, Slice) else item for item in line)
        for line in filled.order
    )
    return replace(problem.schedule, order=order, bubble_tasks=tuple(bubble_tasks))


@dataclass(frozen=True)
class FilledSchedule:
    """Filled schedule with its certificate and the certificate of the filling.

    ``before_step_s`` is the step time with all components before the step.
    """

    synthesis: Synthesis
    certificate: FillCertificate
    before_step_s: float

    @classmethod
    def of(
        cls, problem: FillProblem, found: Filling, known: Certificate, link: Link
    ) -> FilledSchedule:
        """Filled schedule from a schedule with the certificate ``known``.

        ``link`` is a device's bandwidth before the step, when the step sends no messages.
        """
        schedule, made = filled_schedule(problem, found.filled), found.certificate
        # Excludes sending results: devices do not wait for that.
        takes = simulate(problem.step, schedule).makespan
        bound = min(made.lower_bound, takes)
        certificate = Certificate(
            takes,
            bound,
            takes <= bound * (1 + 1e-9),
            f"{known.solver}, filled by {made.solver}",
            known.seconds + made.seconds,
        )
        front = before_step_s(problem.components, problem.num_samples, problem.num_devices, link)
        return cls(Synthesis(schedule, certificate), made, made.without + front)


def before_step_s(
    components: Iterable[Component], num_samples: int, num_devices: int, link: Link
) -> float:
    """Seconds of components before a step, with the samples divided over all devices.

    The devices broadcast the results of their shares in turn, through a ring of all others.
    """
    share = -(-num_samples // num_devices)
    others, senders = num_devices - 1, min(num_devices, num_samples)
    return sum(
        c.least_s(share)
        + bool(others and c.result_bytes)
        * (num_samples * c.result_bytes / link.bytes_per_s + senders * others * link.latency_s)
        for c in components
    )


def without_bubble_tasks(schedule: Schedule) -> Schedule:
    """Schedule without bubble tasks."""
    order = tuple(
        tuple(op for op in line if op.kind is not OpType.BUBBLE_TASK) for line in schedule.order
    )
    return replace(schedule, order=order, bubble_tasks=())


def filled_of(schedule: Schedule, components: Sequence[Component]) -> FilledOrder:
    """Filled step that the bubble tasks of a schedule describe.

    Raises Faults for tasks of unknown components.
    """
    names = [component.name for component in components]
    faults = []
    for task in schedule.bubble_tasks:
        if task.name not in names:
            faults.append(unknown_name("component", task.name, names))
        elif not task.slices:
            faults.append(f"bubble task {task.name!r} has no slices of layers and samples")
    if faults:
        raise Faults(faults)

    def item(op: Operation) -> Operation | Slice:
        if op.kind is not OpType.BUBBLE_TASK:
            return op
        task = schedule.bubble_tasks[op.stage]
        first, last, one, end = task.slices[op.microbatch]
        return Slice(names.index(task.name), (first, last), (one, end))

    return FilledOrder(tuple(tuple(map(item, line)) for line in schedule.order))
