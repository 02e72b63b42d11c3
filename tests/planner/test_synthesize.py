"""The constructive synthesizer: golden makespans, certificates, caps, and any random problem."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.planner.layout.placement import fold, interleaved, sequential
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.check.validate import faults_for, peak_activations, validate
from megatron_pulse.planner.schedule.classic.catalog import CLASSICS
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.search.jobshop import job_shop
from megatron_pulse.planner.schedule.search.synthesize import classics, synthesize
from tests.planner.strategies import equal, problems


@pytest.mark.parametrize(
    ("p", "m", "cap", "split", "optimum"),
    [
        (2, 2, None, False, 16),
        (2, 4, None, False, 27),
        (4, 4, None, False, 36),
        (8, 8, 16, False, 76),
        (4, 6, None, False, 45),
        (4, 8, None, False, 57),
        (4, 12, None, False, 81),
        (4, 16, None, False, 105),
        (8, 16, None, False, 117),
        (8, 32, None, False, 213),
        (4, 8, 8, True, 51),
        (8, 16, 16, True, 103),
        (8, 64, 16, True, 391),
    ],
)
def test_optima_that_the_bound_proves(
    p: int, m: int, cap: float | None, split: bool, optimum: float
) -> None:
    problem = equal(fold(p), m, cap, split)
    found = synthesize(problem, math.inf)
    assert faults_for(problem, found.schedule) == []
    assert found.certificate.makespan == optimum == simulate(problem, found.schedule).makespan
    assert found.certificate.proved and found.certificate.gap == 0


@pytest.mark.parametrize(("p", "optimum"), [(2, 10), (4, 22), (8, 46)])
def test_the_papers_equal_slots(p: int, optimum: float) -> None:
    found = synthesize(equal(fold(p), p, backward=1.0), math.inf).certificate
    assert found.makespan == optimum and found.proved


@pytest.mark.parametrize(
    ("p", "m", "cap", "split", "optimum", "reached"),
    [
        (4, 8, 11, False, 57, 57),
        (4, 8, 8, False, 60, 60),
        (4, 8, 7, False, 61, 61),
        (4, 8, 6, False, 63, 63),
        (4, 8, 5, False, 72, 72),
        (4, 8, 4, False, 83, 83),
        (8, 16, 16, False, 124, 124),
        (8, 16, 12, False, 129, 129),
        (4, 8, 6, True, 53, 53),
        (8, 16, 12, True, 107, 107),
    ],
)
def test_capped_optima(
    p: int, m: int, cap: float, split: bool, optimum: float, reached: float
) -> None:
    problem = equal(fold(p), m, cap, split)
    found = synthesize(problem, math.inf)
    assert validate(found.schedule, cap=cap) == []
    assert found.certificate.lower_bound <= optimum <= found.certificate.makespan <= reached


@pytest.mark.parametrize(
    ("cap", "split", "best"), [(None, False, 60), (8, False, 66), (8, True, 56), (None, True, 52.5)]
)
def test_links(cap: float | None, split: bool, best: float) -> None:
    """Links of half a forward, P=4, M=8."""
    assert synthesize(equal(fold(4), 8, cap, split, 0.5), math.inf).certificate.makespan <= best


@settings(max_examples=80, derandomize=True)
@given(problems())
def test_any_problem(problem: ScheduleProblem) -> None:
    found = synthesize(problem, effort=2)
    assert faults_for(problem, found.schedule) == []
    timeline = simulate(problem, found.schedule)
    assert found.certificate.makespan == timeline.makespan
    assert found.certificate.lower_bound <= timeline.makespan * (1 + 1e-9)
    assert timeline.makespan >= max(timeline.busy) - 1e-9
    for classic in classics(problem):
        assert timeline.makespan <= simulate(problem, classic).makespan
    at_once = synthesize(problem, effort=0, bounded=False)
    assert at_once.schedule == synthesize(problem, effort=0).schedule
    assert at_once.certificate.lower_bound <= found.certificate.lower_bound * (1 + 1e-9)


@settings(max_examples=25, derandomize=True)
@given(problems(), st.integers(0, 3))
def test_deterministic_and_scale_free(problem: ScheduleProblem, power: int) -> None:
    """Twice the same; and the same in another unit of time and memory."""
    found = synthesize(problem, effort=2)
    assert synthesize(problem, effort=2).schedule == found.schedule
    unit = 2.0**-power

    def scaled(values: tuple[float, ...] | None) -> tuple[float, ...] | None:
        return None if values is None else tuple(unit * v for v in values)

    num = problem.placement.num_stages
    other = dataclasses.replace(
        problem,
        forward=scaled(problem.forward),
        backward=scaled(problem.backward),
        weight_grad=scaled(problem.weight_grad),
        link=unit * problem.link,
        activation=scaled(problem.activation or (1.0,) * num),
        cap=scaled(problem.cap),
        wgrad_bytes=scaled(problem.wgrad_bytes),
    )
    assert synthesize(other, effort=2).certificate.makespan == pytest.approx(
        unit * found.certificate.makespan, rel=0.1
    )


def test_time_is_no_part_of_the_answer() -> None:
    problem = equal(fold(4), 8, 6, True)
    first = synthesize(problem, seconds=0.0, effort=5).schedule
    assert first == synthesize(problem, seconds=1000, effort=5).schedule
    began = time.process_time()
    assert faults_for(problem, synthesize(problem, seconds=0).schedule) == []
    assert time.process_time() - began < 5


def test_each_device_has_its_own_cap_and_stages_their_weight() -> None:
    for caps in itertools.product((3.0, 4.5, 9.0), repeat=2):
        problem = dataclasses.replace(
            equal(fold(2), 5, split=True), activation=(1.0, 2.5, 0.5, 2.0), cap=caps
        )
        schedule = synthesize(problem, effort=4).schedule
        held = peak_activations(schedule, problem.activation)
        assert all(h <= c for h, c in zip(held, caps, strict=True))


def test_a_cap_of_thirds_counts_exactly() -> None:
    third = 1 / 3
    problem = dataclasses.replace(
        equal(sequential(2), 4), activation=(third, third), cap=(3 * third, 3 * third)
    )
    shop = job_shop(problem)
    assert shop.cap[0] // max(shop.delta) == 3
    assert max(peak_activations(synthesize(problem, effort=4).schedule)) <= 3


def test_problems_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="device 1 holds 2 for one microbatch, its cap is 1.5"):
        dataclasses.replace(equal(fold(2), 4), cap=(2.0, 1.5))
    with pytest.raises(ValueError, match="forward: need 4 values, got 2"):
        dataclasses.replace(equal(fold(2), 4), forward=(1.0, 1.0))


def test_answers_to_other_problems_are_faults() -> None:
    problem = equal(fold(2), 4)
    schedule = synthesize(problem, effort=1).schedule
    assert "FB, the problem FIW" in faults_for(equal(fold(2), 4, split=True), schedule)[0]
    assert "4 microbatches, the problem 5" in faults_for(equal(fold(2), 5), schedule)[0]
    assert "is for placement (0, 1, 1, 0)" in faults_for(equal(interleaved(2), 4), schedule)[0]
    assert "holds 8" in faults_for(equal(fold(2), 4, cap=4), CLASSICS["gpipe"](fold(2), 4))[0]


def test_every_boundary_has_its_own_link_time() -> None:
    links = (0.5, 2.0, 9.0, 0.25, 1.0)
    problem = ScheduleProblem(fold(3), 1, (1.0,) * 6, (2.0,) * 6, link=links)
    crossed = 2 * (sum(links) - links[2])  # the turn stays on its device
    found = synthesize(problem, math.inf)
    assert found.certificate.makespan == found.certificate.lower_bound == 18 + crossed
    with pytest.raises(ValueError, match="link: need one value, or 5, got 2"):
        ScheduleProblem(fold(3), 1, (1.0,) * 6, (2.0,) * 6, link=(1.0, 1.0))
    with pytest.raises(ValueError, match="times the longest operation, 2e-05: give both in one"):
        ScheduleProblem(fold(3), 1, (1e-5,) * 6, (2e-5,) * 6, link=1e9)
    longest = ScheduleProblem(fold(3), 2, (1e-5,) * 6, (2e-5,) * 6, link=1e7)
    assert synthesize(longest, effort=1).certificate.makespan >= 4e7
