"""Bubble tasks: idle time that slices fill, operations that they delay, and checks."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.backbone.costs import weighted_costs
from megatron_pulse.planner.layout.placement import fold, interleaved, sequential
from megatron_pulse.planner.layout.routes import trace_routes
from megatron_pulse.planner.partition.find import find_partition
from megatron_pulse.planner.program.communication import compile_communication, messages_of
from megatron_pulse.planner.program.device_program import Run, compile_program
from megatron_pulse.planner.program.nccl_check import check_events
from megatron_pulse.planner.schedule.check.simulate import Timeline, grid, logical_times, simulate
from megatron_pulse.planner.schedule.check.validate import faults_for, peak_activations, validate
from megatron_pulse.planner.schedule.classic.catalog import CLASSICS, SPLIT
from megatron_pulse.planner.schedule.operations import BubbleTask, Operation, OpType, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.registry import make_schedule
from tests.planner.chains import chain
from tests.planner.schedules import wave
from tests.planner.slices import fill
from tests.planner.strategies import equal, with_order

CASES = [
    ("1f1b", sequential(4)),
    ("zb-h1", sequential(4)),
    ("interleaved", interleaved(4)),
    ("zb-v", fold(4)),
    ("dualpipe-v", fold(4)),
    ("hanayo", fold(4, 2)),
    ("wave", fold(4)),
]


def uneven(name: str, placement, num_microbatches: int) -> tuple[ScheduleProblem, Schedule]:
    """Stages that differ by up to a half, links, and the schedule of that name for them."""
    rng = random.Random(name)
    times = [tuple(rng.uniform(0.8, 1.2) for _ in range(placement.num_stages)) for _ in range(3)]
    weight = times[2] if name in SPLIT else None
    problem = ScheduleProblem(placement, num_microbatches, times[0], times[1], weight, 0.2)
    if name in CLASSICS:
        return problem, CLASSICS[name](placement, num_microbatches)
    schedule = wave(
        placement, num_microbatches, forward=times[0], backward=times[1], link=0.2, effort=2
    )
    return problem, schedule


def slices(total: float, count: int, seed: int = 0) -> tuple[float, ...]:
    """``count`` times between 1 and 3 of a unit, ``total`` in all."""
    rng = random.Random(seed)
    parts = [rng.uniform(1, 3) for _ in range(count)]
    return tuple(part * total / sum(parts) for part in parts)


def ran(timeline: Timeline) -> list[Operation]:
    """The slices that are over when the last stage is."""
    stages = max(end for op, end in timeline.end.items() if op.kind is not OpType.BUBBLE_TASK)
    return [
        op
        for op, end in timeline.end.items()
        if op.kind is OpType.BUBBLE_TASK and end <= stages * (1 + 1e-9)
    ]


def unmoved(before: Timeline, after: Timeline) -> bool:
    return all(after.start[op] == pytest.approx(start) for op, start in before.start.items())


@pytest.mark.parametrize(("name", "placement"), CASES)
def test_nine_tenths_of_the_idle_time_cost_nothing(name: str, placement) -> None:
    problem, schedule = uneven(name, placement, 8)
    before = simulate(problem, schedule)
    each = slices(0.9 * sum(before.bubble), 400)
    filled = fill(
        problem, schedule, [BubbleTask("text", each[:300]), BubbleTask("image", each[300:])]
    )
    after = simulate(problem, filled)
    assert validate(filled) == [] and faults_for(problem, filled) == []
    assert after.makespan == pytest.approx(before.makespan)
    assert unmoved(before, after)
    assert len(ran(after)) == 400
    assert sum(after.bubble) == pytest.approx(0.1 * sum(before.bubble))


@pytest.mark.parametrize(("name", "placement"), CASES)
def test_nearly_all_of_the_idle_time_can_be_filled(name: str, placement) -> None:
    problem, schedule = uneven(name, placement, 8)
    before = simulate(problem, schedule)
    idle = sum(before.bubble)
    filled = fill(problem, schedule, [BubbleTask("text", slices(idle, 400))])
    after = simulate(problem, filled)
    assert unmoved(before, after)
    assert (
        sum(filled.bubble_tasks[0].slice_seconds[op.microbatch] for op in ran(after)) >= 0.94 * idle
    )
    assert after.makespan <= 1.02 * before.makespan


def test_the_table_of_the_docstring() -> None:
    problem = equal(sequential(2), 2)
    filled = fill(problem, make_schedule("1f1b", sequential(2), 2), [BubbleTask("x", (1, 2, 1))])
    assert grid(simulate(problem, filled)).splitlines() == [
        "device  0 | F0:0 F0:1 X0:1 -    B0:0 -    X0:2 B0:1 -",
        "device  1 | X0:0 F1:0 B1:0 -    F1:1 B1:1 -    .    .",
    ]


def test_what_fits_nowhere_goes_to_the_device_that_is_done_first() -> None:
    problem = equal(sequential(2), 2)  # device 0 is done at 9, device 1 at 7
    schedule = make_schedule("1f1b", sequential(2), 2)
    filled = fill(problem, schedule, [BubbleTask("x", (3.0, 4.0))])
    assert [str(order[-1]) for order in filled.order] == ["X0:0", "X0:1"]
    assert simulate(problem, filled).makespan == 12  # 7 + 4 on device 1, then 9 + 3 on device 0
    at_home = fill(problem, schedule, [BubbleTask("x", (3.0, 4.0), (0,))])
    assert simulate(problem, at_home).makespan == 16 and len(at_home.order[1]) == 4


@settings(max_examples=80, derandomize=True)
@given(st.data())
def test_every_slice_once_on_its_devices_and_no_stage_later(data: st.DataObject) -> None:
    name, placement = data.draw(st.sampled_from(CASES[:-1]))
    problem, schedule = uneven(name, placement, data.draw(st.integers(1, 9)))
    seconds = st.lists(st.floats(0.01, 20), min_size=1, max_size=30).map(tuple)
    homes = st.none() | st.sets(st.integers(0, 3), min_size=1).map(tuple)
    bubble_tasks = data.draw(
        st.lists(st.builds(BubbleTask, st.text(max_size=3), seconds, homes), max_size=3)
    )
    before, filled = simulate(problem, schedule), fill(problem, schedule, bubble_tasks)
    after = simulate(problem, filled)
    assert validate(filled) == [] and unmoved(before, after)
    assert filled.kinds == schedule.kinds
    assert peak_activations(filled) == peak_activations(schedule)
    assert filled.forward_only() == schedule.forward_only()
    work = sum(sum(task.slice_seconds) for task in bubble_tasks)
    assert sum(after.busy) == pytest.approx(sum(before.busy) + work)
    longest = max((max(f.slice_seconds) for f in bubble_tasks), default=0.0)
    if all(task.devices is None for task in bubble_tasks):
        assert after.makespan <= before.makespan + work / 4 + longest


def test_slice_takes_one_slot_of_logical_time() -> None:
    problem, schedule = uneven("zb-v", fold(4), 5)
    filled = fill(problem, schedule, [BubbleTask("x", slices(20, 30))])
    times = logical_times(filled)
    assert len(times) == 3 * 8 * 5 + 30
    for order in filled.order:
        for a, b in zip(order, order[1:], strict=False):
            assert times[b] > times[a]
            if b.kind is OpType.BUBBLE_TASK:
                assert times[b] == times[a] + 1


@pytest.mark.parametrize(("name", "placement"), CASES)
def test_a_program_runs_every_slice_and_sends_nothing_for_it(name: str, placement) -> None:
    problem, schedule = uneven(name, placement, 6)
    filled = fill(
        problem, schedule, [BubbleTask("x", slices(30, 40)), BubbleTask("y", (2.0, 2.0), (1,))]
    )
    num = placement.num_stages
    backbone = chain(num, [(0, num - 1)], {0: range(1, num)})
    partition = find_partition(weighted_costs(backbone, [1.0] * num), placement)
    routes = trace_routes(backbone, partition)
    plan = compile_communication(routes, filled)
    assert sorted(plan.messages) == sorted(compile_communication(routes, schedule).messages)
    assert messages_of(routes, Operation(OpType.BUBBLE_TASK, 0, 3)) == ()
    assert validate(filled, partition, plan.messages) == []
    assert check_events([compile_program(filled, plan, d) for d in range(4)]) == []
    for device, order in enumerate(filled.order):
        events = compile_program(filled, plan, device)
        assert tuple(e.operation for e in events if isinstance(e, Run)) == order


def filled_1f1b() -> Schedule:
    problem, schedule = uneven("1f1b", sequential(4), 4)
    return fill(
        problem, schedule, [BubbleTask("x", slices(20, 12)), BubbleTask("y", (1.0, 1.0), (1, 3))]
    )


@settings(max_examples=100, derandomize=True)
@given(st.data())
def test_mutations(data: st.DataObject) -> None:
    """A slice that is dropped, doubled, or on the wrong device; anywhere on its own is right."""
    schedule = filled_1f1b()
    device = data.draw(st.sampled_from([d for d in range(4) if slices_on(schedule, d)]))
    order = list(schedule.order[device])
    op = data.draw(st.sampled_from(slices_on(schedule, device)))
    name = schedule.bubble_tasks[op.stage].name
    others = [o for o in order if o != op]
    at = data.draw(st.integers(0, len(others)))
    dropped, moved = (
        with_bubble_tasks(schedule, device, new)
        for new in (others, [*others[:at], op, *others[at:]])
    )
    assert validate(dropped) == [f"{op} of bubble task {name!r} is missing"]
    assert validate(moved) == []
    doubled = with_bubble_tasks(schedule, device, [*order, op])
    assert validate(doubled) == [f"{op} is in the schedule 2 times"]
    other = data.draw(st.sampled_from([d for d in range(4) if d != device]))
    faults = validate(with_bubble_tasks(dropped, other, [op, *dropped.order[other]]))
    wrong = f"{op} is on device {other}; bubble task 'y' may run on 1, 3"
    assert faults == ([wrong] if name == "y" and other in (0, 2) else [])


def slices_on(schedule: Schedule, device: int) -> list[Operation]:
    return [op for op in schedule.order[device] if op.kind is OpType.BUBBLE_TASK]


def with_bubble_tasks(schedule: Schedule, device: int, order: list[Operation]) -> Schedule:
    changed = with_order(schedule, device, order)
    return Schedule(
        changed.name,
        changed.placement,
        changed.num_microbatches,
        changed.order,
        schedule.bubble_tasks,
    )


def test_validate_lists_unknown_bubble_tasks_and_slices() -> None:
    schedule = filled_1f1b()
    extra = [Operation(OpType.BUBBLE_TASK, 2, 0), Operation(OpType.BUBBLE_TASK, 1, 2)]
    faults = validate(with_bubble_tasks(schedule, 1, [*schedule.order[1], *extra]))
    assert faults == [
        "X2:0 on device 1: there is no bubble task 2",
        "X1:2 on device 1: bubble task 'y' has 2 slices",
    ]


def test_bubble_task_faults_are_listed() -> None:
    with pytest.raises(ValueError, match=r"2 faults\):\n  - it has no slices\n  - devices is "):
        BubbleTask("x", (), ())
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be finite and positive"):
            BubbleTask("x", (1.0, seconds))
    problem, schedule = equal(sequential(2), 2), make_schedule("1f1b", sequential(2), 2)
    lost = [BubbleTask("a", (1.0,)), BubbleTask("b", (1.0,), (2,)), BubbleTask("c", (1.0,), (5, 6))]
    with pytest.raises(ValueError, match="none of the 2 devices may run bubble task 'b', 'c'"):
        fill(problem, schedule, lost)
    with pytest.raises(ValueError, match="1f1b has bubble tasks already"):
        fill(problem, fill(problem, schedule, lost[:1]), lost[:1])


@pytest.mark.parametrize(("p", "m"), product((2, 8), (4, 32)))
def test_fill_places_a_short_slice_in_a_bubble(p: int, m: int) -> None:
    problem = equal(sequential(p), m)
    filled = fill(problem, make_schedule("1f1b", sequential(p), m), [BubbleTask("x", (0.1,) * p)])
    assert simulate(problem, filled).makespan == pytest.approx(3 * (m + p - 1))
