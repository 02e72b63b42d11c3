"""Compiled communication passes NCCL's rules; broken communication is named."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.backbone.cascade import cascade
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.planner.layout.placement import Partition, fold, sequential
from megatron_pulse.planner.layout.routes import Payload, Routes, trace_routes
from megatron_pulse.planner.program.communication import (
    CommunicationPlan,
    compile_communication,
    messages_of,
)
from megatron_pulse.planner.program.device_program import (
    AHEAD,
    CollectiveEvent,
    EmbedderCollective,
    Event,
    Receive,
    Release,
    Run,
    Send,
    Wait,
    compile_program,
)
from megatron_pulse.planner.program.message_order import Travel, moments
from megatron_pulse.planner.program.nccl_check import _Machine, check_events
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.check.validate import validate
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem, equal_stages
from megatron_pulse.planner.schedule.registry import make_schedule
from tests.planner.chains import chain
from tests.planner.schedules import wave
from tests.planner.strategies import schedules

Programs = list[list[Event]]


def compiled(
    schedule: Schedule,
    seed: int = 0,
    predicts: bool = False,
    problem: ScheduleProblem | None = None,
) -> CommunicationPlan:
    """The communication of random chains with skips and conditioning, cut for the schedule."""
    return compile_communication(routes_of(schedule, seed), schedule, problem, predicts)


def routes_of(schedule: Schedule, seed: int) -> Routes:
    """Routes of random chains with skips and conditioning, cut anywhere for ``schedule``."""
    rng, count = random.Random(seed), len(schedule.placement.starts)
    stages = schedule.placement.num_stages // count
    parts = [some_chain(rng, stages) for _ in range(count)]
    backbone = cascade({f"c{i}": part for i, part in enumerate(parts)}) if count > 1 else parts[0]
    cuts = [0]
    for part in parts:
        num = len(part.layers)
        inner = sorted(rng.sample(range(1, num), stages - 1))
        cuts += [cuts[-1] + cut for cut in (*inner, num)]
    return trace_routes(backbone, Partition(schedule.placement, tuple(cuts)))


def some_chain(rng: random.Random, num_stages: int) -> Backbone:
    """For so many stages, with a layer for each or more."""
    num = num_stages + rng.randint(0, 6)
    skips = [(i, num - 1 - i) for i in range(num // 2 - 1) if rng.random() < 0.7]
    skips += [tuple(sorted(rng.sample(range(num), 2))) for _ in range(rng.randint(0, 3))]
    users = {0: range(1, num), num // 2: [num - 1]}
    return chain(num, skips, users if rng.random() < 0.5 else None)


def programs(schedule: Schedule, plan: CommunicationPlan, replicated: bool = False) -> Programs:
    """Program of each device, with ``replicated`` embedders."""
    devices = range(len(schedule.order))
    return [list(compile_program(schedule, plan, d, replicated)) for d in devices]


def on_demand(schedule: Schedule, plan: CommunicationPlan) -> Programs:
    """Receive just before use, send right after computing."""
    result: Programs = []
    for device, order in enumerate(schedule.order):
        events: list[Event] = []
        for op in order:
            for m in plan.messages:
                if m.consumer == op and m.destination == device:
                    events += [Receive(m), Wait(m)]
            events.append(Run(op))
            events += [Send(m) for m in plan.messages if m.producer == op]
        result.append(events)
    return result


def check_orders(orders: list[list[Send | Receive]], connected: bool = True) -> list[str]:
    """Faults of what each device issues in order, all producers having run."""
    ready = [[Run(e.message.producer) for e in mine if isinstance(e, Send)] for mine in orders]
    return check_events([[*a, *b] for a, b in zip(ready, orders, strict=True)], connected)


def message(producer: str, consumer: str, source: int, destination: int) -> Message:
    ends = Operation.parse(producer), Operation.parse(consumer)
    return Message(*ends, Payload.BOUNDARY, "0", source, destination)


A = message("F0:0", "F1:0", 0, 1)
B = message("F0:1", "F1:1", 0, 1)
C = message("B1:0", "B0:0", 1, 0)


@settings(max_examples=60, derandomize=True)
@given(schedules(), st.integers(0, 10**6))
def test_compiled_plans_complete(schedule: Schedule, seed: int) -> None:
    for candidate, predicts in ((schedule, False), (schedule.forward_only(), True)):
        plan = compiled(candidate, seed, predicts)
        assert plan.messages
        assert validate(candidate, messages=plan.messages) == []
        assert check_events(programs(candidate, plan)) == []


class _Starved(_Machine):
    """Kernels of messages that wait for their other end leave none of a device to compute with."""

    def _passes(self, device: int, event: Event) -> bool:
        if isinstance(event, Run) and self.queue[device]:
            return False
        return super()._passes(device, event)


@given(schedules(), st.integers(0, 2**32))
@settings(max_examples=60, derandomize=True)
def test_no_operation_need_run_beside_a_message(schedule: Schedule, seed: int) -> None:
    """A GPU whose kernels are all taken by receives that were posted early goes on when what they
    receive is made: never by what comes after their device's next operation, for what that sends
    would wait behind them."""
    plan = compiled(schedule, seed)
    for replicated in (False, True):
        assert not _Starved(programs(schedule, plan, replicated), True).check()


def test_predictions_go_home_as_soon_as_they_are_made() -> None:
    """One message for each microbatch where the ends are on two devices, none in a fold."""
    schedule = make_schedule("gpipe", sequential(3), 4).forward_only()
    plan = compiled(schedule, predicts=True)
    sent = [m for m in plan.messages if m.payload is Payload.PREDICTION]
    assert [(str(m.producer), m.source, m.destination) for m in sent] == [
        (f"F2:{microbatch}", 2, 0) for microbatch in range(4)
    ]
    others = [m for m in plan.messages if m.payload is not Payload.PREDICTION]
    assert plan.messages.index(sent[0]) < plan.messages.index(others[-1])
    folded = wave(fold(2), 4).forward_only()
    assert not any(
        m.payload is Payload.PREDICTION for m in compiled(folded, predicts=True).messages
    )
    events = programs(schedule, plan)
    events[0] = [e for e in events[0] if not isinstance(e, Wait) or e.message != sent[1]]
    (fault,) = check_events(events)
    assert fault == f"device 0 ends its step without waiting for {sent[1]}"


@settings(max_examples=40, derandomize=True)
@given(schedules(), st.integers(0, 10**6), st.data())
def test_receives_are_posted_before_what_runs_when_their_messages_are_made(
    schedule: Schedule, seed: int, data: st.DataObject
) -> None:
    """An operation earlier, but behind sends, all in the plan's order; by times of their own.
    ``place`` is not asked here."""
    times = st.integers(1, 5).map(float)
    count = schedule.placement.num_stages
    forward, backward, weight = (tuple(data.draw(times) for _ in range(count)) for _ in range(3))
    problem = replace(
        equal_stages(schedule.placement, schedule.num_microbatches, split=True),
        forward=forward, backward=backward, weight_grad=weight,
    )  # fmt: skip
    if OpType.WEIGHT_GRAD not in schedule.kinds:
        problem = replace(problem, weight_grad=None)
    plan = compiled(schedule, seed, problem=problem)
    all_events = programs(schedule, plan)
    assert check_events(all_events) == []
    assert check_events(all_events, connected=False) == []
    end = simulate(problem, schedule).end
    number = {message: i for i, message in enumerate(plan.messages)}
    for order, events in zip(schedule.order, all_events, strict=True):
        ran: list[Operation] = []
        reached, latest = -1, 0
        for event in events:
            match event:
                case Run(operation):
                    ran.append(operation)
                case Send(message) | Receive(message):
                    assert number[message] > reached
                    reached = number[message]
                    if isinstance(event, Send):
                        assert message.producer == ran[-1]
                        latest = len(ran)
                    else:
                        made = sum(end[op] <= end[message.producer] for op in order)
                        latest = max(latest, made - AHEAD)
                        assert len(ran) <= latest
                case _:
                    pass


@settings(max_examples=50, derandomize=True)
@given(schedules(), st.integers(0, 10**6), st.sampled_from((0.0, 0.1, 1.0)))
def test_messages_with_time_to_spare_let_those_without_go_first(
    schedule: Schedule, seed: int, rate: float
) -> None:
    """No message is issued before its producer ran, or after its deadline. A device sends in the
    order of production."""
    problem = equal_stages(
        schedule.placement, schedule.num_microbatches, OpType.WEIGHT_GRAD in schedule.kinds
    )
    routes = routes_of(schedule, seed)
    messages = [m for line in schedule.order for op in line for m in messages_of(routes, op)]
    times = moments(schedule, problem, [Travel(m, rate) for m in messages])
    turns = times.turns(messages)
    sent: dict[int, tuple[float, int]] = {}
    for message in sorted(messages, key=lambda m: (turns[m], times.made(m))):
        made = times.made(message)
        assert made <= turns[message] < times.needed(message)
        assert made >= sent.get(message.source, made)
        sent[message.source] = made
    late = times.with_turns(turns).arrival
    assert all(times.arrival[m] <= late[m] for m in messages)
    assert all(late[m][0] <= times.needed(m)[0] + 1e-9 for m in messages)


def test_a_forward_with_time_to_spare_has_a_later_turn_and_a_gradient_without_has_not() -> None:
    """Two devices; the first is ahead with forwards."""
    schedule = make_schedule("1f1b", sequential(2), 4)
    problem = equal_stages(schedule.placement, 4, False)
    routes = trace_routes(chain(2), Partition(schedule.placement, (0, 1, 2)))
    messages = [m for line in schedule.order for op in line for m in messages_of(routes, op)]
    times = moments(schedule, problem, [Travel(m, 0.1) for m in messages])
    turns = times.turns(messages)
    later = {str(m.producer) for m in messages if turns[m] > times.made(m)}
    assert "F0:1" in later
    assert not any(name.startswith("B") for name in later)


@settings(max_examples=50, derandomize=True)
@given(schedules(), st.integers(0, 10**6))
def test_sends_are_let_go_where_something_after_their_use_has_arrived(
    schedule: Schedule, seed: int
) -> None:
    """All that the device sent and that the other had used before it made what has arrived; found
    here from the events of both."""
    plan = compiled(schedule, seed)
    all_events = programs(schedule, plan)
    ran = [[e.operation for e in mine if isinstance(e, Run)] for mine in all_events]
    for mine in all_events:
        kept: set[Message] = set()
        for event in mine:
            if isinstance(event, Send):
                kept.add(event.message)
            if isinstance(event, Wait):
                peer, message = event.message.source, event.message
                until = ran[peer][: ran[peer].index(message.producer) + 1]
                gone = {m for m in kept if m.destination == peer and m.consumer in until}
                assert set(event.sent) == gone
                kept -= gone


@settings(max_examples=50, derandomize=True)
@given(schedules(), st.integers(0, 10**6))
def test_on_a_stream_what_was_sent_is_let_go_soon(schedule: Schedule, seed: int) -> None:
    """The buffer is released once: after the send, and before the second operation that starts
    after its planned arrival."""
    plan = compiled(schedule, seed)
    arrival, start = plan.moments.arrival, plan.moments.start
    for mine in programs(schedule, plan):
        kept: set[Message] = set()
        before: Operation | None = None
        for event in mine:
            match event:
                case Send(message):
                    kept.add(message)
                case Release(gone):
                    assert gone and kept >= set(gone)
                    kept -= set(gone)
                case Wait(_, gone):
                    kept -= set(gone)
                case Run(operation):
                    assert before is None or all(arrival[m] > start[before] for m in kept)
                    before = operation


def test_waiting_for_what_was_sent_needs_its_receive() -> None:
    """The events after the wait must not be required for that receive."""
    sound: Programs = [
        [Run(A.producer), Send(A), Release((A,)), Run(B.producer), Send(B)],
        [Receive(A), Receive(B), Wait(A), Wait(B)],
    ]
    assert check_events(sound) == []
    late: Programs = [
        [Run(A.producer), Send(A), Release((A,)), Run(C.consumer)],
        [Run(C.producer), Wait(B), Receive(A), Wait(A)],
    ]
    assert any(f"device 0 waits until {A} arrived" in fault for fault in check_events(late))
    early: Programs = [[Run(A.producer), Release((A,)), Send(A)], [Receive(A), Wait(A)]]
    assert f"device 0 lets {A} go before sending it" in check_events(early)


@pytest.mark.parametrize("num_devices", [2, 4])
def test_on_demand_deadlocks_where_the_plan_order_does_not(num_devices: int) -> None:
    """One message at a time: a fold's sends and receives, each when it is needed, block others."""
    schedule = wave(fold(num_devices), 2 * num_devices, effort=2)
    plan = compiled(schedule)
    assert check_events(programs(schedule, plan)) == []
    faults = check_events(on_demand(schedule, plan))
    assert any(fault.startswith("deadlock: ") for fault in faults)


