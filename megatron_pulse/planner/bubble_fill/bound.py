"""Lower bound on the makespan of a filled step."""

from __future__ import annotations

import itertools

from megatron_pulse.planner.bubble_fill.problem import FillProblem

MOST_SETS = 10
"""Maximum number of components for which all subsets are examined."""


def lower_bound(problem: FillProblem, factor: float = 1.0) -> float:
    """Lower bound on the makespan in seconds; components take ``factor`` times as long as planned.

    It is the largest of three terms. One is the step without components. The second, for every set
    of components, is the time by which the devices that may host them have been idle long enough.
    The third, for every component, is its critical path on one sample. The transfer of its result
    is added if a consumer may not host the component.
    """
    return max(
        problem.timeline.makespan, _by_work(problem, factor), _by_precedence(problem, factor)
    )


def fits(problem: FillProblem) -> bool:
    """True if nothing proves that components make the step longer."""
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
    """Time by which ``devices`` have been idle for ``seconds`` in total."""
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
            if any(not problem.components[i].may_run_on(d) for d in problem.components[i].consumers)
            else 0.0
        )
        for i, end in ends.items()
    )
