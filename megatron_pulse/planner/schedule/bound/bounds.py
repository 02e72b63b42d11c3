"""Lower bounds on the makespan of every schedule of a problem.

===============  ===========================================================================
device_bound     a device's first start, its whole load, and what must follow its last end
one_machine...   the same per operation: starts no earlier than what must run before lets it,
                 ends early enough for what must follow; the best preemptive order (Jackson)
memory_bound     memory times time is at least what the activations' shortest lives need (Little)
order_bound      per operation too, in the best order that keeps the device's memory
exhaustive       every order of all devices' operations, of small problems (``exhaustive``)
===============  ===========================================================================

In a cascade each chain has these bounds alone, and a device's preemptive order takes the operations
of all chains. See ../README.md: Lower bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np

from megatron_pulse.planner.schedule.bound.microbatch_path import MicrobatchPath
from megatron_pulse.planner.schedule.bound.order_bound import BOUND_WORK, classes_of, order_bound
from megatron_pulse.planner.schedule.jit import compiled
from megatron_pulse.planner.schedule.problem import ScheduleProblem, require_problem


def lower_bound(
    problem: ScheduleProblem, work: float = BOUND_WORK, until: float = math.inf
) -> float:
    """Lower bound on the makespan of every schedule, in the problem's unit of time.

    The result is the best of the bounds above except ``exhaustive``. ``order_bound`` is limited by
    ``work`` (0: left out) and ``until`` (of ``time.process_time``). Each activation counts with its
    least size throughout.
    """
    require_problem("lower_bound", problem)
    problem = problem.with_least_memory
    if problem.recompute_s is not None:
        rest = problem.without_recomputation
        each = map(problem.chain, range(len(problem.placement.starts)))
        return max(lower_bound(rest, work, until), *map(device_bound, each))
    if (chains := len(problem.placement.starts)) > 1:
        alone = [problem.chain(number) for number in range(chains)]
        together = _preemptive(list(map(MicrobatchPath, alone)))
        return max(together, *(lower_bound(chain, work / chains, until) for chain in alone))
    path = MicrobatchPath(problem)
    bounds = (device_bound, one_machine_bound, memory_bound)
    quick = max(bound(problem, path) for bound in bounds)
    return order_bound(path, quick, work, until) if work > 0 else quick


def device_bound(problem: ScheduleProblem, path: MicrobatchPath | None = None) -> float:
    """max over devices of first start + load of all microbatches + least time that follows.

    Nothing follows a weight gradient, which may come last. Each run of a device's classes therefore
    counts two ways: without weight gradients and with the following time, and with weight gradients
    alone. Recomputation counts as load if the run contains the forward, which comes before it. It
    delays no other device, because it can run while a gradient is awaited.
    """
    path = path or MicrobatchPath(problem.without_recomputation)
    count, again = problem.num_microbatches, _recomputed_within(problem)
    return max(
        path.first[a]
        + count * again(a, b)
        + max(count * load + min(path.last[a : b + 1]), count * whole)
        for a, b, load, whole in path.runs
    )


def _recomputed_within(problem: ScheduleProblem) -> Callable[[int, int], float]:
    """Recomputation time of a device, for stages with forward and backward in positions a to b."""
    recompute, num = problem.recompute_s, problem.placement.num_stages
    if recompute is None:
        return lambda a, b: 0.0
    home = problem.placement.device_of_stage
    ends = [(s, 2 * num - 1 - s, home[s], seconds) for s, seconds in enumerate(recompute)]

    def within(a: int, b: int) -> float:
        device = home[a if a < num else 2 * num - 1 - a]
        return sum(s for there, back, of, s in ends if of == device and a <= there and back <= b)

    return within


def last_gradients(
    problem: ScheduleProblem, path: MicrobatchPath | None = None
) -> tuple[float, ...]:
    """Earliest start of the operation that completes the gradients of each stage.

    The operation is the last microbatch's backward, or weight gradient. By then the stage has done
    all earlier ones of its kind, and the microbatch has queued behind the earlier ones wherever it
    ran.
    """
    path = path or MicrobatchPath(problem.without_recomputation)
    count, num = problem.num_microbatches, problem.placement.num_stages
    starts = []
    for s in range(num):
        back = 2 * num - 1 - s
        before = (count - 1) * (path.time[back] + path.weight[back])
        own = path.time[back] if problem.weight_grad else 0.0
        queue = (count - 1) * max(path.time[: back + 1])
        starts.append(
            own
            + max(
                path.first[back] + max(before, queue),
                path.first[s] + count * path.time[s] + before,
            )
        )
    return tuple(starts)


def one_machine_bound(problem: ScheduleProblem, path: MicrobatchPath | None = None) -> float:
    """max over devices of the shortest preemptive order under heads and tails of each operation."""
    return _preemptive([path or MicrobatchPath(problem)])


def _preemptive(paths: Sequence[MicrobatchPath]) -> float:
    """``one_machine_bound`` of the microbatches of all paths together."""
    bound = 0.0
    for device in range(paths[0].problem.placement.num_devices):
        jobs = []
        for path in paths:
            classes = classes_of(path, device)
            time = np.broadcast_to(classes.time[:, None], classes.head.shape)
            jobs.append(np.stack((classes.head, time, classes.tail), axis=-1).reshape(-1, 3))
        bound = max(bound, jackson(np.concatenate(jobs)))
    return bound


def memory_bound(problem: ScheduleProblem, path: MicrobatchPath | None = None) -> float:
    """max over devices with a cap: first start + shares of the cap times lifetimes + what follows.

    An activation lives at least from the start of its forward to the end of the operation that
    frees it. From its input gradient on it takes its weight-gradient queue bytes. Only the part of
    a cap that whole activations can fill counts. Source: Little's law.
    """
    problem = problem.with_least_memory
    if problem.cap is None:
        return 0.0
    path = path or MicrobatchPath(problem)
    num = problem.placement.num_stages
    bound = 0.0
    for device, cap in enumerate(problem.cap):
        if not cap:
            continue
        stages = problem.placement.stages_of_device(device)
        sizes = [(problem.activation_of(s), problem.wgrad_bytes_of(s)) for s in stages]
        cap = filled(cap, [size for both in sizes for size in both])
        need = 0.0
        for s, (own, waiting) in zip(stages, sizes, strict=True):
            back = 2 * num - 1 - s
            need += own / cap * (path.first[back] - path.first[s])
            need += max(own, waiting) / cap * path.time[back] + waiting / cap * path.weight[back]
        follows = 0.0 if problem.weight_grad else path.last[2 * num - 1 - stages[0]]
        bound = max(bound, path.first[stages[0]] + problem.num_microbatches * need + follows)
    return bound


def filled(cap: float, sizes: Sequence[float]) -> float:
    """Largest part of ``cap`` that whole activations of these sizes can fill.

    All of ``cap`` counts if there are more than two sizes, or room for more than 64.
    """
    first, *others = sorted({size for size in sizes if size > 0}, reverse=True) or [0.0]
    cap *= 1 + 1e-9  # tolerance by which a schedule may exceed it
    if len(others) > 1 or not 0 < cap <= 64 * first:
        return cap
    each = others[0] if others else math.inf
    counts = range(math.floor(cap / first) + 1)
    return max(n * first + ((cap - n * first) // each * each if others else 0.0) for n in counts)


def jackson(jobs: Sequence[Sequence[float]] | Any) -> float:
    """Shortest preemptive one-machine schedule of (head, time, tail): longest tail first."""
    rows: Any = np.asarray(jobs, dtype=np.float64).reshape(-1, 3)
    return float(_jackson(rows[np.lexsort(rows.T[::-1])]))


@compiled
def _jackson(todo: Any) -> float:
    """``jackson`` of rows sorted by head."""
    waiting = [(0.0, 0.0)]
    waiting.pop()
    now = makespan = 0.0
    at, count = 0, len(todo)
    while at < count or len(waiting) > 0:
        if len(waiting) == 0:
            now = max(now, todo[at, 0])
        while at < count and todo[at, 0] <= now:
            heappush(waiting, (-todo[at, 2], todo[at, 1]))
            at += 1
        tail, left = heappop(waiting)
        arrival = todo[at, 0] if at < count else np.inf
        if now + left > arrival:
            heappush(waiting, (tail, left - (arrival - now)))
            now = arrival
        else:
            now += left
            makespan = max(makespan, now - tail)
    return makespan
