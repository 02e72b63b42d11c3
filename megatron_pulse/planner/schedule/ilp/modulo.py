"""Periodic schedules: the start times of one microbatch, repeated every period.

In the steady state of a long step device d runs each of its classes once per period II. Class k of
d, with duration p_k, starts at sigma_k = sigma_r + delta_k + II q_k. Here r is d's first class, 0
<= delta_k <= II - p_k is the position in the period, and q_k >= 0 counts whole periods. y_jk = 1 if
j comes before k in the period of their device (r before all).

    delta_k >= delta_j + p_j - II (1 - y_jk)                 one operation at a time
    delta_k >= p_r + sum_j p_j y_jk                          the decisive cuts: what is before k
    delta_k + p_k + sum_j p_j y_kj <= II                     and after it must fit
    sigma_k >= sigma_j + p_j + lag                           data flow
    sum over classes k of d, which change what is in use by a_k, of
        a_k (microbatches of k started) <= A_d at every start of a class of d that takes memory

Let G be a class that takes memory, at its start in period n of r. Of a class k before G (or G
itself) n - q_k + 1 microbatches have started, of others n - q_k. So the sum is linear in q and y.
See ../README.md: Search.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from megatron_pulse.planner.schedule.ilp.solvers import Answer, Solver, processor_s, solve_model
from megatron_pulse.planner.schedule.ilp.time_indexed import memory
from megatron_pulse.planner.schedule.search.jobshop import JobShop
from megatron_pulse.planner.schedule.search.template import Template, faults


class SolverObjective(StrEnum):
    """Objective of the model."""

    LATENCY = "end of a microbatch that starts at 0, within the caps"
    FIT = "largest memory in units of the device's cap, down to 1"


def fitting(
    shop: JobShop,
    solver: Solver,
    seconds: float,
    ended: Callable[[Answer], None] = lambda answer: None,
) -> list[Template]:
    """Templates within the caps, the best first; empty where none was found in ``seconds``.

    The period is bisected between the largest device load, which is tried first, and one microbatch
    at a time. Then the template of the shortest period is shortened as far as time allows.
    ``seconds`` are of the processor; ``ended`` is told how each call did.
    """
    began = processor_s()
    low, high = shop.most_load, _latency(shop)
    found: list[Template] = []
    guess = low

    def left() -> float:
        return seconds - (processor_s() - began)

    while low <= high and left() > MINIMUM_S:
        model = modulo(shop, guess, SolverObjective.FIT)
        share = seconds * (FIRST_SHARE if guess == shop.most_load else SHARE)
        answer = solve_model(model, solver, min(left(), max(MINIMUM_S, share)))
        ended(answer)
        if answer.has_values and not faults(shop, template := template_of(shop, model, guess)):
            found.insert(0, template)
            high = guess - 1
        else:
            low = guess + 1
        # A fourth, not half, because periods near the least possible are likely.
        guess = low + (high - low) // 4
    if found and left() > MINIMUM_S:
        period = found[0].period
        model = modulo(shop, period, SolverObjective.LATENCY)
        answer = solve_model(model, solver, left())
        ended(answer)
        if answer.has_values and not faults(shop, template := template_of(shop, model, period)):
            found.insert(0, template)
    return found


MINIMUM_S = 0.7
"""Least number of seconds for which a solver is called."""

FIRST_SHARE, SHARE = 0.6, 0.2
"""Shares of the time for the least period that the loads allow, and for any other."""


def _latency(shop: JobShop) -> int:
    heads = shop.heads()
    count = shop.num_microbatches
    return max(h + shop.duration[k * count] for k, h in enumerate(heads))


def modulo(shop: JobShop, period: int, aim: SolverObjective) -> Any:
    """Build the model above."""
    import pyomo.environ as pyo  # type: ignore[import-untyped]

    count, classes = shop.num_microbatches, range(shop.num_classes)
    p = [shop.duration[k * count] for k in classes]
    longest = 3 * _latency(shop) + 3 * period
    most = longest // period
    model = pyo.ConcreteModel()
    model.sigma = pyo.Var(classes, bounds=(0, longest))
    model.delta = pyo.Var(classes, bounds=lambda _, k: (0, period - p[k]))
    model.q = pyo.Var(classes, domain=pyo.NonNegativeIntegers, bounds=(0, most))
    lines = [shop.classes_of(d) for d in range(len(shop.cap))]
    inner = [(j, k) for line in lines for j in line[1:] for k in line[1:] if j < k]
    model.y = pyo.Var(inner, domain=pyo.Binary)
    model.rows = pyo.ConstraintList()
    model.memory = pyo.Var(bounds=(1, None))

    def before(j: int, k: int) -> Any:
        """1 if j comes before k in the period of their device."""
        return model.y[j, k] if j < k else 1 - model.y[k, j]

    for line in lines:
        root, others = line[0], line[1:]
        model.delta[root].fix(0)
        model.q[root].fix(0)
        for k in others:
            rest = [j for j in others if j != k]
            model.rows.add(
                model.sigma[k] == model.sigma[root] + model.delta[k] + period * model.q[k]
            )
            model.rows.add(model.delta[k] >= p[root] + sum(p[j] * before(j, k) for j in rest))
            model.rows.add(model.delta[k] + p[k] + sum(p[j] * before(k, j) for j in rest) <= period)
            for j in rest:
                model.rows.add(
                    model.delta[k] >= model.delta[j] + p[j] - period * (1 - before(j, k))
                )
    for k in classes:
        for j, lag in shop.before[k * count]:
            source = j // count
            model.rows.add(model.sigma[k] >= model.sigma[source] + p[source] + lag)
    for d, line in enumerate(lines):
        change, room = memory(shop, d)
        for g in (k for k, more in change.items() if more > 0):
            # 1 if class k has started in the period by the start of g, inclusive
            here = {
                k: 1 if k in (g, line[0]) else 0 if g == line[0] else before(k, g) for k in line
            }
            live = sum(more * (here[k] - model.q[k]) for k, more in change.items())
            if aim is SolverObjective.LATENCY:
                model.rows.add(live <= room)
            else:
                model.rows.add(live <= room * model.memory)
    if aim is SolverObjective.LATENCY:
        model.end = pyo.Var(bounds=(0, None))
        for k in classes:
            model.rows.add(model.end >= model.sigma[k] + p[k])
    model.goal = pyo.Objective(expr=model.end if aim is SolverObjective.LATENCY else model.memory)
    return model


def template_of(shop: JobShop, model: Any, period: int) -> Template:
    """Template of the variables' values, with exact starts.

    The order within the period and the counts of periods fix the starts up to a system of
    difference constraints. The least solution is taken, because solvers' values are only near
    integers.
    """
    count, classes = shop.num_microbatches, range(shop.num_classes)
    p = [shop.duration[k * count] for k in classes]
    edges: list[tuple[int, int, int]] = []  # start[b] >= start[a] + least
    for k in classes:
        for j, lag in shop.before[k * count]:
            edges.append((j // count, k, p[j // count] + lag))
    for d in range(len(shop.cap)):
        line = shop.classes_of(d)
        order = sorted(line, key=lambda k: (model.delta[k].value or 0.0, k != line[0]))
        q = {k: round(model.q[k].value) for k in line}
        for a, b in zip(order, order[1:], strict=False):
            edges.append((a, b, p[a] + period * (q[b] - q[a])))
        a, b = order[-1], order[0]
        edges.append((a, b, p[a] + period * (q[b] - q[a] - 1)))
    start = [0] * len(classes)
    for _ in range(len(classes) + 1):
        moved = False
        for a, b, least in edges:
            if start[a] + least > start[b]:
                start[b], moved = start[a] + least, True
        if not moved:
            return Template(period, tuple(start))
    raise ArithmeticError("a solver's periodic schedule does not close")
