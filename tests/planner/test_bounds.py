"""Lower bounds: never above the optimum of tiny problems, and tight where they are said to be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.planner.layout.placement import fold, sequential
from megatron_pulse.planner.schedule.bound.bounds import (
    device_bound,
    filled,
    jackson,
    last_gradients,
    lower_bound,
    memory_bound,
    one_machine_bound,
)
from megatron_pulse.planner.schedule.bound.exhaustive import exhaustive_bound
from megatron_pulse.planner.schedule.bound.microbatch_path import MicrobatchPath
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.operations import Operation
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.search.synthesize import classics, synthesize
from tests.planner.exact import optimum
from tests.planner.strategies import equal


@st.composite
def tiny(draw: st.DrawFn, waits: bool = False) -> ScheduleProblem:
    """Problems of at most 18 operations; what weight gradients wait with may be less than an
    activation, or more. With ``waits`` they always wait, within a cap."""
    placement, most = draw(st.sampled_from([(sequential(2), 4), (sequential(3), 2), (fold(2), 2)]))
    count = draw(st.integers(1, most))
    num = placement.num_stages
    if waits:
        count = min(count, 6 // num)
    split = (waits or draw(st.booleans())) and num * count <= 6

    def times() -> tuple[float, ...]:
        return tuple(map(float, draw(st.lists(st.integers(1, 4), min_size=num, max_size=num))))

    taken = tuple(map(float, draw(st.lists(st.integers(1, 3), min_size=num, max_size=num))))
    capped = waits or draw(st.booleans())
    waiting = None
    if waits or (split and capped and draw(st.booleans())):
        waiting = tuple(map(float, draw(st.lists(st.integers(0, 4), min_size=num, max_size=num))))
    most = tuple(map(max, taken, waiting or taken))
    held = [
        sum(most[s] for s in placement.stages_of_device(d)) for d in range(placement.num_devices)
    ]
    cap = tuple(h + draw(st.integers(0, 3)) for h in held)
    return ScheduleProblem(
        placement,
        count,
        times(),
        times(),
        times() if split else None,
        float(draw(st.integers(0, 2))),
        taken if capped else None,
        cap if capped else None,
        wgrad_bytes=waiting,
    )


@settings(max_examples=100, derandomize=True)
@given(tiny())
def test_no_bound_is_above_the_optimum_and_no_schedule_below(problem: ScheduleProblem) -> None:
    best = optimum(problem)
    for bound in (device_bound, one_machine_bound, memory_bound, lower_bound):
        assert bound(problem) <= best + 1e-9, bound.__name__
    assert device_bound(problem) <= one_machine_bound(problem) + 1e-9
    found = synthesize(problem, effort=20)
    assert faults_for(problem, found.schedule) == []
    assert best <= found.certificate.makespan <= 1.2 * best
    if found.certificate.proved:
        assert found.certificate.makespan == pytest.approx(best)


@settings(max_examples=100, derandomize=True)
@given(tiny())
def test_last_gradients_start_no_sooner_than_their_bound(problem: ScheduleProblem) -> None:
    last = problem.num_microbatches - 1
    bounds = last_gradients(problem)
    for schedule in (synthesize(problem, effort=3).schedule, *classics(problem)):
        start = simulate(problem, schedule).start
        for stage, bound in enumerate(bounds):
            assert bound <= start[Operation(problem.kinds[-1], stage, last)] + 1e-9


def test_last_gradient_of_a_lone_device_is_all_but_its_own() -> None:
    assert last_gradients(equal(sequential(1), 5)) == (5 * 1 + 4 * 2,)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16), (4, 32)])
def test_device_bound_of_equal_stages(p: int, m: int) -> None:
    assert device_bound(equal(fold(p), m)) == 6 * m + 3 * (p - 1)
    assert device_bound(equal(fold(p), m, split=True)) == 6 * m + p - 1
    c = 0.5
    assert device_bound(equal(fold(p), m, link=c)) == 6 * m + 3 * (p - 1) + 2 * (p - 1) * c


@pytest.mark.parametrize("p", [2, 4, 8])
def test_one_machine_bound_is_tight_for_few_microbatches(p: int) -> None:
    assert one_machine_bound(equal(fold(p), p)) == 10 * p - 4


def test_memory_bound_is_the_rate_times_the_microbatches() -> None:
    """Room for one microbatch: on device 0 they follow each other."""
    problem = equal(sequential(3), 5, cap=1)
    assert memory_bound(problem) == 5 * 9
    assert memory_bound(equal(sequential(3), 5, cap=1.9)) == pytest.approx(5 * 9)  # still for one
    assert optimum(equal(sequential(3), 2, cap=1)) == lower_bound(equal(sequential(3), 2, cap=1))
    assert memory_bound(equal(sequential(3), 5)) == 0


@given(
    st.floats(0.5, 12), st.lists(st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.5]), min_size=1, max_size=4)
)
def test_what_whole_activations_fill_of_a_cap(cap: float, sizes: list[float]) -> None:
    """Beside all numbers of each size; of more than two it is not said."""
    kinds = {size for size in sizes if size}
    if not kinds or max(kinds) > cap:
        return
    most = max(
        held
        for counts in itertools.product(*(range(int(cap / size) + 2) for size in kinds))
        if (held := sum(n * s for n, s in zip(counts, kinds, strict=True))) <= cap * (1 + 1e-9)
    )
    assert filled(cap, sizes) == pytest.approx(most if len(kinds) < 3 else cap)


@settings(max_examples=80, derandomize=True)
@given(tiny())
def test_every_order_says_what_the_shortest_schedule_takes(problem: ScheduleProblem) -> None:
    best, path = optimum(problem), MicrobatchPath(problem)
    for length in (best, best + 5.0):
        assert exhaustive_bound(path, length) == pytest.approx(best)


@settings(max_examples=60, derandomize=True)
@given(tiny(waits=True))
def test_schedules_whose_weight_gradients_wait_with_bytes_are_proved(
    problem: ScheduleProblem,
) -> None:
    found = synthesize(problem, effort=20).certificate
    assert found.lower_bound <= optimum(problem) + 1e-9
    assert found.proved or found.makespan > optimum(problem)


def test_what_weight_gradients_wait_with_bounds_a_step() -> None:
    """Device 0 holds nothing from input to weight gradient, and room for one activation before."""
    problem = ScheduleProblem(
        sequential(2), 3, (1, 8), (5, 7), (2, 5), (2.0,), (2, 2), (2, 2), wgrad_bytes=(0, 1)
    )
    assert optimum(problem) == 77 == lower_bound(problem)


def test_large_problems_are_not_tried_in_every_order() -> None:
    problem = equal(sequential(4), 8, split=True)
    assert exhaustive_bound(MicrobatchPath(problem), 1e3) == 0


def test_jackson() -> None:
    assert jackson([(0, 3, 0), (1, 1, 5)]) == 7  # the second interrupts the first
    assert jackson([(2, 1, 1), (0, 1, 0)]) == 4
    assert jackson([]) == 0
