"""Split backwards: the classic generators, what is checked, and what travels."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.backbone.costs import weighted_costs
from megatron_pulse.planner.layout.placement import fold, interleaved, sequential
from megatron_pulse.planner.layout.routes import Payload, trace_routes
from megatron_pulse.planner.partition.find import find_partition
from megatron_pulse.planner.program.communication import compile_communication, messages_of
from megatron_pulse.planner.program.device_program import compile_program
from megatron_pulse.planner.program.nccl_check import check_events
from megatron_pulse.planner.schedule.check.simulate import (
    DeadlockError,
    grid,
    logical_times,
    simulate,
)
from megatron_pulse.planner.schedule.check.validate import faults_for, peak_activations, validate
from megatron_pulse.planner.schedule.classic.one_f_one_b import one_f_one_b
from megatron_pulse.planner.schedule.classic.zero_bubble import zb_h1, zb_v
from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.schedule.solve import solve
from tests.planner.chains import chain
from tests.planner.exact import optimum
from tests.planner.schedules import run_schedule, wave
from tests.planner.strategies import with_order

TWO = ("F0:0 F0:1 I0:0 W0:0 I0:1 W0:1", "F1:0 I1:0 F1:1 I1:1 W1:0 W1:1")


def two(*rows: str) -> Schedule:
    order = tuple(tuple(map(Operation.parse, row.split())) for row in rows)
    return Schedule("two", sequential(2), 2, order)


def test_wave_splits_when_weight_gradients_have_a_time() -> None:
    schedule = wave(fold(3), 4, weight_grad=[1.0] * 6)
    assert schedule.kinds == (OpType.FORWARD, OpType.INPUT_GRAD, OpType.WEIGHT_GRAD)
    assert schedule.name == "wave" and validate(schedule, cap=6) == []


def test_kinds_and_evaluation() -> None:
    schedule = two(*TWO)
    assert validate(schedule) == []
    assert schedule.kinds == (OpType.FORWARD, OpType.INPUT_GRAD, OpType.WEIGHT_GRAD)
    assert schedule.forward_only().kinds == (OpType.FORWARD,)
    assert validate(schedule.forward_only(), cap=0) == []
    assert one_f_one_b(sequential(2), 2).kinds == (OpType.FORWARD, OpType.BACKWARD)


def test_an_activation_lives_until_its_weight_gradient() -> None:
    assert peak_activations(two(*TWO)) == (2, 2)
    eager = two(TWO[0], "F1:0 I1:0 W1:0 F1:1 I1:1 W1:1")
    assert peak_activations(eager) == (2, 1)
    assert peak_activations(eager, [1.5, 4.0]) == (3, 4)
    waits = two(TWO[0], "F1:0 I1:0 F1:1 W1:0 I1:1 W1:1")
    assert peak_activations(waits, [1.5, 4.0]) == (3, 8)
    assert peak_activations(waits, [1.5, 4.0], wgrad_bytes=[1.0, 3.0]) == (3, 7)
    assert validate(eager, cap=[3, 4], activation=[1.5, 4.0]) == []
    assert validate(eager, cap=[3, 3.5], activation=[1.5, 4.0]) == [
        "device 1 holds 4 live stage activations at its peak; the cap is 3.5"
    ]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ((TWO[0], TWO[1].replace(" W1:0", "")), "W1:0 is missing on device 1"),
        ((TWO[0], TWO[1].replace(" I1:1", "")), "I1:1 is missing on device 1"),
        (
            (TWO[0].replace("I0:0 W0:0", "W0:0 I0:0"), TWO[1]),
            "device 0 runs W0:0 before I0:0",
        ),
        (
            (TWO[0], TWO[1].replace("F1:0 I1:0", "I1:0 F1:0")),
            "device 1 runs I1:0 before F1:0",
        ),
        (
            (TWO[0], TWO[1].replace("W1:0 W1:1", "W1:1 W1:0")),
            "device 1 runs W1:1 before W1:0; the microbatches of a stage must run in order",
        ),
        (
            (TWO[0], "F1:0 B1:0 F1:1 B1:1"),
            "the schedule mixes whole backwards (B) with split ones (I and W): B1:0, B1:1",
        ),
        (
            (TWO[0], TWO[1] + " B1:1"),
            "the schedule mixes whole backwards (B) with split ones (I and W): B1:1",
        ),
        ((TWO[0] + " W1:0", TWO[1]), "W1:0 is in the schedule 2 times"),
        (
            (TWO[0] + " W1:0", TWO[1].replace(" W1:0", "")),
            "W1:0 is on device 0; stage 1 is on device 1",
        ),
    ],
)
def test_faults(rows: tuple[str, str], reason: str) -> None:
    assert reason in validate(two(*rows))


def test_circular_waits() -> None:
    stuck = two("F0:0 I0:0 W0:0 F0:1 I0:1 W0:1", "F1:0 F1:1 I1:0 W1:0 I1:1 W1:1")
    (fault,) = validate(stuck)
    assert "device 0 is at I0:0, which waits for I1:0" in fault
    with pytest.raises(DeadlockError):
        logical_times(stuck)


def test_simulation_needs_a_time_for_weight_gradients() -> None:
    with pytest.raises(ValueError, match="split schedule of 2 stages needs as many weight"):
        run_schedule(two(*TWO), [1, 1], [1, 1])
    timeline = run_schedule(two(*TWO), [1, 1], [1, 1], 0, [2, 2])
    assert grid(timeline).splitlines() == [
        "device  0 | F0:0 F0:1 .    I0:0 W0:0 -    I0:1 W0:1 -",
        "device  1 | .    F1:0 I1:0 F1:1 I1:1 W1:0 -    W1:1 -",
    ]


@pytest.mark.parametrize("schedule", [zb_h1(sequential(3), 5), zb_v(fold(3), 5)])
def test_gradients_travel_from_input_gradient_to_input_gradient(schedule: Schedule) -> None:
    """The same messages as of whole backwards, with I in the place of B; none of W."""
    num = schedule.placement.num_stages
    backbone = chain(num, [(0, num - 1), (1, num - 1)], {0: range(1, num)})
    partition = find_partition(weighted_costs(backbone, [1.0] * num), schedule.placement)
    routes = trace_routes(backbone, partition)
    kinds = set()
    for s in range(num):
        whole = messages_of(routes, Operation(OpType.BACKWARD, s, 1))
        split = messages_of(routes, Operation(OpType.INPUT_GRAD, s, 1))
        text = [str(message) for message in whole]
        assert [str(m).replace(" I", " B") for m in split] == text
        assert all(m.consumer.kind is OpType.INPUT_GRAD for m in split)
        assert messages_of(routes, Operation(OpType.WEIGHT_GRAD, s, 1)) == ()
        kinds.update(m.payload for m in split)
    assert {Payload.BOUNDARY, Payload.CONDITIONING} <= kinds
    plan = compile_communication(routes, schedule)
    assert validate(schedule, partition, plan.messages) == []
    assert (
        check_events([compile_program(schedule, plan, d) for d in range(len(schedule.order))]) == []
    )


@settings(max_examples=80, derandomize=True)
@given(st.sampled_from([zb_h1(sequential(3), 4), zb_v(fold(3), 4)]), st.data())
def test_mutations(schedule: Schedule, data: st.DataObject) -> None:
    """A weight gradient that is dropped, doubled, or put before its input gradient."""
    device = data.draw(st.integers(0, 2))
    order = list(schedule.order[device])
    op = data.draw(st.sampled_from([o for o in order if o.kind is OpType.WEIGHT_GRAD]))
    at, source = order.index(op), Operation(OpType.INPUT_GRAD, op.stage, op.microbatch)
    dropped = order[:at] + order[at + 1 :]
    assert validate(with_order(schedule, device, dropped)) == [
        f"{op} is missing on device {device}"
    ]
    doubled = [*order, op]
    assert f"{op} is in the schedule 2 times" in validate(with_order(schedule, device, doubled))
    early = order.index(source)
    moved = [*order[:early], op, *dropped[early:]]
    assert f"device {device} runs {op} before {source}" in validate(
        with_order(schedule, device, moved)
    )


@pytest.mark.parametrize(
    ("times", "waiting", "shorter"),
    [
        (((2.0, 2.0), (1.0, 2.0), (3.0, 2.0)), 0.1, 24.0),
        (((1.0, 1.0), (2.0, 3.0), (1.0, 1.0)), 0.6, 22.0),
    ],
)
@pytest.mark.parametrize("solver", ["none", "auto"])
def test_what_waits_with_less_makes_room_when_the_input_gradient_is_there(
    times: tuple[tuple[float, float], ...], waiting: float, shorter: float, solver: str
) -> None:
    """Held until its weight gradient each would take longer."""
    problem = ScheduleProblem(sequential(2), 3, *times, cap=(1.8, 1.8), wgrad_bytes=(waiting,) * 2)
    texts = ("F0 I0 F1 W0 I1 F2 W1 I2 W2", "F0 I0 W0 F1 I1 W1 F2 I2 W2")
    order = tuple(
        tuple(Operation(OpType(t[0]), device, int(t[1])) for t in line.split())
        for device, line in enumerate(texts)
    )
    schedule = Schedule("by hand", problem.placement, 3, order)
    assert not faults_for(problem, schedule)
    assert simulate(problem, schedule).makespan <= shorter
    best = optimum(problem)
    assert best <= shorter < optimum(replace(problem, wgrad_bytes=None))
    for effort in (0, 6, 16):
        found = synthesize(problem, math.inf, effort)
        assert faults_for(problem, found.schedule) == []
        assert found.certificate.lower_bound <= best <= found.certificate.makespan
    assert found.certificate.makespan == best
    assert solve(problem, 1.0, solver).certificate.lower_bound <= best


def test_what_waits_as_it_is_and_whole_backwards_are_as_without() -> None:
    """The same proof; and no cap that whole backwards do not need."""
    times = (3.0, 3.0, 1.0, 3.0), (4.0, 2.0, 4.0, 5.0), (1.0, 2.0, 3.0, 1.0)
    problem = ScheduleProblem(interleaved(2), 3, *times, 2.0, cap=(2.0, 2.0))
    found = synthesize(replace(problem, wgrad_bytes=(1.0,) * 4), math.inf, 16).certificate
    assert found.proved and found.makespan == synthesize(problem, math.inf, 16).certificate.makespan
    whole = replace(problem, weight_grad=None, wgrad_bytes=(2.0,) * 4)
    plain = replace(whole, wgrad_bytes=None)
    assert synthesize(whole, math.inf, 6).schedule == synthesize(plain, math.inf, 6).schedule
    with pytest.raises(ValueError, match="counting the bytes in the weight-gradient queue"):
        replace(problem, wgrad_bytes=(2.0,) * 4)


def test_recomputed_activations_are_there_while_more_is_made_to_wait() -> None:
    problem = ScheduleProblem(
        sequential(1), 1, (1.0,), (2.0,), (1.0,), 0.0, (1.0,), (3.0,), (1.0,), (2.0,), (3.0,)
    )
    order = tuple(Operation(OpType(kind), 0, 0) for kind in "FRIW")
    (fault,) = faults_for(problem, Schedule("by hand", problem.placement, 1, (order,)))
    assert "device 0 holds 5" in fault


def test_links_of_any_length_are_planned() -> None:
    """Sums over a step stay whole numbers of 64 bits, or nothing is swept so finely."""
    for link in (3e8, 1e9, 1e12):
        problem = ScheduleProblem(
            interleaved(2, 2), 4, (1.001, 1.0, 1.0, 1.0), (2.0,) * 4, None, link, cap=(4.0, 4.0)
        )
        made = synthesize(problem, math.inf, 1).certificate
        assert 6 * link <= made.lower_bound <= made.makespan
