"""Bounded dynamic programming over counts: optima, brute force, beams, and what it proves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.planner.layout.placement import fold, interleaved, sequential
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.search.dp import (
    GrowingSweeps,
    Sweep,
    chain_of,
    lines_of,
    sweep,
)
from megatron_pulse.planner.schedule.search.dp_kernel import BLOCK
from megatron_pulse.planner.schedule.search.jobshop import job_shop
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from tests.planner.exact import optimum
from tests.planner.strategies import equal, problems

NEVER, FREE = (lambda _: False), 1 << 60


def swept(
    problem: ScheduleProblem, width: int, mirrored: bool = False, below: int = FREE
) -> tuple[Sweep, float]:
    """A sweep of a problem of whole times, and the makespan of its schedule, which is valid."""
    shop = job_shop(problem)
    found = sweep(chain_of(shop, mirrored), width, below, 8.0, NEVER)
    if found.order is None:
        return found, math.inf
    schedule = shop.schedule("wave", shop.timed(lines_of(shop, found.order, mirrored)))
    assert faults_for(problem, schedule) == []
    return found, simulate(problem, schedule).makespan


@pytest.mark.parametrize(
    ("p", "m", "cap", "split", "best"),
    [
        (2, 4, 2, False, 39),
        (2, 8, 3, False, 60),
        (2, 8, 2, True, 65),
        (3, 6, 3, False, 67),
        (4, 6, 3, True, 66),
        (4, 8, 2, False, 143),
        (4, 8, 3, False, 114),
        (4, 8, 4, False, 83),
        (4, 8, 5, False, 72),
        (4, 8, 6, False, 63),
        (4, 8, 2, True, 101),
        (4, 8, 3, True, 86),
        (4, 8, 4, True, 59),
        (8, 16, 3, False, 422),
    ],
)
def test_optima_under_tight_caps(p: int, m: int, cap: float, split: bool, best: float) -> None:
    """Equal stages: whole backwards are proved optimal, split ones equal CP-SAT's result."""
    problem = equal(fold(p), m, cap, split)
    found = synthesize(problem, math.inf)
    assert faults_for(problem, found.schedule) == []
    assert found.certificate.makespan == best == simulate(problem, found.schedule).makespan
    assert found.certificate.lower_bound <= best
    assert found.certificate.proved or split


@st.composite
def tiny(draw: st.DrawFn) -> ScheduleProblem:
    """Whole times, few operations, and caps from the least possible on."""
    placement = draw(st.sampled_from([sequential(2), fold(2), interleaved(2, 2), sequential(3)]))
    num = placement.num_stages

    def numbers(least: int, most: int) -> tuple[float, ...]:
        times = st.integers(least, most).map(float)
        return tuple(draw(st.lists(times, min_size=num, max_size=num)))

    activation = numbers(0, 2)
    cap = tuple(
        sum(activation[s] for s in placement.stages_of_device(d)) + draw(st.integers(0, 3))
        for d in range(placement.num_devices)
    )
    split = numbers(1, 3) if draw(st.booleans()) else None
    count = draw(
        st.integers(1, 3 if split is None and num < 3 else 2 if split is None or num < 4 else 1)
    )
    link = float(draw(st.integers(0, 2)))
    return ScheduleProblem(
        placement, count, numbers(1, 3), numbers(1, 4), split, link, activation, cap
    )


@settings(max_examples=30, derandomize=True)
@given(tiny())
def test_all_states_are_the_optimum(problem: ScheduleProblem) -> None:
    """Forwards and backwards in time, what brute force finds; and nothing below it."""
    best = optimum(problem)
    for mirrored in (False, True) if problem.weight_grad is None else (False,):
        found, length = swept(problem, 4096, mirrored)
        assert found.complete and length == best
        found, length = swept(problem, 4096, mirrored, below=best)
        assert found.complete and found.order is None


@settings(max_examples=40, derandomize=True)
@given(problems().filter(lambda p: len(p.placement.starts) == 1), st.sampled_from([1, 3, 40]))
def test_any_beam_is_valid(problem: ScheduleProblem, width: int) -> None:
    """However few states are kept none is a dead end, and the bound holds for what is found."""
    shop = job_shop(problem)
    for mirrored in (False, True) if problem.weight_grad is None else (False,):
        found = sweep(chain_of(shop, mirrored), width, FREE, 8.0, NEVER)
        assert found.order is not None
        schedule = shop.schedule("wave", shop.timed(lines_of(shop, found.order, mirrored)))
        assert faults_for(problem, schedule) == []
    sweeps, lengths = GrowingSweeps(problem, shop), [math.inf]
    for start in sweeps.starts(lambda: min(lengths), lambda done: 200_000 - done):
        schedule = shop.schedule("wave", start)
        assert faults_for(problem, schedule) == []
        lengths.append(simulate(problem, schedule).makespan)
    assert sweeps.bound <= min(lengths) * (1 + 1e-9)


def test_times_that_are_no_whole_numbers_are_proved_too() -> None:
    problem = ScheduleProblem(
        fold(3), 6, (1.1, 0.7, 1.3, 0.9, 1.7, 0.6), (2.3, 1.1, 2.9, 1.9, 3.1, 1.3), cap=(3.0,) * 3
    )
    certificate = synthesize(problem, math.inf).certificate
    assert certificate.proved and certificate.gap < 1e-9


def test_a_sweep_gives_up_when_it_is_told_to() -> None:
    problem = equal(fold(4), 16, 6)
    asked: list[int] = []

    def stop(looked: int) -> bool:
        asked.append(looked)
        return looked > 3 * BLOCK

    chain = chain_of(job_shop(problem))
    found = sweep(chain, 4096, FREE, 8.0, stop)
    assert found.order is None and not found.complete and found.looked == asked[-1]
    # No more is looked at in between than a block and one level.
    assert all(b - a < 2 * BLOCK + 4096 * 8 for a, b in zip(asked, asked[1:], strict=False))


def test_sweeps_go_on_where_they_left_off() -> None:
    """A second part of the budget begins without knowing how fast sweeps are."""
    problem = equal(fold(4), 8, 5)
    sweeps = GrowingSweeps(problem, job_shop(problem))
    next(sweeps.starts(lambda: 1e9, lambda _: math.inf))
    assert not sweeps.done
    assert list(sweeps.starts(lambda: 1e9, lambda done: 1e9 if done else math.inf))
    assert sweeps.done and sweeps.bound == 72
