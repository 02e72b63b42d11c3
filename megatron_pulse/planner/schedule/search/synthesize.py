"""The shortest schedule that is found without a solver, for any placement, times and memory.

The classic schedules that fit; bounded dynamic programming (``sweep``), which with little memory
looks at everything; templates, list schedules by static rules, the shortest so far with its dates
shaken, each squeezed by ``improve``; then swaps on the critical path (``anneal``). With many
microbatches first a schedule of few, whose steady state is repeated (``extend``). See ../README.md:
Search. On the fold this is PULSE's wave:

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
from megatron_pulse.planner.schedule.bound.order_bound import BOUND_WORK
from megatron_pulse.planner.schedule.bound.path import MicrobatchPath
from megatron_pulse.planner.schedule.classic.names import CLASSICS, SPLIT
from megatron_pulse.planner.schedule.compiled import compiling
from megatron_pulse.planner.schedule.offload import with_offload
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import Certificate, ScheduleProblem, Synthesis
from megatron_pulse.planner.schedule.recompute import with_recomputation
from megatron_pulse.planner.schedule.search.anneal import anneal
from megatron_pulse.planner.schedule.search.beam import beam_templates
from megatron_pulse.planner.schedule.search.extend import extended
from megatron_pulse.planner.schedule.search.improve import improve
from megatron_pulse.planner.schedule.search.jobshop import exact_time, job_shop
from megatron_pulse.planner.schedule.search.listing import list_schedule
from megatron_pulse.planner.schedule.search.starts import (
    by_turns,
    from_template,
    rules_by_growth,
    starts,
    steady,
)
from megatron_pulse.planner.schedule.search.sweep.chain import most_open
from megatron_pulse.planner.schedule.search.sweep.widening import BEHIND, Widening
from megatron_pulse.planner.schedule.search.template import Template

OPERATIONS, MOST_STARTS = 60_000, 250
"""Operations in all starts together, and starts at the most, where neither effort nor time is
limited: seconds for a large problem, less than one for a small."""

CORE = 3
"""Microbatches per device beyond which a schedule is first sought for fewer."""

STEADY_SHARE, CORE_SHARE, STARTS_SHARE, SHAKEN_SHARE = 0.1, 0.6, 0.2, 0.1
"""Of what is left of the effort or time: for many microbatches first for templates and for a
schedule of fewer, then for starts and for shaken dates."""

FEW_SHARE, MANY_SHARE = 0.05, 0.3
"""The same for sweeps: for few states at first, and for many where that is promising."""

OPEN = 8
"""Microbatches under way at once up to which sweeps are tried: with more there are too many
states."""

LOOKS = 20_000
"""Starts of operations that a sweep looks at in the time of one start."""

ROUNDS = (
    (0.4, 1.0, (4.0, 16.0)),
    (0.4, 0.5, (1.0, 1.0)),
    (0.6, 0.25, (1.0, 2.0)),
    (1.0, 0.05, (4.0, 16.0)),
)
"""Annealing: share of what is left, first temperature, prices of memory that is not there. What
is dear keeps the search near what fits, what is cheap lets it through to other shores."""

SWAPS = 2000
"""Swaps of annealing that count as one start: they take about as long."""

LARGE, LARGE_STARTS_SHARE = 5000, 0.35
"""Operations from which annealing begins cold, as there is no time to cool down, and share of the
starts there: a schedule of fewer microbatches is seldom found that repeats."""

FEW, MORE, GROWTH_SHARE = 2, 3, 0.4
"""Microbatches per device of the two shorter steps by which rules are ranked there, and share of
the time for starts that this may take."""

NOISE = (0.1, 0.3, 1.0)
"""How far dates are shaken, in units of the largest device load."""

BOUND_SHARE = 0.25
"""Of the time, after which the lower bound ends; on a machine that is not busy it has by then."""

LONG_S, LEAST_STARTS = 10.0, 5
"""Seconds from which the lower bound may take all of its work, and starts for which it takes as
much as for none; it takes all for ``MOST_STARTS``."""

CORES = 4
"""Repeated parts to try."""

ROUNDED = 1.05
"""Times the fewest ticks, up to which a schedule may be the shortest in the problem's own unit."""

NOTABLE_S = 2.0
"""Seconds of getting ready that are told."""

log = logging.getLogger(__name__)


