"""Every mutation of a good schedule is rejected, for the right reason."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.planner.layout.placement import Partition, fold, sequential
from megatron_pulse.planner.layout.routes import Payload
from megatron_pulse.planner.schedule.check.simulate import DeadlockError
from megatron_pulse.planner.schedule.check.validate import peak_activations, validate
from megatron_pulse.planner.schedule.classic.one_f_one_b import one_f_one_b
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.planner.schedule.operations import Kind, Operation, Schedule
from tests.planner.schedules import simulate, wave
from tests.planner.strategies import schedules, with_order

many = settings(max_examples=100, derandomize=True)


def any_operation(schedule: Schedule, data: st.DataObject) -> tuple[int, int, Operation]:
    """(device, position, operation)."""
    device = data.draw(st.integers(0, len(schedule.order) - 1))
    position = data.draw(st.integers(0, len(schedule.order[device]) - 1))
    return device, position, schedule.order[device][position]


def swapped(schedule: Schedule, device: int, a: Operation, b: Operation) -> Schedule:
    other = {a: b, b: a}
    return with_order(schedule, device, [other.get(op, op) for op in schedule.order[device]])


def parse(*rows: str) -> tuple[tuple[Operation, ...], ...]:
    return tuple(tuple(map(Operation.parse, row.split())) for row in rows)


@many
@given(schedules(), st.data())
def test_dropped_operation(schedule: Schedule, data: st.DataObject) -> None:
    device, position, op = any_operation(schedule, data)
    order = list(schedule.order[device])
    del order[position]
    assert f"{op} is missing on device {device}" in validate(with_order(schedule, device, order))


@many
@given(schedules(), st.data())
def test_duplicated_operation(schedule: Schedule, data: st.DataObject) -> None:
    device, position, op = any_operation(schedule, data)
    order = list(schedule.order[device])
    order.insert(position, op)
    assert validate(with_order(schedule, device, order)) == [f"{op} is in the schedule 2 times"]


@many
@given(schedules(), st.data())
def test_operation_on_the_wrong_device(schedule: Schedule, data: st.DataObject) -> None:
    device, position, op = any_operation(schedule, data)
    other = (device + 1) % len(schedule.order)
    order = list(schedule.order[device])
    del order[position]
    moved = with_order(schedule, device, order)
    moved = with_order(moved, other, [*moved.order[other], op])
    reason = f"{op} is on device {other}; stage {op.stage} is on device {device}"
    assert reason in validate(moved)


@many
@given(schedules(), st.data())
def test_microbatches_out_of_order(schedule: Schedule, data: st.DataObject) -> None:
    device, _, op = any_operation(schedule, data)
    if schedule.num_microbatches == 1:
        return
    m = min(op.microbatch, schedule.num_microbatches - 2)
    first, second = (Operation(op.kind, op.stage, x) for x in (m, m + 1))
    reason = (
        f"device {device} runs {second} before {first}; "
        f"the microbatches of a stage must run in order"
    )
    assert reason in validate(swapped(schedule, device, first, second))


@many
@given(schedules(), st.data())
def test_backward_before_its_forward(schedule: Schedule, data: st.DataObject) -> None:
    device, _, op = any_operation(schedule, data)
    forward, backward = (Operation(Kind(k), op.stage, op.microbatch) for k in "FB")
    mutated = swapped(schedule, device, forward, backward)
    assert f"device {device} runs {backward} before {forward}" in validate(mutated)


@many
@given(schedules(), st.data())
def test_unknown_stage_and_microbatch(schedule: Schedule, data: st.DataObject) -> None:
    device = any_operation(schedule, data)[0]
    num, m = schedule.placement.num_stages, schedule.num_microbatches
    extra = [Operation(Kind.FORWARD, num, 0), Operation(Kind.FORWARD, 0, m)]
    faults = validate(with_order(schedule, device, [*schedule.order[device], *extra]))
    assert f"F{num}:0 on device {device}: there is no stage {num}" in faults
    assert f"F0:{m} on device {device}: there is no microbatch {m}" in faults


@settings(max_examples=200, derandomize=True)
@given(schedules(), st.integers(0, 10**6))
def test_deadlocks_are_those_of_the_simulator(schedule: Schedule, seed: int) -> None:
    """Interleave a device's stages at random, in microbatch order, backward after forward."""
    rng = random.Random(seed)
    orders = []
    for old in schedule.order:
        order = list(old)
        for _ in range(rng.choice([1, 4, 40])):
            i = rng.randrange(len(order) - 1)
            a, b = order[i : i + 2]
            ordered = a.stage == b.stage and (a.kind == b.kind or a.microbatch == b.microbatch)
            if not ordered:
                order[i : i + 2] = [b, a]
        orders.append(tuple(order))
    mutated = Schedule("mutated", schedule.placement, schedule.num_microbatches, tuple(orders))
    faults = validate(mutated)
    ones = [1.0] * schedule.placement.num_stages
    try:
        simulate(mutated, ones, ones)
    except DeadlockError:
        assert len(faults) == 1 and faults[0].startswith("deadlock: ")
    else:
        assert faults == []


