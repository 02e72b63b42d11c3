"""A timeline as trace events: JSON for ui.perfetto.dev and chrome://tracing.

A timeline is a process, a device a thread, and an operation a complete event. A message is a flow
from its producer to its consumer, and live stage activations are counters. Messages, waits, and
copies to and from the host have threads of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_pulse.planner.draw.lanes import MarkStyle
from megatron_pulse.planner.draw.schedule import Panel, with_copies
from megatron_pulse.planner.draw.style import NAMES
from megatron_pulse.planner.schedule.check.simulate import Timeline, dependency
from megatron_pulse.planner.schedule.operations import Operation, OpType
from megatron_pulse.planner.schedule.problem import ScheduleProblem

_COPIES = {MarkStyle.TO_HOST: "copies to the host", MarkStyle.BACK: "copies from the host"}


def trace_events(
    problem: ScheduleProblem,
    timeline: Timeline | Sequence[Panel],
    microseconds: float = 1e3,
    in_bytes: bool = False,
) -> dict[str, Any]:
    """JSON-able trace of one timeline, or of several as processes with their names.

    ``microseconds`` is the number of microseconds in one unit of the timelines: 1e6 for seconds.
    ``in_bytes`` means that activations are counted in bytes.
    """
    panels = [Panel("pipeline", timeline)] if isinstance(timeline, Timeline) else list(timeline)
    events: list[dict[str, Any]] = []
    for process, panel in enumerate(
        with_copies(problem, panels), start=1
    ):  # 0 is the idle process of a viewer
        events += _process(problem, panel, process, microseconds, in_bytes)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _process(
    problem: ScheduleProblem, panel: Panel, process: int, scale: float, in_bytes: bool
) -> Iterator[dict[str, Any]]:
    yield _told("process_name", process, 0, name=panel.name)
    for device, order in enumerate(panel.timeline.schedule.order):
        yield from _thread(process, device, f"device {device}")
        for operation in order:
            yield _bar(panel.timeline, operation, process, device, scale)
        yield from _activations(problem, panel.timeline, process, device, scale, in_bytes)
    yield from _lanes(panel, process, scale)
    yield from _flows(problem, panel.timeline, process, scale)


def _told(what: str, process: int, thread: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _thread(process: int, thread: int, name: str) -> Iterator[dict[str, Any]]:
    """Name and place of a thread."""
    yield _told("thread_name", process, thread, name=name)
    yield _told("thread_sort_index", process, thread, sort_index=thread)


def _bar(
    timeline: Timeline, operation: Operation, process: int, device: int, scale: float
) -> dict[str, Any]:
    begin, end = timeline.start[operation], timeline.end[operation]
    return {
        "ph": "X",
        "name": str(operation),
        "cat": NAMES[operation.kind],
        "pid": process,
        "tid": device,
        "ts": begin * scale,
        "dur": (end - begin) * scale,
        "args": {"stage": operation.stage, "microbatch": operation.microbatch},
    }


def _activations(
    problem: ScheduleProblem,
    timeline: Timeline,
    process: int,
    device: int,
    scale: float,
    in_bytes: bool,
) -> Iterator[dict[str, Any]]:
    """Counter of memory: growth counts at an operation's start, shrinkage at its end.

    Activations on the host do not count.
    """
    live = 0.0
    for operation in timeline.schedule.order[device]:
        if change := problem.change(operation.kind, operation.stage):
            grows = change > 0
            live += change
            yield {
                "ph": "C",
                "name": f"live activations, device {device}",
                "pid": process,
                "ts": (timeline.start if grows else timeline.end)[operation] * scale,
                "args": {"bytes" if in_bytes else "stage activations": max(0.0, round(live, 9))},
            }


def _lanes(panel: Panel, process: int, scale: float) -> Iterator[dict[str, Any]]:
    """Messages, waits and copies as threads of their own below those of devices."""
    names = [f"device {mark.device}: {_COPIES.get(mark.look, 'messages')}" for mark in panel.lanes]
    threads = {n: i for i, n in enumerate(sorted(set(names)), len(panel.timeline.schedule.order))}
    for name, thread in threads.items():
        yield from _thread(process, thread, name)
    for name, mark in zip(names, panel.lanes, strict=True):
        yield {
            "ph": "X",
            "name": mark.text,
            "cat": mark.look.value,
            "pid": process,
            "tid": threads[name],
            "ts": mark.start * scale,
            "dur": (mark.end - mark.start) * scale,
        }


def _flows(
    problem: ScheduleProblem, timeline: Timeline, process: int, scale: float
) -> Iterator[dict[str, Any]]:
    placement = problem.placement
    for number, operation in enumerate(timeline.end):
        source = dependency(operation, placement)
        if source is None:
            continue
        one, other = (placement.device_of_stage[o.stage] for o in (source, operation))
        if one == other:
            continue
        message = {
            "name": "activation" if operation.kind is OpType.FORWARD else "gradient",
            "cat": "link",
            "id": process * len(timeline.end) + number,
            "pid": process,
        }
        # A flow binds to the event that encloses its time, so it leaves just before the event ends.
        begin, end = timeline.start[source], timeline.end[source]
        leaves = begin + 0.99 * (end - begin)
        yield {**message, "ph": "s", "tid": one, "ts": leaves * scale}
        arrives = timeline.start[operation] * scale
        yield {**message, "ph": "f", "bp": "e", "tid": other, "ts": arrives}
