"""Recomputation as an operation of its own: sooner, within memory, and what is proved of it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.backbone.costs import weighted_costs
from megatron_pulse.planner.layout.placement import sequential
from megatron_pulse.planner.program.make_plan import make_plan
from megatron_pulse.planner.program.plan import PlanError
from megatron_pulse.planner.schedule.bound.bounds import lower_bound
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.check.validate import faults_for, peak_memory
from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule
from megatron_pulse.planner.schedule.passes.insert_recompute import insert_recompute
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.schedule.solve import solve
from tests.planner.schedules import recomputed_anywhere
from tests.planner.strategies import problems
from tests.toys import toy_backbone


@st.composite
def recomputing(draw: st.DrawFn) -> ScheduleProblem:
    """Problems of which some stages compute activations again."""
    problem = draw(problems())
    share = [draw(st.sampled_from([0.0, 0.3, 0.6])) for _ in problem.backward]
    again = [draw(st.floats(0.0, 2.0)) for _ in problem.backward]
    part = (s * b for s, b in zip(share, problem.backward, strict=True))
    return replace(problem, recompute_s=tuple(part), recompute_bytes=tuple(again))


@settings(max_examples=60, derandomize=True)
@given(recomputing(), st.integers(0, 1000))
def test_never_longer_within_memory_and_no_bound_above(problem: ScheduleProblem, seed: int) -> None:
    whole = synthesize(problem.within_backwards, effort=1)
    found = synthesize(problem, effort=1)
    assert faults_for(problem, found.schedule) == []
    assert found.certificate.makespan == simulate(problem, found.schedule).makespan
    assert found.certificate.makespan <= whole.certificate.makespan * (1 + 1e-9)
    timeline = simulate(problem, whole.schedule)
    assert timeline.makespan == pytest.approx(whole.certificate.makespan)
    later = simulate(problem, insert_recompute(problem, whole.schedule))
    assert all(later.end[op] <= end + 1e-9 for op, end in timeline.end.items())
    stages = range(problem.placement.num_stages)
    mixed = recomputed_anywhere(whole.schedule, stages, 0.7, random.Random(seed))
    assert lower_bound(problem) <= simulate(problem, mixed).makespan * (1 + 1e-9)
    assert found.certificate.lower_bound <= simulate(problem, mixed).makespan * (1 + 1e-9)


TWO = ScheduleProblem(
    sequential(2), 1, (1.0, 1.0), (4.0, 4.0), cap=(1.5, 1.5), recompute_s=(2.0, 2.0)
)
"""One microbatch: device 0 waits 5 for its gradient, and computes 2 of 4 again."""


def test_it_is_done_while_a_gradient_is_awaited() -> None:
    found = solve(TWO, 1.0, "none")
    assert simulate(TWO.within_backwards, synthesize(TWO.within_backwards).schedule).makespan == 10
    assert found.certificate.makespan == 8 and found.certificate.proved
    assert found.schedule.order[0] == tuple(map(Operation.parse, ("F0:0", "R0:0", "B0:0")))
    assert found.schedule.order[1] == tuple(map(Operation.parse, ("F1:0", "B1:0")))  # not awaited


def test_where_there_is_no_room_it_stays_within_its_backward() -> None:
    for room, apart in ((0.4, True), (0.6, False)):
        problem = replace(TWO, recompute_bytes=(room, room))
        schedule = synthesize(problem).schedule
        assert bool(schedule.recomputed_apart) is apart
        assert max(peak_memory(problem, schedule)) == (1.4 if apart else 1.0)


def test_it_goes_to_where_the_device_waits_longest() -> None:
    """The second backward is ready when the first has ended: its recomputation goes before that."""
    problem = ScheduleProblem(sequential(2), 2, (1.0, 1.0), (3.0, 3.0), recompute_s=(1.0, 0.0))
    text = (("F0:0", "F0:1", "B0:0", "B0:1"), ("F1:0", "F1:1", "B1:0", "B1:1"))
    order = tuple(tuple(map(Operation.parse, line)) for line in text)
    schedule = insert_recompute(problem, Schedule("by hand", problem.placement, 2, order))
    assert simulate(problem, Schedule("by hand", problem.placement, 2, order)).makespan == 12
    assert simulate(problem, schedule).makespan == 11
    assert list(map(str, schedule.order[0])) == ["F0:0", "F0:1", "R0:0", "B0:0", "R0:1", "B0:1"]
    early = replace(problem, backward=(3.0, 2.0))  # the gradient of 1 is there before 0 is done
    moved = insert_recompute(early, Schedule("by hand", problem.placement, 2, order))
    assert list(map(str, moved.order[0])) == ["F0:0", "F0:1", "R0:0", "R0:1", "B0:0", "B0:1"]


@pytest.mark.parametrize(
    ("order", "fault"),
    [
        (("R0:0", "F0:0", "B0:0"), "device 0 runs R0:0 before F0:0"),
        (("F0:0", "B0:0", "R0:0"), "device 0 runs B0:0 before R0:0"),
        (("F0:0", "R0:0", "R0:0", "B0:0"), "R0:0 is in the schedule 2 times"),
        (("F0:0", "R1:0", "B0:0"), "R1:0 is on device 0; stage 1 is on device 1"),
        (("F0:0", "R0:3", "B0:0"), "R0:3 on device 0: there is no microbatch 3"),
    ],
)
def test_what_cannot_be_is_refused(order: tuple[str, ...], fault: str) -> None:
    lines = (order, ("F1:0", "B1:0"))
    schedule = Schedule(
        "wrong", sequential(2), 1, tuple(tuple(map(Operation.parse, line)) for line in lines)
    )
    assert fault in faults_for(TWO, schedule)
    assert faults_for(TWO.within_backwards, schedule) == [
        "the schedule has separate recomputation (R), the problem has none"
    ]


def test_times_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="recompute_s: must be less than the backward"):
        replace(TWO, recompute_s=(4.0, 0.0))
    with pytest.raises(ValueError, match="recompute_s: need 2 values, got 1"):
        replace(TWO, recompute_s=(1.0,))
    with pytest.raises(ValueError, match="recompute_bytes: given without recompute_s"):
        replace(TWO, recompute_s=None, recompute_bytes=(1.0, 1.0))


@pytest.mark.parametrize("known", [True, False])
def test_a_files_own_recomputation_is_counted_once(known: bool, tmp_path: Path) -> None:
    """R takes its known time; with unknown time it is part of the backward."""
    backbone = toy_backbone(2, [])
    num = len(backbone.layers)
    costs = weighted_costs(backbone, [1.0] * num)
    if known:
        backward = tuple(b + 1.0 for b in costs.backward_s)
        costs = replace(costs, backward_s=backward, recompute_s=(1.0,) * num)
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0R0,0B0\n1F0,1B0\n")
    plan = make_plan(
        backbone, costs, sequential(2), str(path), activations=ActivationPolicies(range(num))
    )
    problem, schedule = plan.problem_of(1), plan.step(1).schedule
    again = problem.duration(OpType.RECOMPUTE, 0)
    assert again == (len(plan.partition.layers_of_stage(0)) if known else 0.0)
    timeline = simulate(problem, schedule)
    first, last = (Operation(kind, 0, 0) for kind in (OpType.RECOMPUTE, OpType.BACKWARD))
    spent = sum(timeline.end[op] - timeline.start[op] for op in (first, last))
    assert spent == pytest.approx(problem.backward[0])
    assert 0 < plan.idle_share(1) < 1
    with pytest.raises(PlanError, match="recomputes activations of stage 0"):
        make_plan(backbone, costs, sequential(2), str(path)).step(1)


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ({"selective": ["mid"]}, "selective has layer 'mid'; layers are numbers from 0 to 6"),
        ({"recompute": [7]}, "recompute has layer 7"),
        ({"offload": [-1]}, "offload has layer -1"),
        (
            {"recompute": [1], "selective": [1]},
            "layer 1 has the activation policies recompute and selective",
        ),
        (
            {"offload": [2], "selective": [2]},
            "layer 2 has the activation policies offload and selective",
        ),
    ],
)
def test_layers_that_there_are_not_and_two_ways_for_one_are_refused(
    how: dict[str, list[Any]], fault: str
) -> None:
    backbone = toy_backbone(6, [])
    costs = weighted_costs(backbone, [1.0] * len(backbone.layers))
    with pytest.raises(PlanError, match=fault):
        make_plan(backbone, costs, sequential(2), activations=ActivationPolicies(**how))
