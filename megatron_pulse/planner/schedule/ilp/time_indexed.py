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

from megatron_pulse.planner.schedule.ilp.solvers import Answer, Solver, Status, minimize
from megatron_pulse.planner.schedule.search.jobshop import JobShop

EXACT_MEMORY = 10_000
"""Number of units up to which memory is exact; more are scaled to it, with a small tolerance."""


@dataclass(frozen=True)
class ExactResult:
    """Start of every operation of the shop, if any was found, and how the solver ended.

    ``bound`` is a lower bound in ticks; None if nothing was proved.
    """

    start: list[int] | None
    bound: int | None
    status: Status


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
    first, last = windows(shop, horizon)
    chains = (horizon + f - t for f, t in zip(first, last, strict=True))
    if (longest := max(chains)) > horizon:
        return ExactResult(None, horizon + 1, Status.INFEASIBLE)
    program = _Program(shop, horizon, max(bound, longest), first, last)
    if start is not None:
        program.begin_with(start)
    answer = minimize(program.model, solver, seconds, warm=start is not None)
    return program.result(answer)


def windows(shop: JobShop, horizon: int) -> tuple[list[int], list[int]]:
    """Earliest and latest start of every operation of a schedule of ``horizon`` ticks.

    They follow from the operations before and after: the chain of its microbatch, and its class on
    earlier and later microbatches.
    """
    count, heads, duration = shop.num_microbatches, shop.heads(), shop.duration
    order = sorted(range(len(duration)), key=lambda i: (heads[i // count], i % count))
    first, tail = [0] * len(order), [0] * len(order)
    for i in order:
        ready = (first[j] + duration[j] + lag for j, lag in shop.before[i])
        first[i] = max(ready, default=0)
    for i in reversed(order):
        for j, lag in shop.before[i]:
            tail[j] = max(tail[j], lag + duration[i] + tail[i])
    return first, [horizon - t - p for t, p in zip(tail, duration, strict=True)]


class _Program:
    """Pyomo model of a shop whose operations start from ``first`` to ``last``.

    A variable exists only where a class's count is open.
    """

    def __init__(
        self, shop: JobShop, horizon: int, bound: int, first: Sequence[int], last: Sequence[int]
    ) -> None:
        import pyomo.environ as pyo  # type: ignore[import-untyped]

        self.shop, self.horizon = shop, horizon
        count, classes = shop.num_microbatches, range(shop.num_classes)
        self.first = [first[k * count : (k + 1) * count] for k in classes]
        self.last = [last[k * count : (k + 1) * count] for k in classes]
        self.period = [shop.duration[k * count] for k in classes]
        ranges = {
            (k, t): (sum(b <= t for b in self.last[k]), sum(a <= t for a in self.first[k]))
            for k in classes
            for t in range(self.first[k][0], self.last[k][-1])
        }
        self.known = {at: low for at, (low, high) in ranges.items() if low == high}
        model = self.model = pyo.ConcreteModel()
        model.X = pyo.Var(
            [at for at in ranges if at not in self.known],
            domain=pyo.NonNegativeIntegers,
            bounds=lambda _, k, t: ranges[k, t],
        )
        model.done = pyo.Var(range(bound, horizon), domain=pyo.Binary)
        model.length = pyo.Objective(expr=horizon - sum(model.done.values()))
        model.rows = pyo.ConstraintList()
        for k in classes:
            self._follow(k)
        for d in range(len(shop.cap)):
            self._share(d)
        sources = {j // count for k in classes for j, _ in shop.before[k * count]}
        for t in model.done:
            for k in (k for k in classes if k not in sources):
                low = sum(b <= t - self.period[k] for b in self.last[k])
                self._require((count - low) * model.done[t], self._ended(k, t) - low)
            if t > bound:
                self._require(model.done[t - 1], model.done[t])

    def begin_with(self, start: Sequence[int]) -> None:
        """Set the variables to the values of a schedule."""
        count, length = self.shop.num_microbatches, self.shop.makespan(start)
        for (k, t), variable in self.model.X.items():
            variable.set_value(sum(s <= t for s in start[k * count : (k + 1) * count]), True)
        for t, variable in self.model.done.items():
            variable.set_value(int(t >= length))

    def result(self, answer: Answer) -> ExactResult:
        """Start times from the values of the variables, and the bound."""
        if answer.status is Status.INFEASIBLE:
            return ExactResult(None, self.horizon + 1, answer.status)
        proved = None if answer.bound is None else math.ceil(answer.bound - 1e-6)
        if answer.status is Status.TIME_LIMIT:
            return ExactResult(None, proved, answer.status)
        values = {at: round(variable.value) for at, variable in self.model.X.items()} | self.known
        start = [
            next(t for t in range(f, b + 1) if t == b or values.get((k, t), 0) > m)
            for k, (firsts, lasts) in enumerate(zip(self.first, self.last, strict=True))
            for m, (f, b) in enumerate(zip(firsts, lasts, strict=True))
        ]
        return ExactResult(start, proved, answer.status)

    def _follow(self, k: int) -> None:
        """Counts of class k never fall, nor pass those of the class that it waits for."""
        sources = self.shop.before[k * self.shop.num_microbatches]
        for t in range(self.first[k][0], self.last[k][-1] + 1):
            self._require(self._started(k, t - 1), self._started(k, t))
            for j, lag in sources:
                source = j // self.shop.num_microbatches
                self._require(self._started(k, t), self._ended(source, t - lag))

    def _share(self, d: int) -> None:
        """Device d runs one operation at a time, within its memory."""
        shop, line = self.shop, self.shop.classes_of(d)
        change: dict[int, float] = {k: shop.delta[k * shop.num_microbatches] for k in line}
        cap: float = shop.cap[d]
        if cap > EXACT_MEMORY:
            change = {k: more * EXACT_MEMORY / cap for k, more in change.items()}
            cap = EXACT_MEMORY + 1e-6
        for t in range(self.horizon):
            begun = {k: self._started(k, t) for k in line}
            ended = {k: self._ended(k, t) for k in line}
            self._require(sum(begun[k] - ended[k] for k in line), 1)
            live = (a * (begun if a > 0 else ended)[k] for k, a in change.items() if a)
            self._require(sum(live), cap)

    def _started(self, k: int, t: int) -> Any:
        """X[k, t], or its value where only one is possible."""
        if t < self.first[k][0]:
            return 0
        if t >= self.last[k][-1]:
            return self.shop.num_microbatches
        return self.known[k, t] if (k, t) in self.known else self.model.X[k, t]

    def _ended(self, k: int, t: int) -> Any:
        return self._started(k, t - self.period[k])

    def _require(self, low: Any, high: Any) -> None:
        """Add low <= high, unless it holds for constants."""
        import pyomo.environ as pyo

        row = low <= high
        if row is not True:
            self.model.rows.add(pyo.Constraint.Infeasible if row is False else row)
