"""Exact model: the number of operations of each class that have started by each slot.

``X[k, t]`` counts the starts of class k up to slot t, integer and never falling. Microbatches are
identical and run in order, so the counts determine a schedule. With durations p, class k after
class j:

    X[k, t] <= X[j, t - p_j - lag]                            data flow
    sum over k of device d: X[k, t] - X[k, t - p_k] <= 1      one operation at a time
    sum over classes k of d, which change what is in use by a_k:
        a_k X[k, t], or a_k X[k, t - p_k] where a_k < 0       memory: binds the order on d alone
        <= cap_d
    (M - low) z[t] <= X[k, t - p_k] - low for the last classes k, low the least
        that X can be: all has ended by t

Minimise the horizon minus the number of slots t with z[t]. Windows (from the operations that must
run before and after an operation, within the horizon) fix most counts. See ../README.md: Search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_pulse.planner.schedule.ilp.solvers import (
    Answer,
    Solver,
    Status,
    processor_s,
    solve_model,
)
from megatron_pulse.planner.schedule.search.jobshop import JobShop

EXACT_MEMORY = 10_000
"""Number of units up to which memory is exact; more are scaled to it, with a small tolerance."""


@dataclass(frozen=True)
class ExactResult:
    """Start of every operation of the shop, if any was found, and the solver's answer.

    ``bound`` is a lower bound in ticks; None if nothing was proved.
    """

    start: list[int] | None
    bound: int | None
    answer: Answer


def shortest(
    shop: JobShop,
    solver: Solver,
    seconds: float,
    horizon: int,
    bound: int = 0,
    start: Sequence[int] | None = None,
) -> ExactResult:
    """The shortest schedule of at most ``horizon`` ticks, none being shorter than ``bound``.

    ``start``: start times of a schedule within the horizon to begin with.
    """
    began = processor_s()
    model = time_indexed(shop, horizon, max(bound, _least(shop)))
    if model is None:
        return ExactResult(None, horizon + 1, Answer(Status.INFEASIBLE, None, False, 0.0))
    if start is not None:
        _set(shop, model, start, horizon)
    left = seconds - (processor_s() - began)
    answer = solve_model(model, solver, left, warm=start is not None)
    found = _starts(shop, model, horizon) if answer.has_values else None
    proved = None
    if answer.status is Status.INFEASIBLE:
        proved = horizon + 1
    elif answer.bound is not None:
        proved = math.ceil(answer.bound - 1e-6)
    return ExactResult(found, proved, answer)


def time_indexed(shop: JobShop, horizon: int, bound: int) -> Any:
    """Build the model above; None if the windows alone show that ``horizon`` is too short."""
    import pyomo.environ as pyo  # type: ignore[import-untyped]

    count, classes = shop.num_microbatches, range(shop.num_classes)
    period = [shop.duration[k * count] for k in classes]
    first, last = windows(shop, horizon)
    if any(a > b for a, b in zip(first, last, strict=True)):
        return None
    ends = [k for k in classes if k not in _sources(shop)]
    model = pyo.ConcreteModel()
    index = [
        (k, t) for k in classes for t in range(first[k * count], last[k * count + count - 1] + 1)
    ]
    model.X = pyo.Var(index, domain=pyo.NonNegativeIntegers)

    def started(k: int, t: int) -> Any:
        """X[k, t], or its value before and after its window."""
        if t < first[k * count]:
            return 0
        return count if t > last[k * count + count - 1] else model.X[k, t]

    for k in classes:
        mine = range(k * count, (k + 1) * count)
        for t in range(first[mine[0]], last[mine[-1]] + 1):
            low, high = sum(last[i] <= t for i in mine), sum(first[i] <= t for i in mine)
            model.X[k, t].setlb(low)
            model.X[k, t].setub(high)
            if low == high:
                model.X[k, t].fix(low)
    model.rows = pyo.ConstraintList()

    def require(low: Any, high: Any) -> None:
        """Add low <= high, unless the row holds without any free variable."""
        row = low <= high
        if row is False:
            row = pyo.Constraint.Infeasible
        if row is not True and not (
            hasattr(row, "args") and all(_known(a) for a in row.args) and pyo.value(row)
        ):
            model.rows.add(row)

    for k in classes:
        for t in range(first[k * count], last[k * count + count - 1] + 1):
            require(started(k, t - 1), started(k, t))
            for j, lag in shop.before[k * count]:
                source = j // count
                require(started(k, t), started(source, t - period[source] - lag))
    for d in range(len(shop.cap)):
        line = shop.classes_of(d)
        change, cap = memory(shop, d)
        for t in range(horizon):
            require(sum(started(k, t) - started(k, t - period[k]) for k in line), 1)
            if any((k, t) in model.X for k, more in change.items() if more > 0):
                live = (
                    more * started(k, t if more > 0 else t - period[k])
                    for k, more in change.items()
                )
                require(sum(live), cap)
    model.done = pyo.Var(range(bound, horizon), domain=pyo.Binary)
    for t in range(bound, horizon):
        for k in ends:
            mine = range(k * count, (k + 1) * count)
            low = sum(last[i] <= t - period[k] for i in mine)
            require((count - low) * model.done[t], started(k, t - period[k]) - low)
        if t > bound:
            require(model.done[t - 1], model.done[t])
    model.length = pyo.Objective(expr=horizon - sum(model.done.values()))
    return model


def memory(shop: JobShop, device: int) -> tuple[dict[int, float], float]:
    """Change of memory in use by each class of a device, and the cap, scaled for solvers."""
    cap, count = shop.cap[device], shop.num_microbatches
    own = {k: shop.delta[k * count] for k in shop.classes_of(device) if shop.delta[k * count]}
    if cap <= EXACT_MEMORY:
        return {k: float(d) for k, d in own.items()}, float(cap)
    return {k: d * EXACT_MEMORY / cap for k, d in own.items()}, EXACT_MEMORY + 1e-6


def windows(shop: JobShop, horizon: int) -> tuple[list[int], list[int]]:
    """Earliest and latest start of every operation of a schedule of ``horizon`` ticks.

    They follow from the operations before and after: the chain of its microbatch, and its class on
    earlier and later microbatches.
    """
    first = _heads(shop)
    tails = _heads(shop.mirrored())
    return first, [horizon - tail - p for tail, p in zip(tails, shop.duration, strict=True)]


def _heads(shop: JobShop) -> list[int]:
    """Earliest start of each operation by precedence alone."""
    head = [-1] * len(shop.duration)
    for root in range(len(head)):
        stack = [root]
        while stack:
            i = stack[-1]
            missing = [j for j, _ in shop.before[i] if head[j] < 0]
            if missing:
                stack += missing
                continue
            stack.pop()
            head[i] = max(
                (head[j] + shop.duration[j] + lag for j, lag in shop.before[i]), default=0
            )
    return head


def _least(shop: JobShop) -> int:
    """Length of the longest chain."""
    return max(h + p for h, p in zip(_heads(shop), shop.duration, strict=True))


def _sources(shop: JobShop) -> set[int]:
    """Classes whose result another class takes."""
    count = shop.num_microbatches
    return {j // count for k in range(shop.num_classes) for j, _ in shop.before[k * count]}


def _known(expression: Any) -> bool:
    """True if an expression has no free variable."""
    from pyomo.core.expr.visitor import identify_variables  # type: ignore[import-untyped]

    if not hasattr(expression, "is_expression_type"):
        return True
    return next(identify_variables(expression, include_fixed=False), None) is None


def _set(shop: JobShop, model: Any, start: Sequence[int], horizon: int) -> None:
    """Set the variables to the values of a schedule."""
    count = shop.num_microbatches
    for k, t in model.X:
        if not model.X[k, t].fixed:
            begun = sum(start[i] <= t for i in range(k * count, (k + 1) * count))
            model.X[k, t].set_value(begun, True)
    length = shop.makespan(start)
    for t in model.done:
        model.done[t].set_value(int(t >= length))


def _starts(shop: JobShop, model: Any, horizon: int) -> list[int]:
    """Start times from the values of the variables."""
    count = shop.num_microbatches
    last = windows(shop, horizon)[1]
    start = []
    for k in range(shop.num_classes):
        counts = {t: round(model.X[j, t].value) for j, t in model.X if j == k}
        for m in range(count):
            start.append(min((t for t, x in counts.items() if x > m), default=last[k * count + m]))
    return start
