"""Bubble tasks in real steps: every slice runs once, in order, and changes no result."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_pulse.backbone.costs import weighted_costs
from megatron_pulse.planner.layout.placement import make_placement
from megatron_pulse.planner.program.device_program import Run
from megatron_pulse.planner.program.make_plan import make_plan
from megatron_pulse.planner.program.plan import Plan
from megatron_pulse.planner.schedule.operations import BubbleTask, Operation, OpType, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from tests.planner.slices import fill
from tests.ranks import RanksFailed, run_ranks
from tests.runtime.equality import Case, Outcome, differences, join_pipeline, merge, train
from tests.toys import nested, toy_backbone

BUBBLE_TASKS = (
    BubbleTask("text encoder", (0.5,) * 6),
    BubbleTask("autoencoder", (1.0, 0.25, 1.5), (1,)),
)
SLICE_S = 0.002


@dataclass
class Filled:
    """Result of one rank of a run with bubble tasks, with its workloads' inputs in order."""

    outcome: Outcome
    slices: list[tuple[int, int]]
    grad_modes: set[bool]


def with_bubble_tasks(schedule: Schedule) -> Schedule:
    num = schedule.placement.num_stages
    problem = ScheduleProblem(
        schedule.placement, schedule.num_microbatches, (1.0,) * num, (2.0,) * num
    )
    return fill(problem, schedule, BUBBLE_TASKS)


def run_filled(case: Case, fails_at: int | None, num_workloads: int) -> Filled:
    from tests.runtime import equality

    config, group = join_pipeline()
    make = equality.make_plan

    def make_filled(*args: Any, **kwargs: Any) -> Plan:
        plan = make(*args, **kwargs)
        schedule = with_bubble_tasks(plan.step(case.num_microbatches).schedule)
        return replace(plan, schedules=(schedule,))

    equality.make_plan = make_filled
    slices: list[tuple[int, int]] = []
    grad_modes: set[bool] = set()

    def workload(number: int) -> Any:
        def work(slice_: int) -> None:
            grad_modes.add(torch.is_grad_enabled())
            slices.append((number, slice_))
            if (number, slice_) == (1, fails_at):
                raise ValueError("this slice fails on purpose")
            time.sleep(SLICE_S)

        return work

    bubble_tasks = [workload(n) for n in range(num_workloads)]
    outcome = train(toy_backbone(9, nested(9, 4)), case, config, group, bubble_tasks)
    dist.barrier()
    return Filled(outcome, slices, grad_modes)


def run_plain(case: Case) -> Outcome:
    config, group = join_pipeline()
    return train(toy_backbone(9, nested(9, 4)), case, config, group)


@pytest.mark.parametrize("num_devices", [2, 4])
def test_all_slices_run_once_and_numbers_stay(num_devices: int) -> None:
    case = Case("fold", 4, "wave", steps=2)
    (expected,) = run_ranks(1, run_plain, case)
    ranks = run_ranks(num_devices, run_filled, case, None, len(BUBBLE_TASKS))
    got = merge([rank.outcome for rank in ranks])
    assert got.losses == expected.losses
    assert not differences(got.gradients, expected.gradients)
    assert not differences(got.parameters, expected.parameters)
    every = [(n, i) for n, task in enumerate(BUBBLE_TASKS) for i in range(len(task.slice_seconds))]
    ran = [slice_ for rank in ranks for slice_ in rank.slices]
    assert sorted(ran) == sorted(every * case.steps)
    for device, rank in enumerate(ranks):
        planned = planned_slices(num_devices, case)[device]
        assert rank.slices == planned * case.steps
        assert rank.grad_modes <= {False}
        assert all(BUBBLE_TASKS[n].may_run_on(device) for n, _ in rank.slices)


def planned_slices(num_devices: int, case: Case) -> list[list[tuple[int, int]]]:
    backbone = toy_backbone(9, nested(9, 4))
    costs = weighted_costs(backbone, [1.0] * len(backbone.layers))
    plan = make_plan(backbone, costs, make_placement("fold", num_devices), case.schedule)
    schedule = with_bubble_tasks(plan.step(case.num_microbatches).schedule)
    return [
        [(op.stage, op.microbatch) for op in order if op.kind is OpType.BUBBLE_TASK]
        for order in schedule.order
    ]


def test_a_failing_slice_is_named_on_every_rank() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, run_filled, Case("fold", 4, "wave"), 1, len(BUBBLE_TASKS))
    for output in failure.value.outputs:
        assert "X1:1 (bubble task 1, slice 1)" in output and "fails on purpose" in output, output


def test_a_missing_workload_is_refused() -> None:
    from megatron_pulse.runtime.executor import Executor
    from megatron_pulse.runtime.failure_board import PulseError

    program = tuple(Run(Operation(OpType.BUBBLE_TASK, n, 0)) for n in (0, 1, 2))
    with pytest.raises(PulseError, match="bubble task 1, 2, but 1 workload was given"):
        Executor(None, None, None, program, 0, {}, None, bubble_tasks=[print])  # type: ignore[arg-type]
