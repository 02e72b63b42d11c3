"""Constructive search for the shortest schedule, for any placement, times and memory; no solver.

The search runs these methods in order:

* the classic schedules that fit;
* bounded dynamic programming (``sweep``), which is exhaustive if memory is small;
* templates, list schedules by static rules, and list schedules with perturbed dates of the best so
  far, each compacted by ``improve``;
* swaps on the critical path (``anneal``).

With many microbatches, the search first solves a smaller problem and repeats its steady state
(``extend``). See ../README.md: Search. On the fold the result is PULSE's wave:

P = 2, M = 2, equal stages, forward = backward = 1 (stage:microbatch; 10 slots)

========= ==== ==== ==== ==== ==== ==== ==== ==== ==== ====
device 0  F0:0 F0:1 .    F3:0 B3:0 F3:1 B3:1 B0:0 .    B0:1
device 1  .    F1:0 F2:0 F1:1 F2:1 B2:0 B1:0 B2:1 B1:1 .
========= ==== ==== ==== ==== ==== ==== ==== ==== ==== ====
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import chain, islice
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
from megatron_pulse.planner.schedule.search.dp.chain import max_in_flight_microbatches
from megatron_pulse.planner.schedule.search.dp.growing_width import BEHIND, GrowingSweeps
from megatron_pulse.planner.schedule.search.jobshop import exact_time, job_shop
from megatron_pulse.planner.schedule.search.list_scheduling import list_schedule
from megatron_pulse.planner.schedule.search.repeat_steady_state import extended
from megatron_pulse.planner.schedule.search.seeds import (
    from_template,
    round_robin,
    rules_by_growth,
    starts,
    steady_templates,
)
from megatron_pulse.planner.schedule.search.template import Template

OPERATIONS, MOST_STARTS = 60_000, 250
"""Limits without effort or time limit: operations in all starts together, and starts.

A large problem takes seconds, a small one less than one.
"""

CORE = 3
"""Microbatches per device above which the search first solves a problem with fewer."""

STEADY_SHARE, CORE_SHARE, STARTS_SHARE, SHAKEN_SHARE = 0.1, 0.6, 0.2, 0.1
"""Shares of the remaining effort or time.

For many microbatches, first templates and a schedule of fewer microbatches; then starts and
perturbed dates.
"""

FEW_SHARE, MANY_SHARE = 0.05, 0.3
"""Shares of sweeps: for few states at first, and for many states if promising."""

OPEN = 8
"""Largest number of microbatches in flight for which sweeps are tried; more give too many
states."""

LOOKS = 20_000
"""Operation starts that a sweep visits in the time of one start."""

ROUNDS = (
    (0.4, 1.0, (4.0, 16.0)),
    (0.4, 0.5, (1.0, 1.0)),
    (0.6, 0.25, (1.0, 2.0)),
    (1.0, 0.05, (4.0, 16.0)),
)
"""Rounds of annealing: share of the rest, first temperature, prices of missing memory.

A high price keeps the search near feasible orders; a low price lets it cross infeasible ones.
"""

SWAPS = 2000
"""Swaps of annealing that count as one start; they take about as long."""

LARGE, LARGE_STARTS_SHARE = 5000, 0.35
"""Problem size in operations from which annealing begins cold, and the share of starts there.

A large problem leaves no time to cool down, and seldom has a smaller schedule that repeats.
"""

FEW, MORE, GROWTH_SHARE = 2, 3, 0.4
"""Microbatches per device of two smaller problems that rank the rules, and their share of time."""

NOISE = (0.1, 0.3, 1.0)
"""Sizes of perturbations of dates, in units of the largest device load."""

BOUND_SHARE = 0.25
"""Share of the time after which the lower bound stops; on an idle machine it is done by then."""

LONG_S, LEAST_STARTS = 10.0, 5
"""Limits of the lower bound's work.