def synthesize(
    problem: ScheduleProblem,
    seconds: float = 10.0,
    effort: int | None = None,
    templates: Iterable[Template] = (),
    beside: Callable[[Schedule, float], bool] | None = None,
    bounded: bool = True,
) -> Synthesis:
    """The shortest schedule found; never longer than a classic one that fits ``problem``.

    On every stage operations of a kind are in microbatch order. The search ends at the lower bound,
    or after ``seconds`` of this process's time. With ``effort``, the number of starts to improve,
    the clock has no part in the answer; without a limit of time (``math.inf``) the effort is by the
    size of the problem.
    ``templates``, in ticks of ``job_shop(problem)``, are starts that come on top. ``beside`` is
    asked now and then, with the best schedule and bound so far, whether that is enough. What is
    computed again is a part of its backward until the end, and then goes to idle times; what may
    wait on the host is there all the time until it leaves only where it must. Unless
    ``bounded``, the bound is what is found at once: the schedule is the same, where ``effort`` is
    all that ends the search.
    """
    if problem.offloaded is not None:
        return with_offload(
            problem, lambda of, part: synthesize(of, part, effort, bounded=bounded), seconds
        )
    if problem.recompute is not None:
        within = problem.within_backwards
        found = synthesize(within, seconds, effort, templates, beside, bounded)
        return with_recomputation(problem, found)
    get_ready()
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
def get_ready() -> None:
    """Compile what the search runs most, or read it from disk: no search's time is spent on it."""
    began = time.process_time()
    problem = ScheduleProblem(fold(1), 1, (1.0, 1.0), (1.0, 1.0))
    with compiling():
        lower_bound(problem)
        shop = job_shop(problem)
        exact_time(problem, shop)(shop.timed(shop.lines(next(starts(shop)))))
        anneal(shop, improve(shop, next(starts(shop))), float)
        beam_templates(shop, shop.most_load)
        next(Widening(problem, shop).starts(lambda: math.inf, lambda _: 1.0), None)
    if (spent := time.process_time() - began) > NOTABLE_S:
        log.info("compiled the search for schedules in %.1f s; it is kept on disk", spent)


def classics(problem: ScheduleProblem) -> list[Schedule]:
    """The classic schedules that are an answer to ``problem``."""
    found = []
    for name in CLASSICS:
        if (name in SPLIT) != (problem.weight_grad is not None):
            continue
        known = _classic(name, problem.placement, problem.num_microbatches)
        if known is not None and _has_room(problem, known[1]):
            found.append(known[0])
    return found


def _has_room(problem: ScheduleProblem, alive: Sequence[Any]) -> bool:
    """Whether no device ever holds more than its cap, as ``cap_faults`` has it."""
    if problem.cap is None:
        return True
    for device, (counts, cap) in enumerate(zip(alive, problem.cap, strict=True)):
        own = problem.placement.stages_of_device(device)
        each = np.array([problem.most_of(s) for s in own], dtype=np.float64)
        if (counts @ each).max(initial=0.0) > cap * (1 + 1e-9):
            return False
    return True


@lru_cache(maxsize=128)
def _classic(
    name: str, placement: Placement, num_microbatches: int
) -> tuple[Schedule, list[Any]] | None:
    """A classic schedule, proven but for what devices hold, and of each device how many activations
    of each of its stages (columns) it ever has (rows); None if it is not for the placement: what
    waits for itself, or has microbatches in another order, ends nowhere."""
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
    """Time, or a number of starts, that is left; none once ``stop`` says so."""

    def __init__(
        self, seconds: float, effort: int | None, stop: Callable[[], bool] | None = None
    ) -> None:
        self.effort, self.stop = effort, stop
        self.deadline = math.inf if effort is not None else time.process_time() + seconds

    @property
    def spent(self) -> bool:
        """Whether nothing is left."""
        if self.stop is not None and self.stop():
            return True
        return time.process_time() >= self.deadline or self.effort == 0

    def take(self) -> None:
        """One start."""
        if self.effort is not None:
            self.effort -= 1

    def share(self, part: float) -> _Budget:
        """A part of what is left, which is then no longer here; at least one start."""
        if self.effort is not None:
            taken = min(self.effort, max(1, int(self.effort * part)))
            self.effort -= taken
            return _Budget(math.inf, taken, self.stop)
        return _Budget(max(0.0, part * (self.deadline - time.process_time())), None, self.stop)

    def past(self, part: float) -> Callable[[], bool]:
        """Whether a part of the time that is left now is over; never where effort counts."""
        until = time.process_time() + part * (self.deadline - time.process_time())
        return lambda: time.process_time() >= until

    def looks(self) -> Callable[[int], float]:
        """How many starts of operations a sweep may still look at after so many, to take this."""
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
        """What ``anneal`` asks for, so that it takes all of this."""
        if self.effort is not None:
            swaps = max(1, SWAPS * self.effort)
            return lambda done: done / swaps
        began = time.process_time()
        length = max(1e-9, self.deadline - began)
        return lambda _: 1.0 if self.spent else (time.process_time() - began) / length