@settings(max_examples=40, derandomize=True)
@given(schedules(), st.integers(0, 10**6), st.data())
def test_mutated_programs_are_rejected(schedule: Schedule, seed: int, data: st.DataObject) -> None:
    plan = compiled(schedule, seed)
    device = data.draw(st.integers(0, len(schedule.order) - 1))
    good = programs(schedule, plan)
    issues = [i for i, event in enumerate(good[device]) if isinstance(event, Send | Receive)]
    waits = [i for i, event in enumerate(good[device]) if isinstance(event, Wait)]

    without_issue = [list(mine) for mine in good]
    without_issue[device].pop(data.draw(st.sampled_from(issues)))
    assert check_events(without_issue)

    without_wait = [list(mine) for mine in good]
    wait = without_wait[device].pop(data.draw(st.sampled_from(waits)))
    assert isinstance(wait, Wait)
    assert check_events(without_wait) == [
        f"device {device} runs {wait.message.consumer} without waiting for {wait.message}"
    ]

    if sends := [i for i in issues if isinstance(good[device][i], Send)]:
        first = data.draw(st.sampled_from(sends))
        eager = [list(mine) for mine in good]
        eager[device].insert(0, eager[device].pop(first))
        sent = good[device][first].message  # type: ignore[union-attr]
        assert f"device {device} sends {sent} before {sent.producer} ran" in check_events(eager)


