"""Conversion between filled steps and schedules with bubble tasks, as executed and stored in
plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_pulse.errors import Faults, unknown_name
from megatron_pulse.planner.bubble_fill.components import Component, Piece
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
    pieces: dict[int, list[Piece]] = defaultdict(list)
    for _, piece in sorted(filled.pieces, key=lambda pair: (start[pair[1]], pair[0])):
        pieces[piece.component].append(piece)
    named = {
        piece: Operation(OpType.FILLER, c, number)
        for c, mine in pieces.items()
        for number, piece in enumerate(mine)
    }
    fillers = []
    for c, component in enumerate(problem.components):
        needs = []
        for piece in pieces[c]:
            of = [(named[s], lag) for s, lag in step.needs[piece] if isinstance(s, Piece)]
            needs.append(tuple(SliceDependency(op.stage, op.microbatch, lag) for op, lag in of))
        fillers.append(
            BubbleTask(
                component.name,
                tuple(piece.time_s(problem.components) for piece in pieces[c]),
                filled.homes[c],
                tuple((*piece.layers, *piece.samples) for piece in pieces[c]),
                tuple(needs),
                component.readers,
            )
        )
    order = tuple(
        tuple(named[item] if isinstance(item, Piece) else item for item in line)
        for line in filled.order
    )
    return replace(problem.schedule, order=order, fillers=tuple(fillers))


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


def unfilled(schedule: Schedule) -> Schedule:
    """Schedule without bubble tasks."""
    order = tuple(
        tuple(op for op in line if op.kind is not OpType.FILLER) for line in schedule.order
    )
    return replace(schedule, order=order, fillers=())


def filled_of(schedule: Schedule, components: Sequence[Component]) -> FilledOrder:
    """Filled step that the bubble tasks of a schedule describe.

    Raises Faults for tasks of unknown components.
    """
    names = [component.name for component in components]
    faults = []
    for filler in schedule.fillers:
        if filler.name not in names:
            faults.append(unknown_name("component", filler.name, names))
        elif not filler.pieces:
            faults.append(f"filler {filler.name!r} does not say what its slices are")
    if faults:
        raise Faults(faults)

    def item(op: Operation) -> Operation | Piece:
        if op.kind is not OpType.FILLER:
            return op
        filler = schedule.fillers[op.stage]
        first, last, one, end = filler.pieces[op.microbatch]
        return Piece(names.index(filler.name), (first, last), (one, end))

    return FilledOrder(tuple(tuple(map(item, line)) for line in schedule.order))