class _ScheduleSearch:
    """The shortest schedule so far, in the problem's unit, and its start times in ticks."""

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
        """Whether no schedule is shorter."""
        return self.length <= self.bound * (1 + 1e-9)

    def try_every_order(self) -> None:
        """Prove what a small problem can do without, where one device's bounds do not."""
        if len(self.problem.placement.starts) == 1:
            path = MicrobatchPath(self.problem)
            self.bound = max(self.bound, exhaustive_bound(path, self.length))

    def spend(self, budget: _Budget, templates: Iterable[Template] = ()) -> None:
        """Search until the bound is reached or the budget spent."""
        given = (start for t in templates for start in from_template(self.shop, t))
        self.try_all(chain(self.fitting, given), None)
        if self.proved or budget.spent:
            return
        sweeps = None
        one_chain = len(self.problem.placement.starts) == 1
        if one_chain and most_open(self.shop) <= OPEN:
            sweeps = Widening(self.problem, self.shop)
            self.sweep(sweeps, budget.share(FEW_SHARE))
        count = CORE * self.problem.placement.num_devices
        large = len(self.start) > LARGE
        if self.problem.num_microbatches > count:
            part = budget.share(STEADY_SHARE)
            self.try_all(steady(self.shop, lambda: part.spent), part)
            if not large:
                part = budget.share(CORE_SHARE)
                self.try_all(self.by_core(count, part), None)
        part = budget.share(LARGE_STARTS_SHARE if large else STARTS_SHARE)
        sources = [starts(self.shop)]
        if not self.problem.waits_alike:
            sources.append(self.by_holding())
        if large and self.problem.num_microbatches > count:
            sources.append(self.by_growth(part.past(GROWTH_SHARE)))
        self.try_all(by_turns(*sources), part)
        part = budget.share(SHAKEN_SHARE)
        self.try_all(self.shaken(), part)
        if sweeps is not None and sweeps.reached <= BEHIND * self.ticks:
            self.sweep(sweeps, budget.share(MANY_SHARE))
        for seed, (share, hot, price) in enumerate(ROUNDS):
            if self.proved or budget.spent:
                return
            self.anneal(budget.share(share), seed, hot, price)

    def sweep(self, sweeps: Widening, budget: _Budget) -> None:
        """Sweep over counts while there is budget; a sweep that leaves nothing out is a proof."""
        if not budget.spent:
            self.try_all(sweeps.starts(lambda: self.length, budget.looks()), None)
            self.bound = max(self.bound, sweeps.bound)

    def anneal(self, budget: _Budget, seed: int, hot: float, price: tuple[float, float]) -> None:
        """Take all of the budget to anneal the shortest so far."""
        goal = math.floor(self.bound * self.ticks / self.length + 1e-6)
        hot = min(hot, ROUNDS[-1][1]) if len(self.start) > LARGE else hot
        self.offer(anneal(self.shop, self.start, budget.progress(), seed, goal, hot, price))

    def try_all(self, candidates: Iterable[list[int]], budget: _Budget | None) -> None:
        """Improve one after the other while there is budget (None: all)."""
        source = iter(candidates)
        while not self.proved and not (budget is not None and budget.spent):
            start = next(source, None)
            if start is None:
                return
            self.offer(start)
            if budget is not None:
                budget.take()

    def offer(self, start: list[int]) -> None:
        """Improve ``start`` and keep it unless it is longer."""
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
        """Starts that hold all until weight gradients: where more fits a rule may lead astray."""
        yield from starts(job_shop(self.problem.holding_all))

    def by_growth(self, stop: Callable[[], bool]) -> Iterator[list[int]]:
        """List schedules by rules that are ranked with fewer microbatches, until ``stop``."""
        devices = self.problem.placement.num_devices
        few, more = (
            job_shop(replace(self.problem, num_microbatches=each * devices)) for each in (FEW, MORE)
        )
        return rules_by_growth(self.shop, few, more, stop)

    def shaken(self) -> Iterator[list[int]]:
        """List schedules by the dates of the shortest so far with some noise."""
        chance = random.Random(0)
        shop = self.shop
        load = shop.most_load
        while True:
            reach = load * chance.choice(NOISE)
            dates = [t + chance.uniform(-reach, reach) for t in self.start]
            yield list_schedule(shop, dates, [0] * shop.num_microbatches)
