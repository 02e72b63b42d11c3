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
from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule
from tests.planner.schedules import run_schedule, wave
from tests.planner.strategies import schedules, with_order


def swapped(schedule: Schedule, device: int, a: Operation, b: Operation) -> Schedule:
    other = {a: b, b: a}
    return with_order(schedule, device, [other.get(op, op) for op in schedule.order[device]])


def parse(*rows: str) -> tuple[tuple[Operation, ...], ...]:
    return tuple(tuple(map(Operation.parse, row.split())) for row in rows)


@settings(max_examples=150, derandomize=True)
@given(schedules(), st.data())
def test_every_mutation_is_rejected_for_its_reason(schedule: Schedule, data: st.DataObject) -> None:
    """An operation dropped, doubled, on another device, out of order, or of no stage."""
    device = data.draw(st.integers(0, len(schedule.order) - 1))
    order = list(schedule.order[device])
    position = data.draw(st.integers(0, len(order) - 1))
    op, others = order[position], order[:position] + order[position + 1 :]
    dropped = with_order(schedule, device, others)
    assert f"{op} is missing on device {device}" in validate(dropped)

    doubled = with_order(schedule, device, [*order[:position], op, *order[position:]])
    assert validate(doubled) == [f"{op} is in the schedule 2 times"]

    other = (device + 1) % len(schedule.order)
    moved = with_order(dropped, other, [*schedule.order[other], op])
    wrong = f"{op} is on device {other}; stage {op.stage} is on device {device}"
    assert wrong in validate(moved)

    forward, backward = (Operation(OpType(k), op.stage, op.microbatch) for k in "FB")
    early = f"device {device} runs {backward} before {forward}"
    assert early in validate(swapped(schedule, device, forward, backward))

    num, count = schedule.placement.num_stages, schedule.num_microbatches
    if count > 1:
        m = min(op.microbatch, count - 2)
        first, second = (Operation(op.kind, op.stage, x) for x in (m, m + 1))
        reason = "the microbatches of a stage must run in order"
        late = f"device {device} runs {second} before {first}; {reason}"
        assert late in validate(swapped(schedule, device, first, second))

    extra = [Operation(OpType.FORWARD, num, 0), Operation(OpType.FORWARD, 0, count)]
    faults = validate(with_order(schedule, device, [*order, *extra]))
    assert f"F{num}:0 on device {device}: there is no stage {num}" in faults
    assert f"F0:{count} on device {device}: there is no microbatch {count}" in faults


@settings(max_examples=120, derandomize=True)
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
        run_schedule(mutated, ones, ones)
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
