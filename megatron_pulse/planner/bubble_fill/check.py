"""Static checks of a filled step and its memory, independent of the search."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from megatron_pulse.planner.bubble_fill.bound import fits
from megatron_pulse.planner.bubble_fill.components import Slice
from megatron_pulse.planner.bubble_fill.problem import FilledOrder, FillProblem
from megatron_pulse.planner.bubble_fill.simulate import FilledSimulation, FilledTimeline
from megatron_pulse.planner.schedule.operations import Operation


def faults_of(problem: FillProblem, filled: FilledOrder) -> list[str]:
    """Faults of ``filled`` as a solution of ``problem``; empty for a valid one.

    Every (layer, sample) of every component must run once and in order, in slices of allowed sizes,
    on a device that may host the component. The schedule's operations must keep their order, and
    also their times unless components do not fit in the bubbles. Memory must suffice, and the links
    must carry results and slices' outputs.
    """
    faults = [*_set_faults(problem, filled)]
    if faults:
        return faults
    step = FilledSimulation(problem, filled)
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


def peak_bytes(step: FilledSimulation, timeline: FilledTimeline) -> tuple[float, ...]:
    """Peak bytes of the slices on each device, at the times of ``timeline``.

    Counted are parameters of the layers that run there, one batch's results that the device
    consumes, and the working memory of the running slice. The output of a slice for another counts
    on both devices, from the first one's end to the second one's start.
    """
    problem, components = step.problem, step.problem.components
    layers: list[set[tuple[int, int]]] = [set() for _ in range(problem.num_devices)]
    changes: list[list[tuple[float, int, float]]] = [[] for _ in range(problem.num_devices)]

    def holds(device: int, start: float, end: float, num_bytes: float) -> None:
        # At equal times memory is freed before it is allocated.
        if num_bytes and end > start:
            changes[device] += [(start, 1, num_bytes), (end, 0, -num_bytes)]

    for slice_, device in step.home.items():
        mine = components[slice_.component].layers[slice(*slice_.layers)]
        layers[device] |= {(slice_.component, layer) for layer in range(*slice_.layers)}
        most = max(layer.activation_bytes for layer in mine) * slice_.num_samples
        holds(device, timeline.start[slice_], timeline.end[slice_], most)
        for source, _ in step.deps[slice_]:
            assert isinstance(source, Slice)
            for where in {device, step.home[source]}:
                holds(
                    where,
                    timeline.end[source],
                    timeline.start[slice_],
                    _left_bytes(problem, source, slice_),
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


def sent_bytes(step: FilledSimulation) -> tuple[float, ...]:
    """Bytes that each device sends: slice outputs used elsewhere, and results for their
    consumers."""
    problem = step.problem
    sent = [0.0] * problem.num_devices
    for slice_, device in step.home.items():
        component = problem.components[slice_.component]
        for source, _ in step.deps[slice_]:
            assert isinstance(source, Slice)
            if step.home[source] != device:
                sent[step.home[source]] += _left_bytes(problem, source, slice_)
        if slice_.layers[1] == len(component.layers):
            away = len({*component.consumers} - {device})
            sent[device] += away * component.result_bytes * slice_.num_samples
    return tuple(sent)


def _left_bytes(problem: FillProblem, source: Slice, slice_: Slice) -> float:
    start, end = (
        max(source.samples[0], slice_.samples[0]),
        min(source.samples[1], slice_.samples[1]),
    )
    component = problem.components[source.component]
    if source.component != slice_.component:
        return component.result_bytes * (end - start)
    return component.layers[source.layers[1] - 1].output_bytes * (end - start)


def _set_faults(problem: FillProblem, filled: FilledOrder) -> Iterator[str]:
    if len(filled.order) != problem.num_devices:
        yield f"order has {len(filled.order)} devices instead of {problem.num_devices}"
        return
    ran: dict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
    for device, slice_ in filled.slices:
        if not 0 <= slice_.component < len(problem.components):
            yield f"{slice_}: there is no such component"
            continue
        component = problem.components[slice_.component]
        for what, (first, last), most in (
            ("layers", slice_.layers, len(component.layers)),
            ("samples", slice_.samples, problem.num_samples),
        ):
            if not 0 <= first < last <= most:
                yield f"{slice_}: there are {what} 0 to {most - 1}"
                break
        else:
            ran[slice_.component].update(
                (layer, sample)
                for layer in range(*slice_.layers)
                for sample in range(*slice_.samples)
            )
        if not component.may_run_on(device):
            yield f"{slice_}: device {device} may not host {component.name!r}"
        if component.counts and slice_.num_samples not in component.counts:
            last = problem.num_samples % max(component.counts)
            if slice_.num_samples != last:
                yield (
                    f"{slice_}: {component.name!r} takes {', '.join(map(str, component.counts))} "
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
        if tuple(item for item in line if not isinstance(item, Slice)) != order:
            yield f"device {device}: operations differ from the schedule, or are in another order"


def _put_off(problem: FillProblem, filled: FilledOrder, timeline: FilledTimeline) -> Iterator[str]:
    """Schedule operations that slices delay."""
    slack = 1e-7 * problem.timeline.makespan
    for device, line in enumerate(filled.order):
        late: list[Operation] = [
            item
            for item in line
            if not isinstance(item, Slice)
            and timeline.start[item] > problem.timeline.start[item] + slack
        ]
        if late:
            by = timeline.start[late[0]] - problem.timeline.start[late[0]]
            yield f"device {device}: slices delay {late[0]} by {by:g} s"