def test_orders_that_match() -> None:
    assert check_orders([[Send(A), Send(B)], [Receive(A), Receive(B)]]) == []
    assert check_orders([[Send(A), Receive(C)], [Receive(A), Send(C)]]) == []


def test_fifo_mismatch_names_both_messages() -> None:
    faults = check_orders([[Send(A), Send(B)], [Receive(B), Receive(A)]])
    assert len(faults) == 2
    assert all("first in, first out mismatch" in f for f in faults)
    assert f"is sent as {A}, received as {B}" in faults[0]


def test_two_channels_in_opposite_orders_deadlock() -> None:
    faults = check_orders([[Send(A), Receive(C)], [Send(C), Receive(A)]])
    assert faults == [f"deadlock: device 0 is at the send of {A}; device 1 is at the send of {C}"]


def test_circle_of_three_devices_deadlocks() -> None:
    ring = [message("F0:0", "F1:0", d, (d + 1) % 3) for d in range(3)]
    sends_first: list[list[Send | Receive]] = [
        [Send(ring[d]), Receive(ring[d - 1])] for d in (0, 1, 2)
    ]
    assert any("deadlock" in fault for fault in check_orders(sends_first))
    one_first = [sends_first[0], *(mine[::-1] for mine in sends_first[1:])]
    assert check_orders(one_first) == []