def test_circular_wait_is_explained_with_the_grid() -> None:
    rows = ("F0:0 B0:0 F0:1 B0:1", "F1:0 F1:1 B1:0 B1:1")
    faults = validate(Schedule("stuck", sequential(2), 2, parse(*rows)))
    assert len(faults) == 1
    assert "device 0 is at B0:0, which waits for B1:0" in faults[0]
    assert "device 1 is at F1:1, which waits for F0:1" in faults[0]
    assert "device  0 | F0:0 B0:0 F0:1 B0:1" in faults[0]


def test_all_faults_are_listed_at_once() -> None:
    rows = ("F0:0 F0:0 B0:1 F0:1", "F1:0 B1:0 B1:1 F1:1")
    faults = validate(Schedule("bad", sequential(2), 2, parse(*rows)))
    assert "F0:0 is in the schedule 2 times" in faults
    assert "B0:0 is missing on device 0" in faults
    assert "device 0 runs B0:1 before F0:1" in faults
    assert "device 1 runs B1:1 before F1:1" in faults
    assert any(fault.startswith("deadlock: ") for fault in faults)


def test_peak_and_cap() -> None:
    schedule = one_f_one_b(sequential(3), 5)
    assert peak_activations(schedule) == (3, 2, 1)
    assert validate(schedule, cap=3) == []
    assert validate(schedule, cap=2) == [
        "device 0 holds 3 live stage activations at its peak; the cap is 2"
    ]
    assert validate(schedule.forward_only(), cap=1) == []


def test_partition_must_fit() -> None:
    schedule = wave(fold(2), 2)
    assert validate(schedule, Partition(fold(2), (0, 1, 2, 3, 4))) == []
    faults = validate(schedule, Partition(sequential(4), (0, 2, 2, 3)))
    assert any("partition for (0, 1, 2, 3)" in fault for fault in faults)
    assert any("has 4 cuts; its 4 stages need 5" in fault for fault in faults)
    assert any("stage 1 of the partition is empty" in fault for fault in faults)


def test_messages_need_both_ends() -> None:
    schedule = one_f_one_b(sequential(2), 2)
    f0, f1, f9 = (Operation.parse(text) for text in ("F0:0", "F1:0", "F1:9"))

    def message(producer: Operation, consumer: Operation, source: int, to: int) -> Message:
        return Message(producer, consumer, Payload.BOUNDARY, "0", source, to)

    assert validate(schedule, messages=[message(f0, f1, 0, 1)]) == []
    faults = validate(schedule, messages=[message(f0, f9, 0, 1), message(f0, f1, 1, 0)])
    assert [fault.rsplit(": its ", 1)[1] for fault in faults] == [
        "consumer F1:9 is not in the schedule",
        "producer F0:0 runs on device 0, not on device 1",
        "consumer F1:0 runs on device 1, not on device 0",
    ]
    assert any(
        "both ends are on one device" in f
        for f in validate(schedule, messages=[message(f0, f0, 0, 0)])
    )


def test_messages_take_part_in_circular_waits() -> None:
    schedule = one_f_one_b(sequential(2), 2)
    late = Message(Operation.parse("B1:1"), Operation.parse("B0:0"), Payload.SKIP, "late", 1, 0)
    assert validate(schedule, messages=[late]) == []
    early = Message(Operation.parse("B1:1"), Operation.parse("F0:1"), Payload.SKIP, "early", 1, 0)
    faults = validate(schedule, messages=[early])
    assert len(faults) == 1 and "device 0 is at F0:1, which waits for B1:1" in faults[0]
