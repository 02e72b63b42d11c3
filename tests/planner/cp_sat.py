"""Oracle: the scheduling problem for CP-SAT (OR-Tools), an interval for every operation.

Microbatches run in order, and operations of a device do not overlap. With a cap every activation is
a task, from the start of its forward to the end of the operation that frees it. All tasks together
stay within the cap. An activation that changes size at its input gradient has a second task for the
difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ortools.sat.python import cp_model

from megatron_pulse.planner.schedule.ilp.solvers import Status
from megatron_pulse.planner.schedule.ilp.time_indexed import ExactResult, windows
from megatron_pulse.planner.schedule.search.jobshop import JobShop

MEMORY_BITS = 40
"""Number of bits to which units of memory are cut, rounding in favour of fitting.

Sums then stay integers of 64 bits.
"""


def shortest_by_cp_sat(
    shop: JobShop,
    seconds: float,
    horizon: int,
    bound: int = 0,
    start: Sequence[int] | None = None,
) -> ExactResult:
    """The shortest schedule of at most ``horizon`` ticks; as ``time_indexed.shortest``."""
    count = shop.num_microbatches
    first, last = windows(shop, horizon)
    if any(a > b for a, b in zip(first, last, strict=True)):
        return ExactResult(None, horizon + 1, Status.INFEASIBLE)
    model = cp_model.CpModel()
    begin = [
        model.new_int_var(a, b, f"s{i}") for i, (a, b) in enumerate(zip(first, last, strict=True))
    ]
    task = [
        model.new_fixed_size_interval_var(t, p, f"i{i}")
        for i, (t, p) in enumerate(zip(begin, shop.duration, strict=True))
    ]
    for i, edges in enumerate(shop.before):
        for j, lag in edges:
            model.add(begin[i] >= begin[j] + shop.duration[j] + lag)
    for d, cap in enumerate(shop.cap):
        mine = [k * count + m for k in shop.classes_of(d) for m in range(count)]
        model.add_no_overlap([task[i] for i in mine])
        shift = max(0, cap.bit_length() - MEMORY_BITS)
        held, demands = [], []
        for i, j, takes in _lives(shop, d):
            life = model.new_int_var(0, horizon, f"l{i}")
            end = begin[j] + shop.duration[j]
            held.append(model.new_interval_var(begin[i], life, end, f"h{i}-{j}"))
            demands.append(takes >> shift)
        if sum(demands) > cap >> shift:
            model.add_cumulative(held, demands, -(-cap >> shift))
    length = model.new_int_var(bound, horizon, "length")
    for begun, p in zip(begin, shop.duration, strict=True):
        model.add(length >= begun + p)
    model.minimize(length)
    if start is not None:
        for variable, t in zip(begin, start, strict=True):
            model.add_hint(variable, t)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = seconds
    code = solver.solve(model)
    if code in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        status = Status.OPTIMAL if code == cp_model.OPTIMAL else Status.FEASIBLE
        found = [solver.value(t) for t in begin]
        return ExactResult(found, round(solver.best_objective_bound), status)
    if code == cp_model.INFEASIBLE:
        return ExactResult(None, horizon + 1, Status.INFEASIBLE)
    return ExactResult(None, None, Status.TIME_LIMIT)


def _lives(shop: JobShop, device: int) -> Iterator[tuple[int, int, int]]:
    """Memory tasks of a device: operation at whose start each begins, one at whose end it ends,
    size."""
    count, num = shop.num_microbatches, shop.placement.num_stages
    for s in shop.placement.stages_of_device(device):
        for m in range(count):
            first, back, last = (
                k * num * count + s * count + m for k in (0, 1, len(shop.kinds) - 1)
            )
            taken, left = shop.delta[first], -shop.delta[last]
            yield first, last, min(taken, left)
            if taken > left:
                yield first, back, taken - left
            elif taken < left:
                yield back, last, left - taken
