"""No filled step is shorter than this."""

from __future__ import annotations

import itertools

from megatron_pulse.planner.fill.problem import FillProblem

MOST_SETS = 10
"""Components of which all combinations are looked at."""


def lower_bound(problem: FillProblem, factor: float = 1.0) -> float:
    """Seconds below which no filled step is; components take ``factor`` times as long as planned.

    The largest of: the step without components; for every set of components, the time by which the
    devices that may host them have as much idle time as they need; and for every component the
    longest way through layers to its end on one sample, and its results' way to a reader that may
    not host it.
    """
    return max(
        problem.timeline.makespan, _by_work(problem, factor), _by_precedence(problem, factor)
    )


def fits(problem: FillProblem) -> bool:
    """Whether nothing says that the step must be longer with components than without."""
    return lower_bound(problem) <= problem.timeline.makespan * (1 + 1e-9)


def _by_work(problem: FillProblem, factor: float) -> float:
    components = problem.components
    work = [factor * c.least_s(problem.num_samples) for c in components]
    numbers = range(len(components))
    if len(components) <= MOST_SETS:
        sets = [s for n in numbers for s in itertools.combinations(numbers, n + 1)]
    else:
        sets = [tuple(numbers), *((i,) for i in numbers)]
    least = 0.0
    for chosen in sets:
        devices = [
            d
            for d in range(problem.num_devices)
            if any(components[i].may_run_on(d) for i in chosen)
        ]
        least = max(least, _idle_by(problem, devices, sum(work[i] for i in chosen)))
    return least


def _idle_by(problem: FillProblem, devices: list[int], seconds: float) -> float:
    """When ``devices`` have been idle for ``seconds`` in all."""
    gaps = sorted(gap for device in devices for gap in problem.gaps[device])
    edges = sorted({gap.start for gap in gaps} | {gap.end for gap in gaps})
    for start, end in itertools.pairwise(edges):
        idle = sum(gap.start <= start and gap.end >= end for gap in gaps)
        if idle and idle * (end - start) >= seconds:
            return start + seconds / idle
        if idle:
            seconds -= idle * (end - start)
    raise AssertionError("the last gaps have no end")


def _by_precedence(problem: FillProblem, factor: float) -> float:
    ends: dict[int, float] = {}
    for i in sorted(range(len(problem.components)), key=problem.levels.__getitem__):
        component = problem.components[i]
        alone = factor * sum(
            min(layer.time_s(n) for n in range(1, problem.num_samples + 1))
            for layer in component.layers
        )
        ends[i] = max((ends[b] for b in problem.before[i]), default=0.0) + alone
    return max(
        end
        + (
            problem.result_lag_s(i, 1)
            if any(not problem.components[i].may_run_on(d) for d in problem.components[i].readers)
            else 0.0
        )
        for i, end in ends.items()
    )
