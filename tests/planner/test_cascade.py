"""Cascades: the cuts of several chains over the same devices, and one schedule for all."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from megatron_pulse.backbone.costs import ChainCosts, SkipCost
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import Partition, Placement, fold, opposite
from megatron_pulse.planner.partition.evaluate import MemoryRule, evaluate
from megatron_pulse.planner.partition.find import Goal, PartitionError, find_partition
from megatron_pulse.planner.partition.memory import in_flight
from megatron_pulse.planner.schedule.bound.bounds import lower_bound
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.ilp.solvers import Status
from megatron_pulse.planner.schedule.problem import ScheduleProblem, equal_stages
from megatron_pulse.planner.schedule.search.jobshop import job_shop
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.schedule.solve import solve
from tests.planner.cp_sat import shortest_by_cp_sat


def chains_of(rng: random.Random, lengths: tuple[int, ...], skips: bool) -> ChainCosts:
    """Chains of random times in whole numbers, with nested skips or none."""
    num = sum(lengths)
    starts = tuple(np.cumsum([0, *lengths[:-1]]).tolist())
    forward = tuple(float(rng.randint(1, 9)) for _ in range(num))
    nested = tuple(
        SkipCost(start + i, start + length - 1 - i, 1)
        for start, length in zip(starts, lengths, strict=True)
        for i in range(length // 2 - 1)
    )
    sizes = tuple(rng.randint(1, 5) for _ in range(num))
    return ChainCosts(
        tuple(f"layer{i}" for i in range(num)),
        forward,
        tuple(2 * seconds for seconds in forward),
        sizes,
        sizes,
        tuple(0 if i in starts else 1 for i in range(num)),
        nested if skips else (),
        starts=starts,
    )


def best_load(costs: ChainCosts, placement: Placement, goal: Goal) -> float | None:
    """The least load of all cuts of two chains, by trying each."""
    each, middle = placement.num_stages // 2 - 1, costs.starts[1]
    rule = None if goal.memory is None else goal.memory(placement)
    found: list[float] = []
    for first in itertools.combinations(range(1, middle), each):
        for second in itertools.combinations(range(middle + 1, len(costs)), each):
            partition = Partition(placement, (0, *first, middle, *second, len(costs)))
            home = partition.device_of_layer
            if goal.collocate and any(home(s.source) != home(s.destination) for s in costs.skips):
                continue
            costing = evaluate(costs, partition, goal.link, memory=rule)
            if rule is None or max(costing.memory_bytes) <= rule.limit_bytes:
                found.append(max(costing.load_s))
    return min(found, default=None)


def test_cuts_of_two_chains_are_the_best_of_all() -> None:
    rng, behind = random.Random(0), []
    for trial in range(10):
        devices = rng.choice((2, 2, 3))
        lengths = rng.randint(2 * devices, 8), rng.randint(2 * devices, 8)
        costs = chains_of(rng, lengths, skips=trial % 2 == 0)
        placement = opposite(devices)
        goal = Goal(collocate=trial % 2 == 0, link=Link(0.1 * (trial % 3)))
        if trial % 5 == 4:
            limit = rng.uniform(1.0, 1.4) * 9 * sum(costs.parameters) / devices
            goal = replace(
                goal, memory=lambda p, limit=limit: MemoryRule(limit, 5.0, in_flight(p, 2))
            )
        best = best_load(costs, placement, goal)
        if best is None:
            with pytest.raises(PartitionError):
                find_partition(costs, placement, goal, explain=False)
            continue
        partition = find_partition(costs, placement, goal)
        found = max(evaluate(costs, partition, goal.link).load_s)
        assert found <= 1.05 * best, (trial, partition.cuts)
        behind += [trial] * (found > best * (1 + 1e-9))
    assert len(behind) <= 1, behind


def shortest(problem: ScheduleProblem) -> int:
    """The makespan of the shortest schedule, proved by CP-SAT."""
    found = shortest_by_cp_sat(job_shop(problem), 20.0, 10_000)
    assert found.status is Status.OPTIMAL and found.bound is not None
    return found.bound


def random_problem(rng: random.Random, split: bool, link: bool) -> ScheduleProblem:
    """Two chains over two devices, times in whole numbers, few microbatches."""
    placement = opposite(2)

    def times() -> tuple[float, ...]:
        return tuple(float(rng.randint(1, 3)) for _ in range(placement.num_stages))

    return ScheduleProblem(
        placement,
        rng.randint(1, 3),
        times(),
        times(),
        times() if split else None,
        float(rng.randint(1, 2)) if link else 0.0,
    )


def test_no_schedule_is_below_the_bound_and_ours_are_the_shortest() -> None:
    """Found constructively, and what an integer program proves holds."""
    rng = random.Random(1)
    for trial in range(8):
        problem = random_problem(rng, split=trial % 3 == 0, link=trial % 2 == 0)
        if trial % 4 == 3:
            problem = replace(problem, cap=(5.0, 5.0))
        least = shortest(problem)
        assert lower_bound(problem) <= least
        found = synthesize(problem, effort=30)
        assert not faults_for(problem, found.schedule)
        assert found.certificate.makespan <= 1.02 * least, trial
        if trial == 2:
            made = solve(problem, 2.0, "highs").certificate
            assert made.lower_bound <= least <= made.makespan
            assert not made.proved or made.makespan == least


@pytest.mark.parametrize("split", [False, True])
def test_opposite_folds_fill_each_other(split: bool) -> None:
    """Sooner than one chain after the other, within their memory together."""
    alone = equal_stages(fold(4), 8, split)
    both = equal_stages(opposite(4), 8, split, cap=16)
    found, one = synthesize(both, effort=20), synthesize(alone, effort=20)
    assert not faults_for(both, found.schedule)
    assert found.certificate.makespan < 0.96 * 2 * one.certificate.makespan
    assert (
        simulate(both, found.schedule).idle_share < 0.5 * simulate(alone, one.schedule).idle_share
    )


def test_a_chain_alone_is_a_problem_of_its_own() -> None:
    rng = random.Random(2)
    problem = random_problem(rng, split=True, link=True)
    for number, homes in enumerate(((0, 1, 1, 0), (1, 0, 0, 1))):
        alone = problem.chain(number)
        assert alone.placement.device_of_stage == homes
        assert alone.forward == problem.forward[4 * number : 4 * number + 4]
        assert lower_bound(alone) <= lower_bound(problem)
