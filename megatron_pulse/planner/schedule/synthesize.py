"""The shortest schedule that is found without a solver, for any placement, times and memory.

The classic schedules that fit, list schedules by static rules and paces, and the shortest so far
with its dates shaken; each is squeezed by ``improve``, and the shortest is kept (the project's
scheduling.md, section 3). On the fold this is PULSE's wave:

P = 2, M = 2, equal stages, forward = backward = 1 (stage:microbatch; 10 slots)

========= ==== ==== ==== ==== ==== ==== ==== ==== ==== ====
device 0  F0:0 F0:1 .    F3:0 B3:0 F3:1 B3:1 B0:0 .    B0:1
device 1  .    F1:0 F2:0 F1:1 F2:1 B2:0 B1:0 B2:1 B1:1 .
========= ==== ==== ==== ==== ==== ==== ==== ==== ==== ====
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_pulse.planner.schedule.bounds import lower_bound
from megatron_pulse.planner.schedule.classic import gpipe, interleaved_1f1b, one_f_one_b
from megatron_pulse.planner.schedule.classic_split import zb_h1, zb_v
from megatron_pulse.planner.schedule.improve import improve
from megatron_pulse.planner.schedule.jobshop import JobShop, job_shop
from megatron_pulse.planner.schedule.listing import list_schedule
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import Certificate, ScheduleProblem, Synthesis
from megatron_pulse.planner.schedule.simulate import run
from megatron_pulse.planner.schedule.validate import faults_for

WORK = 60_000
"""Operations placed by list schedules in all; bounds the time spent at some seconds."""


@dataclass(frozen=True)
class Rule:
    """Which of the ready operations of a device comes first: the one of the lowest rank.

    rank = direction * (earliest possible start of the stage in a microbatch)
    + weight * microbatch * (largest device load), with backwards last on request. Weight gradients
    come last of all: they only fill what would be idle, or make room.
    """

    direction: int
    weight: float
    backward_last: bool


RULES = (
    Rule(-1, 0.0, True),
    Rule(1, 0.5, False),
    Rule(1, 1.0, True),
    Rule(-1, 0.0, False),
    Rule(1, 0.5, True),
    Rule(1, 0.25, False),
    Rule(1, 0.0, False),
    Rule(1, 1.0, False),
)

PACES = (0.0, 7 / 6, 13 / 12, 1.0, 1.25, 1.5, 5 / 3)
"""Time between injected microbatches in units of the largest device load; 0: as fast as it goes."""


def synthesize(
    problem: ScheduleProblem, seconds: float = 10.0, effort: int | None = None
) -> Synthesis:
    """The shortest schedule found; never longer than a classic one that fits ``problem``.

    On every stage operations of a kind are in microbatch order. Deterministic: ``effort`` is the
    number of starts to improve (by default by the size of the problem), and ``seconds`` only
    guards against slow machines: no new start begins after it.
    """
    began = time.monotonic()
    shop, bound = job_shop(problem), lower_bound(problem)
    effort = max(len(RULES), WORK // len(shop.duration)) if effort is None else effort
    fitting = classics(problem)
    best, length = None, float("inf")
    for classic in fitting:
        reached = run(problem, classic).makespan
        if reached < length:
            best, length = classic, reached
    current, seen = _Current(shop), set[tuple[int, ...]]()
    for start in _starts(shop, fitting, effort, current):
        if best and (length <= bound * (1 + 1e-9) or time.monotonic() - began > seconds):
            break
        if tuple(start) in seen:
            continue
        seen.add(tuple(start))
        improved = improve(shop, start)
        if not current.offer(improved):
            continue
        schedule = shop.schedule("wave", improved)
        reached = run(problem, schedule).makespan
        if reached < length:
            best, length = schedule, reached
    assert best is not None
    proved = length <= bound * (1 + 1e-9)
    spent = time.monotonic() - began
    return Synthesis(best, Certificate(length, bound, proved, "constructive", spent))


def classics(problem: ScheduleProblem) -> list[Schedule]:
    """The classic schedules that are an answer to ``problem``."""
    found = []
    for make in (gpipe, one_f_one_b, interleaved_1f1b, zb_h1, zb_v):
        try:
            schedule = make(problem.placement, problem.num_microbatches)
        except ValueError:
            continue  # not for this placement
        if not faults_for(problem, schedule):
            found.append(schedule)
    return found


class _Current:
    """The shortest start times so far, in ticks."""

    def __init__(self, shop: JobShop) -> None:
        self.shop = shop
        self.start: list[int] = []

    def offer(self, start: list[int]) -> bool:
        """Take ``start`` unless it is longer; whether it was taken."""
        if self.start and self.shop.makespan(start) > self.shop.makespan(self.start):
            return False
        self.start = start
        return True


def _starts(
    shop: JobShop, fitting: Sequence[Schedule], effort: int, current: _Current
) -> Iterator[list[int]]:
    """Classic schedules, list schedules, then the shortest so far with its dates shaken."""
    for classic in fitting:
        yield shop.earliest(classic)
    for _, (rule, pace, burst) in zip(range(-(-effort // 2)), _ways(shop), strict=False):
        yield _by_rule(shop, rule, pace, burst)
    chance = random.Random(0)
    load = max(map(shop.load, range(shop.placement.num_devices)))
    for _ in range(effort // 2):
        reach = load * chance.choice((0.1, 0.3, 1.0))
        dates = [t + chance.uniform(-reach, reach) for t in current.start]
        yield list_schedule(shop, dates, [0] * shop.num_microbatches)


def _ways(shop: JobShop) -> Iterator[tuple[Rule, float, int]]:
    """Rules, paces and numbers of microbatches injected at once, the most promising first."""
    half = shop.placement.num_devices // 2
    for burst in sorted({1, 2, 3, half, half + 1}):
        for pace in PACES if burst == 1 else PACES[1:]:
            for rule in RULES:
                yield rule, pace, max(1, burst)


def _by_rule(shop: JobShop, rule: Rule, pace: float, burst: int) -> list[int]:
    """Microbatch m enters the first stage at ``pace * load * (m - burst + 1)`` or later."""
    num, count, heads = shop.placement.num_stages, shop.num_microbatches, shop.heads()
    load = max(map(shop.load, range(shop.placement.num_devices)))
    late = 4 * (max(heads) + load * count)
    rank = [
        rule.direction * head + late * ((rule.backward_last and k >= num) + 2 * (k >= 2 * num))
        for k, head in enumerate(heads)
    ]
    release = [int(max(0, m - burst + 1) * pace * load) for m in range(count)]
    dates = [r + rule.weight * load * m for r in rank for m in range(count)]
    return list_schedule(shop, dates, release)
