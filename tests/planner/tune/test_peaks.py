"""Peak memory of devices, by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_pulse.planner.layout.layouts import ROW, WHOLE
from megatron_pulse.planner.schedule.operations import Operation
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.memory.peak_memory import peak_bytes_in_schedule
from tests.planner.tune.problems import cluster, profile

SAVED, PEAK = 100e6, 120e6
"""Bytes of each layer's activations, and with what works beside them."""


def evaluator(devices: int, waiting: float = 0.0) -> Evaluator:
    chain = profile(random.Random(0), 4, 0, saved_mb=100.0, even=True)
    columns = {
        size: tuple(replace(times, wgrad_bytes=round(waiting * size)) for times in column)
        for size, column in chain.times.items()
    }
    return Evaluator(replace(chain, times=columns), cluster(1, devices), 2)


def test_an_operation_works_where_its_layers_are() -> None:
    """The last layer works beside all activations; each before it when those behind it are gone."""
    found = evaluator(1)
    outcome = found.evaluate(Config(1, 1, 1, 1, WHOLE))
    state = outcome.stages.state_bytes[0]
    assert outcome.memory_bytes[0] - state == pytest.approx(3 * SAVED + PEAK)
    # Computed again, layer by layer, each has all of its own in use, beside what is kept of others.
    again = found.evaluate(Config(1, 1, 1, 1, WHOLE, recompute=Recompute.ALWAYS))
    kept = sum(again.stages.saved_bytes)
    assert again.memory_bytes[0] - state == pytest.approx(kept + PEAK)


@pytest.mark.parametrize(("waiting", "peak"), [(0.0, 4 * SAVED), (80e6, 2 * SAVED + 2 * 80e6)])
def test_what_weight_gradients_hold_is_there_until_they_are_computed(
    waiting: float, peak: float
) -> None:
    found = evaluator(2, waiting)
    config = Config(2, 1, 1, 1, ROW, split=True)
    stages, times = found.feasible.best(config), found.profile.times_at(1)
    schedule = found.evaluate(config).synthesis.schedule
    rows = "F0:0 F0:1 I0:0 W0:0 I0:1 W0:1", "F1:0 I1:0 F1:1 W1:0 I1:1 W1:1"
    order = tuple(tuple(map(Operation.parse, row.split())) for row in rows)
    held = peak_bytes_in_schedule(stages, times, (1,) * 4, replace(schedule, order=order))
    assert held == pytest.approx((4 * SAVED + PEAK - SAVED, peak + PEAK - SAVED))


@pytest.mark.parametrize("first", [PEAK, 300e6])
def test_computing_again_goes_forward_through_its_stage_and_the_backward_back(first: float) -> None:
    """In R the first layer works before the second's activations are there, beside what is kept of
    both; in the backward behind it when the second's are gone."""
    chain = evaluator(2).profile
    columns = {
        size: (replace(column[0], peak_bytes=round(first)), *column[1:])
        for size, column in chain.times.items()
    }
    found = Evaluator(replace(chain, times=columns), cluster(1, 2), 2)
    config = Config(2, 1, 1, 1, ROW, recompute=Recompute.ALWAYS)
    stages, schedule = found.feasible.best(config), found.evaluate(config).synthesis.schedule
    assert stages.partition.cuts == (0, 2, 4)
    taken = stages.costs.saved_bytes[0]  # what a layer takes is all that is kept of it
    rows = "F0:0 F0:1 R0:0 B0:0 R0:1 B0:1", "F1:0 B1:0 F1:1 B1:1"
    order = tuple(tuple(map(Operation.parse, row.split())) for row in rows)
    times = found.profile.times_at(1)
    held = peak_bytes_in_schedule(stages, times, (1,) * 4, replace(schedule, order=order))
    second = SAVED - taken + PEAK  # beside what of the first layer is computed again
    assert held == pytest.approx((4 * taken + max(first, second), 2 * taken + PEAK))
