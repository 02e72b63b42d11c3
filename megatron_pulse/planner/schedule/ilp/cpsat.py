"""The scheduling problem for CP-SAT (OR-Tools): an interval for every operation.

Microbatches run in order, and operations of a device do not overlap. With a cap every activation is
a task, from the start of its forward to the end of the operation that frees it. All tasks together
stay within the cap. An activation that changes size at its input gradient has a second task for the
difference.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from megatron_pulse.planner.schedule.ilp.solvers import LATE, Answer, Status
from megatron_pulse.planner.schedule.ilp.time_indexed import ExactResult, windows
from megatron_pulse.planner.schedule.search.jobshop import JobShop

WORK_A_SECOND = 0.08
"""CP-SAT's own units of work in a second of the processor: between 0.04 and 0.2 were measured."""

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
    threads: int = 1,
) -> ExactResult:
    """The shortest schedule of at most ``horizon`` ticks; as ``time_indexed.shortest``.

    ``seconds`` are counted as work, by ``WORK_A_SECOND``. With one thread the result is always the
    same, unless the wall clock ends the solver after ``LATE`` times as many seconds.
    """
    from ortools.sat.python import cp_model

    began = time.process_time()
    count = shop.num_microbatches
    first, last = windows(shop, horizon)
    if any(a > b for a, b in zip(first, last, strict=True)):
        return ExactResult(None, horizon + 1, Answer(Status.INFEASIBLE, None, False, 0.0))
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
    solver.parameters.num_workers = threads
    solver.parameters.random_seed = 0
    seconds = max(0.05, seconds)
    solver.parameters.max_deterministic_time = WORK_A_SECOND * seconds
    solver.parameters.max_time_in_seconds = LATE * seconds
    code = solver.solve(model)
    meaning: dict[object, Status] = {
        cp_model.OPTIMAL: Status.OPTIMAL,
        cp_model.FEASIBLE: Status.FEASIBLE,
        cp_model.INFEASIBLE: Status.INFEASIBLE,
        cp_model.UNKNOWN: Status.TIME_LIMIT,
    }
    status = meaning.get(code, Status.FAILED)
    late = status is not Status.OPTIMAL and solver.wall_time >= LATE * seconds
    spent = time.process_time() - began
    if status in (Status.OPTIMAL, Status.FEASIBLE):
        proved = round(solver.best_objective_bound)
        answer = Answer(status, proved, True, spent, late=late)
        return ExactResult([solver.value(t) for t in begin], proved, answer)
    proved_length = horizon + 1 if status is Status.INFEASIBLE else None
    return ExactResult(None, proved_length, Answer(status, None, False, spent, late=late))


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