From ``LONG_S`` seconds on the bound may take all of its work. Fewer than ``LEAST_STARTS`` starts
count as that many; ``MOST_STARTS`` allow all of the work.
"""

CORES = 4
"""Number of repeated parts to try."""

ROUNDED = 1.05
"""Largest ratio to the fewest ticks of a schedule that may be the shortest in the exact unit."""

NOTABLE_S = 2.0
"""Seconds of compilation above which the time is logged."""

log = logging.getLogger(__name__)


def synthesize(
    problem: ScheduleProblem,
    seconds: float = 10.0,
    effort: int | None = None,
    templates: Iterable[Template] = (),
    beside: Callable[[Schedule, float], bool] | None = None,
    bounded: bool = True,
) -> Synthesis:
    """Find a short schedule; it is never longer than a classic one that fits ``problem``.

    Operations of a type on a stage are in microbatch order. The search ends at the lower bound, or
    after ``seconds`` of this process's time. With ``effort``, the number of starts to improve, the
    result does not depend on the clock. Without a time limit (``math.inf``) the size of the problem
    determines the effort.

    ``templates``, in ticks of ``job_shop(problem)``, are additional starts. ``beside`` is called
    now and then with the best schedule and bound so far; True ends the search. Recomputation is
    part of its backward during the search, and then moves to idle times. Activations under offload
    count as absent during the search, and then leave only where memory requires. Unless
    ``bounded``, the certificate has only a quick bound; the schedule is the same if ``effort``
    alone ends the search.
    """
    if problem.offload_bytes is not None:
        return with_offload(
            problem, lambda of, part: synthesize(of, part, effort, bounded=bounded), seconds
        )
    if problem.recompute_s is not None:
        within = problem.within_backwards
        found = synthesize(within, seconds, effort, templates, beside, bounded)
        return with_recomputation(problem, found)
    compile_search()
    began = time.process_time()
    if effort is None and seconds == math.inf:
        operations = problem.num_microbatches * problem.placement.num_stages * len(problem.kinds)
        effort = min(MOST_STARTS, max(16, OPERATIONS // operations))
    share = seconds / LONG_S if effort is None else max(effort, LEAST_STARTS) / MOST_STARTS
    until = math.inf if effort is not None else began + BOUND_SHARE * seconds
    search = _ScheduleSearch(problem, BOUND_WORK * min(1.0, share) if bounded else None, until)
    left = seconds - (time.process_time() - began)
    stop = None if beside is None else lambda: beside(search.best, search.bound)
    search.spend(_Budget(left, effort, stop), tuple(templates))
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
    if (spent := time.process_time() - began) > NOTABLE_S:
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
    """Remaining time, or remaining number of starts; exhausted once ``stop`` is true."""

    def __init__(
        self, seconds: float, effort: int | None, stop: Callable[[], bool] | None = None
    ) -> None:
        self.effort, self.stop = effort, stop
        self.deadline = math.inf if effort is not None else time.process_time() + seconds

    @property
    def spent(self) -> bool:
        if self.stop is not None and self.stop():
            return True
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
            return _Budget(math.inf, taken, self.stop)
        return _Budget(max(0.0, part * (self.deadline - time.process_time())), None, self.stop)

    def past(self, part: float) -> Callable[[], bool]:
        """Predicate that turns true after a part of the remaining time; never with effort."""
        until = time.process_time() + part * (self.deadline - time.process_time())
        return lambda: time.process_time() >= until

    def looks(self) -> Callable[[int], float]:
        """Function from operation starts visited to the number that a sweep may still visit."""
        if self.effort is not None:
            most = LOOKS * self.effort
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
            swaps = max(1, SWAPS * self.effort)
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
        most = ROUNDED * min(self.shop.makespan(start) for start, _ in begun)
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

    def spend(self, budget: _Budget, templates: Iterable[Template] = ()) -> None:
        """Search until the bound is reached or the budget is spent."""
        given = (start for t in templates for start in from_template(self.shop, t))
        self.try_all(chain(self.fitting, given), None)
        if self.proved or budget.spent:
            return
        sweeps = None
        one_chain = len(self.problem.placement.starts) == 1
        if one_chain and max_in_flight_microbatches(self.shop) <= OPEN:
            sweeps = GrowingSweeps(self.problem, self.shop)
            self.sweep(sweeps, budget.share(FEW_SHARE))
        count = CORE * self.problem.placement.num_devices
        large = len(self.start) > LARGE
        if self.problem.num_microbatches > count:
            part = budget.share(STEADY_SHARE)
            self.try_all(steady_templates(self.shop, lambda: part.spent), part)
            if not large:
                part = budget.share(CORE_SHARE)
                self.try_all(self.by_core(count, part), None)
        part = budget.share(LARGE_STARTS_SHARE if large else STARTS_SHARE)
        sources = [starts(self.shop)]
        if not self.problem.wgrad_holds_all:
            sources.append(self.by_holding())
        if large and self.problem.num_microbatches > count:
            sources.append(self.by_growth(part.past(GROWTH_SHARE)))
        self.try_all(round_robin(*sources), part)
        part = budget.share(SHAKEN_SHARE)
        self.try_all(self.shaken(), part)
        if sweeps is not None and sweeps.reached <= BEHIND * self.ticks:
            self.sweep(sweeps, budget.share(MANY_SHARE))
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

    def by_core(self, count: int, budget: _Budget) -> Iterator[list[int]]:
        """The best schedule of ``count`` microbatches, its steady state repeated."""
        core = _ScheduleSearch(replace(self.problem, num_microbatches=count), bound_work=0.0)
        core.spend(budget)
        yield from islice(extended(core.shop, core.start, self.shop), CORES)

    def by_holding(self) -> Iterator[list[int]]:
        """Starts of the problem in which activations keep their largest size until weight
        gradients.

        Rules that use the freed memory can lead astray.
        """
        yield from starts(job_shop(self.problem.holding_peaks))

    def by_growth(self, stop: Callable[[], bool]) -> Iterator[list[int]]:
        """List schedules by rules that are ranked with fewer microbatches, until ``stop``."""
        devices = self.problem.placement.num_devices
        few, more = (
            job_shop(replace(self.problem, num_microbatches=each * devices)) for each in (FEW, MORE)
        )
        return rules_by_growth(self.shop, few, more, stop)

    def shaken(self) -> Iterator[list[int]]:
        """List schedules with randomly perturbed dates of the best schedule."""
        chance = random.Random(0)
        shop = self.shop
        load = shop.most_load
        while True:
            reach = load * chance.choice(NOISE)
            dates = [t + chance.uniform(-reach, reach) for t in self.start]
            yield list_schedule(shop, dates, [0] * shop.num_microbatches)
