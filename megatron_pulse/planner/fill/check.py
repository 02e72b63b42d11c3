"""Static checks of a filled step, and what memory it takes; knows nothing of how it was found."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from megatron_pulse.planner.fill.bound import fits
from megatron_pulse.planner.fill.components import Piece
from megatron_pulse.planner.fill.problem import Filled, FillProblem
from megatron_pulse.planner.fill.simulate import FilledStep, FilledTimeline
from megatron_pulse.planner.schedule.operations import Operation


def faults_of(problem: FillProblem, filled: Filled) -> list[str]:
    """All faults of ``filled`` as an answer to ``problem``; empty when it is one.

    Every (layer, sample) of every component runs once, in order, in pieces of as many samples as
    there may be, on a device that may host it; the schedule's operations keep their order, and
    their times unless components do not fit beside them; memory holds; results and what moves
    between devices fit the links.
    """
    faults = [*_set_faults(problem, filled)]
    if faults:
        return faults
    step = FilledStep(problem, filled)
    try:
        timeline = step.run()
    except ValueError as error:
        return [str(error)]
    if fits(problem):
        faults += _put_off(problem, filled, timeline)
    if problem.free_bytes is not None:
        for device, (peak, free) in enumerate(
            zip(peak_bytes(step, timeline), problem.free_bytes, strict=True)
        ):
            if peak > free * (1 + 1e-9):
                faults.append(f"device {device} needs {peak:g} bytes, {free:g} are free")
    for device, sent in enumerate(sent_bytes(step)):
        if sent > problem.link.bytes_per_s * timeline.makespan * (1 + 1e-9):
            faults.append(
                f"device {device} sends {sent:g} bytes in {timeline.makespan:g} s, its link takes "
                f"{problem.link.bytes_per_s:g} a second"
            )
    return faults


def peak_bytes(step: FilledStep, timeline: FilledTimeline) -> tuple[float, ...]:
    """Per device the most that pieces need at once, in the times of ``timeline``.

    Parameters of the layers that it runs; one batch's results that it reads; what the running piece
    needs; and what a piece has left for another, from its end to the other's start, on both
    devices.
    """
    problem, components = step.problem, step.problem.components
    layers: list[set[tuple[int, int]]] = [set() for _ in range(problem.num_devices)]
    changes: list[list[tuple[float, int, float]]] = [[] for _ in range(problem.num_devices)]

    def holds(device: int, start: float, end: float, num_bytes: float) -> None:
        # What ends gives its room to what begins at that moment.
        if num_bytes and end > start:
            changes[device] += [(start, 1, num_bytes), (end, 0, -num_bytes)]

    for piece, device in step.home.items():
        mine = components[piece.component].layers[slice(*piece.layers)]
        layers[device] |= {(piece.component, layer) for layer in range(*piece.layers)}
        most = max(layer.activation_bytes for layer in mine) * piece.num_samples
        holds(device, timeline.start[piece], timeline.end[piece], most)
        for source, _ in step.needs[piece]:
            assert isinstance(source, Piece)
            for where in {device, step.home[source]}:
                holds(
                    where,
                    timeline.end[source],
                    timeline.start[piece],
                    _left_bytes(problem, source, piece),
                )
    peaks = []
    for device in range(problem.num_devices):
        now = most = 0.0
        for _, _, change in sorted(changes[device]):
            now += change
            most = max(most, now)
        parameters = sum(components[c].layers[i].parameter_bytes for c, i in layers[device])
        peaks.append(parameters + problem.results_on(device) + most)
    return tuple(peaks)


def sent_bytes(step: FilledStep) -> tuple[float, ...]:
    """Per device what pieces leave for others elsewhere, and results for their readers."""
    problem = step.problem
    sent = [0.0] * problem.num_devices
    for piece, device in step.home.items():
        component = problem.components[piece.component]
        for source, _ in step.needs[piece]:
            assert isinstance(source, Piece)
            if step.home[source] != device:
                sent[step.home[source]] += _left_bytes(problem, source, piece)
        if piece.layers[1] == len(component.layers):
            away = len({*component.readers} - {device})
            sent[device] += away * component.result_bytes * piece.num_samples
    return tuple(sent)


def _left_bytes(problem: FillProblem, source: Piece, piece: Piece) -> float:
    """What ``source`` leaves for ``piece``."""
    start, end = max(source.samples[0], piece.samples[0]), min(source.samples[1], piece.samples[1])
    component = problem.components[source.component]
    if source.component != piece.component:
        return component.result_bytes * (end - start)
    return component.layers[source.layers[1] - 1].output_bytes * (end - start)


def _set_faults(problem: FillProblem, filled: Filled) -> Iterator[str]:
    if len(filled.order) != problem.num_devices:
        yield f"there are orders for {len(filled.order)} devices of {problem.num_devices}"
        return
    ran: dict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
    for device, piece in filled.pieces:
        if not 0 <= piece.component < len(problem.components):
            yield f"{piece}: there is no such component"
            continue
        component = problem.components[piece.component]
        for what, (first, last), most in (
            ("layers", piece.layers, len(component.layers)),
            ("samples", piece.samples, problem.num_samples),
        ):
            if not 0 <= first < last <= most:
                yield f"{piece}: there are {what} 0 to {most - 1}"
                break
        else:
            ran[piece.component].update(
                (layer, sample)
                for layer in range(*piece.layers)
                for sample in range(*piece.samples)
            )
        if not component.may_run_on(device):
            yield f"{piece}: device {device} may not host {component.name!r}"
        if component.counts and piece.num_samples not in component.counts:
            last = problem.num_samples % max(component.counts)
            if piece.num_samples != last:
                yield (
                    f"{piece}: {component.name!r} takes {', '.join(map(str, component.counts))} "
                    f"samples at once"
                )
    for i, component in enumerate(problem.components):
        every = len(component.layers) * problem.num_samples
        twice = sum(times > 1 for times in ran[i].values())
        if twice:
            yield f"component {component.name!r}: {twice} of (layer, sample) run more than once"
        if len(ran[i]) < every:
            left = every - len(ran[i])
            yield f"component {component.name!r}: {left} of (layer, sample) are missing"
    for device, (line, order) in enumerate(zip(filled.order, problem.schedule.order, strict=True)):
        if tuple(item for item in line if not isinstance(item, Piece)) != order:
            yield f"device {device}: the operations are not those of the schedule, in its order"


def _put_off(problem: FillProblem, filled: Filled, timeline: FilledTimeline) -> Iterator[str]:
    """Operations of the schedule that wait for pieces."""
    slack = 1e-7 * problem.timeline.makespan
    for device, line in enumerate(filled.order):
        late: list[Operation] = [
            item
            for item in line
            if not isinstance(item, Piece)
            and timeline.start[item] > problem.timeline.start[item] + slack
        ]
        if late:
            by = timeline.start[late[0]] - problem.timeline.start[late[0]]
            yield f"device {device}: pieces put off {late[0]} by {by:g} s"