def test_the_first_use_of_a_channel_holds_up_the_host() -> None:
    """Both hosts receive what the other sends later: an order for which peers must be connected."""
    late: Programs = [
        [Run(A.producer), Receive(C), Send(A), Wait(C)],
        [Run(C.producer), Send(C), Receive(A), Wait(A)],
    ]
    assert check_events(late) == check_events(late, connected=False) == []
    crossed: Programs = [late[0], [Run(C.producer), Receive(A), Send(C), Wait(A)]]
    (fault,) = check_events(crossed, connected=False)
    assert fault.startswith("deadlock: ") and f"device 0 connects for {C}" in fault


def test_collectives_take_their_place_in_the_order() -> None:
    refresh = CollectiveEvent(EmbedderCollective.REFRESH)
    first: Programs = [[refresh, Run(A.producer), Send(A)], [refresh, Receive(A), Wait(A)]]
    assert check_events(first) == []
    behind: Programs = [first[0], [Receive(A), refresh, Wait(A)]]
    (fault,) = check_events(behind)
    assert "device 0 is at the collective of their parameters" in fault
    assert f"device 1 is at the receive of {A}" in fault
    assert check_events([[*first[0], CollectiveEvent(EmbedderCollective.RETURN)], first[1]])


def test_lonely_send_is_named() -> None:
    faults = check_orders([[Send(A)], []])
    assert f"device 0 sends {A}, but device 1 never receives a message number 0" in faults[0]


def test_wait_before_issue_and_foreign_messages() -> None:
    run0, run1 = Run(A.producer), Run(A.consumer)
    late: Programs = [[run0, Send(A)], [Wait(A), Receive(A), run1]]
    faults = check_events(late)
    assert f"device 1 waits for {A} before issuing it" in faults
    assert any("deadlock" in fault and f"device 1 waits for {A}" in fault for fault in faults)
    foreign: Programs = [[run0, Send(A)], [Send(A)]]
    assert f"device 1 sends {A}, which is not its own" in check_events(foreign)
    early: Programs = [[run0, Receive(C), Wait(C, (A,)), Send(A)], [Receive(A), Send(C)]]
    assert f"device 0 lets {A} go before sending it" in check_events(early)
