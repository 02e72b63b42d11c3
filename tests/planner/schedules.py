"""Schedules of stages whose times are given as plain lists."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import replace

from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.planner.schedule.check.simulate import Timeline, simulate
from megatron_pulse.planner.schedule.operations import BACKWARDS, OpType, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem, equal_stages
from megatron_pulse.planner.schedule.search.synthesize import synthesize


def wave(
    placement: Placement,
    num_microbatches: int,
    cap: float | None = None,
    *,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    weight_grad: Sequence[float] | None = None,
    link: float = 0.0,
    effort: int | None = None,
) -> Schedule:
    """Synthesized schedule, as in a plan; equal stages if no times are given."""
    base = equal_stages(placement, num_microbatches, weight_grad is not None, cap)
    problem = replace(
        base,
        forward=tuple(forward or base.forward),
        backward=tuple(backward or base.backward),
        weight_grad=None if weight_grad is None else tuple(weight_grad),
        link=link,
    )
    found = synthesize(problem, seconds=math.inf, effort=effort)
    return replace(found.schedule, name="wave")


def recomputed_anywhere(
    schedule: Schedule, stages: Collection[int], share: float, rng: random.Random
) -> Schedule:
    """``schedule`` with about that share of what ``stages`` compute again as operations of their
    own, anywhere between forward and backward."""
    orders = []
    for order in schedule.order:
        new = list(order)
        for op in order:
            if op.kind in BACKWARDS and op.stage in stages and rng.random() < share:
                first = new.index(op._replace(kind=OpType.FORWARD))
                place = rng.randint(first + 1, new.index(op))
                new.insert(place, op._replace(kind=OpType.RECOMPUTE))
        orders.append(tuple(new))
    return replace(schedule, order=tuple(orders))


def offloaded_anywhere(
    schedule: Schedule, stages: Collection[int], share: float, rng: random.Random
) -> Schedule:
    """``schedule`` where about that share of what ``stages`` keep is on the host from anywhere to
    anywhere between forward and backward."""
    orders = []
    for order in schedule.order:
        new = list(order)
        for op in order:
            if op.kind in BACKWARDS and op.stage in stages and rng.random() < share:
                leaves = rng.randint(new.index(op._replace(kind=OpType.FORWARD)) + 1, new.index(op))
                new.insert(leaves, op._replace(kind=OpType.OFFLOAD))
                comes = rng.randint(leaves + 1, new.index(op))
                new.insert(comes, op._replace(kind=OpType.RELOAD))
        orders.append(tuple(new))
    return replace(schedule, order=tuple(orders))


def run_schedule(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    link: float | tuple[float, ...] = 0.0,
    weight_grad: Sequence[float] | None = None,
) -> Timeline:
    """The schedule's orders run with these times."""
    problem = ScheduleProblem(
        schedule.placement,
        schedule.num_microbatches,
        tuple(forward),
        tuple(backward),
        None if weight_grad is None else tuple(weight_grad),
        link,
    )
    return simulate(problem, schedule)
