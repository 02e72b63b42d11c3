"""Memory: Megatron's bytes of a parameter, and what schedules have in flight."""

from __future__ import annotations

import pytest

from megatron_pulse.planner.layout.placement import (
    Placement,
    fold,
    interleaved,
    make_placement,
    sequential,
)
from megatron_pulse.planner.partition.memory import (
    ParameterState,
    bytes_per_parameter,
    in_flight,
    optimizer_step_bytes,
)
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.search.synthesize import synthesize


@pytest.mark.parametrize(
    ("dtype", "state", "whole", "divided_by_4", "stepping"),
    [
        ("bfloat16", ParameterState(), 18, 9, 0),
        ("bfloat16", ParameterState(grad_reduce_in_bf16=True), 16, 7, 4),
        ("float16", ParameterState(), 16, 7, 4),
        ("float32", ParameterState(), 16, 10, 0),
        ("float32", ParameterState(ema=True), 20, 11, 0),
        ("bfloat16", ParameterState(True, reference=True), 24, 12, 0),
        ("float32", ParameterState(optimizer_cpu_offload=True, reference=True), 12, 12, 0),
        ("bfloat16", ParameterState(optimizer_cpu_offload=True), 6, 6, 0),
        ("bfloat16", ParameterState(True, True, optimizer_cpu_offload=True), 4, 4, 0),
        ("float16", ParameterState(True, optimizer_cpu_offload=True), 6, 6, 0),  # gradients in fp32
        ("float32", ParameterState(optimizer_cpu_offload=True), 8, 8, 0),
    ],
)
def test_bytes_of_a_parameter(
    dtype: str, state: ParameterState, whole: float, divided_by_4: float, stepping: float
) -> None:
    assert bytes_per_parameter(dtype, state=state) == whole
    assert bytes_per_parameter(dtype, data_parallel=4, state=state) == whole
    assert bytes_per_parameter(dtype, distributed_optimizer=True, state=state) == whole
    assert bytes_per_parameter(dtype, True, 4, state) == divided_by_4
    assert optimizer_step_bytes(dtype, state=state) == stepping
    assert optimizer_step_bytes(dtype, True, 4, state) == stepping / 4


@pytest.mark.parametrize("num_microbatches", [1, 3, 9])
def test_1f1b_holds_one_microbatch_less_on_each_next_stage(num_microbatches: int) -> None:
    expected = tuple(min(num_microbatches, 4 - stage) for stage in range(4))
    assert in_flight(sequential(4), num_microbatches) == expected


def test_one_device_holds_one_microbatch() -> None:
    assert in_flight(make_placement("fold", 1), 8) == (1,)


@pytest.mark.parametrize("placement", [fold(2), fold(3), interleaved(2)])
def test_what_is_in_flight_is_possible(placement: Placement) -> None:
    held = in_flight(placement, 6)
    assert len(held) == placement.num_stages
    assert all(1 <= count <= 6 for count in held)
    assert held[0] == max(held)  # the first stage waits longest for its backward
    assert in_flight(placement, 1) == (1,) * placement.num_stages


@pytest.mark.parametrize("num_devices", [4, 8])
def test_a_fold_has_room_for_the_schedule_that_runs(num_devices: int) -> None:
    """Within the counted activations the wave loses less than an eighth of its time."""
    placement, count = fold(num_devices), 2 * num_devices
    held = in_flight(placement, count)
    room = tuple(
        float(sum(held[s] for s in placement.stages_of_device(d))) for d in range(num_devices)
    )
    stages = placement.num_stages
    problem = ScheduleProblem(placement, count, (1.0,) * stages, (2.0,) * stages, cap=room)
    free = ScheduleProblem(placement, count, (1.0,) * stages, (2.0,) * stages)
    longest = synthesize(problem, effort=20).certificate.makespan
    assert longest <= 1.125 * synthesize(free, effort=20).certificate.makespan
