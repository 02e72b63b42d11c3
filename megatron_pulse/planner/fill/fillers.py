"""A filled step as a schedule with fillers, as devices execute and plan files hold it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_pulse.faults import Faults, unknown
from megatron_pulse.planner.cluster.link import Link
from megatron_pulse.planner.fill.components import Component, Piece
from megatron_pulse.planner.fill.problem import FillCertificate, Filled, FillProblem
from megatron_pulse.planner.fill.search import Filling
from megatron_pulse.planner.fill.simulate import FilledStep
from megatron_pulse.planner.schedule.check.simulate import run
from megatron_pulse.planner.schedule.operations import Filler, Kind, Need, Operation, Schedule
from megatron_pulse.planner.schedule.problem import Certificate, Synthesis


def filled_schedule(problem: FillProblem, filled: Filled) -> Schedule:
    """The schedule with a filler for every component, whose slices are pieces in order of start.

    Devices of a filler are those that host its component.
    """
    step = FilledStep(problem, filled)
    start = step.run().start
    pieces: dict[int, list[Piece]] = defaultdict(list)
    for _, piece in sorted(filled.pieces, key=lambda pair: (start[pair[1]], pair[0])):
        pieces[piece.component].append(piece)
    named = {
        piece: Operation(Kind.FILLER, c, number)
        for c, mine in pieces.items()
        for number, piece in enumerate(mine)
    }
    fillers = []
    for c, component in enumerate(problem.components):
        needs = []
        for piece in pieces[c]:
            of = [(named[s], lag) for s, lag in step.needs[piece] if isinstance(s, Piece)]
            needs.append(tuple(Need(op.stage, op.microbatch, lag) for op, lag in of))
        fillers.append(
            Filler(
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
    """A filled schedule with its certificate, and that of filling; ``front_s`` is the step with all
    components before it, as ``front_s`` has them."""

    synthesis: Synthesis
    certificate: FillCertificate
    front_s: float

    @classmethod
    def of(
        cls, problem: FillProblem, found: Filling, known: Certificate, link: Link
    ) -> FilledSchedule:
        """Of a schedule with the certificate ``known``; ``link`` is what a device has in front of
        the step, when no messages of the step are there."""
        schedule, made = filled_schedule(problem, found.filled), found.certificate
        # Without results' way, which devices do not wait for.
        takes = run(problem.step, schedule).makespan
        bound = min(made.lower_bound, takes)
        certificate = Certificate(
            takes,
            bound,
            takes <= bound * (1 + 1e-9),
            f"{known.solver}, filled by {made.solver}",
            known.seconds + made.seconds,
        )
        front = front_s(problem.components, problem.num_samples, problem.num_devices, link)
        return cls(Synthesis(schedule, certificate), made, made.without + front)


def front_s(
    components: Iterable[Component], num_samples: int, num_devices: int, link: Link
) -> float:
    """Seconds of components in front of a step, samples divided over all devices.

    One device after the other broadcasts the results of its share through a ring of all others.
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
    """The schedule without fillers."""
    order = tuple(tuple(op for op in line if op.kind is not Kind.FILLER) for line in schedule.order)
    return replace(schedule, order=order, fillers=())


def filled_of(schedule: Schedule, components: Sequence[Component]) -> Filled:
    """The filled step that a schedule's fillers are; raises Faults for others than components'."""
    names = [component.name for component in components]
    faults = []
    for filler in schedule.fillers:
        if filler.name not in names:
            faults.append(unknown("component", filler.name, names))
        elif not filler.pieces:
            faults.append(f"filler {filler.name!r} does not say what its slices are")
    if faults:
        raise Faults(faults)

    def item(op: Operation) -> Operation | Piece:
        if op.kind is not Kind.FILLER:
            return op
        filler = schedule.fillers[op.stage]
        first, last, one, end = filler.pieces[op.microbatch]
        return Piece(names.index(filler.name), (first, last), (one, end))

    return Filled(tuple(tuple(map(item, line)) for line in schedule.order))
