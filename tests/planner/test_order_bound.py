"""The best order of one device: exact on its own, and a proof of the golden values of the fold."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.planner.layout.placement import fold
from megatron_pulse.planner.schedule.bound.bounds import lower_bound
from megatron_pulse.planner.schedule.bound.microbatch_path import MicrobatchPath
from megatron_pulse.planner.schedule.bound.order_bound import (
    CLOSE,
    DeviceClasses,
    order_bound,
    shortest_order,
)
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from tests.planner.exact import optimum
from tests.planner.strategies import equal
from tests.planner.test_bounds import tiny


@st.composite
def devices(draw: st.DrawFn) -> tuple[DeviceClasses, float]:
    """A device with one stage or two, whole or split backwards, and its cap."""
    count, stages, split = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.booleans())
    chain = 2 * stages
    taken = [draw(st.integers(1, 3)) for _ in range(stages)]
    after, held = list(range(-1, chain - 1)), [0.0] * chain
    for stage, takes in enumerate(taken):
        for k in range(stage + 1, chain - stage):
            held[k] += takes
        if split:
            after.append(chain - 1 - stage)
            held.append(takes)
    num = len(after)

    def times(least: int) -> list[list[int]]:
        return [sorted(draw(st.integers(least, 9)) for _ in range(count)) for _ in range(num)]

    classes = DeviceClasses(
        np.array([draw(st.integers(1, 4)) for _ in range(num)], float),
        np.array(times(0), float),
        np.array([row[::-1] for row in times(0)], float),
        tuple(after),
        tuple(held),
    )
    return classes, sum(taken) + draw(st.integers(0, 4))


def every_makespan(classes: DeviceClasses, cap: float) -> Iterator[float]:
    """Makespans of all orders within dependencies and cap."""
    num, count = classes.head.shape

    def orders(counts: tuple[int, ...], now: float, reached: float) -> Iterator[float]:
        if sum(counts) == num * count:
            yield reached
        for k, waits in enumerate(classes.after):
            m = counts[k]
            if m == count or (waits >= 0 and counts[waits] == m):
                continue
            done = (*counts[:k], m + 1, *counts[k + 1 :])
            behind = [done[w] - n for n, w in zip(done[1:], classes.after[1:], strict=True)]
            if sum(a * b for a, b in zip(behind, classes.held[1:], strict=True)) > cap:
                continue
            end = max(now, classes.head[k, m]) + classes.time[k]
            yield from orders(done, end, max(reached, end + classes.tail[k, m]))

    return orders((0,) * num, 0.0, 0.0)


@settings(max_examples=60, derandomize=True)
@given(devices())
def test_best_of_all_orders(drawn: tuple[DeviceClasses, float]) -> None:
    classes, cap = drawn
    if math.prod(classes.head.shape) > 12:
        classes = DeviceClasses(
            classes.time, classes.head[:, :1], classes.tail[:, -1:], classes.after, classes.held
        )
    best = min(every_makespan(classes, cap))
    bound, _ = shortest_order(classes, cap)
    assert best * (1 - CLOSE) - 1e-9 <= bound <= best + 1e-9
    assert shortest_order(classes, cap, least=best + 1)[0] == best + 1


@settings(max_examples=100, derandomize=True)
@given(tiny(), st.sampled_from([0.0, 50.0, 500.0]))
def test_never_above_the_optimum(problem: ScheduleProblem, work: float) -> None:
    path, best = MicrobatchPath(problem), optimum(problem)
    whole = order_bound(path)
    assert whole <= best + 1e-6
    assert order_bound(path, work=work) <= whole + 1e-9  # less work, less of a bound, not a wrong
    assert order_bound(path, least=best) == pytest.approx(best)


@pytest.mark.parametrize(("p", "periods"), [(4, 2), (4, 3), (8, 2), (8, 3), (16, 2)])
def test_proves_the_least_bubble_of_equal_stages(p: int, periods: int) -> None:
    """planner/schedule/README.md, Known optima: what no fold can do without."""
    m = periods * p

    def bubble(cap: float | None, split: bool = False) -> float:
        return lower_bound(equal(fold(p), m, cap, split)) - 6 * m

    assert bubble(1.5 * p) == pytest.approx(4.5 * p - 3)
    assert bubble(2 * p) == pytest.approx(4 * (p - 1))
    assert bubble(2.5 * p) == pytest.approx(3.5 * p - 4)
    assert bubble(None) == pytest.approx(3 * (p - 1))
    assert bubble(2 * p, split=True) == pytest.approx(p - 1)
    assert bubble(1.5 * p, split=True) == pytest.approx(1.5 * p - 1)


@pytest.mark.parametrize(
    ("cap", "split", "idle"), [(1.5, False, 69), (2, True, 15), (1.5, True, 23)]
)
def test_sixteen_devices_reach_it(cap: float, split: bool, idle: float) -> None:
    found = synthesize(equal(fold(16), 32, 16 * cap, split), 20).certificate
    assert found.makespan == 6 * 32 + idle and found.proved


def test_with_links() -> None:
    """planner/schedule/README.md, Known optima: for P = 4, M = 8 and links of half a forward."""
    for cap, split, best in ((8, False, 66), (None, False, 60), (8, True, 56), (None, True, 52.5)):
        assert lower_bound(equal(fold(4), 8, cap, split, link=0.5)) == pytest.approx(best)


def test_a_bound_ends_when_it_is_told_to() -> None:
    problem = equal(fold(4), 8, 6)
    quick = lower_bound(problem, work=0.0)
    assert lower_bound(problem, until=0.0) == quick < lower_bound(problem)
