"""Modulo templates and what is made of them: validity, beam search, longer schedules."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings

from megatron_pulse.planner.layout.placement import fold, interleaved
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.search.anneal import anneal
from megatron_pulse.planner.schedule.search.beam import MOST_WORK, Template, beam_templates
from megatron_pulse.planner.schedule.search.compaction import improve
from megatron_pulse.planner.schedule.search.jobshop import JobShop, job_shop
from megatron_pulse.planner.schedule.search.seeds import from_template, starts, steady_templates
from tests.planner.strategies import equal, problems


def largest_load(shop: JobShop) -> int:
    return max(map(shop.load, range(shop.placement.num_devices)))


@pytest.mark.parametrize(
    ("p", "split", "memory"),
    [(4, False, 6), (8, False, 12), (4, True, 6), (8, True, 12)],
)
def test_full_rate_with_room_for_one_and_a_half_per_device(
    p: int, split: bool, memory: int
) -> None:
    problem = equal(fold(p), 3 * p, memory, split)
    shop = job_shop(problem)
    template = beam_templates(shop, largest_load(shop))[0]
    assert template.period == 6 and template.keeps_caps(shop)
    start = template.unrolled(3 * p)
    assert faults_for(problem, shop.schedule("template", start)) == []


def test_a_template_keeps_caps_for_ever_or_not() -> None:
    """A short period overlaps microbatches: three activations of a stage where two have room."""
    shop = job_shop(equal(fold(2), 4, cap=2))
    assert Template(12, (0, 1, 2, 3, 10, 8, 6, 4)).keeps_caps(shop)
    assert not Template(6, (0, 1, 2, 3, 12, 8, 6, 4)).keeps_caps(shop)


@settings(max_examples=20, derandomize=True)
@given(problems())
def test_templates_run(problem: ScheduleProblem) -> None:
    """Data, devices, and memory where ``keeps_caps`` says so; else their improved orders."""
    shop = job_shop(problem)
    for template in beam_templates(shop, int(1.2 * largest_load(shop)), width=4):
        if template.keeps_caps(shop):
            start = template.unrolled(shop.num_microbatches)
            assert faults_for(problem, shop.schedule("template", start)) == []
            soonest = shop.timed(shop.lines(start))
            assert all(a <= b for a, b in zip(soonest, start, strict=True))
        for start in from_template(shop, template):
            assert faults_for(problem, shop.schedule("template", improve(shop, start))) == []


@settings(max_examples=40, derandomize=True)
@given(problems())
def test_annealing_keeps_schedules_valid_and_never_lengthens(problem: ScheduleProblem) -> None:
    shop = job_shop(problem)
    start = improve(shop, next(starts(shop)))
    found = anneal(shop, start, lambda swaps: swaps / 5000)
    assert faults_for(problem, shop.schedule("annealed", found)) == []
    assert shop.makespan(found) <= shop.makespan(start)
    assert found == shop.timed(shop.lines(found))
    assert found == anneal(shop, start, lambda swaps: swaps / 5000)


def test_annealing_bears_memory_in_the_finest_units() -> None:
    """Uneven activations are counted in units of which a cap has 2^60."""
    forward, half = (1.0, 1.3, 0.7, 1.1), (1.1, 0.9, 1.2, 1.0)
    weight, cap = (0.3, 0.7, 0.1, 0.9), (1.5, 1.0)
    problem = ScheduleProblem(fold(2), 24, forward, half, half, activation=weight, cap=cap)
    shop = job_shop(problem)
    assert max(shop.cap) > 1 << 59
    found = anneal(shop, improve(shop, next(starts(shop))), lambda swaps: swaps / 20_000)
    assert faults_for(problem, shop.schedule("annealed", found)) == []


def test_steady_templates_are_few_once_time_is_up() -> None:
    shop = job_shop(equal(fold(2), 12, 4))
    asked = [len(list(steady_templates(shop, lambda over=over: over))) for over in (True, False)]
    assert asked[0] == 1 < asked[1]


def test_many_classes_of_all_lengths_on_a_device_take_no_minutes() -> None:
    """To see whether they fit would: then there is no template."""
    chance, placement = random.Random(1), interleaved(2, 12)
    times = [tuple(chance.uniform(0.1, 3) for _ in range(placement.num_stages)) for _ in range(3)]
    shop = job_shop(ScheduleProblem(placement, 8, *times))
    beam_templates(shop, 2 * shop.most_load)
    began = time.process_time()
    found = beam_templates(shop, shop.most_load)
    assert time.process_time() - began < 1e-6 * MOST_WORK  # a fiftieth of that, or for minutes
    assert all(template.period == shop.most_load for template in found)
