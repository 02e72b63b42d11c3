"""Bubble tasks of independent slices, placed in a schedule's bubbles.

P = 2, M = 2, 1F1B, forward = 1, backward = 2; a bubble task of slices of 1, 2 and 1:

======== ==== ==== ==== ==== ==== ==== ==== ==== ====
device 0 F0:0 F0:1 X0:1 -    B0:0 -    X0:2 B0:1 -
device 1 X0:0 F1:0 B1:0 -    F1:1 B1:1 -    .    .
======== ==== ==== ==== ==== ==== ==== ==== ==== ====
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from megatron_pulse.planner.schedule.check.simulate import Timeline, simulate
from megatron_pulse.planner.schedule.operations import BubbleTask, Operation, OpType, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem


def fill(
    problem: ScheduleProblem, schedule: Schedule, bubble_tasks: Sequence[BubbleTask]
) -> Schedule:
    """``schedule`` with every slice of ``bubble_tasks``; with ``problem``'s times no stage is put
    off.

    Slices of bubble tasks with the fewest devices come first, then the longest; each goes into the
    shortest idle gap that takes it whole, or else to the end of the device that is done first. So
    all but the last per cents of the idle time can be filled while slices are short beside gaps.
    Raises ValueError for a schedule that has bubble tasks, and bubble tasks whose devices there are
    not.
    """
    if schedule.bubble_tasks:
        raise ValueError(f"the schedule {schedule.name} has bubble tasks already")
    num_devices = schedule.placement.num_devices
    homes = [[d for d in range(num_devices) if task.may_run_on(d)] for task in bubble_tasks]
    if lost := [repr(f.name) for f, home in zip(bubble_tasks, homes, strict=True) if not home]:
        raise ValueError(f"none of the {num_devices} devices may run bubble task {', '.join(lost)}")
    timeline = simulate(problem, schedule)
    slack = 1e-12 * timeline.makespan
    gaps, done = _gaps(timeline)
    placed: dict[tuple[int, int], list[Operation]] = defaultdict(list)
    slices = [
        (seconds, Operation(OpType.BUBBLE_TASK, index, number))
        for index, task in enumerate(bubble_tasks)
        for number, seconds in enumerate(task.slice_seconds)
    ]
    for seconds, slice_ in sorted(slices, key=lambda item: (len(homes[item[1].stage]), -item[0])):
        fitting = [
            (gaps[device][at], device)
            for device in homes[slice_.stage]
            if (at := bisect_left(gaps[device], (seconds - slack, 0))) < len(gaps[device])
        ]
        if fitting:
            (room, position), device = gap = min(fitting)
            gaps[device].remove(gap[0])
            insort(gaps[device], (room - seconds, position))
        else:
            device = min(homes[slice_.stage], key=lambda d: done[d])
            position = len(schedule.order[device])
        if position == len(schedule.order[device]):
            done[device] += seconds
        placed[device, position].append(slice_)
    order = tuple(
        tuple(
            operation
            for position in range(len(mine) + 1)
            for operation in (*sorted(placed[device, position]), *mine[position : position + 1])
        )
        for device, mine in enumerate(schedule.order)
    )
    return replace(schedule, order=order, bubble_tasks=tuple(bubble_tasks))


def _gaps(timeline: Timeline) -> tuple[list[list[tuple[float, int]]], list[float]]:
    """Per device its gaps as (length, position of the operation after it), and its last end."""
    gaps, done = [], []
    for order in timeline.schedule.order:
        ends = [0.0, *(timeline.end[operation] for operation in order)]
        starts = [*(timeline.start[operation] for operation in order), timeline.makespan]
        lengths = (start - end for start, end in zip(starts, ends, strict=True))
        gaps.append(sorted((room, i) for i, room in enumerate(lengths) if room > 0))
        done.append(ends[-1])
    return gaps, done
