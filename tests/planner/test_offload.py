"""Activations on the host as operations of a schedule: within memory, in time, and proved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.backbone.costs import weighted_costs
from megatron_pulse.planner.layout.placement import fold, sequential
from megatron_pulse.planner.program.make_plan import make_plan
from megatron_pulse.planner.program.message_order import moments
from megatron_pulse.planner.program.plan import PlanError
from megatron_pulse.planner.program.simulate import simulate_step
from megatron_pulse.planner.schedule.bound.bounds import lower_bound
from megatron_pulse.planner.schedule.check.simulate import DeadlockError, logical_times, simulate
from megatron_pulse.planner.schedule.check.validate import faults_for, peak_memory, validate
from megatron_pulse.planner.schedule.operations import Operation, Schedule
from megatron_pulse.planner.schedule.passes.insert_offload import (
    NoRoomError,
    insert_offload,
    offload_all,
    problem_without_offload,
)
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.schedule.solve import solve
from tests.planner.strategies import problems
from tests.toys import toy_backbone


@st.composite
def offloading(draw: st.DrawFn) -> ScheduleProblem:
    """Problems of which some stages' activations may wait on the host, in whole or in part; some
    are computed again; caps from what one microbatch takes on."""
    problem = draw(problems())
    stages, devices = problem.placement.num_stages, problem.placement.num_devices
    own = tuple(draw(st.floats(0.5, 2.0)) for _ in range(stages))
    part = [draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])) for _ in range(stages)]
    offload_s = tuple(draw(st.sampled_from([0.0, 0.2, 1.0, 5.0])) for _ in range(stages))
    waiting = None
    if problem.weight_grad is not None and draw(st.booleans()):
        waiting = tuple(draw(st.floats(0.0, 1.0)) * a for a in own)
    least = [sum(own[s] for s in problem.placement.stages_of_device(d)) for d in range(devices)]
    room = tuple(draw(st.sampled_from([1.0, 1.3, 2.0, 4.0])) * each for each in least)
    again = computed = None
    if draw(st.booleans()):
        share = [draw(st.sampled_from([0.0, 0.3])) for _ in range(stages)]
        again = tuple(s * b for s, b in zip(share, problem.backward, strict=True))
        computed = tuple(draw(st.floats(0.0, 0.5)) for _ in range(stages))
    return replace(
        problem,
        activation=own,
        offload_bytes=tuple(p * a for p, a in zip(part, own, strict=True)),
        offload_s=offload_s,
        wgrad_bytes=waiting,
        cap=room,
        recompute_s=again,
        recompute_bytes=computed,
    )


@settings(max_examples=150, derandomize=True)
@given(offloading())
def test_within_memory_and_no_bound_above(problem: ScheduleProblem) -> None:
    found = synthesize(problem, effort=1)
    schedule, known = found.schedule, found.certificate
    assert faults_for(problem, schedule) == []
    assert known.makespan == simulate(problem, schedule).makespan
    assert known.lower_bound <= known.makespan * (1 + 1e-9)
    assert known.lower_bound == pytest.approx(min(lower_bound(problem, work=0), known.makespan))
    max_in_flight = replace(problem, cap=tuple(2 * cap for cap in problem.cap or ()))
    if not faults_for(problem, other := synthesize(max_in_flight, effort=1).schedule):
        assert known.lower_bound <= simulate(problem, other).makespan * (1 + 1e-9)
    at_once = replace(problem, offload_s=(0.0,) * problem.placement.num_stages)
    elsewhere = simulate(at_once, schedule).makespan
    assert elsewhere <= known.makespan * (1 + 1e-9)  # slower links never help
    without = tuple(tuple(op for op in order if not op.kind.copies) for order in schedule.order)
    plain = simulate(problem, replace(schedule, order=without)).makespan
    assert elsewhere == pytest.approx(plain)  # and what takes no time costs none


@settings(max_examples=60, derandomize=True)
@given(offloading())
def test_played_as_simulated(problem: ScheduleProblem) -> None:
    """The compiled replay, the times that programs go by, and the simulation are one."""
    problem = replace(problem, link=0.0)
    schedule = synthesize(problem, effort=1).schedule
    timeline = simulate(problem, schedule)
    played = simulate_step(problem, schedule, ()).timeline
    assert played.start == pytest.approx(dict(timeline.start))
    assert played.end == pytest.approx(dict(timeline.end))
    times = moments(schedule, problem)
    assert {op: t for op, (t, _) in times.start.items()} == pytest.approx(dict(timeline.start))
    assert set(logical_times(schedule)) == set(timeline.end)


ONE = ScheduleProblem(
    sequential(1),
    3,
    (2.0,),
    (4.0,),
    activation=(1.0,),
    cap=(1.0,),
    offload_bytes=(0.75,),
    offload_s=(1.5,),
)
"""One device that has room for one of three microbatches."""


def order(text: str) -> Schedule:
    return Schedule("by hand", sequential(1), 3, (tuple(map(Operation.parse, text.split())),))


def test_devices_wait_for_copies_that_queue_up() -> None:
    schedule = order("F0:0 O0:0 F0:1 O0:1 L0:0 F0:2 B0:0 L0:1 B0:1 B0:2")
    assert faults_for(replace(ONE, cap=(3.0,)), schedule) == []

    def begins(offload_s: float, text: str) -> tuple[float, ...]:
        start = simulate(replace(ONE, offload_s=(offload_s,)), schedule).start
        return tuple(start[Operation.parse(each)] for each in text.split())

    assert begins(1.5, "O0:0 F0:1 O0:1 L0:0 F0:2") == (3.5, 3.5, 7.0, 7.0, 7.0)
    assert begins(1.5, "B0:0 L0:1 B0:1 B0:2") == (9.0, 13.0, 14.5, 18.5)
    assert begins(7.0, "O0:0 F0:1 O0:1 L0:0 F0:2") == (9.0, 9.0, 18.0, 18.0, 18.0)
    assert begins(7.0, "B0:0 L0:1 B0:1 B0:2") == (25.0, 29.0, 36.0, 40.0)
    schedule = order("F0:0 F0:1 F0:2 O0:0 O0:1 L0:0 L0:1 B0:0 B0:1 B0:2")
    assert begins(7.0, "F0:2 O0:0 O0:1") == (4.0, 9.0, 16.0)  # both wait to leave
    assert begins(7.0, "L0:1 B0:0 B0:1") == (16.0, 23.0, 30.0)  # and to come


def test_memory_is_free_from_o_to_l() -> None:
    wide = replace(ONE, cap=(9.0,))
    schedule = order("F0:0 F0:1 O0:1 F0:2 B0:0 L0:1 B0:1 B0:2")
    assert peak_memory(wide, schedule) == (2.25,)
    assert peak_memory(wide, order("F0:0 F0:1 O0:1 F0:2 L0:1 B0:0 B0:1 B0:2")) == (3.0,)
    assert peak_memory(wide, order("F0:0 F0:1 F0:2 B0:0 B0:1 B0:2")) == (3.0,)
    assert "its peak; the cap is 2" in faults_for(replace(ONE, cap=(2.0,)), schedule)[0]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("F0:0 O0:0 F0:1 F0:2 B0:0 B0:1 B0:2", "runs O0:0, but not L0:0"),
        ("F0:0 L0:0 F0:1 F0:2 B0:0 B0:1 B0:2", "runs L0:0, but not O0:0"),
        ("F0:0 L0:0 O0:0 F0:1 F0:2 B0:0 B0:1 B0:2", "runs L0:0 before O0:0"),
        ("O0:0 F0:0 L0:0 F0:1 F0:2 B0:0 B0:1 B0:2", "runs O0:0 before F0:0"),
        ("F0:0 O0:0 F0:1 F0:2 B0:0 B0:1 B0:2 L0:0", "runs B0:0 before L0:0"),
        ("F0:0 O0:0 O0:0 L0:0 F0:1 F0:2 B0:0 B0:1 B0:2", "O0:0 is in the schedule 2 times"),
        ("F0:0 O1:0 L1:0 F0:1 F0:2 B0:0 B0:1 B0:2", "there is no stage 1"),
    ],
)
def test_copies_have_their_place(text: str, fault: str) -> None:
    assert any(fault in said for said in validate(order(text)))


def test_a_schedule_that_moves_needs_a_problem_that_does() -> None:
    schedule = order("F0:0 O0:0 F0:1 F0:2 B0:2 B0:1 L0:0 B0:0")
    plain = replace(ONE, cap=(9.0,), offload_bytes=None, offload_s=None)
    assert faults_for(plain, schedule) == [
        "the schedule offloads activations (O), the problem has no offload"
    ]
    with pytest.raises(ValueError, match="given without offload_s"):
        replace(ONE, offload_s=None)
    with pytest.raises(ValueError, match="must not exceed"):
        replace(ONE, offload_bytes=(1.25,))


def test_what_waits_for_ever_is_named() -> None:
    with pytest.raises(DeadlockError, match=r"B0:0.*L0:0"):
        simulate(ONE, order("F0:0 O0:0 F0:1 F0:2 B0:0 B0:1 B0:2"))


def test_what_is_used_last_leaves_and_no_more_than_must() -> None:
    first = order("F0:0 F0:1 F0:2 B0:0 B0:1 B0:2")
    problem = replace(ONE, cap=(2.5,), offload_s=(0.1,))
    found = insert_offload(problem, first)
    assert " ".join(map(str, found.order[0])) == "F0:0 F0:1 O0:1 F0:2 B0:0 L0:1 B0:1 B0:2"
    assert insert_offload(replace(problem, cap=(3.0,)), first) == first
    with pytest.raises(NoRoomError, match=r"device 0 has 1\.25 for activations"):
        insert_offload(replace(problem, cap=(1.25,)), first)


def test_all_can_leave_whatever_room_there_is() -> None:
    def line(text: str) -> str:
        operations = tuple(map(Operation.parse, text.split()))
        schedule = offload_all(Schedule("by hand", sequential(1), 5, (operations,)), {0})
        return " ".join(map(str, schedule.order[0]))

    assert line("F0:0 B0:0 F0:1 B0:1") == "F0:0 B0:0 F0:1 B0:1"
    assert line("F0:0 F0:1 B0:0 B0:1") == "F0:0 O0:0 F0:1 O0:1 L0:0 B0:0 L0:1 B0:1"
    assert line("F0:0 F0:1 F0:2 F0:3 B0:0 B0:1 B0:2 B0:3") == (
        "F0:0 F0:1 O0:0 F0:2 O0:1 L0:0 F0:3 O0:2 L0:1 B0:0 O0:3 L0:2 B0:1 L0:3 B0:2 B0:3"
    )
    assert line("F0:0 F0:1 I0:0 W0:0 I0:1 W0:1") == (
        "F0:0 O0:0 F0:1 L0:0 I0:0 O0:1 W0:0 L0:1 I0:1 W0:1"
    )


def test_it_is_searched_for_with_room_to_travel() -> None:
    problem = replace(ONE, cap=(10.0,))
    assert problem_without_offload(problem).cap == (10.0 - 3 * 0.75,)
    assert problem_without_offload(problem).activation == (0.25,)
    assert problem_without_offload(problem, room=False).cap == problem.cap
    assert problem_without_offload(ONE).cap == (0.25,)  # at least what one microbatch takes there
    assert problem_without_offload(replace(problem, cap=None)).cap is None


def test_never_longer_than_where_all_is_kept() -> None:
    """Searches that ignore offloaded activations may leave no room for the others."""
    row = ScheduleProblem(
        sequential(4), 8, *((1.0,) * 4,) * 3, activation=(1.0,) * 4, cap=(2.0,) * 4
    )
    two = ScheduleProblem(fold(2), 6, (1.0,) * 4, (2.0,) * 4, activation=(1.0,) * 4, cap=(2.0,) * 2)
    for plain, away, offload_s in ((row, (0.5,) * 4, 0.3), (two, (0.0, 0.0, 0.0, 0.25), 0.0)):
        moving = replace(plain, offload_bytes=away, offload_s=(offload_s,) * 4)
        kept, found = (synthesize(each, effort=4).certificate.makespan for each in (plain, moving))
        assert found <= kept * (1 + 1e-9)


def test_one_device_without_room_does_not_keep_the_others_from_it() -> None:
    """Weight gradients cannot leave: where they wait behind a forward there is no room."""
    problem = ScheduleProblem(
        sequential(2),
        3,
        *((1.0,) * 2,) * 3,
        activation=(1.0,) * 2,
        cap=(1.0,) * 2,
        offload_bytes=(1.0,) * 2,
        offload_s=(0.0,) * 2,
    )
    assert synthesize(problem, effort=20).certificate.makespan < 15.0  # as where all is kept


def test_a_fast_link_makes_room_and_a_slow_one_costs_time() -> None:
    """P = 4 in a row: with half of the memory of 1F1B as soon as with all of it, if the link has
    time for that."""
    stages = 4
    plain = ScheduleProblem(
        sequential(stages), 12, (1.0,) * 4, (2.0,) * 4, activation=(1.0,) * 4, cap=(4.0,) * 4
    )
    best = synthesize(plain, effort=20).certificate.makespan
    tight = replace(plain, cap=(2.6,) * 4)
    without = synthesize(tight, effort=20).certificate.makespan

    def moving(offload_s: float) -> ScheduleProblem:
        return replace(tight, offload_bytes=(0.8,) * 4, offload_s=(offload_s,) * 4)

    made = {
        offload_s: synthesize(moving(offload_s), effort=20).certificate.makespan
        for offload_s in (0.0, 0.5, 20.0)
    }
    assert without > 1.2 * best
    assert made[0.0] == made[0.5] == best
    assert made[20.0] == without  # nothing leaves
    assert solve(moving(0.5), 1.0, "none").certificate.makespan == pytest.approx(best)


@pytest.mark.parametrize(
    ("cells", "fault"),
    [
        ("0F0,0O0,0F1,0B0,0B1", "runs O0:0, but not L0:0"),
        ("0F0,0F1,0B0,0O0,0L0,0B1", "runs B0:0 before L0:0"),
        ("0F0,0L0,0O0,0F1,0B0,0B1", "runs L0:0 before O0:0"),
    ],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_file_with_copies_out_of_place_is_no_plan(
    tmp_path: Path, cells: str, fault: str, devices: int
) -> None:
    backbone = toy_backbone(6, [])
    rows = [cells, "1F0,1F1,1B0,1B1"][:devices]
    (tmp_path / "own.csv").write_text("\n".join(rows) + "\n")
    costs = weighted_costs(backbone, [1.0] * len(backbone.layers))
    placement = sequential(devices)
    moved = ActivationPolicies(offload=range(len(backbone.layers)))
    plan = make_plan(backbone, costs, placement, str(tmp_path / "own.csv"), activations=moved)
    with pytest.raises(PlanError, match=fault):
        plan.step(2)
    (tmp_path / "own.csv").write_text("\n".join(["0F0,0O0,0F1,0L0,0B0,0B1", *rows[1:]]) + "\n")
    plan = make_plan(backbone, costs, placement, str(tmp_path / "own.csv"), activations=moved)
    assert plan.step(2).schedule.offloaded == {(0, 0)}
    without = make_plan(backbone, costs, placement, str(tmp_path / "own.csv"))
    with pytest.raises(PlanError, match="no layer there is offloaded"):
        without.step(2)
