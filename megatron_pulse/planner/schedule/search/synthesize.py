"""Constructive search for the shortest schedule, for any placement, times and memory; no solver.

The search runs these methods in order:

* the classic schedules that fit;
* bounded dynamic programming (``sweep``), which is exhaustive if memory is small;
* templates and list schedules by static rules, each compacted by ``improve``;
* swaps on the critical path (``anneal``).

See ../README.md: Search. On the fold the result is PULSE's wave:

P = 2, M = 2, equal stages, forward = backward = 1 (stage:microbatch; 10 slots)

========= ==== ==== ==== ==== ==== ==== ==== ==== ==== ====
device 0  F0:0 F0:1 .    F3:0 B3:0 F3:1 B3:1 B0:0 .    B0:1
device 1  .    F1:0 F2:0 F1:1 F2:1 B2:0 B1:0 B2:1 B1:1 .
========= ==== ==== ==== ==== ==== ==== ==== ==== ==== ====
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np

from megatron_pulse.planner.layout.placement import Placement, fold
from megatron_pulse.planner.schedule.bound.bounds import device_bound, lower_bound
from megatron_pulse.planner.schedule.bound.exhaustive import exhaustive_bound
from megatron_pulse.planner.schedule.bound.microbatch_path import MicrobatchPath
from megatron_pulse.planner.schedule.bound.order_bound import BOUND_WORK
from megatron_pulse.planner.schedule.classic.catalog import CLASSICS, SPLIT
from megatron_pulse.planner.schedule.jit import compiling
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.passes.insert_offload import with_offload
from megatron_pulse.planner.schedule.passes.insert_recompute import with_recomputation
from megatron_pulse.planner.schedule.problem import Certificate, ScheduleProblem, Synthesis
from megatron_pulse.planner.schedule.search.anneal import anneal
from megatron_pulse.planner.schedule.search.beam import beam_templates
from megatron_pulse.planner.schedule.search.compaction import improve
from megatron_pulse.planner.schedule.search.dp import (
    BEHIND,
    GrowingSweeps,
    max_in_flight_microbatches,
)
from megatron_pulse.planner.schedule.search.jobshop import exact_time, job_shop
from megatron_pulse.planner.schedule.search.seeds import starts, steady_templates

MOST_STARTS = 250
"""Largest effort without effort or time limit."""

LARGE = 5000
"""Number of operations from which annealing begins cold: there is no time to cool down."""

ROUNDS = (
    (0.4, 1.0, (4.0, 16.0)),
    (0.4, 0.5, (1.0, 1.0)),
    (0.6, 0.25, (1.0, 2.0)),
    (1.0, 0.05, (4.0, 16.0)),
)
"""Rounds of annealing: share of the rest, first temperature, prices of missing memory.

