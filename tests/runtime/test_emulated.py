"""Schedules on real ranks with emulated times: as long as the simulator says, in its order."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import permutations

import pytest
import torch.distributed as dist

from megatron_pulse.planner.layout.placement import Partition, Placement, fold, sequential
from megatron_pulse.planner.layout.routes import trace_routes
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.registry import make_schedule
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.trace.compare import compare, measured_problem
from megatron_pulse.planner.trace.trace import Trace
from tests.ranks import run_ranks
from tests.solved import integer_programmed
from tests.toys import nested, toy_backbone

OPERATION_S = {2: 0.030, 4: 0.020}
"""A layer's forward, and each half of its backward, by the number of devices: what disturbs a step
must not count for what tells cases apart."""
M = 4
APART = 0.9
"""Makespans that differ by more than this must be measured in their order whatever else runs."""
ROUNDS = 8
"""As often are cases measured again while something else runs that takes the cores from them."""

Case = tuple[ScheduleProblem, Schedule]


def problem_of(
    placement: Placement, split: bool = False, cap: float | None = None
) -> ScheduleProblem:
    """A step of 2P layers: one a stage on the fold, two on a sequential placement."""
    num = placement.num_stages
    per_stage = 2 * placement.num_devices // num
    forward = half = (per_stage * OPERATION_S[placement.num_devices],) * num
    whole = tuple(2 * t for t in half)
    times = (forward, half, half) if split else (forward, whole, None)
    caps = None if cap is None else (cap,) * placement.num_devices
    return ScheduleProblem(placement, M, *times, cap=caps)


def run_cases(cases: list[Case]) -> list[Trace]:
    from tests.runtime.emulated import run_emulated

    dist.init_process_group("gloo")
    traces = []
    for problem, schedule in cases:
        num_layers = 2 * problem.placement.num_devices
        skips = nested(num_layers - 2, num_layers // 2 - 1)
        backbone = toy_backbone(num_layers - 2, skips, conditioned=(0,), embedder=True)
        per_stage = num_layers // problem.placement.num_stages
        cuts = tuple(range(0, num_layers + 1, per_stage))
        routes = trace_routes(backbone, Partition(problem.placement, cuts))
        traces.append(
            run_emulated(backbone, routes, schedule, problem, dist.group.WORLD, num_steps=3)
        )
    return traces


@pytest.mark.parametrize("num_devices", [2, 4])
def test_makespans_are_what_the_simulator_says(num_devices: int) -> None:
    plain, row = fold(num_devices), sequential(num_devices)
    tight = problem_of(plain, cap=1.5 * num_devices)
    split = problem_of(plain, split=True)
    free = problem_of(row)
    again = replace(free, recompute_s=tuple(0.5 * seconds for seconds in free.backward))
    redone = synthesize(again, effort=20).schedule
    assert redone.recomputed_apart
    cases: dict[str, Case] = {
        "1f1b": (problem_of(row), make_schedule("1f1b", row, M)),
        "wave, little memory": (tight, synthesize(tight, effort=20).schedule),
        "ILP": (problem_of(plain), integer_programmed(num_devices, M, split=False)),
        "recomputed apart": (again, redone),
        "split": (split, synthesize(split, effort=20).schedule),
    }
    measured = dict.fromkeys(cases, math.inf)
    for _ in range(ROUNDS):
        predicted, found = measure(num_devices, cases)
        # Other processes can only lengthen a step: the shortest of all rounds counts.
        measured = {name: min(measured[name], found[name]) for name in cases}
        late = [name for name in cases if measured[name] > 2 * predicted[name]]
        swapped = [
            (one, other)
            for one, other in permutations(cases, 2)
            if predicted[one] < APART * predicted[other] and measured[one] >= measured[other]
        ]
        if not late and not swapped:
            break
    assert not late and not swapped, (late, swapped, predicted, measured)


def measure(num_devices: int, cases: dict[str, Case]) -> tuple[dict[str, float], dict[str, float]]:
    """The makespan of every case as the simulator says, and the shortest that ranks took."""
    results = run_ranks(num_devices, run_cases, list(cases.values()))
    assert all(traces == results[0] for traces in results)
    predicted, measured = {}, {}
    for (name, (problem, schedule)), trace in zip(cases.items(), results[0], strict=True):
        assert not trace.faults(), name
        predicted[name] = compare(simulate(problem, schedule), trace).predicted_makespan_s
        measured[name] = min(step.makespan_s for step in trace.steps)
        times = measured_problem(problem, trace)
        # Sleeping cannot be too short; how long it is depends on what else runs here.
        assert measured[name] >= 0.99 * predicted[name], name
        assert min(t / p for t, p in zip(times.forward, problem.forward, strict=True)) > 0.99
        assert min(t / p for t, p in zip(times.backward, problem.backward, strict=True)) > 0.99
        assert (times.weight_grad is None) == (problem.weight_grad is None)
    return predicted, measured


def test_sleeping_is_precise_and_burns_no_core() -> None:
    from tests.runtime.emulated import sleep_until

    late, burnt = [], time.process_time()
    for _ in range(20):
        deadline = time.perf_counter() + 0.01
        sleep_until(deadline)
        late.append(time.perf_counter() - deadline)
    assert min(late) < 0.002  # others may be late because of what else runs here
    assert time.process_time() - burnt < 0.05
