"""Compiled communication passes NCCL's rules; broken communication is named."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.backbone.costs import weighted_costs
from megatron_pulse.planner.layout.placement import fold
from megatron_pulse.planner.layout.routes import Payload, trace_routes
from megatron_pulse.planner.partition.find import find_partition
from megatron_pulse.planner.schedule.check.validate import validate
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.planner.schedule.operations import Operation, Schedule
from megatron_pulse.planner.step.communication import CommunicationPlan, compile_communication
from megatron_pulse.planner.step.nccl_check import check_events
from megatron_pulse.planner.step.program import Event, Issue, Run, Wait, compile_program
from tests.planner.chains import chain
from tests.planner.schedules import wave
from tests.planner.strategies import schedules

Programs = list[list[Event]]


def compiled(schedule: Schedule, seed: int = 0) -> CommunicationPlan:
    """The communication of a random chain with skips and conditioning, cut for the schedule."""
    rng = random.Random(seed)
    num = schedule.placement.num_stages + rng.randint(0, 6)
    skips = [(i, num - 1 - i) for i in range(num // 2 - 1) if rng.random() < 0.7]
    skips += [tuple(sorted(rng.sample(range(num), 2))) for _ in range(rng.randint(0, 3))]
    users = {0: range(1, num), num // 2: [num - 1]}
    backbone = chain(num, skips, users if rng.random() < 0.5 else None)
    weights = [rng.random() for _ in range(num)]
    partition = find_partition(weighted_costs(backbone, weights), schedule.placement)
    return compile_communication(trace_routes(backbone, partition), schedule)


def programs(schedule: Schedule, plan: CommunicationPlan) -> Programs:
    return [list(compile_program(schedule, plan, d)) for d in range(len(schedule.order))]


def on_demand(schedule: Schedule, plan: CommunicationPlan) -> Programs:
    """Receive just before use, send right after computing, each its own group."""
    result: Programs = []
    for device, order in enumerate(schedule.order):
        events: list[Event] = []
        for op in order:
            for m in plan.messages:
                if m.consumer == op and m.destination == device:
                    events += [Issue(((False, m),)), Wait(m)]
            events.append(Run(op))
            events += [Issue(((True, m),)) for m in plan.messages if m.producer == op]
        result.append(events)
    return result


def check_groups(groups: list[list[list[tuple[bool, Message]]]]) -> list[str]:
    """Faults of the groups that each device starts in order, all producers having run."""
    ready = [[Run(m.producer) for group in mine for sends, m in group if sends] for mine in groups]
    issues = [[Issue(tuple(group)) for group in mine] for mine in groups]
    return check_events([[*a, *b] for a, b in zip(ready, issues, strict=True)])


def message(producer: str, consumer: str, source: int, destination: int) -> Message:
    ends = Operation.parse(producer), Operation.parse(consumer)
    return Message(*ends, Payload.BOUNDARY, "0", source, destination)


A = message("F0:0", "F1:0", 0, 1)
B = message("F0:1", "F1:1", 0, 1)
C = message("B1:0", "B0:0", 1, 0)


@settings(max_examples=100, derandomize=True)
@given(schedules(), st.integers(0, 10**6))
def test_compiled_plans_complete(schedule: Schedule, seed: int) -> None:
    for candidate in (schedule, schedule.forward_only()):
        plan = compiled(candidate, seed)
        assert plan.messages
        assert validate(candidate, messages=plan.messages) == []
        assert check_events(programs(candidate, plan)) == []


@pytest.mark.parametrize("num_devices", [2, 4])
def test_on_demand_groups_deadlock_where_rounds_do_not(num_devices: int) -> None:
    """Measured on NCCL semantics: a fold's unbatched sends and receives block each other."""
    schedule = wave(fold(num_devices), 2 * num_devices, effort=2)
    plan = compiled(schedule)
    assert check_events(programs(schedule, plan)) == []
    faults = check_events(on_demand(schedule, plan))
    assert any(fault.startswith("deadlock: ") for fault in faults)


@settings(max_examples=60, derandomize=True)
@given(schedules(), st.integers(0, 10**6), st.data())
def test_mutated_programs_are_rejected(schedule: Schedule, seed: int, data: st.DataObject) -> None:
    plan = compiled(schedule, seed)
    device = data.draw(st.integers(0, len(schedule.order) - 1))
    good = programs(schedule, plan)
    issues = [i for i, event in enumerate(good[device]) if isinstance(event, Issue)]
    waits = [i for i, event in enumerate(good[device]) if isinstance(event, Wait)]

    without_issue = [list(mine) for mine in good]
    gone = without_issue[device].pop(data.draw(st.sampled_from(issues)))
    assert isinstance(gone, Issue)
    assert check_events(without_issue)

    without_wait = [list(mine) for mine in good]
    wait = without_wait[device].pop(data.draw(st.sampled_from(waits)))
    assert isinstance(wait, Wait)
    assert check_events(without_wait) == [
        f"device {device} runs {wait.message.consumer} without waiting for {wait.message}"
    ]

    sends = [i for i in issues if any(is_send for is_send, _ in good[device][i].ops)]  # type: ignore[union-attr]
    first = data.draw(st.sampled_from(sends))
    eager = [list(mine) for mine in good]
    eager[device].insert(0, eager[device].pop(first))
    sent = next(m for is_send, m in good[device][first].ops if is_send)  # type: ignore[union-attr]
    assert f"device {device} sends {sent} before {sent.producer} ran" in check_events(eager)


def test_rounds_that_match() -> None:
    assert check_groups([[[(True, A)], [(True, B)]], [[(False, A)], [(False, B)]]]) == []
    assert check_groups([[[(True, A), (False, C)]], [[(True, C), (False, A)]]]) == []


def test_fifo_mismatch_names_both_messages() -> None:
    faults = check_groups([[[(True, A)], [(True, B)]], [[(False, B)], [(False, A)]]])
    assert len(faults) == 2
    assert all("first in, first out mismatch" in f for f in faults)
    assert f"is sent as {A}, received as {B}" in faults[0]


def test_crossing_groups_deadlock() -> None:
    faults = check_groups([[[(True, A)], [(False, C)]], [[(True, C)], [(False, A)]]])
    assert len(faults) == 1 and faults[0].startswith("deadlock: ")
    assert f"device 0 has an unfinished group: send of {A}" in faults[0]
    assert f"device 1 has an unfinished group: send of {C}" in faults[0]


def test_circle_of_three_devices_deadlocks() -> None:
    ring = [message("F0:0", "F1:0", d, (d + 1) % 3) for d in range(3)]
    apart = [[[(True, ring[d])], [(False, ring[d - 1])]] for d in range(3)]
    assert any("deadlock" in fault for fault in check_groups(apart))
    together = [[[(True, ring[d]), (False, ring[d - 1])]] for d in range(3)]
    assert check_groups(together) == []


def test_lonely_send_is_named() -> None:
    faults = check_groups([[[(True, A)]], []])
    assert f"device 0 sends {A}, but device 1 never receives a message number 0" in faults[0]


def test_wait_before_issue_and_foreign_messages() -> None:
    run0, run1 = Run(A.producer), Run(A.consumer)
    late: Programs = [[run0, Issue(((True, A),))], [Wait(A), Issue(((False, A),)), run1]]
    faults = check_events(late)
    assert f"device 1 waits for {A} before issuing it" in faults
    assert any("deadlock" in fault and f"device 1 waits for {A}" in fault for fault in faults)
    foreign: Programs = [[run0, Issue(((True, A),))], [Issue(((True, A),))]]
    assert f"device 1 sends {A}, which is not its own" in check_events(foreign)