A high price keeps the search near feasible orders; a low price lets it cross infeasible ones.
"""

log = logging.getLogger(__name__)


def synthesize(
    problem: ScheduleProblem,
    seconds: float = 10.0,
    effort: int | None = None,
    bounded: bool = True,
) -> Synthesis:
    """Find a short schedule; it is never longer than a classic one that fits ``problem``.

    Operations of a type on a stage are in microbatch order. The search ends at the lower bound, or
    after ``seconds`` of this process's time. With ``effort``, the number of starts to improve, the
    result does not depend on the clock. Without a time limit (``math.inf``) the size of the problem
    determines the effort.

    Recomputation is part of its backward during the search, and then moves to idle times.
    Activations under offload count as absent during the search, and then leave only where memory
    requires. Unless ``bounded``, the certificate has only a quick bound; the schedule is the same
    if ``effort`` alone ends the search.
    """
    if problem.offload_bytes is not None:
        return with_offload(
            problem, lambda of, part: synthesize(of, part, effort, bounded=bounded), seconds
        )
    if problem.recompute_s is not None:
        within = problem.within_backwards
        found = synthesize(within, seconds, effort, bounded)
        return with_recomputation(problem, found)
    compile_search()
    began = time.process_time()
    if effort is None and seconds == math.inf:
        operations = problem.num_microbatches * problem.placement.num_stages * len(problem.kinds)
        effort = min(MOST_STARTS, max(16, 60_000 // operations))  # a large problem takes seconds
    # From 10 seconds on the bound may take all of its work; on an idle machine it is done long
    # before a fourth of the time.
    share = seconds / 10 if effort is None else max(effort, 5) / MOST_STARTS
    until = math.inf if effort is not None else began + seconds / 4
    search = _ScheduleSearch(problem, BOUND_WORK * min(1.0, share) if bounded else None, until)
    left = seconds - (time.process_time() - began)
    search.spend(_Budget(left, effort))
    if bounded and not search.proved:
        search.try_every_order()
    length, bound = search.length, min(search.bound, search.length)
    certificate = Certificate(
        length, bound, search.proved, "constructive", time.process_time() - began
    )
    return Synthesis(search.best, certificate)


@cache
def compile_search() -> None:
    """Compile the functions that the search runs most, or read them from disk.

    Called before the search, so that compilation takes no search time.
    """
    began = time.process_time()
    problem = ScheduleProblem(fold(1), 1, (1.0, 1.0), (1.0, 1.0))
    with compiling():
        lower_bound(problem)
        shop = job_shop(problem)
        exact_time(problem, shop)(shop.timed(shop.lines(next(starts(shop)))))
        anneal(shop, improve(shop, next(starts(shop))), float)
        beam_templates(shop, shop.most_load)
        next(GrowingSweeps(problem, shop).starts(lambda: math.inf, lambda _: 1.0), None)
    if (spent := time.process_time() - began) > 2:
        log.info("compiled the search for schedules in %.1f s; it is kept on disk", spent)


def classics(problem: ScheduleProblem) -> list[Schedule]:
    """Classic schedules that are valid solutions of ``problem``."""
    found = []
    for name in CLASSICS:
        if (name in SPLIT) != (problem.weight_grad is not None):
            continue
        known = _classic(name, problem.placement, problem.num_microbatches)
        if known is not None and _has_room(problem, known[1]):
            found.append(known[0])
    return found


def _has_room(problem: ScheduleProblem, alive: Sequence[Any]) -> bool:
    """True if no device exceeds its cap (as ``cap_faults``)."""
    if problem.cap is None:
        return True
    for device, (counts, cap) in enumerate(zip(alive, problem.cap, strict=True)):
        own = problem.placement.stages_of_device(device)
        each = np.array([problem.peak_bytes_of(s) for s in own], dtype=np.float64)
        if (counts @ each).max(initial=0.0) > cap * (1 + 1e-9):
            return False
    return True


@lru_cache(maxsize=128)
def _classic(
    name: str, placement: Placement, num_microbatches: int
) -> tuple[Schedule, list[Any]] | None:
    """A classic schedule, validated except for memory, with its live activations per device.

    The activations are arrays: a row per combination that occurs, a column per stage of the device.
    Returns None if the schedule is not for the placement, waits for itself, or has microbatches out
    of order.
    """
    try:
        schedule = CLASSICS[name](placement, num_microbatches)
    except ValueError:
        return None
    each = (1.0,) * placement.num_stages
    split = each if name in SPLIT else None
    shop = job_shop(ScheduleProblem(placement, num_microbatches, each, each, weight_grad=split))
    if not shop.can_run(schedule):
        return None
    alive = []
    for device, order in enumerate(schedule.order):
        column = {s: k for k, s in enumerate(placement.stages_of_device(device))}
        change: Any = np.zeros((len(order), len(column)), dtype=np.int64)
        for i, op in enumerate(order):
            change[i, column[op.stage]] = op.kind.live
        alive.append(np.unique(change.cumsum(axis=0), axis=0))
    return schedule, alive


class _Budget:
    """Remaining time, or remaining number of starts."""

    def __init__(self, seconds: float, effort: int | None) -> None:
        self.effort = effort
        self.deadline = math.inf if effort is not None else time.process_time() + seconds

    @property
    def spent(self) -> bool:
        return time.process_time() >= self.deadline or self.effort == 0

    def take(self) -> None:
        """Count one start."""
        if self.effort is not None:
            self.effort -= 1

    def share(self, part: float) -> _Budget:
        """Split off a part of the rest, at least one start."""
        if self.effort is not None:
            taken = min(self.effort, max(1, int(self.effort * part)))
            self.effort -= taken
            return _Budget(math.inf, taken)
        return _Budget(max(0.0, part * (self.deadline - time.process_time())), None)

    def looks(self) -> Callable[[int], float]:
        """Function from operation starts visited to the number that a sweep may still visit."""
        if self.effort is not None:
            most = 20_000 * self.effort  # about the time of a start
            return lambda done: most - done
        began = time.process_time()

        def left(done: int) -> float:
            now = time.process_time()
            if self.spent:
                return 0.0
            return done * (self.deadline - now) / max(1e-9, now - began) if done else math.inf

        return left

    def progress(self) -> Callable[[int], float]:
        """Progress function of an annealing that takes the whole budget."""
        if self.effort is not None:
            swaps = max(1, 2000 * self.effort)  # about the time of a start
            return lambda done: done / swaps
        began = time.process_time()
        length = max(1e-9, self.deadline - began)
        return lambda _: 1.0 if self.spent else (time.process_time() - began) / length


class _ScheduleSearch:
    """Best schedule so far: length in the problem's unit, start times in ticks."""

    def __init__(
        self, problem: ScheduleProblem, bound_work: float | None, until: float = math.inf
    ) -> None:
        self.problem, self.shop = problem, job_shop(problem)
        at_once = bound_work is None and len(problem.placement.starts) == 1
        self.bound = (
            device_bound(problem) if at_once else lower_bound(problem, bound_work or 0.0, until)
        )
        self.seconds = exact_time(problem, self.shop)
        first = self.shop.lines(next(starts(self.shop)))
        wave, fitting = self.shop.timed(first), classics(problem)
        self.fitting = list(map(self.shop.earliest, fitting))
        begun = [(wave, self.shop.schedule("wave", wave)), *zip(self.fitting, fitting, strict=True)]
        # Rounded to ticks, one of the shortest may be 5 % longer.
        most = 1.05 * min(self.shop.makespan(start) for start, _ in begun)
        near = [each for each in begun if self.shop.makespan(each[0]) <= most]
        reached = [self.seconds(start) for start, _ in near]
        self.length = min(reached)
        self.start, self.best = near[reached.index(self.length)]
        self.ticks = self.shop.makespan(self.start)

    @property
    def proved(self) -> bool:
        """True if no schedule is shorter."""
        return self.length <= self.bound * (1 + 1e-9)

    def try_every_order(self) -> None:
        """Raise the bound of a small problem by exhaustive search, where bounds of single devices
        fail."""
        if len(self.problem.placement.starts) == 1:
            path = MicrobatchPath(self.problem)
            self.bound = max(self.bound, exhaustive_bound(path, self.length))

    def spend(self, budget: _Budget) -> None:
        """Search until the bound is reached or the budget is spent.

        A share is of what remains then.
        """
        self.try_all(self.fitting, None)
        if self.proved or budget.spent:
            return
        sweeps = None
        one_chain = len(self.problem.placement.starts) == 1
        if one_chain and max_in_flight_microbatches(self.shop) <= 8:  # more have too many states
            sweeps = GrowingSweeps(self.problem, self.shop)
            self.sweep(sweeps, budget.share(0.05))
        if self.problem.num_microbatches > 3 * self.problem.placement.num_devices:
            part = budget.share(0.1)
            self.try_all(steady_templates(self.shop, lambda: part.spent), part)
        self.try_all(starts(self.shop), budget.share(0.35 if len(self.start) > LARGE else 0.2))
        if sweeps is not None and sweeps.reached <= BEHIND * self.ticks:
            self.sweep(sweeps, budget.share(0.3))
        for seed, (share, hot, price) in enumerate(ROUNDS):
            if self.proved or budget.spent:
                return
            self.anneal(budget.share(share), seed, hot, price)

    def sweep(self, sweeps: GrowingSweeps, budget: _Budget) -> None:
        """Sweep while there is budget; a complete sweep proves a bound."""
        if not budget.spent:
            self.try_all(sweeps.starts(lambda: self.length, budget.looks()), None)
            self.bound = max(self.bound, sweeps.bound)

    def anneal(self, budget: _Budget, seed: int, hot: float, price: tuple[float, float]) -> None:
        """Anneal the best schedule with the whole budget."""
        goal = math.floor(self.bound * self.ticks / self.length + 1e-6)
        hot = min(hot, ROUNDS[-1][1]) if len(self.start) > LARGE else hot
        self.offer(anneal(self.shop, self.start, budget.progress(), seed, goal, hot, price))

    def try_all(self, candidates: Iterable[list[int]], budget: _Budget | None) -> None:
        """Improve the candidates one after the other while there is budget (None: all)."""
        source = iter(candidates)
        while not self.proved and not (budget is not None and budget.spent):
            start = next(source, None)
            if start is None:
                return
            self.offer(start)
            if budget is not None:
                budget.take()

    def offer(self, start: list[int]) -> None:
        """Improve ``start`` and keep the result unless it is longer."""
        improved = improve(self.shop, start)
        ticks = self.shop.makespan(improved)
        if ticks > self.ticks:
            return
        self.start, self.ticks = improved, ticks
        if (reached := self.seconds(improved)) < self.length:
            self.best, self.length = self.shop.schedule("wave", improved), reached
